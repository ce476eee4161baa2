"""One vLLM engine in this very process, stepped by its owner. Nothing here knows Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from actors.weight_sync import Delivery, LoadReport, shared_blocks, tolerance
from rl.config import Settings
from rl.settings_checks import OWNED_ENGINE_ARGS
from rl.types import Completion, FloatArray, IntArray, Request, Sampling, SyncReport, WeightUpdate

LONGEST = 4096
"""Tokens of prompt + completion when ``rollout.max_model_len`` is null and the model itself would take more."""

LOADER = "actors.weight_sync.WeightLoader"
"""The class mixed into vLLM's worker; tests name others, with planted faults."""

TOKENS_PER_PASS = 4096
"""Tokens that one forward pass takes at most where prompts are not split; more if one prompt may be longer."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine on some platform can and cannot do."""

    per_request_seed: bool = True  # else two runs of the same step draw different samples
    eager: bool = False  # run without graph capture
    whole_prompts: bool = False  # a prompt must not be split over several forward passes
    bounded_cache: bool = False  # rollout.kv_cache_mb sets the key/value cache's size
    slow_noise: bool = False  # draw by actors/cpu_sampler.py
    block_size: int | None = None  # tokens of a block of the key/value cache; None: vLLM's own choice


def engine_capabilities(platform: str) -> Capabilities:
    """By vLLM's name of the platform ("cpu", "cuda", "tpu"): the one place that knows the differences.

    >>> engine_capabilities("tpu").per_request_seed
    False
    """
    if platform == "cpu":
        # After a partial prompt vLLM 0.29 winds the request's generator back, which CPU generators refuse: the engine
        # dies with "CPU Generator does not use offset".
        # A block is shared once it is full: at vLLM's 128 tokens short prompts would be computed for every sample.
        return Capabilities(eager=True, whole_prompts=True, bounded_cache=True, slow_noise=True, block_size=32)
    return Capabilities(per_request_seed=platform != "tpu")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything one engine is made of; a plain record, so that it travels to the actor."""

    name: str
    model_path: str
    dtype: str = "float32"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    threads: int = 1
    kv_cache_mb: int = 256
    trust_remote_code: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)
    sync_tolerance: float | None = None
    worker_extension: str = LOADER

    @staticmethod
    def of(settings: Settings, model_path: str, index: int, worker_extension: str = LOADER) -> EngineSpec:
        """The spec of replica ``index``. ValueError for an engine argument that another setting already decides."""
        rollout = settings.rollout
        for key in rollout.engine_args:
            if key in OWNED_ENGINE_ARGS:
                raise ValueError(
                    f"rollout.engine_args.{key}={rollout.engine_args[key]!r}: this one follows from other settings; "
                    "leave it out here"
                )
        return EngineSpec(
            name=f"rollout-{index}",
            model_path=model_path,
            dtype=rollout.dtype,
            seed=settings.run.seed,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            tensor_parallel_size=rollout.tensor_parallel_size,
            threads=rollout.threads,
            kv_cache_mb=rollout.kv_cache_mb,
            trust_remote_code=settings.model.trust_remote_code,
            engine_args=dict(rollout.engine_args),
            sync_tolerance=settings.sync.tolerance,
            worker_extension=worker_extension,
        )

    def environment(self) -> dict[str, str]:
        """Environment variables that must be set before the process imports vLLM.

        One thread does not spin against others; nothing is compiled for minutes on a CPU; nothing is reported home.
        glibc keeps freed memory: it would give large blocks back to the system after each load of weights and get them
        again page by page in the next, which takes twice as long.
        """
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        }


def check_requests(requests: Sequence[Request], max_model_len: int, vocab_size: int) -> None:
    """ValueError for the first request that the engine could not run as asked; nothing is cut or dropped."""
    seen: set[str] = set()
    for request in requests:
        name, length, wanted = request.request_id, len(request.token_ids), request.sampling.max_new_tokens
        if name in seen:
            raise ValueError(f"request {name!r} is there twice: request ids must be unique within one call")
        seen.add(name)
        if length == 0:
            raise ValueError(f"request {name!r} has an empty prompt: at least one token is needed")
        if length + wanted > max_model_len:
            raise ValueError(
                f"request {name!r}: prompt of {length} tokens + max_new_tokens {wanted} = {length + wanted} is over "
                f"max_model_len {max_model_len}; the prompt may have at most {max_model_len - wanted} tokens"
            )
        low, high = int(request.token_ids.min()), int(request.token_ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"request {name!r}: token id {low if low < 0 else high} is outside the vocabulary 0 to {vocab_size - 1}"
            )


class Engine:
    """vLLM's ``LLMEngine``, called by one thread only. ``version`` is that of the weights it serves."""

    def __init__(self, spec: EngineSpec) -> None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.llm_engine import LLMEngine

        self.spec = spec
        self._templates: dict[Sampling, Any] = {}
        self._sampling_params = partial(SamplingParams, output_kind=RequestOutputKind.FINAL_ONLY)
        self.version = 0
        platform = "cpu" if current_platform.is_cpu() else current_platform.device_type
        self.capabilities = engine_capabilities(platform)
        arguments: dict[str, Any] = {
            "model": spec.model_path,
            "dtype": spec.dtype,
            "seed": spec.seed,
            "max_model_len": spec.max_model_len or self._own_length(),
            "max_num_seqs": spec.max_num_seqs,
            "tensor_parallel_size": spec.tensor_parallel_size,
            "distributed_executor_backend": "uni" if spec.tensor_parallel_size == 1 else "mp",
            "trust_remote_code": spec.trust_remote_code,
            "worker_extension_cls": spec.worker_extension,
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "generation_config": "vllm",  # the model folder has no say in sampling
            "logprobs_mode": "processed_logprobs",  # after temperature
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "enforce_eager": self.capabilities.eager,
        }
        if self.capabilities.whole_prompts:
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(arguments["max_model_len"], TOKENS_PER_PASS)
        if self.capabilities.bounded_cache:
            arguments["kv_cache_memory_bytes"] = spec.kv_cache_mb << 20
        if self.capabilities.block_size is not None:
            arguments["block_size"] = self.capabilities.block_size
        self.llm: Any = LLMEngine.from_engine_args(EngineArgs(**(arguments | spec.engine_args)))
        if self.capabilities.slow_noise:
            self.llm.collective_rpc("parkrl_prepare")
        self.max_model_len: int = self.llm.model_config.max_model_len
        self.vocab_size: int = self.llm.model_config.get_vocab_size()
        self._shared = spec.tensor_parallel_size == 1  # the worker lives in this process
        self._spans: dict[str, list[tuple[int, int]]] = {}  # running requests that older weights began: (version, n)
        self._finished: list[tuple[str, Completion]] = []  # during a probe; the next step returns them

    def _own_length(self) -> int:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.spec.model_path, trust_remote_code=self.spec.trust_remote_code)
        return min(LONGEST, getattr(config.get_text_config(), "max_position_embeddings", LONGEST))

    def add(self, request_id: str, token_ids: Sequence[int], sampling: Sampling, seed: int) -> None:
        """Queues a request; it runs when ``step`` is called. The cache salt keeps versions' prefixes apart."""
        prompt: Any = {"prompt_token_ids": np.asarray(token_ids).tolist(), "cache_salt": str(self.version)}
        self.llm.add_request(request_id, prompt, self._parameters(sampling, seed))

    def _parameters(self, sampling: Sampling, seed: int) -> Any:
        """vLLM's parameters: those of ``sampling``, made once and copied (making them takes as long as adding)."""
        if sampling not in self._templates:
            self._templates[sampling] = self._template(sampling)
        parameters = copy(self._templates[sampling])
        parameters.seed = seed if self.capabilities.per_request_seed else None
        return parameters

    def _template(self, sampling: Sampling) -> Any:
        return self._sampling_params(
            n=1,
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            stop=None,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop_token_ids alone decide, whatever the model folder calls its EOS
            max_tokens=sampling.max_new_tokens,
            min_tokens=0,  # a minimum would mask stop tokens and so change the log-probabilities
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,
        )

    @property
    def unfinished(self) -> bool:
        return bool(self._finished) or self.llm.has_unfinished_requests()

    def step(self) -> list[tuple[str, Completion]]:
        """One forward pass over what is running; returns what has finished in it."""
        finished, self._finished = self._finished, []
        if self.llm.has_unfinished_requests():
            finished += [(output.request_id, self._completion(output)) for output in self.llm.step() if output.finished]
        return finished

    def _completion(self, output: Any) -> Completion:
        answer = output.outputs[0]
        token_ids = np.asarray(answer.token_ids, np.int32)
        logprobs = np.asarray(answer.logprobs.logprobs, np.float32)
        # logprobs=0 yields exactly one per position: the sampled token's
        assert len(logprobs) == len(token_ids), (output.request_id, len(logprobs), len(token_ids))
        if answer.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"request {output.request_id!r} ended with finish reason {answer.finish_reason!r}")
        return Completion(token_ids, logprobs, answer.finish_reason, self._version_spans(output.request_id, token_ids))

    def _version_spans(self, request_id: str, token_ids: IntArray) -> tuple[tuple[int, int], ...]:
        spans = self._spans.pop(request_id, [])
        rest = len(token_ids) - sum(n for _, n in spans)
        return (*spans, (self.version, rest)) if rest else tuple(spans)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stops requests, finished or not; they give no output."""
        self.llm.abort_request(list(request_ids))
        self._finished = [pair for pair in self._finished if pair[0] not in request_ids]
        for request_id in request_ids:
            self._spans.pop(request_id, None)

    def _remember_versions(self) -> None:
        """Notes how many tokens of each running request the weights so far have sampled."""
        for state in self.llm.output_processor.request_states.values():
            spans = self._spans.setdefault(state.external_req_id, [])
            count = state.detokenizer.num_output_tokens() - sum(n for _, n in spans)
            if count:
                spans.append((self.version, count))

    def reset_cache(self) -> None:
        """Forgets every cached prefix; what runs is computed again from its tokens. RuntimeError if it fails."""
        if not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(f"engine {self.spec.name}: the prefix cache could not be reset")

    def score(self, token_ids: IntArray) -> FloatArray:
        """[N - 1] log-probabilities (temperature 1) of token t + 1 given tokens 0..t, by a forward pass of the engine.

        It steps until its own answer is there; whatever else finishes meanwhile comes out of the next ``step``.
        """
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True
        )
        prompt: Any = {"prompt_token_ids": token_ids.tolist()}
        self.llm.add_request("score", prompt, parameters)
        scores: list[float] | None = None
        while scores is None:
            for output in self.llm.step():
                if output.request_id == "score":
                    scores = list(output.prompt_logprobs.logprobs)
                elif output.finished:
                    self._finished.append((output.request_id, self._completion(output)))
        # position 0 has no log-probability, every other exactly one: its own token's
        assert len(scores) == len(token_ids) - 1, (len(scores), len(token_ids))
        return np.asarray(scores, np.float32)

    def load(self, update: WeightUpdate, buckets: Sequence[Any]) -> SyncReport:
        """Loads a published version and proves it: checksums in every worker, then the probe.

        Nothing is loaded on a checksum mismatch. RuntimeError where parameters were not reached or the cache could
        not be reset. Requests that are running go on under the new weights from their next token on; their tokens so
        far keep their version.
        """
        started = time.perf_counter()
        if self._shared:
            reports = self._deliver(update, tuple(buckets))
        else:
            with shared_blocks(buckets) as blocks:
                reports = self._deliver(update, blocks)
        seconds = {"load_total": time.perf_counter() - started}
        for key in ("checksum", "load"):
            seconds[key] = max(report.seconds.get(key, 0.0) for report in reports)
        limit = tolerance(self.spec.dtype, self.spec.sync_tolerance)
        if not all(report.checksums_match for report in reports):
            return SyncReport(self.spec.name, self.version, False, float("nan"), limit, seconds)
        missing = sorted({name for report in reports for name in report.missing})
        if missing:
            raise RuntimeError(
                f"engine {self.spec.name}: version {update.version} did not reach {len(missing)} parameters of the "
                f"engine's model, first {missing[:3]}"
            )
        self._remember_versions()
        self.reset_cache()
        self.version = update.version
        self.llm.set_weight_version(str(update.version))
        started = time.perf_counter()
        difference = self._probe(update)
        seconds["probe"] = time.perf_counter() - started
        return SyncReport(self.spec.name, self.version, True, difference, limit, seconds)

    def _deliver(self, update: WeightUpdate, buckets: tuple[Any, ...]) -> list[LoadReport]:
        delivery = Delivery(buckets, update.checksums, update.tensors)
        return self.llm.collective_rpc("parkrl_load", args=(delivery,))

    def _probe(self, update: WeightUpdate) -> float:
        """Largest |engine - learner| over the probe, cut to what the engine takes; a NaN verifies nothing."""
        token_ids = update.probe.token_ids[: self.max_model_len - 1]
        difference = np.abs(self.score(token_ids) - update.probe.logprobs[: len(token_ids) - 1])
        return float(difference.max())

    def close(self) -> None:
        """Ends worker processes, if there are any."""
        self.llm.engine_core.shutdown()
