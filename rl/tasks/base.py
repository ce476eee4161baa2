"""What a task is: rows to learn from and a grader that needs nothing but the row.

The splits of a generated task are disjoint by construction: a hash of the question itself decides which split it
belongs to, so no seed and no number of rows can move a question from one to the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import xxhash

Split = Literal["train", "eval", "warm"]
SPLITS: tuple[Split, ...] = ("train", "eval", "warm")


class Task(Protocol):
    """A source of rows and the grader that goes with it."""

    name: str

    def rows(self, split: Split, n: int, seed: int) -> Iterator[dict[str, Any]]:
        """``n`` rows of a split, the same for the same seed; each has ``prompt`` and ``answer``."""
        ...

    def grade(self, completion: str, answer: Any, columns: Mapping[str, Any] | None = None) -> float:
        """From 0 (wrong) to 1 (right). ``columns`` are the row's other columns; most tasks do not need them."""
        ...


def split_of(question: str) -> Split:
    """Which split a question belongs to: 1/8 of all are held out, 2/8 are for the warm start, 5/8 for training.

    >>> split_of("5938"), split_of("5938")
    ('train', 'train')
    """
    bucket = xxhash.xxh3_64_intdigest(question.encode("utf-8")) % 8
    if bucket == 0:
        return "eval"
    return "warm" if bucket <= 2 else "train"


def draw(
    make: Callable[[random.Random], dict[str, Any]], question: Callable[[dict[str, Any]], str], split: Split, seed: int
) -> Iterator[dict[str, Any]]:
    """An endless stream of rows of one split, thrown until they fall into it. Seeded by (split, seed)."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
    rng = random.Random(f"{split}/{seed}")
    while True:
        row = make(rng)
        if split_of(question(row)) == split:
            yield row


def check_options(task: str, options: Mapping[str, Any], allowed: Mapping[str, int]) -> dict[str, int]:
    """Options of a built-in task over their defaults ``allowed``; an unknown one or a wrong type is a ValueError."""
    for name, value in options.items():
        if name not in allowed:
            raise ValueError(f"data.task_options.{name}: {task} knows only {', '.join(sorted(allowed))}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"data.task_options.{name}: {value!r} is not a whole number of 0 or more")
    return {**allowed, **options}
