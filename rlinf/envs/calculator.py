"""Sums too hard to do in the head: the policy may ask a calculator before it answers.

The question is ``47*85=``. A message that ends in ``?`` is a call: ``47*85?`` is answered with its
value; any other is the answer. The smallest task that needs a tool: what a larger one adds is in
its own :class:`rlinf.envs.dialogue.ToolDialogue`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from rlinf.capabilities import DEMONSTRATIONS, PROMPTS, REFERENCE_ANSWERS, STEP_REWARDS, TURNS
from rlinf.data.record import Record, RecordId
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
from rlinf.seeding import generator

ALPHABET = "0123456789+-*=?:erro "


class CalculatorConfig(DialogueConfig):
    """Products of numbers of so many digits."""

    max_turns: int = Field(default=3, gt=0)
    max_turn_tokens: int = Field(default=12, gt=0)
    digits: int = Field(default=2, gt=0, le=6)


class CalculatorDialogue(ToolDialogue):
    """One question; the answer is worth 1 if it is right."""

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
    """See the module."""

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

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        """Dialogues that ask the calculator and repeat what it said."""
        random = generator(seed, "calculator", "demonstration", step)
        out = []
        for number in range(count):
            sum_ = self.create_dialogue("train", random)
            assert isinstance(sum_, CalculatorDialogue)
            parts = [f"{sum_.question}=", f"{sum_.question}?", sum_.answer, sum_.answer]
            (prompt,), (call, said, answer) = self.encode_prompts(parts[:1]), self.encode(parts[1:])
            call, answer = self.append_end_token(call), self.append_end_token(answer)
            actions = np.concatenate([call, said, answer])
            mask = np.ones(len(actions), np.float32)
            mask[len(call) : len(call) + len(said)] = 0
            steps = {"actions": actions, "mask": mask}
            out.append(Record(RecordId(step, number), steps, {"prompt": prompt}))
        return out


def calculate(expression: str) -> str:
    """The value of ``a*b``, ``a+b`` or ``a-b``.

    Raises:
        ToolInputError: it is something else.
    """
    found = re.fullmatch(r"(\d{1,12})([-+*])(\d{1,12})", expression)
    if found is None:
        raise ToolInputError("no sum")
    return str(OPERATIONS[found[2]](int(found[1]), int(found[3])))
