"""What is minimised: one function for each loss, found in ``LOSSES``.

A loss gets per-token tensors of one micro-batch and returns sums over its tokens, never means: the train step divides
by the number of loss tokens of the whole optimizer update (over all ranks and micro-batches), so how samples are
dealt out changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio is a fault, and its gradient is cut rather than made infinite."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the loss tokens of one micro-batch; only ``loss`` carries a gradient. All are scalars."""

    loss: Tensor
    clipped: Tensor  # tokens whose gradient the clip has switched off
    kl: Tensor  # k3 estimate of KL(old || new)


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossSums:
    """The clipped surrogate of PPO (arXiv:1707.06347, eq. 7), with separate bounds (DAPO, arXiv:2503.14476, eq. 10).

    For each loss token, with ratio = exp(logprobs - old_logprobs) and A its advantage:
    ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``. All tensors are [B, T]; what stands where
    loss_mask is False (padding, prompts) is never touched by arithmetic, so even NaN there adds 0 to loss and gradient.
    ``kl`` is Schulman's k3, ratio - 1 - log ratio: never negative, and 0 for equal policies.

    >>> one = torch.ones(1, 1)
    >>> sums = clipped_policy_loss(0.5 * one, 0 * one, 2 * one, one.bool(), clip_low=0.2, clip_high=0.2)
    >>> round(sums.loss.item(), 6), sums.clipped.item()  # exp(0.5) = 1.65 is cut to 1.2
    (-2.4, 1)
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    logprobs = torch.where(loss_mask, logprobs, zero)
    old_logprobs = torch.where(loss_mask, old_logprobs, zero)
    advantages = torch.where(loss_mask, advantages, zero)

    log_ratio = torch.clamp(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    plain = ratio * advantages
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -torch.minimum(plain, clipped).sum()  # masked tokens: min(1 * 0, 1 * 0)
    with torch.no_grad():
        return LossSums(loss=loss, clipped=(clipped < plain).sum(), kl=(ratio - 1.0 - log_ratio).sum())


LOSSES: dict[str, Callable[..., LossSums]] = {"grpo": clipped_policy_loss}
