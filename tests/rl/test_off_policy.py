"""Off-policy weights against values worked out by hand, and against what must not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl.off_policy import (
    CORRECTIONS,
    discount_staleness,
    mask_sequences_by_mean,
    mask_sequences_by_minimum,
    mask_tokens,
    sampled_tokens,
    truncate_sequences,
    truncate_tokens,
)

NAN, INF = float("nan"), float("inf")
OPTIONS = {
    "truncate_tokens": {"cap": 2.0},
    "truncate_sequences": {"cap": 2.0},
    "mask_tokens": {"low": 0.5, "high": 2.0},
    "mask_sequences_by_mean": {"low": 0.8, "high": 1.25},
    "mask_sequences_by_minimum": {"low": 0.6},
    "discount_staleness": {"limit": 3},
}


def tokens_of(*rows, mask=None, versions=None, version=0):
    """Tokens with these log-ratios, trainer / sampler."""
    log_ratio = torch.tensor(rows, dtype=torch.float64)
    loss_mask = torch.tensor(mask) if mask is not None else torch.ones_like(log_ratio, dtype=torch.bool)
    return sampled_tokens(
        log_ratio - 1.0,
        torch.full_like(log_ratio, -1.0),
        loss_mask,
        None if versions is None else torch.tensor(versions),
        version,
    )


def close(weights, expected):
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6, atol=5e-7)


def test_truncated_tokens_golden():
    weights, metrics = truncate_tokens(tokens_of([1.0, -1.0]), cap=2.0)
    close(weights, [[2.0, 0.367879]])
    assert metrics == pytest.approx({"tokens": 2, "weight_mean": (2 + math.exp(-1)) / 2, "truncated_fraction": 0.5})


def test_truncated_sequences_share_the_product():
    tokens = tokens_of([0.5, 0.1, NAN], [0.5, 0.4, 0.3], mask=[[True, True, False], [True, True, True]])
    weights, metrics = truncate_sequences(tokens, cap=2.0)
    close(weights, [[math.exp(0.6), math.exp(0.6), 0], [2, 2, 2]])
    assert metrics["truncated_fraction"] == pytest.approx(3 / 5) and metrics["tokens"] == 5


def test_icepop_keeps_ratios_between_the_bounds():
    log_two = math.log(2)
    tokens = tokens_of([0.0, log_two, 0.7, -log_two, -0.7])  # exp(0.7) = 2.01, exp(-0.7) = 0.497
    weights, metrics = mask_tokens(tokens, low=0.5 - 1e-12, high=2.0 + 1e-12)
    close(weights, [[1, 2, 0, 0.5, 0]])
    assert metrics == pytest.approx({"tokens": 5, "weight_mean": 0.7, "masked_fraction": 0.4})


def test_sequences_are_masked_by_their_geometric_mean():
    rows = ([0.5, -0.5], [0.3, 0.2], [-0.3, -0.2], [0.1, 0.0])  # means 0, 0.25, -0.25, 0.05
    weights, metrics = mask_sequences_by_mean(tokens_of(*rows), low=0.8, high=1.25)
    close(weights, [[1, 1], [0, 0], [0, 0], [1, 1]])  # exp(0.25) = 1.284, exp(-0.25) = 0.779
    assert metrics == pytest.approx({"tokens": 8, "weight_mean": 0.5, "masked_fraction": 0.5})


def test_good_sequences_stay_when_the_advantages_are_given():
    rows = ([-0.3, -0.2], [-0.3, -0.2], [-0.3, NAN])
    mask = [[True, True], [True, True], [True, False]]
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [-1.0, NAN]])
    weights, _ = mask_sequences_by_mean(tokens_of(*rows, mask=mask), low=0.8, high=INF, advantages=advantages)
    close(weights, [[1, 1], [0, 0], [0, 0]])


def test_one_impossible_token_masks_its_sequence():
    rows = ([0.0, -10.0, 0.0], [0.0, -9.0, 0.0], [0.0, NAN, 0.0])
    mask = [[True] * 3, [True] * 3, [True, False, True]]
    weights, metrics = mask_sequences_by_minimum(tokens_of(*rows, mask=mask), low=1e-4)  # log -9.21
    close(weights, [[0, 0, 0], [1, 1, 1], [1, 0, 1]])
    assert metrics["masked_fraction"] == pytest.approx(3 / 8)


def test_staleness_by_hand():
    tokens = tokens_of([NAN, 0.0, 0.0, 0.0, 0.0], mask=[[False] + [True] * 4], versions=[[-1, 9, 8, 5, 2]], version=9)
    weights, metrics = discount_staleness(tokens, limit=6)
    close(weights, [[0, 1, 1, 1 / 4, 0]])
    assert metrics == pytest.approx(
        {"tokens": 4, "weight_mean": 2.25 / 4, "masked_fraction": 0.25, "staleness_mean": 3, "staleness_max": 7}
    )
    close(discount_staleness(tokens, power=0.5)[0], [[0, 1, 1, 0.5, 7**-0.5]])
    close(discount_staleness(tokens, power=0.0)[0], [[0, 1, 1, 1, 1]])
    close(discount_staleness(tokens_of([0.5]))[0], [[1]])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_equal_policies_weigh_one(name):
    mask = [[True, True, False]]
    weights, metrics = CORRECTIONS[name](tokens_of([0.0, 0.0, NAN], mask=mask), **OPTIONS[name])
    assert weights.tolist() == [[1, 1, 0]] and metrics["weight_mean"] == 1 and metrics["tokens"] == 2
    assert not any(metrics.get(part) for part in ("masked_fraction", "truncated_fraction"))
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize("name", CORRECTIONS)
def test_without_loss_tokens_there_is_nothing_to_average(name):
    weights, metrics = CORRECTIONS[name](tokens_of([NAN, INF], mask=[[False, False]]), **OPTIONS[name])
    assert weights.tolist() == [[0, 0]] and metrics == {"tokens": 0.0}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_carry_no_gradient_and_stay_finite(name):
    current = torch.tensor([[-120.0, -1.0, -1e10]], requires_grad=True)
    tokens = sampled_tokens(current, torch.tensor([[-1.0, -120.0, -1.0]]), torch.ones(1, 3, dtype=torch.bool))
    weights, _ = CORRECTIONS[name](tokens, **OPTIONS[name])
    assert not weights.requires_grad and torch.isfinite(weights).all() and weights.dtype == torch.float32


@pytest.mark.parametrize("name", CORRECTIONS)
def test_order_cutting_and_padding_change_no_weight(name):
    rng = np.random.default_rng(0)
    pad = torch.nn.functional.pad
    for _ in range(20):
        logprobs, rollout = (torch.tensor(-rng.random((5, 6))) for _ in range(2))
        mask = torch.tensor(rng.random((5, 6)) < 0.7)
        versions = torch.tensor(rng.integers(0, 6, size=(5, 6)))
        whole, metrics = CORRECTIONS[name](sampled_tokens(logprobs, rollout, mask, versions, 6), **OPTIONS[name])
        order = torch.tensor(rng.permutation(5))
        count = mean = 0.0
        for rows in (order[:2], order[2:]):
            garbage = [pad(each[rows], (0, 3), value=NAN) for each in (logprobs, rollout)]
            tokens = sampled_tokens(*garbage, pad(mask[rows], (0, 3)), pad(versions[rows], (0, 3), value=-1), 6)
            weights, part = CORRECTIONS[name](tokens, **OPTIONS[name])
            np.testing.assert_allclose(weights[:, :6].numpy(), whole[rows].numpy(), rtol=1e-12)
            assert not weights[:, 6:].any()
            count += part["tokens"]
            mean += part["tokens"] * part.get("weight_mean", 0.0)
        assert count == metrics["tokens"] and mean / count == pytest.approx(metrics["weight_mean"])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_log_ratio_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="log_ratio"):
        tokens_of([0.0, bad])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("truncate_tokens", {"cap": 0.0}),
        ("truncate_sequences", {"cap": NAN}),
        ("mask_tokens", {"low": 2.0, "high": 1.0}),
        ("mask_tokens", {"low": -0.1, "high": 1.0}),
        ("mask_sequences_by_mean", {"low": NAN, "high": 1.0}),
        ("mask_sequences_by_minimum", {"low": -1.0}),
        ("discount_staleness", {"limit": -1}),
        ("discount_staleness", {"power": -0.5}),
    ],
)
def test_bounds_that_make_no_sense_are_refused(name, options):
    with pytest.raises(ValueError, match="|".join(options)):
        CORRECTIONS[name](tokens_of([0.0]), **options)


def test_every_correction_is_in_the_table():
    assert set(CORRECTIONS) == set(OPTIONS)
