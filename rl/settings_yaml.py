"""Reading settings as plain data: YAML with the line of every key, and ``--set key.path=value`` on top.

YAML here is read by the rules of version 1.2: ``1e-6`` is a number, only ``true`` and ``false`` are truth values
(``on``, ``off``, ``yes`` and ``no`` are text), and there are no dates and no base-60 numbers. A key given twice is an
error, at any depth, and so is a mapping that contains itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from rl.settings_errors import Path, Problem, dotted, show

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"""[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)""",
)
_TAG = re.compile(r"(&\S+\s+)?!")
_TEXT_TAG = "tag:yaml.org,2002:str"


def scalar(text: str) -> Any:
    """What an unquoted word means in YAML 1.2.

    >>> scalar("1e-6"), scalar("on"), scalar("true"), scalar("~"), scalar("0x10"), scalar("2026-01-01")
    (1e-06, 'on', True, None, 16, '2026-01-01')
    """
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


@dataclass
class Source:
    """Plain data of a settings file, with the place ("file:line" or "--set") at which each key was given."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    where: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, where: str, key: str, rule: str, suggestion: str = "") -> None:
        self.problems.append(Problem(where, key, rule, suggestion))


def read_yaml(name: str, content: bytes) -> Source:
    """Settings from the bytes of a YAML file, which must be UTF-8 whatever the locale; never raises for bad content."""
    source = Source(name)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        source.refuse(f"{name}:{line}", "", f"not UTF-8: byte 0x{content[error.start]:02x} ({error.reason})")
        return source
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        _refuse_broken(source, error, text)
        return source
    if root is None:
        source.refuse(name, "", "the file is empty; a run needs at least train: {steps: N}")
    elif not isinstance(root, yaml.MappingNode):
        seen = "list" if isinstance(root, yaml.SequenceNode) else "single value"
        source.refuse(f"{name}:{_line(root)}", "", f"the file must be a mapping (key: value), but is a {seen}")
    else:
        source.data = _build(source, root, (), ())
    return source


def _refuse_broken(source: Source, error: yaml.YAMLError, text: str) -> None:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        line = text[: error.position].count("\n") + 1
        source.refuse(f"{source.name}:{line}", "", f"broken YAML: {error.reason}")
        return
    words = ", ".join(part for part in (getattr(error, "context", ""), getattr(error, "problem", "")) if part)
    place = f"{source.name}:{mark.line + 1}" if mark is not None else source.name
    start = getattr(error, "context_mark", None)
    begun = f" (it begins in line {start.line + 1})" if start is not None and mark and start.line != mark.line else ""
    source.refuse(place, "", f"broken YAML: {words or error}{begun}")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _build(source: Source, node: yaml.Node, path: Path, above: tuple[int, ...]) -> Any:
    """The plain value of a node; notes the place of every key and refuses doubled and non-text keys."""
    here = f"{source.name}:{_line(node)}"
    if id(node) in above:
        source.refuse(here, dotted(path), "contains itself (a YAML alias to its own parent)")
        return None
    if _TAG.match(_text_of(node)) and node.tag != _TEXT_TAG:
        source.refuse(here, dotted(path), f"YAML tags have no meaning here (seen: {node.tag})", "write the plain value")
        return None
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(source, node, path, above)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            source.where[(*path, index)] = f"{source.name}:{_line(item)}"
            items.append(_build(source, item, (*path, index), above))
        return items
    assert isinstance(node, yaml.ScalarNode), node
    return _plain(node)


def _plain(node: yaml.ScalarNode) -> Any:
    """Quoted and block text is text; an unquoted word means what YAML 1.2 says."""
    unquoted = node.style is None and not _TAG.match(_text_of(node))
    return scalar(node.value) if unquoted else node.value


def _text_of(node: yaml.Node) -> str:
    """The node as it stands in the file, from its anchor or tag on."""
    mark = node.start_mark
    assert mark.buffer is not None, "composed from text, not from a stream"
    return mark.buffer[mark.pointer : node.end_mark.pointer]


def _build_mapping(source: Source, node: yaml.MappingNode, path: Path, above: tuple[int, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        here = f"{source.name}:{_line(key_node)}"
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or not isinstance(_plain(key_node), str):
            seen = "a list or mapping" if key is None else show(scalar(key))
            source.refuse(here, dotted(path), f"keys must be text (seen: {seen})", "write it in quotes")
            continue
        inner = (*path, key)
        if key in lines:
            source.refuse(here, dotted(inner), f"given twice, first in line {lines[key]}", "keep one of the two")
            continue
        lines[key] = _line(key_node)
        source.where[inner] = here
        values[key] = _build(source, value_node, inner, above)
    return values


def parse_override(text: str) -> tuple[str, Any]:
    """Splits ``key.path=value`` and reads the value as one YAML scalar, or as a list or mapping in [] or {}.

    >>> parse_override("learner.lr=1e-5"), parse_override("learner.betas=[0.9, 0.95]")
    (('learner.lr', 1e-05), ('learner.betas', [0.9, 0.95]))
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        raise ValueError(f"must read key.path=value (seen: {text!r})")
    if value[:1] not in tuple("[{'\"|>&*!"):
        return key, scalar(value)
    source = Source("value")
    try:
        node = yaml.compose(value, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ValueError(f"{value} is broken YAML ({problem}); if it is meant as text, put it in quotes") from None
    parsed = None if node is None else _build(source, node, (), ())
    if source.problems:
        raise ValueError("; ".join(problem.rule for problem in source.problems))
    return key, parsed


def apply_overrides(source: Source, overrides: Sequence[str] | Mapping[str, Any]) -> None:
    """Puts overrides on top of a source; the same key twice is refused, like a key that is not a path."""
    assert not isinstance(overrides, str), "a sequence of key=value texts, not one text"
    where = "overrides" if isinstance(overrides, Mapping) else "--set"
    seen: set[str] = set()
    for key, value in _pairs(source, overrides):
        if key in seen:
            source.refuse(where, key, "given twice", "keep one of the two")
            continue
        seen.add(key)
        _put(source, where, key, os.fspath(value) if isinstance(value, os.PathLike) else value)


def _pairs(source: Source, overrides: Sequence[str] | Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for text in overrides:
        try:
            yield parse_override(text)
        except ValueError as error:
            source.refuse("--set", text.partition("=")[0].strip(), str(error))


def _put(source: Source, where: str, key: str, value: Any) -> None:
    path: Path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    here: Any = source.data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(here, list):
            if not isinstance(part, int) or part >= len(here):
                rule = f"{dotted(path[:depth])} has {len(here)} entries, numbered from 0"
                source.refuse(where, key, f"{rule}; there is no {part!r}")
                return
        elif not isinstance(here, dict):
            source.refuse(where, key, f"{dotted(path[:depth])} = {show(here)} has no keys of its own")
            return
        elif not isinstance(part, str) or not part:
            source.refuse(where, key, "each part of a key must be a name")
            return
        elif not last:
            here.setdefault(part, [] if isinstance(path[depth + 1], int) else {})
        if last:
            here[part] = value
            _forget_below(source, path)
            source.where[path] = where
        else:
            source.where.setdefault(path[: depth + 1], where)
            here = here[part]


def _forget_below(source: Source, path: Path) -> None:
    for known in [known for known in source.where if known[: len(path)] == path]:
        del source.where[known]


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else, so that any reader gets it back."""


_Dumper.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeDumper.yaml_implicit_resolvers.items()}
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789."))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"^(?:{_INT.pattern})$"), list("-+0123456789"))


def write_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML text, keys in their order."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
