"""Any task of reasoning-gym by its name: procedural problems with their own graders."""

from __future__ import annotations

import difflib
import importlib.util
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rl.tasks.base import SPLITS, Split, split_of

DRAWS: dict[Split, int] = {"train": 2, "warm": 6, "eval": 12}  # items to draw per row; 8/5, 4 and 8 are expected
ENTRY = ("entry_index", "entry_seed", "entry_size")
REGISTERED = re.compile(r'^(?:DATASET_NAME = |register_dataset\()"([^"]+)"', re.MULTILINE)


class GymTask:
    """Rows of ``reasoning_gym.create_dataset(name, **options)``; ``options`` are checked by the task itself.

    A row carries ``entry_index``, ``entry_seed`` and ``entry_size`` beside its question: the grader makes that entry
    again and hands it to the task's own ``score_answer``, so nothing of it has to survive a trip through a file.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = f"reasoning_gym:{name}"
        self._task, self._options = name, dict(options)
        known = known_tasks()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"{self.name}: no such task in reasoning-gym ({len(known)} tasks){hint}")
        for reserved in ("seed", "size"):
            if reserved in options:
                raise ValueError(f"data.task_options.{reserved}: is set by run.seed and data.rows, not here")
        self._made: dict[tuple[int, int], Any] = {}

    def rows(self, split: Split, n: int, seed: int) -> Iterator[dict[str, Any]]:
        """See ``Task.rows``. ValueError where the task cannot fill the split, as a task with few questions cannot."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
        size = DRAWS[split] * n + 400
        dataset = self._dataset(seed, size)
        found = 0
        for index in range(size):
            if found == n:
                return
            entry = dataset[index]
            if split_of(entry["question"]) == split:
                found += 1
                row = {"prompt": entry["question"], "answer": entry["answer"]}
                yield row | {"entry_index": index, "entry_seed": seed, "entry_size": size}
        if found < n:
            raise ValueError(f"{self.name}: only {found} of {n} rows found for the {split} split; ask for fewer rows")

    def grade(self, completion: str, answer: Any, columns: Mapping[str, Any] | None = None) -> float:
        """The task's own score, from 0 to 1. ValueError when the row does not say which entry it is."""
        if columns is None or any(key not in columns for key in ENTRY):
            raise ValueError(f"{self.name}: the row has no {', '.join(ENTRY)}; was it made by this task?")
        index, seed, size = (int(columns[key]) for key in ENTRY)
        dataset = self._dataset(seed, size)
        return float(dataset.score_answer(completion.strip(), dataset[index]))

    def _dataset(self, seed: int, size: int) -> Any:
        if (seed, size) not in self._made:
            self._made[seed, size] = self._create(seed, size)
        return self._made[seed, size]

    def _create(self, seed: int, size: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a library that reasoning-gym imports
            import reasoning_gym
        try:
            return reasoning_gym.create_dataset(self._task, seed=seed, size=size, **self._options)
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f"{self.name} with data.task_options {self._options} and {size} items: {error}") from error


@cache
def known_tasks() -> list[str]:
    """The names of all tasks, read from the library's source: importing it takes seconds."""
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None and spec.origin is not None
    names: set[str] = set()
    for file in Path(spec.origin).parent.rglob("*.py"):
        names.update(REGISTERED.findall(file.read_text(encoding="utf-8")))
    return sorted(names)
