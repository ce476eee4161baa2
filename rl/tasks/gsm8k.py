"""Grade-school mathematics in the form of GSM8K: the reference ends in ``#### 72`` (Cobbe et al. 2021, section 2).

``GSM8K`` makes such problems offline (reasoning-gym's ``gsm_symbolic``); for a file of your own in that form, call
``grade`` from your reward function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from rl.tasks.base import Split

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
MARK = "####"
ASKED = " Give the result as your final answer. Do not include units."


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####``, else the last number in the text; None where there is none.

    Thousands commas, a dollar sign and a closing full stop are not part of it.

    >>> final_number("2 + 70 = 72, so #### 72"), final_number("It costs $1,250.50."), final_number("none")
    (Decimal('72'), Decimal('1250.50'), None)
    """
    _, mark, tail = text.rpartition(MARK)
    found = NUMBER.findall(tail if mark else text)
    if not found:
        return None
    return Decimal((found[0] if mark else found[-1]).replace("$", "").replace(",", ""))


def grade(completion: str, answer: Any) -> float:
    """1.0 when both end in the same number. A reference without a number is a ValueError: nothing could be right.

    >>> grade("so 72.0 apples", "36 * 2 = 72 #### 72"), grade("", "#### 72")
    (1.0, 0.0)
    """
    gold = final_number(str(answer))
    if gold is None:
        raise ValueError(f"the reference answer {str(answer)[:80]!r} holds no number")
    return float(final_number(completion) == gold)


class GSM8K:
    """Problems like GSM8K's, made on the spot; the prompt asks for the ``####`` form."""

    name = "gsm8k"

    def __init__(self, **options: Any) -> None:
        from rl.tasks.gym import GymTask

        self._gym = GymTask("gsm_symbolic", options)

    def rows(self, split: Split, n: int, seed: int) -> Iterator[dict[str, Any]]:
        """See ``Task.rows``."""
        for row in self._gym.rows(split, n, seed):
            question = row["prompt"].replace(ASKED, "")
            prompt = f"{question}\nThink step by step and end with {MARK} and the number."
            yield {"prompt": prompt, "answer": f"{MARK} {row['answer']}"}

    def grade(self, completion: str, answer: Any, columns: Mapping[str, Any] | None = None) -> float:
        """See ``grade``."""
        return grade(completion, answer)
