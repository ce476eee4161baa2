"""GAE against golden values and against its definition, written out as a double sum."""

from __future__ import annotations

import numpy as np
import pytest

from rl.gae import at_last_token, gae


def of(rewards, values, mask=None, gamma=0.99, lam=0.9):
    rewards, values = np.array([rewards], float), np.array([values], float)
    mask = np.ones(rewards.shape, bool) if mask is None else np.array([mask], bool)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert advantages.dtype == returns.dtype == np.float32
    return advantages[0], returns[0]


def by_definition(rewards, values, mask, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, over the loss tokens of one row alone (eq. 16)."""
    places = np.flatnonzero(mask)
    advantages = np.zeros(len(mask))
    for i, t in enumerate(places):
        for k in range(i, len(places)):
            following = values[places[k + 1]] if k + 1 < len(places) else 0.0
            delta = rewards[places[k]] + gamma * following - values[places[k]]
            advantages[t] += (gamma * lam) ** (k - i) * delta
    return advantages, np.where(mask, advantages + np.where(mask, values, 0.0), 0.0)


def test_golden():
    advantages, returns = of([0, 0, 1], [0.5, 0.6, 0.7])
    assert advantages == pytest.approx([0.415027, 0.3603, 0.3], abs=5e-7)
    assert returns == pytest.approx([0.915027, 0.9603, 1.0], abs=5e-7)


@pytest.mark.parametrize("bad", [9.0, np.nan, np.inf])
def test_a_masked_token_before_the_last_changes_nothing(bad):
    advantages, returns = of([0, 0, bad, 1], [0.5, 0.6, bad, 0.7], [True, True, False, True])
    assert advantages == pytest.approx([0.415027, 0.3603, 0, 0.3], abs=5e-7)
    assert returns == pytest.approx([0.915027, 0.9603, 0, 1.0], abs=5e-7)


def test_the_ends_of_lambda():
    # lam 0: one-step differences; lam 1: discounted rewards to come, less the value
    assert of([1, 2], [10, 20], gamma=0.5, lam=0.0)[0].tolist() == [1 + 10 - 10, 2 - 20]
    assert of([1, 2], [10, 20], gamma=0.5, lam=1.0)[0].tolist() == [1 + 1 - 10, 2 - 20]
    assert of([1, 2], [10, 20], gamma=0.5, lam=1.0)[1].tolist() == [2, 2]
    assert of([1, 2, 4], [0, 0, 0], gamma=0.5, lam=1.0)[0].tolist() == [3, 4, 4]
    assert of([1, 2, 4], [0, 0, 0], gamma=0.0, lam=1.0)[0].tolist() == [1, 2, 4]


def test_edges():
    advantages, returns = of([3], [1])
    assert (advantages.tolist(), returns.tolist()) == ([2], [3])
    advantages, returns = of([np.nan, 1], [1, np.nan], [False, False])
    assert not advantages.any() and not returns.any()
    advantages, returns = gae(np.zeros((2, 0)), np.zeros((2, 0)), np.zeros((2, 0), bool), gamma=1.0, lam=1.0)
    assert advantages.shape == (2, 0)


def test_agrees_with_the_definition_whatever_is_masked_and_padded():
    rng = np.random.default_rng(0)
    for _ in range(100):
        rows, length = rng.integers(1, 4), rng.integers(1, 9)
        gamma, lam = rng.random(2)
        mask = rng.random((rows, length)) < 0.6
        rewards, values = (np.where(mask, rng.normal(size=mask.shape), np.nan) for _ in range(2))
        pad = ((0, 0), (0, 3))
        advantages, returns = gae(
            np.pad(rewards, pad, constant_values=np.nan),
            np.pad(values, pad, constant_values=np.nan),
            np.pad(mask, pad),
            gamma=gamma,
            lam=lam,
        )
        for row in range(rows):
            expected = by_definition(rewards[row], values[row], mask[row], gamma, lam)
            np.testing.assert_allclose(advantages[row, :length], expected[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(returns[row, :length], expected[1], rtol=1e-5, atol=1e-6)
        assert not advantages[:, length:].any()


def test_a_loss_token_must_be_finite():
    with pytest.raises(ValueError, match="values of loss tokens"):
        of([0, 1], [np.nan, 0])
    with pytest.raises(ValueError, match="rewards of loss tokens"):
        of([0, np.inf], [0, 0])


def test_the_reward_of_a_sequence_lies_on_its_last_loss_token():
    mask = np.array([[False, True, True, False], [True, False, True, True], [False] * 4])
    placed = at_last_token(np.array([2.0, -1.0, np.nan]), mask)
    assert placed.tolist() == [[0, 0, 2, 0], [0, 0, 0, -1], [0] * 4]
    with pytest.raises(ValueError, match="finite"):
        at_last_token(np.array([np.nan, 0, 0]), mask)
