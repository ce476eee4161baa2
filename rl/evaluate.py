"""Accuracy on held-out prompts, greedy and sampled, without a trace in training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.collect import Decode, collect
from rl.metrics import pass_at_k
from rl.protocols import Grader, RolloutEngine
from rl.types import Group, Prompt, Sampling


def evaluate(
    engine: RolloutEngine,
    grader: Grader,
    decode: Decode,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    sampling: Sampling,
    seed: int,
) -> tuple[dict[str, float], list[Group]]:
    """``eval/...`` over all ``prompts``: greedy accuracy, and with ``samples`` > 0 sampled accuracy and pass@k.

    ``sampling`` is of the sampled part; the greedy part differs in its temperature alone. Seeds depend on the run's
    seed and the prompt, not on the step, so that two evaluations differ by the weights only. The engines' prefix
    caches are emptied afterwards: training goes on as if nothing had been asked. Returns metrics and greedy groups.
    """
    greedy_sampling = Sampling(sampling.max_new_tokens, 0.0, sampling.stop_token_ids)
    greedy = collect(
        engine, grader, decode, prompts, samples=1, sampling=greedy_sampling, label="eval-greedy", seed=seed
    ).groups
    metrics = accuracy_metrics(greedy, "eval/accuracy")
    if samples:
        groups = collect(
            engine, grader, decode, prompts, samples=samples, sampling=sampling, label="eval-sampled", seed=seed
        ).groups
        metrics |= accuracy_metrics(groups, "eval/sampled_accuracy") | pass_at_k_metrics(groups)
    engine.reset_cache()
    return metrics, greedy


def accuracy_metrics(groups: Sequence[Group], name: str) -> dict[str, float]:
    """The right ones among the graded samples, under ``name``; what could not be graded is counted, not judged.

    Error, timeout and invalid samples (``eval/unscored``) are in neither side of the fraction; without any graded
    sample there is no accuracy.
    """
    outcomes = [trajectory.score.outcome for group in groups for trajectory in group.trajectories]
    right, wrong = outcomes.count("ok"), outcomes.count("wrong")
    metrics = {"eval/prompts": float(len(groups)), "eval/unscored": float(len(outcomes) - right - wrong)}
    if right + wrong:
        metrics[name] = right / (right + wrong)
    return metrics


def pass_at_k_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``eval/pass@k`` for k = 1, 2, 4, ... up to the group size, over the groups that were graded whole."""
    graded = [[t.score.outcome == "ok" for t in group.trajectories] for group in groups if _graded(group)]
    if not graded:
        return {}
    size = len(graded[0])
    powers = [1 << power for power in range(size.bit_length())]
    return {f"eval/pass@{k}": float(np.mean([pass_at_k(size, sum(right), k) for right in graded])) for k in powers}


def _graded(group: Group) -> bool:
    return all(trajectory.score.reward is not None for trajectory in group.trajectories)
