"""Graders and their combination; typed outcomes.

``REWARDS`` names the built-in components. ``rl.rewards.load`` finds a user's own function, ``rl.rewards.component``
calls either kind, ``rl.rewards.parts`` reads what they return and ``rl.rewards.combine`` makes one score of it. Where
they run, with deadlines, is the business of ``actors/rewards.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl.rewards.builtin import exact_match, format, length, task
from rl.rewards.maths import math
from rl.rewards.parts import Part, RewardContractError, Unscorable

REWARDS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "math": math,
    "format": format,
    "length": length,
    "task": task,
}

__all__ = ["REWARDS", "Part", "RewardContractError", "Unscorable"]
