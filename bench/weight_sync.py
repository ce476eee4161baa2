"""95M float32 parameters from a learner into an engine: each part in multiples of one memcpy of the same bytes."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.pool import RolloutPool
from bench.models import save_llama, settings
from rl.types import Probe, WeightUpdate

ROUNDS = 11


class Publisher:
    """What the learner's rank 0 does to publish, without Ray Train around it."""

    def __init__(self, path: str) -> None:
        import torch
        import transformers

        from rl.flat import FlatParameters

        torch.set_num_threads(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.flat = FlatParameters(self.model)

    def probe(self, token_ids: np.ndarray) -> Probe:
        import torch

        ids = torch.tensor(token_ids, dtype=torch.long)
        with torch.no_grad():
            logits = self.model(input_ids=ids[None]).logits[0, :-1].float()
        return Probe(token_ids, logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1).numpy())

    def publish(self, version: int, probe: Probe) -> WeightUpdate:
        from actors.weight_sync import publish

        return publish(self.flat, version, probe, 256)

    def memcpy(self) -> float:
        """Seconds of one copy of the same bytes into memory that is mapped already."""
        source = next(iter(self.flat.params.values())).numpy()
        if not hasattr(self, "copy"):
            self.copy = np.empty_like(source)
            np.copyto(self.copy, source)
        started = time.perf_counter()
        np.copyto(self.copy, source)
        return time.perf_counter() - started


def run() -> dict[str, Any]:
    from actors.weight_sync import probe_ids

    with tempfile.TemporaryDirectory(prefix="prl-b-", dir="/tmp") as made:
        folder = Path(made) / "model"
        count = save_llama(folder, vocab=16384, width=768, layers=9, heads=12)
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=3 << 30,
            _temp_dir=f"{made}/ray",
        )
        try:
            return {"parameters": count, **_measure(str(folder), probe_ids(16384, 64, 0))}
        finally:
            ray.shutdown()


def _measure(path: str, ids: np.ndarray) -> dict[str, Any]:
    publisher = ray.remote(Publisher).options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote(path)
    pool = RolloutPool.start(settings(path, rollout={"max_new_tokens": 8, "kv_cache_mb": 64}), path)
    try:
        probe = ray.get(publisher.probe.remote(ids))
        rows: list[dict[str, float]] = []
        for version in range(1, ROUNDS + 1):
            time.sleep(2.0)  # Ray frees objects once a second: a step that is shorter would write into fresh pages
            memcpy = ray.get(publisher.memcpy.remote())
            update = ray.get(publisher.publish.remote(version, probe))
            started = time.perf_counter()
            report = pool.load_weights(update)[0]
            whole = time.perf_counter() - started
            assert report.verified, report
            parts = {f"learner {name}": value for name, value in update.seconds.items()}
            parts |= {f"engine {name}": report.seconds[name] for name in ("checksum", "load")}
            parts["engine get"] = max(0.0, whole - report.seconds["load_total"] - report.seconds["probe"])
            row = {name: value / memcpy for name, value in parts.items()}
            rows.append(
                row | {"all": sum(row.values()), "memcpy seconds": memcpy, "probe seconds": report.seconds["probe"]}
            )
        medians = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
        return {"bytes": update.nbytes, "rounds": ROUNDS - 1, "target": "all <= 7 memcpys", **medians}
    finally:
        pool.close()
