"""What is learnt of a conversation is what the assistant said, by another reckoning too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import RolloutRequest
from rlinf.envs.conversations import (
    BEGIN,
    CHATML_TEMPLATE,
    END,
    ConversationsConfig,
    ConversationsEnvironment,
)
from rlinf.errors import ConfigError, DataError

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Has no special token."""
FORGETS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes the last answer otherwise than earlier ones, as templates of reasoning models do."""
CORPUS = [
    "hello there",
    "what is the capital of France? Paris",
    "im end",
    "naïve café 12 + 30 = 42",
]
TEXT = st.one_of(
    st.sampled_from([*CORPUS, "im", "assistant", "Paris\nis\n\nlarge", "ça va?", "日本"]),
    st.text("abc +é\n", min_size=1, max_size=12).filter(lambda text: text.strip() == text != ""),
)
TALKS = st.tuples(
    st.one_of(st.none(), TEXT), st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)
)


def tokenizer(template: str | None = CHATML_TEMPLATE) -> Any:
    """One that merges characters."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    settings = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 4, settings)
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)
    found.add_special_tokens({"additional_special_tokens": [BEGIN, END]})
    found.chat_template = template
    return found


PROCESSOR = tokenizer()


def talk(system: str | None, turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for request, result in turns:
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": result})
    return messages


def task(
    folder: Path, talks: Sequence[list[dict[str, str]]], processor: Any = PROCESSOR, **options: Any
) -> ConversationsEnvironment:
    path = folder / "talks.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in talks))
    config = ConversationsConfig(train=path, test=path, **options)
    return ConversationsEnvironment(config, processor)


def whole(record: Trajectory) -> list[int]:
    return [*record.prompt.tolist(), *record.actions.tolist()]


def learnt(record: Trajectory) -> list[int]:
    return [0] * len(record.prompt) + record.mask.astype(int).tolist()


@settings(max_examples=10)
@given(st.lists(TALKS, min_size=1, max_size=6))
def test_tokens_and_masks_are_those_of_the_library(
    tmp_path_factory: pytest.TempPathFactory, talks: list[Any]
) -> None:
    """``transformers`` finds by itself what stands in the template's generation blocks."""
    conversations = [talk(*one) for one in talks]
    made = task(tmp_path_factory.mktemp("talks"), conversations)
    for messages, record in zip(conversations, made.test_demonstrations(9), strict=True):
        right = PROCESSOR.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        result = right["assistant_masks"]
        last = len(result) - result[::-1].index(1)
        # Behind the last answer nothing is learnt or needed.
        assert whole(record) == right["input_ids"][:last]
        assert learnt(record) == result[:last]
        assert PROCESSOR.decode(whole(record)).endswith(messages[-1]["content"] + END)


def test_each_turn_is_learnt_with_its_end_and_nothing_else(tmp_path: Path) -> None:
    (record,) = task(
        tmp_path, [talk("be kind", [("hello", "there"), ("im", "end")])]
    ).test_demonstrations(1)
    ids, mask = np.array(whole(record)), np.array(learnt(record), bool)
    assert PROCESSOR.decode(ids[mask]) == f"there{END}end{END}"
    assert PROCESSOR.decode(record.prompt) == (
        f"{BEGIN}system\nbe kind{END}\n{BEGIN}user\nhello{END}\n{BEGIN}assistant\n"
    )


def test_the_prompt_is_that_of_a_rollout(tmp_path: Path) -> None:
    made = task(tmp_path, [talk(None, [("hello", "there"), ("im", "end")])], train_on="last")
    (record,) = made.test_demonstrations(1)
    assert record.mask.all()
    (prompt,) = made.prompts(RolloutRequest(0, 0, "test", [0], 1, 1, 8, 1.0))
    assert record.prompt.tolist() == made.encode_prompts([prompt.model_input])[0].tolist()
    assert prompt.answer == "end"
    assert made.grade(" end\n", prompt.answer) == 1
    assert made.grade("ended", prompt.answer) == 0


def test_without_a_token_that_ends_a_turn_the_last_one_gets_the_sample_end(tmp_path: Path) -> None:
    made = task(tmp_path, [talk(None, [("hello", "there"), ("im", "end")])], tokenizer(PLAIN))
    (record,) = made.test_demonstrations(1)
    ids, mask = np.array(whole(record)), np.array(learnt(record), bool)
    assert PROCESSOR.decode(ids[mask]) == f"there\nend\n{END}"


def test_answers_that_a_template_rewrites_later_are_trained_after_their_own_prompts(
    tmp_path: Path,
) -> None:
    one, two = talk(None, [("hello", "there")]), talk(None, [("hello", "there"), ("im", "end")])
    other = tokenizer(FORGETS)
    empty = "<think>\n\n</think>\n\n"
    records = task(tmp_path, [one, two], other).test_demonstrations(9)
    assert [PROCESSOR.decode(r.actions) for r in records] == [
        f"{empty}{text}{END}" for text in ("there", "there", "end")
    ]
    assert all(record.mask.all() for record in records)
    last = PROCESSOR.decode(records[2].prompt)
    assert last.endswith(f"{BEGIN}assistant\nthere{END}\n{BEGIN}user\nim{END}\n{BEGIN}assistant\n")
    records = task(tmp_path, [one, two], other, train_on="last").test_demonstrations(9)
    assert len(records) == 2


def test_an_epoch_has_every_conversation_once(tmp_path: Path) -> None:
    made = task(tmp_path, [talk(None, [("hello", str(i))]) for i in range(6)])
    drawn = [made.demonstrations(3, step, 4) for step in range(3)]
    text = [PROCESSOR.decode(r.actions[:1]) for part in drawn for r in part]
    assert sorted(text[:6]) == sorted(text[6:]) == [str(i) for i in range(6)]
    assert text[:6] != text[6:]
    again = task(tmp_path, [talk(None, [("hello", str(i))]) for i in range(6)])
    assert [r.to_record().digest() for r in again.demonstrations(3, 1, 4)] == [
        r.to_record().digest() for r in drawn[1]
    ]


def test_long_conversations_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talks = [talk(None, [("hello", "there")]), talk(None, [("hello", "there " * 40 + "!")])]
    assert len(task(tmp_path, talks, max_length=60).test_demonstrations(9)) == 1
    assert (
        "1 of 2 problems are left out, because they are longer than task.max_length=60"
        in caplog.text
    )
    with pytest.raises(DataError, match=r"task\.test: all 2 problems, .* are longer"):
        task(tmp_path, talks, max_length=3).test_demonstrations(9)


DIALECTS: dict[str, dict[str, Any]] = {
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": "be kind"},
            {"from": "human", "value": "hello"},
            {"from": "gpt", "value": "there"},
        ]
    },
    "parts": {
        "messages": [
            {"role": "developer", "content": "be kind"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}],
            },
            {"role": "model", "content": "there"},
        ]
    },
    "trl": {
        "prompt": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
        "completion": [{"role": "assistant", "content": "there"}],
    },
    "mixed": {
        "conversation": [
            {"role": "system", "value": "be kind"},
            {"from": "user", "content": "hello"},
            {"from": "assistant", "value": "there"},
        ]
    },
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_of_chat_data_mean_the_same(tmp_path: Path, dialect: str) -> None:
    def demonstration(row: Any) -> Any:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row))
        config = ConversationsConfig(train=path, test=path)
        (found,) = ConversationsEnvironment(config, PROCESSOR).test_demonstrations(1)
        return found.to_record().digest()

    expected = demonstration({"messages": talk("be kind", [("hello", "there")])})
    assert demonstration(DIALECTS[dialect]) == expected


def test_prompt_and_completion_may_be_texts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "hello", "completion": "there"}))
    config = ConversationsConfig(train=path, test=path)
    (problem,) = ConversationsEnvironment.load_problems(config, "train")
    assert (problem.messages[0]["content"], problem.answer) == ("hello", "there")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": "a", "completion": [{"role": "user", "content": "b"}]},
            "'completion' does not",
        ),
        ({"messages": [{"role": "user"}]}, r"'messages\[0\]' is .*; expected role and content"),
        ({"messages": talk(None, [("a", "b")])[:1]}, "line 1: 'messages' does not end with"),
        ({"messages": talk(None, [("a", "b")])[1:]}, "line 1: 'messages' does not end with"),
        ({"message": []}, r"no field 'messages'; did you mean 'message'.*task\.messages_field"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'has the role "tool"'),
    ],
)
def test_malformed_rows_are_refused_by_line(tmp_path: Path, row: Any, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=words):
        ConversationsEnvironment.model_spec(ConversationsConfig(train=path, test=path))


def test_held_out_conversations_that_are_learnt_are_counted(tmp_path: Path) -> None:
    config = task(tmp_path, [talk(None, [("a", "b")])]).config
    assert ConversationsEnvironment.train_test_overlap(config) == (1, 1)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    made = task(tmp_path, [talk(None, [("a", "b")])], tokenizer(None))
    with pytest.raises(ConfigError, match=r"needs a chat template, .* has none"):
        made.test_demonstrations(1)
