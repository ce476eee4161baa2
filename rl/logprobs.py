"""Logits to log-probabilities and entropy, a slice of tokens at a time: [N, V] is never held twice in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Logits worked on at a time: 16 MiB in float32, whatever the vocabulary."""


class _TokenLogprobs(torch.autograd.Function):
    """log softmax at the targets, and its entropy; keeps the logits as they came, recomputes the softmax backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        count, vocabulary = logits.shape
        rows = max(1, CHUNK_ELEMENTS // vocabulary)
        normaliser = torch.empty(count, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(normaliser)
        for start in range(0, count, rows):
            scaled = logits[start : start + rows].float() / temperature
            top = scaled.amax(-1, keepdim=True)
            scaled -= top  # so that exp cannot overflow
            weights = scaled.exp()
            total = weights.sum(-1)
            log_total = total.log()
            normaliser[start : start + rows] = log_total + top.squeeze(-1)
            # p log p -> 0 as p -> 0; a logit of -inf would make it 0 * inf
            scaled.masked_fill_(weights == 0, 0.0)
            entropy[start : start + rows] = log_total - torch.linalg.vecdot(weights, scaled) / total
        picked = logits.gather(-1, targets[:, None]).squeeze(-1).float() / temperature
        ctx.save_for_backward(logits, targets, normaliser)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return picked - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normaliser = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
        result = torch.empty_like(logits)
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            softmax = logits[part].float() / ctx.temperature
            softmax -= normaliser[part, None]
            softmax.exp_().mul_(-scale[part, None])
            softmax.scatter_add_(-1, targets[part, None], scale[part, None])
            softmax.masked_fill_(scale[part, None] == 0, 0.0)  # a masked token adds 0, even where its logits are NaN
            result[part] = softmax
        return result, None, None


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of the distribution it came from, in nats, float32.

    ``logits`` [..., V] of any floating type, ``targets`` [...] integer. Both results, [...], are of the distribution
    that was sampled from: softmax(logits / temperature). The log-probabilities carry a gradient, the entropy does not.

    >>> logprobs, entropy = token_logprobs(torch.tensor([[0.0, 0.0]]), torch.tensor([1]), temperature=1.0)
    >>> round(logprobs.item(), 4), round(entropy.item(), 4)
    (-0.6931, 0.6931)
    """
    assert logits.shape[:-1] == targets.shape, (logits.shape, targets.shape)
    flat_logits = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _TokenLogprobs.apply(flat_logits, targets.reshape(-1).long(), temperature)
    return logprobs.view(targets.shape), entropy.view(targets.shape)
