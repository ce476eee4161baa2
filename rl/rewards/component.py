"""A reward function and how to call it: one sample or a whole batch, sync or async, by the names of its parameters.

A function with a parameter named ``completion`` grades one sample and may ask for any of: completion, prompt (text),
answer, messages, columns (a dict), prompt_id, token_count, finish_reason, max_new_tokens, and every data column by its
name. One with a parameter named ``completions`` grades a group at once, as TRL's reward functions do: prompts,
completions, answers (also as ``answer``), messages, token_counts, finish_reasons, prompt_id, max_new_tokens, and every
data column as a list, one entry per completion. ``**kwargs`` receives all that is not named. Where a data column has a
name of this list, the list wins (the column is still in ``columns``).
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from rl.rewards.parts import Part, RewardContractError, Unscorable, read_batch, read_one


class Samples(TypedDict):
    """A group as the grader processes get it: a plain dict, so that nothing heavy is imported to read it."""

    prompt_id: str
    prompt: str
    answer: Any
    messages: Sequence[Mapping[str, Any]] | None
    columns: Mapping[str, Any]
    completions: tuple[str, ...]
    token_counts: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    max_new_tokens: int


ONE = ("completion", "prompt", "answer", "messages", "columns", "prompt_id", "token_count", "finish_reason")
BATCH = ("completions", "prompts", "answers", "answer", "messages", "columns", "prompt_id", "token_counts")
MAX_DETAIL = 8000  # characters of a traceback that travel


class Component:
    """One loaded component. ``is_batch`` says which of ``grade_one`` and ``grade_batch`` fits its function.

    Raises ValueError for a signature that cannot be called: neither or both of completion and completions, a
    positional-only parameter, or (with ``columns`` known) a required parameter that nothing fills.
    """

    def __init__(
        self,
        label: str,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        shown: str = "",
        columns: Sequence[str] | None = None,
    ) -> None:
        self.label = label
        self.shown = shown or label
        self._function = function
        self._options = dict(options)
        self._runner: asyncio.Runner | None = None
        parameters = inspect.signature(function).parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._required = [n for n in self._names if parameters[n].default is inspect.Parameter.empty]
        self.is_batch = "completions" in self._names
        if shown:
            self._check(parameters, columns)

    def _check(self, parameters: Mapping[str, inspect.Parameter], columns: Sequence[str] | None) -> None:
        own = f"reward function {self.shown}({', '.join(str(p) for p in parameters.values())})"
        blocked = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
        if blocked:
            raise ValueError(f"{own}: parameters are given by name, so {blocked[0]!r} must not be positional-only")
        if ("completion" in self._names) == self.is_batch:
            near = difflib.get_close_matches("completion", list(parameters), n=1)
            hint = f" (is {near[0]!r} meant to be it?)" if near and not self.is_batch else ""
            raise ValueError(
                f"{own}: it must have exactly one of the parameters 'completion' (one sample) and 'completions' "
                f"(a whole batch){hint}"
            )
        if columns is not None:
            known = [*(BATCH if self.is_batch else ONE), "finish_reasons", "max_new_tokens", *columns]
            self._refuse_missing(known)

    def _refuse_missing(self, known: Sequence[str]) -> None:
        for name in self._required:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ValueError(
                    f"reward function {self.shown} needs a parameter {name!r}, which is neither known nor a column: "
                    f"{', '.join(known)}{hint}"
                )

    def grade_one(self, group: Samples, index: int) -> Part:
        """The verdict on completion ``index``. Whatever the function raises becomes an outcome, but MemoryError."""
        try:
            given = self._pick(one_sample(group, index))
            return read_one(self._call(given), self.shown)
        except MemoryError:
            raise
        except Unscorable as error:
            return Part(None, "invalid", str(error))
        except Exception:  # noqa: BLE001 - a user's function may raise anything; it is counted and shown
            return Part(None, "error", self._traceback())

    def grade_batch(self, group: Samples) -> list[Part]:
        """The verdicts on all completions of a group; an exception is every sample's error.

        Raises RewardContractError when the return value does not fit the number of completions.
        """
        count = len(group["completions"])
        try:
            return read_batch(self._call(self._pick(whole_batch(group))), count, self.shown)
        except (MemoryError, RewardContractError):
            raise
        except Unscorable as error:
            return [Part(None, "invalid", str(error))] * count
        except Exception:  # noqa: BLE001 - as above
            return [Part(None, "error", self._traceback())] * count

    def _pick(self, known: Mapping[str, Any]) -> dict[str, Any]:
        self._refuse_missing([*known, *self._options])
        everything = {**known, **self._options}
        return everything if self._takes_all else {name: everything[name] for name in self._names if name in everything}

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        value = self._function(**arguments)
        if inspect.isawaitable(value):
            if self._runner is None:  # one loop for the life of the process: a cached client stays usable
                self._runner = asyncio.Runner()
            return self._runner.run(_wait(value))
        return value

    def _traceback(self) -> str:
        text = traceback.format_exc()
        cut = text if len(text) <= MAX_DETAIL else f"{text[: MAX_DETAIL // 2]}\n...\n{text[-MAX_DETAIL // 2 :]}"
        return f"reward function {self.shown} raised\n{cut}"


async def _wait(value: Any) -> Any:
    return await value


def one_sample(group: Samples, index: int) -> dict[str, Any]:
    """Everything that a function of one sample may ask for."""
    return {
        **group["columns"],
        "completion": group["completions"][index],
        "prompt": group["prompt"],
        "answer": group["answer"],
        "messages": group["messages"],
        "columns": group["columns"],
        "prompt_id": group["prompt_id"],
        "token_count": group["token_counts"][index],
        "finish_reason": group["finish_reasons"][index],
        "max_new_tokens": group["max_new_tokens"],
    }


def whole_batch(group: Samples) -> dict[str, Any]:
    """Everything that a batch function may ask for: lists with one entry per completion."""
    count = len(group["completions"])
    return {
        **{name: [value] * count for name, value in group["columns"].items()},
        "completions": list(group["completions"]),
        "prompts": [group["prompt"]] * count,
        "answers": [group["answer"]] * count,
        "answer": [group["answer"]] * count,
        "messages": [group["messages"]] * count,
        "columns": group["columns"],
        "prompt_id": group["prompt_id"],
        "token_counts": list(group["token_counts"]),
        "finish_reasons": list(group["finish_reasons"]),
        "max_new_tokens": group["max_new_tokens"],
    }


def alone(group: Samples, index: int) -> Samples:
    """The group reduced to one completion: what a batch function gets when it is run again sample by sample."""
    return {
        **group,
        "completions": (group["completions"][index],),
        "token_counts": (group["token_counts"][index],),
        "finish_reasons": (group["finish_reasons"][index],),
    }
