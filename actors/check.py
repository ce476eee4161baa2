"""What ``parkrl check`` looks at besides the settings: model folder, reward functions, the first rows.

Nothing here imports torch, ray or vLLM, and a reward file is read, not run: its functions are found in its syntax tree.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from rl.config import Settings
from rl.settings_errors import nearest, show

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
BUILTIN = "builtin:"


def file_problems(settings: Settings) -> list[str]:
    """What is wrong with the files that the settings name, rows left out; one line each."""
    return [*_model_problems(settings), *_reward_problems(settings)]


def _model_problems(settings: Settings) -> Iterator[str]:
    path = settings.model.path
    folder = Path(path).expanduser()
    if path.startswith(BUILTIN):
        return
    if folder.is_dir():
        yield from _folder_problems(settings, folder)
    elif folder.is_file():
        yield f"model.path = {show(path)}: is a file; it must be a Hugging Face folder or id"
    elif path.startswith(("/", ".", "~")) or not HUB_ID.fullmatch(path):
        siblings = [item.name for item in folder.parent.iterdir() if item.is_dir()] if folder.parent.is_dir() else []
        near = nearest(folder.name, siblings)
        hint = f"; did you mean {folder.parent / near}?" if near else ""
        yield f"model.path = {show(path)}: no such folder (from {Path.cwd()}), and it cannot be a Hugging Face id{hint}"


def _folder_problems(settings: Settings, folder: Path) -> Iterator[str]:
    key = f"model.path = {show(settings.model.path)}"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield f"{key}: the folder holds no config.json, so it is no Hugging Face model"
        return
    except (OSError, ValueError) as error:
        yield f"{key}: config.json cannot be read: {error}"
        return
    longest = config.get("max_position_embeddings") if isinstance(config, dict) else None
    wanted = settings.rollout.max_model_len
    if isinstance(longest, int) and wanted is not None and wanted > longest:
        yield f"rollout.max_model_len = {wanted}: more than the model's own max_position_embeddings = {longest}"
    elif isinstance(longest, int) and settings.rollout.max_new_tokens >= longest:
        new = settings.rollout.max_new_tokens
        yield f"rollout.max_new_tokens = {new}: must be less than the model's own max_position_embeddings = {longest}"


def _reward_problems(settings: Settings) -> Iterator[str]:
    for index, reward in enumerate(settings.rewards):
        if reward.function is not None and (problem := function_problem(reward.function)) is not None:
            yield f"rewards.{index}.function = {show(reward.function)}: {problem}"


def function_problem(function: str) -> str | None:
    """Why ``path/to/file.py:function`` or ``module:function`` cannot be used; None when it can.

    >>> function_problem("json:dumps") is None
    True
    >>> function_problem("json:dunps")
    "json defines no 'dunps'; did you mean 'dumps'?"
    """
    place, _, name = function.rpartition(":")
    if not place or not name.isidentifier():
        return "must be path/to/file.py:function or module:function"
    if not place.endswith(".py"):
        spec = _find_module(place)
        if spec is None:
            return f"there is no module {place} (looked in {Path.cwd()} and the installed packages)"
        if spec.origin is None or not spec.origin.endswith(".py"):
            return None  # compiled, or a namespace: only importing it could tell
        return _missing_name(Path(spec.origin), place, name)
    path = Path(place).expanduser()
    if path.is_file():
        return _missing_name(path, place, name)
    near = nearest(path.name, (item.name for item in path.parent.glob("*.py"))) if path.parent.is_dir() else None
    return f"no such file (from {Path.cwd()})" + (f"; did you mean {path.parent / near}?" if near else "")


def _find_module(name: str) -> ModuleSpec | None:
    """The module's file without importing it or its parents."""
    search: list[str] | None = [str(Path.cwd()), *sys.path]
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(len(parts)):
        if search is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    return spec


def _missing_name(path: Path, shown: str, name: str) -> str | None:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        return f"{path}:{error.lineno}: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    names = dict(_bound_names(tree.body))
    if name in names and names[name].isdecimal():
        return f"{path}:{names[name]}: {name} is a constant, not a function"
    if name in names or "*" in names:
        return None
    functions = [known for known, kind in names.items() if kind == "function" and not known.startswith("_")]
    near = nearest(name, functions)
    hint = f"did you mean {near!r}?" if near else f"it has {', '.join(functions) or 'no function'}"
    return f"{shown} defines no {name!r}; {hint}"


def _bound_names(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Names that a module binds at its top level, with "function", "other", or the line of a plain constant."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, "function"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.split(".")[0], "other") for alias in node.names)
        elif isinstance(node, ast.Assign):
            kind = str(node.lineno) if isinstance(node.value, ast.Constant) else "other"
            named = (part for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name))
            yield from ((part.id, kind) for part in named)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, "other"
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _bound_names(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _bound_names(handler.body)
