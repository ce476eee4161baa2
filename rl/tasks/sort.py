"""Sort digits: ``sort 5938=`` -> ``3589``. Small enough that a 111k-parameter model learns it in minutes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from rl.tasks.base import Split, check_options, draw


class Sort:
    """Strings of ``min_digits`` to ``max_digits`` digits; every length is as likely as every other."""

    name = "sort"

    def __init__(self, **options: Any) -> None:
        values = check_options("builtin:sort", options, {"min_digits": 4, "max_digits": 6})
        self.min_digits, self.max_digits = values["min_digits"], values["max_digits"]
        if not 1 <= self.min_digits <= self.max_digits:
            raise ValueError(
                f"data.task_options: need 1 <= min_digits <= max_digits (seen: {self.min_digits}, {self.max_digits})"
            )

    def rows(self, split: Split, n: int, seed: int) -> Iterator[dict[str, Any]]:
        """See ``Task.rows``.

        >>> [(row["prompt"], row["answer"]) for row in Sort(min_digits=4).rows("train", 1, seed=0)]
        [('sort 65055=', '05556')]
        """
        return islice(draw(self._row, lambda row: row["digits"], split, seed), n)

    def _row(self, rng: random.Random) -> dict[str, Any]:
        digits = "".join(rng.choices("0123456789", k=rng.randint(self.min_digits, self.max_digits)))
        return {"prompt": f"sort {digits}=", "answer": "".join(sorted(digits)), "digits": digits}

    def grade(self, completion: str, answer: Any, columns: Mapping[str, Any] | None = None) -> float:
        """1.0 for exactly the sorted digits, else 0.0; white space around them does not matter.

        >>> Sort().grade("3589", "3589"), Sort().grade("3589 or 5938", "3589")
        (1.0, 0.0)
        """
        return float(completion.strip() == str(answer))
