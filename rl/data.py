"""From a source of rows to prompts ready to be sent: one pass that reads, checks, renders, tokenises, filters, stores.

What is wrong with a row is an error with file and line, or drops it, counted, as the settings say; a row that was
accepted is fetched at random from disk, so memory does not grow with the file. The ids that were filtered are the ids
that are stored, sent and trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl.chat import MessagesRefused, encode, encode_far_too_long, render_text
from rl.columnar import read_dataset, read_parquet
from rl.config import Settings
from rl.cursor import PromptCursor, steps_for_epochs
from rl.readers import DataError, Raw, Source, read_csv, read_json, read_jsonl
from rl.rows import RowFault, check_row, nearest
from rl.rowstore import RowStore, RowWriter
from rl.tasks import Task, find_task
from rl.tasks.builtin_model import model_max_len
from rl.types import Prompt

__all__ = [
    "DataError",
    "DataReport",
    "PromptCursor",
    "PromptSet",
    "RowCheck",
    "check_rows",
    "open_prompts",
    "require_rows",
    "steps_for_epochs",
]

Which = Literal["train", "eval"]
READERS: dict[str, Callable[[Path], Source]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
SLOW = ("reasoning_gym:", "builtin:gsm8k")
SHORTENED = "shortened"
NAMED = 5  # rows named for each reason they were dropped for
LONGEST_MODEL_LEN = 4096  # of a model that would take more, unless rollout.max_model_len says otherwise


@dataclass(frozen=True, slots=True)
class RowCheck:
    """What a look at the first rows found; ``dropped`` are those that data.bad_rows: drop would leave out."""

    rows: int
    columns: tuple[str, ...]
    dropped: int = 0


@dataclass
class DataReport:
    """What became of a source's rows: ``read`` = ``accepted`` + all of ``dropped`` (reason -> count).

    ``shortened`` rows were accepted with their last tokens only (data.overlong: left). ``left_out`` are columns that
    reward functions do not get, with their types (images, audio). ``fingerprint`` is the xxh3_64 of the accepted rows'
    ids, tokens and answers: it changes with the file and with the filter.
    """

    source: str
    read: int = 0
    accepted: int = 0
    shortened: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)  # reason -> the first rows, with their numbers
    left_out: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""

    def drop(self, reason: str, what: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self._name(reason, what)

    def shorten(self, what: str) -> None:
        self.shortened += 1
        self._name(SHORTENED, what)

    def _name(self, reason: str, what: str) -> None:
        named = self.examples.setdefault(reason, [])
        if len(named) < NAMED:
            named.append(what)

    def lines(self) -> list[str]:
        """One line per reason, for people: "1 dropped (over-long): train.jsonl:37 id 36 (500 > 64 tokens)"."""
        counts = [(f"dropped ({reason})", reason, number) for reason, number in self.dropped.items()]
        if self.shortened:
            counts.append(("cut to their last tokens", SHORTENED, self.shortened))
        lines = [
            f"{number} {verb}: {'; '.join(self.examples[reason])}{'; ...' if number > NAMED else ''}"
            for verb, reason, number in counts
        ]
        return lines + [f"column {name!r} is left out: it holds {kind}" for name, kind in self.left_out.items()]


class PromptSet(RowStore):
    """The accepted rows, by number, and the report on all of them; every row is read from disk when asked for."""

    def __init__(self, folder: Path, name: str, report: DataReport) -> None:
        super().__init__(folder, name)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return PromptSet, (self._folder, self._name, self.report)


def check_rows(settings: Settings, which: Which, limit: int = 1000) -> RowCheck:
    """Looks at the first ``limit`` rows as ``open_prompts`` will, but for what needs the model's tokenizer.

    Raises DataError for the first row that cannot be used (unless data.bad_rows is drop), for a missing file or column.
    """
    source = open_source(settings, which)
    if source.name.startswith(SLOW):  # importing their library takes seconds: the name was checked, no row is made
        return RowCheck(0, (settings.data.prompt_column, settings.data.answer_column or "answer"))
    rows, dropped, columns = 0, 0, source.columns
    for raw in islice(source.rows(), limit):
        rows += 1
        columns = columns or tuple(raw.values) or None
        try:
            check_row(raw, settings.data, source)
        except RowFault as fault:
            _refuse_unless_dropped(settings, raw, fault)
            dropped += 1
    if rows == dropped:
        hint = f" (columns: {', '.join(columns)})" if columns else ""
        raise DataError(f"{source.name}: none of its {'first ' if rows == limit else ''}{rows} rows can be used{hint}")
    return RowCheck(rows, columns or (), dropped)


def open_prompts(settings: Settings, which: Which, tokenizer: Any, folder: Path) -> PromptSet:
    """One pass over the whole source into ``folder``; see the module's text. Raises DataError."""
    source = open_source(settings, which)
    limit = prompt_limit(settings)
    report = DataReport(source.name, left_out=source.left_out)
    with RowWriter(folder, which) as writer:
        for number, raw in enumerate(source.rows()):
            report.read += 1
            prompt = _accept(settings, source, raw, number, tokenizer, limit, report)
            if prompt is not None:
                report.accepted += 1
                writer.add(prompt)
        if report.accepted == 0:
            raise DataError(f"{source.name}: none of its {report.read} rows can be used. {' '.join(report.lines())}")
        report.fingerprint = writer.finish()
    return PromptSet(folder, which, report)


def _accept(
    settings: Settings, source: Source, raw: Raw, number: int, tokenizer: Any, limit: int, report: DataReport
) -> Prompt | None:
    """The prompt of one row; None when the settings say to drop it, which the report then counts."""
    try:
        prompt, answer, columns = check_row(raw, settings.data, source)
        text, ids, length = _encode(settings, tokenizer, prompt, columns, limit)
    except RowFault as fault:
        _refuse_unless_dropped(settings, raw, fault)
        report.drop(fault.reason, f"{raw.where} id {number} ({fault})")
        return None
    except ValueError as error:
        raise DataError(f"{raw.where}: {error}") from error
    if length > limit:
        numbers = f"{length} > {limit} tokens"
        if settings.data.overlong == "error":
            raise DataError(
                f"{raw.where} (id {number}): the prompt is too long, {numbers} (data.max_prompt_tokens, or what "
                f"rollout.max_new_tokens leaves of the model's length); raise the limit, or set data.overlong to drop "
                f"or left"
            )
        if settings.data.overlong == "drop":
            report.drop("over-long", f"{raw.where} id {number} ({numbers})")
            return None
        report.shorten(f"{raw.where} id {number} ({numbers})")
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    messages = None if isinstance(prompt, str) else prompt
    return Prompt(str(number), raw.where, np.asarray(ids, dtype=np.int32), text, answer, messages, columns)


def require_rows(rows: int, prompts_per_step: int, report: DataReport) -> None:
    """DataError when the rows do not fill one batch."""
    if rows < prompts_per_step:
        dropped = f" of {report.read} ({' '.join(report.lines())})" if report.dropped else ""
        raise DataError(
            f"{report.source}: {rows} usable rows{dropped}, but one step takes rollout.prompts_per_step = "
            f"{prompts_per_step}; give at least that many rows or lower prompts_per_step to {rows}"
        )


def prompt_limit(settings: Settings) -> int:
    """Tokens that a prompt may have, so that prompt and answer fit into the model together.

    data.max_prompt_tokens, else rollout.max_model_len (or the model's own length, at most 4096) - max_new_tokens.
    DataError when nothing is left for a prompt, or when data.max_prompt_tokens is more than is left.
    """
    longest = settings.rollout.max_model_len or min(model_max_len(settings.model.path), LONGEST_MODEL_LEN)
    left = longest - settings.rollout.max_new_tokens
    whole = f"{longest} tokens in all - rollout.max_new_tokens {settings.rollout.max_new_tokens} = {left}"
    if left < 1:
        raise DataError(f"no room for a prompt: {whole}; lower max_new_tokens or raise rollout.max_model_len")
    wanted = settings.data.max_prompt_tokens
    if wanted is not None and wanted > left:
        raise DataError(f"data.max_prompt_tokens {wanted} is more than what is left for a prompt: {whole}")
    return left if wanted is None else wanted


def open_source(settings: Settings, which: Which) -> Source:
    """The reader for data.train or data.eval; DataError when there is no such source or column."""
    data = settings.data
    name = data.train if which == "train" else data.eval
    if name is None:
        raise DataError(f"data.{which} is not set")
    try:
        task = find_task(name, data.task_options)
    except ValueError as error:
        raise DataError(f"data.{which}: {error}") from error
    if task is not None:
        return _task_source(settings, which, name, task)
    if data.task_options and all(find_task(each or "") is None for each in (data.train, data.eval)):
        raise DataError(f"data.task_options {data.task_options}: {name} is no task, so they would be ignored")
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise DataError(f"data.{which} = {name}: unknown suffix {path.suffix!r}; known are {', '.join(READERS)}")
        source = READERS[path.suffix.lower()](path)
    elif path.is_dir() or _may_be_id(name):
        source = read_dataset(name, data.train_split if which == "train" else data.eval_split)
    else:
        raise DataError(f"data.{which} = {name}: no such file (from {Path.cwd()})")
    for column in (data.prompt_column, data.answer_column):
        if source.columns is not None and column is not None and column not in source.columns:
            raise DataError(f"{name}: no column {column!r}; {nearest(column, source.columns)}")
    return source


def _may_be_id(name: str) -> bool:
    """Whether something that is not on disk can be an id on the hub: NAME or OWNER/NAME, with :CONFIG or without."""
    return (
        Path(name).suffix.lower() not in READERS
        and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?", name) is not None
    )


def _task_source(settings: Settings, which: Which, name: str, task: Task) -> Source:
    data = settings.data
    if data.answer_column is None:
        raise DataError(f"data.answer_column is null, but the rows of {name} have an answer that its grader needs")
    prompt, answer = data.prompt_column, data.answer_column
    wanted = data.rows if which == "train" else data.eval_rows
    seed = settings.run.seed if which == "train" else 0  # the same held-out rows in every run
    return Source(name, lambda: _numbered(name, task.rows(which, wanted, seed), prompt, answer), answers=False)


def _numbered(name: str, rows: Iterator[Mapping[str, Any]], prompt: str, answer: str) -> Iterator[Raw]:
    """Rows that a task made, under the column names of the settings."""
    for number, row in enumerate(rows, 1):
        values = dict(row)
        given = {prompt: values.pop("prompt"), answer: values.pop("answer")}
        yield Raw(f"{name}:{number}", {**values, **given})


def _encode(
    settings: Settings, tokenizer: Any, prompt: str | list[Any], columns: Mapping[str, Any], limit: int
) -> tuple[str, list[int], int]:
    """(text, ids, tokens in all): with data.overlong: left the ids are the last ``limit`` of them."""
    try:
        text, templated = render_text(tokenizer, prompt, settings.data.apply_chat_template, columns.get("tools"))
    except MessagesRefused as error:
        raise RowFault("bad messages", str(error)) from error
    huge = encode_far_too_long(tokenizer, text, limit)
    if huge is not None:
        return text, huge[1], huge[0]
    ids = encode(tokenizer, text, templated)
    if not ids:
        raise RowFault("empty prompt", "the prompt has no token")
    return text, ids[-limit:], len(ids)


def _refuse_unless_dropped(settings: Settings, raw: Raw, fault: RowFault) -> None:
    if settings.data.bad_rows == "error":
        raise DataError(f"{raw.where}: {fault} (data.bad_rows: drop would leave such rows out)") from fault
