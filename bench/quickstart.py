"""``parkrl train configs/quickstart.yaml`` on seeds 0, 1 and 2: seconds, accuracy, peak memory of all its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from rl.metrics import read_rows

SEEDS = (0, 1, 2)


def pss(root: psutil.Process) -> int:
    """Bytes of a process and all its descendants; shared pages are counted once among those that share them."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
            continue  # it ended meanwhile
    return total


def run() -> dict[str, Any]:
    result: dict[str, Any] = {"targets": "under 240 s, start 0.1 to 0.3, end >= 0.95, under 6 GB"}
    with tempfile.TemporaryDirectory(prefix="prl-b-", dir="/tmp") as made:
        for seed in SEEDS:
            result |= {f"seed {seed} {key}": value for key, value in _run(Path(made) / str(seed), seed).items()}
    return result


def _run(folder: Path, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "actors.cli", "train", "configs/quickstart.yaml"]
    command += ["--set", f"run.seed={seed}", "--set", f"run.output_dir={folder}"]
    started = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, pss(psutil.Process(process.pid)))
        except psutil.NoSuchProcess:
            break
        time.sleep(1.0)
    seconds = time.perf_counter() - started
    assert process.wait() == 0, f"seed {seed} failed"
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "eval/accuracy" in row]
    return {
        "seconds": seconds,
        "start accuracy": rows[0]["eval/accuracy"],
        "end accuracy": rows[-1]["eval/accuracy"],
        "peak GB (PSS)": peak / 1e9,
    }
