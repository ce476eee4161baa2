"""Graders in killable processes with deadlines: one supervising Ray actor per node, plain subprocesses under it.

A sample's deadline starts when the sample starts in its process. A process that misses it is killed and replaced; the
samples that were waiting behind go to another process. A batch function has one deadline for its group and is run
again sample by sample when it misses it or ends its process.
"""

from __future__ import annotations

import asyncio
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

    async def grade(self, payloads: Sequence[bytes], counts: Sequence[int]) -> list[tuple[str, Any]]:
        """For every group ("parts", one list of parts per completion) or ("contract" | "failed", text)."""
        jobs = [self._threads.grade(payload, count) for payload, count in zip(payloads, counts, strict=True)]
        return await asyncio.gather(*jobs)

    async def pids(self) -> list[int]:
        """The grader processes that are running now."""
        return self._threads.pids()

    async def close(self) -> None:
        """Kills every process; returns when they are gone."""
        await self._threads.close()


@dataclass(frozen=True)
class Ticket:
    """Groups that one supervisor is grading."""

    jobs: Sequence[GradeJob]
    payloads: Sequence[bytes]
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

    def submit(self, jobs: Sequence[GradeJob]) -> list[Ticket]:
        """Begins to grade groups, dealt out to the nodes; those with the fewest open groups come first."""
        living = self._living()
        share = -(-len(jobs) // len(living))
        parts = [jobs[first : first + share] for first in range(0, len(jobs), share)]
        return [
            self._send(number, part, [_payload(job) for job in part])
            for number, part in zip(living, parts, strict=False)
        ]

    def _living(self) -> list[int]:
        living = [number for number in range(len(self._supervisors)) if number not in self._lost]
        if not living:
            raise RuntimeError("no reward supervisor is left: start the reward pool again")
        return sorted(living, key=lambda number: (self._open[number], number))

    def _send(self, number: int, jobs: Sequence[GradeJob], payloads: Sequence[bytes]) -> Ticket:
        self._open[number] += len(jobs)
        reference = self._supervisors[number][1].grade.remote(payloads, [len(job.texts) for job in jobs])
        return Ticket(jobs, payloads, reference, number)

    def result(self, handle: Sequence[Ticket]) -> list[list[Score]]:
        """Waits; for every group in order one score per completion, in order.

        Raises RewardContractError (a ValueError) when a batch function returned what cannot be matched with its
        completions, RuntimeError when graders cannot be replaced or no supervisor is left. A group whose node was
        lost is graded again on another.
        """
        return [self._scores(kind, value) for ticket in handle for kind, value in self._wait(ticket)]

    def _wait(self, ticket: Ticket) -> list[tuple[str, Any]]:
        while True:
            number = ticket.supervisor
            try:
                return ray.get(ticket.reference)
            except RayActorError as error:
                self._lost.add(number)
                node = self._supervisors[number][0]
                if len(self._lost) == len(self._supervisors):
                    raise RuntimeError(f"the reward supervisor on node {node} died: {error}") from error
                ticket = self._send(self._living()[0], ticket.jobs, ticket.payloads)
            finally:
                self._open[number] -= len(ticket.jobs)

    def _scores(self, kind: str, value: Any) -> list[Score]:
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


def _payload(job: GradeJob) -> bytes:
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
    return pickle.dumps(group)
