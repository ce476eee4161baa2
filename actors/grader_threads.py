"""The supervisor's inside: a queue of work, and one thread for every grader process.

A thread starts its process itself and lives until the pool is closed: the process is told to die with that thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from actors.grader_process import GraderDied, GraderLate, GraderProcess
from rl.config import Grading

LOAD_TIMEOUT = 120.0  # seconds for a process to import the components; no sample's deadline
_START_TRIES = 3


class Job:
    """One group being graded: a grid of parts, [completion][component], and the future that is set when it is full."""

    def __init__(self, payload: bytes, count: int, components: int) -> None:
        self.payload = payload
        self.count = count
        self.parts: list[list[Any]] = [[None] * components for _ in range(count)]
        self.future: concurrent.futures.Future[tuple[str, Any]] = concurrent.futures.Future()
        self._missing = count * components
        self._lock = threading.Lock()

    def put(self, index: int, number: int, part: Sequence[Any]) -> None:
        with self._lock:
            assert self.parts[index][number] is None, (index, number)
            self.parts[index][number] = tuple(part)
            self._missing -= 1
            if self._missing == 0 and not self.future.done():
                self.future.set_result(("parts", self.parts))

    def stop(self, kind: str, text: str) -> None:
        with self._lock:
            if not self.future.done():
                self.future.set_result((kind, text))


class Unit:
    """A piece of a job for one process: "samples" (components x completions) or "batch" (one component, all)."""

    def __init__(self, job: Job, kind: str, numbers: Sequence[int], indices: Sequence[int]) -> None:
        self.job, self.kind, self.numbers, self.indices = job, kind, list(numbers), list(indices)


class GraderThreads:
    """Runs ``grading.workers`` processes, keeps them alive and feeds them."""

    def __init__(self, setup: bytes, grading: Grading, labels: Sequence[str]) -> None:
        self._setup, self._grading, self._labels = setup, grading, list(labels)
        self._queue: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self._is_batch: list[bool] = []
        self._problem: str | None = None
        self._closing = False
        self._processes: dict[int, GraderProcess] = {}
        self._ready = [threading.Event() for _ in range(grading.workers)]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"grader-{number}", daemon=True)
            for number in range(grading.workers)
        ]
        for thread in self._threads:
            thread.start()

    async def wait_ready(self) -> str | None:
        """Returns when every process has loaded, or the reason why one could not."""
        for event in self._ready:
            await asyncio.to_thread(event.wait)
        return self._problem

    async def grade(self, payload: bytes, count: int) -> tuple[str, Any]:
        """Grades one group, spread over the processes; the order of the group is kept."""
        job = Job(payload, count, len(self._labels))
        single = [number for number, is_batch in enumerate(self._is_batch) if not is_batch]
        for number, is_batch in enumerate(self._is_batch):
            if is_batch:
                self._queue.put(Unit(job, "batch", [number], range(count)))
        if single:
            size = -(-count // self._grading.workers)
            for begin in range(0, count, size):
                self._queue.put(Unit(job, "samples", single, range(begin, min(begin + size, count))))
        if self._problem is not None:
            job.stop("failed", self._problem)
        return await asyncio.wrap_future(job.future)

    def pids(self) -> list[int]:
        return [process.pid for process in list(self._processes.values())]

    async def close(self) -> None:
        self._closing = True
        for _ in self._threads:
            self._queue.put(None)
        for process in list(self._processes.values()):
            with contextlib.suppress(OSError):
                process.terminate()  # wakes the thread that waits for an answer
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self, number: int) -> None:
        process = self._start(number)
        self._ready[number].set()
        try:
            while not self._closing and (unit := self._queue.get()) is not None and not self._closing:
                if process is None or self._problem is not None:
                    unit.job.stop("failed", self._problem or "the graders are closed")
                elif not unit.job.future.done() and not self._work(process, unit):
                    process.kill()
                    self._processes.pop(number, None)
                    process = None if self._closing else self._start(number)
        finally:
            if process is not None:
                process.kill()
            self._processes.pop(number, None)

    def _start(self, number: int) -> GraderProcess | None:
        """A process that has loaded the components; None (and the problem noted) when that cannot be had."""
        problem = ""
        for attempt in range(_START_TRIES):
            process = GraderProcess(self._setup, self._grading.memory_mb)
            self._processes[number] = process
            try:
                kind, *rest = process.answer(time.monotonic() + LOAD_TIMEOUT)
                if kind == "ready":
                    self._is_batch = rest[0]
                    return process
                problem = rest[0] if kind == "failed" else self._memory_text(rest, "loading the reward functions")
            except GraderLate:
                problem = f"loading the reward functions took longer than {LOAD_TIMEOUT:g} s"
            except GraderDied as error:
                problem = f"while loading the reward functions, {error}"
            process.kill()
            del self._processes[number]
            first_time = not self._ready[number].is_set()
            if self._closing or first_time:
                break
            time.sleep(0.2 * 2**attempt)
        self._problem = self._problem or problem
        return None

    def _work(self, process: GraderProcess, unit: Unit) -> bool:
        """Runs one unit. False when the process is of no further use; what it left undone is then taken care of."""
        if unit.kind == "batch":
            return self._work_batch(process, unit)
        limit = self._grading.timeout
        todo = [(index, number) for index in unit.indices for number in unit.numbers]
        done = 0
        deadline = time.monotonic() + limit
        try:
            process.request(("samples", unit.numbers, unit.indices), unit.job.payload, deadline)
            while done < len(todo):
                kind, *rest = process.answer(deadline)
                if kind == "memory":
                    return self._give_up(
                        process, unit, todo[done:], "error", self._memory_text(rest, self._label(todo[done]))
                    )
                assert kind == "part" and tuple(rest[:2]) == todo[done], (kind, rest, todo[done])
                unit.job.put(*todo[done], rest[2])
                done += 1
                if done % len(unit.numbers) == 0:
                    deadline = time.monotonic() + limit
        except GraderLate:
            text = f"{self._label(todo[done])} ran longer than grading.timeout = {limit:g} s; its process was killed"
            return self._give_up(process, unit, todo[done:], "timeout", text)
        except GraderDied as error:
            return self._give_up(process, unit, todo[done:], "error", f"in {self._label(todo[done])}: {error}")
        return True

    def _work_batch(self, process: GraderProcess, unit: Unit) -> bool:
        number = unit.numbers[0]
        deadline = time.monotonic() + self._grading.timeout
        try:
            process.request(("batch", unit.numbers, []), unit.job.payload, deadline)
            kind, *rest = process.answer(deadline)
        except (GraderLate, GraderDied):
            kind, rest = "again", []
        if kind == "contract":
            unit.job.stop("contract", rest[0])
        elif kind == "batch":
            for index, part in enumerate(rest[0]):
                unit.job.put(index, number, part)
        else:  # sample by sample, on any process: one bad sample must not cost its neighbours
            for index in unit.indices:
                self._queue.put(Unit(unit.job, "samples", [number], [index]))
        return kind in ("contract", "batch")

    def _give_up(
        self, process: GraderProcess, unit: Unit, todo: Sequence[tuple[int, int]], outcome: str, text: str
    ) -> bool:
        """Kills, then marks the sample that was running; the ones behind it go back into the queue."""
        process.kill()
        if self._closing:
            return False
        running = todo[0][0]
        for index, number in todo:
            if index == running:
                unit.job.put(index, number, (None, outcome, text))
        rest = sorted({index for index, _ in todo} - {running})
        if rest:
            self._queue.put(Unit(unit.job, unit.kind, unit.numbers, rest))
        return False

    def _label(self, place: tuple[int, int]) -> str:
        return f"reward component {self._labels[place[1]]}"

    def _memory_text(self, rest: Sequence[Any], where: str) -> str:
        limit = self._grading.memory_mb
        return (
            f"{where} ran out of memory: the grader process has a limit of grading.memory_mb = {limit} MiB and its "
            f"peak was {rest[0]} MiB\n{rest[1]}"
        )
