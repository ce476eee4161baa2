"""Weights that arrive are proven to have arrived: in process, in worker processes, and against planted faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.pool import RolloutPool
from actors.weight_sync import checksum, named_tensors, probe_ids, publish, shared_blocks, tolerance
from rl.flat import FlatParameters
from rl.types import Completion, TensorMeta, WeightUpdate
from tests.actors.tiny_models import group, logprobs, make_model, probe_of, sample, settings

LONG_PROMPT = [1, *(3 + (7 * i) % 60 for i in range(160))]  # over 4 cache blocks of 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def old(folder: Path) -> Any:
    return make_model(folder / "old", seed=0)


@pytest.fixture(scope="module")
def new(folder: Path) -> Any:
    return make_model(folder / "new", seed=1)


@pytest.fixture(scope="module")
def cold(ray_cluster: Any, new: Any, folder: Path) -> Iterator[dict[str, Completion]]:
    """What an engine that started with the new weights says to the requests of ``ask``."""
    pool = RolloutPool.start(settings(), str(folder / "new"))
    try:
        yield ask(pool)
    finally:
        pool.close()


def ask(pool: RolloutPool) -> dict[str, Completion]:
    return sample(pool, group(LONG_PROMPT, "0:0", 8) + group(LONG_PROMPT[:140], "0:1", 4))


def update_of(model: Any, version: int, bucket_mb: int = 1) -> WeightUpdate:
    return publish(FlatParameters(model), version, probe_of(model), bucket_mb)


def agree(left: dict[str, Completion], right: dict[str, Completion]) -> None:
    assert left.keys() == right.keys()
    for name, completion in left.items():
        assert completion.token_ids.tolist() == right[name].token_ids.tolist(), name
        np.testing.assert_allclose(completion.rollout_logprobs, right[name].rollout_logprobs, atol=1e-4)


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_sync_an_engine_equals_a_cold_one(
    workers: int, old: Any, new: Any, folder: Path, cold: dict[str, Completion]
) -> None:
    pool = RolloutPool.start(settings(tensor_parallel_size=workers), str(folder / "old"))
    try:
        before = ask(pool)
        assert any(before[name].token_ids.tolist() != cold[name].token_ids.tolist() for name in cold)
        (report,) = pool.load_weights(update_of(new, 1))
        assert report.verified and report.version == 1 and report.probe_max_abs < 1e-4
        assert {"get", "checksum", "load", "probe"} <= report.seconds.keys()
        agree(ask(pool), cold)
        (report,) = pool.load_weights(update_of(old, 2))
        assert report.verified
        agree(ask(pool), before)
    finally:
        pool.close()


@pytest.fixture(scope="module")
def faulty(ray_cluster: Any, folder: Path) -> Iterator[RolloutPool]:
    make_model(folder / "faulty", seed=0)
    pool = RolloutPool.start(settings(), str(folder / "faulty"), worker_extension="tests.faulty_loaders.FaultyLoader")
    try:
        yield pool
    finally:
        pool.close()


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nothing", "a probe's log-probabilities differ"),
        ("stale_head", "a probe's log-probabilities differ"),
        ("flipped_byte", "other checksums than it was sent with"),
    ],
)
def test_a_planted_fault_is_caught_and_the_engine_not_sampled_from(
    fault: str, words: str, faulty: RolloutPool, folder: Path
) -> None:
    sent = make_model(folder / "sent", seed=seed_of(fault))
    (folder / "faulty" / "fault").write_text(fault)
    (report,) = faulty.load_weights(update_of(sent, 3))
    assert not report.verified
    assert report.checksums_match is (fault != "flipped_byte")
    assert math.isnan(report.probe_max_abs) is (fault == "flipped_byte")
    with pytest.raises(RuntimeError, match=rf"no engine is left .*rollout-0.*{words}"):
        next(faulty.generate(group(LONG_PROMPT, "0:0", 1)))
    (folder / "faulty" / "fault").unlink()
    (report,) = faulty.load_weights(update_of(sent, 4))
    assert report.verified, "the same engine, loaded properly, is trusted again"
    (completion,) = sample(faulty, group(LONG_PROMPT, "0:0", 1)).values()
    sequence = np.concatenate([LONG_PROMPT, completion.token_ids])
    expected = logprobs(sent, sequence)[len(LONG_PROMPT) - 1 :]
    np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)


def seed_of(text: str) -> int:
    """A seed by content (``hash`` differs between processes)."""
    return int.from_bytes(text.encode()[:4], "little")


@pytest.mark.ray
@pytest.mark.vllm
def test_an_update_that_misses_a_parameter_is_refused(faulty: RolloutPool, folder: Path) -> None:
    """The last test with this engine: its weights are half loaded afterwards."""
    update = update_of(make_model(folder / "sent", seed=5), 9)
    partial = replace(update, tensors=tuple(t for t in update.tensors if t.name != "model.norm.weight"))
    (report,) = faulty.load_weights(partial)
    assert not report.verified
    with pytest.raises(RuntimeError, match=r"(?s)no engine is left.*did not reach 1 parameters.*model\.norm\.weight"):
        next(faulty.generate(group(LONG_PROMPT, "0:0", 1)))


@pytest.mark.ray
@pytest.mark.vllm
def test_a_bfloat16_engine_takes_float32_weights(ray_cluster: Any, folder: Path) -> None:
    """Tied weights too: lm_head.weight is sent, the engine ties it itself."""
    mild = {"initializer_range": 0.05, "tie_word_embeddings": True}
    make_model(folder / "tied", seed=0, **mild)
    sent = make_model(folder / "tied_sent", seed=1, **mild)
    update = update_of(sent, 1)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {meta.name for meta in update.tensors}
    pool = RolloutPool.start(settings(dtype="bfloat16"), str(folder / "tied"))
    try:
        (report,) = pool.load_weights(update)
        assert report.verified and report.tolerance == 0.25 and 1e-4 < report.probe_max_abs < 0.25
    finally:
        pool.close()


@pytest.mark.ray
def test_what_is_published_adds_up(ray_cluster: Any, folder: Path) -> None:
    import ray

    model = make_model(folder / "published", seed=3)
    update = update_of(model, 7)
    buckets = [ray.get(ref) for ref in update.buckets]
    assert update.version == 7 and update.nbytes == sum(bucket.nbytes for bucket in buckets)
    assert [checksum(bucket) for bucket in buckets] == list(update.checksums)
    assert {"flatten", "checksum", "put"} == update.seconds.keys()
    arrived = dict(named_tensors(update.tensors, buckets))
    assert arrived.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert arrived[name].equal(tensor), name


def test_checksums_see_one_bit_and_the_order() -> None:
    data = np.arange(200, dtype=np.uint8)
    flipped, swapped = data.copy(), data.copy()
    flipped[77] ^= 1
    swapped[[3, 4]] = swapped[[4, 3]]
    assert len({checksum(data), checksum(flipped), checksum(swapped)}) == 3
    assert checksum(np.zeros(0, np.uint8)) == "2d06800538d394c2"  # the published value of XXH3_64 of nothing


def test_shared_blocks_hold_the_bytes_and_are_gone_afterwards() -> None:
    data = np.arange(1000, dtype=np.uint8)
    with shared_blocks([data, data[:3]]) as blocks:
        names = [name for name, _ in blocks]
        other = SharedMemory(names[0])
        assert bytes(other.buf[:1000]) == data.tobytes() and [n for _, n in blocks] == [1000, 3]
        other.close()
    for name in names:
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)


def test_shared_blocks_are_gone_after_an_error_too() -> None:
    names: list[str] = []
    with pytest.raises(KeyError), shared_blocks([np.zeros(10, np.uint8)]) as blocks:
        names = [name for name, _ in blocks]
        raise KeyError
    with pytest.raises(FileNotFoundError):
        SharedMemory(names[0])


def test_named_tensors_are_views_of_16_bit_buckets_too() -> None:
    import torch

    values = torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)
    bucket = np.concatenate([np.zeros(64, np.uint8), values.view(torch.uint8).numpy()])
    bucket.flags.writeable = False
    ((name, tensor),) = named_tensors([TensorMeta("w", "bfloat16", (3, 1), 0, 64)], [bucket])
    assert name == "w" and tensor.tolist() == [[1.5], [-2.0], [3.25]]
    assert tensor.data_ptr() == bucket[64:].ctypes.data


def test_the_probe_is_fixed_and_covers_the_vocabulary() -> None:
    first = probe_ids(50, 64, 3)
    assert first.dtype == np.int32 and len(first) == 64 and first.tolist() == probe_ids(50, 64, 3).tolist()
    assert first.tolist() != probe_ids(50, 64, 4).tolist()
    assert first.min() >= 0 and first.max() < 50 and len(set(first.tolist())) > 20
    with pytest.raises(ValueError, match="n=1"):
        probe_ids(50, 1, 0)


def test_tolerances() -> None:
    assert [tolerance("float32", None), tolerance("float16", None), tolerance("bfloat16", 0.1)] == [1e-3, 0.25, 0.1]
