"""A job's id is found in whatever else a site's sbatch prints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.records import UnreadableSubmission, parse_submitted_id
from tests.slurm.wrapped import wrap

SENTENCES = (
    "{id}",
    "{id};hill",
    "Submitted batch job {id}",
    "Submitted batch job {id} on cluster x",
)


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("around", ["{}", "{}\n", "\n\n{}\r\n", "\x1b[32m{}\x1b[0m\n"])
def test_the_answers_of_sbatch_itself(sentence: str, around: str) -> None:
    assert parse_submitted_id(around.format(sentence.format(id=123))) == "123"


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_banner_before_and_behind_is_passed_over(sentence: str) -> None:
    assert parse_submitted_id(wrap(sentence.format(id=8123))) == "8123"


WORDS = st.lists(
    st.text(st.characters(categories=["L", "N", "P", "Zs"])).filter(
        lambda line: not line.strip().isdigit() and "job" not in line.lower() and ";" not in line
    )
)


@given(WORDS, WORDS, st.integers(1, 2**31), st.sampled_from(SENTENCES))
def test_no_lines_around_it_change_the_id(
    before: list[str], behind: list[str], number: int, sentence: str
) -> None:
    answer = "\n".join([*before, sentence.format(id=number), *behind])
    assert parse_submitted_id(answer) == str(number)


def test_the_sentence_counts_more_than_a_number_alone() -> None:
    assert parse_submitted_id("2026\nSubmitted batch job 7\n500") == "7"


def test_of_several_numbers_the_queue_tells_which_is_the_job() -> None:
    assert parse_submitted_id("2026\n12\n", lambda: ["12"]) == "12"
    assert parse_submitted_id("2026\n12\n", lambda: ["12+0", "12+1"]) == "12"
    assert parse_submitted_id("12\n12\n", lambda: pytest.fail("not asked")) == "12"


@pytest.mark.parametrize("marked", [[], ["12", "2026"]])
def test_several_numbers_that_cannot_be_told_apart_are_no_id(marked: list[str]) -> None:
    with pytest.raises(UnreadableSubmission, match=r"several numbers \(2026, 12\): .*2026"):
        parse_submitted_id("2026\n12\n", lambda: marked)


@pytest.mark.parametrize("answer", ["", "\n", "Welcome", "job twelve", "Submitted batch job", "-5"])
def test_an_answer_without_an_id_is_shown(answer: str) -> None:
    with pytest.raises(UnreadableSubmission) as raised:
        parse_submitted_id(answer)
    assert "no job id" in str(raised.value)
    assert repr(answer.strip()) in str(raised.value)


def test_of_a_long_answer_the_beginning_is_shown() -> None:
    with pytest.raises(UnreadableSubmission) as raised:
        parse_submitted_id("quota " * 10_000)
    assert len(str(raised.value)) < 2000
