"""KL estimators against golden values, and their gradients on a policy whose KL is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl.kl import KL_ESTIMATORS, AdaptiveCoefficient, k1, k2, k3, kl_loss, kl_penalty

ONE = torch.ones(1, 1, dtype=torch.bool)
NAN, INF = float("nan"), float("inf")


def value_and_slope(estimator, logprob, ref, dtype=torch.float32):
    current = torch.tensor([[logprob]], dtype=dtype, requires_grad=True)
    value = KL_ESTIMATORS[estimator](current, torch.tensor([[ref]], dtype=dtype), ONE)
    value.sum().backward()
    return value.item(), current.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 0.2, 1.0), ("k2", 0.02, 0.2), ("k3", 0.018731, 1 - math.exp(-0.2))],
)
def test_golden_values(estimator, value, slope):
    found = value_and_slope(estimator, -1.0, -1.2, torch.float64)
    assert found[0] == pytest.approx(value, abs=5e-7) and found[1] == pytest.approx(slope)


def bernoulli(logit, reference=0.5):
    """Log-probabilities of both outcomes of a Bernoulli policy, of the reference, and a mask: [1, 2] each."""
    logprobs = torch.stack([torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)])[None]
    ref = torch.tensor([[reference, 1 - reference]], dtype=logprobs.dtype).log()
    return logprobs, ref, torch.ones(1, 2, dtype=torch.bool)


def expected_gradient(estimator, probability, reference=0.5):
    """Expectation, over outcomes of the policy, of the gradient of the loss by the logit."""
    logit = torch.tensor(math.log(probability / (1 - probability)), dtype=torch.float64, requires_grad=True)
    logprobs, ref, mask = bernoulli(logit, reference)
    loss = (logprobs.detach().exp() * kl_loss(logprobs, ref, mask, estimator)).sum()
    loss.backward()
    return logit.grad.item()


@pytest.mark.parametrize(("estimator", "gradient"), [("k1", 0.0), ("k2", 0.0973116), ("k3", 0.1)])
def test_golden_gradients_on_a_bernoulli_policy(estimator, gradient):
    assert expected_gradient(estimator, 0.6) == pytest.approx(gradient, abs=5e-8)


def test_k2_has_the_gradient_of_the_kl_and_k3_that_of_the_other_one():
    for probability, reference in ((0.6, 0.5), (0.9, 0.3), (0.01, 0.99)):
        p = torch.tensor(probability, dtype=torch.float64)
        logit = torch.log(p / (1 - p)).requires_grad_()
        logprobs, ref, _ = bernoulli(logit, reference)
        (forward,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logit, retain_graph=True)
        (backward,) = torch.autograd.grad((ref.exp() * (ref - logprobs)).sum(), logit)
        assert expected_gradient("k1", probability, reference) == pytest.approx(0, abs=1e-12)
        assert expected_gradient("k2", probability, reference) == pytest.approx(forward.item())
        assert expected_gradient("k3", probability, reference) == pytest.approx(backward.item())


def test_the_default_loss_has_the_true_gradient():
    logprobs, ref = torch.tensor([[-1.0]]), torch.tensor([[-3.0]])
    assert torch.equal(kl_loss(logprobs, ref, ONE), k2(logprobs, ref, ONE))


def test_k1_and_k3_are_unbiased_values():
    for probability, reference in ((0.6, 0.5), (0.9, 0.3)):
        logit = torch.tensor(math.log(probability / (1 - probability)), dtype=torch.float64)
        logprobs, ref, mask = bernoulli(logit, reference)
        truth = (logprobs.exp() * (logprobs - ref)).sum().item()
        for estimator in (k1, k3):
            assert (logprobs.exp() * estimator(logprobs, ref, mask)).sum().item() == pytest.approx(truth)


def test_the_penalty_in_the_reward_has_the_true_gradient():
    # policy gradient of the reward: expectation of reward * grad logprob
    logit = torch.tensor(math.log(0.6 / 0.4), dtype=torch.float64, requires_grad=True)
    logprobs, ref, mask = bernoulli(logit)
    reward = kl_penalty(logprobs, ref, mask, coefficient=2.0)
    assert not reward.requires_grad
    (logprobs.detach().exp() * reward * logprobs).sum().backward()
    assert logit.grad.item() == pytest.approx(-2.0 * 0.0973116, abs=1e-7)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -119.0, 1.0), ("k2", 119**2 / 2, -119.0), ("k3", math.exp(20) - 21, 0.0)],
)
def test_far_below_the_reference_all_is_finite(estimator, value, slope):
    found = value_and_slope(estimator, -120.0, -1.0)
    assert found[0] == pytest.approx(value, rel=1e-6) and found[1] == slope


@pytest.mark.parametrize(("estimator", "value", "slope"), [("k1", 119, 1), ("k2", 119**2 / 2, 119), ("k3", 118, 1)])
def test_far_above_the_reference_all_is_finite(estimator, value, slope):
    assert value_and_slope(estimator, -1.0, -120.0) == pytest.approx((value, slope))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_equal_policies(estimator):
    assert value_and_slope(estimator, -1.5, -1.5) == (0.0, 1.0 if estimator == "k1" else 0.0)
    # float32 keeps the digits of a small difference: d^2 / 2 and its kin, not 0
    value, _ = value_and_slope(estimator, 1e-4, 0.0)
    assert value == pytest.approx(1e-4 if estimator == "k1" else 5e-9, rel=1e-2)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_masked_positions_do_not_leak(estimator):
    mask = torch.tensor([[True, False, False, False]])
    current = torch.tensor([[-1.0, NAN, INF, -1.0]], requires_grad=True)
    ref = torch.tensor([[-1.2, -1.0, INF, NAN]])
    loss = kl_loss(current, ref, mask, estimator)
    loss.sum().backward()
    assert loss[0, 1:].tolist() == [0, 0, 0] == current.grad[0, 1:].tolist()
    penalty = kl_penalty(current, ref, mask, 0.5, estimator)
    assert penalty.tolist() == [[pytest.approx(-0.5 * loss[0, 0].item()), 0, 0, 0]]
    assert not kl_loss(current, ref, torch.zeros_like(mask), estimator).any()


def test_the_reference_gets_no_gradient():
    ref = torch.tensor([[-1.2]], requires_grad=True)
    kl_loss(torch.tensor([[-1.0]], requires_grad=True), ref, ONE).sum().backward()
    assert ref.grad is None


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_order_and_padding_do_not_change_the_sum(estimator):
    rng = np.random.default_rng(0)
    for _ in range(20):
        logprobs, ref = (torch.tensor(-rng.random((4, 5)) * 3) for _ in range(2))
        mask = torch.tensor(rng.random((4, 5)) < 0.6)
        whole = kl_loss(logprobs, ref, mask, estimator).sum().item()
        order = torch.tensor(rng.permutation(4))
        pad = torch.nn.functional.pad
        parts = [
            kl_loss(pad(logprobs[rows], (0, 2), value=NAN), pad(ref[rows], (0, 2), value=NAN), pad(mask[rows], (0, 2)),
                    estimator).sum().item()
            for rows in (order[:1], order[1:])
        ]  # fmt: skip
        assert sum(parts) == pytest.approx(whole)


def test_the_coefficient_moves_towards_the_target():
    controller = AdaptiveCoefficient(coefficient=0.1, target=6.0)
    assert controller.update(6.0) == controller
    assert controller.update(5.4).coefficient == pytest.approx(0.099)  # error -0.1, gain 0.1
    assert controller.update(600.0).coefficient == pytest.approx(0.102)  # error held at 0.2
    assert controller.update(-1.0).coefficient == pytest.approx(0.098)  # a k1 mean may be negative
    for _ in range(3):
        controller = controller.update(12.0)
    assert controller.coefficient == pytest.approx(0.1 * 1.02**3) and controller.target == 6.0


def test_the_coefficient_refuses_what_it_cannot_steer_by():
    for options in ({"coefficient": 0.0}, {"target": -1.0}, {"gain": NAN}, {"max_error": INF}):
        (name,) = options
        with pytest.raises(ValueError, match=name):
            AdaptiveCoefficient(**{"coefficient": 0.1, "target": 6.0, **options})
    for observed in (NAN, INF):
        with pytest.raises(ValueError, match="observed"):
            AdaptiveCoefficient(0.1, 6.0).update(observed)
