"""Mathematical answers are compared as mathematics, wherever and however they are written."""

# ruff: noqa: E501
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf import package_paths
from rlinf.rewards.math_equivalence import canonical_text, grade_response
from rlinf.rewards.math_grader import MathGrader
from rlinf.rewards.math_normalization import UnparsableAnswerError
from rlinf.rewards.math_parsing import extract_answer
from tests.rlinf.rewards.labelled import Labelled, agreement, gsm8k_answers, math_pairs

pytest.importorskip("math_verify", reason="the extra 'math' is not installed")

SETS = sorted(Path(__file__).parent.glob("answers*.jsonl"))
"""Answers labelled by hand."""
GIVEN = package_paths.ROOT.parent / "shared" / "data" / "grading" / "pairs.jsonl"
"""Others, labelled elsewhere, where they are."""
REFERENCES = (
    r"\sqrt{51}", r"3\pi", r"\left(3,\frac{\pi}{2}\right)", r"\{1,2,3\}", r"[0,\infty)", "x^2+2x+1",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"(-\infty,2)\cup(3,5]", r"-\frac{1}{2}", "3+4i",
    r"\frac{\sqrt{3}}{3}", r"90^\circ", r"\text{Evelyn}", r"\text{(C)}", r"11,\! 111,\! 100", r"20\%",
    "y = 2x+3", r"1\frac{4}{5}", "52_8", "4210_{5}", r"\$32,\!348", "-2,1", "(6,31,-1)", "(1,200)",
    r"5\text{ km}", r"x \in [-2,7]", r"\sqrt[3]{4}", "2^{11}", "e^{2}", r"\log_2 3", r"\ln 2",
    "a^2-b^2", "x>3", "-1<x<2", "1:2", r"\emptyset", r"\pm 3", r"2 \pm \sqrt{5}", "(5x+3)(x-2)",
    r"\frac{3\pi}{2}", r"r^2\sin\theta", r"\infty", r"\frac{x+1}{x-1}", "3.14", r"\pi", r"\binom{7}{2}",
    r"\left\{ \frac{1}{2},3\right\}", "2t", "10^{-7}", "10^{-8}", "51", "3", "12", "1200",
)  # fmt: skip


@pytest.mark.parametrize("frame", ["{}", "thus $\\boxed{{{}}}$.", "The answer is ${}$.", "#### {}"])
def test_every_reference_is_equal_to_itself(frame: str) -> None:
    rejected = [text for text in REFERENCES if not grade_response(frame.format(text), text)]
    assert rejected == []


def test_no_reference_is_equal_to_another() -> None:
    few = (*REFERENCES[::6], "3", "51", "1200", "2", r"3\pi")
    assert [
        (given, answer)
        for answer in few
        for given in few
        if given != answer and grade_response(given, answer)
    ] == []


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        *((text, "18") for text in (
            "18 dollars", r"\$18", "**18**", "€18", r"\text{18}", "18 km/h", "$18", "18.00", "`18`",
            "18%", "1.8e1", "x = 18", r"18\text{ cm}", r"18\,\mathrm{cm}^2", "18 square meters",
            "He has 18 dollars left.", "The final answer is: **18**", r"\boxed{17}, no, \boxed{18}",
            r"\boxed{17} but #### 18", r"#### \boxed{18}", "#### Total: 18 dollars", "$18 per hour",
        )),
        (r"\frac13", r"\frac{1}{3}"), ("½", "0.5"), ("1½", r"\frac{3}{2}"), ("1e3", "1000"),
        ("2**3", "8"), ("2 ** 3", "8"), ("2^10", "1024"), ("sqrt(51)", r"\sqrt{51}"), ("√51", r"\sqrt{51}"),
        ("3*pi", r"3\pi"), ("3π", r"3\pi"), ("0.18", r"18\%"), ("18", r"18\%"), ("1,000", "1000"),
        ("18", "9*2=$<<9*2=18>>18 for $5\n#### 18"), ("18", "Tom pays $18.\n#### 18"), ("18", "a\n#### $18"),
        ("(1, 200)", "(1,200)"), ("{2,1}", r"\{1,2\}"), ("1 and 2", "1,2"), ("$x=1$ or $x=2$", "1,2"),
        (r"1\frac{1}{2}", "1.5"), ("C", r"\text{(C)}"), ("evelyn.", r"\text{Evelyn}"), ("3<x", "x>3"),
        (r"\left[\begin{matrix}1 & 2\end{matrix}\right]", r"\begin{bmatrix}1&2\end{bmatrix}"),
        ("18 thousand", "18000"), ("(3,oo)", r"(3,\infty)"), ("x>3", r"(3,\infty)"), ("0.333333", "1/3"),
        ("9+2i", r"2\cdot i + 9"), (r"\\frac{1}{2}", "0.5"),
    ],
)  # fmt: skip
def test_right_answers_in_other_clothes(response: str, answer: str) -> None:
    assert grade_response(response, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("18 or 19", "18"), ("It is 18 or 19.", "18"), ("3", r"3\pi"), (r"3\pi", "3"), ("51", r"\sqrt{51}"),
        ("1200", "(1,200)"), ("(1200)", "(1,200)"), ("(2,1)", "(1,2)"), ("(1,2]", "[1,2]"),
        (r"\boxed{18}, no, \boxed{17}", "18"), ("2t", "2"), ("5x", "5"), ("0.5%", "0.5"), ("-18", "18"),
        ("18 cents", r"\$18"), ("18 m/s", "18 km/h"), ("18 cm^3", r"18\text{ cm}^2"), ("52", "52_8"),
        ("0.0000001", "0.0000002"), ("10000000000000000000001", "10000000000000000000002"), ("y=5", "x=5"),
        (r"\{1,2,3\}", r"\{1,2\}"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        ("Bob", r"\text{Evelyn}"), ("0.33", "1/3"), ("18 to 20", "#### 20"), ("#### 17 of 18 apples", "18"),
    ],
)  # fmt: skip
def test_wrong_answers_that_look_right(response: str, answer: str) -> None:
    try:
        right = grade_response(response, answer)
    except UnparsableAnswerError:
        right = False
    assert not right


@pytest.mark.parametrize(
    "text", ["", "no idea (((", "#### ", r"\boxed{}", "#### " + "1+" * 2000 + "1"]
)
def test_what_has_no_answer_is_said_to_have_none(text: str) -> None:
    with pytest.raises(UnparsableAnswerError):
        extract_answer(text)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### Step 1: Multiply\n6*7 = 42\n\n#### Step 2: Conclude\nThe final answer is 42.", "42"),
        ("The result is \\boxed{42}.\n\n#### Check 3\nIt is fine.", "42"),
        ("#### Conclusion\nThe answer is **7**.", "7"),
        ("#### 2. Multiply\n3*4\n#### 12\nI hope this helps.", "12"),
        ("The final answer is:\n\n42", "42"),
        ("The final answer is:\n\n$$x = 42$$", "42"),
        ("So the answer is:\n\\[ \\frac{1}{2} \\]", "1/2"),
        ("The answer is:\n\n$$\nx = 42\n$$\nDone.", "42"),
    ],
)
def test_headings_and_answers_on_a_line_of_their_own(response: str, answer: str) -> None:
    assert grade_response(response, answer)
    assert not grade_response(response, "2")


JOINED = [
    ("A and C", "A, C", ("A", "C", "A and B", "A, B, C")),
    ("white and blue", "white, blue", ("blue", "white and red", "white, blue and red")),
    ("b and c", "b, c", ("b", "c", "b and d")),
    ("true or false", "true, false", ("true", "false", "true and false")),
]


@pytest.mark.parametrize(("joined", "commas", "wrong"), JOINED)
@pytest.mark.parametrize("frame", ["\\boxed{{{}}}", "The answer is {}.", "**{}**", "{}"])
def test_joined_letters_and_words_are_several_answers(
    joined: str, commas: str, wrong: tuple[str, ...], frame: str
) -> None:
    reordered = ", ".join(reversed(commas.split(", ")))
    for reference in (joined, commas, reordered):
        for given in (joined, commas, reordered):
            assert grade_response(frame.format(given), reference), (given, reference)
    for given in wrong:
        assert not _is_right(frame.format(given), joined), given


def test_three_words_are_several_answers_in_any_order() -> None:
    for reference in ("red, white, and blue", "blue, red, white"):
        for given in ("Red, white, and blue", "white, blue, red"):
            assert grade_response(rf"\boxed{{{given}}}", reference)
        assert not _is_right(r"\boxed{red and blue}", reference)


def _is_right(response: str, answer: str) -> bool:
    try:
        return grade_response(response, answer)
    except UnparsableAnswerError:
        return False


@pytest.mark.parametrize(
    "response",
    [
        "It is salt and pepper.",
        r"\boxed{pepper and salt}",
        "The answer is salt and pepper, I think.",
    ],
)
def test_a_phrase_with_and_is_still_found_in_a_sentence(response: str) -> None:
    assert grade_response(response, "salt and pepper")
    assert grade_response(response, "(B) salt and pepper")


def test_the_last_mark_is_the_answer_and_without_one_the_whole_text() -> None:
    assert grade_response("a #### 12\n", "12")
    assert grade_response("(1, 2)", "(1, 2)")


@pytest.mark.parametrize(
    "joint", [" and ", " or ", ", ", ", and ", "$ or $", r"\) or \(", r" \text{ or } ", r",\quad "]
)
def test_joined_boxes_are_several_answers_and_not_the_last_one(joint: str) -> None:
    boxes = joint.join((r"\boxed{3}", r"\boxed{\frac{1}{2}}"))
    assert not grade_response(f"${boxes}$.", "1/2")
    assert not grade_response(f"${boxes}$.", "3")
    assert grade_response(f"${boxes}$.", "1/2, 3")
    assert grade_response(r"\boxed{3, 0.5}", f"${boxes}$")
    assert not grade_response(joint.join(rf"\boxed{{{i}}}" for i in range(1, 4)), "3")


def test_a_box_that_replaces_another_is_the_answer() -> None:
    assert grade_response(r"\boxed{3}, no, it is \boxed{4}", "4")
    assert grade_response("\\boxed{3}\n\\boxed{4}", "4")


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    made = MathGrader(workers=2, timeout_s=30.0)
    yield made
    made.close()


def _agreement(grader: MathGrader, labelled: list[Labelled]) -> float:
    grades = grader.grade([(item.response, item.answer) for item in labelled])
    return agreement(labelled, [grade.score for grade in grades])


def _wrong_grades(grader: MathGrader, path: Path) -> tuple[int, list[str], list[str]]:
    """How many pairs a file has, and those that are accepted and rejected against their labels."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    grades = grader.grade([(row["response"], row["reference"]) for row in rows])
    shown = [
        (row["right"], grade.score == 1, f"{row['response']!r} for {row['reference']!r}")
        for row, grade in zip(rows, grades, strict=True)
    ]
    accepted = [text for right, accept, text in shown if accept and not right]
    rejected = [text for right, accept, text in shown if right and not accept]
    return len(rows), accepted, rejected


@pytest.mark.parametrize("path", [*SETS, *[GIVEN] * GIVEN.exists()], ids=lambda path: path.name)
def test_labelled_endings_choices_and_numbers(grader: MathGrader, path: Path) -> None:
    count, accepted, rejected = _wrong_grades(grader, path)
    assert len(accepted) <= count // 400, accepted
    assert len(accepted) + len(rejected) <= count // 100, (accepted, rejected)


def test_every_labelled_reference_is_right_for_itself(grader: MathGrader) -> None:
    rows = [json.loads(line) for path in SETS for line in path.read_text().splitlines()]
    references = sorted({row["reference"] for row in rows if "\n" not in row["reference"]})
    grades = grader.grade([(f"\\boxed{{{text}}}", text) for text in references])
    rejected = [t for t, grade in zip(references, grades, strict=True) if grade.score != 1]
    assert rejected == []


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("1.7e-19", "1.6e-19", False),
        ("1.60e-19", "1.6e-19", True),
        (r"1.7\times10^{-19}", r"1.6\times10^{-19}", False),
        ("99999.999", "100000", False),
        ("0.142857", "1/7", True),
        ("0.1429", "1/7", False),
        (r"10^{-20}\pi", r"2\cdot 10^{-20}\pi", False),
        ("10", "10!", False),
        (r"\boxed{10!}", "10", False),
        ("It is 10!", "10!", True),
        ("It is 10!", "10", True),
    ],
)
def test_numbers_are_compared_exactly_or_relatively(
    response: str, answer: str, right: bool
) -> None:
    assert grade_response(response, answer) == right


def test_labelled_answers_in_forty_surface_forms(grader: MathGrader) -> None:
    assert _agreement(grader, gsm8k_answers()) >= 0.995


def test_a_part_of_the_labelled_pairs_of_expressions(grader: MathGrader) -> None:
    assert _agreement(grader, math_pairs(84, seed=1)) >= 0.985


@pytest.mark.slow
def test_all_labelled_pairs_of_expressions(grader: MathGrader) -> None:
    pairs = math_pairs()
    assert len(pairs) == 500
    assert sum(pair.right for pair in pairs) == 250
    assert _agreement(grader, pairs) >= 0.995


@pytest.mark.parametrize(
    "texts",
    [
        (r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{\frac12}", "The answer is 0.50."),
        (r"\boxed{18}", r"\boxed{\$18.00}", "#### 18", r"\boxed{x = 18}", "So it is 18 dollars."),
        (r"\boxed{1,000}", r"\boxed{1000}"),
        (r"\boxed{-\frac{3}{6}}", r"\boxed{-1/2}"),
        (r"\boxed{1, 2}", r"\boxed{2,1}", r"\boxed{\{1.0, 2\}}"),
        (r"\boxed{x + 1}", r"\boxed{x+1}"),
    ],
)
def test_equal_answers_have_one_canonical_text(texts: tuple[str, ...]) -> None:
    assert len({canonical_text(extract_answer(text)) for text in texts}) == 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\boxed{0.33}", r"\boxed{1/3}"),
        (r"\boxed{(1, 2)}", r"\boxed{(2, 1)}"),
        (r"\boxed{(1, 2)}", r"\boxed{[1, 2]}"),
        (r"\boxed{x=1, y=2}", r"\boxed{x=2, y=1}"),
        (r"\boxed{12}", r"\boxed{1, 2}"),
    ],
)
def test_different_answers_have_different_canonical_texts(left: str, right: str) -> None:
    assert canonical_text(extract_answer(left)) != canonical_text(extract_answer(right))
