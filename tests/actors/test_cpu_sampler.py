"""One uniform number per token draws from the very distribution that is reported."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.cpu_sampler import draw, forward, uniforms
from actors.pool import RolloutPool
from rl.types import Request, Sampling
from tests.actors.tiny_models import make_model, sample, settings


def test_a_draw_is_the_inverse_of_the_running_sum() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.0, 0.25]]).repeat(6, 1)
    u = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 0.99], dtype=torch.float64)
    assert draw(probabilities, u).tolist() == [0, 0, 1, 1, 3, 3]


def test_an_index_without_a_share_is_never_drawn_not_even_at_the_ends() -> None:
    probabilities = torch.tensor([[0.0, 0.6, 0.4, 0.0]]).repeat(2, 1)
    assert draw(probabilities, torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist() == [1, 2]


def test_rows_that_do_not_add_up_to_one_are_drawn_by_their_shares() -> None:
    probabilities = torch.tensor([[3.0, 1.0]]).repeat(2, 1)
    assert draw(probabilities, torch.tensor([0.74, 0.76], dtype=torch.float64)).tolist() == [0, 1]


def test_a_seeded_row_has_its_own_numbers_whatever_stands_beside_it() -> None:
    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(7)

    alone, beside = uniforms(1, {0: seeded()}), uniforms(3, {2: seeded()})
    assert alone[0] == beside[2] and 0 <= float(alone[0]) < 1
    both = uniforms(2, {0: seeded(), 1: torch.Generator().manual_seed(8)})
    assert both[0] == alone[0] and both[1] != both[0]


def test_log_probabilities_come_back_as_vllm_gives_them() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    drawn, processed = forward("processed_logprobs", logits.clone(), {0: torch.Generator().manual_seed(0)}, None, None)
    assert processed is not None and processed[0].exp().tolist() == pytest.approx([0.25, 0.75])
    assert drawn.shape == (1,) and forward("raw_logprobs", logits.clone(), {}, None, None)[1] is None


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_draws_each_token_as_often_as_it_says(ray_cluster: Any, tmp_path: Path, workers: int) -> None:
    """4,096 first tokens of one prompt: Pearson's statistic stays under its 99.99 % quantile, and not by being 0."""
    make_model(tmp_path / "model", seed=0)
    pool = RolloutPool.start(settings(tensor_parallel_size=workers), str(tmp_path / "model"))
    try:
        prompt, count = np.asarray([1, 5, 9, 13], np.int32), 4096
        requests = [Request(f"0:0:{i}", prompt, Sampling(1, 1.0, ()), 1_000_003 * i + 17) for i in range(count)]
        seen: dict[int, int] = {}
        said: dict[int, float] = {}
        for completion in sample(pool, requests).values():
            token = int(completion.token_ids[0])
            seen[token] = seen.get(token, 0) + 1
            said[token] = math.exp(completion.rollout_logprobs[0])
    finally:
        pool.close()
    common = [token for token in seen if said[token] * count >= 5]
    rest = count * (1 - sum(said[token] for token in common))
    statistic = sum((seen[t] - said[t] * count) ** 2 / (said[t] * count) for t in common)
    if rest >= 5:
        statistic += (count - sum(seen[t] for t in common) - rest) ** 2 / rest
    degrees = len(common) - (rest < 5)
    quantile = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3  # Wilson and Hilferty
    assert len(common) >= 10 and 0 < statistic < quantile, (statistic, quantile, degrees)
