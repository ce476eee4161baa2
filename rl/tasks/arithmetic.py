"""Addition and subtraction: ``12+7=`` -> ``19``. For models that already know what a number is."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from rl.tasks.base import Split, check_options, draw

INTEGER = re.compile(r"[-+]?\d+")


class Arithmetic:
    """Two numbers from 0 to ``max_value``, added or subtracted."""

    name = "arithmetic"

    def __init__(self, **options: Any) -> None:
        self.max_value = check_options("builtin:arithmetic", options, {"max_value": 99})["max_value"]
        if self.max_value < 20:
            raise ValueError(f"data.task_options.max_value: {self.max_value} leaves too few questions; at least 20")

    def rows(self, split: Split, n: int, seed: int) -> Iterator[dict[str, Any]]:
        """See ``Task.rows``."""
        return islice(draw(self._row, lambda row: row["prompt"], split, seed), n)

    def _row(self, rng: random.Random) -> dict[str, Any]:
        left, right = rng.randint(0, self.max_value), rng.randint(0, self.max_value)
        if rng.random() < 0.5:
            return {"prompt": f"{left}+{right}=", "answer": str(left + right)}
        return {"prompt": f"{left}-{right}=", "answer": str(left - right)}

    def grade(self, completion: str, answer: Any, columns: Mapping[str, Any] | None = None) -> float:
        """1.0 when the whole completion is that integer, else 0.0.

        >>> Arithmetic().grade(" 19", "19"), Arithmetic().grade("019", "19"), Arithmetic().grade("19 or 20", "19")
        (1.0, 1.0, 0.0)
        """
        text = completion.strip()
        return float(INTEGER.fullmatch(text) is not None and len(text) <= 64 and int(text) == int(str(answer)))
