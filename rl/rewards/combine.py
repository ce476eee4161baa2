"""Components to one score: the weighted sum, with a typed outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl.rewards.parts import Part
from rl.types import Outcome, Score

_UNSCORED: tuple[Outcome, ...] = ("timeout", "error", "invalid")


def combine(labels: Sequence[str], weights: Sequence[float], parts: Sequence[Part]) -> Score:
    """The score of one completion: reward = sum of weight x component, ``parts`` as they were before weighting.

    If any component has no number the sample is unscored (reward None) with that component's outcome; of several,
    timeout comes before error before invalid. Otherwise the outcome is the FIRST component's: list the one that says
    right or wrong first.

    >>> combine(["match", "length"], [1.0, 0.5], [Part(1.0, "ok"), Part(-0.5, "wrong")]).reward
    0.75
    """
    assert len(labels) == len(weights) == len(parts) > 0, (labels, weights, parts)
    shown = {label: part.value for label, part in zip(labels, parts, strict=True)}
    assert len(shown) == len(labels), labels
    for outcome in _UNSCORED:
        details = [part.detail for part in parts if part.outcome == outcome]
        if details:
            return Score(None, outcome, shown, "\n".join(text for text in details if text))
    reward = math.fsum(weight * (part.value or 0.0) for weight, part in zip(weights, parts, strict=True))
    if not math.isfinite(reward):
        return Score(None, "error", shown, f"the weighted sum of {shown} with weights {list(weights)} is not finite")
    return Score(reward, parts[0].outcome, shown)
