"""Mathematical answers are compared as mathematics, and no response can hang the grader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlinf.rewards.math import MathGrader, final_answer

pytest.importorskip("math_verify", reason="the extra 'math' is not installed")


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    made = MathGrader(workers=2, timeout_s=4.0)
    yield made
    made.close()


def test_equal_values_in_other_clothes(grader: MathGrader) -> None:
    pairs = [
        ("9 * 2 = 18\n#### 18", "so he has 18\n#### 18"),
        ("#### 1,000", "#### 1000"),
        (r"thus \boxed{\frac{1}{2}}", "0.5"),
        ("17", "#### 18"),
        ("no idea (((", "4"),
    ]
    assert [grade.score for grade in grader.grade(pairs)] == [1, 1, 1, 0, 0]


def test_a_response_that_hangs_the_parser_times_out_alone(grader: MathGrader) -> None:
    grades = grader.grade([("#### 3", "#### 3"), ("$9^{9^{9^{9}}}$", "4"), ("#### 5", "#### 5")])
    assert [grade.score for grade in grades] == [1, 0, 1]
    assert grades[1].outcome == "timeout"


def test_the_grader_works_on_after_a_timeout(grader: MathGrader) -> None:
    assert [g.score for g in grader.grade([(f"#### {i}", "#### 2") for i in range(4)])] == [
        0,
        0,
        1,
        0,
    ]


def test_final_answers() -> None:
    assert final_answer("a #### 12\n") == "12"
    assert final_answer("1,234,567") == "1234567"
    assert final_answer("(1, 2)") == "(1, 2)"
