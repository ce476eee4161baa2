"""From settings to callable components, in two steps.

``describe`` runs on the driver: it checks the settings and makes plain ``Spec`` records that hold everything a grader
process needs, the source text of a user's file included, so that a machine without that file can run it too.
``load_components`` runs once in every grader process: it executes the files and checks the functions' signatures.
"""

from __future__ import annotations

import difflib
import importlib
import linecache
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.rewards.component import Component

if TYPE_CHECKING:
    from rl.config import Reward

_HEAVY = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}


@dataclass(frozen=True)
class Spec:
    """One component, ready to travel: built in (``name``), a file's (``path``, ``source``), a module's or pickled."""

    label: str  # its key in Score.parts
    weight: float
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    function: str = ""  # the function's name within its file or module
    path: str | None = None  # absolute, on the driver
    source: str | None = None
    module: str | None = None
    pickled: bytes | None = None


def describe(
    components: Sequence[Reward],
    task: str | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    task_options: Mapping[str, Any] | None = None,
) -> list[Spec]:
    """The components of a run. Without any: the task's own grader, or exact_match where there is no task.

    ``task`` is data.train where it names a task (builtin:NAME, reasoning_gym:NAME, or a built-in NAME), with the
    options that its rows were made with. ``functions`` are callables that ``Reward.function`` may name. Labels are the
    component's or function's name, with #2, #3, ... for repetitions. Raises ValueError for a missing file, a form that
    is not understood, a bad pattern.
    """
    specs: list[Spec] = []
    of_task = {"source": task, "options": dict(task_options or {})} if task else {}
    for reward in components:
        spec = _builtin(reward, of_task) if reward.name else _own(str(reward.function), reward.weight, functions or {})
        specs.append(spec)
    if not specs:
        name = "task" if task else "exact_match"
        specs.append(Spec(name, 1.0, name, of_task))
    return _unique(specs)


def load_components(specs: Sequence[Spec], columns: Sequence[str] | None = None) -> list[Component]:
    """Imports every component and checks its signature; files and modules are executed once per process.

    ``columns`` are the data's column names, if known: a parameter that nothing can fill is then refused here. Raises
    ValueError, naming the function and the nearest name, and passes on what a user's file raises.
    """
    from rl.rewards import REWARDS
    from rl.rewards.builtin import make_task

    modules: dict[str, types.ModuleType] = {}
    loaded = []
    for spec in specs:
        if spec.name is not None:
            options = {"task": make_task(**spec.options)} if spec.name == "task" else dict(spec.options)
            loaded.append(Component(spec.label, REWARDS[spec.name], options, columns=columns))
            if heavy := _HEAVY.get(str(spec.options.get("source", spec.name)).partition(":")[0]):
                importlib.import_module(heavy)  # seconds that must not count against a sample
            continue
        shown = f"{spec.path or spec.module}:{spec.function}" if spec.pickled is None else spec.function
        loaded.append(Component(spec.label, _find(spec, modules, shown), {}, shown=shown, columns=columns))
    return loaded


def _builtin(reward: Reward, of_task: Mapping[str, Any]) -> Spec:
    assert reward.name is not None
    options: dict[str, Any] = {}
    if reward.pattern is not None:
        try:
            re.compile(reward.pattern)
        except re.error as error:
            raise ValueError(f"rewards: pattern {reward.pattern!r} is not a regular expression: {error}") from error
        options["pattern"] = reward.pattern
    if reward.overlong_buffer is not None:
        options["overlong_buffer"] = reward.overlong_buffer
    if reward.name == "task":
        if not of_task:
            raise ValueError(
                "rewards: name: task needs data of a task (data.train: builtin:NAME or reasoning_gym:NAME)"
            )
        options.update(of_task)
    return Spec(reward.name, reward.weight, reward.name, options)


def _own(function: str, weight: float, functions: Mapping[str, Callable[..., Any]]) -> Spec:
    if function in functions:
        return Spec(function, weight, function=function, pickled=_pickle(functions[function]))
    place, colon, name = function.rpartition(":")
    if not colon or not place or not name.isidentifier():
        near = difflib.get_close_matches(function, functions, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"rewards: function {function!r} must be path/to/file.py:function or module:function{hint}")
    if not place.endswith(".py"):
        return Spec(name, weight, function=name, module=place)
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f" (did you mean {path.with_name(near[0])}?)" if near else ""
        raise ValueError(f"rewards: function {function!r}: there is no file {path}{hint}")
    return Spec(name, weight, function=name, path=str(path), source=path.read_text(encoding="utf-8"))


def _pickle(function: Callable[..., Any]) -> bytes:
    """By value, unless its module is installed: other machines need not have the driver's scripts."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if (
        module is None
        or file is None
        or module.__name__ == "__main__"
        or file.startswith((sys.prefix, sys.base_prefix))
    ):
        return bytes(cloudpickle.dumps(function))
    if module.__name__.partition(".")[0] in ("rl", "actors"):
        return bytes(cloudpickle.dumps(function))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _unique(specs: Sequence[Spec]) -> list[Spec]:
    seen: dict[str, int] = {}
    unique = []
    for spec in specs:
        seen[spec.label] = seen.get(spec.label, 0) + 1
        unique.append(replace(spec, label=f"{spec.label}#{seen[spec.label]}") if seen[spec.label] > 1 else spec)
    return unique


def _find(spec: Spec, modules: dict[str, types.ModuleType], shown: str) -> Callable[..., Any]:
    if spec.pickled is not None:
        import cloudpickle

        function = cloudpickle.loads(spec.pickled)
    else:
        place = spec.path or spec.module or ""
        if place not in modules:
            modules[place] = _execute(spec.path, spec.source or "") if spec.path else importlib.import_module(place)
        module = modules[place]
        if not hasattr(module, spec.function):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            near = difflib.get_close_matches(spec.function, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'no function'}"
            raise ValueError(f"rewards: {place} has no function {spec.function!r}: {hint}")
        function = getattr(module, spec.function)
    if not callable(function):
        raise ValueError(f"rewards: {shown} is a {type(function).__name__}, not a function")
    return function


def _execute(path: str, source: str) -> types.ModuleType:
    """Runs a file's text as a module; its folder is importable from, and tracebacks show its lines."""
    module = types.ModuleType(f"reward_file_{Path(path).stem}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)
    return module
