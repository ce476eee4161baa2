"""The command line: exit status, messages on standard error, and what may not be imported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from actors import cli
from actors.check import file_problems, function_problem
from rl.settings_file import from_mapping, load

HEAVY = ("torch", "ray", "vllm", "transformers", "torch_tpu", "torch_xla", "libtpu", "jax")


def parkrl(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; at its end it reports which heavy libraries it had imported."""
    code = (
        "import atexit, sys; from actors.cli import main; "
        f"atexit.register(lambda: print('HEAVY', [m for m in {HEAVY} if m in sys.modules], file=sys.stderr)); main()"
    )
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as ``parkrl init`` leaves it, and the working directory."""
    monkeypatch.chdir(tmp_path)
    assert invoke("init", ".").exit_code == 0
    return tmp_path


def test_check_is_quick_and_imports_nothing_heavy(own_data: Path) -> None:
    parkrl("check", "config.yaml", cwd=own_data)  # compiles the byte code, which an installed package brings along
    started = time.monotonic()
    done = parkrl("check", "config.yaml", cwd=own_data)
    assert time.monotonic() - started < 3.0
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stderr
    assert "data.train: train.jsonl: the first 1000 rows are good; columns: prompt, answer" in done.stdout
    assert "data.eval: eval.jsonl: 128 rows are good" in done.stdout
    assert "one step: 32 prompts x 8 samples = 256 samples, in updates of 128" in done.stdout


def test_check_of_the_shipped_configuration(tmp_path: Path) -> None:
    done = parkrl("check", "builtin:quickstart", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stderr and "builtin:quickstart: good" in done.stdout


@pytest.mark.parametrize("command", [["--help"], ["algorithms"], ["tasks"], ["init", "x"], ["train", "none.yaml"]])
def test_light_commands_import_nothing_heavy(command: list[str], tmp_path: Path) -> None:
    done = parkrl(*command, cwd=tmp_path)
    assert "HEAVY []" in done.stderr
    assert done.returncode == (2 if command[0] == "train" else 0), done.stderr


def test_a_wrong_setting_is_refused_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("algorithm: {grup_size: 8}\ntrain: {steps: 1}\n")
    for command in ("check", "train"):
        done = parkrl(command, "c.yaml", cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        assert "c.yaml:1: algorithm.grup_size = 8: unknown setting; did you mean algorithm.group_size?" in done.stderr
        assert "Traceback" not in done.stderr


def test_brackets_and_foreign_letters_are_shown_as_they_are_in_every_locale(tmp_path: Path) -> None:
    text = "run: {name: x}\nmodel: {path: './[red]größe[/red]'}\ntrain: {steps: 1}\n"
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    plain = parkrl("check", "c.yaml", cwd=tmp_path, PYTHONIOENCODING="utf-8")
    assert plain.returncode == 2 and "model.path = './[red]größe[/red]': no such folder" in plain.stderr
    ascii_only = parkrl("check", "c.yaml", cwd=tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert ascii_only.returncode == 2 and "[red]gr\\xf6\\xdfe[/red]" in ascii_only.stderr


def test_a_missing_file_and_a_wrong_column_are_refused(own_data: Path) -> None:
    missing = invoke("check", "config.yaml", "--set", "data.train=trian.jsonl")
    assert missing.exit_code == 2 and "trian.jsonl" in missing.stderr
    column = invoke("check", "config.yaml", "--set", "data.prompt_column=question")
    assert column.exit_code == 2
    assert "question" in column.stderr and "prompt" in column.stderr and "answer" in column.stderr
    assert "data.train: " in column.stderr and "data.eval: " in column.stderr, "both sources are looked at"


def test_several_faults_are_shown_at_once(own_data: Path) -> None:
    done = invoke(
        "check", "config.yaml", "--set", "data.train=none.jsonl", "--set", "rewards.0.function=reward.py:sorted_digit"
    )
    assert done.exit_code == 2
    assert "config.yaml: 2 problems" in done.stderr
    assert (
        "rewards.0.function = 'reward.py:sorted_digit': reward.py defines no 'sorted_digit'; did you mean"
        in done.stderr
    )
    assert "none.jsonl" in done.stderr


def test_usage_errors_are_status_2() -> None:
    assert invoke("check").exit_code == 2
    assert invoke("check", "builtin:quickstart", "--sett", "a=b").exit_code == 2
    assert invoke("nonsense").exit_code == 2


# reward functions, read but not run


@pytest.fixture
def reward_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "import nowhere_to_be_found\n"
        "from operator import eq as same\n"
        "raise SystemExit('a reward file must not be run by a check')\n"
        "LIMIT = 3\n"
        "def grade(completion): return 1.0\n"
        "async def later(completion): return 1.0\n"
        "made = grade\n"
        "if LIMIT:\n    def inner(completion): return 0.0\n"
        "try:\n    import x as lib\nexcept ImportError:\n    def lib(completion): return 0.0\n",
        encoding="utf-8",
    )
    return Path("own.py")


@pytest.mark.parametrize("name", ["grade", "later", "made", "inner", "lib", "same"])
def test_functions_are_found_without_running_the_file(reward_file: Path, name: str) -> None:
    assert function_problem(f"own.py:{name}") is None
    assert function_problem(f"own:{name}") is None  # as a module of the working directory
    assert "own" not in sys.modules


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("own.py:grad", "own.py defines no 'grad'; did you mean 'grade'?"),
        ("own.py:zzzzz", "own.py defines no 'zzzzz'; it has grade, later, inner, lib"),
        ("own.py:LIMIT", "own.py:4: LIMIT is a constant, not a function"),
        ("owm.py:grade", "did you mean own.py?"),
        ("nowhere/own.py:grade", "no such file (from "),
        ("grade", "must be path/to/file.py:function or module:function"),
        ("own.py:", "must be path/to/file.py:function or module:function"),
        ("own.py:a b", "must be path/to/file.py:function or module:function"),
        ("no_such_module:f", "there is no module no_such_module (looked in "),
        ("json.no_such_part:f", "there is no module json.no_such_part"),
        ("json.decoder:JSONDecodr", "json.decoder defines no 'JSONDecodr'; did you mean 'JSONDecoder'?"),
    ],
)
def test_what_is_wrong_with_a_function(reward_file: Path, function: str, message: str) -> None:
    assert message in str(function_problem(function))


def test_a_syntax_error_names_its_line(reward_file: Path) -> None:
    reward_file.write_text("def grade(completion):\n    return 1.0\n\ndef broken(:\n    pass\n")
    assert "own.py:4: " in str(function_problem("own.py:grade"))


# model folders


def model_problems(path: str, **rollout: Any) -> str:
    settings = from_mapping({"model": {"path": path}, "rollout": rollout, "train": {"steps": 1}})
    return "\n".join(file_problems(settings))


def test_model_folders_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert "the folder holds no config.json" in model_problems("model")
    (tmp_path / "model" / "config.json").write_text("{")
    assert "config.json cannot be read: " in model_problems("model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    assert model_problems("model", max_new_tokens=64, max_model_len=128) == ""
    assert "max_model_len = 129: more than the model's own max_position_embeddings = 128" in model_problems(
        "model", max_new_tokens=64, max_model_len=129
    )
    assert "max_new_tokens = 128: must be less than the model's own" in model_problems("model", max_new_tokens=128)
    assert "no such folder" in model_problems("./modle") and "did you mean model?" in model_problems("./modle")
    assert model_problems("someone/some-model") == "", "an id is looked up when training starts"
    assert model_problems("builtin:tiny") == ""


# init, tasks, algorithms


def test_init_writes_files_that_are_good_and_never_overwrites(own_data: Path) -> None:
    settings = load("config.yaml")
    assert settings.rewards[0].function == "reward.py:sorted_digits" and file_problems(settings) == []
    again = invoke("init", ".")
    assert again.exit_code == 2
    assert "already holds config.yaml, train.jsonl, eval.jsonl, reward.py; nothing was written" in again.stderr
    train = {json.loads(line)["prompt"] for line in Path("train.jsonl").read_text().splitlines()}
    held_out = {json.loads(line)["prompt"] for line in Path("eval.jsonl").read_text().splitlines()}
    assert len(held_out) > 100 and not train & held_out


def test_init_in_a_folder_with_an_awkward_name_runs_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = 'my run: "é" {x}'
    assert invoke("init", folder).exit_code == 0
    settings = load(Path(folder) / "config.yaml")
    assert settings.data.train == f"{folder}/train.jsonl" and file_problems(settings) == []


def test_the_written_reward_grades(own_data: Path) -> None:
    scope: dict[str, Any] = {}
    exec(Path("reward.py").read_text(), scope)
    row = json.loads(Path("train.jsonl").read_text().splitlines()[0])
    assert scope["sorted_digits"](f" {row['answer']}\n", row["answer"]) == 1.0
    assert scope["sorted_digits"](row["answer"][::-1] + "0", row["answer"]) == 0.0


def test_lists_of_tasks_and_algorithms() -> None:
    listed = invoke("tasks")
    assert listed.exit_code == 0
    assert "builtin:sort  Sort digits" in listed.stdout and "reasoning_gym:NAME" in listed.stdout
    assert invoke("algorithms").stdout.startswith("grpo  group-relative policy optimisation")


# exit status of the commands whose work is done elsewhere


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stands where ``actors.commands`` stands, so that each way to end can be had without a run."""
    module = types.ModuleType("actors.commands")
    monkeypatch.setitem(sys.modules, "actors.commands", module)
    monkeypatch.setattr(importlib.import_module("actors"), "commands", module, raising=False)
    return module


@pytest.mark.parametrize("status", [0, 1, 130])
def test_train_ends_with_the_status_of_the_run(work: Any, status: int) -> None:
    seen = []
    work.train = lambda settings, resume, quiet: (seen.append((settings.train.steps, resume, quiet)), status)[1]
    done = invoke("train", "builtin:quickstart", "--set", "train.steps=20", "--resume", "--quiet")
    assert done.exit_code == status and seen == [(20, True, True)]


@pytest.mark.parametrize(
    ("error", "status", "last"),
    [
        (ValueError("runs/x holds [another] run"), 2, "refused: runs/x holds [another] run"),
        (RuntimeError("engine 0 died"), 1, "parkrl train builtin:quickstart --resume goes on from the last checkpoint"),
        (OSError(28, "No space left on device"), 1, "--resume goes on from the last checkpoint"),
        (KeyError("host"), 1, "--resume goes on from the last checkpoint"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_goes_wrong_becomes_a_status_and_a_last_line(
    work: Any, error: BaseException, status: int, last: str
) -> None:
    def fail(settings: object, resume: bool, quiet: bool) -> int:
        raise error

    work.train = fail
    done = invoke("train", "builtin:quickstart")
    assert done.exit_code == status
    assert done.stderr.strip().splitlines()[-1].endswith(last)
    assert ("Traceback" in done.stderr) == (status == 1)


def test_eval_and_export_hand_their_arguments_on(work: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    work.evaluate = lambda target, overrides: (seen.append((target, overrides)), 0)[1]
    work.export = lambda run, out: (seen.append((run, out)), out)[1]
    assert invoke("eval", "runs/x", "--set", "eval.prompts=8").exit_code == 0
    assert invoke("export", "runs/x", str(tmp_path / "out")).exit_code == 0
    assert seen == [("runs/x", ["eval.prompts=8"]), (Path("runs/x"), tmp_path / "out")]


def test_the_written_configuration_is_plain_yaml_for_every_reader(own_data: Path) -> None:
    assert yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))["learner"]["lr"] == 1e-3
