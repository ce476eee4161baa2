"""What ends an answer, and what graders see of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.chat import decode, encode_far_too_long, render, stop_token_ids
from rl.config import Settings
from tests.rl.tokenizers_made import characters

EOS, THINK = 1, 3


def ids_of(text: str) -> list[int]:
    return characters(adds_bos=False)(text, add_special_tokens=False)["input_ids"]


def folder(path: Path, **files: dict[str, object]) -> str:
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


def test_every_token_that_ends_an_answer_is_found_once_and_in_order(tmp_path: Path) -> None:
    made = folder(
        tmp_path / "a",
        generation_config={"eos_token_id": [40, 1, 41]},
        config={"eos_token_id": 42, "text_config": {"eos_token_id": [43, 40]}},
    )
    assert stop_token_ids(made, characters(adds_bos=False)) == (EOS, 40, 41, 42, 43)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (EOS,)),
        ({"config": {"eos_token_id": None}}, (EOS,)),
        ({"generation_config": {"eos_token_id": 9}}, (EOS, 9)),
        ({"config": {"text_config": None, "eos_token_id": 0}}, (EOS, 0)),  # 0 is a token like any other
    ],
)
def test_files_may_be_silent_about_it(tmp_path: Path, files: dict[str, dict[str, object]], expected: tuple[int, ...]):
    assert stop_token_ids(folder(tmp_path / "a", **files), characters(adds_bos=False)) == expected


def test_a_tokenizer_without_eos_leaves_it_to_the_files(tmp_path: Path) -> None:
    tokenizer = characters(adds_bos=False)
    tokenizer.eos_token = None
    assert stop_token_ids(folder(tmp_path / "a"), tokenizer) == ()
    assert stop_token_ids(folder(tmp_path / "b", config={"eos_token_id": 5}), tokenizer) == (5,)


def test_graders_never_see_the_token_that_stopped_the_answer() -> None:
    tokenizer, stops = characters(adds_bos=False), (EOS, ids_of("!")[0])
    assert decode(tokenizer, [*ids_of("42"), EOS], False, stops) == "42"
    assert decode(tokenizer, [*ids_of("42"), EOS], True, stops) == "42"
    assert decode(tokenizer, ids_of("42!"), True, stops) == "42", "a stop token that is no special token"
    assert decode(tokenizer, ids_of("4!2"), True, stops) == "4!2", "only at the end"
    assert decode(tokenizer, [EOS], True, stops) == decode(tokenizer, [], True, stops) == ""


def test_special_tokens_within_an_answer_are_shown_only_when_asked_for() -> None:
    tokenizer = characters(adds_bos=False)
    answer = [THINK, *ids_of("a"), EOS, *ids_of("b"), EOS]
    assert decode(tokenizer, answer, True, (EOS,)) == "<think>a</s>b"
    assert decode(tokenizer, answer, False, (EOS,)) == "ab"


def test_the_setting_reaches_the_graders() -> None:
    """R11: a reward on <think> must be able to see it."""
    from actors.launch import text_of

    tokenizer, answer = characters(adds_bos=False), [THINK, *ids_of("a"), EOS]

    def seen(keep: bool) -> str:
        import numpy as np

        made = {"train": {"steps": 1}, "grading": {"keep_special_tokens": keep}}
        return text_of(Settings.model_validate(made), tokenizer, (EOS,))(np.asarray(answer, np.int32))

    assert seen(True) == "<think>a" and seen(False) == "a"


def test_white_space_survives_the_way_back() -> None:
    tokenizer = characters(adds_bos=False)
    text = " a , b .  c 's"
    assert decode(tokenizer, ids_of(text), False, (EOS,)) == text


def test_a_text_that_spells_its_bos_does_not_get_a_second_one() -> None:
    tokenizer = characters(adds_bos=True)
    assert render(tokenizer, "<s>ab", None)[1] == render(tokenizer, "ab", None)[1] == [0, *ids_of("ab")]
    assert render(tokenizer, "ab", True) == ("<s><u>ab<a>", [0, *ids_of("<u>ab<a>")])


def test_the_end_of_a_huge_text_is_that_of_the_whole() -> None:
    tokenizer = characters(adds_bos=False)
    text = "ab" * 100_000 + "xyz"
    found = encode_far_too_long(tokenizer, text, 5)
    assert found == (200_003, ids_of("abxyz")) and encode_far_too_long(tokenizer, "ab" * 100, 5) is None
