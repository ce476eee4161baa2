"""Samples to device batches. The shift by one token happens here and nowhere else: index t speaks of ``targets[t]``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.types import Batch, RankBatch, TrainSample


def bucket_length(length: int) -> int:
    """The padded length of a row: the next of 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, ...

    A few lengths, so that devices that compile for every shape compile seldom; at most a fifth of a row above 64 tokens
    is padding.

    >>> [bucket_length(n) for n in (1, 8, 9, 33, 65, 100, 129, 1000)]
    [8, 8, 16, 40, 80, 112, 160, 1024]
    """
    spacing = max(8, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // spacing) * spacing


def pack(
    samples: Sequence[TrainSample], *, world_size: int, updates: int, max_tokens: int, step: int
) -> list[RankBatch]:
    """Deals the samples of one step out to ``world_size`` ranks and ``updates`` optimizer updates.

    Groups go to updates in order, an equal share each; of r groups left over, the first r updates get one each.
    The denominator of an update is its number of loss tokens, those of samples without signal included; these samples
    themselves are left out, since their gradient is exactly 0 (there is no KL or entropy term in the loss). The others
    are dealt, longest first, to the rank with the fewest padded positions so far, sorted by length and cut into
    micro-batches of at most ``max_tokens`` padded positions. An update without any loss token is not applied.

    Raises ValueError when a sample does not fit into a micro-batch.
    """
    assert world_size >= 1 and updates >= 1, (world_size, updates)
    for sample in samples:
        if len(sample.token_ids) - 1 > max_tokens:
            raise ValueError(
                f"learner.max_tokens_per_micro_batch={max_tokens} is less than the {len(sample.token_ids) - 1} "
                f"positions of a sample of group {sample.group_id!r}; set it to at least that"
            )
    shares = _shares(samples, updates)
    denominators = [sum(int(sample.loss_mask[1:].sum()) for sample in share) for share in shares]
    dealt = [_deal([s for s in share if s.has_signal], world_size, max_tokens) for share in shares]
    return [
        RankBatch(
            step=step,
            updates=tuple(
                tuple(_rows(chunk, denominator, max_tokens) for chunk in _cut(ranks[rank], max_tokens))
                for ranks, denominator in zip(dealt, denominators, strict=True)
            ),
            apply=tuple(denominator > 0 for denominator in denominators),
        )
        for rank in range(world_size)
    ]


def _shares(samples: Sequence[TrainSample], updates: int) -> list[list[TrainSample]]:
    """The samples of each update: groups in order of first appearance, dealt as evenly as whole groups allow."""
    by_group: dict[str, list[TrainSample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append(sample)
    groups = list(by_group.values())
    base, remainder = divmod(len(groups), updates)
    shares, start = [], 0
    for update in range(updates):
        end = start + base + (update < remainder)
        shares.append([sample for group in groups[start:end] for sample in group])
        start = end
    return shares


def _deal(samples: Sequence[TrainSample], world_size: int, max_tokens: int) -> list[list[TrainSample]]:
    """Longest first, each to the least loaded rank (the lowest of equals); every rank's list stays sorted by length."""
    ranks: list[list[TrainSample]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for sample in sorted(
        samples, key=lambda s: -len(s.token_ids)
    ):  # sorted() is stable: equal lengths keep their order
        rank = load.index(min(load))
        ranks[rank].append(sample)
        load[rank] += _width(sample, max_tokens)
    return ranks


def _width(sample: TrainSample, max_tokens: int) -> int:
    """Padded positions of a row; a sample of L tokens has L - 1 (input, target) pairs."""
    return min(bucket_length(max(1, len(sample.token_ids) - 1)), max_tokens)


def _cut(samples: Sequence[TrainSample], max_tokens: int) -> list[list[TrainSample]]:
    """Micro-batches of consecutive samples (longest first), each of at most ``max_tokens`` padded positions."""
    chunks: list[list[TrainSample]] = []
    width = 0
    for sample in samples:
        if not chunks or (len(chunks[-1]) + 1) * width > max_tokens:
            chunks.append([])
            width = _width(sample, max_tokens)
        chunks[-1].append(sample)
    return chunks


def _rows(samples: Sequence[TrainSample], denominator: int, max_tokens: int) -> Batch:
    """One micro-batch, one sample in a row, padded on the right."""
    shape = (len(samples), max(_width(sample, max_tokens) for sample in samples))
    ids, targets, positions, versions = (np.zeros(shape, dtype=np.int32) for _ in range(4))
    segments = np.full(shape, -1, dtype=np.int32)
    versions -= 1
    mask = np.zeros(shape, dtype=np.bool_)
    logprobs, advantages = (np.zeros(shape, dtype=np.float32) for _ in range(2))
    for row, sample in enumerate(samples):
        length = len(sample.token_ids) - 1
        ids[row, :length] = sample.token_ids[:-1]
        targets[row, :length] = sample.token_ids[1:]
        positions[row, :length] = np.arange(length)
        segments[row, :length] = 0
        mask[row, :length] = sample.loss_mask[1:]
        logprobs[row, :length] = sample.rollout_logprobs[1:]
        advantages[row, :length] = sample.advantages[1:]
        versions[row, :length] = _versions(sample)[1:]
    return Batch(
        input_ids=ids,
        targets=targets,
        position_ids=positions,
        segment_ids=segments,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        advantages=advantages,
        policy_versions=versions,
        loss_denominator=float(denominator),
    )


def _versions(sample: TrainSample) -> np.ndarray:
    """Which version sampled each token, -1 for those that were not sampled."""
    sampled = [version for version, count in sample.version_spans for _ in range(count)]
    assert len(sampled) == int(sample.loss_mask.sum()), (sample.group_id, sample.version_spans)
    versions = np.full(len(sample.token_ids), -1, dtype=np.int32)
    versions[sample.loss_mask] = sampled
    return versions
