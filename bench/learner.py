"""The learner group against a bare PyTorch loop on the same micro-batches: loss tokens per second."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transformers

from actors.learner_group import LearnerGroup
from bench.models import save_llama, settings, tiny
from rl.packing import pack
from rl.types import RankBatch, TrainSample

ROUNDS = 6


def samples(count: int, vocab: int, prompt: int, low: int, high: int, seed: int) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = prompt + int(rng.integers(low, high + 1))
        mask = np.arange(length) >= prompt
        made.append(
            TrainSample(
                group_id=f"g{number // 8}",
                token_ids=rng.integers(4, vocab, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, np.float32(-np.log(vocab)), np.float32(0)).astype(np.float32),
                advantages=np.where(mask, np.float32(rng.normal()), np.float32(0)).astype(np.float32),
                version_spans=((0, int(mask.sum())),),
            )
        )
    return made


class BareLoop:
    """The shortest correct loop: full logits, log_softmax, clipped loss, clip, AdamW."""

    def __init__(self, path: str, lr: float) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)

    def train(self, batch: RankBatch) -> None:
        for micro_batches in batch.updates:
            self.optimizer.zero_grad()
            for each in micro_batches:
                logits = self.model(input_ids=torch.from_numpy(each.input_ids).long(), use_cache=False).logits
                targets = torch.from_numpy(each.targets).long()
                logprobs = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
                ratio = torch.exp(logprobs - torch.from_numpy(each.rollout_logprobs))
                advantages = torch.from_numpy(each.advantages)
                loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                (loss * torch.from_numpy(each.loss_mask)).sum().div(each.loss_denominator).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="prl-b-", dir="/tmp") as made:
        middle = Path(made) / "middle"
        parameters = save_llama(middle, vocab=8192, width=384, layers=9, heads=6)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=f"{made}/ray")
        try:
            first = _measure("tiny", tiny(), Path(made) / "a", samples(256, 60, 12, 4, 8, 0))
            name = f"{parameters / 1e6:.0f}M"
            return first | _measure(name, str(middle), Path(made) / "b", samples(16, 8000, 32, 32, 256, 1))
        finally:
            ray.shutdown()


def _measure(name: str, path: str, folder: Path, data: list[TrainSample]) -> dict[str, Any]:
    folder.mkdir()
    run_settings = settings(path, learner={"updates_per_batch": 2, "lr": 1e-4}, rollout={"max_new_tokens": 8})
    batches = [pack(data, world_size=1, updates=2, max_tokens=4096, step=step) for step in range(1, ROUNDS + 2)]
    tokens = sum(int(sample.loss_mask.sum()) for sample in data)
    bare = BareLoop(path, 1e-4)
    group = LearnerGroup.start(run_settings, path, folder, 2 * len(batches), None)
    try:
        ratios, ours, theirs = [], [], []
        for batch in batches:
            started = time.perf_counter()
            group.train(batch)
            middle = time.perf_counter()
            bare.train(batch[0])
            ours.append(tokens / (middle - started))
            theirs.append(tokens / (time.perf_counter() - middle))
            ratios.append(ours[-1] / theirs[-1])
        return {
            f"{name} learner loss tokens/s": statistics.median(ours[1:]),
            f"{name} bare loop loss tokens/s": statistics.median(theirs[1:]),
            f"{name} ratio (target >= 0.95)": statistics.median(ratios[1:]),
        }
    finally:
        group.close()
