"""The learner as the controller sees it: a TorchTrainer around ``actors/learner.py``, watched and restarted.

``TorchTrainer.fit()`` blocks, retries a start that cannot succeed for ever, and looks at its workers now and then only.
It therefore runs in a small actor of its own: that actor's end is a reference that can be waited for together with the
answer of the ranks, under deadlines of ours, and killing it takes Ray Train's controller and workers down with it.

Nothing is lost when a rank dies. The batches of every step are kept in ``run_dir/batches`` until a checkpoint that
contains the step is known to be valid. A new worker group loads the newest such checkpoint, is given the kept batches
again in order, and then the command that was interrupted: on one machine the result is that of an undisturbed run, bit
for bit.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.inbox import Command, Failure, InboxActor
from rl.config import Settings
from rl.types import RankBatch, WeightUpdate

TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how soon a killed worker is noticed; 2 s by default
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # it would restart workers by itself, without their batches
}
TEARDOWN_SECONDS = 30.0


def train_function(config: dict[str, Any]) -> None:
    """What Ray Train runs on every worker. Imported there only: its own controller needs no transformers."""
    from actors.learner import run_rank

    run_rank(config)


class TrainerHost:
    """Runs one ``TorchTrainer.fit()`` and nothing else."""

    def fit(self, config: dict[str, Any], storage: str) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
        from ray.train.v2.api.config import LoggingConfig

        from rl.device import DEVICES

        learner = config["settings"].learner
        run: dict[str, Any] = {
            "name": f"attempt_{config['attempt']}",
            "storage_path": storage,
            "failure_config": FailureConfig(max_failures=0),  # restarts are ours: they need the batches again
            "worker_runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(learner.threads)}},
            "logging_config": LoggingConfig(log_level="ERROR"),
        }
        TorchTrainer(
            train_function,
            train_loop_config=config,
            torch_config=TorchConfig(
                backend=DEVICES[learner.device].dist_backend, timeout_s=max(1, int(learner.step_timeout))
            ),
            scaling_config=ScalingConfig(num_workers=learner.workers, use_gpu=learner.device == "cuda"),
            run_config=RunConfig(**run),
        ).fit()


class LearnerGroup:
    """Implements ``rl.protocols.Learner`` on Ray; made by ``start``."""

    def __init__(
        self, settings: Settings, model_path: str, run_dir: Path, total_updates: int, checkpoint: Path | None
    ) -> None:
        self.settings = settings
        self.world_size = settings.learner.workers
        self.model_path = model_path
        self.run_dir = run_dir.resolve()
        self.total_updates = total_updates
        self.checkpoint = checkpoint.resolve() if checkpoint is not None else None
        self.restarts = 0
        self._attempt = -1
        self._sequence = 0
        self._ranks: list[dict[str, Any]] = []
        self._held: dict[int, Path] = {}  # step -> its spilled batches
        self._published: WeightUpdate | None = None  # what the last step's training brought along
        self._host: Any = None
        self._fit: Any = None
        self._here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._inbox = InboxActor.options(scheduling_strategy=self._here).remote(self.world_size)

    @classmethod
    def start(
        cls, settings: Settings, model_path: str, run_dir: Path, total_updates: int, checkpoint: Path | None
    ) -> LearnerGroup:
        """Starts all ranks and waits until each has loaded the model (and the checkpoint) and has reported.

        ``total_updates`` is the number of optimizer updates of the whole run, for the learning rate's schedule.
        Raises RuntimeError with a rank's last words, or with what is missing when ``learner.start_timeout`` is over.
        """
        group = cls(settings, model_path, run_dir, total_updates, checkpoint)
        (group.run_dir / "batches").mkdir(parents=True, exist_ok=True)
        for leftover in (group.run_dir / "batches").glob("step_*"):
            leftover.unlink()
        try:
            while (failures := group._begin()) is not None:
                group._may_restart("start", failures)
        except BaseException:
            group._kill()
            raise
        return group

    def describe(self) -> list[dict[str, Any]]:
        """Each rank's own account: rank, host, pid, node_id, device, chip and slice (None where there is none)."""
        return [dict(rank) for rank in self._ranks]

    def train(self, batches: Sequence[RankBatch], meanwhile: Callable[[], None] = lambda: None) -> dict[str, float]:
        """All optimizer updates of one step; ``batches[r]`` is rank r's. Returns global metrics.

        ``meanwhile`` is called once while the ranks train. The batches are written to ``run_dir/batches`` in that time
        too, and kept until ``checkpointed``. Raises RuntimeError when a rank raised, hung past ``learner.step_timeout``
        or died once too often.
        """
        assert len(batches) == self.world_size, (len(batches), self.world_size)
        step = batches[0].step

        def on_posted() -> None:
            self._hold(step, batches)
            meanwhile()

        answers = self._call_or_restart("train", {"batches": batches, "publish": step}, on_posted)
        metrics, self._published = answers[0]
        return metrics

    def publish(self, version: int) -> WeightUpdate:
        """The current weights as version ``version``, with a fresh probe of them. The buckets belong to rank 0.

        After step n the ranks have published version n on their own: it is what is asked for next, and a round trip
        less.
        """
        published, self._published = self._published, None
        if published is not None and published.version == version and not ray.wait([self._fit], timeout=0)[0]:
            return published
        return self._call_or_restart("publish", {"version": version})[0]

    def save(self, folder: Path) -> None:
        """Writes the learner's whole state into ``folder``, which exists and which every rank can reach.

        It becomes a Hugging Face folder (model.safetensors, config.json, tokenizer files); optimizer.safetensors,
        trainer.json and rank_R.pt lie in its folder ``trainer``.
        """
        self._call_or_restart("save", {"folder": str(folder.resolve())})

    def checkpointed(self, step: int, folder: Path) -> None:
        """Tells that ``folder`` holds, validated, what ``save`` wrote after ``step``.

        A restart begins from it, so the batches up to ``step`` are no longer kept.
        """
        self.checkpoint = folder.resolve()
        for held in [number for number in self._held if number <= step]:
            self._held.pop(held).unlink()

    def close(self) -> None:
        """Stops all ranks and waits until Ray Train has given their resources back; safe to call twice."""
        if self._host is None:
            return
        try:
            stopped = self._inbox.call.remote(self._attempt, self._sequence, Command("stop"))
            ray.wait([stopped, self._fit], num_returns=2, timeout=TEARDOWN_SECONDS)
        finally:
            self._kill()

    # -- one attempt ---------------------------------------------------------------------------------------------

    def _begin(self) -> list[Failure] | None:
        """Starts a worker group; None once all ranks are up, else what went wrong (empty: they died silently)."""
        learner = self.settings.learner
        self._attempt += 1
        self._sequence = 0
        ray.get(self._inbox.begin.remote(self._attempt))
        config = {
            "settings": self.settings,
            "inbox": self._inbox,
            "attempt": self._attempt,
            "model_path": self.model_path,
            "checkpoint": str(self.checkpoint) if self.checkpoint is not None else None,
            "total_updates": self.total_updates,
        }
        if self._host is None:
            host = ray.remote(num_cpus=0, runtime_env={"env_vars": TRAIN_ENVIRONMENT})(TrainerHost)
            self._host = host.options(scheduling_strategy=self._here).remote()
        # a restart writes its own folder: Ray Train would otherwise take a finished run of that name for its past
        storage = self.run_dir / "ray_train" / f"{os.getpid()}-{time.time_ns()}"
        self._fit = self._host.fit.remote(config, str(storage))
        ranks = self._wait(self._inbox.all_present.remote(self._attempt), learner.start_timeout)
        if ranks == "late":
            present = ray.get(self._inbox.present.remote())
            self._kill()
            raise RuntimeError(
                f"the learner did not start within learner.start_timeout={learner.start_timeout:g} s: "
                f"ranks {present or 'none'} of {self.world_size} have reported; the cluster has "
                f"{_amounts(ray.cluster_resources())}, of which free {_amounts(ray.available_resources())}"
            )
        if ranks is None:
            return self._end()
        self._ranks = ranks
        return None

    def _wait(self, answer: Any, timeout: float) -> Any:
        """The answer; None when a rank failed or Ray Train gave up; "late" when the deadline passed."""
        ready, _ = ray.wait([answer, self._fit], num_returns=1, timeout=timeout)
        if answer in ready:
            return ray.get(answer)
        return None if ready else "late"

    def _end(self) -> list[Failure]:
        """Waits for Ray Train to take a failed worker group down; the ranks' last words, if any had some."""
        ended, _ = ray.wait([self._fit], timeout=TEARDOWN_SECONDS)
        failures = ray.get(self._inbox.last_words.remote())
        if ended and not failures:
            try:
                ray.get(self._fit)
            except RayError as error:
                failures = [Failure(-1, str(error), peer_lost=True)]
                if isinstance(error, RayActorError):
                    self._kill()
        if not ended:
            self._kill()
        return failures

    def _kill(self) -> None:
        if self._host is not None:
            ray.kill(self._host)
            self._host = None

    # -- commands ------------------------------------------------------------------------------------------------

    def _call_or_restart(self, kind: Any, arguments: dict[str, Any], on_posted: Any = None) -> list[Any]:
        answers = self._call(kind, arguments, on_posted)
        while not isinstance(answers, list):
            self._may_restart(kind, answers.failures)
            broken = self._recover(before=arguments["batches"][0].step if kind == "train" else None)
            answers = broken if broken is not None else self._call(kind, arguments)
        return answers

    def _recover(self, before: int | None) -> _Broken | None:
        """A new worker group, brought to where the old one was: the kept steps before ``before`` are trained again."""
        failures = self._begin()
        if failures is not None:
            return _Broken(failures)
        for step in sorted(self._held):
            if before is None or step < before:
                batches = pickle.loads(self._held[step].read_bytes())
                answers = self._call("train", {"batches": batches, "publish": None})
                if isinstance(answers, _Broken):
                    return answers
        return None

    def _call(self, kind: Any, arguments: dict[str, Any], on_posted: Any = None) -> list[Any] | _Broken:
        """One command in the present attempt."""
        if kind == "train":
            arguments = arguments | {"batches": [ray.put(batch) for batch in arguments["batches"]]}
        answer = self._inbox.call.remote(self._attempt, self._sequence, Command(kind, arguments))
        self._sequence += 1
        if on_posted is not None:
            on_posted()
        answers = self._wait(answer, self.settings.learner.step_timeout)
        if answers == "late":
            self._kill()
            raise RuntimeError(
                f"the learner did not finish {kind!r} within learner.step_timeout="
                f"{self.settings.learner.step_timeout:g} s; ranks: {self._ranks}"
            )
        return answers if answers is not None else _Broken(self._end())

    def _may_restart(self, kind: str, failures: Sequence[Failure]) -> None:
        """Returns when a dead worker group may be started again, else raises RuntimeError."""
        own = [failure for failure in failures if not failure.peer_lost]
        if own:
            self._kill()
            raise RuntimeError(f"learner rank {own[0].rank} failed in {kind!r}:\n{own[0].words}")
        if self.restarts >= self.settings.learner.max_restarts:
            self._kill()
            words = "; ".join(failure.words for failure in failures) or "its ranks died without a word"
            raise RuntimeError(
                f"the learner died in {kind!r} and was restarted {self.restarts} times already "
                f"(learner.max_restarts={self.settings.learner.max_restarts}); last words: {words}"
            )
        self.restarts += 1

    def _hold(self, step: int, batches: Sequence[RankBatch]) -> None:
        """Keeps the batches of a step on disk, if they can ever be needed again."""
        if self.settings.learner.max_restarts == 0:
            return
        path = self.run_dir / "batches" / f"step_{step}.pkl"
        path.with_suffix(".tmp").write_bytes(pickle.dumps(list(batches), protocol=5))
        path.with_suffix(".tmp").rename(path)
        self._held[step] = path


class _Broken:
    """The worker group is gone; ``failures`` are what its ranks could still say."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures


def _amounts(resources: dict[str, float]) -> str:
    """CPU, GPU and TPU of a cluster, as text."""
    return (
        ", ".join(f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU", "TPU") if name in resources) or "none"
    )
