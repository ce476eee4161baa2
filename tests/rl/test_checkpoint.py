"""A checkpoint is whole or not there, and what is damaged is passed over aloud (nothing here is simulated by mocks)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from rl import checkpoint
from rl.checkpoint import CheckpointError, latest_valid, validate, write

WEIGHTS = b"w" * 5000
Damage = Callable[[Path], object]


def fill(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "rank0.bin").write_bytes(b"moments0")
    (folder / "optimizer" / "rank1.bin").write_bytes(b"moments1")


def save(root: Path, *steps: int, keep: int = 9) -> None:
    for step in steps:
        write(root, step, fill, {"policy_version": step + 1, "cursor": [0, 32 * step]}, keep)


def found(root: Path) -> tuple[str, list[str]]:
    said: list[str] = []
    newest = latest_valid(root, said.append)
    assert newest is not None
    return newest[0].name, said


def run_python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])


def test_what_is_written_can_be_checked_by_hand(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoints", 20, fill, {"policy_version": 21}, keep=2)

    assert folder == tmp_path / "checkpoints" / "step_20"
    assert [path.name for path in folder.parent.iterdir()] == ["step_20"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 20
    assert sorted(manifest["files"]) == [
        "model.safetensors",
        "optimizer/rank0.bin",
        "optimizer/rank1.bin",
        "state.json",
    ]
    assert manifest["files"]["model.safetensors"] == {"size": 5000, "xxh3_64": xxhash.xxh3_64_hexdigest(WEIGHTS)}
    assert manifest["files"]["optimizer/rank1.bin"]["size"] == 8
    assert latest_valid(folder.parent, print) == (folder, {"policy_version": 21, "step": 20})


def test_nothing_there_is_none_and_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said: list[str] = []
    assert latest_valid(tmp_path / "empty", said.append) is None
    assert latest_valid(tmp_path / "missing", said.append) is None
    assert said == []


def test_newest_is_by_number_not_by_text(tmp_path: Path) -> None:
    save(tmp_path, 9, 10)
    assert found(tmp_path) == ("step_10", [])


def test_a_valid_step_is_not_written_again(tmp_path: Path) -> None:
    save(tmp_path, 3)

    def must_not_run(folder: Path) -> None:
        raise AssertionError("a valid checkpoint was written again")

    assert write(tmp_path, 3, must_not_run, {"policy_version": 99}, keep=1).name == "step_3"
    assert json.loads((tmp_path / "step_3" / "state.json").read_text())["policy_version"] == 4


def flip_a_bit(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"v")


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def link_to_nowhere(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


def copy_of_step_10(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "step_10", folder)


def old_weights(folder: Path) -> None:
    (folder / "weights").write_bytes(b"o" * 999)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated weights": (
        lambda folder: os.truncate(folder / "model.safetensors", 4096),
        "model.safetensors has 4096 bytes instead of 5000",
    ),
    "one bit": (flip_a_bit, "model.safetensors has xxh3_64"),
    "one rank's shard gone": (lambda folder: (folder / "optimizer/rank1.bin").unlink(), "misses optimizer/rank1.bin"),
    "empty state": (lambda folder: os.truncate(folder / "state.json", 0), "state.json has 0 bytes instead of"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 40), "has a damaged manifest.json"),
    "foreign manifest": (lambda folder: (folder / "manifest.json").write_text("[]"), "has a damaged manifest.json"),
    "empty folder": (make_empty, "has no manifest.json"),
    "other step's files": (
        copy_of_step_10,
        "holds step 10, which is not what its name says",
    ),
    "dangling link": (link_to_nowhere, "is no folder"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_one_is_passed_over_aloud_and_can_be_written_again(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGES[name]
    save(tmp_path, 10, 20)
    damage(tmp_path / "step_20")

    newest, said = found(tmp_path)
    assert newest == "step_10"
    assert len(said) == 1 and "step_20" in said[0] and reason in said[0], said

    save(tmp_path, 20)
    assert found(tmp_path) == ("step_20", [])


@pytest.mark.parametrize("kind", ["link to nowhere", "link to a folder", "file"])
def test_a_latest_pointer_is_never_followed(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 10, 20)
    pointer = tmp_path / "latest"
    if kind == "file":
        pointer.write_text("step_999")
    else:
        pointer.symlink_to("step_999" if kind == "link to nowhere" else "step_10")
    newest, said = found(tmp_path)
    assert newest == "step_20"
    assert len(said) == 1 and "latest" in said[0] and "stray" in said[0]


def test_none_good_refuses_with_every_reason(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    os.truncate(tmp_path / "step_10" / "model.safetensors", 1)
    (tmp_path / "step_20" / "state.json").unlink()
    (tmp_path / "step_30.partial").mkdir()
    with pytest.raises(CheckpointError) as error:
        latest_valid(tmp_path, lambda text: None)
    for part in ("step_10 is damaged: model.safetensors", "step_20 misses state.json", "step_30.partial was never"):
        assert part in str(error.value)


def test_keep_counts_valid_ones_only(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step_4" / "model.safetensors").unlink()
    (tmp_path / "step_2.partial").mkdir()
    save(tmp_path, 5, keep=2)
    # 5 and 3 are the newest two that are good; 4 is newer than the oldest kept and stays to be looked at.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_4", "step_5"]
    save(tmp_path, 6, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_6"]


def test_state_that_is_no_json_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write(tmp_path / "checkpoints", 1, fill, {"loss": float("nan")}, keep=1)
    assert not (tmp_path / "checkpoints").exists()


def test_an_error_of_the_learner_passes_through_and_leaves_no_partial(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def broken(folder: Path) -> None:
        fill(folder)
        raise KeyError("no optimizer")

    with pytest.raises(KeyError, match="no optimizer"):
        write(tmp_path, 2, broken, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


# --- the disk refuses ---------------------------------------------------------------------------------------------


def test_no_space_left_is_told_with_numbers(tmp_path: Path) -> None:
    """/dev/full is the kernel's own "No space left on device"."""
    save(tmp_path, 10)

    def into_a_full_device(folder: Path) -> None:
        fill(folder)
        with open("/dev/full", "wb") as stream:
            stream.write(WEIGHTS)

    with pytest.raises(CheckpointError) as error:
        write(tmp_path, 20, into_a_full_device, {}, keep=1)
    text = str(error.value)
    # 5000 + 8 + 8 bytes were written; the good one has its state and manifest besides.
    good = sum(path.stat().st_size for path in (tmp_path / "step_10").rglob("*") if path.is_file())
    assert "step 20" in text and "No space left on device" in text and "5.0 kB (5016 bytes) were written" in text
    assert f"({good} bytes)" in text and "free there:" in text and str(tmp_path / "step_10") in text
    assert [path.name for path in tmp_path.iterdir()] == ["step_10"] and validate(tmp_path / "step_10") is None


def test_libraries_that_hide_the_error_number_are_understood(tmp_path: Path) -> None:
    def like_safetensors(folder: Path) -> None:
        raise RuntimeError('IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })')

    with pytest.raises(CheckpointError, match="There is no good checkpoint yet"):
        write(tmp_path, 1, like_safetensors, {}, keep=1)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 1 in .*checkpoints"):
        write(tmp_path / "checkpoints", 1, fill, {}, keep=1)


SMALL_DISK = """
import json, os, subprocess, sys
from pathlib import Path
from rl.checkpoint import CheckpointError, latest_valid, write
root = Path(sys.argv[1]) / "checkpoints"
def fill(size):
    return lambda folder: (folder / "weights").write_bytes(os.urandom(size))
write(root, 1, fill(1_000_000), {}, keep=1)
told = []
def attempt(step, size):
    try:
        write(root, step, fill(size), {}, keep=1)
        told.append("written")
    except CheckpointError as error:
        told.append(str(error))
attempt(2, 5_000_000)
told.append(sorted(path.name for path in root.iterdir()))
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
attempt(3, 1000)
told.append(latest_valid(root, print)[0].name)
subprocess.run(["mount", "-o", "remount,rw", sys.argv[1]], check=True)
attempt(4, 1000)
print(json.dumps(told))
"""


def test_a_disk_that_is_full_then_read_only_then_well_again(tmp_path: Path) -> None:
    """On a real file system of 3 MB, mounted in a namespace of its own."""
    script = tmp_path / "script.py"
    script.write_text(SMALL_DISK)
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = 'mount -t tmpfs -o size=3m none "$1" && touch "$1.mounted" && exec "$2" "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside, "-", disk, sys.executable, script]
    repository = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(repository)},
        )
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if not (tmp_path / "disk.mounted").exists():
        pytest.skip(f"this machine lets nobody mount in a user namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    full, left, read_only, newest, again = json.loads(done.stdout)
    assert "No space left on device" in full and "the last checkpoint took 1.0 MB" in full and "step_1:" in full
    assert left == ["step_1"]
    assert "Read-only file system" in read_only and "step_1:" in read_only
    assert newest == "step_1" and again == "written"


def test_a_file_size_limit(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from rl.checkpoint import CheckpointError, latest_valid, write
root = Path(sys.argv[1])
write(root, 1, lambda folder: (folder / "weights").write_bytes(bytes(9000)), {}, keep=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
try:
    write(root, 2, lambda folder: (folder / "weights").write_bytes(bytes(99000)), {}, keep=1)
except CheckpointError as error:
    assert "File too large" in str(error), error
    assert "10.0 kB (10000 bytes) were written" in str(error), error
    print(latest_valid(root, print)[0].name)
"""
    done = run_python(code, tmp_path)
    assert done.stdout.split() == ["step_1"], done.stderr


# --- kill -9 ------------------------------------------------------------------------------------------------------

KILLED_AT = """
import os, signal, sys
from pathlib import Path
from rl.checkpoint import write
root, last = Path(sys.argv[1]), int(sys.argv[2])
calls = 0
def counted(function):
    def call(*arguments, **options):
        global calls
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return function(*arguments, **options)
    return call
for name in ("fsync", "rename", "mkdir", "unlink", "rmdir", "open"):
    setattr(os, name, counted(getattr(os, name)))
def fill(folder):
    (folder / "weights").write_bytes(b"n" * 999)
write(root, 2, fill, {"who": "new"}, keep=1)
print("written", calls)
"""


def test_killed_at_every_system_call_of_a_save(tmp_path: Path) -> None:
    """SIGKILL before the n-th call that touches the disk, for every n: the newest good one is the old or the new."""
    seen = []
    for calls in range(60):
        root = tmp_path / str(calls)
        write(root, 1, old_weights, {"who": "old"}, keep=1)
        done = run_python(KILLED_AT, root, str(calls))
        newest = latest_valid(root, lambda text: None)
        assert newest is not None
        seen.append(newest[1]["who"])
        write(root, 3, fill, {"who": "next"}, keep=1)
        assert [path.name for path in root.iterdir()] == ["step_3"]
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.returncode == 0 and done.stdout.split() == ["written", str(calls)]
    turn = seen.index("new")
    assert turn >= 6 and seen == ["old"] * turn + ["new"] * (len(seen) - turn)
    assert len(seen) - turn > 2  # kills after the rename, while the old one is pruned, are among them


def test_killed_from_outside_while_the_learner_writes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    code = """
import sys, time
from pathlib import Path
from rl.checkpoint import write
def slow(folder):
    with open(folder / "weights", "wb", buffering=0) as stream:
        while True:
            stream.write(bytes(1000))
            time.sleep(0.01)
write(Path(sys.argv[1]), 2, slow, {}, keep=1)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2])
    try:
        weights = tmp_path / "step_2.partial" / "weights"
        deadline = time.monotonic() + 30
        while not (weights.exists() and weights.stat().st_size > 3000):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    newest, said = found(tmp_path)
    assert newest == "step_1"
    assert len(said) == 1 and "step_2.partial" in said[0] and "was never finished" in said[0]
    save(tmp_path, 2, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


def test_interrupted_saves_leave_no_partial(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1, interrupted, {}, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_blamed_for_any_error_number_and_for_a_full_disk_whatever_was_said(tmp_path: Path) -> None:
    assert checkpoint._is_storage(OSError(errno.ESTALE, "Stale file handle"), tmp_path, 0, 1 << 40)
    torch_says = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    assert checkpoint._is_storage(torch_says, tmp_path, held=10**7, free=0)
    assert not checkpoint._is_storage(torch_says, tmp_path, held=10**7, free=10**8)
    save(tmp_path, 1)  # with a good checkpoint its size is what is wanted, and that one is small
    assert not checkpoint._is_storage(torch_says, tmp_path, held=10**7, free=2 << 20)
