"""The command as a user runs it: real Ray, real Train worker, real vLLM, real files; a process of its own each time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.commands import export
from rl import checkpoint
from rl.metrics import is_time_metric, read_rows

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

CONFIG = """
run: {{name: small, output_dir: {folder}}}
data: {{train: builtin:sort, eval: builtin:sort, rows: 64, eval_rows: 16}}
algorithm: {{group_size: 4}}
rollout: {{prompts_per_step: 8, max_new_tokens: 8}}
learner: {{lr: 1.0e-3, updates_per_batch: 2, warmup_steps: 2}}
train: {{steps: 6, eval_every: 2, checkpoint_every: 3, keep_checkpoints: 4}}
eval: {{samples: 2}}
"""


def environment() -> dict[str, str]:
    """This process's, without the user's own Ray."""
    return {**{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}, "RAY_USAGE_STATS_ENABLED": "0"}


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "actors.cli", "train", str(config), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=config.parent,
        start_new_session=True,
    )


def run(config: Path, *arguments: str, status: int = 0) -> str:
    process = start(config, *arguments)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == status, output
    return output


def write_config(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=folder / "run"))
    return config


def numbers(run_folder: Path) -> list[dict[str, float]]:
    rows = read_rows(run_folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not is_time_metric(name)} for row in rows]


def samples(run_folder: Path) -> list[list[dict[str, Any]]]:
    files = sorted((run_folder / "samples").iterdir())
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def assert_equal_runs(first: Path, second: Path) -> None:
    """Bit for bit: rows, tokens, log-probabilities through every metric, weights and moments."""
    assert numbers(first) == numbers(second)
    assert samples(first) == samples(second)
    for name in ("model.safetensors", "trainer/optimizer.safetensors"):
        newest = [checkpoint.latest_valid(folder / "checkpoints", print) for folder in (first, second)]
        assert newest[0] is not None and newest[1] is not None
        assert (newest[0][0] / name).read_bytes() == (newest[1][0] / name).read_bytes(), name


def wait_for_step(process: subprocess.Popen[str], run_folder: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while not any(row["step"] >= step for row in read_rows(run_folder / "metrics.jsonl")):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.1)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process], seconds: float = 30) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    alive = [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [each.cmdline() for each in alive]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that nobody disturbed."""
    config = write_config(tmp_path_factory.mktemp("straight"))
    output = run(config)
    assert "accuracy (greedy)" in output
    return config.parent / "run"


def test_a_run_leaves_what_it_promises(straight: Path) -> None:
    rows = read_rows(straight / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row["sync/verified"] == 1 for row in rows)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 4, 6]
    assert rows[0]["eval/prompts"] == 16 and {"eval/pass@1", "eval/pass@2"} <= rows[0].keys()
    assert all(row["staleness/max"] == 0 for row in rows[1:])
    # a step whose first update met flat groups alone has no mismatch to show
    mismatches = [row["mismatch/max_abs"] for row in rows[1:] if "mismatch/max_abs" in row]
    assert len(mismatches) >= 3 and max(mismatches) < 1e-3
    assert [len(step) for step in samples(straight)] == [32] * 6
    stored = [sample for step in samples(straight) for sample in step]
    assert len({sample["seed"] for sample in stored}) == 6 * 32
    assert all((sample["advantage"] is None) == (sample["reward"] is None) for sample in stored)
    assert any(sample["advantage"] > 0 for sample in stored)
    for name in ("config.yaml", "environment.json", "placement.json"):
        assert (straight / name).stat().st_size > 0
    placement = json.loads((straight / "placement.json").read_text())["groups"]
    assert placement.keys() == {"learner", "rollout"} and placement["learner"]["actors"][0]["pid"] > 0
    assert any(file.name.startswith("events") for file in (straight / "tensorboard").iterdir())
    assert sorted(folder.name for folder in (straight / "checkpoints").iterdir()) == ["step_3", "step_6"]


def test_the_exported_folder_is_the_trained_model(straight: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = export(straight, tmp_path / "out")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    assert not {"state.json", "manifest.json", "trainer"} & {file.name for file in out.iterdir()}
    saved = load_file(straight / "checkpoints" / "step_6" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in saved.items())
    assert AutoTokenizer.from_pretrained(out).decode([AutoTokenizer.from_pretrained(out).eos_token_id])
    with pytest.raises(ValueError, match="not empty"):
        export(straight, out)


def test_resuming_a_finished_run_says_so_and_a_second_run_is_refused(straight: Path) -> None:
    config = straight.parent / "config.yaml"
    assert "finished" in run(config, "--resume")
    refused = run(config, status=2)
    assert "already holds a run" in refused and "--resume" in refused
    changed = run(config, "--resume", "--set", "learner.lr=5.0e-4", status=2)
    assert "learner.lr: 0.001 -> 0.0005" in changed


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopped_and_resumed_is_the_straight_run_bit_for_bit(
    straight: Path, tmp_path: Path, number: signal.Signals
) -> None:
    config = write_config(tmp_path)
    process = start(config)
    try:
        wait_for_step(process, tmp_path / "run", 2 if number == signal.SIGINT else 4)
        children = descendants(process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 130, output
        assert "checkpoint written" in output and "--resume" in output
        assert_gone(children)
    finally:
        process.kill()
    run(config, "--resume")
    assert_equal_runs(straight, tmp_path / "run")


def test_killed_and_resumed_is_the_straight_run_and_leaves_nothing_running(straight: Path, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    config = write_config(tmp_path)
    process = start(config)
    wait_for_step(process, tmp_path / "run", 4)
    children = descendants(process)
    process.kill()
    process.wait()
    assert_gone(children)
    assert {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "plasma", "parkrl"))} <= before
    run(config, "--resume")
    assert_equal_runs(straight, tmp_path / "run")


def test_a_damaged_checkpoint_is_passed_over_aloud(straight: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    shutil.copytree(straight, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_6" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    output = run(config, "--resume")
    assert "passed over" in output and "model.safetensors" in output
    assert_equal_runs(straight, tmp_path / "run")


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    process = start(config)
    try:
        wait_for_step(process, tmp_path / "run", 1)
        children = descendants(process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130
        assert_gone(children)
    finally:
        process.kill()


@pytest.mark.slow
def test_evaluation_does_not_touch_training(straight: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    run(config, "--set", "train.eval_every=0", "--set", "eval.samples=0", "--set", "eval.prompts=1")

    def without_evaluation(folder: Path) -> list[dict[str, float]]:
        return [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in numbers(folder)]

    assert without_evaluation(tmp_path / "run") == without_evaluation(straight)
    assert samples(tmp_path / "run") == samples(straight)
