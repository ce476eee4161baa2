"""One controller step of training: micro-batches, backward, reduction over ranks, clip, optimizer. Knows no device.

The gradient of an optimizer update is that of (sum of the loss over all loss tokens of all ranks and micro-batches)
/ (their number). Every micro-batch divides by the same number, known before the first backward, so the gradients of
micro-batches and ranks simply add up.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rl.config import Settings
from rl.device import Device
from rl.flat import FlatParameters
from rl.logprobs import token_logprobs
from rl.losses import LOSSES
from rl.optim import lr_at
from rl.types import Batch, RankBatch

AllReduce = Callable[[Tensor, Literal["sum", "max"]], None]
"""Replaces a tensor by its sum (or maximum) over all ranks, in place."""

SUMS = ("loss", "clipped", "kl", "entropy", "mismatch", "tokens", "mismatch_tokens")


def one_rank(tensor: Tensor, operation: Literal["sum", "max"]) -> None:
    """The all-reduce of a world of one rank."""


@dataclass(slots=True)
class Trainer:
    """What one rank trains with, the same on every rank; ``updates`` counts the optimizer updates made so far."""

    model: nn.Module
    flat: FlatParameters
    optimizer: torch.optim.Optimizer
    settings: Settings
    device: Device
    total_updates: int
    updates: int = 0
    all_reduce: AllReduce = one_rank
    takes_logits_to_keep: bool = field(init=False)

    def __post_init__(self) -> None:
        self.takes_logits_to_keep = "logits_to_keep" in inspect.signature(self.model.forward).parameters


@dataclass(frozen=True, slots=True)
class Tokens:
    """The part of a micro-batch from its first to its last loss position, on the device: every tensor is [B, K]."""

    logprobs: Tensor
    entropy: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor


def train_step(trainer: Trainer, batch: RankBatch) -> dict[str, float]:
    """Makes all optimizer updates of one controller step; returns metrics that are the same on every rank.

    Means are over the loss tokens that went through the model. Without any such token their names are left out: a
    mean of nothing has no value. ``mismatch/*`` (|learner - sampler| log-probability) is read in the first update's
    forward, before the weights change; ``policy/kl``, ``policy/clip_fraction`` speak of all updates.
    Raises RuntimeError naming step and update, before the weights are touched, when loss or gradient is not finite.
    """
    olds = _old_logprobs(trainer, batch)
    rows: list[dict[str, float]] = []
    mismatch_max = torch.zeros((), dtype=torch.float64, device=_device_of(trainer))
    for number, (micro_batches, apply, old) in enumerate(zip(batch.updates, batch.apply, olds, strict=True)):
        if apply:
            place = f"step {batch.step}, update {number + 1} of {len(batch.updates)}"
            rows.append(train_update(trainer, micro_batches, old, mismatch_max if number == 0 else None, place))
    trainer.all_reduce(mismatch_max, "max")
    return _metrics(rows, float(mismatch_max))


def train_update(
    trainer: Trainer,
    micro_batches: Sequence[Batch],
    old_logprobs: Sequence[Tensor | None],
    mismatch_max: Tensor | None,
    place: str,
) -> dict[str, float]:
    """One optimizer update; returns its global sums, and ``grad_norm`` and ``lr``.

    ``old_logprobs[i]`` is the denominator of micro-batch i's ratio, None for the sampler's log-probabilities. A rank
    without a micro-batch adds zeros. ``mismatch_max``, when given, takes the largest mismatch of this rank.
    """
    algorithm = trainer.settings.algorithm
    loss_function = LOSSES[algorithm.name]
    trainer.flat.zero_grad()
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=_device_of(trainer))
    for batch, old in zip(micro_batches, old_logprobs, strict=True):
        tokens = forward_tokens(trainer, batch)
        parts = loss_function(
            tokens.logprobs,
            tokens.rollout_logprobs if old is None else old,
            tokens.advantages,
            tokens.loss_mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        (parts.loss / batch.loss_denominator).backward()
        with torch.no_grad():
            gap = torch.where(tokens.loss_mask, (tokens.logprobs - tokens.rollout_logprobs).abs(), 0.0)
            entropy = torch.where(tokens.loss_mask, tokens.entropy, 0.0).sum()
            count = tokens.loss_mask.sum()
            loss = parts.loss.detach() / batch.loss_denominator
            measured = (gap.sum(), count) if mismatch_max is not None else (torch.zeros_like(loss), count * 0)
            sums += torch.stack([loss, parts.clipped, parts.kl, entropy, measured[0], count, measured[1]]).double()
            if mismatch_max is not None:
                mismatch_max.copy_(torch.maximum(mismatch_max, gap.max().double()))

    gradients = list(trainer.flat.grads.values())
    for gradient in gradients:
        trainer.all_reduce(gradient, "sum")
    trainer.all_reduce(sums, "sum")
    norm = clip_(gradients, trainer.settings.learner.max_grad_norm)
    row = dict(zip(SUMS, sums.tolist(), strict=True)) | {"grad_norm": float(norm)}
    if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
        raise RuntimeError(
            f"training stopped in {place}: loss {row['loss']}, gradient norm {row['grad_norm']}; "
            "the weights were not changed by this update"
        )
    row["lr"] = lr_at(trainer.updates, trainer.settings.learner, trainer.total_updates)
    for group in trainer.optimizer.param_groups:
        group["lr"] = row["lr"]
    trainer.optimizer.step()
    trainer.updates += 1
    return row


def forward_tokens(trainer: Trainer, batch: Batch) -> Tokens:
    """One forward pass; logits are computed only from the first to the last loss position of the micro-batch.

    No attention mask is given, and none is needed: a row holds one sequence, padded on the right, and attention is
    causal, so no real token ever sees padding; what the padding itself computes is masked out of the loss. It also
    lets the model take its fastest attention kernel.
    """
    used = np.flatnonzero(batch.loss_mask.any(axis=0))
    assert used.size, "a micro-batch without a loss token"
    span = slice(int(used[0]), int(used[-1]) + 1)
    device = _device_of(trainer)

    def load(array: np.ndarray) -> Tensor:
        return torch.tensor(array[:, span], device=device)

    input_ids = torch.tensor(batch.input_ids, dtype=torch.long, device=device)
    with trainer.device.autocast(trainer.settings.learner.precision):
        if trainer.takes_logits_to_keep:
            keep = torch.arange(span.start, span.stop, device=device)
            logits = trainer.model(input_ids=input_ids, use_cache=False, logits_to_keep=keep).logits
        else:
            logits = trainer.model(input_ids=input_ids, use_cache=False).logits[:, span]
    logprobs, entropy = token_logprobs(logits, load(batch.targets), trainer.settings.rollout.temperature)
    return Tokens(logprobs, entropy, load(batch.loss_mask), load(batch.rollout_logprobs), load(batch.advantages))


def clip_(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scales the gradients, in place, so that their global Euclidean norm is at most ``max_norm``; returns the norm.

    >>> gradient = torch.tensor([3.0, 4.0])
    >>> clip_([gradient], max_norm=1.0).item(), gradient.norm().item() <= 1.0
    (5.0, True)
    """
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]))
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def _old_logprobs(trainer: Trainer, batch: RankBatch) -> list[list[Tensor | None]]:
    """The ratio's denominators for every micro-batch: the learner's, computed before the first update, or None."""
    if trainer.settings.algorithm.old_logprobs == "rollout":
        return [[None] * len(micro_batches) for micro_batches in batch.updates]
    with torch.no_grad():
        return [[forward_tokens(trainer, b).logprobs for b in micro_batches] for micro_batches in batch.updates]


def _metrics(rows: Sequence[dict[str, float]], mismatch_max: float) -> dict[str, float]:
    """Global means of a step from the sums of its updates."""
    total = {name: sum(row[name] for row in rows) for name in SUMS}
    metrics = {"tokens/trained": total["tokens"]}
    if rows:
        metrics["policy/loss"] = total["loss"] / len(rows)
        metrics["policy/grad_norm"] = sum(row["grad_norm"] for row in rows) / len(rows)
        metrics["policy/lr"] = rows[-1]["lr"]
    if total["tokens"]:
        metrics["policy/kl"] = total["kl"] / total["tokens"]
        metrics["policy/entropy"] = total["entropy"] / total["tokens"]
        metrics["policy/clip_fraction"] = total["clipped"] / total["tokens"]
    if total["mismatch_tokens"]:
        metrics["mismatch/mean_abs"] = total["mismatch"] / total["mismatch_tokens"]
        metrics["mismatch/max_abs"] = mismatch_max
    return metrics


def _device_of(trainer: Trainer) -> torch.device:
    return next(iter(trainer.flat.grads.values())).device
