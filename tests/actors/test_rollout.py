"""What travels between pool and engine, and what is refused before anything does."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from actors.engine import EngineSpec, check_requests, engine_capabilities
from actors.rollout import CompletionBatch, RequestBatch
from rl.config import Settings
from rl.types import Completion, Request, Sampling

WARM, GREEDY = Sampling(4, 1.0, (2,)), Sampling(3, 0.0, ())


def request(name: str = "0:0:0", token_ids: tuple[int, ...] = (5, 6), sampling: Sampling = WARM) -> Request:
    return Request(name, np.asarray(token_ids, np.int32), sampling, 7)


def test_requests_survive_the_journey_in_order() -> None:
    requests = [request("a:0", (1, 2, 3)), request("a:1", (9,), GREEDY), request("b:0", (4, 4))]
    batch = pickle.loads(pickle.dumps(RequestBatch.of(requests)))
    assert list(batch) == [([1, 2, 3], WARM, 7), ([9], GREEDY, 7), ([4, 4], WARM, 7)]
    assert len(batch.samplings) == 2


def test_completions_survive_the_journey_byte_for_byte() -> None:
    spans = (((3, 2),), ((3, 1), (4, 2)))
    first = Completion(np.array([8, 2], np.int32), np.array([-0.5, -1e-7], np.float32), "stop", spans[0])
    second = Completion(np.array([1, 1, 1], np.int32), np.array([-1, -2, -3], np.float32), "length", spans[1])
    batch = pickle.loads(pickle.dumps(CompletionBatch.of([(5, first), (0, second)])))
    (i, a), (j, b) = list(batch)
    assert (i, j) == (5, 0)
    for got, sent in ((a, first), (b, second)):
        assert got.token_ids.dtype == np.int32 and got.token_ids.tobytes() == sent.token_ids.tobytes()
        assert (
            got.rollout_logprobs.dtype == np.float32
            and got.rollout_logprobs.tobytes() == sent.rollout_logprobs.tobytes()
        )
        assert (got.finish_reason, got.version_spans) == (sent.finish_reason, sent.version_spans)


def test_nothing_finished_is_an_empty_batch() -> None:
    assert list(CompletionBatch.of([])) == []


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([request("x:0"), request("x:0")], "'x:0' is there twice"),
        ([request(token_ids=())], "empty prompt"),
        ([request("y:1", (1,) * 7)], r"'y:1': prompt of 7 tokens \+ max_new_tokens 4 = 11 .*at most 6 tokens"),
        ([request(token_ids=(3, 64))], "token id 64 is outside the vocabulary 0 to 63"),
        ([request(token_ids=(3, -1))], "token id -1 is outside"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_name(requests: list[Request], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_requests(requests, max_model_len=10, vocab_size=64)


def test_a_request_that_just_fits_is_taken() -> None:
    check_requests([request(token_ids=(1,) * 6)], max_model_len=10, vocab_size=7)


def test_engine_arguments_that_other_settings_decide_are_refused() -> None:
    settings = Settings.model_validate({"train": {"steps": 1}, "rollout": {"engine_args": {"logprobs_mode": "raw"}}})
    with pytest.raises(ValueError, match=r"rollout\.engine_args\.logprobs_mode='raw'"):
        EngineSpec.of(settings, "folder", 0)


def test_the_spec_carries_the_settings() -> None:
    rollout = {"threads": 3, "kv_cache_mb": 7, "tensor_parallel_size": 2, "engine_args": {"block_size": 64}}
    settings = Settings.model_validate({"run": {"seed": 5}, "train": {"steps": 1}, "rollout": rollout})
    spec = EngineSpec.of(settings, "folder", 4)
    assert (spec.name, spec.seed, spec.kv_cache_mb, spec.tensor_parallel_size) == ("rollout-4", 5, 7, 2)
    assert spec.engine_args == {"block_size": 64}
    assert spec.environment()["OMP_NUM_THREADS"] == "3"
    assert spec.environment()["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_only_the_tpu_engine_lacks_seeds() -> None:
    seeds = {platform: engine_capabilities(platform).per_request_seed for platform in ("cpu", "cuda", "tpu")}
    assert seeds == {"cpu": True, "cuda": True, "tpu": False}
