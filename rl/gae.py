"""Advantages with a critic: generalised advantage estimation over the sampled tokens, and per-token rewards.

Arrays are [B, T], a row holds one sequence. Tokens where loss_mask is False (prompt, padding, observations of a tool)
are no actions: the recursion jumps over them, so they may lie anywhere, and even NaN there changes nothing.
"""

from __future__ import annotations

import numpy as np

from rl.types import BoolArray, FloatArray


def gae(
    rewards: FloatArray, values: FloatArray, loss_mask: BoolArray, *, gamma: float, lam: float
) -> tuple[FloatArray, FloatArray]:
    """Advantages and returns, each [B, T] float32 and 0 where loss_mask is False (arXiv:1506.02438, eq. 16).

    ``values`` are the critic's before each sampled token, ``rewards`` are given after it. With t+ the next loss token
    of the row: delta_t = r_t + gamma V_t+ - V_t and A_t = delta_t + gamma lam A_t+; after the last one both are 0,
    since the episode has ended. A token in between that was not sampled costs no discount. returns = advantages +
    values, the critic's targets. A reward belongs on a sampled token: those on other tokens are ignored.

    With values 0 and lam 1 the advantages are the discounted sums of the rewards to come. Computed in float64. Raises
    ValueError when a reward or value of a loss token is not finite.

    >>> one = np.ones((1, 3), dtype=bool)
    >>> advantages, returns = gae(
    ...     np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 0.6, 0.7]]), one, gamma=0.99, lam=0.9
    ... )
    >>> advantages.astype(float).round(6).tolist(), returns.astype(float).round(6).tolist()
    ([[0.415027, 0.3603, 0.3]], [[0.915027, 0.9603, 1.0]])
    """
    assert rewards.shape == values.shape == loss_mask.shape and loss_mask.ndim == 2, (rewards.shape, values.shape)
    assert 0 <= gamma <= 1 and 0 <= lam <= 1, (gamma, lam)
    reward, value = _masked("rewards", rewards, loss_mask), _masked("values", values, loss_mask)
    advantages = np.zeros(loss_mask.shape)
    next_value, next_advantage = np.zeros(len(loss_mask)), np.zeros(len(loss_mask))
    for t in reversed(range(loss_mask.shape[1])):
        here = loss_mask[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]
        next_advantage = np.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = np.where(here, value[:, t], next_value)
        advantages[:, t] = np.where(here, next_advantage, 0.0)
    return advantages.astype(np.float32), (advantages + value).astype(np.float32)


def at_last_token(rewards: FloatArray, loss_mask: BoolArray) -> FloatArray:
    """Per-token rewards [B, T] from one reward per sequence [B]: all of it on the last loss token, 0 elsewhere.

    Add others, such as the KL penalty of ``rl.kl.kl_penalty``, to the result. Raises ValueError when the reward of a
    sequence with loss tokens is not finite.

    >>> at_last_token(np.array([2.0]), np.array([[False, True, True, False]])).tolist()
    [[0.0, 0.0, 2.0, 0.0]]
    """
    assert rewards.shape == loss_mask.shape[:1], (rewards.shape, loss_mask.shape)
    places = loss_mask & (np.cumsum(loss_mask[:, ::-1], axis=1)[:, ::-1] == 1)
    return _masked("rewards", np.broadcast_to(rewards[:, None], loss_mask.shape), places).astype(np.float32)


def _masked(name: str, array: FloatArray, mask: BoolArray) -> np.ndarray:
    """The array in float64, 0 where the mask is False, known to be finite."""
    masked = np.where(mask, np.asarray(array, dtype=np.float64), 0.0)
    if not np.isfinite(masked).all():
        raise ValueError(f"{name} of loss tokens must be finite (seen: {masked[~np.isfinite(masked)][0]})")
    return masked
