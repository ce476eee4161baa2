"""From a settings file (or a shipped configuration) to checked ``Settings``, and back to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl.config import Settings
from rl.settings_checks import findings
from rl.settings_errors import Problem, SettingsError, explain, locate, nearest
from rl.settings_yaml import Source, apply_overrides, read_yaml, write_yaml

BUILTIN = "builtin:"


def load(path_or_builtin: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Settings:
    """Reads a run's settings and refuses whatever cannot work, every problem at once.

    ``path_or_builtin`` is a YAML file (UTF-8), or ``builtin:NAME`` for a shipped configuration. ``overrides`` are
    ``"key.path=value"`` texts as on the command line, or a mapping from dotted keys to values.

    Raises SettingsError (a ValueError) that lists every problem with place, key, value seen, rule and nearest right
    one. Relative paths inside the settings are left as they are: they count from the working directory.

    >>> load("builtin:quickstart", {"train.steps": 20}).train.steps
    20
    """
    name, content = _read(str(path_or_builtin))
    source = read_yaml(name, content)
    if source.data or not source.problems:
        apply_overrides(source, overrides)
    return _validate(source)


def from_mapping(data: Mapping[str, Any], name: str = "settings") -> Settings:
    """Settings from plain nested data, checked like a file's.

    >>> from_mapping({"train": {"steps": 3}}).algorithm.group_size
    8
    """
    return _validate(Source(name, dict(data)))


def dump(settings: Settings) -> str:
    """The settings as YAML with every default written out; ``load`` of it gives equal settings."""
    return write_yaml(settings.model_dump(mode="json"))


def builtin_names() -> list[str]:
    """The shipped configurations, as ``builtin:NAME`` takes them."""
    return sorted(item.name[:-5] for item in resources.files("configs").iterdir() if item.name.endswith(".yaml"))


def _read(path: str) -> tuple[str, bytes]:
    if path.startswith(BUILTIN):
        name, names = path.removeprefix(BUILTIN), builtin_names()
        if name not in names:
            near = nearest(name, names)
            rule = f"no such shipped configuration; there are {', '.join(BUILTIN + known for known in names)}"
            raise SettingsError(path, [Problem("", "", rule, f"did you mean {BUILTIN}{near}?" if near else "")])
        return path, (resources.files("configs") / f"{name}.yaml").read_bytes()
    try:
        return path, Path(path).read_bytes()
    except FileNotFoundError:
        raise SettingsError(path, [Problem("", "", "no such file", _nearest_file(Path(path)))]) from None
    except OSError as error:
        raise SettingsError(path, [Problem("", "", f"cannot be read: {error.strerror}")]) from None


def _nearest_file(path: Path) -> str:
    if f"{path}" in builtin_names():
        return f"did you mean {BUILTIN}{path}?"
    if not path.parent.is_dir():
        return f"nor is there a folder {path.parent}"
    near = nearest(path.name, (item.name for item in path.parent.iterdir() if item.suffix in (".yaml", ".yml")))
    return f"did you mean {path.parent / near}?" if near else ""


def _validate(source: Source) -> Settings:
    if source.problems and not source.data:
        raise SettingsError(source.name, source.problems)
    problems = list(source.problems)
    try:
        settings = Settings.model_validate(source.data)
    except ValidationError as error:
        problems.extend(explain(Settings, error, source.where, source.name))
        raise SettingsError(source.name, problems) from None
    for key, rule, suggestion in findings(settings):
        path = tuple(int(part) if part.isdecimal() else part for part in key.split(" = ")[0].split("."))
        problems.append(Problem(locate(source.where, path, source.name), key, rule, suggestion))
    if problems:
        raise SettingsError(source.name, problems)
    return settings
