"""How much better than its siblings each sample was: one function for each estimator.

``ADVANTAGES`` holds those that look at one group, ``BATCH_ADVANTAGES`` those that look at all samples of a step. All
take ``rewards`` and ``scored`` and return float32 advantages of the same shape, computed in float64. Members that were
not scored get 0, whatever stands in ``rewards`` there, and count nowhere. Differences that are rounding noise
(``NOISE_FLOOR``) are exactly 0. A scored reward that is not finite is a ValueError.

A group sampled with one member is refused where its advantage would be undefined (grpo, rloo) or always 0 (dr_grpo). A
group of several of which only one was scored is flat: its advantages are 0, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl.types import BoolArray, FloatArray, Group, TrainSample

NOISE_FLOOR = 1e-6
"""A group whose rewards spread by no more than this, times max(1, |mean|), carries no signal: it is rounding noise."""

GRPO_CONVENTIONS: dict[str, tuple[int, float]] = {"trl": (1, 1e-4), "verl": (1, 1e-6), "openrlhf": (1, 1e-9)}
"""(ddof, epsilon) of ``grpo`` as others divide: TRL's GRPOTrainer (``rewards.std() + 1e-4``), verl's
``compute_grpo_outcome_advantage`` (``epsilon=1e-6``), OpenRLHF's ``group_norm`` (``rewards.std() + 1e-9``); the three
use torch.std, whose ddof is 1."""


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


def grpo(rewards: FloatArray, scored: BoolArray, epsilon: float, *, ddof: int = 1) -> FloatArray:
    """Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2): (r - mean) / (std + epsilon).

    ``rewards`` and ``scored`` are [G]; mean and standard deviation are those of the scored members alone.
    The paper leaves ``ddof`` (0 or 1) and ``epsilon`` open; ``GRPO_CONVENTIONS`` has those of other frameworks.
    Unscored members get 0, whatever stands in ``rewards`` there, and so does every member of a flat group.
    Computed in float64, returned as float32 [G]. Raises ValueError when a scored reward is not finite, and for a group
    of one.

    >>> grpo(np.array([1.0, 0.0, 0.0, 0.0]), np.ones(4, dtype=bool), epsilon=0.0).tolist()
    [1.5, -0.5, -0.5, -0.5]
    >>> grpo(np.array([1.0, np.nan, 0.0]), np.array([True, False, True]), epsilon=0.0).astype(float).round(4).tolist()
    [0.7071, 0.0, -0.7071]
    """
    assert ddof in (0, 1) and epsilon >= 0, (ddof, epsilon)
    seen = _seen(rewards, scored)
    _refuse_one("grpo", scored)
    if is_flat(rewards, scored):
        return _spread(np.zeros_like(seen), scored)
    return _spread((seen - seen.mean()) / (seen.std(ddof=ddof) + epsilon), scored)


def dr_grpo(rewards: FloatArray, scored: BoolArray, epsilon: float = 0.0) -> FloatArray:
    """GRPO done right (arXiv:2503.20783, section 3.2): r - mean, without the division that favours easy and hard rows.

    Shapes and errors as for ``grpo``; ``epsilon`` is not used, since nothing is divided.

    >>> dr_grpo(np.array([1.0, 0.0, 0.0, 0.0]), np.ones(4, dtype=bool)).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    seen = _seen(rewards, scored)
    _refuse_one("dr_grpo", scored)
    if is_flat(rewards, scored):
        return _spread(np.zeros_like(seen), scored)
    return _spread(seen - seen.mean(), scored)


def rloo(rewards: FloatArray, scored: BoolArray, epsilon: float = 0.0) -> FloatArray:
    """REINFORCE leave-one-out (RLOO, arXiv:2402.14740): r_i minus the mean of the *other* scored members.

    Equal to ``dr_grpo`` times n / (n - 1) for n scored members. Shapes, errors, ``epsilon``: as for ``dr_grpo``.

    >>> rloo(np.array([1.0, 0.0, 0.0, 0.0]), np.ones(4, dtype=bool)).astype(float).round(4).tolist()
    [1.0, -0.3333, -0.3333, -0.3333]
    """
    seen = _seen(rewards, scored)
    _refuse_one("rloo", scored)
    if is_flat(rewards, scored):
        return _spread(np.zeros_like(seen), scored)
    return _spread((seen - seen.mean()) * (seen.size / (seen.size - 1)), scored)


def remax(rewards: FloatArray, scored: BoolArray, epsilon: float = 0.0, *, baseline: float | None) -> FloatArray:
    """ReMax (arXiv:2310.10505, algorithm 1): r minus the reward of the greedy completion of the same prompt.

    ``baseline`` is that reward; a group of one is fine. A group of equal rewards has a signal unless the greedy
    completion got the same: differences of at most ``NOISE_FLOOR`` * max(1, |baseline|) are exactly 0. ``epsilon`` is
    not used. Raises ValueError when the baseline is not finite (the greedy completion was not scored).

    >>> remax(np.array([1.0, 0.0, 1.0]), np.ones(3, dtype=bool), baseline=1.0).tolist()
    [0.0, -1.0, 0.0]
    """
    seen = _seen(rewards, scored)
    if baseline is None or not np.isfinite(baseline):
        raise ValueError(f"remax: baseline={baseline} must be finite; leave out prompts whose greedy was not scored")
    difference = seen - baseline
    difference[abs(difference) <= NOISE_FLOOR * max(1.0, abs(baseline))] = 0.0
    return _spread(difference, scored)


def normalise(
    values: FloatArray,
    scored: BoolArray,
    epsilon: float,
    *,
    ddof: int = 0,
    weights: FloatArray | None = None,
    centre: bool = True,
) -> FloatArray:
    """(x - mean) / (std + epsilon) over all scored entries of a batch; any shape, e.g. [N] samples or [B, T] tokens.

    ``weights``, of the same shape, say how often an entry counts: with the number of loss tokens of each sample the
    result is the normalisation over tokens of OpenRLHF (ddof 0) and verl (ddof 1). Without ``centre`` the mean is taken
    to be 0, in the standard deviation too. A flat batch is exactly 0 where centred; an all-zero one always.
    ValueError for scored entries that are not finite.

    >>> normalise(np.array([3.0, 1.0, 7.0]), np.array([True, True, False]), epsilon=0.0).tolist()
    [1.0, -1.0, 0.0]
    """
    assert ddof in (0, 1) and epsilon >= 0, (ddof, epsilon)
    seen = _seen(values, scored)
    counts = np.ones_like(seen) if weights is None else np.asarray(weights, dtype=np.float64)[scored]
    assert np.isfinite(counts).all() and (counts >= 0).all(), "weights must be finite and not negative"
    if (is_flat(values, scored) if centre else not seen.any()) or counts.sum() <= ddof:
        return _spread(np.zeros_like(seen), scored)
    shifted = seen - (np.average(seen, weights=counts) if centre else 0.0)
    deviation = np.sqrt((counts * shifted**2).sum() / (counts.sum() - ddof))
    return _spread(shifted / (deviation + epsilon), scored)


def reinforce_plus_plus(
    rewards: FloatArray, scored: BoolArray, epsilon: float, *, group_ids: Sequence[str] = (), ddof: int = 0
) -> FloatArray:
    """REINFORCE++ (arXiv:2501.03262, section 3): rewards normalised over the whole batch [N], not within groups.

    ``group_ids`` are not used: a group of one is defined, and a group of equal rewards has a signal (it is above or
    below the batch). A batch of equal rewards is exactly 0. With a KL penalty in the reward, ``normalise`` the returns
    over tokens instead. The paper's mean and deviation are over tokens; see ``weights`` of ``normalise``.

    >>> reinforce_plus_plus(np.array([1.0, 1.0, 0.0, 0.0]), np.ones(4, dtype=bool), epsilon=0.0).tolist()
    [1.0, 1.0, -1.0, -1.0]
    """
    return normalise(rewards, scored, epsilon, ddof=ddof)


def reinforce_plus_plus_baseline(
    rewards: FloatArray, scored: BoolArray, epsilon: float, *, group_ids: Sequence[str], ddof: int = 0
) -> FloatArray:
    """REINFORCE++ with baseline (arXiv:2501.03262, section 3): r - mean of its group, divided by the batch's deviation.

    The group means make the batch mean 0, so it is not subtracted again, and flat groups stay exactly 0. (Peers
    subtract the mean over tokens, which is not 0 when lengths differ: flat groups then get a push of their own.)
    Shapes [N]; members of a group share an id, in any order. ValueError for a group of one.

    >>> rewards = np.array([1.0, 5.0, 0.0, 5.0])
    >>> reinforce_plus_plus_baseline(rewards, np.ones(4, dtype=bool), 0.0, group_ids=list("abab")).astype(
    ...     float).round(4).tolist()
    [1.4142, 0.0, -1.4142, 0.0]
    """
    return normalise(by_group(dr_grpo, rewards, scored, group_ids), scored, epsilon, ddof=ddof, centre=False)


def by_group(
    estimator: Callable[..., FloatArray],
    rewards: FloatArray,
    scored: BoolArray,
    group_ids: Sequence[str],
    epsilon: float = 0.0,
) -> FloatArray:
    """A group's estimator over a whole batch [N] in any order; unscored members are given too, and get 0.

    >>> by_group(dr_grpo, np.array([1.0, 4.0, 0.0, 8.0]), np.ones(4, dtype=bool), list("abab")).tolist()
    [0.5, -2.0, -0.5, 2.0]
    """
    assert len(group_ids) == len(rewards) == len(scored), (len(group_ids), len(rewards), len(scored))
    advantages = np.zeros(len(rewards), dtype=np.float32)
    names = np.asarray(group_ids)
    for name in dict.fromkeys(group_ids):
        members = names == name
        advantages[members] = estimator(np.asarray(rewards)[members], scored[members], epsilon)
    return advantages


ADVANTAGES: dict[str, Callable[..., FloatArray]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "remax": remax,  # needs baseline=
}
"""Estimators of one group: (rewards [G], scored [G], epsilon) -> [G]."""

BATCH_ADVANTAGES: dict[str, Callable[..., FloatArray]] = {
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
"""Estimators of a whole batch: (rewards [N], scored [N], epsilon, group_ids=[N]) -> [N]."""


def group_advantages(
    group: Group, epsilon: float, estimator: str = "grpo", **options: Any
) -> tuple[BoolArray, FloatArray]:
    """Which members of a group were scored, and every member's advantage; both [G]. ``options`` go to the estimator."""
    scored = np.array([trajectory.score.reward is not None for trajectory in group.trajectories], dtype=bool)
    rewards = np.array([t.score.reward if t.score.reward is not None else 0.0 for t in group.trajectories])
    return scored, ADVANTAGES[estimator](rewards, scored, epsilon, **options)


def to_samples(group: Group, epsilon: float, estimator: str = "grpo", **options: Any) -> list[TrainSample]:
    """The scored members of a group as sequences to learn from, in the group's order.

    A sequence is the prompt's ids followed by the completion's, exactly as sent and received; loss_mask is True on the
    sampled tokens, and every one of them carries its sample's advantage. Unscored members are left out: they have no
    weight, and their tokens are in no denominator. Members whose advantage is 0 stay in, with has_signal False.
    """
    scored, advantages = group_advantages(group, epsilon, estimator, **options)
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


def _seen(rewards: FloatArray, scored: BoolArray) -> np.ndarray:
    """The scored rewards in float64, known to be finite."""
    rewards = np.asarray(rewards, dtype=np.float64)
    assert rewards.shape == scored.shape, (rewards.shape, scored.shape)
    seen = rewards[scored]
    if not np.isfinite(seen).all():
        raise ValueError(f"rewards of scored samples must be finite (seen: {seen.tolist()}); mark the others unscored")
    return seen


def _refuse_one(estimator: str, scored: BoolArray) -> None:
    if scored.size < 2:
        raise ValueError(
            f"{estimator} compares the members of a group, and this one has {scored.size}: set algorithm.group_size to "
            "2 or more, or use an estimator that needs no siblings (remax, reinforce_plus_plus)"
        )


def _spread(values: np.ndarray, scored: BoolArray) -> FloatArray:
    """The values of the scored members at their places, 0 elsewhere."""
    advantages = np.zeros(scored.shape, dtype=np.float32)
    with np.errstate(over="ignore"):  # checked below, with a message
        advantages[scored] = values
    if not np.isfinite(advantages).all():
        raise ValueError(f"advantages must fit into float32 (seen: {np.abs(values).max():.3g}); scale the rewards down")
    return advantages
