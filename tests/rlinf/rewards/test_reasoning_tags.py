"""What a model thinks is no answer, whichever marks its family has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.models.chat_format import ThinkingMarks
from rlinf.rewards.math_extraction import DEFAULT_TAGS, ReasoningTags

MARKS = ReasoningTags()
TEXT = st.text(st.characters(codec="ascii", exclude_characters="<>[]"), max_size=20)


@given(st.sampled_from(DEFAULT_TAGS), TEXT, TEXT)
def test_the_answer_is_behind_the_last_thought(
    pair: tuple[str, str], thought: str, answer: str
) -> None:
    opening, closing = pair
    whole = f"{opening}{thought}{closing}{answer}"
    assert MARKS.strip_reasoning(whole) == answer
    assert MARKS.strip_reasoning(f"{opening}{thought}{closing}no, {whole}") == answer


BEFORE = st.sampled_from(["", " ", "\n", "Let me see. ", "It is 6!\n\n  ", "Is it? "])


@given(st.sampled_from(DEFAULT_TAGS), TEXT, BEFORE)
def test_an_unfinished_thought_has_no_answer(
    pair: tuple[str, str], thought: str, before: str
) -> None:
    opening, closing = pair
    assert MARKS.strip_reasoning(f"{before}{opening}{thought}") is None
    assert MARKS.strip_reasoning(f"{opening}{thought}{closing}{before}{opening}") is None


@pytest.mark.parametrize("pair", DEFAULT_TAGS)
def test_a_thought_that_the_prompt_opens_ends_with_the_closing_mark(pair: tuple[str, str]) -> None:
    opening, closing = pair
    marks = ReasoningTags(starts_open=True)
    assert marks.ends_with_open_tag(f"user: 1 + 1?\nassistant: {opening}\n")
    assert not marks.ends_with_open_tag(f"{opening}{closing} user: 1 + 1?")
    assert marks.strip_reasoning(f"is it 3? {closing} 2") == " 2"
    assert marks.strip_reasoning("is it 3?") is None


def test_a_text_without_marks_is_the_answer() -> None:
    assert MARKS.strip_reasoning("The analysis shows 4.") == "The analysis shows 4."
    assert (
        ReasoningTags((ThinkingMarks("{{", "}}"),)).strip_reasoning("{{3}}4<think>") == "4<think>"
    )


@pytest.mark.parametrize(
    "answer",
    [
        "The `<think>` tag. \\boxed{5}",
        "x [THINK] \\boxed{5}",
        'Its "<thinking>" is 5',
        "(<thought>)",
    ],
)
def test_an_answer_may_mention_an_opening_mark(answer: str) -> None:
    assert MARKS.strip_reasoning(answer) == answer
    assert MARKS.strip_reasoning(f"<think>3</think>{answer}") == answer


def test_a_special_token_opens_a_thought_anywhere() -> None:
    token = "<|channel|>analysis<|message|>"
    assert MARKS.strip_reasoning(f"{token}3<|end|><|start|>assistant{token}4") is None


def test_channels_are_read_without_their_special_tokens() -> None:
    assert MARKS.strip_reasoning("analysisWe need 4.assistantfinalIt is 4.") == "It is 4."
    assert MARKS.strip_reasoning("analysisWe need 4.") is None
    assert MARKS.strip_reasoning("analysis2 + 2 is") is None
    for prose in ("analysis: 4", "analysis, so the answer is \\boxed{5}", "analysis (short) 4"):
        assert MARKS.strip_reasoning(prose) == prose
