"""The pool of rollout engines: starts them, routes groups, delivers weights, and says why when one is lost."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from actors.engine import EngineSpec, check_requests
from actors.rollout import RequestBatch, RolloutActor
from actors.weight_sync import tolerance
from rl.config import Settings
from rl.types import Completion, Request, SyncReport, WeightUpdate

CLOSE_TIMEOUT = 10.0
"""Seconds that an engine gets to end its worker processes before its actor is killed."""

POLL = 5.0
"""Seconds after which an engine answers a poll even if nothing has finished."""


@dataclass
class Member:
    """One engine as the pool sees it. ``unusable`` says why it is not sampled from, if so."""

    spec: EngineSpec
    actor: Any
    facts: dict[str, Any]
    unusable: str | None = None


class RolloutPool:
    """Implements ``rl.protocols.RolloutEngine`` with one Ray actor per engine."""

    def __init__(self, members: list[Member], settings: Settings) -> None:
        self.members = members
        self.settings = settings
        self._tickets = itertools.count()

    @classmethod
    def start(
        cls, settings: Settings, model_path: str, worker_extension: str = "actors.weight_sync.WeightLoader"
    ) -> RolloutPool:
        """``begin`` and ``wait_until_up`` in one; nothing is left running when it raises."""
        pool = cls.begin(settings, model_path, worker_extension)
        try:
            pool.wait_until_up()
        except BaseException:
            pool.close()
            raise
        return pool

    @classmethod
    def begin(
        cls, settings: Settings, model_path: str, worker_extension: str = "actors.weight_sync.WeightLoader"
    ) -> RolloutPool:
        """Sets ``rollout.replicas`` engines going on the weights in ``model_path`` (version 0), without waiting."""
        specs = [EngineSpec.of(settings, model_path, i, worker_extension) for i in range(settings.rollout.replicas)]
        return cls([Member(spec, _create(spec, settings.learner.device), {}) for spec in specs], settings)

    def wait_until_up(self) -> None:
        """RuntimeError naming the engine and its last words when one is not up within ``rollout.start_timeout``."""
        deadline = time.monotonic() + self.settings.rollout.start_timeout
        asked = [member.actor.describe.remote() for member in self.members]
        for member, facts in zip(self.members, asked, strict=True):
            member.facts = self._started(member, facts, deadline)

    def _started(self, member: Member, facts: Any, deadline: float) -> dict[str, Any]:
        try:
            return ray.get(facts, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            raise RuntimeError(
                f"engine {member.spec.name} was not up within rollout.start_timeout="
                f"{self.settings.rollout.start_timeout:g} s: is a CPU or GPU free for it? Its model: "
                f"{member.spec.model_path}"
            ) from error
        except RayError as error:
            raise RuntimeError(f"engine {member.spec.name} did not start: {error}") from error

    def generate(self, requests: Sequence[Request]) -> Iterator[list[tuple[str, Completion]]]:
        """Yields what has finished, as (request_id, completion), in bunches; every request exactly once.

        All requests of a group (the request id up to its last ":") go to one engine, groups in turn to the engines in
        the order of their first request: the same requests are always split in the same way. Abandoning the iterator
        stops what is still running. ValueError before anything is sent for a request that cannot run as asked.
        RuntimeError when no engine may be sampled from, when one is lost, or when ``rollout.step_timeout`` passes
        without any completion.
        """
        usable = [member for member in self.members if member.unusable is None]
        if not usable:
            reasons = "; ".join(f"{member.spec.name}: {member.unusable}" for member in self.members)
            raise RuntimeError(f"no engine is left to sample from ({reasons})")
        facts = usable[0].facts
        check_requests(requests, facts["max_model_len"], facts["vocab_size"])
        ticket = next(self._tickets)
        shares = _split(requests, len(usable))
        running = {i: len(share) for i, share in enumerate(shares) if share}
        try:
            submitted = {i: usable[i].actor.submit.remote(ticket, RequestBatch.of(shares[i])) for i in running}
            polls = {usable[i].actor.poll.remote(ticket, POLL): i for i in running}
            for i, ref in submitted.items():
                self._answer(usable[i], ref)
            yield from self._collect(usable, shares, ticket, running, polls)
        finally:
            self._abort(usable, ticket, {i: len(shares[i]) for i in running})

    def _collect(
        self,
        usable: list[Member],
        shares: list[list[Request]],
        ticket: int,
        running: dict[int, int],
        polls: dict[Any, int],
    ) -> Iterator[list[tuple[str, Completion]]]:
        """Polls the engines until nothing is running; ``running`` counts down what each still owes."""
        limit = self.settings.rollout.step_timeout
        last = time.monotonic()
        while polls:
            ready, _ = ray.wait(list(polls), num_returns=1, timeout=max(0.0, last + limit - time.monotonic()))
            for ref in ready:
                i = polls.pop(ref)
                finished = self._answer(usable[i], ref)
                running[i] -= len(finished.indices)
                if running[i]:
                    polls[usable[i].actor.poll.remote(ticket, POLL)] = i
                else:
                    del running[i]
                if finished.indices:
                    yield [(shares[i][index].request_id, completion) for index, completion in finished]
                    last = time.monotonic()  # the time that the caller took is not the engines'
            if polls and time.monotonic() - last >= limit:
                owed = ", ".join(f"{usable[i].spec.name} owes {n}" for i, n in running.items())
                raise RuntimeError(f"no completion within rollout.step_timeout={limit:g} s ({owed})")

    def _answer(self, member: Member, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:
            member.unusable = _first_line(error)
            raise RuntimeError(
                f"engine {member.spec.name} was lost while sampling: {_last_words(member, error)}"
            ) from error

    def _abort(self, usable: list[Member], ticket: int, running: dict[int, int]) -> None:
        """Stops what an interrupted ``generate`` left running, and waits until it is stopped."""
        refs = [usable[i].actor.abort.remote(ticket, n) for i, n in running.items()]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT) if refs else None

    def load_weights(self, update: WeightUpdate) -> list[SyncReport]:
        """Loads and proves a version on all engines at once; one report per engine, in order.

        An engine that is not verified is not sampled from until a later version is verified on it. Nothing is raised
        for it: its report says so (NaN where the probe could not be measured), and ``generate`` when none is left.
        """
        asked = [member.actor.load.remote(update) for member in self.members]
        deadline = time.monotonic() + self.settings.rollout.start_timeout
        return [self._proven(member, ref, deadline, update) for member, ref in zip(self.members, asked, strict=True)]

    def _proven(self, member: Member, ref: Any, deadline: float, update: WeightUpdate) -> SyncReport:
        try:
            report: SyncReport = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except RayError as error:
            limit = tolerance(member.spec.dtype, member.spec.sync_tolerance)
            member.unusable = f"version {update.version} could not be loaded: {_last_words(member, error)}"
            return SyncReport(member.spec.name, int(member.facts["version"]), False, math.nan, limit)
        member.facts["version"] = report.version
        if report.verified:
            member.unusable = None
        elif not report.checksums_match:
            member.unusable = f"version {update.version} arrived with other checksums than it was sent with"
        else:
            member.unusable = (
                f"after loading version {update.version} a probe's log-probabilities differ from the learner's by "
                f"{report.probe_max_abs:.3g}, over the tolerance of {report.tolerance:.3g}"
            )
        return report

    def reset_cache(self) -> None:
        """Forgets cached prefixes on every engine that is sampled from. RuntimeError naming one that could not."""
        members = [member for member in self.members if member.unusable is None]
        for member, ref in [(member, member.actor.reset_cache.remote()) for member in members]:
            self._answer(member, ref)

    def describe(self) -> list[dict[str, Any]]:
        """What each engine's process says of itself (node, process, device, chips, slice, versions)."""
        return [dict(member.facts) for member in self.members]

    def close(self) -> None:
        """Ends every engine and its worker processes; nothing is left running. May be called twice."""
        members, self.members = self.members, []
        refs = [member.actor.close.remote() for member in members if member.facts]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT)
        for member in members:
            ray.kill(member.actor)


def _create(spec: EngineSpec, device: str) -> Any:
    """The actor of one engine: a CPU, and as many GPUs as it has workers where the run is on GPUs."""
    gpus = spec.tensor_parallel_size if device == "cuda" else 0
    options = {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_concurrency": 100,
        "runtime_env": {"env_vars": spec.environment()},
    }
    return ray.remote(RolloutActor).options(**options).remote(spec)


def _split(requests: Sequence[Request], parts: int) -> list[list[Request]]:
    """Groups in turn to each part, in the order of their first request; a part keeps the requests' order."""
    groups: dict[str, int] = {}
    shares: list[list[Request]] = [[] for _ in range(parts)]
    for request in requests:
        group = groups.setdefault(request.request_id.rpartition(":")[0] or request.request_id, len(groups))
        shares[group % parts].append(request)
    return shares


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _last_words(member: Member, error: BaseException, lines: int = 15) -> str:
    """The error, and the end of the process's log where that lies on this machine."""
    text = f"{error}\n(actor {member.actor}, process {member.facts.get('pid')}, node {member.facts.get('node_id')})"
    log = member.facts.get("log")
    if log and os.path.isfile(log):
        with open(log, encoding="utf-8", errors="replace") as file:
            tail = "".join(file.readlines()[-lines:])
        text += f"\nend of {log}:\n{tail}"
    return text
