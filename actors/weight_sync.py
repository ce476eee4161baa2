"""Weights on their way from the learner into an engine: buckets, transport, checksums, the load inside the worker.

Learner side: ``publish`` puts flat byte buckets into Ray's object store. Engine side: the rollout actor fetches them
and hands them to ``WeightLoader``, which runs inside every vLLM worker: as views where the worker shares the actor's
process, by shared-memory name where it is a process of its own.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from actors import cpu_sampler, direct_load
from rl.types import IntArray, Probe, TensorMeta, WeightUpdate

if TYPE_CHECKING:
    import torch

    from rl.flat import FlatParameters

Bytes = npt.NDArray[np.uint8]

TOLERANCE_FLOAT32 = 1e-3
"""Largest difference of a log-probability that float32 arithmetic in another order may explain."""

TOLERANCE_16_BITS = 0.25
"""The same where engine or learner computes in bfloat16 or float16."""


def tolerance(dtype: str, setting: float | None) -> float:
    """The probe's tolerance for an engine of ``dtype``: the setting ``sync.tolerance`` if given, else by dtype.

    >>> tolerance("float32", None), tolerance("bfloat16", None), tolerance("float32", 0.01)
    (0.001, 0.25, 0.01)
    """
    if setting is not None:
        return setting
    return TOLERANCE_FLOAT32 if dtype == "float32" else TOLERANCE_16_BITS


def probe_ids(vocab_size: int, n: int, seed: int) -> IntArray:
    """[n] token ids of the probe text: uniform over the vocabulary, the same for the same arguments everywhere.

    Random ids touch many embedding rows and many places of the head, which a natural text would not.
    """
    if vocab_size < 1 or n < 2:
        raise ValueError(f"a probe needs a vocabulary and at least 2 tokens, seen vocab_size={vocab_size}, n={n}")
    return np.random.default_rng([seed, n]).integers(0, vocab_size, n).astype(np.int32)


def checksum(data: Bytes) -> str:
    """xxh3_64 of the bytes, hexadecimal (it sees order, which a sum does not).

    >>> checksum(np.zeros(3, np.uint8)) == checksum(np.zeros(4, np.uint8))
    False
    """
    return xxhash.xxh3_64_hexdigest(data.data)


def publish(flat: FlatParameters, version: int, probe: Probe, bucket_mb: int) -> WeightUpdate:
    """The learner's current weights as version ``version``; runs in the learner's process, which owns the buckets.

    ``bucket_mb`` is in MiB. ``seconds`` tells flatten, put and what the checksums, taken at the same time, took longer.
    """
    import ray

    started = time.perf_counter()
    metas, buckets = flat.tensors(bucket_mb << 20)
    flattened = time.perf_counter()
    with ThreadPoolExecutor(1) as beside:  # both only read, and neither holds the interpreter meanwhile
        sums = beside.submit(lambda: tuple(checksum(bucket) for bucket in buckets))
        refs = tuple(ray.put(bucket) for bucket in buckets)
        put = time.perf_counter()
        checksums = sums.result()
    seconds = {
        "flatten": flattened - started,
        "put": put - flattened,
        "checksum": time.perf_counter() - put,
    }
    nbytes = sum(bucket.nbytes for bucket in buckets)
    return WeightUpdate(version, refs, checksums, tuple(metas), probe, nbytes, seconds)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a worker gets: each bucket as a view, or as (name, bytes) of a shared-memory block; and its proof."""

    buckets: tuple[Bytes | tuple[str, int], ...]
    checksums: tuple[str, ...]
    tensors: tuple[TensorMeta, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of a delivery in one worker. Nothing was loaded where ``checksums_match`` is False."""

    checksums_match: bool
    missing: tuple[str, ...] = ()  # parameters of the engine's model that the load did not reach
    seconds: dict[str, float] = field(default_factory=dict)  # checksum, load


class WeightLoader:
    """Mixed into vLLM's worker (``worker_extension_cls``) and called by ``collective_rpc``, on whatever platform.

    vLLM's layerwise reload, which names nothing of one platform, re-creates each layer as it was before its weights
    were prepared for the device, loads it, and prepares it again in place. On the CPU ``actors/direct_load.py`` does
    the same with fewer copies, for the models that it takes.
    """

    def parkrl_prepare(self) -> None:
        """Called once, before the first request."""
        cpu_sampler.install(self.model_runner.sampler.topk_topp_sampler)  # type: ignore[attr-defined]

    def parkrl_load(self, delivery: Delivery) -> LoadReport:
        """Checks the checksums over the bytes that are then loaded, and loads them if they hold."""
        started = time.perf_counter()
        with self.parkrl_open(delivery) as buckets:
            matches = tuple(checksum(bucket) for bucket in buckets) == delivery.checksums
            summed = time.perf_counter()
            seconds = {"checksum": summed - started}
            if not matches:
                return LoadReport(False, seconds=seconds)
            loaded = self.parkrl_apply(named_tensors(delivery.tensors, buckets))
            seconds["load"] = time.perf_counter() - summed
        names = {name for name, _ in self.parkrl_model().named_parameters()}
        return LoadReport(True, tuple(sorted(names - loaded)), seconds)

    @contextmanager
    def parkrl_open(self, delivery: Delivery) -> Iterator[list[Bytes]]:
        """The delivery's buckets as arrays, valid until the end of the block."""
        blocks: list[SharedMemory] = []
        buckets: list[Bytes] = []
        try:
            for bucket in delivery.buckets:
                if isinstance(bucket, tuple):
                    name, nbytes = bucket
                    blocks.append(SharedMemory(name))
                    buckets.append(np.ndarray((nbytes,), np.uint8, blocks[-1].buf))
                else:
                    buckets.append(bucket)
            yield buckets
        finally:
            buckets.clear()
            for block in blocks:
                _close(block)

    def parkrl_apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads named tensors in the checkpoint's layout; returns the model's own names of what it loaded."""
        model = self.parkrl_model()
        weights = list(weights)
        if direct_load.takes(model) and (reached := direct_load.load(model, weights)) is not None:
            return reached
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, self.model_config)  # type: ignore[attr-defined]
        return set(loaded)

    def parkrl_model(self) -> Any:
        """The worker's model. Platforms differ in whether the model runner has a ``get_model``."""
        runner = self.model_runner  # type: ignore[attr-defined]
        return runner.get_model() if hasattr(runner, "get_model") else runner.model


def named_tensors(metas: Sequence[TensorMeta], buckets: Sequence[Bytes]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every named tensor as a view into its bucket; nothing is copied, so the buckets must outlive the load."""
    import torch

    with warnings.catch_warnings():
        # Arrays out of the object store are read-only and torch has no read-only tensors; a load only reads.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        flats = [torch.from_numpy(bucket) for bucket in buckets]
    for meta in metas:
        dtype: torch.dtype = getattr(torch, meta.dtype)
        nbytes = int(np.prod(meta.shape, dtype=np.int64)) * dtype.itemsize
        view = flats[meta.bucket][meta.offset : meta.offset + nbytes].view(dtype).view(meta.shape)
        yield meta.name, view


@contextmanager
def shared_blocks(buckets: Sequence[Bytes]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Copies of ``buckets`` in shared memory as (name, bytes), for workers in other processes; gone after the block."""
    blocks: list[SharedMemory] = []
    try:
        for bucket in buckets:
            blocks.append(SharedMemory(create=True, size=max(1, bucket.nbytes)))
            np.ndarray(bucket.shape, np.uint8, blocks[-1].buf)[:] = bucket
        yield tuple((block.name, bucket.nbytes) for block, bucket in zip(blocks, buckets, strict=True))
    finally:
        for block in blocks:
            _close(block)
            block.unlink()


def _close(block: SharedMemory) -> None:
    """Unmaps a block. A view that something still holds keeps the mapping alive; it goes with the last view."""
    try:
        block.close()
    except BufferError:
        # SharedMemory would try again when it is collected and complain; leave the mapping to its views.
        block.close = lambda: None  # type: ignore[method-assign]
