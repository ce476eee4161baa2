"""Prompts in, graded groups out: used by training and by evaluation alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from rl.protocols import Grader, RolloutEngine
from rl.types import Completion, GradeJob, Group, IntArray, Prompt, Request, Sampling, Score, Trajectory

Decode = Callable[[IntArray], str]


@dataclass(frozen=True, slots=True)
class Collected:
    """Groups in the order of their prompts; seconds until the last completion, and seconds waited for graders then."""

    groups: list[Group]
    rollout_seconds: float
    grading_seconds: float


def sample_seed(*parts: object) -> int:
    """A seed of its own for each (run seed, step, prompt, index): 63 bits of xxh3 of their text.

    Equal seeds on different prompts would share their noise.

    >>> sample_seed(0, 1, "7", 0) == sample_seed(0, 1, "7", 0), sample_seed(0, 1, "7", 0) == sample_seed(0, 1, "7", 1)
    (True, False)
    """
    return xxhash.xxh3_64_intdigest(":".join(map(str, parts)).encode()) >> 1


def collect(
    engine: RolloutEngine,
    grader: Grader,
    decode: Decode,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    sampling: Sampling,
    label: str | int,
    seed: int,
) -> Collected:
    """Samples every prompt ``samples`` times and grades each group as soon as it is complete.

    ``label`` (the step in training) makes group ids and, with ``seed``, the seeds of the requests. All requests are
    handed over at once in the order of ``prompts``; grading goes on while other groups are still being sampled.
    """
    started = time.monotonic()
    group_ids = [f"{label}:{position}" for position in range(len(prompts))]
    requests = [
        Request(f"{group_id}:{index}", prompt.token_ids, sampling, sample_seed(seed, group_id, prompt.prompt_id, index))
        for group_id, prompt in zip(group_ids, prompts, strict=True)
        for index in range(samples)
    ]
    arrived: dict[str, dict[int, Completion]] = {group_id: {} for group_id in group_ids}
    by_id = dict(zip(group_ids, prompts, strict=True))
    texts: dict[str, tuple[str, ...]] = {}
    handles: list[tuple[list[str], Any]] = []
    for bunch in engine.generate(requests):
        complete = []
        for request_id, completion in bunch:
            group_id, _, index = request_id.rpartition(":")
            members = arrived[group_id]
            assert int(index) not in members, f"{request_id} came twice"
            members[int(index)] = completion
            if len(members) == samples:
                complete.append(group_id)
                texts[group_id] = tuple(decode(members[each].token_ids) for each in range(samples))
        if complete:
            jobs = [_job(name, by_id[name], arrived[name], texts[name], sampling) for name in complete]
            handles.append((complete, grader.submit(jobs)))
    generated = time.monotonic()
    missing = [group_id for group_id in group_ids if group_id not in texts]
    assert not missing, f"the engine ended without all completions of {missing}"
    scores: dict[str, list[Score]] = {}
    for names, handle in handles:
        scores.update(zip(names, grader.result(handle), strict=True))
    groups = []
    for group_id in group_ids:
        trajectories = tuple(
            Trajectory(group_id, index, arrived[group_id][index], texts[group_id][index], score)
            for index, score in enumerate(scores[group_id])
        )
        assert len(trajectories) == samples, (group_id, len(trajectories), samples)
        groups.append(Group(group_id, by_id[group_id], trajectories))
    return Collected(groups, generated - started, time.monotonic() - generated)


def _job(
    group_id: str, prompt: Prompt, members: dict[int, Completion], texts: tuple[str, ...], sampling: Sampling
) -> GradeJob:
    completions = [members[index] for index in range(len(members))]
    return GradeJob(
        group_id=group_id,
        prompt=prompt,
        texts=texts,
        token_counts=tuple(len(each.token_ids) for each in completions),
        finish_reasons=tuple(each.finish_reason for each in completions),
        max_new_tokens=sampling.max_new_tokens,
    )
