"""The arithmetic task: right answers, disjoint splits, the same questions for the same address."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from rlinf.envs.arithmetic import ArithmeticConfig, ArithmeticEnvironment, is_test_question
from rlinf.envs.base import RolloutRequest
from rlinf.models.character_tokenizer import write_character_tokenizer
from rlinf.models.hf_folder import HFFolder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer("0123456789+-*= ", folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return HFFolder(folder).tokenizer


def make(tokenizer: Any, **options: Any) -> ArithmeticEnvironment:
    return ArithmeticEnvironment(ArithmeticConfig(**options), tokenizer)


def episodes(split: Literal["train", "test"], seed: int = 0, count: int = 300) -> RolloutRequest:
    return RolloutRequest(seed, 2, split, range(count), count, 1, 8, 1.0)


def test_answers_are_right(tokenizer: Any) -> None:
    for prompt in make(tokenizer, operations="+-*", digits=(1, 3)).prompts(episodes("train")):
        assert eval(prompt.text.rstrip("=")) == int(prompt.answer)


def test_least_significant_first_turns_digits_and_keeps_the_sign(tokenizer: Any) -> None:
    task = make(tokenizer, operations="-", digits=(2,), least_significant_first=True)
    for prompt in task.prompts(episodes("train")):
        a, b = prompt.text.rstrip("=").split("-")
        want = str(abs(int(a) - int(b)))[::-1]
        assert prompt.answer == ("-" if int(a) < int(b) else "") + want


def test_no_training_question_is_held_out(tokenizer: Any) -> None:
    task = make(tokenizer)
    train = {p.text for p in task.prompts(episodes("train", count=2000))}
    test = {p.text for p in task.prompts(episodes("test"))}
    assert not train & test
    assert all(is_test_question(text) for text in test)
    shown = task.demonstrations(0, 0, 200)
    questions = {tokenizer.decode(record.prompt) for record in shown}
    assert not questions & test


def test_held_out_questions_do_not_depend_on_the_run(tokenizer: Any) -> None:
    task = make(tokenizer)
    assert task.prompts(episodes("test", seed=1)) == task.prompts(episodes("test", seed=2))
    assert task.prompts(episodes("train", seed=1)) != task.prompts(episodes("train", seed=2))


def test_a_worker_asks_the_questions_of_its_starts(tokenizer: Any) -> None:
    task = make(tokenizer)
    whole = task.prompts(episodes("train", count=10))
    part = RolloutRequest(0, 2, "train", range(1, 10, 3), 10, 1, 8, 1.0)
    assert task.prompts(part) == whole[1::3]


def test_rambling_demonstrations_begin_with_the_answer(tokenizer: Any) -> None:
    rambling = 0
    for record in make(tokenizer, rambling_fraction=0.5).demonstrations(0, 0, 400):
        question = tokenizer.decode(record.prompt).rstrip("=")
        text = tokenizer.decode(record.actions, skip_special_tokens=True)
        answer, _, more = text.partition(" ")
        assert int(answer) == eval(question)
        assert record.actions[-1] == tokenizer.eos_token_id
        rambling += bool(more)
        assert not more or not is_test_question(more), (
            "what is shown in passing is training data too"
        )
    assert 0.4 < rambling / 400 < 0.6


def test_grading_is_exact(tokenizer: Any) -> None:
    task = make(tokenizer)
    assert task.grade(" 46", "46") == 1.0
    assert task.grade("46 12+", "46") == 0.0


def test_texts_survive_encoding(tokenizer: Any) -> None:
    task = make(tokenizer, operations="+-*", digits=(1, 2, 3))
    for prompt in task.prompts(episodes("train")):
        for text in (prompt.text, prompt.answer):
            (ids,) = task.encode([text])
            assert len(ids) == len(text)
            assert tokenizer.decode(ids) == text
