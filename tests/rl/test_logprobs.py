"""Log-probabilities, entropy and gradients against PyTorch's own, in double precision."""

from __future__ import annotations

import math

import pytest
import torch

import rl.logprobs
from rl.logprobs import token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("chunk", [1, 20, 1 << 22])
def test_equals_log_softmax_in_value_and_gradient(monkeypatch, temperature, chunk):
    monkeypatch.setattr(rl.logprobs, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 5, 11)).requires_grad_()
    targets = torch.randint(0, 11, (2, 5), dtype=torch.int32)
    weights = torch.randn(2, 5)
    logprobs, entropy = token_logprobs(logits, targets, temperature)
    (logprobs * weights).sum().backward()

    exact = logits.detach().double().requires_grad_()
    full = (exact / temperature).log_softmax(-1)
    picked = full.gather(-1, targets.long()[..., None]).squeeze(-1)
    (picked * weights).sum().backward()
    torch.testing.assert_close(logprobs.double(), picked, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(-1).detach(), atol=2e-6, rtol=0)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-6, rtol=0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad


def test_hand_values():
    logprobs, entropy = token_logprobs(torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([0]), 1.0)
    assert logprobs.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), rel=1e-6)
    # temperature 1/2 squares the odds: 9 to 1
    assert token_logprobs(torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([1]), 0.5)[0].item() == pytest.approx(
        math.log(0.1), rel=1e-6
    )


def test_extreme_and_forbidden_logits():
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.0, -math.inf, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 2]), 1.0)
    assert logprobs.tolist() == pytest.approx([-1e4, -math.log(2)])
    assert entropy.tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
    logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_a_token_without_weight_adds_nothing_even_where_its_logits_are_nan():
    logits = torch.tensor([[1.0, 2.0], [math.nan, math.nan]], requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.tensor([0, 0]), 1.0)
    torch.where(torch.tensor([True, False]), logprobs, 0.0).sum().backward()
    assert logits.grad[1].tolist() == [0.0, 0.0] and torch.isfinite(logits.grad).all()


def test_bfloat16_logits_are_worked_on_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(4, 9).bfloat16().requires_grad_()
    targets = torch.arange(4)
    logprobs, _ = token_logprobs(logits, targets, 1.0)
    expected = logits.float().log_softmax(-1)[torch.arange(4), targets]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
