"""Multiple-choice questions: a stored order of options, letters, and malformed rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.multiple_choice import MultipleChoiceConfig, MultipleChoiceEnvironment
from rlinf.errors import DataError
from tests.rlinf.envs.test_jsonl import Words

ROWS = [
    {
        "Question": f"Which number is {i}?",
        "Correct Answer": str(i),
        **{f"Incorrect Answer {j}": str(i + j) for j in (1, 2, 3)},
    }
    for i in range(40)
]
LISTED = {"options_field": "choices", "answer_field": "answer", "prompt_field": "question"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def make(folder: Path, rows: list[dict[str, Any]], **options: Any) -> MultipleChoiceEnvironment:
    path = write(folder / "questions.jsonl", rows)
    return MultipleChoiceEnvironment(MultipleChoiceConfig(test=path, **options), Words())


def problems(folder: Path, **options: Any) -> list[tuple[str, str]]:
    path = write(folder / "questions.jsonl", ROWS)
    config = MultipleChoiceConfig(test=path, **options)
    return [
        (problem.messages[0]["content"], problem.answer)
        for problem in MultipleChoiceEnvironment.load_problems(config, "test")
    ]


def reply(environment: MultipleChoiceEnvironment, text: str, answer: str = "C") -> tuple[Any, ...]:
    trajectory = Trajectory(
        identity=RecordId(0, 0), actions=np.zeros(1, np.int64), text=text, answer=answer
    )
    counts = Counter[str]()
    (score,) = environment.score([trajectory], counts)
    return environment.final_answer(trajectory), score, counts["parse_failures"]


def test_the_order_of_options_depends_on_the_seed_and_not_on_the_place(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    questions = problems(tmp_path)
    assert questions == problems(tmp_path / "elsewhere")
    assert questions != problems(tmp_path, shuffle_seed=1)
    assert {answer for _, answer in questions} == set("ABCD")
    for i, (text, letter) in enumerate(questions):
        assert f"{letter}) {i}" in text.splitlines()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("First A seems right.\nAnswer: C", ("C", 1.0, 0)),
        ("Answer: A\nNo, wait.\nAnswer: **C**", ("C", 1.0, 0)),
        ("The answer is (c).", ("C", 1.0, 0)),
        ("Answer: $B$", ("B", 0.0, 0)),
        ("I think C.", (None, 0.0, 1)),
        ("The answer is C, and the answer is a common one.", ("C", 1.0, 0)),
        ("Answer: C\nThe other answers are wrong.", ("C", 1.0, 0)),
        ("<think>Answer: C", (None, 0.0, 1)),
    ],
)
def test_the_last_letter_in_the_form_that_was_asked_for_counts(
    tmp_path: Path, text: str, expected: tuple[Any, ...]
) -> None:
    assert reply(make(tmp_path, ROWS), text) == expected


@pytest.mark.parametrize("answer", [1, "B", "four"])
def test_options_may_be_a_list(tmp_path: Path, answer: Any) -> None:
    rows = [{"question": "2+2?", "choices": ["three", "four"], "answer": answer}]
    path = write(tmp_path / "q.jsonl", rows)
    config = MultipleChoiceConfig(test=path, **LISTED)
    (problem,) = MultipleChoiceEnvironment.load_problems(config, "test")
    assert problem.messages[0]["content"].endswith("A) three\nB) four")
    assert problem.answer == "B"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({**ROWS[0], "Incorrect Answer 2": "0"}, {}, "line 2.*both the right and a wrong option"),
        ({"Question": "?", "Correct Answer": "1"}, {}, "line 2.*no field 'Incorrect Answer 1'"),
        ({"question": "?", "choices": "ab", "answer": "a"}, LISTED, "expected a list of texts"),
        ({"question": "?", "choices": ["a", "b"], "answer": "C"}, LISTED, "neither the letter"),
    ],
)
def test_a_malformed_row_is_refused_by_line(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    good = ROWS[1] if not options else {"question": "?", "choices": ["a", "b"], "answer": 0}
    with pytest.raises(DataError, match=message):
        make(tmp_path, [good, row], **options)


def test_a_pattern_without_a_letter_is_refused() -> None:
    with pytest.raises(ValueError, match="needs exactly one group"):
        MultipleChoiceConfig(test=Path("x"), answer_pattern="Answer: [A-D]")
    with pytest.raises(ValueError, match="is no regular expression"):
        MultipleChoiceConfig(test=Path("x"), answer_pattern="(")
