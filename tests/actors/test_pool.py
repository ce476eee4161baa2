"""A pool of two real engines: meaning of what they return, routing, interruption, the death of one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.pool import RolloutPool, _split
from actors.weight_sync import publish
from rl.flat import FlatParameters
from rl.types import Completion, Request, Sampling
from tests.actors.tiny_models import VOCABULARY, group, logprobs, make_model, probe_of, sample, settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm]
PROMPT = [1, *range(10, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return make_model(folder, seed=0)


@pytest.fixture(scope="module")
def pool(ray_cluster: Any, model: Any, folder: Path) -> Iterator[RolloutPool]:
    pool = RolloutPool.start(settings(replicas=2), str(folder))
    try:
        yield pool
    finally:
        pool.close()


def unfinished(pool: RolloutPool) -> list[int]:
    import ray

    return [ray.get(member.actor.unfinished.remote()) for member in pool.members]


def test_groups_go_in_turn_and_stay_together() -> None:
    requests = [request for name in ("0:a", "0:b", "0:c") for request in group([1], name, 2)]
    first, second = _split(requests, 2)
    assert [request.request_id for request in first] == ["0:a:0", "0:a:1", "0:c:0", "0:c:1"]
    assert [request.request_id for request in second] == ["0:b:0", "0:b:1"]


def test_every_request_is_answered_once_and_means_what_it_says(pool: RolloutPool, model: Any) -> None:
    requests = [r for g in range(6) for r in group(PROMPT[: 10 + g], f"0:{g}", 4, 24, temperature=0.7)]
    completions = sample(pool, requests)
    assert sorted(completions) == sorted(request.request_id for request in requests)
    for request in requests:
        _check(completions[request.request_id], request, model)
    reasons = {completion.finish_reason for completion in completions.values()}
    assert reasons == {"stop", "length"}, "the test must see both ends"


def _check(completion: Completion, request: Request, model: Any) -> None:
    tokens = completion.token_ids
    assert tokens.dtype == np.int32 and completion.rollout_logprobs.dtype == np.float32
    assert len(tokens) == len(completion.rollout_logprobs) == sum(n for _, n in completion.version_spans)
    if completion.finish_reason == "stop":  # the stop token is sampled, and kept
        assert tokens[-1] == 2 and len(tokens) <= request.sampling.max_new_tokens
    else:  # no token is added after the cut
        assert len(tokens) == request.sampling.max_new_tokens and tokens[-1] != 2
    assert 2 not in tokens[:-1]
    sequence = np.concatenate([request.token_ids, tokens])
    expected = logprobs(model, sequence, request.sampling.temperature)[len(request.token_ids) - 1 :]
    np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)


def test_greedy_is_the_most_likely_continuation(pool: RolloutPool, model: Any) -> None:
    import torch

    sampling = Sampling(8, 0.0, ())
    answers = sample(pool, [Request("0:0:0", np.asarray(PROMPT, np.int32), sampling, 0)])
    sequence = list(PROMPT)
    for _ in range(8):
        with torch.no_grad():
            sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
    assert answers["0:0:0"].token_ids.tolist() == sequence[len(PROMPT) :]


def test_the_same_requests_give_the_same_bits(pool: RolloutPool) -> None:
    requests = [r for g in range(5) for r in group(PROMPT[: 8 + g], f"0:{g}", 4)]
    runs = []
    for _ in range(2):
        pool.reset_cache()
        runs.append(
            {name: (c.token_ids.tobytes(), c.rollout_logprobs.tobytes()) for name, c in sample(pool, requests).items()}
        )
    assert runs[0] == runs[1]
    samples = {tokens for tokens, _ in runs[0].values()}
    assert len(samples) > 5, "seeds of their own make different samples"


def test_more_prompt_tokens_than_one_pass_takes(pool: RolloutPool) -> None:
    requests = [r for g in range(40) for r in group([g + 3, *([5] * 299)], f"0:{g}", 1, 2)]  # 12,000 > 2 x 4,096
    assert len(sample(pool, requests)) == 40


def test_a_prompt_over_the_limit_is_refused_before_anything_runs(pool: RolloutPool) -> None:
    requests = group(PROMPT, "0:0", 2) + group([5] * 505, "0:1", 1, 12)
    with pytest.raises(ValueError, match="'0:1:0': prompt of 505 tokens"):
        next(pool.generate(requests))
    assert unfinished(pool) == [0, 0]


def test_an_abandoned_iterator_leaves_nothing_running(pool: RolloutPool) -> None:
    sampling = Sampling(300, 1.0, ())
    long = [Request(f"0:{i}:0", np.asarray(PROMPT, np.int32), sampling, i) for i in range(8)]
    answers = pool.generate(group(PROMPT, "1:0", 1, 1) + long)
    assert [name for name, _ in next(answers)] == ["1:0:0"]
    answers.close()
    assert unfinished(pool) == [0, 0]
    assert len(sample(pool, group(PROMPT, "0:0", 3))) == 3


def test_described_by_themselves(pool: RolloutPool) -> None:
    facts = pool.describe()
    assert [fact["name"] for fact in facts] == ["rollout-0", "rollout-1"]
    assert len({fact["pid"] for fact in facts}) == 2 and os.getpid() not in {fact["pid"] for fact in facts}
    for fact in facts:
        assert (fact["device"], fact["slice"], fact["vllm"], fact["max_model_len"]) == ("cpu", None, "0.29.0", 512)


def test_a_zero_head_makes_every_engine_uniform(pool: RolloutPool, model: Any, folder: Path) -> None:
    import torch

    zeroed = make_model(folder.parent / "zeroed", seed=0)
    with torch.no_grad():
        zeroed.lm_head.weight.zero_()
    reports = pool.load_weights(publish(FlatParameters(zeroed), 1, probe_of(zeroed), 1))
    assert [(report.engine, report.version, report.verified) for report in reports] == [
        ("rollout-0", 1, True),
        ("rollout-1", 1, True),
    ]
    requests = [r for g in range(4) for r in group(PROMPT, f"0:{g}", 2)]
    for completion in sample(pool, requests).values():
        np.testing.assert_allclose(completion.rollout_logprobs, -np.log(VOCABULARY), atol=1e-5)
        assert completion.version_spans == ((1, len(completion.token_ids)),)


def test_a_dead_engine_is_named_with_its_last_words(pool: RolloutPool) -> None:
    """The last test of the module: it costs an engine."""
    started = time.monotonic()
    os.kill(pool.members[1].facts["pid"], 9)
    with pytest.raises(RuntimeError, match=r"(?s)engine rollout-1 was lost while sampling: .*end of .*\.err"):
        sample(pool, [r for g in range(4) for r in group(PROMPT, f"0:{g}", 2)])
    assert time.monotonic() - started < 30
    assert len(sample(pool, group(PROMPT, "0:0", 2))) == 2, "the living one is still sampled from"


def test_a_model_that_is_not_there_names_the_engine(ray_cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"engine rollout-0 did not start: (?s:.*)nowhere"):
        RolloutPool.start(settings(), str(tmp_path / "nowhere"))
