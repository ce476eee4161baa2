"""docs/configuration.md, written from rl/config.py: ``python -m tests.settings_doc`` writes it, a test compares it."""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from rl.config import Reward, Section, Settings

FILE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

Every setting of a run, written from `rl/config.py` (`python -m tests.settings_doc`). A file holds sections; on the
command line a setting is `--set section.key=value`. Only `train` must be there. An unknown key, a wrong type or a
setting that would be ignored is refused before anything starts. `parkrl check FILE` says what is wrong; `config.yaml`
in a run folder holds every setting with its value.
"""


def document() -> str:
    parts = [HEAD]
    for name, info in Settings.model_fields.items():
        section = section_of(info)
        if section is not None:
            parts.append(f"## {name}\n\n{table(section)}")
        elif name == "rewards":
            parts.append(f"## {name}\n\n{info.description} A list; each has:\n\n{table(Reward)}")
        else:
            parts.append(f"## {name}\n\n{info.description}\n")
    return "\n".join(parts)


def section_of(info: FieldInfo) -> type[Section] | None:
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def table(section: type[Section], prefix: str = "") -> str:
    lines = [] if prefix else ["| setting | default | values | meaning |", "|---|---|---|---|"]
    for name, info in section.model_fields.items():
        inner = section_of(info)
        if inner is not None:
            lines.append(table(inner, f"{prefix}{name}.").rstrip("\n"))
            continue
        values = " ".join([shown(info.annotation), *bounds(info)])
        meaning = (info.description or "").replace("|", "\\|")
        lines.append(f"| `{prefix}{name}` | {default(info)} | {values} | {meaning} |")
    return "\n".join(lines) + "\n"


def default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return f"`{json.dumps(value)}`"


def shown(annotation: Any) -> str:
    """A type in words.

    >>> shown(int), shown(str | None), shown(typing.Literal["a", "b"])
    ('whole number', 'text or null', '`a`, `b`')
    """
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *marks = typing.get_args(annotation)
        limits = " ".join(text for mark in marks if isinstance(mark, FieldInfo) for text in bounds(mark))
        return f"{shown(inner)} {limits}".strip()
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(shown(each) for each in typing.get_args(annotation))
    if origin is tuple:
        return " and ".join(shown(each) for each in typing.get_args(annotation))
    words = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`", types.NoneType: "null"}
    return words.get(annotation, "mapping")


def bounds(info: FieldInfo) -> list[str]:
    signs = {Ge: ">= {0.ge:g}", Gt: "> {0.gt:g}", Le: "<= {0.le:g}", Lt: "< {0.lt:g}"}
    return [text.format(mark) for mark in info.metadata for kind, text in signs.items() if isinstance(mark, kind)]


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
