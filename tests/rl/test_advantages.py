"""Advantages against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rl.advantages import (
    ADVANTAGES,
    BATCH_ADVANTAGES,
    GRPO_CONVENTIONS,
    by_group,
    dr_grpo,
    group_advantages,
    grpo,
    is_flat,
    normalise,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    to_samples,
)
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
    assert dr_grpo(*rewards(1, None, 2, 6)).tolist() == [-2, 0, -1, 3]
    assert rloo(*rewards(1, None, 2, 6)).tolist() == [-3, 0, -1.5, 4.5]
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
    assert {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "remax": remax} == ADVANTAGES
    assert set(BATCH_ADVANTAGES) == {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}


@pytest.mark.parametrize(
    ("values", "ddof", "epsilon", "expected"),
    [
        ((1, 0, 0, 1), 1, 1e-6, (0.866024, -0.866024, -0.866024, 0.866024)),
        ((1, 0, 0, 1), 1, 1e-4, (0.865875, -0.865875, -0.865875, 0.865875)),
        ((1, 0, 0, 1), 0, 0.0, (1, -1, -1, 1)),
        ((1, 0, 0, 0), 1, 1e-6, (1.499997, -0.499999, -0.499999, -0.499999)),
    ],
)
def test_grpo_golden(values, ddof, epsilon, expected):
    assert grpo(np.array(values, float), ALL, epsilon, ddof=ddof) == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(
    ("name", "expected"), [("trl", 0.75 / 0.5001), ("verl", 0.75 / 0.500001), ("openrlhf", 0.75 / 0.500000001)]
)
def test_grpo_with_the_conventions_of_others(name, expected):
    # [1, 0, 0, 0]: mean 1/4, std 1/2 with ddof 1
    ddof, epsilon = GRPO_CONVENTIONS[name]
    assert grpo(np.array([1.0, 0, 0, 0]), ALL, epsilon, ddof=ddof)[0] == pytest.approx(expected, rel=1e-6)


def test_dr_grpo_and_rloo_golden():
    array = np.array([1.0, 0, 0, 0])
    assert dr_grpo(array, ALL).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert rloo(array, ALL) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], abs=1e-7)
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    assert rloo(np.array([1.0, 2, 6]), ALL[:3]).tolist() == [-3.0, -1.5, 4.5]


def test_remax_is_the_distance_to_the_greedy_reward():
    assert remax(*rewards(1, 0, None, 0.5), baseline=0.5).tolist() == [0.5, -0.5, 0, 0]
    assert remax(*rewards(1, 1), baseline=0.0).tolist() == [1, 1]  # equal rewards, and yet a signal
    assert remax(*rewards(1, 1 + 1e-7), baseline=1.0).tolist() == [0, 0]  # noise
    assert remax(*rewards(0.25), baseline=1.0).tolist() == [-0.75]
    for missing in (None, np.nan, np.inf):
        with pytest.raises(ValueError, match="baseline"):
            remax(*rewards(1, 0), baseline=missing)


def test_normalise_by_hand():
    # mean 3, deviations -2, -1, 3; squares sum to 14
    array, scored = rewards(1, 2, None, 6)
    assert normalise(array, scored, 0.0) == pytest.approx(np.array([-2, -1, 0, 3]) / np.sqrt(14 / 3))
    assert normalise(array, scored, 0.0, ddof=1) == pytest.approx(np.array([-2, -1, 0, 3]) / np.sqrt(14 / 2))
    assert normalise(array, scored, 1.0)[3] == pytest.approx(3 / (np.sqrt(14 / 3) + 1))
    # not centred: 1 + 4 + 36
    assert normalise(array, scored, 0.0, centre=False)[1] == pytest.approx(2 / np.sqrt(41 / 3))


def test_normalise_with_token_counts_is_normalise_over_tokens():
    rng = np.random.default_rng(0)
    for ddof in (0, 1):
        for _ in range(20):
            values, counts = rng.normal(size=5), rng.integers(1, 9, size=5)
            tokens = np.repeat(values, counts)
            over_tokens = normalise(tokens, np.ones(tokens.shape, bool), 1e-6, ddof=ddof)
            over_samples = normalise(values, np.ones(5, bool), 1e-6, ddof=ddof, weights=counts)
            np.testing.assert_allclose(np.repeat(over_samples, counts), over_tokens, rtol=1e-6)


def test_normalise_takes_tokens_as_they_lie():
    mask = np.array([[True, True, False], [True, False, False]])
    result = normalise(np.array([[1.0, 3, np.nan], [5, np.inf, np.nan]]), mask, 0.0)
    root = np.sqrt(8 / 3)
    np.testing.assert_allclose(result, [[-2 / root, 0, 0], [2 / root, 0, 0]], rtol=1e-6)


def test_reinforce_plus_plus_looks_at_the_batch():
    array, scored = rewards(1, 1, 0, None)
    # mean 2/3, variance 2/9
    expected = np.array([1 / 3, 1 / 3, -2 / 3, 0]) / np.sqrt(2 / 9)
    assert reinforce_plus_plus(array, scored, 0.0, group_ids=list("aabb")) == pytest.approx(expected)
    assert (reinforce_plus_plus(*rewards(1, 1, 1), 0.0) == 0).all()
    assert (reinforce_plus_plus(*rewards(1), 0.0) == 0).all()


def test_reinforce_plus_plus_with_baseline_keeps_flat_groups_at_zero():
    # group a: +-0.5; group b flat; group c lost a member: +-1. Squares: 0.5 + 0 + 2 over 6 scored samples
    array, scored = rewards(1, 7, 3, 0, 7, None, 1)
    result = reinforce_plus_plus_baseline(array, scored, 0.0, group_ids=list("abcabcc"))
    assert result == pytest.approx(np.array([0.5, 0, 1, -0.5, 0, 0, -1]) / np.sqrt(2.5 / 6))
    # centred rewards add up to 0 but for rounding: subtracting their mean would push the flat group
    rng = np.random.default_rng(0)
    for _ in range(10):
        mixed = np.append(rng.normal(size=14), (5.0, 5.0))
        batch = reinforce_plus_plus_baseline(mixed, np.ones(16, bool), 0.0, group_ids=list("a" * 7 + "b" * 7 + "cc"))
        assert (batch[14:] == 0).all() and batch.std() == pytest.approx(1, abs=1e-6)
    assert result[1] == 0 == result[4]
    assert (reinforce_plus_plus_baseline(*rewards(1, 1, 5, 5), 0.0, group_ids=list("aabb")) == 0).all()


@pytest.mark.parametrize("estimator", [lambda r, s: grpo(r, s, 1e-4), dr_grpo, rloo])
def test_a_group_of_one_is_refused_where_it_has_no_siblings(estimator):
    with pytest.raises(ValueError, match="group_size"):
        estimator(*rewards(1))
    assert estimator(*rewards(1, None)).tolist() == [0, 0]  # lost one while grading: no reason to stop
    with pytest.raises(ValueError, match="group_size"):
        reinforce_plus_plus_baseline(*rewards(1, 0, 1), 0.0, group_ids=list("aab"))


@pytest.mark.parametrize("estimator", [lambda r, s: grpo(r, s, 0.0), dr_grpo, rloo])
@pytest.mark.parametrize("values", [(1, 1, 1), (0.1, 0.1, 0.1), (1e6, 1e6 + 0.5, 1e6), (None, None), (2, None)])
def test_flat_groups_are_exactly_zero_for_all(estimator, values):
    assert (estimator(*rewards(*values)) == 0).all()


ONE_BATCH = [
    lambda r, s: grpo(r, s, 1e-4),
    dr_grpo,
    rloo,
    lambda r, s: remax(r, s, baseline=0.3),
    lambda r, s: reinforce_plus_plus(r, s, 1e-6),
    lambda r, s: reinforce_plus_plus_baseline(r, s, 1e-6, group_ids=["a"] * len(r)),
]


@pytest.mark.parametrize("estimator", ONE_BATCH)
def test_properties_of_all_estimators(estimator):
    rng = np.random.default_rng(1)
    for _ in range(50):
        values = rng.normal(size=6)
        scored = np.arange(6) < rng.integers(2, 7)
        result = estimator(values, scored)
        assert result.dtype == np.float32 and (result[~scored] == 0).all()
        order = rng.permutation(6)
        np.testing.assert_allclose(estimator(values[order], scored[order]), result[order], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(estimator(np.where(scored, values, np.nan), scored), result)
        seen = np.argsort(values[scored], kind="stable")
        assert (np.diff(result[scored][seen]) >= 0).all()  # a better reward never has the lower advantage


@pytest.mark.parametrize("estimator", ONE_BATCH)
def test_rewards_that_are_not_finite_are_refused(estimator):
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="finite"):
            estimator(np.array([1.0, bad, 0.0]), ALL[:3])


def test_advantages_beyond_float32_are_refused():
    with pytest.raises(ValueError, match="float32"):
        dr_grpo(np.array([1e300, 0.0]), ALL[:2])


def test_rloo_is_the_baseline_of_the_others():
    rng = np.random.default_rng(2)
    for size in (2, 3, 8):
        values = rng.normal(size=size)
        expected = [v - np.delete(values, i).mean() for i, v in enumerate(values)]
        np.testing.assert_allclose(rloo(values, np.ones(size, bool)), expected, rtol=1e-5, atol=1e-6)


def test_by_group_keeps_groups_apart_in_any_order():
    rng = np.random.default_rng(3)
    names = np.repeat(list("abc"), 4)
    values, scored = rng.normal(size=12), rng.random(12) < 0.8
    whole = np.concatenate([grpo(values[names == n], scored[names == n], 1e-4) for n in "abc"])
    order = rng.permutation(12)
    mixed = by_group(grpo, values[order], scored[order], names[order].tolist(), 1e-4)
    np.testing.assert_allclose(mixed, whole[order], rtol=1e-5, atol=1e-6)


def test_groups_take_the_options_of_an_estimator():
    group = make_group(1.0, 0.0, None)
    assert group_advantages(group, 0.0, "remax", baseline=1.0)[1].tolist() == [0, -1, 0]
    assert group_advantages(group, 0.0, "grpo", ddof=0)[1].tolist() == [1, -1, 0]
    assert [s.has_signal for s in to_samples(group, 0.0, "remax", baseline=1.0)] == [False, True]
