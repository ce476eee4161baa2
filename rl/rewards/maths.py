"""Mathematical equivalence, by the library math-verify and a few rules of ours before and after it.

Which answer is read: the content of the LAST complete ``\\boxed{...}`` (or ``\\fbox``) of the completion; without one,
the last expression of its last 2,000 characters. Only the completion is searched, never the prompt.

Rules (each holds in both directions, reference against answer and answer against reference):

- A percentage is its hundredth part: 50% equals 0.5 and 1/2, and does not equal 50.
- A comma before groups of exactly three digits separates thousands: 1,234 equals 1234 and not 1.234.
- 1:00 is a time or ratio, equal only to one with the same numbers (1:00 and 01:00), never to 12:00 or to a number.
- Alternatives ("4 or 5") equal the same alternatives in any order, never one of them.
- Exact numbers are compared exactly (2^-99 is not 2^-98); where a decimal fraction takes part, to six decimal places
  and six significant digits.
- Marks such as ** and \\text{13} around a number do not count.
- A reference answer that does not parse, or consists of words ("see proof"), is unscorable: the outcome is invalid.

math-verify's own time limits (signals) are off: the process in which this runs is killed at the sample's deadline.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any, NamedTuple

from rl.rewards.parts import Unscorable

_TAIL = 2000
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CLOCK = re.compile(r"\d+(?::\d+)+")
_ALTERNATIVE = re.compile(r"\s*(?:\\text\s*\{\s*,?\s*or\s*\}|\\(?:mathrm|textrm|mbox)\s*\{\s*or\s*\}|,?\s*\bor\b)\s*")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{\s*([-+]?[\d.,:/]+)\s*\}")
_TEXT = re.compile(r"(\d\s*)\\(?:text|textrm|mathrm|mbox)\s*\{[^{}]*\}")
_STATED = re.compile(r"\banswer\b[^.:=]*?(?:\bis\b|:|=)\s*(.+)$", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*\\?%")
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt mod max min gcd lcm".split()  # noqa: SIM905
)
_SHORT_WORDS = frozenset(("yes", "no", "one", "two", "six", "ten", "odd", "all", "any", "not", "and", "the"))


class _Candidate(NamedTuple):
    """A parsed answer: a tuple of integers for 1:00, else a sympy object; None when it does not parse."""

    value: Any
    braces: bool = False  # written as a set, {0, 1}


def math(completion: str, answer: Any) -> bool:
    """True when the completion's answer is mathematically the reference ``answer`` (see the rules above).

    Raises Unscorable when the reference cannot be parsed, whatever the completion says.

    >>> math(r"so it is \\boxed{\\frac{1}{2}}", "0.5"), math("the answer is 4 or 5", 4)
    (True, False)
    """
    gold = _candidates(_gold_text(answer))
    if not gold or any(one.value is None for one in gold):
        raise Unscorable(f"the reference answer {answer!r} cannot be parsed as mathematics")
    boxed = last_boxed(completion)
    target = _candidates(boxed) if boxed is not None else _last_candidates(completion[-_TAIL:])
    if len(target) != len(gold) or any(one.value is None for one in target):
        return False
    for one in gold:
        match = next((number for number, other in enumerate(target) if _equal(one, other)), None)
        if match is None:
            return False
        del target[match]
    return True


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` whose braces close; None when there is none.

    >>> last_boxed(r"\\boxed{1} then \\boxed{\\frac{1}{2}} and \\boxed{cut"), last_boxed("1")
    ('\\\\frac{1}{2}', None)
    """
    for match in reversed(list(_BOX.finditer(text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if text[position] in "{}" and text[position - 1] == "\\":
                depth += {"{": -1, "}": 1}[text[position]]
            if depth == 0:
                return text[match.end() : position]
    return None


def _gold_text(answer: Any) -> str:
    text = "" if answer is None or isinstance(answer, bool) else str(answer).strip()
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed
    text = re.sub(r"^(\$\$?|\\\(|\\\[)(.*?)(\$\$?|\\\)|\\\])$", r"\2", text, flags=re.DOTALL).strip()
    if _words(text):
        raise Unscorable(f"the reference answer {answer!r} is made of words, not of mathematics")
    return text


def _words(text: str) -> list[str]:
    """Words in plain letters; products of variables (xy, abc), functions, units in \\text{} and "or" are none."""
    plain = re.sub(r"\\[a-zA-Z]+", " ", _TEXT.sub(r"\1 ", _ALTERNATIVE.sub(" ", text)))
    words = [word.lower() for word in re.findall(r"[a-zA-Z]{2,}", plain)]
    return [
        word
        for word in words
        if word in _SHORT_WORDS or (word not in _FUNCTIONS and len(word) > 2 and (len(word) > 3 or len(set(word)) < 3))
    ]


def _clean(text: str) -> str:
    """Rewrites what math-verify would misread; the meaning stays."""
    text = text.replace("{,}", ",").replace("\u2212", "-").strip()
    text = re.sub(r"(?<=\d,)\\[!,;](?=\d)", "", text)  # 1,\!234
    text = _WRAPPED.sub(r"\1", text)
    return _PERCENT.sub(lambda match: f"{Decimal(match[1]) / 100:f}", text)


def _candidates(text: str) -> list[_Candidate]:
    """The alternatives of an answer, parsed. An empty answer has none."""
    return [_parse(piece) for piece in _ALTERNATIVE.split(_unmark(text)) if piece.strip()]


def _last_candidates(tail: str) -> list[_Candidate]:
    """The last expression of free text, or the alternatives that end its last sentence."""
    lines = [line for line in _unmark(tail).splitlines() if re.search(r"\w", line)]
    if not lines:
        return []
    sentence = re.split(r"(?<=[.!?])\s+(?=\S)", lines[-1].strip())[-1].strip().rstrip(".!?")
    stated = _STATED.search(sentence)
    formula = re.sub(r"^(\$|\\\()(.*)(\$|\\\))$", r"\2", stated[1] if stated else sentence)
    if "$" not in formula and not _words(formula):
        found = _candidates(formula)
        if all(one.value is not None for one in found):
            return found
    parsed = [_parse(piece, free=True) for piece in _ALTERNATIVE.split(sentence) if piece.strip()]
    if len(parsed) > 1 and all(one.value is not None for one in parsed):
        return parsed
    last = _parse(sentence, free=True)
    return [last if last.value is not None else _parse(_unmark(tail), free=True)]


def _unmark(text: str) -> str:
    return text.replace("**", "").strip()


def _parse(text: str, free: bool = False) -> _Candidate:
    """One expression; ``free``: the last one of a text, else the text is the expression."""
    import math_verify

    _quiet()
    clock = re.search((r"(?:^|[\s$=])" if free else r"^\W*") + rf"({_CLOCK.pattern})\s*(?:[ap]\.?m\.?)?\W*$", text)
    if clock:
        return _Candidate(tuple(int(part) for part in clock[1].split(":")))
    cleaned = _clean(text)
    if not free:
        cleaned = r"\boxed{" + re.sub(r"\^\s*([-+]?\d+)", r"^{\1}", cleaned) + "}"  # LaTeX reads 2^10 as 2^{1}0
    found = math_verify.parse(cleaned, fallback_mode="no_fallback", parsing_timeout=None)
    return _Candidate(found[0] if found else None, not free and text.lstrip(" \\").startswith("{"))


def _quiet() -> None:
    """math-verify warns that its time limits are off, which is meant."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _equal(gold: _Candidate, target: _Candidate) -> bool:
    import math_verify
    import sympy

    one, other = gold.value, target.value
    if isinstance(one, tuple) or isinstance(other, tuple):
        return isinstance(one, tuple) and isinstance(other, tuple) and one == other
    if (gold.braces and isinstance(other, sympy.Interval)) or (target.braces and isinstance(one, sympy.Interval)):
        return False  # the set {0, 1} is neither the pair nor the interval (0, 1)
    if not math_verify.verify(one, other, timeout_seconds=None):
        return False
    both_numbers = getattr(one, "is_number", False) and getattr(other, "is_number", False)
    return _same_number(one, other) if both_numbers else True


def _same_number(one: Any, other: Any) -> bool:
    """math-verify rounds to six decimal places, where 2^-98 and 2^-99 are both 0: relative size counts too."""
    import sympy

    if one == other or (one.is_Rational and other.is_Rational):
        return bool(one == other)
    digits, tolerance = (20, 1e-6) if one.has(sympy.Float) or other.has(sympy.Float) else (60, 1e-50)
    first, second = sympy.N(one, digits), sympy.N(other, digits)
    return bool(abs(first - second) <= tolerance * max(abs(first), abs(second)))
