"""File formats to rows, streamed: one row (or a small batch of them) is in memory at a time.

Every reader yields ``Raw`` rows in the order of the file. What is wrong with one row is kept in its ``fault``, so that
the caller's policy decides; what is wrong with the whole file is a ``DataError``.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BATCH = 64  # rows of a columnar file decoded at a time
BOM = b"\xef\xbb\xbf"


class DataError(ValueError):
    """Data that cannot be used; the message names the file and line, the value seen and the rule."""


@dataclass(frozen=True, slots=True)
class Raw:
    """One row as it was read, from ``where`` (file:line). ``fault`` says why it could not be read at all."""

    where: str
    values: dict[str, Any]
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from. ``columns`` is None where only the rows themselves tell."""

    name: str
    rows: Callable[[], Iterator[Raw]]
    columns: tuple[str, ...] | None = None
    left_out: dict[str, str] = field(
        default_factory=dict
    )  # columns that hold no text, numbers or lists, and their type
    answers: bool = True  # an answer must not be null; a task's grader may know it without
    null_is_absent: bool = False  # columnar files fill a message's absent keys with null


class _Refused(ValueError):
    """A JSON text that Python would read, but that is not what was meant."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise _Refused(f"key {twice!r} appears twice")
    return made


def _constant(name: str) -> float:
    raise _Refused(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Refused(f"{text} is too large for a number")
    return value


def read_jsonl(path: Path) -> Source:
    """One JSON object per line; blank lines are no rows."""

    def rows() -> Iterator[Raw]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                body = line.removeprefix(BOM) if number == 1 else line
                if body.strip():
                    yield _jsonl_row(f"{path.name}:{number}", body)

    return Source(str(path), rows)


def _jsonl_row(where: str, line: bytes) -> Raw:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return Raw(where, {}, f"byte {error.start + 1} of the line is not UTF-8 ({error.reason})")
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_finite)
    except _Refused as error:
        return Raw(where, {}, str(error))
    except json.JSONDecodeError as error:
        return Raw(where, {}, f"broken JSON at column {error.colno}: {error.msg}")
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of too many digits
        return Raw(where, {}, f"JSON that cannot be read: {error}")
    if not isinstance(value, dict):
        return Raw(
            where, {}, f"a {type(value).__name__}, but every line must be an object (an array goes in a .json file)"
        )
    return Raw(where, value)


def read_json(path: Path) -> Source:
    """One JSON array of objects, parsed as a stream; a row is named by its number, from 1."""

    def rows() -> Iterator[Raw]:
        import ijson

        with path.open("rb") as file:
            if file.read(len(BOM)) != BOM:
                file.seek(0)
            number = 0
            try:
                for number, value in enumerate(_elements(ijson.basic_parse(file, use_float=True)), 1):
                    where = f"{path.name}:row {number}"
                    if isinstance(value, _Refused):
                        yield Raw(where, {}, str(value))
                    elif not isinstance(value, dict):
                        yield Raw(where, {}, f"a {type(value).__name__}, but every element must be an object")
                    else:
                        yield Raw(where, value)
            except _Refused as error:
                raise DataError(f"{path}: {error}") from error
            except (ijson.JSONError, UnicodeDecodeError) as error:
                detail = " ".join(str(error).split())[:200]
                raise DataError(f"{path}: broken JSON after row {number}: {detail}") from error

    return Source(str(path), rows)


def _elements(events: Iterable[tuple[str, Any]]) -> Iterator[Any]:
    """The elements of a top-level array; one with a key given twice comes out as the ``_Refused`` that says so."""
    stream = iter(events)
    event, _ = next(stream, ("nothing", None))
    if event != "start_array":
        raise _Refused("a .json file must be an array of objects (one object per line goes in a .jsonl file)")
    for event, value in stream:
        if event == "end_array":
            return
        faults: list[_Refused] = []
        element = _build(event, value, stream, faults)
        yield faults[0] if faults else element


def _build(event: str, value: Any, stream: Iterator[tuple[str, Any]], faults: list[_Refused]) -> Any:
    if event == "start_array":
        return [_build(inner, item, stream, faults) for inner, item in iter(lambda: next(stream), ("end_array", None))]
    if event == "start_map":
        made: dict[str, Any] = {}
        for inner, key in iter(lambda: next(stream), ("end_map", None)):
            assert inner == "map_key", inner
            if key in made:
                faults.append(_Refused(f"key {key!r} appears twice"))
            made[key] = _build(*next(stream), stream, faults)
        return made
    if isinstance(value, float) and not math.isfinite(value):
        faults.append(_Refused(f"{value} is too large for a number"))
    return value


def read_csv(path: Path) -> Source:
    """Comma-separated with a header; every value is text, and an empty one is an empty text."""

    def rows() -> Iterator[Raw]:
        with path.open("rb") as file:
            reader = _csv(file)
            header = next(reader)
            while True:
                where = f"{path.name}:{reader.line_num + 1}"  # a quoted value may span lines: where the row begins
                try:
                    values = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield Raw(where, {}, f"broken CSV: {error}")
                    continue
                if values:
                    yield _csv_row(where, header, values)

    with path.open("rb") as file:
        try:
            header: list[str] = next(_csv(file), [])
        except csv.Error as error:
            raise DataError(f"{path}:1: broken CSV header: {error}") from error
    if not header or any(not name.strip() for name in header) or len(set(header)) != len(header):
        raise DataError(f"{path}:1: the header must name every column once (seen: {header})")
    if any(_escaped(name) for name in header):
        raise DataError(f"{path}:1: the header is not UTF-8")
    return Source(str(path), rows, columns=tuple(header))


def _csv(file: Iterable[bytes]) -> Any:
    csv.field_size_limit((1 << 31) - 1)  # the default of 128 KiB refuses long prompts

    def lines() -> Iterator[str]:
        for number, line in enumerate(file):
            yield (line.removeprefix(BOM) if number == 0 else line).decode("utf-8", "surrogateescape")

    return csv.reader(lines(), strict=True)


def _csv_row(where: str, header: list[str], values: list[str]) -> Raw:
    if len(values) != len(header):
        return Raw(where, {}, f"{len(values)} values, but the header names {len(header)} columns")
    for name, value in zip(header, values, strict=True):
        if _escaped(value):
            return Raw(where, {}, f"column {name!r} is not UTF-8")
    return Raw(where, dict(zip(header, values, strict=True)))


def _escaped(text: str) -> bool:
    return not text.isascii() and any("\udc80" <= each <= "\udcff" for each in text)
