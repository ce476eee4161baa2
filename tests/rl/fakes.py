"""Plain objects behind rl/protocols.py, for the controller's tests: no Ray, no model, everything written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl.types import (
    Completion,
    GradeJob,
    Group,
    Probe,
    Prompt,
    RankBatch,
    Request,
    Score,
    StepResult,
    SyncReport,
    WeightUpdate,
)


def prompt(number: int) -> Prompt:
    return Prompt(
        str(number), f"rows.jsonl:{number + 1}", np.array([number, 99], dtype=np.int32), f"p{number}", answer="1"
    )


class Prompts(list[Prompt]):
    """As much of a PromptSet as the controller needs."""

    def __init__(self, count: int) -> None:
        super().__init__(prompt(number) for number in range(count))


@dataclass
class FakeEngine:
    """Answers each request with tokens that its seed and the loaded weights decide, last request first."""

    log: list[Any] = field(default_factory=list)
    version: int | None = None
    verified: bool = True
    before_each: Callable[[Request], None] = lambda request: None

    def generate(self, requests: Sequence[Request]) -> Iterator[list[tuple[str, Completion]]]:
        assert self.version is not None, "sampled from an engine without weights"
        self.log.append(
            ("generate", self.version, [(r.request_id, tuple(r.token_ids.tolist()), r.seed) for r in requests])
        )
        for request in reversed(requests):
            self.before_each(request)
            token = (request.seed + self.version) % 2 if request.sampling.temperature > 0 else self.version % 2
            ids = np.array([token, 7], dtype=np.int32)
            logprobs = np.array([-0.5, -0.1], dtype=np.float32)
            yield [(request.request_id, Completion(ids, logprobs, "stop", ((self.version, 2),)))]

    def load_weights(self, update: WeightUpdate) -> list[SyncReport]:
        self.log.append(("load", update.version))
        self.version = update.version
        return [SyncReport("engine-0", update.version, self.verified, 0.0, 1e-3)]

    def reset_cache(self) -> None:
        self.log.append(("reset",))


@dataclass
class FakeLearner:
    """Counts; its whole state is the number of steps it has trained."""

    world_size: int = 1
    trained: list[list[RankBatch]] = field(default_factory=list)
    steps: int = 0
    kept_until: int = 0
    before_train: Callable[[int], None] = lambda step: None

    def train(self, batches: Sequence[RankBatch], meanwhile: Callable[[], None]) -> dict[str, float]:
        self.before_train(batches[0].step)
        meanwhile()
        assert batches[0].step == self.steps + 1, (batches[0].step, self.steps)
        self.steps += 1
        self.trained.append(list(batches))
        return {"policy/loss": float(self.steps), "tokens/trained": 8.0}

    def publish(self, version: int) -> WeightUpdate:
        assert version == self.steps, (version, self.steps)
        return WeightUpdate(version, (), (), (), Probe(np.zeros(2, np.int32), np.zeros(1, np.float32)), 431)

    def save(self, folder: Path) -> None:
        (folder / "weights.txt").write_text(str(self.steps))

    def checkpointed(self, step: int, folder: Path) -> None:
        self.kept_until = step


@dataclass
class FakeGrader:
    """Right when the first token is "1"; ``outcome`` of a job may be forced."""

    order: list[str] = field(default_factory=list)
    force: Callable[[GradeJob, int], Score | None] = lambda job, index: None

    def submit(self, jobs: Sequence[GradeJob]) -> Sequence[GradeJob]:
        self.order += [job.group_id for job in jobs]
        return jobs

    def result(self, handle: Sequence[GradeJob]) -> list[list[Score]]:
        return [[self._score(job, index) for index in range(len(job.texts))] for job in handle]

    def _score(self, job: GradeJob, index: int) -> Score:
        right = job.texts[index].startswith("1")
        return self.force(job, index) or Score(float(right), "ok" if right else "wrong", {"task": float(right)})


@dataclass
class Notebook:
    """Keeps what the controller records."""

    rows: list[StepResult] = field(default_factory=list)
    groups: dict[int, list[Group]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def record(self, result: StepResult) -> None:
        self.rows.append(result)

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        self.groups[step] = list(groups)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def decode(token_ids: np.ndarray) -> str:
    return " ".join(str(token) for token in token_ids.tolist())
