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

from rlinf.data.record import Identity, Record
from rlinf.envs.arithmetic import OPERATIONS, is_held_out
from rlinf.envs.dialogue import Call, Dialogue, DialogueConfig, DialogueEnvironment, ToolDialogue
from rlinf.fit import ANSWERS, DEMONSTRATIONS, PROMPTS, STEP_REWARDS, TURNS
from rlinf.models.base import Spec
from rlinf.seeding import generator

ALPHABET = "0123456789+-*=?:erro "


class CalculatorConfig(DialogueConfig):
    """Products of numbers of so many digits."""

    turns: int = Field(default=3, gt=0)
    turn_tokens: int = Field(default=12, gt=0)
    digits: int = Field(default=2, gt=0, le=6)


class Sum(ToolDialogue):
    """One question; the answer is worth 1 if it is right."""

    def __init__(self, question: str) -> None:
        self.question, self.answer = question, calculate(question)
        self.info = {"answer": self.answer}
        self.tools = {"calculate": calculate}

    def init(self) -> Sequence[dict[str, str]]:
        return [{"role": "user", "content": f"{self.question}="}]

    def calls(self, message: str) -> list[Call]:
        if not message.endswith("?"):
            return []
        return [Call("calculate", {"expression": message[:-1]})]

    def judge(self, message: str) -> float:
        return float(message == self.answer)


class CalculatorEnvironment(DialogueEnvironment):
    """See the module."""

    Config = CalculatorConfig
    config: CalculatorConfig
    offers = frozenset({PROMPTS, STEP_REWARDS, TURNS, ANSWERS, DEMONSTRATIONS})

    @classmethod
    def describe(cls, config: Any) -> Spec:
        return {"alphabet": ALPHABET}

    def begin(self, split: str, random: np.random.Generator) -> Dialogue:
        while True:
            a, b = (int(number) for number in random.integers(10**self.config.digits, size=2))
            if is_held_out(f"{a}*{b}=") == (split == "test"):
                return Sum(f"{a}*{b}")

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        """Dialogues that ask the calculator and repeat what it said."""
        random = generator(seed, "calculator", "demonstration", step)
        out = []
        for number in range(count):
            sum_ = self.begin("train", random)
            assert isinstance(sum_, Sum)
            parts = [f"{sum_.question}=", f"{sum_.question}?", sum_.answer, sum_.answer]
            (prompt,), (call, said, answer) = self.contexts(parts[:1]), self.encode(parts[1:])
            call, answer = self.closed(call), self.closed(answer)
            actions = np.concatenate([call, said, answer])
            mask = np.ones(len(actions), np.float32)
            mask[len(call) : len(call) + len(said)] = 0
            steps = {"actions": actions, "mask": mask}
            out.append(Record(Identity(step, number), steps, {"prompt": prompt}))
        return out


def calculate(expression: str) -> str:
    """The value of ``a*b``, ``a+b`` or ``a-b``.

    Raises:
        ValueError: it is something else.
    """
    found = re.fullmatch(r"(\d{1,12})([-+*])(\d{1,12})", expression)
    if found is None:
        raise ValueError("no sum")
    return str(OPERATIONS[found[2]](int(found[1]), int(found[3])))
