"""What the controller needs of the outside world, and nothing more.

The real ones live in ``actors/`` and run on Ray. Tests of the controller use plain objects with these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl.types import Completion, GradeJob, RankBatch, Request, Score, SyncReport, WeightUpdate


class RolloutEngine(Protocol):
    """Something that samples: one engine or a pool of them."""

    def generate(self, requests: Sequence[Request]) -> Iterator[list[tuple[str, Completion]]]:
        """Yields what has finished, as (request_id, completion), whenever something has; every request exactly once.

        Raises RuntimeError naming the engine and its last words when no engine that may be sampled from is left.
        """
        ...

    def load_weights(self, update: WeightUpdate) -> list[SyncReport]:
        """Loads and proves a version on every engine; an engine that is not verified is not sampled from."""
        ...

    def reset_cache(self) -> None:
        """Forgets cached prefixes on every engine, so that what was evaluated leaves no trace."""
        ...


class Learner(Protocol):
    """The owner of weights, optimizer, learning rate and policy version."""

    world_size: int

    def train(self, batches: Sequence[RankBatch], meanwhile: Callable[[], None]) -> dict[str, float]:
        """All optimizer updates of one step; ``batches[r]`` is rank r's. Returns global metrics (``policy/...``).

        ``meanwhile`` is called once, after the work has been handed out.
        """
        ...

    def publish(self, version: int) -> WeightUpdate:
        """The current weights as version ``version``."""
        ...

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer, schedule and random states as files into ``folder``, which exists."""
        ...

    def checkpointed(self, step: int, folder: Path) -> None:
        """Tells that ``folder`` holds a valid checkpoint of ``step``: batches up to it need not be kept."""
        ...


class Grader(Protocol):
    """Grades groups beside generation."""

    def submit(self, jobs: Sequence[GradeJob]) -> Any:
        """Begins to grade groups; returns a handle for ``result``."""
        ...

    def result(self, handle: Any) -> list[list[Score]]:
        """Waits; for every group in order one score per completion, in the group's order."""
        ...


class MetricSink(Protocol):
    """Something that records: metrics.jsonl, TensorBoard, the terminal."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...
