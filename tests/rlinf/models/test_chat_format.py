"""Prompts, answers and what ends them, by templates that do what published ones do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rlinf.errors import ConfigError, DataError
from rlinf.models.chat_format import (
    KNOWN_THINKING_MARKS,
    ChatFormat,
    ThinkingMarks,
    select_chat_template,
    split_thought,
)
from rlinf.models.chat_template import ChatMessage
from tests.rlinf.models import chat_templates as templates
from tests.rlinf.models.folders import make_tokenizer

THOUGHT = "<think>\nadd both\n</think>\n\nIt is 4."
TEMPLATES = {
    name: text
    for name, text in vars(templates).items()
    if name.isupper() and isinstance(text, str) and name != "SPLIT"
}
THINKING = ("FORGETS", "OPENS", "CLOSES", "NEXT_TURN_ENDS", "SHORTENS", "DROPS", "CHANNELS")


def talk(*words: str) -> list[ChatMessage]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(words)]


def chat(name: str, **arguments: object) -> ChatFormat:
    return ChatFormat.from_tokenizer(make_tokenizer(TEMPLATES[name]), template_kwargs=arguments)


@pytest.mark.parametrize(
    ("name", "eos", "end"),
    [
        ("CHATML", "<|endoftext|>", "<|im_end|>"),
        ("FORGETS", "<|endoftext|>", "<|im_end|>"),
        ("NEXT_TURN_ENDS", "<|endoftext|>", "<|user|>"),
        ("CHANNELS", "<|endoftext|>", "<|return|>"),
        ("TWO_ENDS", "<|endoftext|>", "<|end|>"),
        ("NESTED_ENDS", "<|im_end|>", "<|im_end|>"),
        ("DROPS", "<|endoftext|>", "<|endoftext|>"),
        ("INSTRUCTIONS", "<|endoftext|>", "<|endoftext|>"),
        ("HEADERS", "<|endoftext|>", "<|end|>"),
        ("PLAIN", "<|endoftext|>", "<|endoftext|>"),
    ],
)
def test_the_end_of_a_turn_is_what_the_template_writes_behind_an_answer(
    name: str, eos: str, end: str
) -> None:
    assert (
        ChatFormat.from_tokenizer(make_tokenizer(TEMPLATES[name], eos=eos)).end_of_turn_text == end
    )


def test_an_end_that_is_no_special_token_counts_as_well() -> None:
    specials = [text for text in templates.SPECIALS if text != "<|im_end|>"]
    made = make_tokenizer(templates.CHATML, specials=specials, plain=("<|im_end|>",))
    found = ChatFormat.from_tokenizer(made)
    assert found.end_of_turn_text == "<|im_end|>"
    assert found.decode(made("Hi<|im_end|>")["input_ids"]) == "Hi"


@pytest.mark.parametrize("name", THINKING)
def test_thoughts_are_learnt_behind_the_prompt_that_asks_for_them(name: str) -> None:
    made = chat(name)
    (turns,) = made.assistant_turns([talk("1+3?", THOUGHT)], ["row"])
    (turn,) = turns
    assert turn.completion.count("add both") == turn.completion.count("It is 4.") == 1
    assert turn.completion.index("add both") < turn.completion.index("It is 4.")
    begins = (turn.prompt + turn.completion).count("<think>")
    assert begins == (1 if name != "CHANNELS" else 0)
    if name != "CLOSES":  # there the rollout's prompt would forbid the thought
        assert [turn.prompt] == made.render_prompts([talk("1+3?")])


@pytest.mark.parametrize("name", THINKING)
def test_thoughts_of_the_past_are_the_templates_to_drop(name: str) -> None:
    """Each answer is learnt behind its own prompt, as a rollout has it."""
    made, conversation = chat(name), talk("1+3?", THOUGHT, "2+2?", THOUGHT)
    (turns,) = made.assistant_turns([conversation], ["row"])
    assert len(turns) == 2
    assert "add both" not in turns[1].prompt
    assert "It is 4." in turns[1].prompt
    assert "add both" in turns[1].completion


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_without_a_thought_is_learnt_behind_the_prompt_of_a_rollout(name: str) -> None:
    made = chat(name)
    (turns,) = made.assistant_turns([talk("Hi", "Hello.", "1+1?", "2")], ["row"])
    requests = [talk("Hi"), talk("Hi", "Hello.", "1+1?")]
    assert [turn.prompt for turn in turns] == made.render_prompts(requests)
    for turn, text in zip(turns, ("Hello.", "2"), strict=True):
        if name in ("NEXT_TURN_ENDS", "PLAIN"):
            assert turn.completion.rstrip().endswith(text)
        else:
            assert turn.completion.endswith(text + made.end_of_turn_text) or name in (
                "NESTED_ENDS",
            )


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_what_is_learnt_is_what_was_said(data: st.DataObject) -> None:
    words = st.text("ab 1\n", min_size=1, max_size=8).map(str.strip).filter(bool)
    name = data.draw(st.sampled_from(["OPENS", "NEXT_TURN_ENDS", "SHORTENS", "DROPS"]))
    thought, answer = data.draw(words), data.draw(words)
    made = chat(name)
    content = f"<think>{thought}</think>{answer}"
    ((turn,),) = made.assistant_turns([talk("Hi", content)], ["row"])
    text = turn.completion.removesuffix(made.end_of_turn_text)
    begun = "" if made.thinking_marks is None or "<think>" in text else "<think>"
    assert split_thought(begun + text, made.thinking_marks) == (thought, answer)


BEGINS_AS_A_MARK = ["<answer>12</answer>", "<tool_call>{}", "< 5", "<t", "</b>", "<thinking", ""]


@pytest.mark.parametrize("thought", ["", "<think>\nadd both\n</think>"])
@pytest.mark.parametrize("answer", BEGINS_AS_A_MARK)
@pytest.mark.parametrize("name", ["DROPS", "PLAINLY", "OPENS", "SHORTENS"])
def test_an_answer_may_begin_as_a_mark_of_thoughts_does(
    name: str, answer: str, thought: str
) -> None:
    if name == "PLAINLY":  # the prompt closes a thought that no answer is written with
        closed = "<|assistant|><think>\n\n</think>\n\n"
        text = templates.DROPS.replace("<|assistant|><think>\n", closed)
        made, thought = ChatFormat.from_tokenizer(make_tokenizer(text)), ""
    else:
        made = chat(name)
    ((turn,),) = made.assistant_turns([talk("1+3?", thought + answer)], ["row"])
    assert [turn.prompt] == made.render_prompts([talk("1+3?")])
    found_text = turn.completion.removesuffix(made.end_of_turn_text)
    assert turn.completion == found_text + made.end_of_turn_text
    assert found_text.rpartition("</think>")[2].strip() == answer
    assert ("add both" in found_text) == bool(thought)


def test_a_prompt_that_must_not_think_has_no_thoughts_to_learn() -> None:
    made = chat("OPENS", enable_thinking=False)
    (request,) = made.render_prompts([talk("1+3?")])
    assert request.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(DataError, match=r"row 3: .* closes it .*model\.chat_template_kwargs"):
        made.assistant_turns([talk("1+3?", THOUGHT)], ["row 3"])
    ((turn,),) = made.assistant_turns([talk("1+3?", "4")], ["row 3"])
    assert turn == (request, "4<|im_end|>")


@pytest.mark.parametrize(("template", "name"), [("OPENS", "enable_thinkng"), ("CHATML", "x")])
def test_an_argument_that_the_template_does_not_use_is_refused(template: str, name: str) -> None:
    words = r"model\.chat_template_kwargs\." + name + ": the chat template does not use it"
    with pytest.raises(ConfigError, match=words):
        chat(template, **{name: True})
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatFormat.from_tokenizer(make_tokenizer(), template_kwargs={"enable_thinking": True})
    with pytest.raises(ConfigError, match="does not use it"):
        chat(template, messages=[])


def test_marks_of_thoughts_stay_in_the_text_of_a_response() -> None:
    marks = KNOWN_THINKING_MARKS[1]
    made = make_tokenizer(
        templates.FORGETS.replace("</think>", marks.end).replace("<think>", marks.begin),
        specials=[*templates.SPECIALS, *marks],
    )
    found = ChatFormat.from_tokenizer(made)
    assert found.thinking_marks == marks
    text = f"{marks.begin}so{marks.end}4"
    assert found.decode(made(f"{text}<|im_end|>")["input_ids"]) == text
    assert chat("OPENS").thinking_marks == ThinkingMarks("<think>", "</think>")
    assert chat("CHATML").thinking_marks is None


@pytest.mark.parametrize("begins", [[], ["<s>"], ["<s>", "<|start|>"]])
def test_the_prefix_is_what_the_tokenizer_puts_before_a_text(begins: list[str]) -> None:
    made = make_tokenizer(begins=begins)
    right = made.convert_tokens_to_ids(begins)
    np.testing.assert_array_equal(ChatFormat.from_tokenizer(made).bos_token_ids, right)


def test_of_several_templates_the_default_one_is_taken() -> None:
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert select_chat_template(several, "model.path") == "d"
    assert select_chat_template({"default": "d", "tool_use": "t"}, "model.path") == "d"
    assert select_chat_template("t", "model.path") == "t"
    assert select_chat_template({}, "model.path") is None
    with pytest.raises(DataError, match=r"rag, and none is named default.*chat_template\.jinja"):
        select_chat_template(several[:1], "model.path")


def byte_fallback_tokenizer() -> Any:
    """A tokenizer with tokens of one byte for characters that have no token, as of Llama 2."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + list("abc")
    made = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@pytest.mark.parametrize("tokenizer", [make_tokenizer(), byte_fallback_tokenizer()])
@given(data=st.data())
def test_later_tokens_do_not_change_the_stable_text(tokenizer: Any, data: st.DataObject) -> None:
    text = data.draw(st.text("abcé€𝄞", max_size=6))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = [*tokens, *data.draw(st.lists(st.sampled_from([*tokens, tokenizer.eos_token_id])))]
    found = ChatFormat.from_tokenizer(tokenizer)
    for length in range(1, len(tokens) + 1):
        stable = found.decode_stable(tokens[:length])
        assert found.decode(tokens).startswith(stable)
        assert not stable.endswith("\ufffd")
    complete = tokenizer(f"{text}a", add_special_tokens=False)["input_ids"]
    assert found.decode_stable(complete) == text, "nothing else waits"
