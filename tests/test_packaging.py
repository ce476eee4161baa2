"""The wheel: what is in it, that it works without the checkout, and what pyproject.toml promises."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ACCELERATORS = {"cpu", "gpu", "tpu", "xla", "tpu-sim"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays clean; without the network, by the setuptools that is here."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = ("pyproject.toml", "README.md", "LICENSE", "rl", "actors", "configs", "tests/conftest.py")
    for name in listed:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / name), str(source / name)], check=True)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    (built,) = out.glob("parkrl-*.whl")
    return built


def test_the_wheel_holds_every_module_and_configuration_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for folder in ("rl", "rl/tasks", "rl/rewards", "actors", "configs")
        for path in [*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("*.yaml")]
    }
    assert names == expected
    assert "configs/quickstart.yaml" in names


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for top in ("rl", "actors", "configs")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_the_installed_wheel_works_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = (
        "import rl, actors, configs; from rl.settings_file import load; "
        "print(load('builtin:quickstart').run.name); print(rl.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name, place = done.stdout.split()
    assert name == "quickstart" and Path(place).is_relative_to(site), "the wheel, not the checkout"


@pytest.mark.ray
@pytest.mark.vllm
def test_a_run_of_the_installed_wheel_needs_nothing_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """An environment that knows the wheel and the libraries, not the checkout; Ray's workers live elsewhere."""
    venv, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next((venv / "lib").glob("python3.*")) / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    # a folder named in a .pth file is searched, its own .pth files (the checkout's) are not read
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (elsewhere / "rows.jsonl").write_text('{"prompt": "sort 31=", "answer": "13"}\n' * 4)
    (elsewhere / "mine.py").write_text(
        "def reward(completion, answer):\n    return float(completion[:1] == answer[:1])\n"
    )
    (elsewhere / "run.yaml").write_text(
        "run: {output_dir: out}\ndata: {train: rows.jsonl}\nrewards: [{function: 'mine.py:reward'}]\n"
        "rollout: {prompts_per_step: 2, max_new_tokens: 4, kv_cache_mb: 32}\ntrain: {steps: 1}\n"
    )
    place = "import rl; print(rl.__file__)"
    keep = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    python = str(venv / "bin" / "python")
    found = subprocess.run([python, "-c", place], cwd=elsewhere, env=keep, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(venv)
    command = [python, "-P", "-m", "actors.cli", "train", "run.yaml"]
    done = subprocess.run(command, cwd=elsewhere, env=keep, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len((elsewhere / "out" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_wheel_brings_the_command_and_the_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "parkrl = actors.cli:main" in texts["entry_points.txt"]
    assert "Apache License" in texts["LICENSE"]
    assert "Requires-Python: <3.13,>=3.11" in texts["METADATA"]


def test_every_accelerator_is_pinned_and_excludes_the_others(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == ACCELERATORS | {"dev"}
    (conflict,) = project["tool"]["uv"]["conflicts"]
    assert {entry["extra"] for entry in conflict} == ACCELERATORS
    loose = [f"{extra}: {line}" for extra, lines in extras.items() for line in lines if "==" not in line]
    assert loose == []
    versions = {line.split("==")[1].split(" ")[0] for lines in extras.values() for line in lines if "vllm" in line}
    assert versions == {"0.29.0"}, "one vLLM everywhere"


def test_make_has_its_targets_and_names_no_place() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("setup", "quickstart", "test", "test-docs", "test-all", "lint", "bench"):
        assert f"\n{target}: " in text, target
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    for name in ("Makefile", ".ci/run", "pyproject.toml"):
        assert "://" not in (ROOT / name).read_text(encoding="utf-8"), f"{name} names a host"


@pytest.mark.parametrize(("links", "flag"), [("", True), ("wheels", False)])
def test_torch_comes_without_cuda_wherever_it_comes_from(links: str, flag: bool, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "UV_FIND_LINKS")}
    environment["PIP_FIND_LINKS"] = links
    recipe = ["make", "-n", "setup", f"VENV={tmp_path}/venv"]
    done = subprocess.run(recipe, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert ("--torch-backend cpu" in done.stdout) == flag
    assert "torch.version.cuda" in done.stdout
