"""Settings: what is refused, in which words (place, key, value, rule, nearest right one), and what is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl.config import Settings
from rl.settings_errors import SettingsError, all_keys
from rl.settings_file import builtin_names, dump, from_mapping, load
from rl.settings_yaml import scalar

BASE = "train: {steps: 10}\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a file named c.yaml into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str | bytes) -> str:
        Path("c.yaml").write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
        return "c.yaml"

    return _write


def refusal(path: str, overrides: Any = ()) -> str:
    with pytest.raises(SettingsError) as caught:
        load(path, overrides)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


ONE_LINE = [
    # unknown keys: nested, in another section, at the top
    (
        "algorithm: {grup_size: 8}",
        "c.yaml:2: algorithm.grup_size = 8: unknown setting; did you mean algorithm.group_size?",
    ),
    ("algorithm: {kl: {coeff: 0.0}}", "algorithm.kl.coeff = 0.0: unknown setting; did you mean algorithm.kl.coef?"),
    ("sync: {lr: 1.0}", "sync.lr = 1.0: unknown setting; did you mean learner.lr?"),
    ("rollot: {replicas: 2}", "unknown setting; did you mean rollout?"),
    ("rewards: [{name: math, wieght: 2.0}]", "rewards.0.wieght = 2.0: unknown setting; did you mean rewards.0.weight?"),
    ("cluster: {zzz: 1}", "cluster.zzz = 1: unknown setting; known here: address"),
    # wrong types
    ("learner: {lr: '1e-6'}", "learner.lr = '1e-6': must be a number; write 1e-06 without quotes"),
    ("learner: {updates_per_batch: 2.0}", "learner.updates_per_batch = 2.0: must be a whole number; write 2"),
    ("rollout: {replicas: true}", "rollout.replicas = true: must be a whole number"),
    ("learner: {lr: true}", "learner.lr = true: must be a number"),
    ("run: {name: 123}", "run.name = 123: must be text; write it in quotes: '123'"),
    ("data: {shuffle: on}", "data.shuffle = 'on': must be true or false; write true"),
    ("data: {shuffle: No}", "data.shuffle = 'No': must be true or false; write false"),
    ("data: {shuffle: 1}", "data.shuffle = 1: must be true or false"),
    ("data: [1]", "data = [1]: must be a section (keys and values)"),
    ("learner: {betas: [0.9]}", "learner.betas"),
    ("learner: {betas: ['0.9', 0.99]}", "learner.betas.0 = '0.9': must be a number; write 0.9 without quotes"),
    ("rollout: {engine_args: 3}", "rollout.engine_args = 3: must be a mapping (key: value)"),
    ("algorithm: {name: gropo}", "algorithm.name = 'gropo': must be one of 'grpo'; did you mean 'grpo'?"),
    (
        "learner: {precision: float23}",
        "learner.precision = 'float23': must be one of 'float32' or 'bfloat16'; did you mean",
    ),
    ("learner: {device: tpu}", "learner.device = 'tpu': must be one of 'cpu' or 'cuda'"),
    # null, NaN, infinity, range
    ("learner: {lr: null}", "learner.lr = null: must be a number; leave it out to get the default, 1e-06"),
    ("learner: {lr: .nan}", "learner.lr = .nan: must be a finite number"),
    ("learner: {lr: .inf}", "learner.lr = .inf: must be a finite number"),
    ("rewards: [{name: math, weight: -.inf}]", "rewards.0.weight = -.inf: must be a finite number"),
    ("eval:", "eval = null: must be a section (keys and values); leave the whole section out to get its defaults"),
    ("rollout: {replicas: 0}", "rollout.replicas = 0: must be at least 1 (vLLM engines); the nearest allowed is 1"),
    (
        "algorithm: {group_size: 1}",
        "algorithm.group_size = 1: must be at least 2 (Samples per prompt (G)); the nearest",
    ),
    ("rollout: {temperature: 0}", "rollout.temperature = 0: must be greater than 0"),
    ("grading: {max_error_rate: 1.5}", "grading.max_error_rate = 1.5: must be at most 1"),
    ("run: {name: ''}", "run.name = '': must not be empty"),
    ("learner: {betas: [0.9, 1.0]}", "learner.betas.1 = 1.0: must be at least 0 and less than 1"),
    # rewards
    ("rewards: [{}]", "c.yaml:2: rewards.0: give exactly one of name and function (seen: name=None, function=None)"),
    ("rewards: [{name: format}]", "rewards.0: pattern goes with name: format, and format needs a pattern"),
    ("rewards: [{name: math, overlong_buffer: 3}]", "rewards.0: overlong_buffer goes with name: length"),
    ("rewards: [{name: format, pattern: '(['}]", "rewards.0.pattern = '([': not a regular expression: unterminated"),
    ("rewards: [{name: math, weight: 0.0}]", "rewards: every weight is 0 (0.0): there is nothing to learn"),
    (
        "rewards: [{name: length, overlong_buffer: 256}]",
        "rewards.0.overlong_buffer = 256: must be less than rollout.max_new_tokens = 256; the nearest allowed is 255",
    ),
    (
        "{data: {train: q.jsonl, answer_column: null}, rewards: [{name: math}]}",
        "rewards.0.name = 'math': math compares with an answer, but data.answer_column is null; name the column",
    ),
    (
        "data: {train: q.jsonl, answer_column: null}",
        "rewards: the default reward, exact_match, compares with an answer, but data.answer_column is null",
    ),
    (
        "{data: {train: q.jsonl}, rewards: [{name: task}]}",
        "rewards.0.name = 'task': only builtin: and reasoning_gym: data have their own grader, but data.train is 'q.js",
    ),
    # lengths
    (
        "rollout: {max_new_tokens: 64, max_model_len: 64}",
        "rollout.max_new_tokens = 64: leaves no room for a prompt: it must be less than rollout.max_model_len = 64; "
        "the nearest allowed is 63",
    ),
    (
        "rollout: {max_new_tokens: 4096}",
        "it must be less than 4096, the most that rollout.max_model_len: null allows; the nearest allowed is 4095",
    ),
    (
        "{rollout: {max_new_tokens: 64, max_model_len: 96}, data: {max_prompt_tokens: 33}}",
        "data.max_prompt_tokens = 33: 33 prompt tokens + 64 new tokens = 97, more than rollout.max_model_len = 96; "
        "the nearest allowed is 32",
    ),
    # the engine's arguments that are ours
    (
        "rollout: {engine_args: {dtype: half}}",
        "rollout.engine_args.dtype: is decided by rollout.dtype; set rollout.dtype",
    ),
    ("rollout: {engine_args: {seed: 1}}", "rollout.engine_args.seed: is decided by run.seed; set run.seed"),
    ("rollout: {engine_args: {logprobs_mode: x}}", "rollout.engine_args.logprobs_mode: is decided by the product"),
    ("rollout: {engine_args: {tensor-parallel-size: 2}}", "rollout.engine_args.tensor-parallel-size: is decided by"),
    # would be ignored
    ("train: {eval_every: 5}", "train.eval_every = 5: would be ignored: data.eval is null, so there is nothing"),
    ("eval: {samples: 4}", "eval.samples = 4: would be ignored: data.eval is null; name held-out rows in data.eval"),
    ("{data: {eval: builtin:sort}, eval: {temperature: 0.5}}", "eval.temperature = 0.5: would be ignored"),
    ("learner: {lr_schedule: constant, lr_final_ratio: 0.5}", "learner.lr_final_ratio = 0.5: would be ignored"),
    (
        "data: {train: q.jsonl, rows: 9}",
        "data.rows = 9: would be ignored: it counts rows to generate, but data.train is",
    ),
    ("data: {train: q.jsonl, train_split: x}", "data.train_split = 'x': would be ignored"),
    ("data: {train: q.jsonl, task_options: {a: 1}}", "data.task_options = {'a': 1}: would be ignored"),
    (
        "{data: {eval: builtin:sort, eval_rows: 64}, eval: {prompts: 65}}",
        "eval.prompts = 65: more than data.eval_rows = 64",
    ),
    # not in this version
    ("algorithm: {kl: {coef: 0.1}}", "algorithm.kl.coef = 0.1: a KL to the reference policy is not in this version"),
    ("train: {max_staleness: 1}", "train.max_staleness = 1: asynchronous training is not in this version; only 0"),
    (
        "placement: {rollout: {topology: 4x4}}",
        "placement = {'rollout': {'topology': '4x4'}}: placement on slices is not in",
    ),
    # the rest
    (
        "model: {path: builtin:tny}",
        "model.path = 'builtin:tny': the built-in models are builtin:tiny and builtin:small; did",
    ),
    (
        "train: {epochs: 2}",
        "train: give steps or epochs, not both (seen: steps = 10, epochs = 2); set the other one to null",
    ),
]


def merged(text: str) -> str:
    """Line 1 is the comment, line 2 the case; train.steps stays 10 unless the case speaks of train itself."""
    body = text[1:-1].replace("}, ", "}\n") if text.startswith("{") else text
    if body.startswith("train: {"):
        return "# a case\n" + body.replace("{", "{steps: 10, ", 1) + "\n"
    return f"# a case\n{body}\n{BASE}"


@pytest.mark.parametrize(("text", "message"), ONE_LINE, ids=[text for text, _ in ONE_LINE])
def test_refused_with_place_key_value_rule_and_suggestion(write: Any, text: str, message: str) -> None:
    seen = refusal(write(merged(text)))
    assert message in seen
    assert "1 problem in the settings" in seen, "one fault, one problem"


BATCHES = [
    # prompts, group, updates, workers, message (None: accepted)
    (32, 8, 4, 1, None),  # mini-batches of 64
    (4, 4, 1, 3, None),
    (
        4,
        4,
        3,
        1,
        "learner.updates_per_batch = 3: 4 prompts x 4 samples = 16 samples, 16 / 3 updates = 5.33 samples per update, "
        "not a whole number; the nearest that works is 2",
    ),
    (
        4,
        2,
        4,
        3,
        "learner.workers = 3: 4 prompts x 2 samples = 8 samples, 8 / 4 updates = 2 samples per update, fewer than "
        "3 workers; at most 2 workers, or at least 8 prompts per step",
    ),
    (
        1,
        8,
        2,
        1,
        "1 prompts x 8 samples = 8 samples; an update takes whole groups, and 1 groups / 2 updates = 0.50 is not",
    ),
    (1, 2, 3, 1, "1 prompts x 2 samples = 2 samples, 2 / 3 updates = 0.67 samples per update"),
]


@pytest.mark.parametrize(("prompts", "group", "updates", "workers", "message"), BATCHES)
def test_batch_arithmetic_shows_the_sum(
    prompts: int, group: int, updates: int, workers: int, message: str | None
) -> None:
    data = {
        "rollout": {"prompts_per_step": prompts},
        "algorithm": {"group_size": group},
        "learner": {"updates_per_batch": updates, "workers": workers},
        "train": {"steps": 1},
    }
    if message is None:
        assert from_mapping(data).rollout.prompts_per_step == prompts
        return
    with pytest.raises(SettingsError) as caught:
        from_mapping(data)
    assert message in str(caught.value)


def test_the_suggested_batch_sizes_are_accepted() -> None:
    base = {"algorithm": {"group_size": 2}, "train": {"steps": 1}}
    more = {"rollout": {"prompts_per_step": 8}, "learner": {"updates_per_batch": 4, "workers": 3}}
    assert from_mapping({**base, **more}).rollout.prompts_per_step == 8
    fewer = {"rollout": {"prompts_per_step": 4}, "learner": {"updates_per_batch": 4, "workers": 2}}
    assert from_mapping({**base, **fewer}).learner.workers == 2


def test_steps_or_epochs_are_required() -> None:
    with pytest.raises(SettingsError, match="train: missing, and it has no default"):
        from_mapping({})
    with pytest.raises(SettingsError, match=r"train: give steps or epochs \(seen: neither\)"):
        from_mapping({"train": {}})
    assert from_mapping({"train": {"epochs": 2}}).train.epochs == 2


def test_every_problem_is_listed_with_its_line(write: Any) -> None:
    text = "run:\n  sede: 1\n  name: 5\nlearner:\n  lr: -1\ntrain: {steps: 0}\n"
    with pytest.raises(SettingsError) as caught:
        load(write(text))
    assert [problem.where for problem in caught.value.problems] == ["c.yaml:3", "c.yaml:2", "c.yaml:5", "c.yaml:6"]
    assert str(caught.value).startswith("c.yaml: 4 problems in the settings\n  c.yaml:3: run.name = 5: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run: {seed: 1}\ntrain: {steps: 1}\nrun: {seed: 2}\n",
            "c.yaml:3: run: given twice, first in line 1; keep one",
        ),
        ("run:\n  seed: 1\n  seed: 1\ntrain: {steps: 1}\n", "c.yaml:3: run.seed: given twice, first in line 2"),
        (
            BASE + "rewards:\n- name: math\n  weight: 1.0\n  weight: 2.0\n",
            "c.yaml:5: rewards.0.weight: given twice, first in line 4",
        ),
        (BASE + "data: {train: x: y}\n", "c.yaml:2: broken YAML: "),
        (BASE + "run:\n\tname: x\n", "c.yaml:3: broken YAML: "),
        (BASE + "rewards: [{name: math}\nrun: {}\n", "c.yaml:3: broken YAML: "),
        (BASE + "run: {name: 'abc}\n\n\n", "broken YAML: while scanning a quoted scalar"),
        (BASE + "---\nrun: {}\n", "broken YAML: expected a single document in the stream, but found another document"),
        ("- a\n- b\n", "c.yaml:1: the file must be a mapping (key: value), but is a list"),
        ("hello\n", "c.yaml:1: the file must be a mapping (key: value), but is a single value"),
        ("", "c.yaml: the file is empty; a run needs at least train: {steps: N}"),
        ("# only words\n", "c.yaml: the file is empty"),
        (BASE + "1: x\n", "c.yaml:2: keys must be text (seen: 1); write it in quotes"),
        (BASE + "? [a]\n: x\n", "keys must be text (seen: a list or mapping)"),
        (BASE + "run: {name: !!python/name:os.system ''}\n", "c.yaml:2: run.name: YAML tags have no meaning here"),
        (BASE + "rollout: {engine_args: &a {b: *a}}\n", "c.yaml:2: rollout.engine_args.b: contains itself"),
    ],
)
def test_broken_files_name_file_and_line(write: Any, text: str, message: str) -> None:
    assert message in refusal(write(text))


def test_bytes_that_are_not_utf8_name_the_line(write: Any) -> None:
    seen = refusal(write(b"train: {steps: 1}\nrun: {name: caf\xe9}\n"))
    assert "c.yaml:2: not UTF-8: byte 0xe9" in seen


def test_a_control_character_names_the_line(write: Any) -> None:
    assert "c.yaml:2: broken YAML: " in refusal(write(b"train: {steps: 1}\nrun: {name: a\x07b}\n"))


def test_utf8_is_read_in_every_locale(write: Any) -> None:
    write("﻿run: {name: 'Grüße 漢字'}\n" + BASE)
    code = "from rl.settings_file import load; print(load('c.yaml').run.name.encode('unicode_escape').decode())"
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Gr\\xfc\\xdfe \\u6f22\\u5b57"


def test_yaml_words_mean_what_version_1_2_says(write: Any) -> None:
    settings = load(
        write(
            "run: {name: on, output_dir: '1e-6'}\nmodel: {path: 2026-01-01}\n"
            "learner: {lr: 1e-6, adam_epsilon: 1E-8, warmup_steps: 0x0}\n"
            "rollout: {engine_args: {a: no, b: '12', c: 12:30, d: &x 1e3, e: *x, f: !!str 5}}\n" + BASE
        )
    )
    assert (settings.run.name, settings.run.output_dir, settings.model.path) == ("on", "1e-6", "2026-01-01")
    assert settings.learner.lr == 1e-6 and settings.learner.adam_epsilon == 1e-8
    assert settings.rollout.engine_args["a"] == "no" and settings.rollout.engine_args["b"] == "12"
    assert settings.rollout.engine_args["c"] == "12:30" and settings.rollout.engine_args["f"] == "5"
    assert settings.rollout.engine_args["d"] == settings.rollout.engine_args["e"] == 1000.0


@pytest.mark.parametrize(
    ("word", "value"),
    [("1e-6", 1e-6), ("1.e3", 1e3), (".5", 0.5), ("-3", -3), ("+4", 4), ("010", 10), ("0o10", 8), ("1_000", "1_000")],
)
def test_numbers(word: str, value: Any) -> None:
    seen = scalar(word)
    assert seen == value and type(seen) is type(value)


def test_an_integer_is_a_number_too() -> None:
    settings = from_mapping({"rollout": {"temperature": 1}, "train": {"steps": 1}})
    assert settings.rollout.temperature == 1.0 and isinstance(settings.rollout.temperature, float)


# --set and overrides


def test_overrides_from_text_and_from_python_agree() -> None:
    text = load(
        "builtin:quickstart",
        [
            "train.steps=20",
            "learner.lr=1e-5",
            "run.name='7'",
            "rollout.engine_args.block_size=64",
            "train.eval_every=0",
        ],
    )
    python = load(
        "builtin:quickstart",
        {
            "train.steps": 20,
            "learner.lr": 1e-5,
            "run.name": "7",
            "rollout.engine_args.block_size": 64,
            "train.eval_every": 0,
        },
    )
    assert text == python
    assert (text.train.steps, text.learner.lr, text.run.name) == (20, 1e-5, "7")
    assert text.rollout.engine_args == {"block_size": 64}


def test_overrides_reach_sections_the_file_leaves_out_and_entries_of_lists(write: Any, tmp_path: Path) -> None:
    path = write("rewards: [{name: math}, {name: exact_match}]\n" + BASE)
    settings = load(path, ["rewards.1.weight=0.5", "grading.timeout=2", "learner.betas=[0.8, 0.9]"])
    assert [reward.weight for reward in settings.rewards] == [1.0, 0.5]
    assert settings.grading.timeout == 2.0 and settings.learner.betas == (0.8, 0.9)
    assert load(path, {"run.output_dir": tmp_path}).run.output_dir == str(tmp_path)
    assert load(path, ["train.steps=null", "train.epochs=3"]).train.epochs == 3
    assert load(path, ["run.name=a=b # c"]).run.name == "a=b # c"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lrr=1", "--set: learner.lrr = 1: unknown setting; did you mean learner.lr?"),
        ("steps=1", "--set: steps = 1: unknown setting; did you mean train.steps?"),
        ("train.steps", "--set: train.steps: must read key.path=value (seen: 'train.steps')"),
        ("train.steps=ten", "--set: train.steps = 'ten': must be a whole number"),
        ("train.steps=", "train: give steps or epochs (seen: neither)"),
        ("train.steps.x=1", "--set: train.steps.x: train.steps = 80 has no keys of its own"),
        ("train=5", "--set: train = 5: must be a section (keys and values)"),
        ("run.name=[a", "--set: run.name: [a is broken YAML"),
        ("rewards.0.weight=1", "--set: rewards.0.weight: rewards has 0 entries, numbered from 0"),
        ("train..steps=1", "--set: train..steps: each part of a key must be a name"),
        ("learner.updates_per_batch=3", "--set: learner.updates_per_batch = 3: 32 prompts x 8 samples = 256 samples"),
    ],
)
def test_a_bad_override_is_refused(override: str, message: str) -> None:
    assert message in refusal("builtin:quickstart", [override])


def test_the_same_override_twice_is_refused() -> None:
    assert "--set: train.steps: given twice" in refusal("builtin:quickstart", ["train.steps=1", "train.steps=2"])


# files and shipped configurations


def test_missing_files_and_wrong_names_suggest_the_nearest(write: Any, tmp_path: Path) -> None:
    write(BASE)
    assert "no such file; did you mean c.yaml?" in refusal("cc.yaml")
    assert "no such file; nor is there a folder nowhere" in refusal("nowhere/c.yaml")
    assert "no such file; did you mean builtin:quickstart?" in refusal("quickstart")
    assert "did you mean builtin:quickstart?" in refusal("builtin:quikstart")
    assert "cannot be read: Is a directory" in refusal(str(tmp_path))


@pytest.mark.parametrize("name", builtin_names())
def test_shipped_configurations_load_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    settings = load(f"builtin:{name}")
    (tmp_path / "resolved.yaml").write_text(dump(settings), encoding="utf-8")
    assert load(tmp_path / "resolved.yaml") == settings


def test_dump_writes_every_default_and_quotes_words_that_look_like_something_else(tmp_path: Path) -> None:
    names = ["on", "1e-6", "null", "12:30", "0o7", "2026-01-01", "~", "true", "é漢", "a: b", "[x]", " pad ", "1_0"]
    for name in names:
        settings = from_mapping({"run": {"name": name}, "learner": {"lr": 1e-7}, "train": {"steps": 1}})
        text = dump(settings)
        (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
        assert load(tmp_path / "c.yaml") == settings
    assert "probe_tokens: 64" in text and "lr: 1.0e-07" in text


def test_every_setting_says_what_it_means() -> None:
    from rl.settings_errors import field_at

    keys = all_keys(Settings)
    undocumented = []
    for key in keys:
        field = field_at(Settings, tuple(key.split(".")))
        assert field is not None, key
        if not field.description:
            undocumented.append(key)
    assert undocumented == []
    assert len(keys) < 110


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = from_mapping({"train": {"steps": 1}})
    with pytest.raises(ValueError, match="frozen"):
        settings.train.steps = 2


def test_reading_settings_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rl.settings_file import load; load('builtin:quickstart'); "
        "heavy = ('torch', 'ray', 'vllm', 'transformers', 'numpy', 'torch_tpu', 'libtpu'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
