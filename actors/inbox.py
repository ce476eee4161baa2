"""The meeting place of a learner group: one command at a time goes out, one answer from each rank comes back.

Ranks pull. Nobody holds a handle of a rank, so a worker group that is replaced needs no new wiring: it asks for
commands under its attempt number, and the ranks of an older attempt are told to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ray


@dataclass(frozen=True, slots=True)
class Command:
    """What every rank is asked to do. ``arguments`` may hold object references; they travel unresolved."""

    kind: Literal["train", "publish", "save", "stop"]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's last words. ``peer_lost``: it only failed because another rank went away."""

    rank: int
    words: str
    peer_lost: bool


class Inbox:
    """Holds the present command of the present attempt, and the answers to it.

    ``sequence`` numbers the commands of an attempt from 0. Answers of an old attempt or to an old command are ignored,
    and giving an answer twice changes nothing.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.attempt = -1
        self.changed = asyncio.Condition()
        self._clear()

    def _clear(self) -> None:
        self.sequence = -1
        self.command: Command | None = None
        self.ranks: dict[int, dict[str, Any]] = {}
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}

    async def begin(self, attempt: int) -> None:
        """Starts a new attempt: everything of the old one is void."""
        async with self.changed:
            self.attempt = attempt
            self._clear()
            self.changed.notify_all()

    async def register(self, attempt: int, rank: int, description: dict[str, Any]) -> None:
        async with self.changed:
            if attempt == self.attempt:
                self.ranks[rank] = description
                self.changed.notify_all()

    async def present(self) -> list[int]:
        """The ranks that have reported in this attempt."""
        return sorted(self.ranks)

    async def all_present(self, attempt: int) -> list[dict[str, Any]] | None:
        """Waits for every rank; their descriptions in order, or None once one has failed or the attempt is over."""
        async with self.changed:
            await self.changed.wait_for(lambda: self._over(attempt) or len(self.ranks) == self.world_size)
            return None if self._over(attempt) else [self.ranks[rank] for rank in range(self.world_size)]

    async def call(self, attempt: int, sequence: int, command: Command) -> list[Any] | None:
        """Hands a command out and waits; every rank's answer in order, or None once one has failed or it is void.

        A command that its caller no longer waits for is finished first.
        """
        async with self.changed:
            await self.changed.wait_for(
                lambda: self._over(attempt) or (self.command is None and sequence == self.sequence + 1)
            )
            if self._over(attempt):
                return None
            self.sequence, self.command, self.answers = sequence, command, {}
            self.changed.notify_all()
            await self.changed.wait_for(lambda: self._over(attempt) or len(self.answers) == self.world_size)
            if self._over(attempt):
                return None  # what is in self.answers may be a later attempt's
            answers, self.answers, self.command = self.answers, {}, None
            self.changed.notify_all()
            return [answers[rank] for rank in range(self.world_size)]

    def _over(self, attempt: int) -> bool:
        return attempt != self.attempt or bool(self.failures)

    async def next(self, attempt: int, sequence: int) -> Command:
        """Waits for command number ``sequence``; a rank of an older attempt is told to stop."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: attempt != self.attempt or (sequence == self.sequence and self.command is not None)
            )
            if attempt != self.attempt:
                return Command("stop")
            assert self.command is not None
            return self.command

    async def done(self, attempt: int, rank: int, sequence: int, answer: Any) -> None:
        async with self.changed:
            if (attempt, sequence) == (self.attempt, self.sequence) and self.command is not None:
                self.answers.setdefault(rank, answer)
                self.changed.notify_all()

    async def failed(self, attempt: int, failure: Failure) -> None:
        async with self.changed:
            if attempt == self.attempt:
                self.failures.setdefault(failure.rank, failure)
                self.changed.notify_all()

    async def last_words(self) -> list[Failure]:
        """The failures of this attempt, in order of rank."""
        return [self.failures[rank] for rank in sorted(self.failures)]


InboxActor: Any = ray.remote(num_cpus=0, max_concurrency=1000)(Inbox)  # type: ignore[call-overload]
