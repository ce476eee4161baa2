"""The built-in components. They are called like a user's function: by the names of their parameters.

Graders see the completion's text alone: what stands in the prompt can never score.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl.rewards.parts import Unscorable

if TYPE_CHECKING:
    from rl.tasks import Task


def exact_match(completion: str, answer: Any) -> bool:
    """The whole completion equals the answer, white space around both left out.

    Raises Unscorable when there is no answer (None or blank): an empty completion would be right.

    >>> exact_match(" 3589\\n", 3589)
    True
    """
    gold = "" if answer is None else str(answer).strip()
    if not gold:
        raise Unscorable(f"exact_match needs an answer, and this row's is {answer!r}")
    return completion.strip() == gold


def format(completion: str, pattern: str) -> bool:
    """The whole completion matches the regular expression (``re.fullmatch``; write (?s) to let . match line breaks).

    >>> format("<think>a</think>4", r"<think>.*</think>\\d")
    True
    """
    return re.fullmatch(pattern, completion) is not None


def length(token_count: int, max_new_tokens: int, overlong_buffer: int) -> float:
    """Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13): 0 down to -1, in tokens.

    With L = max_new_tokens and B = overlong_buffer: 0 up to L - B tokens, then ((L - B) - token_count) / B, and -1
    beyond L. Raises ValueError when the buffer is longer than the limit.

    >>> [length(n, 100, 20) for n in (80, 90, 100, 101)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if overlong_buffer > max_new_tokens:
        raise ValueError(
            f"overlong_buffer is {overlong_buffer}, and must not be above rollout.max_new_tokens ({max_new_tokens})"
        )
    over = token_count - (max_new_tokens - overlong_buffer)
    return -min(over / overlong_buffer, 1.0) if over > 0 else 0.0


def task(completion: str, answer: Any, columns: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The grader of the task that the data come from: from 0 to 1, and ok only at 1 (0.3 is partial credit: wrong).

    >>> from rl.tasks import TASKS
    >>> task("3589", "3589", {}, TASKS["sort"])
    {'reward': 1.0, 'outcome': 'ok'}
    """
    value = float(task.grade(completion, answer, columns))
    return {"reward": value, "outcome": "ok" if value >= 1.0 else "wrong"}


def make_task(source: str, options: Mapping[str, Any]) -> Task:
    """The task of ``builtin:NAME``, ``reasoning_gym:NAME`` or a plain built-in NAME; ValueError for any other."""
    from rl.tasks import find_task

    found = find_task(source if ":" in source else f"builtin:{source}", options)
    if found is None:
        raise ValueError(
            f"rewards: name: task needs data of a task (builtin:NAME or reasoning_gym:NAME), not {source!r}"
        )
    return found
