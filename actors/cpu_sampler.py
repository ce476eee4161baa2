"""Draws tokens on the CPU from one random number per token, where vLLM draws one per entry of the vocabulary.

vLLM 0.29 fills a [requests, vocabulary] matrix with exponential noise, twice where requests have seeds; on a CPU this
takes as long as the rest of a step at a vocabulary of 8,192, and far longer at 150,000. The inverse of the distribution
function needs one uniform number per request. The probabilities, and the log-probabilities that are reported, are
untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def install(sampler: Any) -> None:
    """Makes a vLLM ``TopKTopPSampler`` draw with ``forward``; asked for by ``Capabilities.slow_noise`` alone."""
    sampler.forward = partial(forward, sampler.logprobs_mode)


def forward(
    logprobs_mode: str,
    logits: torch.Tensor,
    generators: Mapping[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ``TopKTopPSampler.forward_cpu`` returns: [N] token ids, and the processed logits or log-probabilities.

    ``logits`` is [N, V], temperature included; ``generators`` holds those of the rows that have a seed.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p)
    processed = None
    if logprobs_mode == "processed_logits":
        processed = logits
    elif logprobs_mode == "processed_logprobs":
        processed = logits.log_softmax(dim=-1)
    return draw(logits.softmax(dim=-1), uniforms(len(logits), generators)), processed


def uniforms(count: int, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """[count] float64 in [0, 1): row i from its own generator, or from torch's where it has none."""
    import torch

    seeded = len(generators) == count
    drawn = torch.empty(count, dtype=torch.float64) if seeded else torch.rand(count, dtype=torch.float64)
    for row, generator in generators.items():
        drawn[row].uniform_(generator=generator)
    return drawn


def draw(probabilities: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """[N] the first index at which the running sum of ``probabilities`` [N, V] exceeds ``u`` [N] of their sum.

    An index of probability 0 adds nothing to the running sum and is never drawn.

    >>> import torch
    >>> draw(torch.tensor([[0.25, 0.0, 0.75]] * 4), torch.tensor([0.0, 0.2499, 0.25, 0.9999])).tolist()
    [0, 0, 2, 2]
    """
    import torch

    running = probabilities.cumsum(dim=-1, dtype=torch.float64)
    targets = u.to(torch.float64) * running[:, -1]
    drawn = torch.searchsorted(running, targets[:, None], right=True).squeeze(1)
    if bool((drawn == running.shape[-1]).any()):  # u < 1, but its product may be rounded up to the whole sum
        drawn = torch.minimum(drawn, (running < running[:, -1:]).sum(dim=-1))  # the last index that has a share
    return drawn
