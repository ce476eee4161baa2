"""The order of rows: an endless, seeded stream of epochs that can be stopped anywhere and taken up again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class PromptCursor:
    """Row numbers in the order in which they are trained on.

    Every epoch is a permutation of all rows, drawn from (seed, epoch) alone, or the order of the file without
    ``shuffle``. A batch runs across the border of two epochs, so no row is ever skipped or repeated out of turn.

    >>> cursor = PromptCursor(rows=3, seed=0, shuffle=False)
    >>> cursor.take(2), cursor.take(2), cursor.epoch
    ([0, 1], [2, 0], 1)
    >>> state = cursor.state()
    >>> straight = cursor.take(4)
    >>> cursor.restore(state)
    >>> cursor.take(4) == straight
    True
    """

    def __init__(self, rows: int, seed: int, shuffle: bool) -> None:
        if rows < 1:
            raise ValueError(f"rows: {rows}; there is nothing to go through")
        if seed < 0:
            raise ValueError(f"seed: {seed} is negative")
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._taken = 0
        self._order_of = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def epoch(self) -> int:
        """Complete passes so far."""
        return self._taken // self._rows

    def take(self, n: int) -> list[int]:
        """The next ``n`` row numbers."""
        if n < 1:
            raise ValueError(f"n: {n}; at least one row must be taken")
        taken: list[int] = []
        while len(taken) < n:
            epoch, start = divmod(self._taken, self._rows)
            part = self._permutation(epoch)[start : start + n - len(taken)]
            taken.extend(part.tolist())
            self._taken += len(part)
        return taken

    def state(self) -> dict[str, Any]:
        """All there is to know; small enough for any JSON file."""
        return {"rows": self._rows, "seed": self._seed, "shuffle": self._shuffle, "taken": self._taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken. ValueError when it is of other rows, another seed or another order."""
        mine = self.state()
        if state.keys() != mine.keys():
            raise ValueError(f"cursor state: keys {sorted(state)}, expected {sorted(mine)}")
        changed = [
            f"{key} was {state[key]}, is {mine[key]}" for key in ("rows", "seed", "shuffle") if state[key] != mine[key]
        ]
        if changed:
            raise ValueError(f"the order of the rows cannot be continued: {'; '.join(changed)}")
        taken = state["taken"]
        if isinstance(taken, bool) or not isinstance(taken, int) or taken < 0:
            raise ValueError(f"cursor state: taken is {taken!r}, not a count")
        self._taken = taken

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order_of != epoch:
            if self._shuffle:
                self._order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self._rows)
            else:
                self._order = np.arange(self._rows)
            self._order_of = epoch
        return self._order


def steps_for_epochs(rows: int, prompts_per_step: int, epochs: int) -> tuple[int, int]:
    """How many whole steps ``epochs`` passes hold, and how many rows are left over at the very end.

    Only the last pass can leave rows over, at most ``prompts_per_step`` - 1: batches run across epoch borders. 13 rows
    in batches of 4 are 3 steps and one row left over; two passes are 6 steps and two.

    >>> steps_for_epochs(13, 4, 1), steps_for_epochs(13, 4, 2), steps_for_epochs(13, 4, 4)
    ((3, 1), (6, 2), (13, 0))
    """
    for name, value in (("rows", rows), ("prompts_per_step", prompts_per_step), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
    return divmod(rows * epochs, prompts_per_step)
