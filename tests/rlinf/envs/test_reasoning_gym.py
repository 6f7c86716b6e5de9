"""Generated problems: held out from training, graded as their dataset does, asked as told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, info_fields, step_fields
from rlinf.envs.base import RolloutRequest
from rlinf.envs.reasoning_gym import (
    ReasoningGymConfig,
    ReasoningGymEnvironment,
    _entries,
    find_eval_call,
)
from rlinf.errors import ConfigError
from tests.rlinf.envs.test_jsonl import Words

pytest.importorskip("reasoning_gym")


class Talks(Words):
    """The same with a chat template."""

    chat_template: str | None = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant>"
    )
    eos_token_id = 1


def config(**keys: Any) -> ReasoningGymConfig:
    usual = {"dataset": "letter_counting", "train_size": 60, "test_size": 20}
    return ReasoningGymConfig(**{**usual, **keys})


def draw_questions(task: ReasoningGymEnvironment, split: Any, count: int) -> list[Any]:
    return list(task.prompts(RolloutRequest(3, 0, split, range(count), count, 1, 8, 1.0)))


def trajectory(prompt: Any, text: str) -> Trajectory:
    steps = {"actions": np.zeros(1, dtype=np.int64)}
    info = {**prompt.info, "text": text, "answer": prompt.answer}
    return Trajectory(identity=RecordId(0, 0), **step_fields(steps), **info_fields(info))


@pytest.mark.parametrize(
    "dataset", ["letter_counting", "gcd", "word_sorting", "prime_factorization"]
)
def test_the_datasets_answer_is_right_and_another_is_wrong(dataset: str) -> None:
    task = ReasoningGymEnvironment(config(dataset=dataset), Talks())
    counts: Counter[str] = Counter()
    for split in ("train", "test"):
        prompts = draw_questions(task, split, 10)
        right = [trajectory(prompt, f" {prompt.answer}\n") for prompt in prompts]
        wrong = [trajectory(prompt, f"{prompt.answer} or so, I think") for prompt in prompts]
        assert task.score(right, counts) == [1.0] * 10
        assert not counts
        assert task.score(wrong, Counter()) == [0.0] * 10


def test_a_response_that_the_grader_cannot_read_is_wrong_and_counted() -> None:
    task = ReasoningGymEnvironment(config(dataset="prime_factorization"), Talks())
    counts: Counter[str] = Counter()
    assert task.score([trajectory(draw_questions(task, "test", 1)[0], "no idea")], counts) == [0.0]
    assert counts == {"parse_failures": 1}


class Thinks(Talks):
    """The same whose template opens a thought, which a response then ends."""

    chat_template = f"{Talks.chat_template}<think>\n"


@pytest.mark.parametrize(
    ("tokenizer", "texts", "scores"),
    [
        (Talks(), ["<think>{0}0 or not</think>{0}", "<think>{0}</think>{0}0"], [1.0, 0.0]),
        (Talks(), ["<think>It is {0}"], [0.0]),
        (Thinks(), ["{0}0</think>{0}"], [1.0]),
        (Thinks(), ["{0}"], [0.0]),
    ],
)
def test_the_answer_stands_behind_the_thoughts(
    tokenizer: Talks, texts: list[str], scores: list[float]
) -> None:
    task = ReasoningGymEnvironment(config(dataset="gcd"), tokenizer)
    (prompt,) = draw_questions(task, "test", 1)
    counts: Counter[str] = Counter()
    responses = [trajectory(prompt, text.format(prompt.answer)) for text in texts]
    assert task.score(responses, counts) == scores
    assert counts["unfinished_thoughts"] == (scores == [0.0])


def test_a_number_that_takes_for_ever_is_a_wrong_answer() -> None:
    """Its grader computes with exact fractions."""
    task = ReasoningGymEnvironment(config(dataset="coin_flip"), Talks())
    counts: Counter[str] = Counter()
    (prompt,) = draw_questions(task, "test", 1)
    huge = [trajectory(prompt, text) for text in ("1e999999999", "1E+1_000_000", " 2e-99999")]
    assert task.score(huge, counts) == [0.0] * 3
    assert counts == {"parse_failures": 3}
    assert task.score([trajectory(prompt, prompt.answer)], counts) == [1.0]


def test_no_held_out_problem_is_trained_on() -> None:
    # Few problems differ at these settings, so that the two splits would meet.
    few = {"dataset": "gcd", "dataset_kwargs": {"max_value": 6}, "train_size": 400}
    task = ReasoningGymEnvironment(config(**few), Talks())
    held_out = {prompt.text for prompt in draw_questions(task, "test", 20)}
    size = ReasoningGymEnvironment.task_size(task.config, Talks()).train
    assert size is not None
    assert 0 < size < 400
    assert not held_out & {prompt.text for prompt in draw_questions(task, "train", size)}
    with pytest.raises(ConfigError, match=r"task\.dataset_kwargs.*also held out"):
        ReasoningGymEnvironment.load_problems(
            config(**few | {"dataset_kwargs": {"max_value": 2, "max_numbers": 2}}), "train"
        )


def test_every_problem_is_made_once() -> None:
    _entries.cache_clear()
    ReasoningGymEnvironment(config(), Talks())
    ReasoningGymEnvironment.load_problems(config(), "train")
    assert _entries.cache_info().misses == 2, "those for training, and those held out"


def test_examples_stand_before_the_question_and_are_not_asked() -> None:
    plain, shown = (
        ReasoningGymEnvironment(config(num_fewshot=n, system_prompt="be brief"), Talks())
        for n in (0, 2)
    )
    examples = ReasoningGymEnvironment.load_problems(plain.config, "train")[:2]
    (prompt,) = draw_questions(shown, "test", 1)
    opening = "<system> be brief "
    for problem in examples:
        question = problem.messages[0]["content"]
        opening += f"<user> {question} <assistant> {problem.answer} "
    assert prompt.model_input == f"{opening}<user> {prompt.text} <assistant>"
    size = ReasoningGymEnvironment.task_size(shown.config, Talks()).train
    assert size == (ReasoningGymEnvironment.task_size(plain.config, Talks()).train or 0) - 2
    texts = {p.text for p in draw_questions(shown, "train", size)}
    assert not texts & {problem.messages[0]["content"] for problem in examples}


def test_examples_need_a_chat_template() -> None:
    with pytest.raises(ConfigError, match=r"task\.num_fewshot: .*chat template"):
        ReasoningGymEnvironment(config(num_fewshot=1), Words())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset": "leter_counting"}, r"task\.dataset: .*did you mean 'letter_counting'"),
        (
            {"dataset_kwargs": {"min_word": 2}},
            r"task\.dataset_kwargs\.min_word: .*did you mean 'min_words'",
        ),
        ({"dataset_kwargs": {"min_words": 9, "max_words": 3}}, r"task\.dataset_kwargs: .*refuses"),
        ({"dataset": "countdown"}, r"task\.dataset: the grader of 'countdown' calls parse_expr"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_its_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReasoningGymEnvironment.model_spec(config(**keys))


def test_settings_may_be_lists_and_graders_that_evaluate_answers_may_be_admitted() -> None:
    evaluates = config(dataset="countdown", allow_eval_graders=True)
    assert ReasoningGymEnvironment.model_spec(evaluates) == {}
    weekdays = config(dataset="calendar_arithmetic", dataset_kwargs={"tasks": ["weekday_of_date"]})
    assert ReasoningGymEnvironment.model_spec(weekdays) == {}
    assert (
        "day of the week"
        in ReasoningGymEnvironment.load_problems(weekdays, "test")[0].messages[0]["content"]
    )


def test_graders_that_evaluate_are_found() -> None:
    from reasoning_gym.factory import DATASETS

    found = {name for name, (kind, _) in DATASETS.items() if find_eval_call(kind)}
    assert {"countdown", "puzzle24", "simple_integration", "codeio"} <= found
    assert not {"letter_counting", "gcd", "chain_sum", "spell_backward"} & found
