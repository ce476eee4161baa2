"""KL(policy || reference) from sampled tokens: estimators as values, as losses, in the reward, and the coefficient.

With d = logprobs - ref_logprobs of a token sampled from the policy (Schulman, "Approximating KL Divergence", 2020):
k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, never negative), k3 = exp(-d) - 1 + d (unbiased, never
negative). A good value need not be a good loss, whose gradient is taken with the tokens held fixed (arXiv:2510.01555):

- k1's has expectation 0: it is the score function alone. As a loss k1 is noise;
- k2's is that of KL(policy || reference) itself, on-policy: the default;
- k3's is that of the other divergence, KL(reference || policy). It agrees near d = 0 only.

"On-policy" means that the tokens come from the current policy. After an update or with a mismatched sampler multiply by
importance weights (``rl/off_policy.py``).

Tensors are [B, T]. Where loss_mask is False every result is 0 and carries no gradient, whatever stands there. k1 and k2
are finite for all finite log-probabilities. k3 holds d at -20 (``rl.losses.MAX_LOG_RATIO``) below it: at -120 against
-1 its value is exp(20) - 21 and its gradient 0, where exp(119) would overflow float32. There it no longer pulls back;
k2 does, with gradient -119.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl.losses import MAX_LOG_RATIO


def k1(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """d; the estimator of the in-reward penalty. Its gradient as a loss is noise around 0.

    >>> round(k1(torch.tensor([[-1.0]]), torch.tensor([[-1.2]]), torch.tensor([[True]])).item(), 6)
    0.2
    """
    return _difference(logprobs, ref_logprobs, loss_mask)


def k2(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """d^2 / 2; its gradient, d * grad logprob, is on average that of the KL: the loss to take.

    >>> round(k2(torch.tensor([[-1.0]]), torch.tensor([[-1.2]]), torch.tensor([[True]])).item(), 6)
    0.02
    """
    return 0.5 * _difference(logprobs, ref_logprobs, loss_mask).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """exp(-d) - 1 + d; the value with the least variance, and GRPO's loss (arXiv:2402.03300, eq. 4).

    >>> round(k3(torch.tensor([[-1.0]]), torch.tensor([[-1.2]]), torch.tensor([[True]])).item(), 6)
    0.018731
    """
    difference = _difference(logprobs, ref_logprobs, loss_mask).clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-difference) + difference  # expm1: exp(-d) - 1 would lose all digits of a small d


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, estimator: str = "k2") -> Tensor:
    """The KL as a per-token loss [B, T] with a gradient by ``logprobs``; times the coefficient it adds to the policy's.

    >>> kl_loss(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([[True]])).item()
    2.0
    """
    return KL_ESTIMATORS[estimator](logprobs, ref_logprobs.detach(), loss_mask)


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, coefficient: float, estimator: str = "k1"
) -> Tensor:
    """What the KL adds to each token's reward (arXiv:1909.08593, section 2.2): -coefficient * estimate, no gradient.

    With k1 the policy gradient of this reward is that of -coefficient * KL.

    >>> kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([[True]]), coefficient=0.5).item()
    -1.0
    """
    with torch.no_grad():
        return torch.where(loss_mask, -coefficient * KL_ESTIMATORS[estimator](logprobs, ref_logprobs, loss_mask), 0.0)


@dataclass(frozen=True, slots=True)
class AdaptiveCoefficient:
    """A KL coefficient that steers the KL to a target (Ziegler et al., arXiv:1909.08593, section 2.2).

    ``target`` and what ``update`` observes are in the same unit: the paper's is nats per sequence. Raises ValueError
    for values that are not positive and finite.
    """

    coefficient: float
    target: float
    gain: float = 0.1  # K_beta
    max_error: float = 0.2

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} of an adaptive KL coefficient must be positive and finite")

    def update(self, observed: float) -> AdaptiveCoefficient:
        """beta * (1 + gain * clip((observed - target) / target, -max_error, max_error)).

        >>> controller = AdaptiveCoefficient(coefficient=0.1, target=6.0)
        >>> [round(controller.update(kl).coefficient, 6) for kl in (6.0, 12.0, 0.0, 6.6)]
        [0.1, 0.102, 0.098, 0.101]
        """
        if not math.isfinite(observed):
            raise ValueError(f"observed KL must be finite (seen: {observed})")
        error = min(max((observed - self.target) / self.target, -self.max_error), self.max_error)
        return replace(self, coefficient=self.coefficient * (1.0 + self.gain * error))


def _difference(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    return torch.where(loss_mask, logprobs, zero) - torch.where(loss_mask, ref_logprobs, zero)
