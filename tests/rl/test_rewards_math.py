"""Mathematical equivalence, each pair as reference and as answer, boxed and in free text."""

from __future__ import annotations

import pytest

from rl.rewards import REWARDS, Unscorable
from rl.rewards.maths import last_boxed

math = REWARDS["math"]
FORMS = (r"so it is \boxed{%s} in all", "We saw 17 before. The answer is %s.", "**%s**", "$%s$")

EQUAL = [
    ("1/2", "0.5"),
    ("**73**", "73"),
    (r"\text{13}", "13"),
    ("1,234", "1234"),
    ("1,234,567", "1234567"),
    (r"1{,}234", "1234"),
    ("50%", "0.5"),
    (r"50\%", r"\frac{1}{2}"),
    (r"12.5\%", "1/8"),
    ("4 or 5", "5 or 4"),
    (r"\{1,2\}", "{2,1}"),
    ("(0,1)", "(0,1.0)"),
    ("1:00", "01:00"),
    ("2^10", "1024"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("x=5", "5"),
    (r"\frac{63}{400}", "63/400"),
]
UNEQUAL = [
    ("2^-99", "2^-98"),
    ("2^{-99}x", "2^{-98}x"),
    ("10^{-7}", "10^{-8}"),
    ("0.0000001", "0.0000002"),
    ("{2,3,4}", "{1,2,3}"),
    (r"\{2,3,4\}", r"\{1,2,3\}"),
    ("(0,1)", "(0,1.5)"),
    ("(0,1)", r"\{0,1\}"),
    ("(0,1)", "[0,1]"),
    ("1:00", "12:00"),
    ("1:2", "0.5"),
    ("1,234", "1.234"),
    ("4 or 5", "4"),
    ("4 or 5", "5"),
    (r"4\text{ or }5", "4"),
    ("50%", "50"),
    ("1234567", "1234568"),
    ("1,2", "1"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_in_both_directions(one: str, other: str, form: str) -> None:
    assert math(form % other, one)
    assert math(form % one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_unequal_in_both_directions(one: str, other: str, form: str) -> None:
    assert not math(form % other, one)
    assert not math(form % one, other)


@pytest.mark.parametrize("gold", ["", "see proof", None, "  ", r"\text{Evelyn}", "yes", True, "$$"])
@pytest.mark.parametrize("completion", [r"\boxed{1}", "", r"\boxed{see proof}", r"\boxed{}"])
def test_a_reference_that_is_no_mathematics_is_unscorable(gold: object, completion: str) -> None:
    with pytest.raises(Unscorable, match="reference answer"):
        math(completion, gold)


@pytest.mark.parametrize("gold", ["6", r"\frac{63}{400}", 6, 0.25, "$12$", r"\sin x", "xyz", r"5\text{ cm}"])
def test_a_wrong_answer_is_wrong_and_the_reference_itself_right(gold: object) -> None:
    assert math(r"\boxed{12345}", gold) is False
    assert math("", gold) is False
    assert math(rf"\boxed{{{gold}}}", gold) is True


def test_the_last_complete_box_is_read() -> None:
    assert math(r"\boxed{1} no, \boxed{2}", "2")
    assert not math(r"\boxed{1} no, \boxed{2}", "1")
    assert math(r"\boxed{7} and then it was cut \boxed{8", "7")
    assert math(r"\boxed{7}, and 9 is another number", "7")
    assert not math(r"\boxed{nothing} 7", "7")
    assert last_boxed(r"\boxed{\{1, \frac{2}{3}\}}") == r"\{1, \frac{2}{3}\}"


def test_free_text_counts_by_its_last_expression() -> None:
    assert math("First 3, then 4, so 12", "12")
    assert not math("First 3, then 4, so 12", "4")
    assert not math("It is 4 or 5.", "5")
