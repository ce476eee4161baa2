"""What is minimised: per-token losses of the policy, of the critic, and the entropy bonus.

``TOKEN_LOSSES`` give every token its loss; ``sum_tokens`` weighs and adds them up. Sums are never means: the train step
divides by a denominator of the whole optimizer update (over all ranks and micro-batches, see ``rl/aggregate.py``), so
how samples are dealt out changes nothing. ``LOSSES`` are functions that do both at once, every token weighing 1.

Tensors are [B, T], a row holds one sequence. What stands where loss_mask is False (padding, prompts) is never touched
by arithmetic: even NaN there adds 0 to loss and gradient.
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


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What a policy loss says of every token, [B, T]; only ``loss`` carries a gradient. All are 0 where masked."""

    loss: Tensor
    clipped: Tensor  # bool: the clip had a say (its gradient is off; cispo: its weight was cut)
    log_ratio: Tensor  # logprobs - old_logprobs of the token, within +-MAX_LOG_RATIO


def sum_tokens(tokens: TokenLosses, loss_mask: Tensor, weights: Tensor | None = None) -> LossSums:
    """Adds up the losses, each times its weight [B, T] (those of aggregation and off-policy correction, multiplied).

    Weights carry no gradient. ``clipped`` and ``kl`` are counted without weights.

    >>> tokens = TokenLosses(torch.tensor([[1.0, 3.0]]), torch.tensor([[False, True]]), torch.zeros(1, 2))
    >>> sums = sum_tokens(tokens, torch.tensor([[True, True]]), torch.tensor([[0.5, 2.0]]))
    >>> sums.loss.item(), sums.clipped.item()
    (6.5, 1)
    """
    loss = tokens.loss
    if weights is not None:
        loss = loss * _where(loss_mask, weights.detach())
    with torch.no_grad():
        kl = torch.exp(tokens.log_ratio) - 1.0 - tokens.log_ratio
    return LossSums(loss=loss.sum(), clipped=tokens.clipped.sum(), kl=kl.sum())


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """The clipped surrogate of PPO (arXiv:1707.06347, eq. 7), with separate bounds (DAPO, arXiv:2503.14476, eq. 10).

    With ratio = exp(logprobs - old_logprobs) and A the advantage of a token:
    ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``. A bad token whose ratio has grown is not bounded
    by that; ``dual_clip`` = c bounds the loss of tokens with A < 0 by ``-c * A`` (arXiv:1912.09729; c = 3 there).
    Raises ValueError when c is not above 1.

    >>> one = torch.ones(1, 1)
    >>> bounds = dict(clip_low=0.2, clip_high=0.2)
    >>> round(ppo(1.609438 * one, 0 * one, -one, one.bool(), **bounds).loss.item(), 4)  # ratio 5
    5.0
    >>> ppo(1.609438 * one, 0 * one, -one, one.bool(), **bounds, dual_clip=3.0).loss.item()
    3.0
    """
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be above 1: at 1 or less it would cut unchanged tokens")
    log_ratio = _log_ratio(logprobs, old_logprobs, loss_mask)
    advantages = _where(loss_mask, advantages)
    loss, clipped = _clipped_surrogate(torch.exp(log_ratio), advantages, clip_low, clip_high)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        beyond = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(beyond, bound, loss), clipped | beyond
    return TokenLosses(loss, clipped, log_ratio.detach())


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """Group sequence policy optimisation (arXiv:2507.18071, eqs. 5 and 7): one ratio for a whole sequence.

    The ratio is exp(mean log-ratio of the row's loss tokens), clipped as in ``ppo``, and stands in for every token's.
    Its gradient goes through all of them, 1/n each; with equal advantages and ``sequence_mean`` the loss is the
    paper's. Bounds are much narrower than PPO's (3e-4 and 4e-4 in the paper). A row must hold the whole sequence.

    >>> old, one = torch.zeros(1, 3), torch.ones(1, 3)
    >>> losses = gspo(torch.tensor([[0.2, -0.1, 0.05]]), old, one, one.bool(), clip_low=0.2, clip_high=0.2)
    >>> losses.loss.double().numpy().round(6).tolist()
    [[-1.051271, -1.051271, -1.051271]]
    """
    difference = _where(loss_mask, logprobs) - _where(loss_mask, old_logprobs)
    count = loss_mask.sum(-1, keepdim=True).clamp(min=1)
    # the mean is exact however far single tokens are off; only it is held within the bounds of exp
    mean = (difference.sum(-1, keepdim=True) / count).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(mean).expand_as(difference)
    loss, clipped = _clipped_surrogate(ratio, _where(loss_mask, advantages), clip_low, clip_high)
    return TokenLosses(loss, clipped, difference.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """Clipped importance-sampling weights (MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5): no token loses its gradient.

    ``-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprobs``. The paper cuts from above only:
    ``clip_low=1``. ``clipped`` marks tokens whose weight was cut.

    >>> one = torch.ones(1, 1)
    >>> old = -0.7 * one - torch.log(1.5 * one)
    >>> losses = cispo(-0.7 * one, old, one, one.bool(), clip_low=1.0, clip_high=0.28)
    >>> round(losses.loss.item(), 6), losses.clipped.item()
    (0.896, True)
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, loss_mask).detach()
    ratio = torch.exp(log_ratio)
    weight = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * _where(loss_mask, advantages) * _where(loss_mask, logprobs)
    return TokenLosses(loss, weight != ratio, log_ratio)


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> TokenLosses:
    """REINFORCE (Williams, 1992): ``-A * logprobs``, right for tokens of the current policy.

    ``old_logprobs`` only serve ``log_ratio``; weights for tokens of another policy go to ``sum_tokens``.

    >>> reinforce(torch.tensor([[-0.5]]), torch.tensor([[-0.5]]), torch.tensor([[2.0]]), torch.tensor([[True]])).loss
    tensor([[1.]])
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, loss_mask).detach()
    loss = -_where(loss_mask, advantages) * _where(loss_mask, logprobs)
    return TokenLosses(loss, torch.zeros_like(loss_mask), log_ratio)


TOKEN_LOSSES: dict[str, Callable[..., TokenLosses]] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}
"""(logprobs, old_logprobs, advantages, loss_mask, and the bounds by name) -> per-token losses."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """The critic's per-token loss [B, T], and which tokens' gradient the clip has switched off.

    ``max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2`` (PPO's code; arXiv:2005.12729, section 3);
    None for the plain squared error. ``clip`` is in units of the return.

    >>> one = torch.ones(1, 1)
    >>> loss, clipped = value_loss(1.0 * one, 0.5 * one, 2.0 * one, one.bool(), clip=0.2)
    >>> round(loss.item(), 4), clipped.item()  # 0.7 is 1.3 away
    (0.845, True)
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip} of the value loss must be above 0, or None for none")
    values, old_values, returns = (_where(loss_mask, each) for each in (values, old_values, returns))
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(loss_mask)
    held = (old_values + torch.clamp(values - old_values, -clip, clip) - returns).square()
    return 0.5 * torch.maximum(plain, held), held > plain


def entropy_bonus(entropy: Tensor, loss_mask: Tensor) -> Tensor:
    """What a policy is rewarded with for staying random (arXiv:1707.06347, eq. 9), as a loss: -entropy, [B, T].

    ``entropy`` in nats, of every token's distribution, with its gradient; times a coefficient it is added to the loss.

    >>> entropy_bonus(torch.tensor([[0.5, float("nan")]]), torch.tensor([[True, False]])).tolist()
    [[-0.5, 0.0]]
    """
    return torch.where(loss_mask, -entropy, torch.zeros((), dtype=entropy.dtype, device=entropy.device))


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> LossSums:
    """``ppo`` summed over the loss tokens, each times its weight (1 unless given).

    ``kl`` is Schulman's k3, ratio - 1 - log ratio: never negative, and 0 for equal policies.

    >>> one = torch.ones(1, 1)
    >>> sums = clipped_policy_loss(0.5 * one, 0 * one, 2 * one, one.bool(), clip_low=0.2, clip_high=0.2)
    >>> round(sums.loss.item(), 6), sums.clipped.item()  # exp(0.5) = 1.65 is cut to 1.2
    (-2.4, 1)
    """
    tokens = ppo(
        logprobs, old_logprobs, advantages, loss_mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return sum_tokens(tokens, loss_mask, weights)


LOSSES: dict[str, Callable[..., LossSums]] = {"grpo": clipped_policy_loss}


def _where(loss_mask: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, 0 without a gradient where loss_mask is False."""
    return torch.where(loss_mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    return torch.clamp(_where(loss_mask, logprobs) - _where(loss_mask, old_logprobs), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio) A), and where the second is the smaller; masked tokens: min(1 * 0, 1 * 0)."""
    plain = ratio * advantages
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(plain, clipped), (clipped < plain).detach()
