"""What a usable row is: the rules for prompts, messages and answers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from rl.config import Data
from rl.readers import Raw, Source

ROLES = ("system", "developer", "user", "assistant", "tool")


class RowFault(ValueError):
    """Why a row cannot be used; ``reason`` is the short name under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def nearest(name: str, names: Iterable[str]) -> str:
    """``the columns are a, b; did you mean a?`` for messages about a column that is missing."""
    listed = list(names)
    near = difflib.get_close_matches(name, listed, n=1, cutoff=0.5)
    # "prompt" is like "question" in meaning, not in letters: the usual names are tried too.
    names_of_prompts = ("prompt", "question", "problem", "messages", "input", "instruction")
    usual: list[str] = [each for each in names_of_prompts if each in listed]
    near = near or (usual[:1] if name == "prompt" else [])
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"the columns are {', '.join(map(repr, listed)) or 'none'}{hint}"


def check_row(raw: Raw, data: Data, source: Source) -> tuple[str | list[Any], Any, dict[str, Any]]:
    """(prompt, answer, other columns) of a row, or a ``RowFault``."""
    if raw.fault is not None:
        raise RowFault("unreadable", raw.fault)
    values = dict(raw.values)
    if data.prompt_column not in values:
        raise RowFault("no prompt", f"no column {data.prompt_column!r}; {nearest(data.prompt_column, values)}")
    prompt = check_prompt(values.pop(data.prompt_column), data.prompt_column, source.null_is_absent)
    answer = None
    if data.answer_column is not None:
        if data.answer_column not in values:
            raise RowFault(
                "no answer",
                f"no column {data.answer_column!r}; {nearest(data.answer_column, values)} "
                f"(data.answer_column: null when rows have no answer)",
            )
        answer = values.pop(data.answer_column)
        if source.answers:
            _check_answer(answer, data.answer_column)
    _check_text(answer, f"column {data.answer_column!r}")
    if source.null_is_absent and "tools" in values:
        values["tools"] = without_nulls(values["tools"])
    tools = values.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(each, Mapping) for each in tools)):
        raise RowFault("bad tools", f"column 'tools' is {_seen(tools)}, must be a list of tool descriptions or null")
    return prompt, answer, values


def check_prompt(value: Any, column: str, null_is_absent: bool) -> str | list[Any]:
    """A non-blank text, or messages with known roles and contents, the last of which the model is to answer."""
    if value is None:
        raise RowFault("empty prompt", f"column {column!r} is null")
    if isinstance(value, str):
        if not value.strip():
            raise RowFault("empty prompt", f"column {column!r} is {'blank' if value else 'empty'} ({_seen(value)})")
        _check_text(value, f"column {column!r}")
        return value
    if not isinstance(value, list):
        raise RowFault("bad prompt", f"column {column!r} is {_seen(value)}, must be text or a list of messages")
    if not value:
        raise RowFault("empty prompt", f"column {column!r} is an empty list of messages")
    messages = [_check_message(each, f"{column}[{number}]", null_is_absent) for number, each in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise RowFault(
            "bad messages", f"{column}: the last message is the assistant's; there is nothing left to answer"
        )
    return messages


def _check_message(message: Any, where: str, null_is_absent: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RowFault("bad messages", f"{where} is {_seen(message)}, must be a message with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RowFault("bad messages", f"{where}: role is {_seen(role)}, must be one of {', '.join(ROLES)}")
    calls = role == "assistant" and bool(message.get("tool_calls"))
    if content is None and not calls:
        raise RowFault("bad messages", f"{where}: the message has no content")
    if content is not None and not isinstance(content, str):
        raise RowFault("bad messages", f"{where}: content is {_seen(content)}, must be text")
    if content is not None and not content.strip() and role != "tool" and not calls:
        raise RowFault("bad messages", f"{where}: content is {_seen(content)}, which says nothing")
    _check_text(dict(message), where)
    return without_nulls(message) if null_is_absent else dict(message)


def _check_answer(answer: Any, column: str) -> None:
    if answer is None:
        raise RowFault("no answer", f"column {column!r} is null (data.answer_column: null when rows have no answer)")
    if isinstance(answer, str) and not answer.strip():
        raise RowFault(
            "no answer", f"column {column!r} is {_seen(answer)} (data.answer_column: null when rows have none)"
        )
    if isinstance(answer, float) and not math.isfinite(answer):
        raise RowFault("no answer", f"column {column!r} is {answer}, which nothing can equal")


def _check_text(value: Any, where: str) -> None:
    """Half a surrogate pair (a lone ``\\ud83d`` in JSON) is no text: no tokenizer takes it."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
            raise RowFault("bad text", f"{where} holds half of a surrogate pair, which is not valid Unicode")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _check_text(each, f"{where}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _check_text(each, f"{where}[{number}]")


def without_nulls(value: Any) -> Any:
    """The same without null entries of structures: Arrow gives every structure every key.

    >>> without_nulls({"role": "user", "content": "hi", "name": None})
    {'role': 'user', 'content': 'hi'}
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def _seen(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
