"""The actor around one engine. Requests and completions travel as flat arrays, not as an object per sample."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from actors.engine import Engine, EngineSpec
from rl.types import Completion, FloatArray, IntArray, Request, Sampling, SyncReport, WeightUpdate

T = TypeVar("T")

BATCHING = 0.05
"""Seconds between two deliveries of finished completions while others still run."""


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """R requests in the order in which the engine is to see them; prompt r is ``token_ids[ends[r - 1] : ends[r]]``."""

    token_ids: IntArray  # all prompts, one after another
    ends: IntArray  # [R]
    seeds: tuple[int, ...]  # R
    samplings: tuple[Sampling, ...]  # the distinct ones
    sampling: IntArray  # [R], index into samplings

    @staticmethod
    def of(requests: Sequence[Request]) -> RequestBatch:
        distinct: dict[Sampling, int] = {}
        sampling = [distinct.setdefault(request.sampling, len(distinct)) for request in requests]
        return RequestBatch(
            np.concatenate([request.token_ids for request in requests]).astype(np.int32, copy=False),
            np.cumsum([len(request.token_ids) for request in requests], dtype=np.int32),
            tuple(request.seed for request in requests),
            tuple(distinct),
            np.asarray(sampling, np.int32),
        )

    def __iter__(self) -> Iterator[tuple[list[int], Sampling, int]]:
        start = 0
        for end, seed, which in zip(self.ends.tolist(), self.seeds, self.sampling.tolist(), strict=True):
            yield self.token_ids[start:end].tolist(), self.samplings[which], seed
            start = end


@dataclass(frozen=True, slots=True)
class CompletionBatch:
    """Completions that finished, by the index of their request in its ``RequestBatch``."""

    indices: tuple[int, ...]
    ends: IntArray  # [len(indices)], of the slices of the two flat arrays
    token_ids: IntArray
    logprobs: FloatArray
    stopped: tuple[bool, ...]  # finish_reason "stop", else "length"
    version_spans: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def of(finished: Sequence[tuple[int, Completion]]) -> CompletionBatch:
        completions = [completion for _, completion in finished]
        return CompletionBatch(
            tuple(index for index, _ in finished),
            np.cumsum([len(c.token_ids) for c in completions], dtype=np.int32),
            np.concatenate([c.token_ids for c in completions] or [np.empty(0, np.int32)]),
            np.concatenate([c.rollout_logprobs for c in completions] or [np.empty(0, np.float32)]),
            tuple(c.finish_reason == "stop" for c in completions),
            tuple(c.version_spans for c in completions),
        )

    def __iter__(self) -> Iterator[tuple[int, Completion]]:
        start = 0
        rows = zip(self.indices, self.ends.tolist(), self.stopped, self.version_spans, strict=True)
        for index, end, stopped, spans in rows:
            token_ids, logprobs = self.token_ids[start:end], self.logprobs[start:end]
            yield index, Completion(token_ids, logprobs, "stop" if stopped else "length", spans)
            start = end


class RolloutActor:
    """An async Ray actor. One thread owns the engine; every engine call goes through it, in order.

    Between calls that thread steps the engine for as long as anything runs; a call that arrives gets its turn after
    the step in progress. Completions are kept by ticket (one ``submit``) until ``poll`` takes them.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.engine = self._thread.submit(Engine, spec).result()
        self._waiting = 0  # calls that want the engine's thread
        self._stepping: asyncio.Future[None] | None = None
        self._finished: dict[int, list[tuple[int, Completion]]] = {}  # per ticket
        self._counts: dict[int, int] = {}  # requests of a ticket that have not been polled yet
        self._news = asyncio.Event()
        self._failure: str | None = None  # traceback of a step that raised; the engine is of no use after it

    async def describe(self) -> dict[str, Any]:
        """What the process says of itself: where it runs, on what, and what its engine takes."""
        return await self._call(self._describe)

    def _describe(self) -> dict[str, Any]:
        import ray
        import vllm

        node_id = ray.get_runtime_context().get_node_id()
        labels: dict[str, str] = next((node.get("Labels", {}) for node in ray.nodes() if node["NodeID"] == node_id), {})
        config = self.engine.llm.vllm_config
        return {
            "name": self.spec.name,
            "host": socket.gethostname(),
            "node_id": node_id,
            "pid": os.getpid(),
            "device": str(config.device_config.device),
            "chip": os.environ.get("TPU_VISIBLE_CHIPS") or os.environ.get("CUDA_VISIBLE_DEVICES") or None,
            "slice": labels.get("ray.io/tpu-slice-name"),
            "vllm": vllm.__version__,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "tensor_parallel_size": self.spec.tensor_parallel_size,
            "max_model_len": self.engine.max_model_len,
            "vocab_size": self.engine.vocab_size,
            "version": self.engine.version,
            "log": _own_log(),
        }

    async def submit(self, ticket: int, batch: RequestBatch) -> None:
        """Adds all requests, in order, before the engine's next step."""
        self._finished[ticket] = []
        self._counts[ticket] = len(batch.ends)
        await self._call(self._add, ticket, batch)

    def _add(self, ticket: int, batch: RequestBatch) -> None:
        for index, (token_ids, sampling, seed) in enumerate(batch):
            self.engine.add(f"{ticket}:{index}", token_ids, sampling, seed)

    async def poll(self, ticket: int, max_wait: float) -> CompletionBatch:
        """What has finished since the last poll; waits up to ``max_wait`` seconds for the first of it.

        Raises RuntimeError with the traceback when a step of the engine raised.
        """
        await self._news_until(lambda: not self._waits(ticket), max_wait)
        # while some still run, others will finish: fewer, larger answers
        await self._news_until(lambda: not self._owes(ticket), BATCHING)
        if self._failure is not None:
            raise RuntimeError(f"engine {self.spec.name} failed in a step:\n{self._failure}")
        if ticket not in self._finished:  # aborted in the meantime
            return CompletionBatch.of([])
        finished, self._finished[ticket] = self._finished[ticket], []
        self._counts[ticket] -= len(finished)
        if self._counts[ticket] == 0:
            del self._finished[ticket], self._counts[ticket]
        return CompletionBatch.of(finished)

    async def _news_until(self, enough: Callable[[], bool], seconds: float) -> None:
        """Waits until ``enough()`` after news of any ticket, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while not enough() and (left := deadline - time.monotonic()) > 0:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                pass

    def _owes(self, ticket: int) -> bool:
        """Whether a part of a ticket has finished and another part still runs."""
        return self._failure is None and 0 < len(self._finished.get(ticket, ())) < self._counts.get(ticket, 0)

    def _waits(self, ticket: int) -> bool:
        return self._failure is None and ticket in self._finished and not self._finished[ticket]

    async def abort(self, ticket: int, count: int) -> None:
        """Forgets a ticket of ``count`` requests: what runs is stopped, what has finished is dropped."""
        await self._call(self.engine.abort, [f"{ticket}:{index}" for index in range(count)])
        self._finished.pop(ticket, None)
        self._counts.pop(ticket, None)

    async def reset_cache(self) -> None:
        await self._call(self.engine.reset_cache)

    async def load(self, update: WeightUpdate) -> SyncReport:
        """Fetches the buckets, loads and proves them; see ``Engine.load``."""
        started = time.perf_counter()
        buckets = list(await asyncio.gather(*update.buckets))
        fetched = time.perf_counter() - started
        report = await self._call(self.engine.load, update, buckets)
        return SyncReport(
            report.engine,
            report.version,
            report.checksums_match,
            report.probe_max_abs,
            report.tolerance,
            {"get": fetched, **report.seconds},
        )

    async def unfinished(self) -> int:
        """Requests that the engine holds."""
        return await self._call(self.engine.llm.get_num_unfinished_requests)

    async def close(self) -> None:
        await self._call(self.engine.close)

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Runs ``function`` on the engine's thread, after the step in progress, and lets stepping go on after it."""
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        finally:
            self._waiting -= 1
            self._keep_stepping()

    def _keep_stepping(self) -> None:
        if self._waiting or self._failure is not None or not self.engine.unfinished:
            return
        if self._stepping is None or self._stepping.done():
            loop = asyncio.get_running_loop()
            self._stepping = loop.run_in_executor(self._thread, self._steps, loop)
            self._stepping.add_done_callback(lambda _: self._keep_stepping())

    def _steps(self, loop: asyncio.AbstractEventLoop) -> None:
        """Steps until nothing runs or somebody wants the thread; runs on it."""
        try:
            while not self._waiting and self.engine.unfinished:
                finished = self.engine.step()
                if finished:
                    loop.call_soon_threadsafe(self._deliver, finished)
        except Exception:  # noqa: BLE001 - whatever it was, this engine is done for, and the pool must hear why
            loop.call_soon_threadsafe(self._fail, traceback.format_exc())

    def _deliver(self, finished: list[tuple[str, Completion]]) -> None:
        for request_id, completion in finished:
            ticket, index = request_id.split(":")
            if int(ticket) in self._finished:  # else it was aborted in the meantime
                self._finished[int(ticket)].append((int(index), completion))
        self._news.set()

    def _fail(self, text: str) -> None:
        self._failure = text
        self._news.set()


def _own_log() -> str | None:
    """The file that this process's stderr goes to; Ray gives each worker one of its own."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None
