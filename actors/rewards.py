"""Graders in killable processes with deadlines: one supervising Ray actor per node, plain subprocesses under it.

A sample's deadline starts when the sample starts in its process. A process that misses it is killed and replaced; the
samples that were waiting behind go to another process. A batch function has one deadline for its group and is run
again sample by sample when it misses it or ends its process.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.grader_threads import GraderThreads
from rl.config import Grading, Reward
from rl.rewards.combine import combine
from rl.rewards.component import Samples
from rl.rewards.load import Spec, describe
from rl.rewards.parts import Part, RewardContractError
from rl.types import GradeJob, Score


class Supervisor:
    """The Ray actor of one node. Async, so that many groups are graded at once; the work is done by threads."""

    def __init__(self, setup: bytes, grading: Mapping[str, Any], labels: Sequence[str]) -> None:
        self._threads = GraderThreads(setup, Grading(**grading), labels)

    async def start(self) -> str | None:
        """Waits until every process has loaded the components; what went wrong, or None."""
        return await self._threads.wait_ready()

    async def grade(self, payload: bytes, count: int) -> tuple[str, Any]:
        """("parts", one list of parts per completion) or ("contract" | "failed", text)."""
        return await self._threads.grade(payload, count)

    async def pids(self) -> list[int]:
        """The grader processes that are running now."""
        return self._threads.pids()

    async def close(self) -> None:
        """Kills every process; returns when they are gone."""
        await self._threads.close()


@dataclass(frozen=True)
class Ticket:
    """A group that is being graded."""

    job: GradeJob
    payload: bytes
    reference: Any
    supervisor: int


class RewardPool:
    """Grades groups beside generation (``rl.protocols.Grader``). Make one with ``RewardPool.start``."""

    def __init__(self, specs: Sequence[Spec], supervisors: Sequence[tuple[str, Any]]) -> None:
        self._labels = [spec.label for spec in specs]
        self._weights = [spec.weight for spec in specs]
        self._supervisors = list(supervisors)  # (node, actor handle)
        self._open = [0] * len(self._supervisors)
        self._lost: set[int] = set()

    @classmethod
    def start(
        cls,
        components: Sequence[Reward],
        grading: Grading,
        task: str | None = None,
        *,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        columns: Sequence[str] | None = None,
        task_options: Mapping[str, Any] | None = None,
    ) -> RewardPool:
        """Starts the graders on every living node of the initialised Ray and waits until all have loaded.

        ``task`` (with ``task_options``) is data.train where it names a task: for the component ``task``, and for no
        component at all; ``functions`` are
        callables that ``Reward.function`` may name; ``columns`` are the data's columns, if known. Raises ValueError for
        a component that cannot be loaded (file, import, missing function, signature), before anything is graded.
        """
        specs = describe(components, task, functions, task_options)
        path = [os.getcwd(), *(entry for entry in sys.path if entry)]
        setup = pickle.dumps({"specs": specs, "columns": None if columns is None else list(columns), "sys_path": path})
        actor: Any = ray.remote(Supervisor)
        supervisors = []
        for node in ray.nodes():
            if node["Alive"]:
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = actor.options(num_cpus=0, scheduling_strategy=strategy, max_concurrency=1000)
                labels = [spec.label for spec in specs]
                supervisors.append((node["NodeID"][:12], options.remote(setup, grading.model_dump(), labels)))
        pool = cls(specs, supervisors)
        try:
            problems = ray.get([handle.start.remote() for _, handle in supervisors])
            for (name, _), problem in zip(supervisors, problems, strict=True):
                if problem is not None:
                    raise ValueError(f"the rewards cannot be loaded (node {name}):\n{problem}")
        except BaseException:
            pool.close()
            raise
        return pool

    def submit(self, job: GradeJob) -> Ticket:
        """Begins to grade a group on the node with the fewest open groups."""
        assert len(job.texts) == len(job.token_counts) == len(job.finish_reasons) > 0, job.group_id
        group: Samples = {
            "prompt_id": job.prompt.prompt_id,
            "prompt": job.prompt.text,
            "answer": job.prompt.answer,
            "messages": job.prompt.messages,
            "columns": dict(job.prompt.columns),
            "completions": job.texts,
            "token_counts": job.token_counts,
            "finish_reasons": job.finish_reasons,
            "max_new_tokens": job.max_new_tokens,
        }
        return self._submit(job, pickle.dumps(group))

    def _submit(self, job: GradeJob, payload: bytes) -> Ticket:
        living = [number for number in range(len(self._supervisors)) if number not in self._lost]
        if not living:
            raise RuntimeError("no reward supervisor is left: start the reward pool again")
        number = min(living, key=lambda n: (self._open[n], n))
        self._open[number] += 1
        reference = self._supervisors[number][1].grade.remote(payload, len(job.texts))
        return Ticket(job, payload, reference, number)

    def result(self, handle: Ticket) -> list[Score]:
        """Waits; one score per completion, in order.

        Raises RewardContractError (a ValueError) when a batch function returned what cannot be matched with its
        completions, RuntimeError when graders cannot be replaced or no supervisor is left. A group whose node was
        lost is graded again on another.
        """
        while True:
            number = handle.supervisor
            try:
                kind, value = ray.get(handle.reference)
                break
            except RayActorError as error:
                self._lost.add(number)
                node = self._supervisors[number][0]
                if len(self._lost) == len(self._supervisors):
                    raise RuntimeError(f"the reward supervisor on node {node} died: {error}") from error
                handle = self._submit(handle.job, handle.payload)
            finally:
                self._open[number] -= 1
        if kind == "contract":
            raise RewardContractError(value)
        if kind == "failed":
            raise RuntimeError(value)
        return [combine(self._labels, self._weights, [Part(*part) for part in parts]) for parts in value]

    def pids(self) -> list[int]:
        """The grader processes running now, over all nodes."""
        living = [handle for number, (_, handle) in enumerate(self._supervisors) if number not in self._lost]
        return [pid for pids in ray.get([handle.pids.remote() for handle in living]) for pid in pids]

    def close(self) -> None:
        """Ends every grader process and supervisor. May be called twice."""
        for _, handle in self._supervisors:
            try:
                ray.get(handle.close.remote(), timeout=15.0)
            except (RayActorError, ray.exceptions.GetTimeoutError):
                pass  # its processes die with it
            ray.kill(handle)
        self._supervisors, self._open = [], []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
