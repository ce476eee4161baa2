"""Components: the built-in ones, what a user's function may look like and return, and their combination."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.config import Reward
from rl.rewards import REWARDS, Part, RewardContractError, Unscorable
from rl.rewards.builtin import make_task
from rl.rewards.combine import combine
from rl.rewards.component import Component, Samples
from rl.rewards.load import describe, load_components
from rl.rewards.parts import read_one

SHAPES = Path(__file__).parents[1] / "rewards_files" / "shapes.py"


def group(completions: list[str], **more: Any) -> Samples:
    made: dict[str, Any] = {
        "prompt_id": "0",
        "prompt": "add",
        "answer": "4",
        "messages": None,
        "columns": {"level": 2, "extra": "x"},
        "completions": tuple(completions),
        "token_counts": tuple(len(one) for one in completions),
        "finish_reasons": ("stop",) * len(completions),
        "max_new_tokens": 100,
        **more,
    }
    return made  # type: ignore[return-value]


def own(name: str, columns: list[str] | None = None) -> Component:
    return load_components(describe([Reward(function=f"{SHAPES}:{name}")]), columns)[0]


def test_exact_match() -> None:
    assert REWARDS["exact_match"](" 3589\n", "3589") is True
    assert REWARDS["exact_match"]("3589", 3589) is True
    assert REWARDS["exact_match"]("is 3589", "3589") is False
    for gold in (None, "", "  "):
        with pytest.raises(Unscorable, match="needs an answer"):
            REWARDS["exact_match"]("", gold)


def test_format_is_a_full_match() -> None:
    pattern = r"^<think>.*</think>\d+$"
    assert REWARDS["format"]("<think>a</think>12", pattern)
    assert not REWARDS["format"]("<think>a</think>12 and", pattern)
    assert not REWARDS["format"]("<think>a</think>12\n", pattern)
    assert not REWARDS["format"]("", pattern)


def test_length_by_hand() -> None:
    """DAPO, equation 13, with L = 100 and B = 20: zero up to 80, then (80 - n) / 20, then -1."""
    values = [REWARDS["length"](n, 100, 20) for n in (0, 80, 81, 85, 95, 100, 101, 500)]
    assert values == [0.0, 0.0, -0.05, -0.25, -0.75, -1.0, -1.0, -1.0]
    with pytest.raises(ValueError, match="overlong_buffer is 101"):
        REWARDS["length"](5, 100, 101)


def test_length_gets_its_numbers_from_the_group() -> None:
    component = load_components(describe([Reward(name="length", overlong_buffer=20)]))[0]
    assert component.grade_one(group(["a" * 85]), 0).value == -0.25


@pytest.mark.parametrize("name", ["as_list", "as_array", "columns_as_lists", "batch_later"])
def test_valid_batch_forms(name: str) -> None:
    parts = own(name).grade_batch(group(["a"] * 8))
    expected = {"as_array": [float(i) for i in range(8)], "columns_as_lists": [2.0] * 8}.get(name, [1.0] * 8)
    assert [part.value for part in parts] == expected


@pytest.mark.parametrize(
    "name", ["as_number", "one_value", "too_few", "too_many", "column_vector", "generator", "as_dict"]
)
def test_invalid_batch_forms_name_the_function_and_the_count(name: str) -> None:
    with pytest.raises(RewardContractError, match=rf"shapes\.py:{name} .*\b8 completions"):
        own(name).grade_batch(group(["a"] * 8))


def test_missing_values_are_typed() -> None:
    component = own("missing")
    parts = [component.grade_one(group(list("abcdefg")), index) for index in range(7)]
    assert [part.value for part in parts] == [1.0, None, None, None, 0.0, None, 1.0]
    assert [part.outcome for part in parts] == ["ok", "error", "error", "error", "wrong", "error", "ok"]
    assert "missing returned None" in parts[1].detail
    assert "nan, which is not a finite number" in parts[2].detail
    assert "returned a list ([1.0]) for one sample" in parts[5].detail


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (True, Part(1.0, "ok")),
        (False, Part(0.0, "wrong")),
        (np.bool_(True), Part(1.0, "ok")),
        (np.float32(0.5), Part(0.5, "ok")),
        (np.int64(-1), Part(-1.0, "wrong")),
        (np.array(2.0), Part(2.0, "ok")),
        ({"reward": 0.25, "outcome": "wrong"}, Part(0.25, "wrong")),
        ({"reward": 0}, Part(0.0, "wrong")),
    ],
)
def test_forms_of_one_value(value: Any, part: Part) -> None:
    assert read_one(value, "f") == part


@pytest.mark.parametrize("value", ["1", 1j, {"score": 1}, {"reward": 1, "outcome": "good"}, {"reward": None}, 10**400])
def test_other_values_are_errors(value: Any) -> None:
    part = read_one(value, "f")
    assert (part.value, part.outcome) == (None, "error")
    assert "reward function f returned" in part.detail


def test_an_exception_carries_its_traceback() -> None:
    part = own("raises").grade_one(group(["a"]), 0)
    assert part.outcome == "error"
    assert "the first traceback" in part.detail
    assert "shapes.py" in part.detail
    assert 'raise KeyError("the first traceback")' in part.detail


def test_async_functions() -> None:
    assert own("later").grade_one(group(["abc"]), 0) == Part(3.0, "ok")


def test_the_grader_sees_the_completion_only() -> None:
    samples = group([""], prompt=r"Think. <answer>\boxed{7}</answer> is the form", answer="7")
    for reward in (Reward(name="math"), Reward(name="exact_match"), Reward(name="format", pattern=".*7.*")):
        component = load_components(describe([reward]))[0]
        assert component.grade_one(samples, 0) == Part(0.0, "wrong")


def test_components_of_two_functions_share_one_module() -> None:
    first, second = load_components(describe([Reward(function=f"{SHAPES}:counts")] * 2))
    assert [first.label, second.label] == ["counts", "counts#2"]
    assert [first.grade_one(group(["a"]), 0).value, second.grade_one(group(["a"]), 0).value] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{SHAPES}:as_lst", "has no function 'as_lst': did you mean 'as_list'"),
        (f"{SHAPES}:CALLS", "is a list, not a function"),
        (f"{SHAPES}:wrong_signature", r"wrong_signature\(text, gold\).*exactly one of the parameters 'completion'"),
        (f"{SHAPES}:unknown_column", "needs a parameter 'anser'.*did you mean 'answer'"),
        (f"{SHAPES.with_name('shape.py')}:as_list", "there is no file .*did you mean .*shapes.py"),
        ("as_list", "must be path/to/file.py:function or module:function"),
    ],
)
def test_what_cannot_be_loaded(function: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_components(describe([Reward(function=function)]), columns=["level"])


def test_module_functions_and_patterns() -> None:
    component = load_components(describe([Reward(function="tests.rewards_files.shapes:says")]))[0]
    assert component.grade_one(group(["a"]), 0) == Part(0.25, "wrong")
    with pytest.raises(ValueError, match="not a regular expression"):
        describe([Reward(name="format", pattern="(")])
    with pytest.raises(ValueError, match="name: task needs data of a task"):
        describe([Reward(name="task")])


def test_a_file_travels_as_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(completion):\n    return 3\n", encoding="utf-8")
    specs = describe([Reward(function=f"{file}:f")])
    file.unlink()
    assert load_components(specs)[0].grade_one(group(["a"]), 0).value == 3.0


def test_no_component_is_the_tasks_own_or_exact_match() -> None:
    assert [(spec.name, dict(spec.options)) for spec in describe([], "sort")] == [
        ("task", {"source": "sort", "options": {}})
    ]
    assert [spec.name for spec in describe([])] == ["exact_match"]


def test_callables_travel_by_value() -> None:
    factor = 3
    mine: Callable[..., Any] = lambda completion: factor * len(completion)  # noqa: E731
    component = load_components(describe([Reward(function="mine")], functions={"mine": mine}))[0]
    assert component.grade_one(group(["ab"]), 0).value == 6.0


def test_combination_by_hand() -> None:
    score = combine(["a", "b"], [1.0, 0.5], [Part(1.0, "ok"), Part(-0.5, "wrong")])
    assert (score.reward, score.outcome, dict(score.parts)) == (0.75, "ok", {"a": 1.0, "b": -0.5})
    score = combine(["a", "b"], [0.0, -2.0], [Part(0.0, "wrong"), Part(0.25, "ok")])
    assert (score.reward, score.outcome) == (-0.5, "wrong")


def test_one_unscored_component_makes_the_sample_unscored() -> None:
    parts = [Part(1.0, "ok"), Part(None, "invalid", "no gold"), Part(None, "error", "boom")]
    score = combine(["a", "b", "c"], [1.0, 1.0, 0.0], parts)
    assert (score.reward, score.outcome, score.detail) == (None, "error", "boom")
    assert dict(score.parts) == {"a": 1.0, "b": None, "c": None}
    assert combine(["a", "b"], [1.0, 1.0], [Part(None, "error", "x"), Part(None, "timeout")]).outcome == "timeout"
    assert combine(["a"], [1e308], [Part(1e308, "ok")]).outcome == "error"


@pytest.mark.parametrize("source", ["sort", "builtin:sort"])
def test_the_tasks_own_grader(source: str) -> None:
    component = load_components(describe([], source))[0]
    samples = group(["3589", "3598", ""], answer="3589")
    assert [component.grade_one(samples, index) for index in range(3)] == [
        Part(1.0, "ok"),
        Part(0.0, "wrong"),
        Part(0.0, "wrong"),
    ]
    with pytest.raises(ValueError, match="no such task"):
        load_components(describe([], "builtin:srt"))


def test_partial_credit_of_a_task_is_not_ok() -> None:
    class Half:
        def grade(self, completion: str, answer: object, columns: object) -> float:
            return 0.5

    assert REWARDS["task"]("", "", {}, Half()) == {"reward": 0.5, "outcome": "wrong"}


def test_a_reasoning_gym_task_grades_its_own_rows() -> None:
    component = load_components(describe([], "reasoning_gym:basic_arithmetic"))[0]
    row = next(make_task("reasoning_gym:basic_arithmetic", {}).rows("train", 1, 0))
    columns = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
    samples = group([row["answer"], "no"], answer=row["answer"], columns=columns)
    assert component.grade_one(samples, 0) == Part(1.0, "ok")
    assert component.grade_one(samples, 1).outcome == "wrong"
