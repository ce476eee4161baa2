"""Tiny random Llamas with very different weights, and what transformers says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rl.config import Settings
from rl.types import Completion, Probe, Request, Sampling

VOCABULARY = 64
LENGTH = 512


def make_model(folder: Path, seed: int, **options: Any) -> Any:
    """A float32 model of 2 layers, width 64, saved in ``folder``; its weights are large, so that it has opinions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | options))).eval()
    model.save_pretrained(folder)
    return model


def logprobs(model: Any, token_ids: Any, temperature: float = 1.0) -> np.ndarray:
    """[L - 1] log_softmax(logits / temperature) of each next token, by transformers in float32."""
    import torch

    ids = torch.tensor(np.asarray(token_ids), dtype=torch.long)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()


def probe_of(model: Any, n: int = 64) -> Probe:
    from actors.weight_sync import probe_ids

    token_ids = probe_ids(VOCABULARY, n, 0)
    return Probe(token_ids, logprobs(model, token_ids))


def group(prompt: Any, group_id: str, size: int, max_new_tokens: int = 12, temperature: float = 1.0) -> list[Request]:
    """``size`` requests of one prompt with seeds of their own; token 2 stops."""
    sampling = Sampling(max_new_tokens, temperature, (2,))
    token_ids = np.asarray(prompt, np.int32)
    return [Request(f"{group_id}:{i}", token_ids, sampling, 1000 + i) for i in range(size)]


def sample(pool: Any, requests: list[Request]) -> dict[str, Completion]:
    """All answers by request id."""
    answers = [answer for bunch in pool.generate(requests) for answer in bunch]
    assert len({name for name, _ in answers}) == len(answers)
    return dict(answers)


def settings(**rollout: Any) -> Settings:
    return Settings.model_validate(
        {"train": {"steps": 1}, "rollout": {"kv_cache_mb": 16, "engine_args": {"block_size": 32}, **rollout}}
    )
