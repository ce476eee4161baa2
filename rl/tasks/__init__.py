"""The built-in tasks and reasoning-gym's, found by the name that ``data.train`` gives them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from rl.tasks.arithmetic import Arithmetic
from rl.tasks.base import Split, Task, split_of
from rl.tasks.gsm8k import GSM8K
from rl.tasks.gym import GymTask
from rl.tasks.sort import Sort

__all__ = ["TASKS", "Split", "Task", "find_task", "split_of"]

FACTORIES: dict[str, Callable[..., Task]] = {"sort": Sort, "arithmetic": Arithmetic, "gsm8k": GSM8K}
TASKS: dict[str, Task] = {name: make() for name, make in FACTORIES.items()}
"""Every built-in task with its default options."""


def find_task(source: str, options: Mapping[str, Any] | None = None) -> Task | None:
    """The task that a source names (``builtin:NAME``, ``reasoning_gym:NAME``), or None for files and data sets.

    ValueError for a name that does not exist, with the nearest one, and for options that the task does not have.

    >>> find_task("builtin:sort").name, find_task("rows.jsonl")
    ('sort', None)
    """
    kind, colon, name = source.partition(":")
    if not colon or kind not in ("builtin", "reasoning_gym"):
        return None
    if kind == "reasoning_gym":
        return GymTask(name, options or {})
    if name not in FACTORIES:
        near = difflib.get_close_matches(name, FACTORIES, n=1)
        hint = f"; did you mean builtin:{near[0]}?" if near else ""
        raise ValueError(f"{source}: no such task; there are {', '.join(FACTORIES)}{hint}")
    return FACTORIES[name](**(options or {}))
