"""Advantages against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rl.advantages import ADVANTAGES, grpo, is_flat, to_samples
from rl.types import Completion, Group, Outcome, Prompt, Score, Trajectory

ALL = np.ones(4, dtype=bool)


def rewards(*values: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and which of them were scored; None is unscored."""
    return np.array([np.nan if v is None else v for v in values]), np.array([v is not None for v in values])


def make_group(*scores: float | None, group_id: str = "g") -> Group:
    prompt = Prompt("0", "f:1", np.array([1, 2, 3], np.int32), "abc")
    trajectories = []
    for index, value in enumerate(scores):
        outcome: Outcome = "timeout" if value is None else "ok"
        completion = Completion(
            np.array([7, 8, 9][: index % 3 + 1], np.int32),
            np.array([-0.5, -1.0, -1.5][: index % 3 + 1], np.float32),
            "stop",
            ((4, index % 3 + 1),),
        )
        trajectories.append(Trajectory(group_id, index, completion, "", Score(value, outcome)))
    return Group(group_id, prompt, tuple(trajectories))


def test_hand_values():
    # mean 1/4, std (ddof 1) = sqrt((9/16 + 3/16) / 3) = 1/2
    np.testing.assert_array_equal(grpo(np.array([1.0, 0, 0, 0]), ALL, 0.0), np.float32([1.5, -0.5, -0.5, -0.5]))
    # mean 2, std 1, epsilon 1
    np.testing.assert_array_equal(grpo(np.array([1.0, 2, 3]), ALL[:3], 1.0), np.float32([-0.5, 0, 0.5]))
    assert grpo(np.array([1.0, 0, 0, 0]), ALL, 1e-4).dtype == np.float32
    np.testing.assert_allclose(grpo(np.array([1.0, 0, 0, 0]), ALL, 1e-4)[0], 0.75 / 0.5001, rtol=1e-6)


def test_agrees_with_a_loop_over_members():
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.normal(size=6)
        scored = rng.random(6) < 0.7
        seen = [v for v, s in zip(values, scored, strict=True) if s]
        expected = []
        for value, is_scored in zip(values, scored, strict=True):
            if not is_scored or len(seen) < 2:
                expected.append(0.0)
                continue
            mean = sum(seen) / len(seen)
            deviation = (sum((v - mean) ** 2 for v in seen) / (len(seen) - 1)) ** 0.5
            expected.append((value - mean) / (deviation + 1e-4))
        np.testing.assert_allclose(grpo(values, scored, 1e-4), expected, atol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        (1, 1, 1, 1),
        (1, 1, 1, 0.9999999),
        (0, 0, 0, 0),
        (1e6, 1e6 + 0.5, 1e6),
        (-3, -3.0000001),
        (None, None),
        (1, None),
    ],
)
def test_a_flat_group_is_exactly_zero(values):
    array, scored = rewards(*values)
    assert is_flat(array, scored)
    assert (grpo(array, scored, 0.0) == 0).all()


@pytest.mark.parametrize("values", [(1, 1, 1, 0.9999), (0, 1e-5), (1e6, 1e6 + 2)])
def test_a_small_real_difference_is_not_flat(values):
    array, scored = rewards(*values)
    assert not is_flat(array, scored)
    assert abs(grpo(array, scored, 0.0)).max() > 0.1


def test_unscored_members_do_not_move_their_siblings():
    with_missing = grpo(*rewards(1, None, 0, None), 1e-4)
    plain = grpo(*rewards(1, 0), 1e-4)
    np.testing.assert_array_equal(with_missing, [plain[0], 0, plain[1], 0])


def test_a_scored_reward_must_be_finite():
    with pytest.raises(ValueError, match="finite"):
        grpo(np.array([1.0, np.inf]), ALL[:2], 1e-4)


def test_to_samples_keeps_the_ids_and_masks_what_was_sampled():
    samples = to_samples(make_group(1.0, 0.0, None), epsilon=0.0)
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 7], [1, 2, 3, 7, 8]]
    assert [s.loss_mask.tolist() for s in samples] == [[False] * 3 + [True], [False] * 3 + [True] * 2]
    assert samples[1].rollout_logprobs.tolist() == [0, 0, 0, -0.5, -1.0]
    root = np.float32(np.sqrt(0.5))  # mean 1/2, std sqrt(1/2)
    assert samples[0].advantages.tolist() == [0, 0, 0, root]
    assert samples[1].advantages.tolist() == [0, 0, 0, -root, -root]
    assert [s.version_spans for s in samples] == [((4, 1),), ((4, 2),)]
    assert all(s.has_signal for s in samples) and samples[0].token_ids.dtype == np.int32


def test_flat_and_unscored_groups_as_samples():
    assert [s.has_signal for s in to_samples(make_group(1.0, 1.0), epsilon=1e-4)] == [False, False]
    assert [s.has_signal for s in to_samples(make_group(1.0, None), epsilon=1e-4)] == [False]
    assert to_samples(make_group(None, None), epsilon=1e-4) == []
    # the middle one of three sits on the mean: its own advantage is 0
    assert [s.has_signal for s in to_samples(make_group(0.0, 1.0, 2.0), epsilon=1e-4)] == [True, False, True]


def test_every_estimator_is_in_the_table():
    assert ADVANTAGES["grpo"] is grpo
