"""The files that ``parkrl init`` writes: a commented configuration, rows and a reward function that run as they are."""

from __future__ import annotations

import json
from pathlib import Path

from rl.tasks.sort import Sort

CONFIG, TRAIN, EVAL, REWARD = "config.yaml", "train.jsonl", "eval.jsonl", "reward.py"
FILES = (CONFIG, TRAIN, EVAL, REWARD)

_CONFIG = """\
# A run with rows and a reward of your own. Look first: parkrl check {config}    Then: parkrl train {config}
# Paths count from the folder in which parkrl is started.
run: {{name: my-run, seed: 0, output_dir: {runs}}}

# A Hugging Face folder or id; builtin:tiny is made on the spot and can only write digits, letters and a few signs.
model: {{path: builtin:tiny}}

# JSONL, JSON, CSV, Parquet or a Hugging Face dataset. Each row: a prompt (text or chat messages) and an answer.
data:
  train: {train}
  eval: {eval}
  prompt_column: prompt
  answer_column: answer

# The reward is the sum of weight x component. Built in: exact_match, math, format, length; or a function of your own.
rewards:
  - {{function: {reward}, weight: 1.0}}

algorithm: {{name: grpo, group_size: 8}}

# 32 prompts x 8 samples = 256 samples a step, in 2 updates of 128.
rollout: {{prompts_per_step: 32, max_new_tokens: 8, temperature: 1.0}}
learner: {{device: cpu, updates_per_batch: 2, lr: 1.0e-3, warmup_steps: 10}}
train: {{steps: 20, eval_every: 10, checkpoint_every: 10}}
"""

_REWARD = '''\
"""The reward of this run. Each completion is graded by one call, in a process of its own with a time limit."""


def sorted_digits(completion: str, answer: str) -> float:
    """1 for the right digits in the right order, else 0.

    A reward function asks by name for what it needs: completion, prompt, answer, or any column of the data.
    """
    return float(completion.strip() == answer)
'''


def write_starter(folder: Path) -> list[Path]:
    """Writes the files into ``folder`` (made if missing) and returns them; ValueError if one is there already."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder")
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise ValueError(f"{folder} already holds {', '.join(there)}; nothing was written. Name another folder")
    folder.mkdir(parents=True, exist_ok=True)

    def place(name: str) -> str:
        return json.dumps(str(folder / name), ensure_ascii=False)  # quoted, as YAML reads it too

    config = _CONFIG.format(
        config=folder / CONFIG,
        runs=place("run"),
        train=place(TRAIN),
        eval=place(EVAL),
        reward=json.dumps(f"{folder / REWARD}:sorted_digits", ensure_ascii=False),
    )
    (folder / CONFIG).write_text(config, encoding="utf-8")
    (folder / REWARD).write_text(_REWARD, encoding="utf-8")
    _write_rows(folder / TRAIN, "train", 1024)
    _write_rows(folder / EVAL, "eval", 128)
    return [folder / name for name in FILES]


def _write_rows(path: Path, split: str, count: int) -> None:
    assert split in ("train", "eval"), split
    rows = Sort().rows("train" if split == "train" else "eval", count, seed=0)
    lines = (json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
