"""The names of all metrics, what they are computed from, and where they are recorded."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rl.advantages import is_flat
from rl.types import OUTCOMES, Group

NAMES: dict[str, str] = {
    "reward/mean": "mean combined reward of the scored samples (ok and wrong); absent when none was scored",
    "reward/std": "standard deviation (population) of the same rewards",
    "reward/flat_groups": "fraction of groups whose scored rewards are equal up to rounding, or fewer than two",
    "reward/ok": "fraction of all samples that were graded right",
    "reward/wrong": "fraction of all samples that were graded wrong",
    "reward/error": "fraction of all samples whose grader raised or gave no finite number",
    "reward/timeout": "fraction of all samples whose grader was killed at its deadline",
    "reward/invalid": "fraction of all samples whose reference answer cannot be parsed",
    "reward/missing": "samples without a reward (error, timeout, invalid); they carry no weight",
    "reward/part/<name>": "mean of one reward component before weighting, over the samples that have it",
    "reward/part_missing/<name>": "samples that lack that component",
    "completion/mean_tokens": "mean tokens per completion, the stop token included",
    "completion/max_tokens": "tokens of the longest completion",
    "completion/truncated": "fraction of completions that ended at max_new_tokens",
    "eval/accuracy": "fraction of held-out prompts answered right, greedy",
    "eval/sampled_accuracy": "fraction of samples of held-out prompts that are right, at eval.temperature",
    "eval/pass@<k>": "probability that one of k samples is right, unbiased (Chen et al. 2021, eq. 1)",
    "eval/prompts": "held-out prompts used",
    "eval/unscored": "samples of them without a grade (error, timeout, invalid); in neither side of a fraction",
    "policy/<name>": "the learner's own, over all ranks: loss, kl, entropy (nats), clip_fraction, grad_norm, lr, ...",
    "mismatch/mean_abs": "mean |learner - sampler| log-probability of the sampled tokens before the update, in nats",
    "mismatch/max_abs": "the largest such difference, in nats",
    "mismatch/<name>": "further measures of the same difference",
    "sync/seconds": "seconds until every engine serves new weights that the ranks put out within time/train",
    "sync/bytes": "bytes of weights sent to each engine",
    "sync/verified": "1 when checksums and probe hold on every engine, else 0",
    "sync/<name>": "further measures of weight delivery",
    "staleness/max": "most versions by which a trained token's weights lagged",
    "staleness/<name>": "further measures of staleness",
    "tokens/generated": "tokens sampled in this step",
    "tokens/trained": "tokens in the loss in this step",
    "tokens/generated_per_s": "tokens sampled per second of generation",
    "tokens/trained_per_s": "tokens in the loss per second of training",
    "time/step": "seconds of the step: its phases and what lies between them, but not its evaluation (time/eval)",
    "time/<phase>": "seconds of one phase of the step; phases do not overlap",
    "idle/<role>": "fraction of the step in which that role waited",
    "data/epoch": "passes over the training rows that are complete",
    "data/rows": "training rows used since the start of the run",
    "data/<name>": "further counts of rows",
}
"""Name -> meaning and unit. ``<...>`` stands for any text without a slash; an exact name comes before a pattern."""

_TIMES = ("time/", "idle/", "tokens/")


def meaning(name: str) -> str:
    """What a metric means; ValueError for a name that is not documented.

    >>> meaning("eval/pass@4")
    'probability that one of k samples is right, unbiased (Chen et al. 2021, eq. 1)'
    """
    if name in NAMES:
        return NAMES[name]
    for pattern, text in NAMES.items():
        if "<" in pattern and re.fullmatch(re.sub(r"<\w+>", "[^/]+", pattern), name):
            return text
    raise ValueError(f"metric {name!r} is not documented in NAMES of rl/metrics.py")


def is_time_metric(name: str) -> bool:
    """Whether a metric measures the machine: left out when two runs are compared bit for bit.

    >>> [is_time_metric(name) for name in ("time/train", "sync/seconds", "sync/bytes", "reward/mean")]
    [True, True, False, False]
    """
    return name.startswith(_TIMES) or name == "sync/seconds"


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``reward/...`` of one step. Means are over scored samples, fractions over all of them.

    Where nothing was scored (or no sample has a part) its mean does not exist and is left out; it is never 0.
    """
    assert groups and all(group.trajectories for group in groups)
    scores = [trajectory.score for group in groups for trajectory in group.trajectories]
    rewards = [score.reward for score in scores if score.reward is not None]
    metrics: dict[str, float] = {}
    if rewards:
        mean = math.fsum(rewards) / len(rewards)
        metrics["reward/mean"] = mean
        metrics["reward/std"] = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    metrics["reward/flat_groups"] = sum(_is_flat(group) for group in groups) / len(groups)
    for outcome in OUTCOMES:
        metrics[f"reward/{outcome}"] = sum(score.outcome == outcome for score in scores) / len(scores)
    metrics["reward/missing"] = float(len(scores) - len(rewards))
    for name in dict.fromkeys(name for score in scores for name in score.parts):
        parts = [part for score in scores if (part := score.parts.get(name)) is not None and math.isfinite(part)]
        if parts:
            metrics[f"reward/part/{name}"] = math.fsum(parts) / len(parts)
        metrics[f"reward/part_missing/{name}"] = float(len(scores) - len(parts))
    return metrics


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``completion/...`` and ``tokens/generated`` of one step."""
    completions = [trajectory.completion for group in groups for trajectory in group.trajectories]
    assert completions
    counts = [len(completion.token_ids) for completion in completions]
    return {
        "completion/mean_tokens": sum(counts) / len(counts),
        "completion/max_tokens": float(max(counts)),
        "completion/truncated": sum(each.finish_reason == "length" for each in completions) / len(completions),
        "tokens/generated": float(sum(counts)),
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples is right, from c right ones among n: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1, in exact
    integers. ValueError unless 0 <= c <= n and 1 <= k <= n.

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n (seen: n={n}, c={c}, k={k})")
    missed, all_ways = math.comb(n - c, k), math.comb(n, k)
    return (all_ways - missed) / all_ways


class JsonlSink:
    """One JSON object per step and line: {"step": n, "reward/mean": ...}, appended and flushed.

    Steps rise; after a resume, ``RunFolder.rewind`` has cut the file back first.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        self._last: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a row; ValueError naming the metric, and nothing written, when a number is not finite."""
        assert self._last is None or step > self._last, (step, self._last)
        row = {"step": step, **_finite(step, metrics)}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._last = step

    def sync(self) -> None:
        """Puts all rows on the disk: before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """The same numbers for TensorBoard. Its tags know no "@": eval/pass@4 is shown as eval/pass_4.

    ``purge_step`` (after a resume: the first step that will be logged) hides what an earlier run logged from there on.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from tensorboardX import SummaryWriter  # here, because it imports torch where torch is installed
        from tensorboardX.proto.summary_pb2 import Summary

        # The file is named by the second: without a suffix two starts within one would overwrite each other.
        self._summary = Summary
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=f".{purge_step or 0:09d}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            {"tag": name.replace("@", "_"), "simple_value": value} for name, value in _finite(step, metrics).items()
        ]
        self._writer.file_writer.add_summary(self._summary(value=values), step)  # one event, not one per number
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def read_rows(metrics: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl. ValueError naming file and line for damage anywhere but in the last line."""
    if not metrics.exists():
        return []
    lines = metrics.read_bytes().split(b"\n")
    rows: list[dict[str, float]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError('not an object with a whole number "step"')
        except ValueError as error:
            if number == len(lines):  # no newline after it: it was being written when the process died
                break
            raise ValueError(f"{metrics}:{number} is damaged: {error}") from error
        if rows and row["step"] <= rows[-1]["step"]:
            raise ValueError(f"{metrics}:{number}: step {row['step']} follows step {rows[-1]['step']}; steps must rise")
        rows.append(row)
    return rows


def _is_flat(group: Group) -> bool:
    """By the rule that decides about the advantages themselves."""
    rewards = np.array([each.score.reward for each in group.trajectories if each.score.reward is not None], np.float32)
    return is_flat(rewards, np.ones(rewards.shape, np.bool_))


def _finite(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Plain floats, so that numpy's are written as numbers too."""
    plain = {name: float(value) for name, value in metrics.items()}
    for name, value in plain.items():
        if not math.isfinite(value):
            raise ValueError(f"metric {name} is {value} at step {step}: only finite numbers are recorded")
    return plain
