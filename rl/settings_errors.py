"""What is wrong with a run's settings, in words that say where, what was seen, the rule, and the nearest right one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]  # of a key: ("rewards", 0, "weight")
_UNSEEN = object()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong: ``where`` is file:line or "--set", ``key`` the dotted name ("" for the file as a whole)."""

    where: str
    key: str
    rule: str
    suggestion: str = ""

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.where, self.key, self.rule) if part)
        return f"{text}; {self.suggestion}" if self.suggestion else text


class SettingsError(ValueError):
    """The settings were refused; ``problems`` holds every one found, not only the first."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        assert self.problems, source
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count} in the settings", *map(str, self.problems)]))


def dotted(path: Path) -> str:
    """The name under which ``--set`` knows a key.

    >>> dotted(("rewards", 0, "weight"))
    'rewards.0.weight'
    """
    return ".".join(str(part) for part in path)


def show(value: Any, limit: int = 80) -> str:
    """A value as it reads in YAML, cut to ``limit`` characters.

    >>> show(True), show(None), show("on"), show(float("nan"))
    ('true', 'null', "'on'", '.nan')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value != value:
        return ".nan"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that ``word`` was most likely meant to be, if any comes close.

    >>> nearest("grup_size", ["group_size", "name"])
    'group_size'
    """
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def submodel(field: FieldInfo) -> type[BaseModel] | None:
    """The section behind a field, also behind a list of sections (``rewards``)."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, BaseModel):
            return kind
    return None


def field_at(model: type[BaseModel], path: Path) -> FieldInfo | None:
    """The declared setting at ``path``; None if there is none (also inside free mappings such as engine_args)."""
    field: FieldInfo | None = None
    for depth, part in enumerate(path):
        if isinstance(part, int):
            continue
        inner = model if depth == 0 else submodel(field) if field is not None else None
        if inner is None or part not in inner.model_fields:
            return None
        field = inner.model_fields[part]
    return field


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a model, sections left out."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = submodel(field)
        keys.extend([prefix + name] if inner is None else all_keys(inner, f"{prefix}{name}."))
    return keys


def suggest_key(model: type[BaseModel], path: Path) -> str:
    """What an unknown key was probably meant to be: looked for in its own section first, then everywhere."""
    section = model
    for part in path[:-1]:
        if isinstance(part, str):
            inner = submodel(section.model_fields[part])
            assert inner is not None, path
            section = inner
    prefix = dotted(path[:-1]) + "." if len(path) > 1 else ""
    word = str(path[-1])
    if (near := nearest(word, section.model_fields)) is not None:
        return f"did you mean {prefix}{near}?"
    everywhere = all_keys(model)
    if same := [key for key in everywhere if key.rsplit(".", 1)[-1] == word]:
        return f"did you mean {same[0]}?"
    last_parts = {key.rsplit(".", 1)[-1]: key for key in everywhere}
    if (near := nearest(word, last_parts)) is not None:
        return f"did you mean {last_parts[near]}?"
    return f"known here: {', '.join(section.model_fields)}"


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "dict_type": "a mapping (key: value)",
    "model_type": "a section (keys and values)",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _kind_hint(kind: str, value: Any, field: FieldInfo | None) -> str:
    """The nearest right way to write a value of the wrong type."""
    hints = []
    if kind == "bool_type" and isinstance(value, str) and value.lower() in {"on", "yes", "y", "off", "no", "n"}:
        hints.append(f"write {'true' if value.lower() in {'on', 'yes', 'y'} else 'false'}")
    elif kind == "string_type" and isinstance(value, int | float) and value == value:
        hints.append(f"write it in quotes: '{show(value)}'")
    elif kind in {"int_type", "int_from_float"} and isinstance(value, float) and value.is_integer():
        hints.append(f"write {int(value)}")
    elif kind in {"int_type", "float_type"} and isinstance(value, str):
        try:
            number = float(value) if kind == "float_type" else int(value)
        except ValueError:
            pass
        else:
            hints.append(f"write {number} without quotes")
    elif kind == "model_type" and value is None:
        hints.append("leave the whole section out to get its defaults")
    if not hints and field is not None and value is None and not field.is_required() and field.default is not None:
        hints.append(f"leave it out to get the default, {show(field.get_default(call_default_factory=True))}")
    return hints[0] if hints else ""


def explain(model: type[BaseModel], error: ValidationError, where: Mapping[Path, str], source: str) -> list[Problem]:
    """Each pydantic error as a Problem; ``where`` tells from which file and line a key came."""
    problems = []
    for item in error.errors(include_url=False):
        path: Path = tuple(item["loc"])
        problems.append(_explain_one(model, dict(item), path, locate(where, path, source)))
    return problems


def locate(where: Mapping[Path, str], path: Path, source: str) -> str:
    """Where a key was given; for a key that was not given, where its nearest given section begins, else the file."""
    for length in range(len(path), 0, -1):
        if path[:length] in where:
            return where[path[:length]]
    return source


def _choices(field: FieldInfo) -> list[str]:
    """The words of a Literal, also of one that may be null."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def _explain_one(model: type[BaseModel], item: dict[str, Any], path: Path, where: str) -> Problem:
    kind, value, context = item["type"], item.get("input", _UNSEEN), item.get("ctx", {})
    field = field_at(model, path)
    key = f"{dotted(path)} = {show(value)}"
    if kind == "missing":
        return Problem(where, dotted(path), "missing, and it has no default")
    if kind == "extra_forbidden":
        return Problem(where, key, "unknown setting", suggest_key(model, path))
    if kind == "literal_error":
        words = _choices(field) if field is not None else []
        near = nearest(str(value), words)
        return Problem(where, key, f"must be one of {context['expected']}", f"did you mean {near!r}?" if near else "")
    if kind in _BOUNDS:
        words_, name = _BOUNDS[kind]
        nearest_right = f"the nearest allowed is {context[name]}" if name in ("ge", "le") else ""
        meaning = f" ({field.description.rstrip('.')})" if field is not None and field.description else ""
        return Problem(where, key, f"must be {words_} {context[name]}{meaning}", nearest_right)
    if kind == "string_too_short":
        return Problem(where, key, "must not be empty")
    if kind == "value_error":
        return Problem(where, dotted(path), str(context["error"]))
    if kind in _KINDS:
        optional = field is not None and type(None) in get_args(field.annotation)
        rule = f"must be {_KINDS[kind]}" + (" or null" if optional else "")
        return Problem(where, key, rule, _kind_hint(kind, value, field))
    return Problem(where, key, item["msg"])
