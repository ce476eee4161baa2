"""How much better than its siblings each sample was: one function for each estimator, found in ``ADVANTAGES``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rl.types import BoolArray, FloatArray, Group, TrainSample

NOISE_FLOOR = 1e-6
"""A group whose rewards spread by no more than this, times max(1, |mean|), carries no signal: it is rounding noise."""


def is_flat(rewards: FloatArray, scored: BoolArray) -> bool:
    """Whether a group teaches nothing: fewer than two scored members, or all scored rewards equal up to rounding.

    >>> is_flat(np.array([1.0, 1.0, 0.9999999]), np.array([True, True, True]))
    True
    >>> is_flat(np.array([1.0, 0.0]), np.array([True, False]))
    True
    """
    seen = np.asarray(rewards, dtype=np.float64)[scored]
    if seen.size < 2:
        return True
    return bool(seen.max() - seen.min() <= NOISE_FLOOR * max(1.0, abs(seen.mean())))


def grpo(rewards: FloatArray, scored: BoolArray, epsilon: float) -> FloatArray:
    """Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2): (r - mean) / (std + epsilon).

    ``rewards`` and ``scored`` are [G]; mean and standard deviation (ddof = 1) are those of the scored members alone.
    Unscored members get 0, whatever stands in ``rewards`` there, and so does every member of a flat group.
    Computed in float64, returned as float32 [G]. Raises ValueError when a scored reward is not finite.

    >>> grpo(np.array([1.0, 0.0, 0.0, 0.0]), np.ones(4, dtype=bool), epsilon=0.0).tolist()
    [1.5, -0.5, -0.5, -0.5]
    >>> grpo(np.array([1.0, np.nan, 0.0]), np.array([True, False, True]), epsilon=0.0).astype(float).round(4).tolist()
    [0.7071, 0.0, -0.7071]
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    assert rewards.ndim == 1 and rewards.shape == scored.shape, (rewards.shape, scored.shape)
    seen = rewards[scored]
    if not np.isfinite(seen).all():
        raise ValueError(f"rewards of scored samples must be finite (seen: {seen.tolist()}); mark the others unscored")
    advantages = np.zeros(rewards.shape, dtype=np.float32)
    if not is_flat(rewards, scored):
        advantages[scored] = (seen - seen.mean()) / (seen.std(ddof=1) + epsilon)
    return advantages


ADVANTAGES: dict[str, Callable[[FloatArray, BoolArray, float], FloatArray]] = {"grpo": grpo}


def group_advantages(group: Group, epsilon: float, estimator: str = "grpo") -> tuple[BoolArray, FloatArray]:
    """Which members of a group were scored, and every member's advantage; both [G]."""
    scored = np.array([trajectory.score.reward is not None for trajectory in group.trajectories], dtype=bool)
    rewards = np.array([t.score.reward if t.score.reward is not None else 0.0 for t in group.trajectories])
    return scored, ADVANTAGES[estimator](rewards, scored, epsilon)


def to_samples(group: Group, epsilon: float, estimator: str = "grpo") -> list[TrainSample]:
    """The scored members of a group as sequences to learn from, in the group's order.

    A sequence is the prompt's ids followed by the completion's, exactly as sent and received; loss_mask is True on the
    sampled tokens, and every one of them carries its sample's advantage. Unscored members are left out: they have no
    weight, and their tokens are in no denominator. Members whose advantage is 0 stay in, with has_signal False.
    """
    scored, advantages = group_advantages(group, epsilon, estimator)
    samples = []
    for trajectory, is_scored, advantage in zip(group.trajectories, scored, advantages, strict=True):
        completion = trajectory.completion
        assert len(completion.token_ids) == len(completion.rollout_logprobs), trajectory.group_id
        if not is_scored or len(completion.token_ids) == 0:
            continue
        prompt_length = len(group.prompt.token_ids)
        token_ids = np.concatenate([group.prompt.token_ids, completion.token_ids]).astype(np.int32)
        loss_mask = np.arange(len(token_ids)) >= prompt_length
        rollout_logprobs = np.zeros(len(token_ids), dtype=np.float32)
        rollout_logprobs[prompt_length:] = completion.rollout_logprobs
        samples.append(
            TrainSample(
                group_id=group.group_id,
                token_ids=token_ids,
                loss_mask=loss_mask,
                rollout_logprobs=rollout_logprobs,
                advantages=np.where(loss_mask, advantage, np.float32(0)).astype(np.float32),
                version_spans=completion.version_spans,
                has_signal=bool(advantage != 0),
            )
        )
    return samples
