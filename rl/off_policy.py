"""Weights for tokens that another policy sampled than the one that learns: mismatch of engines, and stale weights.

Each correction gets ``SampledTokens`` and returns weights [B, T] without a gradient, 0 where masked, and metrics, plain
floats. The weights multiply the per-token losses (``rl.losses.sum_tokens``); several corrections multiply. The ratio is
trainer / sampler, both before the update, so that PPO's own ratio stays trainer / trainer. A token of weight 0 stays in
the denominator of the loss, as in IcePop's objective: the denominator is known before any log-probability is, and
dropping tokens does not make the others weigh more.

Metrics are of the given tokens; ``tokens`` says how many, to average over micro-batches and ranks. Without any loss
token it is the only one: a mean of nothing has no value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.losses import MAX_LOG_RATIO

Weights = tuple[Tensor, dict[str, float]]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the corrections look at, all [B, T], one whole sequence in a row; made by ``sampled_tokens``."""

    log_ratio: Tensor  # log trainer - log sampler of the sampled token, 0 where masked
    staleness: Tensor  # int: published versions between the sampler's and the trainer's, 0 where masked
    loss_mask: Tensor


def sampled_tokens(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    policy_versions: Tensor | None = None,
    version: int = 0,
) -> SampledTokens:
    """Compares the trainer's log-probabilities, before the update, with the sampler's.

    ``policy_versions`` say which version sampled each token, ``version`` is the trainer's; without them nothing counts
    as stale. Raises ValueError when a loss token's log-ratio is not finite: a comparison with NaN is False, and would
    keep or drop it in silence.
    """
    with torch.no_grad():
        zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
        log_ratio = torch.where(loss_mask, logprobs - rollout_logprobs, zero)
        bad = log_ratio[~torch.isfinite(log_ratio)]
        if bad.numel():
            raise ValueError(
                f"log_ratio of sampled tokens must be finite (seen: {bad[0].item()}, {bad.numel()} tokens)"
            )
        if policy_versions is None:
            staleness = torch.zeros_like(loss_mask, dtype=torch.int32)
        else:
            staleness = torch.where(loss_mask, version - policy_versions, 0)
        assert (staleness >= 0).all(), f"tokens of a version after {version}"
        return SampledTokens(log_ratio, staleness, loss_mask)


def truncate_tokens(tokens: SampledTokens, *, cap: float) -> Weights:
    """min(ratio, cap) of each token: truncated importance sampling (Ionides, 2008), of tokens as in IMPALA
    (arXiv:1802.01561, section 4.1). Low variance; biased, since the ratios of earlier tokens are left out.

    >>> log_ratio = torch.tensor([[1.0, -1.0]])
    >>> weights, metrics = truncate_tokens(sampled_tokens(log_ratio, 0 * log_ratio, log_ratio < 2), cap=2.0)
    >>> weights.double().numpy().round(6).tolist(), metrics["truncated_fraction"]
    ([[2.0, 0.367879]], 0.5)
    """
    _check_bounds(cap=cap)
    ratio = _ratio(tokens.log_ratio)
    return _weights(tokens, ratio.clamp(max=cap), truncated=ratio > cap)


def truncate_sequences(tokens: SampledTokens, *, cap: float) -> Weights:
    """min(product of the row's ratios, cap), for every token of the row: unbiased but for the cap (Ionides, 2008).

    Products of many ratios vary wildly; they are held within exp(+-``MAX_LOG_RATIO``).
    """
    _check_bounds(cap=cap)
    ratio = _ratio(tokens.log_ratio.sum(-1, keepdim=True)).expand_as(tokens.log_ratio)
    return _weights(tokens, ratio.clamp(max=cap), truncated=ratio > cap)


def mask_tokens(tokens: SampledTokens, *, low: float, high: float) -> Weights:
    """IcePop (Ring-1T, arXiv:2510.18855): the ratio where low <= ratio <= high, else 0. (0.5 and 5 are usual.)

    >>> log_ratio = torch.tensor([[0.0, -1.0, 2.0]])
    >>> weights, metrics = mask_tokens(sampled_tokens(log_ratio, 0 * log_ratio, log_ratio < 3), low=0.5, high=5.0)
    >>> weights.tolist(), round(metrics["masked_fraction"], 4)
    ([[1.0, 0.0, 0.0]], 0.6667)
    """
    _check_bounds(low=low, high=high)
    ratio = _ratio(tokens.log_ratio)
    masked = (ratio < low) | (ratio > high)
    return _weights(tokens, torch.where(masked, 0.0, ratio), masked=masked)


def mask_sequences_by_mean(
    tokens: SampledTokens, *, low: float, high: float, advantages: Tensor | None = None
) -> Weights:
    """1 where the geometric mean of the row's ratios lies within [low, high], else 0 for the whole row.

    With ``advantages`` [B, T] only sequences whose advantages sum to less than 0 are masked: with low = exp(-delta) and
    high = inf this is DeepSeek-V3.2's off-policy sequence masking (arXiv:2512.02556, section 3.1), there between the
    sampler's and the current policy. Without, it is the geometric rejection of "When Speed Kills Stability" (Liu et
    al., 2025), for bounds close to 1, e.g. 0.99 and 1.01.
    """
    _check_bounds(low=low, high=high)
    count = tokens.loss_mask.sum(-1, keepdim=True).clamp(min=1)
    mean = _ratio(tokens.log_ratio.sum(-1, keepdim=True) / count)
    masked = (mean < low) | (mean > high)
    if advantages is not None:
        zero = torch.zeros((), dtype=advantages.dtype, device=advantages.device)
        masked &= torch.where(tokens.loss_mask, advantages.detach(), zero).sum(-1, keepdim=True) < 0
    masked = masked.expand_as(tokens.log_ratio)
    return _weights(tokens, torch.where(masked, 0.0, torch.ones_like(tokens.log_ratio)), masked=masked)


def mask_sequences_by_minimum(tokens: SampledTokens, *, low: float) -> Weights:
    """1, or 0 for every token of a row of which any ratio is below ``low``.

    One token the trainer finds all but impossible spoils what follows it: prime-rl's sequence mask
    (``sequence_mask_low``; INTELLECT-3, arXiv:2512.16144) and verl's ``rollout_token_veto_threshold`` (1e-4).
    """
    _check_bounds(low=low)
    masked = (_ratio(tokens.log_ratio) < low) & tokens.loss_mask
    masked = masked.any(-1, keepdim=True).expand_as(tokens.log_ratio)
    return _weights(tokens, torch.where(masked, 0.0, torch.ones_like(tokens.log_ratio)), masked=masked)


def discount_staleness(tokens: SampledTokens, *, power: float = 1.0, limit: int | None = None) -> Weights:
    """max(1, staleness) ** -power, and 0 beyond ``limit`` versions: a gradient counts less the older its policy.

    With power 1 this is the rule of Staleness-aware async SGD (arXiv:1511.05950): learning rate / staleness. It knows
    no log-probabilities; multiply it with a correction that does.

    >>> versions, one = torch.tensor([[7, 6, 5, 1]]), torch.ones(1, 4)
    >>> tokens = sampled_tokens(one, one, one.bool(), versions, version=7)
    >>> discount_staleness(tokens, limit=4)[0].tolist()
    [[1.0, 1.0, 0.5, 0.0]]
    """
    if power < 0 or (limit is not None and limit < 0):
        raise ValueError(f"power={power} and limit={limit} of staleness must not be negative")
    weight = tokens.staleness.clamp(min=1).to(tokens.log_ratio.dtype) ** -power
    masked = tokens.staleness > limit if limit is not None else torch.zeros_like(tokens.loss_mask)
    result, metrics = _weights(tokens, torch.where(masked, 0.0, weight), masked=masked)
    if metrics["tokens"]:
        seen = tokens.staleness[tokens.loss_mask]
        metrics |= {"staleness_mean": seen.double().mean().item(), "staleness_max": float(seen.max().item())}
    return result, metrics


CORRECTIONS: dict[str, Callable[..., Weights]] = {
    "truncate_tokens": truncate_tokens,
    "truncate_sequences": truncate_sequences,
    "mask_tokens": mask_tokens,
    "mask_sequences_by_mean": mask_sequences_by_mean,
    "mask_sequences_by_minimum": mask_sequences_by_minimum,
    "discount_staleness": discount_staleness,
}
"""(SampledTokens, and the bounds by name) -> weights [B, T] and metrics."""


def _ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _check_bounds(**bounds: float) -> None:
    values = list(bounds.values())
    if not (0.0 <= values[0] <= values[-1] and values[-1] > 0.0):  # NaN fails too
        seen = ", ".join(f"{name}={value}" for name, value in bounds.items())
        raise ValueError(f"off-policy bounds must be at least 0, ascending, the last above 0 (seen: {seen})")


def _weights(
    tokens: SampledTokens, weights: Tensor, *, truncated: Tensor | None = None, masked: Tensor | None = None
) -> Weights:
    """The weights, 0 where masked, and their metrics in one transfer from the device."""
    weights = torch.where(tokens.loss_mask, weights, 0.0)
    parts = {"tokens": tokens.loss_mask, "weight_mean": weights}
    if truncated is not None:
        parts["truncated_fraction"] = truncated & tokens.loss_mask
    if masked is not None:
        parts["masked_fraction"] = masked & tokens.loss_mask
    sums = dict(zip(parts, torch.stack([part.double().sum() for part in parts.values()]).tolist(), strict=True))
    count = sums.pop("tokens")
    if not count:
        return weights, {"tokens": 0.0}
    return weights, {"tokens": count} | {name: total / count for name, total in sums.items()}
