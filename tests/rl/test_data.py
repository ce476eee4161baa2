"""Rows to prompts: formats, policies, order, and that what is filtered is what is sent and trained on."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.config import Settings
from rl.data import DataError, PromptCursor, PromptSet, check_rows, open_prompts, require_rows, steps_for_epochs
from rl.settings_file import from_mapping
from tests.rl.tokenizers_made import characters

LIMIT = 64


def settings(train: Path | str, model: dict[str, Any] | None = None, **data: Any) -> Settings:
    """Model length 96, answers of 32: 64 tokens are left for a prompt."""
    return from_mapping(
        {
            "data": {"train": str(train), **data},
            "rollout": {"max_model_len": 96, "max_new_tokens": 32},
            "train": {"steps": 1},
        }
    )


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def opened(run: Settings, folder: Path, tokenizer: Any = None) -> PromptSet:
    return open_prompts(run, "train", tokenizer or characters(adds_bos=False), folder / "store")


def forty(folder: Path) -> Path:
    """40 rows; the 37th has 500 tokens."""
    rows = [{"prompt": f"q{number}", "answer": "1"} for number in range(40)]
    rows[36]["prompt"] = "x" * 436 + "y" * 64
    return write(folder / "rows.jsonl", rows)


def test_an_overlong_prompt_is_an_error_by_default(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:37.*500 > 64"):
        opened(settings(forty(tmp_path)), tmp_path)


def test_an_overlong_prompt_may_be_dropped_and_is_counted(tmp_path: Path) -> None:
    prompts = opened(settings(forty(tmp_path), overlong="drop"), tmp_path)
    assert len(prompts) == 39 and "36" not in {prompts[row].prompt_id for row in range(39)}
    assert prompts.report.read == 40 and prompts.report.dropped == {"over-long": 1}
    assert "rows.jsonl:37" in prompts.report.lines()[0] and "500 > 64 tokens" in prompts.report.lines()[0]


def test_an_overlong_prompt_may_keep_its_last_tokens(tmp_path: Path) -> None:
    tokenizer = characters(adds_bos=False)
    prompts = opened(settings(forty(tmp_path), overlong="left"), tmp_path, tokenizer)
    assert len(prompts) == 40 and prompts.report.shortened == 1
    assert prompts[36].token_ids.tolist() == [tokenizer.convert_tokens_to_ids("y")] * 64
    assert max(len(prompts[row].token_ids) for row in range(40)) == LIMIT


def test_the_template_and_the_tools_count(tmp_path: Path) -> None:
    """60 characters; BOS, <u>, <a> and the tool's name add 12: 72 tokens, over the limit."""
    row = {
        "prompt": [{"role": "user", "content": "x" * 60}],
        "answer": "1",
        "tools": [{"name": "ab"}],
    }
    path = write(tmp_path / "rows.jsonl", [row, {**row, "prompt": [{"role": "user", "content": "x" * 50}]}])
    prompts = opened(settings(path, overlong="drop"), tmp_path)
    assert len(prompts) == 1
    added = 1 + 3 + 3 + 3  # BOS, "tab", "<u>", "<a>"
    assert len(prompts[0].token_ids) == 50 + added
    assert f"{60 + added} > 64" in prompts.report.lines()[0]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_there_is_exactly_one_bos(tmp_path: Path, adds_bos: bool) -> None:
    tokenizer = characters(adds_bos)
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "1"},
        {"prompt": "hi", "answer": "1"},
        {"prompt": "<s>hi", "answer": "1"},
    ]
    prompts = opened(settings(write(tmp_path / "rows.jsonl", rows)), tmp_path, tokenizer)
    chat, plain, spelt = (prompts[row].token_ids.tolist() for row in range(3))
    rendered = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, tokenize=False)
    assert chat == tokenizer(rendered, add_special_tokens=False)["input_ids"] and chat.count(0) == 1 and chat[0] == 0
    assert plain.count(0) == (1 if adds_bos else 0)
    assert spelt.count(0) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": "1"}, "no column 'prompt'"),
        ({"prompt": None, "answer": "1"}, "null"),
        ({"prompt": "", "answer": "1"}, "empty"),
        ({"prompt": "  \n", "answer": "1"}, "blank"),
        ({"prompt": [], "answer": "1"}, "empty list"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "no content"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "1"}, "last"),
        ({"prompt": [{"role": "robot", "content": "a"}], "answer": "1"}, "'robot'"),
        ({"prompt": 7, "answer": "1"}, "int 7"),
        ({"prompt": "a", "answer": None}, "null"),
        ({"prompt": "a"}, "no column 'answer'"),
    ],
)
def test_bad_rows_are_refused_or_dropped_with_their_line(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    good = {"prompt": "a", "answer": "1"}
    path = write(tmp_path / "rows.jsonl", [good] * 6 + [row] + [good] * 3)
    for look in (check_rows, lambda run, which: opened(run, tmp_path)):
        with pytest.raises(DataError, match="rows.jsonl:7") as caught:
            look(settings(path), "train")
        assert words in str(caught.value)
    prompts = opened(settings(path, bad_rows="drop"), tmp_path)
    assert len(prompts) == 9 and sum(prompts.report.dropped.values()) == 1
    assert [prompts[number].row for number in (5, 6)] == ["rows.jsonl:6", "rows.jsonl:8"]


@pytest.mark.parametrize(
    ("line", "words"),
    [('{"prompt": "a", "prompt": "b", "answer": "1"}', "twice"), ("{broken", "JSON"), ("[1]", "list"), ("NaN", "NaN")],
)
def test_broken_lines_name_their_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="rows.jsonl:2") as caught:
        check_rows(settings(path), "train")
    assert words in str(caught.value)


def test_a_wrong_column_lists_the_real_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,solution\na,1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no column 'questoin'.*'question', 'solution'; did you mean 'question'"):
        check_rows(settings(path, prompt_column="questoin", answer_column="solution"), "train")


def test_missing_files_and_unknown_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.jsonl"):
        check_rows(settings(tmp_path / "none.jsonl"), "train")
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(DataError, match=r"\.jsonl"):
        check_rows(settings(tmp_path / "rows.txt"), "train")


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"é日 {number}", "answer": str(number), "level": number} for number in range(5)]
    write(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    lines = [f'"{row["prompt"]}",{row["answer"]},{row["level"]}' for row in rows]
    (tmp_path / "rows.csv").write_text("prompt,answer,level\n" + "\n".join(lines) + "\n", encoding="utf-8-sig")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    tokenizer = characters(adds_bos=False)
    seen = {}
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "saved"):
        assert check_rows(settings(tmp_path / name), "train").rows == 5
        prompts = opened(settings(tmp_path / name), tmp_path / name.replace(".", "_"), tokenizer)
        made = [prompts[row] for row in range(5)]
        seen[name] = [(each.prompt_id, each.text, str(each.answer), each.token_ids.tolist()) for each in made]
    assert all(each == seen["rows.jsonl"] for each in seen.values()), seen
    assert seen["rows.jsonl"][3][1] == "é日 3"


def test_nested_parquet_values_are_plain(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": messages, "answer": "1", "n": 3}]), tmp_path / "rows.parquet")
    prompts = opened(settings(tmp_path / "rows.parquet"), tmp_path)
    prompt = pickle.loads(pickle.dumps(prompts))[0]
    assert prompt.messages == messages and type(prompt.messages) is list
    assert type(prompt.messages[0]) is dict and type(prompt.columns["n"]) is int
    assert prompt.text == "<s><s>be kind<u>hi<a>"


def test_a_hub_id_is_read_from_the_local_cache(tmp_path: Path) -> None:
    """A cache such as a download leaves: made here by building a local dataset under the id's name."""
    rows = [{"prompt": f"p{number}", "answer": "1"} for number in range(3)]
    write(tmp_path / "train.jsonl", rows)
    program = (
        "import sys, datasets\n"
        "from pathlib import Path\n"
        "folder = Path(sys.argv[1])\n"
        "made = datasets.load_dataset('json', data_files={'train': str(folder / 'train.jsonl')})\n"
        "print(made['train'].num_rows)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "3", done.stderr
    built = next((tmp_path / "hf" / "datasets" / "json").iterdir())
    target = tmp_path / "hf" / "datasets" / "someone___rows" / "default"
    target.parent.mkdir(parents=True)
    built.rename(target)
    for arrow in target.rglob("json-*.arrow"):
        arrow.rename(arrow.with_name(arrow.name.replace("json-", "rows-")))
    look = (
        "import sys\nfrom rl.settings_file import from_mapping\nfrom rl.data import check_rows\n"
        "print(check_rows(from_mapping({'data': {'train': 'someone/rows'}, 'train': {'steps': 1}}), 'train').rows)\n"
    )
    done = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "3", done.stderr


def test_a_huge_row_is_handled_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.write(json.dumps({"prompt": "x" * 20_000_000, "answer": "1"}) + "\n")
        for number in range(20_000):
            file.write(json.dumps({"prompt": f"{number} " + "y" * 40, "answer": "1"}) + "\n")
    program = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from tests.rl.test_data import opened, settings\nfrom tests.rl.tokenizers_made import characters\n"
        "tokenizer = characters(False); tokenizer('a')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "made = opened(settings(sys.argv[1], overlong='drop'), Path(sys.argv[1]).parent, tokenizer)\n"
        "print(len(made), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, grown = map(int, done.stdout.split())
    assert rows == 20_000 and grown < 600, f"{grown} MiB"


def test_utf8_in_every_locale(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "é日", "answer": "日"}])
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.rl.test_data import opened, settings\n"
        "print(ascii(opened(settings(sys.argv[1]), Path(sys.argv[1]).parent)[0].answer))\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", program, str(path)], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == r"'\u65e5'", done.stderr
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a", "answer": "1"}\n{"prompt": "\xe9", "answer": "1"}\n')
    with pytest.raises(DataError, match="latin.jsonl:2"):
        check_rows(settings(tmp_path / "latin.jsonl"), "train")


def test_too_few_rows_are_refused_with_their_numbers(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}] * 5 + [{"prompt": "", "answer": "1"}] * 2
    prompts = opened(settings(write(tmp_path / "rows.jsonl", rows), bad_rows="drop"), tmp_path)
    with pytest.raises(DataError, match=r"5 usable rows of 7.*prompts_per_step = 8"):
        require_rows(len(prompts), 8, prompts.report)
    require_rows(len(prompts), 5, prompts.report)
    for bad in ([], [{"prompt": "", "answer": "1"}] * 3):
        with pytest.raises(DataError):
            opened(settings(write(tmp_path / "none.jsonl", bad), bad_rows="drop"), tmp_path)


def test_batches_run_across_epochs_and_resume_anywhere() -> None:
    cursor = PromptCursor(13, seed=3, shuffle=True)
    steps = [cursor.take(4) for _ in range(13)]
    flat = [row for step in steps for row in step]
    for epoch in range(4):
        assert sorted(flat[13 * epoch : 13 * (epoch + 1)]) == list(range(13))
    assert flat[:13] != flat[13:26]
    again = PromptCursor(13, seed=3, shuffle=True)
    first = [again.take(4) for _ in range(5)]
    state = json.loads(json.dumps(again.state()))
    resumed = PromptCursor(13, seed=3, shuffle=True)
    resumed.restore(state)
    assert first + [resumed.take(4) for _ in range(8)] == steps
    for other in (PromptCursor(12, 3, True), PromptCursor(13, 4, True), PromptCursor(13, 3, False)):
        with pytest.raises(ValueError, match="cannot be continued"):
            other.restore(state)
    assert steps_for_epochs(13, 4, 1) == (3, 1)


def test_the_fingerprint_follows_rows_and_filter(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "answer": "1"} for number in range(4)]
    first = opened(settings(write(tmp_path / "a.jsonl", rows)), tmp_path / "1").report.fingerprint
    same = opened(settings(write(tmp_path / "b.jsonl", rows)), tmp_path / "2").report.fingerprint
    other = opened(settings(write(tmp_path / "c.jsonl", rows[:3])), tmp_path / "3").report.fingerprint
    answer = opened(settings(write(tmp_path / "d.jsonl", [*rows[:3], {**rows[3], "answer": "2"}])), tmp_path / "4")
    assert first == same and len({first, other, answer.report.fingerprint}) == 3


def test_generated_rows_are_disjoint_between_splits(tmp_path: Path) -> None:
    run = from_mapping(
        {
            "data": {"train": "builtin:sort", "eval": "builtin:sort", "rows": 500, "eval_rows": 200},
            "rollout": {"max_new_tokens": 8},
            "train": {"steps": 1},
        }
    )
    from rl.chat import load_tokenizer
    from rl.tasks.builtin_model import resolve_model

    tokenizer = load_tokenizer(resolve_model("builtin:tiny"))
    train = open_prompts(run, "train", tokenizer, tmp_path)
    held_out = open_prompts(run, "eval", tokenizer, tmp_path)
    texts = [{prompts[row].text for row in range(len(prompts))} for prompts in (train, held_out)]
    assert len(train) == 500 and len(held_out) == 200 and not texts[0] & texts[1]
    assert isinstance(train[0].token_ids, np.ndarray) and train[0].token_ids.dtype == np.int32


def test_a_saved_dataset_with_splits_is_looked_at_without_the_library(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": f"p{number}", "answer": "1"} for number in range(4)]
    whole = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:2])}
    )
    whole.save_to_disk(str(tmp_path / "saved"))
    picked = datasets.Dataset.from_list(rows).select([2, 0])  # rows by an index file: the library itself must look
    picked.save_to_disk(str(tmp_path / "picked"))
    program = (
        "import sys\nfrom rl.settings_file import from_mapping\nfrom rl.data import check_rows\n"
        "run = from_mapping({'data': {'train': sys.argv[1]}, 'train': {'steps': 1}})\n"
        "print(check_rows(run, 'train').rows, 'datasets' in sys.modules, 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "4 False False", done.stderr
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        check_rows(settings(tmp_path / "saved", train_split="dev"), "train")
    prompts = opened(settings(tmp_path / "picked"), tmp_path)
    assert [prompts[row].text for row in range(2)] == ["p2", "p0"]
