"""What one reward component says about one completion, and which return values of a user's function are understood.

A component's verdict is a ``Part``: a finite number with the outcome ok or wrong, or no number with the outcome error,
timeout or invalid. Nothing that cannot be read becomes a 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rl.types import Outcome


class Unscorable(ValueError):
    """Raised by a reward function when the row's reference answer is of no use: the outcome becomes "invalid"."""


class RewardContractError(ValueError):
    """A batch function returned something that cannot be matched with its completions, so none of it can be used."""


class Part(NamedTuple):
    """One component's verdict on one completion; ``value`` is None exactly when it was not scored."""

    value: float | None
    outcome: Outcome
    detail: str = ""


ONE_FORMS = 'a number, a bool, or {"reward": number, "outcome": "ok" or "wrong"}'
BATCH_FORMS = "a list, a tuple or a one-dimensional array"


def read_one(value: Any, name: str) -> Part:
    """Reads what a function returned for one completion.

    A bool is 1.0 and ok, or 0.0 and wrong. A number is ok when it is above 0. A dict may say the outcome itself. None,
    NaN, infinity and everything else are errors that name the function.

    >>> read_one(True, "f"), read_one(-0.5, "f").outcome, read_one(None, "f").outcome
    (Part(value=1.0, outcome='ok', detail=''), 'wrong', 'error')
    """
    if isinstance(value, Mapping):
        return _read_mapping(value, name)
    if value is None:
        return Part(None, "error", f"reward function {name} returned None (give {ONE_FORMS})")
    number = _number(value)
    if number is None:
        return Part(None, "error", f"reward function {name} returned {_show(value)} for one sample (give {ONE_FORMS})")
    if not math.isfinite(number):
        return Part(None, "error", f"reward function {name} returned {number}, which is not a finite number")
    return Part(number, "ok" if number > 0 else "wrong")


def _read_mapping(value: Mapping[Any, Any], name: str) -> Part:
    unknown = sorted(str(key) for key in value if key not in ("reward", "outcome"))
    if unknown or "reward" not in value or isinstance(value["reward"], Mapping):
        return Part(None, "error", f"reward function {name} returned a dict with keys {list(value)} (give {ONE_FORMS})")
    part = read_one(value["reward"], name)
    if part.value is None or "outcome" not in value:
        return part
    outcome = value["outcome"]
    if outcome not in ("ok", "wrong"):
        return Part(None, "error", f"reward function {name} returned outcome {outcome!r} (give 'ok' or 'wrong')")
    return Part(part.value, outcome)


def read_batch(value: Any, count: int, name: str) -> list[Part]:
    """Reads what a batch function returned for ``count`` completions: exactly ``count`` values, in their order.

    Raises RewardContractError, naming the function and ``count``, for every other form: a number, a dict, a generator,
    a set, a string, an array that is not one-dimensional, a wrong number of values.

    >>> [part.value for part in read_batch([1, 0.5], 2, "f")]
    [1.0, 0.5]
    """
    seen = _show(value)
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "tolist"):
        if len(shape) != 1:
            raise RewardContractError(
                f"reward function {name} returned {seen} of shape {tuple(shape)} for {count} completions: "
                f"it must be one-dimensional, ({count},)"
            )
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise RewardContractError(
            f"reward function {name} returned {seen} for {count} completions: give {BATCH_FORMS} of {count} values"
        )
    if len(value) != count:
        raise RewardContractError(
            f"reward function {name} returned {len(value)} values for {count} completions: give exactly {count}"
        )
    return [read_one(item, name) for item in value]


def _number(value: Any) -> float | None:
    """A real number as float; scalars of numpy and torch count, strings, complex numbers and arrays do not."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _show(value: Any) -> str:
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    text = repr(value) if isinstance(value, (str, int, float, list, tuple, complex)) else ""
    return f"{article} {kind}" + (f" ({text})" if text and len(text) <= 60 else "")
