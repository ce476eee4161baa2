"""Policy, value and entropy losses against values computed by hand, against NaN, and against how a batch is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl.aggregate import AGGREGATIONS, token_weights
from rl.losses import (
    LOSSES,
    MAX_LOG_RATIO,
    TOKEN_LOSSES,
    clipped_policy_loss,
    entropy_bonus,
    ppo,
    sum_tokens,
    value_loss,
)


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
    assert set(TOKEN_LOSSES) == {"ppo", "gspo", "cispo", "reinforce"}


BOUNDS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"clip_low": 0.1, "clip_high": 0.2},
    "cispo": {"clip_low": 1.0, "clip_high": 0.28},
    "reinforce": {},
}
NAN, INF = float("nan"), float("inf")


def tokens_of(name, logprobs, old, advantages, mask=None, **bounds):
    """Per-token losses of one row, and the gradient of their sum by log-probability."""
    current = torch.tensor([logprobs], dtype=torch.float64, requires_grad=True)
    others = (torch.tensor([values], dtype=torch.float64) for values in (old, advantages))
    loss_mask = torch.tensor([mask if mask is not None else [True] * len(logprobs)])
    tokens = TOKEN_LOSSES[name](current, *others, loss_mask, **(bounds or BOUNDS[name]))
    tokens.loss.sum().backward()
    return tokens, current.grad[0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "bounds"),
    [
        (1.5, 1, -1.2, {}),
        (0.5, -1, 0.8, {}),
        (1.5, -1, 1.5, {}),
        (1.25, 1, -1.2, {}),
        (1.25, 1, -1.25, {"clip_high": 0.28}),
        (5, -1, 3, {"dual_clip": 3.0}),
        (5, -1, 5, {}),
        (5, 1, -1.2, {"dual_clip": 3.0}),  # the second clip is for bad tokens only
        (0.5, -1, 0.8, {"dual_clip": 3.0}),
        (0.5, 2, -1.0, {}),
    ],
)
def test_ppo_golden(ratio, advantage, loss, bounds):
    tokens, gradient = tokens_of(
        "ppo", [math.log(ratio)], [0.0], [advantage], **{"clip_low": 0.2, "clip_high": 0.2, **bounds}
    )
    assert tokens.loss.item() == pytest.approx(loss, rel=1e-9)
    free = loss == pytest.approx(-ratio * advantage)
    assert gradient == pytest.approx([-ratio * advantage if free else 0.0])
    assert tokens.clipped.item() == (not free)


def test_cispo_golden():
    tokens, gradient = tokens_of("cispo", [-0.7], [-0.7 - math.log(1.5)], [1.0], clip_low=1.0, clip_high=0.28)
    assert tokens.loss.item() == pytest.approx(0.896) and gradient == pytest.approx([-1.28])
    assert tokens.clipped.item()
    # ratio 0.5: free without a lower bound, 0.8 with one
    for low, weight in ((1.0, 0.5), (0.2, 0.8)):
        tokens, gradient = tokens_of("cispo", [-2.0], [-2.0 + math.log(2)], [-3.0], clip_low=low, clip_high=0.28)
        assert tokens.loss.item() == pytest.approx(-weight * 3 * 2) and gradient == pytest.approx([3 * weight])
        assert tokens.clipped.item() == (low == 0.2)


def test_gspo_golden():
    # mean of the three 0.05; every token's gradient is a third of the ratio for its own loss, and there are three
    tokens, gradient = tokens_of("gspo", [0.2, -0.1, 0.05], [0.0] * 3, [1.0] * 3, clip_low=0.2, clip_high=0.2)
    assert tokens.loss.tolist()[0] == pytest.approx([-1.051271] * 3, abs=5e-7)
    assert gradient == pytest.approx([-1.051271] * 3, abs=5e-7)
    assert tokens.log_ratio.tolist()[0] == pytest.approx([0.2, -0.1, 0.05])
    # masked tokens are not in the mean
    tokens, gradient = tokens_of(
        "gspo", [0.2, NAN, 0.0], [0.0, NAN, 0.0], [1.0, NAN, 1.0], [True, False, True], clip_low=0.2, clip_high=0.2
    )
    assert tokens.loss.tolist()[0] == pytest.approx([-math.exp(0.1), 0, -math.exp(0.1)])
    assert gradient == pytest.approx([-math.exp(0.1), 0, -math.exp(0.1)])
    # the mean is clipped as one: 1.35 to 1.2
    tokens, gradient = tokens_of("gspo", [0.9, -0.3], [0.0] * 2, [1.0] * 2, clip_low=0.2, clip_high=0.2)
    assert tokens.loss.tolist()[0] == pytest.approx([-1.2] * 2) and gradient == [0, 0]
    assert tokens.clipped.tolist() == [[True, True]]


def test_gspo_differs_from_ppo_where_one_token_is_far_off():
    row = ([0.5, 0.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4)
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    assert tokens_of("ppo", *row, **bounds)[0].clipped.tolist() == [[True, False, False, False]]
    assert not tokens_of("gspo", *row, **bounds)[0].clipped.any()  # exp(0.125) = 1.13


def test_reinforce_by_hand():
    tokens, gradient = tokens_of("reinforce", [-0.5, -2.0], [-0.5, -1.0], [2.0, -1.0])
    assert tokens.loss.tolist() == [[1.0, -2.0]] and gradient == [-2.0, 1.0]
    assert not tokens.clipped.any() and tokens.log_ratio.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    # cispo and reinforce have another value; the gradient -A is the same for all (gspo: with equal advantages)
    _, gradient = tokens_of(name, [-0.3, -5.0], [-0.3, -5.0], [1.5, 1.5])
    assert gradient == pytest.approx([-1.5, -1.5])


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_no_loss_lets_masked_positions_leak(name):
    clean, clean_gradient = tokens_of(name, [-1.0, -2.0], [-1.1, -2.3], [1.0, -1.0])
    for bad in (NAN, INF, -INF, -1e10):
        row = ([-1.0, bad, -2.0, bad], [-1.1, bad, -2.3, -bad], [1.0, bad, -1.0, NAN], [True, False, True, False])
        tokens, gradient = tokens_of(name, *row)
        assert tokens.loss.tolist()[0] == [clean.loss[0, 0].item(), 0, clean.loss[0, 1].item(), 0]
        assert gradient == [clean_gradient[0], 0, clean_gradient[1], 0]
        assert tokens.log_ratio.tolist()[0][1::2] == [0, 0] and not tokens.clipped[0, 1::2].any()
    tokens, gradient = tokens_of(name, [NAN, 1.0], [NAN, NAN], [NAN, INF], [False, False])
    assert tokens.loss.tolist() == [[0, 0]] and gradient == [0, 0]


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("new", "old"), [(-120.0, -1.0), (-1.0, -120.0), (-1e10, -1.0)])
def test_extreme_ratios_stay_finite_in_float32(name, advantage, new, old):
    current = torch.tensor([[new, -1.0]], requires_grad=True)
    tokens = TOKEN_LOSSES[name](
        current, torch.tensor([[old, -1.0]]), advantage * torch.ones(1, 2), torch.ones(1, 2).bool(), **BOUNDS[name]
    )
    sums = sum_tokens(tokens, torch.ones(1, 2).bool())
    sums.loss.backward()
    assert all(torch.isfinite(each).all() for each in (tokens.loss, sums.loss, sums.kl, current.grad))


def test_sums_take_weights_and_ignore_those_of_masked_tokens():
    current = torch.tensor([[-1.0, -2.0, 7.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    tokens = TOKEN_LOSSES["reinforce"](current, current.detach(), torch.tensor([[1.0, 2.0, NAN]]), mask)
    sums = sum_tokens(tokens, mask, torch.tensor([[0.5, 0.25, NAN]]))
    sums.loss.backward()
    assert sums.loss.item() == 0.5 * 1 + 0.25 * 4 and current.grad.tolist() == [[-0.5, -0.5, 0.0]]
    assert sums.clipped.item() == 0 and sums.kl.item() == 0


@pytest.mark.parametrize("value", [1.0, 0.0, -3.0, NAN])
def test_a_dual_clip_that_cuts_unchanged_tokens_is_refused(value):
    with pytest.raises(ValueError, match="dual_clip"):
        tokens_of("ppo", [0.0], [0.0], [1.0], clip_low=0.2, clip_high=0.2, dual_clip=value)


def of_values(value, old, target, clip, mask=True):
    current = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    fixed = (torch.tensor([[each]], dtype=torch.float64) for each in (old, target))
    loss, clipped = value_loss(current, *fixed, torch.tensor([[mask]]), clip=clip)
    loss.sum().backward()
    return loss.item(), current.grad.item(), clipped.item()


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope"),
    [
        (1.0, 0.5, 2.0, None, 0.5, -1.0),  # (1 - 2)^2 / 2
        (1.0, 0.5, 2.0, 0.2, 0.845, 0.0),  # held at 0.7: 1.3^2 / 2 is the larger, and a constant
        (1.0, 0.5, 0.0, 0.2, 0.5, 1.0),  # held at 0.7 it would be closer: the plain error counts
        (0.6, 0.5, 2.0, 0.2, 0.98, -1.4),  # moved by less than the clip
        (0.0, 0.5, -1.0, 0.2, 0.845, 0.0),  # held at 0.3
    ],
)
def test_value_loss_by_hand(value, old, target, clip, loss, slope):
    found = of_values(value, old, target, clip)
    assert found[0] == pytest.approx(loss) and found[1] == pytest.approx(slope) and found[2] == (slope == 0)


def test_value_loss_at_masked_positions_and_its_bound():
    assert of_values(NAN, INF, NAN, 0.2, mask=False) == (0.0, 0.0, False)
    assert of_values(NAN, NAN, NAN, None, mask=False) == (0.0, 0.0, False)
    for clip in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="clip="):
            of_values(0.0, 0.0, 0.0, clip)


def test_the_entropy_bonus_is_paid_for_loss_tokens_only():
    entropy = torch.tensor([[0.5, NAN, 1.0]], requires_grad=True)
    bonus = entropy_bonus(entropy, torch.tensor([[True, False, True]]))
    bonus.sum().backward()
    assert bonus.tolist() == [[-0.5, 0.0, -1.0]] and entropy.grad.tolist() == [[-1.0, 0.0, -1.0]]


def make_samples(rng, count=7):
    """Sequences of several lengths: log-probabilities, old ones, advantages, mask (at least one loss token each)."""
    samples = []
    for _ in range(count):
        size = int(rng.integers(1, 7))
        mask = rng.random(size) < 0.7
        mask[rng.integers(size)] = True
        new = -rng.random(size) * 3
        samples.append((new, new + rng.normal(size=size) * 0.4, np.full(size, rng.normal()), mask))
    return samples


def padded(rows, fill, extra):
    width = max(len(row) for row in rows) + extra
    return np.stack([np.concatenate([row, np.full(width - len(row), fill)]) for row in rows])


def loss_and_gradients(name, aggregation, samples, batches, extra):
    """Loss of one update cut into micro-batches of sample numbers; gradients by sample."""
    total, denominator, gradients = 0.0, 0.0, {}
    for members in batches:
        new, old, advantages = (padded([samples[i][k] for i in members], NAN, extra) for k in range(3))
        mask = padded([samples[i][3] for i in members], False, extra).astype(bool)
        weights, part = token_weights(aggregation, mask, length=8)
        current = torch.tensor(new, requires_grad=True)
        rest = (torch.tensor(each) for each in (old, advantages, mask))
        tokens = TOKEN_LOSSES[name](current, *rest, **BOUNDS[name])
        sums = sum_tokens(tokens, torch.tensor(mask), torch.tensor(weights, dtype=torch.float64))
        sums.loss.backward()
        total += sums.loss.item()
        denominator += part
        for row, i in enumerate(members):
            gradients[i] = current.grad[row, : len(samples[i][0])].numpy()
            assert not current.grad[row, len(samples[i][0]) :].any()
    return total / denominator, {i: gradient / denominator for i, gradient in gradients.items()}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_order_cutting_and_padding_change_neither_loss_nor_gradient(name, aggregation):
    rng = np.random.default_rng(0)
    for _ in range(10):
        samples = make_samples(rng)
        loss, gradients = loss_and_gradients(name, aggregation, samples, [range(7)], extra=0)
        cuts = np.unique(rng.integers(1, 7, size=3))
        batches = [part.tolist() for part in np.split(rng.permutation(7), cuts)]
        other, others = loss_and_gradients(name, aggregation, samples, batches, extra=int(rng.integers(0, 4)))
        assert other == pytest.approx(loss, rel=1e-9, abs=1e-12)
        for i in range(7):
            np.testing.assert_allclose(others[i], gradients[i], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["ppo", "gspo", "reinforce"])  # cispo's weight is a constant to the gradient
def test_gradients_are_those_of_finite_differences(name):
    rng = np.random.default_rng(1)
    for new, old, advantages, mask in make_samples(rng, count=10):
        row = (old.tolist(), advantages.tolist(), mask.tolist())
        _, gradient = tokens_of(name, new.tolist(), *row)
        for t in range(len(new)):
            step = np.where(np.arange(len(new)) == t, 1e-6, 0.0)
            up, down = (tokens_of(name, (new + sign * step).tolist(), *row)[0].loss.sum().item() for sign in (1, -1))
            assert (up - down) / 2e-6 == pytest.approx(gradient[t], abs=1e-5)


def test_the_sum_of_ppo_is_the_loss_of_the_train_step():
    rng = np.random.default_rng(2)
    arrays = [torch.tensor(rng.normal(size=(3, 5)), dtype=torch.float32) for _ in range(3)]
    mask = torch.tensor(rng.random((3, 5)) < 0.5)
    sums = clipped_policy_loss(*arrays, mask, clip_low=0.2, clip_high=0.3)
    tokens = ppo(*arrays, mask, clip_low=0.2, clip_high=0.3)
    assert sums.loss.item() == pytest.approx(tokens.loss[mask].sum().item(), rel=1e-6)
    assert sums.clipped.item() == tokens.clipped.sum().item()
    weighted = clipped_policy_loss(*arrays, mask, clip_low=0.2, clip_high=0.3, weights=torch.full((3, 5), 0.5))
    assert weighted.loss.item() == pytest.approx(0.5 * sums.loss.item(), rel=1e-6)
