"""Aggregation against values worked out by hand, and against how the update is cut."""

from __future__ import annotations

import numpy as np
import pytest

from rl.aggregate import AGGREGATIONS, sequence_weight, token_weights

LOSSES = np.array([[1.0, 1.0, np.nan, np.nan], [-1.0, -1.0, -1.0, -1.0]])
MASK = np.array([[True, True, False, False], [True] * 4])


def aggregate(name, losses, mask, length=0):
    """The sum and the denominator of one micro-batch."""
    weights, denominator = token_weights(name, mask, length)
    assert weights.dtype == np.float32 and not weights[~mask].any()
    return (weights * np.where(mask, losses, 0)).sum(), denominator


@pytest.mark.parametrize(
    ("name", "length", "expected"),
    [
        ("token_mean", 0, -1 / 3),
        ("sequence_mean", 0, 0.0),
        ("sequence_sum", 0, -1.0),  # (2 - 4) / 2
        ("constant", 4, -0.25),
        ("constant", 8, -0.125),
    ],
)
def test_golden(name, length, expected):
    total, denominator = aggregate(name, LOSSES, MASK, length)
    assert total / denominator == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_sequence_without_loss_tokens_adds_to_nothing(name):
    assert sequence_weight(name, 0, 4) == (0.0, 0.0)
    empty = np.zeros((3, 4), bool)
    assert aggregate(name, np.full((3, 4), np.nan), empty, 4) == (0.0, 0.0)
    both = np.concatenate([MASK, empty])
    losses = np.concatenate([LOSSES, np.full((3, 4), np.nan)])
    assert aggregate(name, losses, both, 4) == aggregate(name, LOSSES, MASK, 4)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_one_token_is_its_own_mean(name):
    total, denominator = aggregate(name, np.array([[3.0]]), np.array([[True]]), 1)
    assert total / denominator == 3.0


@pytest.mark.parametrize("length", [0, -3])
def test_the_constant_must_be_positive(length):
    with pytest.raises(ValueError, match=f"length={length}"):
        token_weights("constant", MASK, length)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_cutting_order_and_padding_change_nothing(name):
    rng = np.random.default_rng(0)
    for _ in range(50):
        mask = rng.random((6, 7)) < 0.5
        losses = np.where(mask, rng.normal(size=mask.shape), np.nan)
        total, denominator = aggregate(name, losses, mask, 7)
        order = rng.permutation(6)
        cuts = np.sort(rng.integers(0, 7, size=2))
        pad = ((0, 0), (0, int(rng.integers(0, 4))))
        parts = [
            aggregate(name, np.pad(losses[rows], pad, constant_values=np.nan), np.pad(mask[rows], pad), 7)
            for rows in np.split(order, cuts)
        ]
        assert sum(part[0] for part in parts) == pytest.approx(total, abs=1e-5)
        assert sum(part[1] for part in parts) == denominator
