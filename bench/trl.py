"""TRL's GRPOTrainer and ours in turns: same checkpoint, prompts, number and size of updates, and the same evaluator.

``small``: builtin:small for 80 steps on seeds 0, 1, 2: seconds per step, training seconds until the sampled accuracy
reaches 0.80, final accuracies. ``ragged``: a random 20M Llama, 16 prompts x 8 answers of 32 to 256 tokens, the lengths
from one list; 5 steps, seconds per step only. Each engine, each learner and TRL have two threads, but for
``one_thread``. TRL runs in ``.venv-trl``, which ``make bench`` makes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.launch import Pipeline
from bench.models import save_llama, save_words
from rl.settings_file import from_mapping
from rl.tasks.builtin_model import resolve_model
from rl.tasks.sort import Sort
from rl.types import Completion, Request

PYTHON = Path(".venv-trl/bin/python")
SEEDS = (0, 1, 2)
THREADS = 2
ACCURACY = 0.80
HELD_OUT, DRAWS = 512, 4


@dataclass(frozen=True, slots=True)
class Spec:
    """One training, for both sides."""

    model: str
    rows: str
    out: str
    seed: int
    steps: int
    prompts_per_step: int
    group_size: int
    updates: int
    micro_batch: int  # TRL's samples per backward pass
    max_new_tokens: int
    lr: float
    warmup: int
    save_every: int  # steps; 0: never
    lengths: tuple[tuple[int, ...], ...] = ()  # per step, of every sample in order; none: as the model likes
    threads: int = THREADS


def run() -> dict[str, Any]:
    if not PYTHON.exists():
        sys.exit(f"{PYTHON} is missing: run `make {PYTHON.parent.parent}` first")
    with tempfile.TemporaryDirectory(prefix="prl-b-", dir="/tmp") as made:
        folder = Path(made)
        return ragged(folder / "ragged") | small(folder / "small") | one_thread(folder / "one-thread")


# -- builtin:small -----------------------------------------------------------------------------------------------------


def small(folder: Path) -> dict[str, Any]:
    model = resolve_model("builtin:small")
    results: dict[str, list[dict[str, float]]] = {"ours": [], "TRL": []}
    for seed in SEEDS:
        rows = folder / f"rows-{seed}.jsonl"
        write_rows(rows, Sort(min_digits=6, max_digits=8).rows("train", 80 * 32, seed))
        spec = Spec(model, str(rows), "", seed, 80, 32, 8, 2, 128, 10, 5e-4, 10, save_every=5)
        for side, train in (("ours", ours), ("TRL", theirs)):
            results[side].append(judge(*train(replace(spec, out=str(folder / f"{side}-{seed}")))))
    found: dict[str, Any] = {"small: start": evaluate(model)[0]}
    for side, rows_of in results.items():
        for name in rows_of[0]:
            found[f"small: {side} {name}"] = [round(each[name], 3) for each in rows_of]
    ratios = [mine["s/step"] / other["s/step"] for mine, other in zip(results["ours"], results["TRL"], strict=True)]
    return found | {"small: ours / TRL s/step (target <= 1)": statistics.median(ratios)}


def one_thread(folder: Path) -> dict[str, Any]:
    """The first 40 steps of ``small`` once more, with one thread for each engine, learner and TRL."""
    write_rows(folder / "rows.jsonl", Sort(min_digits=6, max_digits=8).rows("train", 40 * 32, 0))
    spec = Spec(
        resolve_model("builtin:small"), str(folder / "rows.jsonl"), "", 0, 40, 32, 8, 2, 128, 10, 5e-4, 10, 0, threads=1
    )
    mine, _ = ours(replace(spec, out=str(folder / "ours")))
    other, _ = theirs(replace(spec, out=str(folder / "TRL")))
    return {
        "one thread: ours s/step": statistics.median(mine),
        "one thread: TRL s/step": statistics.median(other),
        "one thread: ours / TRL s/step": statistics.median(mine) / statistics.median(other),
    }


def judge(seconds: Sequence[float], models: dict[int, Path]) -> dict[str, float]:
    """What one training came to. Without a model that reaches the accuracy, the time to it is NaN."""
    accuracies = {step: evaluate(str(path)) for step, path in sorted(models.items())}
    first = next((step for step, (sampled, _) in accuracies.items() if sampled >= ACCURACY), None)
    sampled, greedy = accuracies[max(accuracies)]
    return {
        "s/step": statistics.median(seconds),
        f"seconds to {ACCURACY}": sum(seconds[:first]) if first is not None else float("nan"),
        "final sampled": sampled,
        "final greedy": greedy,
    }


def evaluate(path: str) -> tuple[float, float]:
    """(sampled, greedy) accuracy on held-out prompts with transformers' own ``generate``: the judge of both sides."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows = list(Sort(min_digits=6, max_digits=8).rows("eval", HELD_OUT, seed=0))
    inputs = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)

    def right(**sampling: Any) -> float:
        ids = model.generate(**inputs, max_new_tokens=10, **sampling)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        draws = len(texts) // len(rows)
        return statistics.mean(text.strip() == rows[i // draws]["answer"] for i, text in enumerate(texts))

    drawn = right(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=DRAWS)
    return drawn, right(do_sample=False)


# -- ragged answers ----------------------------------------------------------------------------------------------------


def ragged(folder: Path) -> dict[str, Any]:
    count = save_llama(folder / "model", vocab=8192, width=384, layers=7, heads=6)
    save_words(folder / "model", 8192)
    rng = np.random.default_rng(0)
    steps, prompts, group = 5, 16, 8
    words = [" ".join(f"w{n}" for n in rng.integers(0, 8000, rng.integers(8, 65))) for _ in range(steps * prompts)]
    write_rows(folder / "rows.jsonl", ({"prompt": text, "answer": "-"} for text in words))
    # 32 to 256 tokens, mean 95: a few long answers among many short ones
    drawn = np.clip(32 + rng.exponential(70, (steps, prompts * group)), 32, 256).astype(int)
    lengths = tuple(tuple(map(int, row)) for row in drawn)
    rows, model = str(folder / "rows.jsonl"), str(folder / "model")
    spec = Spec(model, rows, "", 0, steps, prompts, group, 1, 16, 256, 1e-5, 0, save_every=0, lengths=lengths)
    mine, _ = ours(replace(spec, out=str(folder / "ours")), dtype="bfloat16")
    other, _ = theirs(replace(spec, out=str(folder / "TRL")))
    return {
        "ragged: parameters": count,
        "ragged: mean tokens per answer": float(drawn.mean()),
        "ragged: ours s/step": [round(each, 2) for each in mine],
        "ragged: TRL s/step": [round(each, 2) for each in other],
        "ragged: TRL / ours (target >= 3)": statistics.median(o / m for o, m in zip(other, mine, strict=True)),
    }


class ForcedLengths:
    """An engine that gives every request of a step its own length and lets no token end it earlier."""

    def __init__(self, engine: Any, lengths: Sequence[Sequence[int]]) -> None:
        self._engine, self._lengths = engine, iter(lengths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[Request]) -> Iterator[list[tuple[str, Completion]]]:
        lengths = next(self._lengths)
        for each, length in zip(requests, lengths, strict=True):
            assert each.sampling.max_new_tokens >= length, (each.sampling, length)
        return self._engine.generate(
            [
                replace(each, sampling=replace(each.sampling, max_new_tokens=length, stop_token_ids=()))
                for each, length in zip(requests, lengths, strict=True)
            ]
        )


# -- the two sides -----------------------------------------------------------------------------------------------------


def letters(completion: str) -> float:
    """A reward that costs nothing and differs from answer to answer."""
    return float(sum(map(ord, completion)) % 7)


def ours(spec: Spec, dtype: str = "float32") -> tuple[list[float], dict[int, Path]]:
    """(seconds per step without saving, models on the way)."""
    reward = {"function": "letters"} if spec.lengths else {"name": "exact_match"}
    settings = from_mapping(
        {
            "run": {"seed": spec.seed, "output_dir": spec.out},
            "model": {"path": spec.model},
            "data": {"train": spec.rows, "shuffle": False},
            "rewards": [reward],
            "algorithm": {"group_size": spec.group_size},
            "rollout": {
                "prompts_per_step": spec.prompts_per_step,
                "max_new_tokens": spec.max_new_tokens,
                "threads": spec.threads,
                "dtype": dtype,
            },
            "learner": {
                "updates_per_batch": spec.updates,
                "lr": spec.lr,
                "warmup_steps": spec.warmup,
                "lr_final_ratio": 0.0,
                "threads": spec.threads,
                "precision": dtype,
            },
            "train": {"steps": spec.steps, "checkpoint_every": spec.save_every, "keep_checkpoints": 1000},
        }
    )
    with Pipeline(settings, functions={"letters": letters}) as pipeline:
        saving = time_saves(pipeline.controller)
        if spec.lengths:
            parts = replace(
                pipeline.controller.parts, engine=ForcedLengths(pipeline.controller.parts.engine, spec.lengths)
            )
            pipeline.controller.parts = parts
        seconds, started = [], time.perf_counter()
        for step in pipeline:
            saved, saving[0] = saving[0], 0.0
            if step.step:
                seconds.append(time.perf_counter() - started - saved)
            started = time.perf_counter()
    folders = {int(path.name.removeprefix("step_")): path for path in Path(spec.out).glob("checkpoints/step_*")}
    return seconds, folders


def time_saves(controller: Any) -> list[float]:
    """Makes the controller add up in the returned list's one number what its saves take."""
    plain, total = controller.save, [0.0]

    def save() -> None:
        started = time.perf_counter()
        plain()
        total[0] += time.perf_counter() - started

    controller.save = save
    return total


def theirs(spec: Spec) -> tuple[list[float], dict[int, Path]]:
    """The same of TRL."""
    out = Path(spec.out)
    out.mkdir(parents=True)
    (out / "spec.json").write_text(json.dumps(asdict(spec)))
    environment = {**os.environ, "OMP_NUM_THREADS": str(spec.threads), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(PYTHON.absolute()), "-P", str(Path(__file__).with_name("trl_side.py")), str(out / "spec.json")]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"TRL failed ({done.returncode}):\n{done.stderr[-3000:]}")
    folders = {int(path.name.removeprefix("step_")): path for path in out.glob("step_*")}
    return json.loads((out / "seconds.json").read_text()), folders


def write_rows(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) + "\n")
