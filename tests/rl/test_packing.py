"""Packing: the shift, the shares, the denominators and the padding."""

from __future__ import annotations

import numpy as np
import pytest

from rl.packing import bucket_length, pack
from rl.types import Batch, RankBatch, TrainSample


def sample(group: str, prompt: int, completion: int, advantage: float = 1.0, first: int = 1) -> TrainSample:
    """Ids first, first + 1, ...; token k has rollout log-probability -k and version 5, then 6 for the last one."""
    length = prompt + completion
    mask = np.arange(length) >= prompt
    return TrainSample(
        group_id=group,
        token_ids=np.arange(first, first + length, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -np.arange(length), 0).astype(np.float32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        version_spans=((5, completion - 1), (6, 1)),
        has_signal=advantage != 0,
    )


def rows(batches: list[RankBatch], update: int = 0) -> list[tuple[int, Batch, int]]:
    """(rank, micro-batch, row) of every row of an update."""
    return [
        (b.step * 0 + r, m, i) for r, b in enumerate(batches) for m in b.updates[update] for i in range(len(m.targets))
    ]


def test_the_shift_happens_here():
    prompt_and_answer = TrainSample(
        "g", np.int32([1, 2, 3, 7, 8, 0]), np.array([0, 0, 0, 1, 1, 1], bool), np.float32([0, 0, 0, -1, -2, -3]),
        np.float32([0, 0, 0, 0.5, 0.5, 0.5]), ((3, 2), (4, 1)),
    )  # fmt: skip
    (batch,) = pack([prompt_and_answer], world_size=1, updates=1, max_tokens=64, step=9)
    assert batch.step == 9 and batch.apply == (True,)
    (micro,) = batch.updates[0]
    assert micro.input_ids.tolist() == [[1, 2, 3, 7, 8, 0, 0, 0]]
    assert micro.targets.tolist() == [[2, 3, 7, 8, 0, 0, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 0, 0]]
    assert micro.segment_ids.tolist() == [[0, 0, 0, 0, 0, -1, -1, -1]]
    assert micro.loss_mask.tolist() == [[False, False, True, True, True, False, False, False]]
    assert micro.rollout_logprobs.tolist() == [[0, 0, -1, -2, -3, 0, 0, 0]]
    assert micro.advantages.tolist() == [[0, 0, 0.5, 0.5, 0.5, 0, 0, 0]]
    assert micro.policy_versions.tolist() == [[-1, -1, 3, 3, 4, -1, -1, -1]]
    assert micro.loss_denominator == 3.0
    assert all(array.flags.c_contiguous for array in (micro.input_ids, micro.advantages))
    assert micro.input_ids.dtype == np.int32 and micro.advantages.dtype == np.float32


@pytest.mark.parametrize(("world_size", "updates", "max_tokens"), [(1, 1, 1000), (2, 1, 24), (3, 2, 40), (2, 4, 32)])
def test_every_sample_with_signal_is_packed_once_and_fits(world_size, updates, max_tokens):
    rng = np.random.default_rng(1)
    samples = [
        sample(f"g{i // 4}", int(rng.integers(1, 9)), int(rng.integers(1, 15)), float(i % 3), first=100 * i + 1)
        for i in range(28)
    ]
    batches = pack(samples, world_size=world_size, updates=updates, max_tokens=max_tokens, step=1)
    found = [m.input_ids[i, 0] // 100 for u in range(updates) for _, m, i in rows(batches, u)]
    assert sorted(found) == [i for i in range(28) if i % 3]
    for batch in batches:
        for micro_batches in batch.updates:
            widths = [m.input_ids.shape[1] for m in micro_batches]
            assert widths == sorted(widths, reverse=True)
            assert all(m.input_ids.size <= max_tokens for m in micro_batches)


def test_whole_groups_go_to_updates_in_order_and_the_first_take_the_remainder():
    samples = [sample(f"g{i}", 2, 3, first=100 * i + 1) for i in (0, 1, 2, 3, 4, 0, 4)]
    batches = pack(samples, world_size=1, updates=3, max_tokens=1000, step=0)
    found = [sorted({int(m.input_ids[i, 0]) // 100 for _, m, i in rows(batches, u)}) for u in range(3)]
    assert found == [[0, 1], [2, 3], [4]]


def test_denominators_count_samples_without_signal_and_all_ranks():
    samples = [sample("a", 2, 3), sample("a", 2, 4, -1.0), sample("b", 2, 5, 0.0), sample("c", 2, 6), sample("d", 1, 1)]
    batches = pack(samples, world_size=2, updates=2, max_tokens=8, step=0)
    assert {m.loss_denominator for b in batches for m in b.updates[0]} == {3.0 + 4 + 5}
    assert {m.loss_denominator for b in batches for m in b.updates[1]} == {6.0 + 1}
    assert all(b.apply == (True, True) for b in batches)


def test_an_update_without_loss_tokens_is_not_applied():
    for batch in pack([], world_size=2, updates=2, max_tokens=8, step=0):
        assert batch.apply == (False, False) and batch.updates == ((), ())
    one = pack([sample("a", 1, 2)], world_size=2, updates=2, max_tokens=8, step=0)
    assert [b.apply for b in one] == [(True, False)] * 2
    assert [len(b.updates[0]) for b in one] == [1, 0]  # the second rank takes part without a micro-batch
    flat = pack([sample("a", 1, 2, 0.0)], world_size=1, updates=1, max_tokens=8, step=0)
    assert flat[0].apply == (True,) and flat[0].updates == ((),)


def test_ranks_are_balanced_by_padded_positions():
    samples = [sample("g", 1, length) for length in (64, 8, 8, 8, 8, 8, 8, 8, 8)]
    first, second = pack(samples, world_size=2, updates=1, max_tokens=64, step=0)
    assert sum(m.input_ids.size for m in first.updates[0]) == 64
    assert sum(m.input_ids.size for m in second.updates[0]) == 64


def test_a_sample_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch=8 .* 9 positions"):
        pack([sample("g", 4, 6)], world_size=1, updates=1, max_tokens=8, step=0)
    # its bucket (16) would not fit into 9 positions, the sample itself does
    (batch,) = pack([sample("g", 4, 6)], world_size=1, updates=1, max_tokens=9, step=0)
    assert batch.updates[0][0].input_ids.shape == (1, 9)


def test_bucket_lengths_are_few_and_waste_little():
    lengths = [bucket_length(n) for n in range(1, 4097)]
    assert all(b >= n and b - n < max(8, n / 4) for n, b in enumerate(lengths, start=1))
    assert len(set(lengths)) <= 8 + 4 * 6
