"""Products that are too hard to compute mentally: the policy may call a calculator before it
answers.

The question is ``47*85=``. A message that ends in ``?`` is a call: ``47*85?`` returns its value.
Any other message is the answer. This is the smallest task with a tool; a larger one defines its own
:class:`rlinf.envs.dialogue.ToolDialogue`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.arithmetic import OPERATIONS, is_test_question
from rlinf.envs.dialogue import (
    Dialogue,
    DialogueConfig,
    DialogueEnvironment,
    ToolCall,
    ToolDialogue,
    ToolInputError,
)
from rlinf.models.base import ModelSpec
from rlinf.registry import DEMONSTRATIONS, PROMPTS, REFERENCE_ANSWERS, STEP_REWARDS, TURNS
from rlinf.seeding import generator

ALPHABET = "0123456789+-*=?:erro "
"""Characters of dialogues; the reply to a wrong call begins with ``error:``."""


class CalculatorConfig(DialogueConfig):
    """Products of numbers with ``digits`` digits."""

    max_turns: int = Field(default=3, gt=0)
    max_turn_tokens: int = Field(default=12, gt=0)
    digits: int = Field(default=2, gt=0, le=6)


class CalculatorDialogue(ToolDialogue):
    """One question; the reward of a right answer is 1."""

    def __init__(self, question: str) -> None:
        self.question, self.answer = question, calculate(question)
        self.info = {"answer": self.answer}
        self.tools = {"calculate": calculate}

    def init(self) -> Sequence[dict[str, str]]:
        return [{"role": "user", "content": f"{self.question}="}]

    def parse_calls(self, message: str) -> list[ToolCall]:
        if not message.endswith("?"):
            return []
        return [ToolCall("calculate", {"expression": message[:-1]})]

    def score_answer(self, message: str) -> float:
        return float(message == self.answer)


class CalculatorEnvironment(DialogueEnvironment):
    """Questions for a policy with a calculator."""

    Config = CalculatorConfig
    config: CalculatorConfig
    provides = frozenset({PROMPTS, STEP_REWARDS, TURNS, REFERENCE_ANSWERS, DEMONSTRATIONS})

    @classmethod
    def model_spec(cls, config: Any) -> ModelSpec:
        return {"alphabet": ALPHABET}

    def create_dialogue(self, split: str, random: np.random.Generator) -> Dialogue:
        while True:
            a, b = (int(number) for number in random.integers(10**self.config.digits, size=2))
            if is_test_question(f"{a}*{b}=") == (split == "test"):
                return CalculatorDialogue(f"{a}*{b}")

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        """Return dialogues that call the calculator and repeat its result."""
        random = generator(seed, "calculator", "demonstration", step)
        trajectories = []
        for index in range(count):
            dialogue = self.create_dialogue("train", random)
            assert isinstance(dialogue, CalculatorDialogue)
            (prompt,) = self.encode_prompts([f"{dialogue.question}="])
            texts = [f"{dialogue.question}?", dialogue.answer, dialogue.answer]
            call, tool_reply, answer = self.encode(texts)
            call, answer = self.append_end_token(call), self.append_end_token(answer)
            actions = np.concatenate([call, tool_reply, answer])
            mask = np.ones(len(actions), np.float32)
            mask[len(call) : len(call) + len(tool_reply)] = 0
            identity = RecordId(step, index)
            trajectories.append(
                Trajectory(identity=identity, actions=actions, mask=mask, prompt=prompt)
            )
        return trajectories


def calculate(expression: str) -> str:
    """Return the value of ``a*b``, ``a+b`` or ``a-b``.

    Raises:
        ToolInputError: the expression has another form.
    """
    match = re.fullmatch(r"(\d{1,12})([-+*])(\d{1,12})", expression)
    if match is None:
        raise ToolInputError("no sum")
    return str(OPERATIONS[match[2]](int(match[1]), int(match[3])))
