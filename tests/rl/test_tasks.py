"""Tasks: their rows, their graders, splits that never meet, and the model that is made for one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl.data import open_prompts
from rl.settings_file import from_mapping
from rl.tasks import TASKS, find_task
from rl.tasks.gym import GymTask
from rl.tasks.sort import Sort
from tests.rl.tokenizers_made import characters


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_reference_answer_is_right_and_splits_do_not_meet(name: str) -> None:
    task = TASKS[name]
    rows = {split: list(task.rows(split, 40, seed=1)) for split in ("train", "eval", "warm")}
    for split in rows.values():
        assert len(split) == 40
        for row in split:
            assert task.grade(str(row["answer"]), row["answer"], row) == 1.0
            assert task.grade("no idea", row["answer"], row) == 0.0
    questions = {split: {row["prompt"] for row in found} for split, found in rows.items()}
    assert not questions["train"] & questions["eval"] and not questions["warm"] & questions["eval"]
    assert not questions["train"] & questions["warm"]
    assert rows["train"] == list(task.rows("train", 40, seed=1)) != list(task.rows("train", 40, seed=2))


def test_another_seed_cannot_move_a_question_into_the_held_out_split() -> None:
    held_out = {row["prompt"] for row in Sort(min_digits=2, max_digits=2).rows("eval", 300, seed=0)}
    train = {row["prompt"] for row in Sort(min_digits=2, max_digits=2).rows("train", 3000, seed=9)}
    assert 5 <= len(held_out) < 30 and len(train) > 50 and not held_out & train


def test_sorting_is_graded_by_the_whole_answer() -> None:
    task = Sort()
    (row,) = task.rows("train", 1, seed=0)
    assert row["prompt"] == "sort 65055=" and row["answer"] == "05556"
    assert [task.grade(text, "05556") for text in ("05556", " 05556\n", "5556", "05556 05556", "")] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("builtin:srot", "did you mean builtin:sort"),
        ("reasoning_gym:base_convertion", "did you mean base_conversion"),
        ("builtin:", "no such task"),
    ],
)
def test_a_task_that_is_not_there_names_the_nearest(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_task(source)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sort(digits=3), r"task_options\.digits: builtin:sort knows only max_digits, min_digits"),
        (lambda: Sort(min_digits=7), r"min_digits <= max_digits \(seen: 7, 6\)"),
        (lambda: Sort(min_digits=True), "True is not a whole number"),
        (lambda: GymTask("chain_sum", {"seed": 3}), "set by run.seed"),
        (lambda: list(GymTask("chain_sum", {"mni_terms": 3}).rows("train", 1, 0)), "mni_terms"),
    ],
)
def test_options_that_a_task_does_not_have_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_reasoning_gym_rows_become_prompts_and_are_graded_by_their_own_task(tmp_path: Path) -> None:
    """From the settings to prompts and back to the task's grader, which makes the entry again from the row."""
    settings = from_mapping(
        {
            "data": {
                "train": "reasoning_gym:chain_sum",
                "eval": "reasoning_gym:chain_sum",
                "rows": 12,
                "eval_rows": 5,
                "task_options": {"min_terms": 2, "max_terms": 3},
            },
            "rollout": {"max_model_len": 300, "max_new_tokens": 32},
            "train": {"steps": 1},
        }
    )
    tokenizer = characters(adds_bos=False)
    train = open_prompts(settings, "train", tokenizer, tmp_path)
    held_out = open_prompts(settings, "eval", tokenizer, tmp_path)
    assert (len(train), len(held_out)) == (12, 5) and train.report.dropped == {}
    task = GymTask("chain_sum", {"min_terms": 2, "max_terms": 3})
    for prompts in (train, held_out):
        for number in range(len(prompts)):
            prompt = prompts[number]
            assert task.grade(str(prompt.answer), prompt.answer, prompt.columns) == 1.0
            assert task.grade(str(int(str(prompt.answer)) + 1), prompt.answer, prompt.columns) < 1.0
    texts = {train[row].text for row in range(12)}
    assert not texts & {held_out[row].text for row in range(5)}


def test_a_gym_row_that_lost_its_entry_cannot_be_graded() -> None:
    with pytest.raises(ValueError, match="the row has no entry_index"):
        GymTask("chain_sum", {}).grade("3", "3", {"prompt": "1 + 2"})


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_built_in_model_starts_where_there_is_something_to_learn(name: str) -> None:
    """Greedy accuracy on held-out rows between 0.1 and 0.3 (small: 0.35); the same model whenever it is asked for."""
    import torch
    import transformers

    from rl.tasks.builtin_model import RECIPES, model_folder, resolve_model

    path = resolve_model(f"builtin:{name}")
    assert path == str(model_folder(name)) == resolve_model(f"builtin:{name}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert model.num_parameters() == {"tiny": 110_784, "small": 366_048}[name]
    digits = {"min_digits": RECIPES[name].min_digits, "max_digits": RECIPES[name].max_digits}
    task = Sort(**digits)
    rows = list(task.rows("eval", 512, seed=0))
    inputs = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=10, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    accuracy = sum(task.grade(text, row["answer"]) for text, row in zip(texts, rows, strict=True)) / len(rows)
    assert 0.1 <= accuracy <= {"tiny": 0.3, "small": 0.35}[name], accuracy
