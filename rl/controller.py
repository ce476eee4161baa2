"""The loop: prompts out, samples in, one training step, weights back, proven. Everything else is in its own room.

Who may stop it, and where: ``StopSignal``. What a checkpoint holds besides the learner's files: ``Controller.state``.
Synchronous training is staleness 0: every token is sampled by the weights of the step before it is trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rl.advantages import to_samples
from rl.collect import Decode, collect
from rl.config import Settings
from rl.data import PromptCursor, PromptSet
from rl.evaluate import evaluate
from rl.metrics import completion_metrics, reward_metrics
from rl.packing import pack
from rl.protocols import Grader, Learner, RolloutEngine
from rl.types import Group, Prompt, Sampling, StepResult, TrainSample


class Controller:
    """Owns the step and the order of things; all other state has an owner of its own.

    ``step`` is the number of finished steps and, in this version, the policy version as well. ``row`` holds the metrics
    of a step whose evaluation is still to come, so that a stop in between loses nothing.
    """

    def __init__(self, parts: Parts, state: Mapping[str, Any] | None = None, stop: StopSignal | None = None) -> None:
        self.parts = parts
        self.settings = parts.settings
        self.stop = stop or StopSignal()
        self.step = 0
        self.row: dict[str, float] | None = {}
        self.last_checkpoint: int | None = None
        self._saving: dict[str, float] = {}
        if state is not None:
            self.step, self.row = state["step"], state["row"]
            self.last_checkpoint = self.step
            parts.cursor.restore(state["cursor"])

    def run(self) -> Iterator[StepResult]:
        """Yields step 0 (the evaluation before training), then every step. Raises Interrupted when told to stop."""
        first = self._sync()
        if self.row == {}:
            self.row = first
        if self.row is not None:
            yield self._finish()
        while self.step < self.parts.total_steps:
            self._train_step()
            yield self._finish()

    def _train_step(self) -> None:
        """One turn. Until the learner begins it can be given up without a trace; then it is seen through."""
        parts, step = self.parts, self.step + 1
        clock = Clock(self._saving)
        before = parts.cursor.state()
        try:
            with self.stop.interruptible():
                prompts = [parts.train_prompts[row] for row in parts.cursor.take(parts.prompts_per_step)]
                collected = self._collect(prompts, step)
                check_errors(collected.groups, self.settings.grading.max_error_rate)
        except BaseException:
            parts.cursor.restore(before)
            raise
        clock.add("rollout", collected.rollout_seconds)
        clock.add("grading", collected.grading_seconds)
        with clock.phase("pack"):
            algorithm, learner = self.settings.algorithm, self.settings.learner
            samples = [
                sample for group in collected.groups for sample in to_samples(group, algorithm.advantage_epsilon)
            ]
            batches = pack(
                samples,
                world_size=parts.learner.world_size,
                updates=learner.updates_per_batch,
                max_tokens=learner.max_tokens_per_micro_batch,
                step=step,
            )
        if not samples:
            parts.watcher.warn(f"step {step}: no sample could be scored; the weights stay as they are")
        with clock.phase("train"):
            learned = parts.learner.train(batches, meanwhile=lambda: parts.watcher.samples(step, collected.groups))
        self.step = step  # from here on the learner is a step further, and so are we
        self._saving = {}
        self.row = None
        with clock.phase("sync"):
            synced = self._sync()
        completed = completion_metrics(collected.groups)
        self.row = (
            reward_metrics(collected.groups)
            | completed
            | learned
            | synced
            | {"staleness/max": float(max_staleness(samples, step - 1))}
            | {"data/epoch": float(parts.cursor.epoch), "data/rows": float(step * parts.prompts_per_step)}
            | clock.metrics(completed["tokens/generated"], learned)
        )

    def _finish(self) -> StepResult:
        """Evaluates when due, records the row, saves when due."""
        assert self.row is not None
        if self._due(self.settings.train.eval_every) and self.parts.eval_prompts:
            started = time.monotonic()
            with self.stop.interruptible():
                self.row |= self.evaluate()
            self.row["time/eval"] = time.monotonic() - started
        result = StepResult(self.step, self.step, self.row)
        self.row = None
        self.parts.watcher.record(result)
        if self.step > 0 and self._due(self.settings.train.checkpoint_every):
            self.save()
        self.stop.check()
        return result

    def _due(self, every: int) -> bool:
        return self.step in (0, self.parts.total_steps) or (every > 0 and self.step % every == 0)

    def evaluate(self) -> dict[str, float]:
        """``eval/...`` of the weights that the engines hold now; training is left untouched."""
        parts, rollout = self.parts, self.settings.rollout
        sampling = Sampling(rollout.max_new_tokens, self.settings.eval.temperature, parts.stop_token_ids)
        metrics, _ = evaluate(
            parts.engine,
            parts.grader,
            parts.decode,
            parts.eval_prompts,
            samples=self.settings.eval.samples,
            sampling=sampling,
            seed=self.settings.run.seed,
        )
        return metrics

    def _collect(self, prompts: Sequence[Prompt], step: int) -> Any:
        sampling = Sampling(
            self.settings.rollout.max_new_tokens, self.settings.rollout.temperature, self.parts.stop_token_ids
        )
        return collect(
            self.parts.engine,
            self.parts.grader,
            self.parts.decode,
            prompts,
            samples=self.settings.algorithm.group_size,
            sampling=sampling,
            label=step,
            seed=self.settings.run.seed,
        )

    def _sync(self) -> dict[str, float]:
        """Publishes the learner's weights as version ``step``; every engine loads and proves them before it samples."""
        started = time.monotonic()
        update = self.parts.learner.publish(self.step)
        reports = self.parts.engine.load_weights(update)
        for report in reports:
            if not report.verified:
                self.parts.watcher.warn(
                    f"step {self.step}: {report.engine} does not hold version {self.step}: {report}"
                )
        if not any(report.verified for report in reports):
            raise RuntimeError(f"no engine could be proven to hold version {self.step} of the weights: {reports}")
        return {
            "sync/verified": float(all(report.verified for report in reports)),
            "sync/probe_max_abs": max(report.probe_max_abs for report in reports if report.verified),
            "sync/bytes": float(update.nbytes),
            "sync/seconds": time.monotonic() - started,
        }

    def save(self) -> None:
        """A checkpoint of the last finished step, unless there is one."""
        if self.last_checkpoint == self.step:
            return
        started = time.monotonic()
        folder = self.parts.save_checkpoint(self.step, self.parts.learner.save, self.state())
        self.parts.learner.checkpointed(self.step, folder)
        self.last_checkpoint = self.step
        self._saving = {"checkpoint": time.monotonic() - started}

    def state(self) -> dict[str, Any]:
        """What a run needs to go on, besides the learner's own: plain JSON."""
        return {"step": self.step, "policy_version": self.step, "row": self.row, "cursor": self.parts.cursor.state()}


@dataclass(frozen=True)
class Parts:
    """What the controller works with; ``actors/launch.py`` puts it together, tests put in plain objects."""

    settings: Settings
    engine: RolloutEngine
    learner: Learner
    grader: Grader
    decode: Decode
    train_prompts: PromptSet
    eval_prompts: Sequence[Prompt]
    cursor: PromptCursor
    stop_token_ids: tuple[int, ...]
    total_steps: int
    watcher: Watcher
    save_checkpoint: Callable[[int, Callable[..., None], dict[str, Any]], Any]

    @property
    def prompts_per_step(self) -> int:
        return self.settings.rollout.prompts_per_step


class Watcher(Protocol):
    """Whoever records and shows what happens."""

    def record(self, result: StepResult) -> None: ...

    def samples(self, step: int, groups: Sequence[Group]) -> None: ...

    def warn(self, text: str) -> None: ...


class Interrupted(Exception):
    """The run was asked to stop, and stands at a point from which it can go on."""


class StopSignal:
    """A wish to stop, honoured at once inside ``interruptible`` and at the next safe point elsewhere."""

    def __init__(self) -> None:
        self.requested = False
        self._interruptible = False

    def request(self) -> None:
        """May be called from a signal handler of the main thread."""
        self.requested = True
        if self._interruptible:
            self._interruptible = False  # once is enough: what unwinds must not be interrupted again
            raise Interrupted

    def check(self) -> None:
        if self.requested:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        self.check()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False


class Clock:
    """Seconds per phase of one step."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.started = time.monotonic()
        self.seconds = dict(seconds)  # what the step before left over: its checkpoint

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def metrics(self, generated: float, learned: Mapping[str, float]) -> dict[str, float]:
        step = time.monotonic() - self.started + self.seconds.get("checkpoint", 0.0)
        rollout, train = self.seconds["rollout"], self.seconds["train"]
        return {
            **{f"time/{name}": seconds for name, seconds in self.seconds.items()},
            "time/step": step,
            "idle/rollout": 1 - rollout / step,
            "idle/learner": 1 - train / step,
            "tokens/generated_per_s": generated / rollout,
            "tokens/trained_per_s": learned.get("tokens/trained", 0.0) / train,
        }


def max_staleness(samples: Sequence[TrainSample], version: int) -> int:
    """Most versions that any token lags behind ``version``, the newest published before this step was trained."""
    return max((version - sampled for sample in samples for sampled, _ in sample.version_spans), default=0)


def check_errors(groups: Sequence[Group], limit: float) -> None:
    """Raises RuntimeError with the first grader's words when more than ``limit`` of the samples failed."""
    scores = [trajectory.score for group in groups for trajectory in group.trajectories]
    failed = [score for score in scores if score.outcome in ("error", "timeout")]
    if len(failed) > limit * len(scores):
        raise RuntimeError(
            f"{len(failed)} of {len(scores)} samples could not be graded, more than grading.max_error_rate={limit:g}; "
            f"the first ({failed[0].outcome}): {failed[0].detail}"
        )
