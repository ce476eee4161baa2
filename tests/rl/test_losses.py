"""The policy loss against values computed by hand, and against NaN."""

from __future__ import annotations

import math

import pytest
import torch

from rl.losses import LOSSES, MAX_LOG_RATIO, clipped_policy_loss


def loss_of(logprobs, old, advantages, mask=None, low=0.2, high=0.2):
    """Sums and the gradient by log-probability, for lists of one row."""
    current = torch.tensor([logprobs], requires_grad=True)
    loss_mask = torch.tensor([mask if mask is not None else [True] * len(logprobs)])
    sums = clipped_policy_loss(
        current, torch.tensor([old]), torch.tensor([advantages]), loss_mask, clip_low=low, clip_high=high
    )
    sums.loss.backward()
    return sums, current.grad[0]


def test_hand_values_inside_the_clip():
    sums, gradient = loss_of([-1.0, -2.0], [-1.0, -2.1], [2.0, -1.0])
    ratio = math.exp(0.1)  # of the second token
    assert sums.loss.item() == pytest.approx(-2.0 + ratio, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-2.0, ratio], rel=1e-6)
    assert sums.clipped.item() == 0
    assert sums.kl.item() == pytest.approx(ratio - 1 - 0.1, abs=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "slope"),
    [
        (1.0, 1.0, -1.3, 0.0),  # above 1 + high and still pushed up: cut
        (1.0, -1.0, math.e, math.e),  # above, pushed down: free
        (-1.0, -1.0, 0.9, 0.0),  # below 1 - low and still pushed down: cut
        (-1.0, 1.0, -math.exp(-1), -math.exp(-1)),  # below, pushed up: free
        (0.2, 1.0, -math.exp(0.2), -math.exp(0.2)),  # 1.22 lies between 1.1 and 1.3
    ],
)
def test_the_clip_has_two_bounds_of_its_own(log_ratio, advantage, loss, slope):
    sums, gradient = loss_of([log_ratio], [0.0], [advantage], low=0.1, high=0.3)
    assert sums.loss.item() == pytest.approx(loss, rel=1e-6)
    assert gradient.item() == pytest.approx(slope, rel=1e-6)
    assert sums.clipped.item() == (slope == 0.0)


def test_garbage_outside_the_mask_adds_nothing():
    nan, huge = float("nan"), -1e10
    clean, clean_gradient = loss_of([-1.0, -2.0], [-1.5, -2.5], [1.0, -1.0])
    for bad in (nan, huge, float("inf")):
        sums, gradient = loss_of([-1.0, bad, -2.0, 0.0], [-1.5, huge, -2.5, bad], [1.0, nan, -1.0, bad],
                                 mask=[True, False, True, False])  # fmt: skip
        assert (sums.loss, sums.kl, sums.clipped) == (clean.loss, clean.kl, clean.clipped)
        assert gradient.tolist() == [clean_gradient[0], 0.0, clean_gradient[1], 0.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("new", "old"), [(-120.0, -1.0), (-1.0, -120.0), (-1e10, -1.0)])
def test_extreme_ratios_stay_finite(new, old, advantage):
    sums, gradient = loss_of([new], [old], [advantage])
    assert all(math.isfinite(value.item()) for value in (sums.loss, sums.kl, gradient))
    assert abs(sums.loss.item()) <= math.exp(MAX_LOG_RATIO) * 1.001


def test_equal_policies_have_no_kl_and_the_plain_policy_gradient():
    sums, gradient = loss_of([-0.3, -5.0], [-0.3, -5.0], [1.5, -0.5])
    assert sums.kl.item() == 0.0
    assert gradient.tolist() == [-1.5, 0.5]


def test_an_empty_mask_is_zero():
    sums, gradient = loss_of([-1.0], [float("nan")], [float("nan")], mask=[False])
    assert sums.loss.item() == 0 and gradient.item() == 0 and sums.kl.item() == 0


def test_every_loss_is_in_the_table():
    assert LOSSES["grpo"] is clipped_policy_loss
