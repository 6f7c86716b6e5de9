"""What stands before a prompt and behind an answer, in rollouts and in fine-tuning alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf.channels.channel import LocalChannel
from rlinf.envs.arithmetic import ArithmeticConfig, ArithmeticEnvironment
from rlinf.envs.base import RolloutRequest
from rlinf.envs.calculator import CalculatorConfig, CalculatorEnvironment
from rlinf.envs.jsonl import JsonlConfig, JsonlEnvironment
from rlinf.envs.text_environment import TextEnvironment
from tests.rlinf.models.chat_templates import CHATML, FORGETS, HEADERS, INSTRUCTIONS, OPENS
from tests.rlinf.models.folders import make_tokenizer


def problems(folder: Path, tokenizer: Any, **options: Any) -> JsonlEnvironment:
    path = folder / "rows.jsonl"
    rows = [
        {"question": f"<s>is {n} even?" if n == 3 else f"is {n} even?", "answer": "1"}
        for n in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return JsonlEnvironment(JsonlConfig(train=path, test=path, **options), tokenizer)


def prompts_of(task: TextEnvironment) -> list[np.ndarray]:
    """The prompts of a rollout."""
    observations, actions = LocalChannel(), LocalChannel()
    actions.close()
    list(task.simulate(RolloutRequest(0, 0, "test", range(4), 4, 1, 8, 1.0), observations, actions))
    steps = observations.get().steps
    pairs = zip(steps["prompt"], steps["prompt_length"], strict=True)
    return [row[:length] for row, length in pairs]


def test_a_prompt_without_a_template_begins_with_bos_once(tmp_path: Path) -> None:
    made = make_tokenizer(begins=["<s>"])
    task = problems(tmp_path, made)
    for prompt in [*prompts_of(task), *(r.prompt for r in task.demonstrations(0, 0, 4))]:
        assert np.flatnonzero(prompt == made.bos_token_id).tolist() == [0]
    longest = max(map(len, prompts_of(task)))
    assert type(task).task_size(task.config, made).max_prompt_tokens == longest


@pytest.mark.parametrize("template", [HEADERS, INSTRUCTIONS, CHATML])
def test_a_chat_template_writes_bos_itself_or_not(tmp_path: Path, template: str) -> None:
    made = make_tokenizer(template, begins=["<s>"])
    task = problems(tmp_path, made)
    right = made.apply_chat_template(
        [{"role": "user", "content": "is 0 even?"}], add_generation_prompt=True, return_dict=False
    )
    assert prompts_of(task)[0].tolist() == right


def test_prompts_that_no_template_renders_begin_with_bos_beside_one() -> None:
    made = make_tokenizer(CHATML, begins=["<s>"])
    task = ArithmeticEnvironment(ArithmeticConfig(), made)
    for prompt in [*prompts_of(task), *(r.prompt for r in task.demonstrations(0, 0, 4))]:
        assert np.flatnonzero(prompt == made.bos_token_id).tolist() == [0]


def test_a_tokenizer_that_adds_nothing_has_prompts_without_bos(tmp_path: Path) -> None:
    made = make_tokenizer()
    assert made.bos_token_id not in prompts_of(problems(tmp_path, made))[0]


@pytest.mark.parametrize("config", [ArithmeticConfig(), CalculatorConfig()])
def test_answers_end_with_what_ends_a_turn(config: Any) -> None:
    made = make_tokenizer(CHATML)
    kinds = {ArithmeticConfig: ArithmeticEnvironment, CalculatorConfig: CalculatorEnvironment}
    for record in kinds[type(config)](config, made).demonstrations(0, 0, 3):
        assert made.decode(record.actions[-1:]) == "<|im_end|>"


def test_demonstrations_stand_behind_the_prompt_of_a_thinking_model(tmp_path: Path) -> None:
    """Where the prompt opens a thought, an answer closes it first."""
    task = problems(tmp_path, make_tokenizer(OPENS))
    (record, *_) = task.demonstrations(0, 0, 1)
    decode = task.tokenizer.decode
    assert decode(record.prompt).endswith("assistant\n<think>\n")
    assert decode(record.actions) == "\n</think>\n\n1<|im_end|>"


def test_reasoning_in_the_history_is_rendered_as_the_template_has_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    talk = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "It is 2.", "reasoning_content": "count up"},
        {"role": "user", "content": "2+2?"},
    ]
    inline = {"role": "assistant", "content": "<think>\ncount up\n</think>\n\nIt is 2."}
    rows = [{"question": [talk[0], one, talk[2]], "answer": "4"} for one in (talk[1], inline)]
    path.write_text("\n".join(map(json.dumps, rows)))
    made = make_tokenizer(FORGETS)
    task = JsonlEnvironment(JsonlConfig(train=path, test=path), made)
    one, other = (made.decode(p) for p in draw_prompts(task, 2))
    assert one == other
    assert "It is 2.<|im_end|>" in one
    assert "count up" not in one


def draw_prompts(task: TextEnvironment, count: int) -> list[np.ndarray]:
    prompts = task.prompts(RolloutRequest(0, 0, "test", range(count), count, 1, 8, 1.0))  # type: ignore[attr-defined]
    return task.encode_prompts([prompt.model_input for prompt in prompts])
