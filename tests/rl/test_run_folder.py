"""One owner per folder, rows that rise by one, samples that can be read."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import yaml

from rl.metrics import JsonlSink
from rl.run_folder import FIXED, RunFolder, SampleWriter, check_unchanged
from rl.types import Completion, Group, Prompt, Score, Trajectory

REPOSITORY = Path(__file__).parents[2]
HOLDER = """
import sys, time
from rl.run_folder import RunFolder
folder = RunFolder.open(sys.argv[1], resume=False)
print("held", flush=True)
time.sleep(60)
"""


def settings(**changes: object) -> dict[str, object]:
    """Resolved settings of a run, as config.yaml holds them, with changes by dotted name."""
    tree: dict[str, object] = {
        "run": {"name": "sort", "seed": 0, "output_dir": "runs/sort"},
        "model": {"path": "builtin:tiny"},
        "data": {"train": "builtin:sort", "task_options": {"size": 3}},
        "rewards": [{"name": "math", "weight": 1.0}],
        "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
        "rollout": {"prompts_per_step": 32, "replicas": 1, "step_timeout": 1800.0},
        "learner": {"updates_per_batch": 2, "lr": 1e-06, "betas": [0.9, 0.99], "step_timeout": 3600.0},
        "train": {"steps": 80, "eval_every": 10, "checkpoint_every": 20},
    }
    for name, value in changes.items():
        *path, last = name.split(".")
        inner: object = tree
        for key in path:
            inner = inner[int(key) if isinstance(inner, list) else key]  # type: ignore[index]
        inner[last] = value  # type: ignore[index]
    return tree


def start_holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_new_folder_with_its_places(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "runs" / "a", resume=False) as folder:
        assert folder.path == tmp_path / "runs" / "a" and not folder.resumed
        assert folder.samples.is_dir() and folder.checkpoints.is_dir() and folder.tensorboard.is_dir()
        folder.write_placement({"groups": {"learner": {"hosts": ["h"], "chips": []}}})
        assert json.loads(folder.placement.read_text())["groups"]["learner"]["hosts"] == ["h"]
    RunFolder.open(tmp_path / "runs" / "a", resume=False).close()  # nothing ran in it: no run yet


@pytest.mark.parametrize("mark", ["config.yaml", "metrics.jsonl", "checkpoints/step_1"])
def test_a_folder_with_a_run_needs_resume(tmp_path: Path, mark: str) -> None:
    file = tmp_path / mark
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    with pytest.raises(
        ValueError, match=r"already holds a run: continue it with --resume, or give another run\.output_"
    ):
        RunFolder.open(tmp_path, resume=False)
    with RunFolder.open(tmp_path, resume=True) as folder:  # the refusal above has let go of it
        assert folder.resumed


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no run in"):
        RunFolder.open(tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()
    with pytest.raises(ValueError, match="there is no run in"):
        RunFolder.open(tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; it must be a folder"):
        RunFolder.open(tmp_path / "file", resume=False)
    with pytest.raises(ValueError, match=r"cannot be used: .*Not a directory"):
        RunFolder.open(tmp_path / "file" / "run", resume=False)


def test_a_second_run_is_refused_by_name_and_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    try:
        with pytest.raises(ValueError) as error:
            RunFolder.open(tmp_path, resume=False)
        assert f"in use by process {holder.pid} on {socket.gethostname()} since 2" in str(error.value)
        with RunFolder.open(tmp_path.parent / "another", resume=False):
            pass  # another folder is no matter of theirs
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    RunFolder.open(tmp_path, resume=False).close()


def test_the_same_process_cannot_open_it_twice(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False) as folder:
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
            RunFolder.open(tmp_path, resume=False)
        folder.close()
        folder.close()
    RunFolder.open(tmp_path, resume=False).close()


def test_children_that_outlive_the_run_do_not_hold_its_folder(tmp_path: Path) -> None:
    """Neither a program that was started nor a forked process keeps the lock alive."""
    code = HOLDER.replace(
        'print("held", flush=True)',
        """import os, subprocess
print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid, flush=True)
child = os.fork()
if child:
    print(child, flush=True)
else:
    time.sleep(0.2)
    print("held", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)""",
    )
    parent = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()), int(parent.stdout.readline())]
    try:
        assert parent.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="in use by"):
            RunFolder.open(tmp_path, resume=False)
        parent.kill()
        parent.wait()
        for child in children:
            os.kill(child, 0)  # both are alive
        RunFolder.open(tmp_path, resume=False).close()
    finally:
        parent.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_config_is_kept_and_compared_on_resume(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False) as folder:
        folder.write_config(yaml.safe_dump(settings()))
    longer = yaml.safe_dump(settings(**{"train.steps": 160}))
    with RunFolder.open(tmp_path, resume=True) as folder:
        folder.write_config(longer)
        assert folder.config.read_text() == longer
        with pytest.raises(ValueError, match=r"run\.seed: 0 -> 1"):
            folder.write_config(yaml.safe_dump(settings(**{"run.seed": 1})))
        assert folder.config.read_text() == longer  # refused before anything was written


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("run.seed", 5, "run.seed: 0 -> 5"),
        ("model.path", "other", "model.path: 'builtin:tiny' -> 'other'"),
        ("data.train", "x.jsonl", "data.train: 'builtin:sort' -> 'x.jsonl'"),
        ("data.task_options", {"size": 4}, "data.task_options.size: 3 -> 4"),
        ("data.task_options", {"size": 3, "seed": 1}, "data.task_options.seed: 'unset' -> 1"),
        ("rewards.0.weight", 2.0, "rewards[0].weight: 1.0 -> 2.0"),
        ("algorithm.kl.coef", 0.1, "algorithm.kl.coef: 0.0 -> 0.1"),
        ("rollout.prompts_per_step", 16, "rollout.prompts_per_step: 32 -> 16"),
        ("learner.updates_per_batch", 1, "learner.updates_per_batch: 2 -> 1"),
        ("learner.betas", [0.9, 0.95], "learner.betas[1]: 0.99 -> 0.95"),
        ("learner.lr", 1e-3, "learner.lr: 1e-06 -> 0.001"),
    ],
)
def test_what_makes_it_another_run_is_refused(key: str, value: object, told: str) -> None:
    changed = settings()
    *path, last = key.split(".")
    inner: object = changed
    for part in path:
        inner = inner[int(part) if isinstance(inner, list) else part]  # type: ignore[index]
    inner[last] = value  # type: ignore[index]
    with pytest.raises(ValueError) as error:
        check_unchanged(settings(), changed)
    assert told in str(error.value)
    # Only what differs is listed, whatever else may have changed with it.
    assert str(error.value).count(" -> ") == 1


def test_all_changes_are_listed_together() -> None:
    with pytest.raises(ValueError) as error:
        check_unchanged(settings(), settings(**{"run.seed": 1, "learner.lr": 0.5, "train.steps": 3}))
    assert "run.seed: 0 -> 1; learner.lr: 1e-06 -> 0.5." in str(error.value)
    assert "train.steps" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", 160),
        ("train.eval_every", 0),
        ("train.checkpoint_every", 1),
        ("run.output_dir", "elsewhere"),
        ("run.name", "again"),
        ("rollout.replicas", 2),
        ("rollout.step_timeout", 1.0),
        ("learner.step_timeout", 1.0),
        ("learner.lr", "1e-6"),  # what YAML 1.1 makes of 1e-6: the same number
    ],
)
def test_what_may_change_is_accepted(key: str, value: object) -> None:
    check_unchanged(settings(), settings(**{key: value}))


def test_every_fixed_key_is_a_real_setting() -> None:
    from rl.config import Settings

    for name in FIXED:
        model: object = Settings
        for part in name.split("."):
            fields = model.model_fields  # type: ignore[attr-defined]
            assert part in fields, name
            model = fields[part].annotation


def test_environment_names_versions_and_what_changed(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False) as folder:
        assert folder.write_environment() == []
        kept = json.loads(folder.environment.read_text())
        assert kept["python"] == ".".join(map(str, sys.version_info[:3]))
        assert kept["packages"]["numpy"] == np.__version__
        assert kept["packages"]["torch"] == metadata.version("torch")
        assert kept["cpus"] >= 1
        assert folder.write_environment() == []
        kept["packages"]["torch"] = "2.0.0"
        folder.environment.write_text(json.dumps(kept))
        assert folder.write_environment() == [f"torch: 2.0.0 -> {metadata.version('torch')}"]


def test_rewind_lets_rows_rise_by_one(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, resume=False) as folder:
        assert folder.rewind(0) == 0
        sink = JsonlSink(folder.metrics)
        writer = SampleWriter(folder.samples)
        for step in range(6):
            sink.log(step, {"reward/mean": step + 0.1})
            writer.write(step, [])
        sink.close()
        with open(folder.metrics, "a") as stream:
            stream.write('{"step": 6, "reward/me')  # killed here
        (folder.samples / "step_000003.jsonl.partial").write_text("{")
        (folder.samples / "notes.txt").write_text("mine")

        assert folder.rewind(3) == 4
        assert sorted(path.name for path in folder.samples.iterdir()) == [
            "notes.txt",
            *(f"step_{step:06d}.jsonl" for step in range(4)),
        ]
        writer.write(4, [])
        assert folder.rewind(4, last_row=3) == 4  # stopped after the samples of step 4, before its row
        assert (folder.samples / "step_000004.jsonl").exists()
        sink = JsonlSink(folder.metrics)
        sink.log(4, {"reward/mean": 0.25})
        sink.close()
        assert folder.read_metrics() == [
            *({"step": step, "reward/mean": step + 0.1} for step in range(4)),
            {"step": 4, "reward/mean": 0.25},
        ]


def a_group() -> Group:
    prompt = Prompt("7", "train.jsonl:8", np.array([1, 2, 3], np.int32), "Größe? 数\u2028 [x]", answer="4")
    first = Completion(np.array([5, 6, 0], np.int32), np.zeros(3, np.float32), "stop", ((3, 2), (4, 1)))
    second = Completion(np.array([9], np.int32), np.zeros(1, np.float32), "length", ((4, 1),))
    return Group(
        "12:7",
        prompt,
        (
            Trajectory("12:7", 0, first, "vier", Score(0.75, "ok", {"math": 1.0, "length": -0.25})),
            Trajectory("12:7", 1, second, "half \ud800", Score(None, "error", {"math": float("nan")}, "KeyError: 'a'")),
        ),
    )


def test_samples_hold_everything(tmp_path: Path) -> None:
    file = SampleWriter(tmp_path).write(
        12, [a_group()], advantages={"12:7": [float(np.float32(0.5)), None]}, seeds={"12:7": [2**63 - 1, 5]}
    )
    assert file == tmp_path / "step_000012.jsonl" and list(tmp_path.iterdir()) == [file]
    first, second = (json.loads(line) for line in file.read_bytes().decode("utf-8").rstrip("\n").split("\n"))
    assert first == {
        "step": 12,
        "group_id": "12:7",
        "index": 0,
        "prompt_id": "7",
        "row": "train.jsonl:8",
        "prompt": "Größe? 数\u2028 [x]",
        "completion": "vier",
        "tokens": 3,
        "token_ids": [5, 6, 0],
        "finish_reason": "stop",
        "version_spans": [[3, 2], [4, 1]],
        "reward": 0.75,
        "outcome": "ok",
        "parts": {"math": 1.0, "length": -0.25},
        "detail": "",
        "advantage": 0.5,
        "seed": 2**63 - 1,
    }
    assert second["completion"] == "half \ud800" and second["reward"] is None and second["outcome"] == "error"
    assert second["detail"] == "KeyError: 'a'" and second["parts"] == {"math": "nan"}
    assert second["advantage"] is None and second["seed"] == 5
    assert "Größe? 数" in file.read_text(encoding="utf-8")  # readable, not escaped


def test_samples_of_a_step_that_is_made_again_replace_the_old(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    writer.write(1, [a_group(), a_group()])
    file = writer.write(1, [a_group()])
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    assert [(row["advantage"], row["seed"]) for row in rows] == [(None, None)] * 2


def test_text_is_utf8_in_every_locale(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.rl.test_run_folder import a_group
from rl.run_folder import RunFolder, SampleWriter
with RunFolder.open(sys.argv[1], resume=False) as folder:
    folder.write_config("run: {name: Gr\\xf6\\xdfe}\\n")
    SampleWriter(folder.samples).write(1, [a_group()])
"""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=REPOSITORY, env=environment, timeout=60)
    assert (tmp_path / "config.yaml").read_bytes() == "run: {name: Größe}\n".encode()
    assert "Größe? 数".encode() in (tmp_path / "samples" / "step_000001.jsonl").read_bytes()


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """While config.yaml is replaced over and over, every read is one of the whole texts."""
    code = """
import sys
from rl.run_folder import RunFolder
with RunFolder.open(sys.argv[1], resume=False) as folder:
    folder.write_config("a" * 200_000)
    print("ready", flush=True)
    while True:
        for letter in "bcd":
            folder.write_config(letter * 200_000)
"""
    writer = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        seen: set[str] = set()
        deadline = time.monotonic() + 20
        while len(seen) < 3 and time.monotonic() < deadline:
            text = (tmp_path / "config.yaml").read_text()
            assert text == text[0] * 200_000
            seen.add(text[0])
        assert len(seen) >= 3
    finally:
        writer.kill()
        writer.wait()
