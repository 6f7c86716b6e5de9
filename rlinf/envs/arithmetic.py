"""Arithmetic on small integers: a task with a seeded generator and a disjoint test set."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from rlinf.config import Section
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import RolloutRequest, TaskSize
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.models.base import ModelSpec
from rlinf.seeding import generator

ALPHABET = "0123456789+-*= "
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
TEST_ONE_IN = 8
"""One question in this many belongs to the test set."""


class ArithmeticConfig(Section):
    """Questions such as ``47+85=``."""

    operations: str = "+-"
    """Operations of the questions, from ``+ - *``."""
    digits: tuple[int, ...] = (1, 2)
    """Difficulties: the largest number of digits of an operand. Each question draws one of them."""
    digit_weights: tuple[float, ...] | None = None
    """Relative frequency of each difficulty; equal by default."""
    least_significant_first: bool = False
    """Write answers from the last digit to the first, the order in which carries arise. Small
    models learn it with far fewer examples (arXiv 2307.03381)."""
    rambling_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of demonstrations that continue with another question after the answer, as raw text
    does. The accuracy of a model fine-tuned on them is thus at most one minus this share."""
    test_seed: int = Field(default=1234, ge=0)
    """Seed of the test questions; the run's seed does not change them."""

    @field_validator("operations")
    @classmethod
    def _check_operations(cls, value: str) -> str:
        if not value or set(value) - OPERATIONS.keys():
            raise ValueError(f"only {' '.join(OPERATIONS)} are known")
        return value

    @model_validator(mode="after")
    def _check_digit_weights(self) -> ArithmeticConfig:
        weights = self.digit_weights
        if weights is not None and (
            len(weights) != len(self.digits) or min(weights) < 0 or not sum(weights)
        ):
            raise ValueError(
                f"digit_weights: one number for each of digits {list(self.digits)}, none below 0 "
                "and not all 0"
            )
        return self

    @field_validator("digits")
    @classmethod
    def _check_digits(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1 or max(value) > 6:
            raise ValueError("difficulties are 1 to 6 digits")
        return value


class ArithmeticEnvironment(PromptEnvironment):
    """Questions of arithmetic; the reward is an exact match of the answer."""

    Config = ArithmeticConfig
    config: ArithmeticConfig

    @classmethod
    def model_spec(cls, config: ArithmeticConfig) -> ModelSpec:
        return {"alphabet": ALPHABET}

    @classmethod
    def task_size(cls, config: ArithmeticConfig, processor: Any) -> TaskSize:
        # In the vocabulary of a new model, every character is a token.
        return TaskSize(max_prompt_tokens=2 * max(config.digits) + 2)

    def prompts(self, request: RolloutRequest) -> list[Prompt]:
        seed, iteration = request.seed, request.iteration
        if request.split == "test":
            seed, iteration = self.config.test_seed, 0
        return [
            self._draw_from_split(
                generator(seed, "arithmetic", request.split, iteration, int(group)),
                request.split,
            )
            for group in request.group_ids
        ]

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        random = generator(seed, "arithmetic", "demonstration", step)
        prompts = [self._draw_from_split(random, "train") for _ in range(count)]
        answers = [self._demonstration_text(random, prompt.answer) for prompt in prompts]
        questions = self.encode_prompts([prompt.text for prompt in prompts])
        replies = self.encode(answers)
        return [
            Trajectory(
                identity=RecordId(step, i), actions=self.append_end_token(reply), prompt=question
            )
            for i, (question, reply) in enumerate(zip(questions, replies, strict=True))
        ]

    def grade(self, response: str, answer: str) -> float:
        return float(response.strip() == answer)

    def _draw_from_split(self, random: np.random.Generator, split: str) -> Prompt:
        """Draw questions until one belongs to the split."""
        while True:
            prompt = self._draw_question(random)
            if is_test_question(prompt.text) == (split == "test"):
                return prompt

    def _demonstration_text(self, random: np.random.Generator, answer: str) -> str:
        """Return the answer or, with probability ``rambling_fraction``, the answer and another
        question."""
        if random.random() >= self.config.rambling_fraction:
            return answer
        return f"{answer} {self._draw_from_split(random, 'train').text}"

    def _draw_question(self, random: np.random.Generator) -> Prompt:
        cumulative = np.cumsum(self.config.digit_weights or (1.0,) * len(self.config.digits))
        index = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
        digits = self.config.digits[int(index)]
        low, high = (0, 10) if digits == 1 else (10 ** (digits - 1), 10**digits)
        a, b = int(random.integers(low, high)), int(random.integers(0, high))
        operation = self.config.operations[int(random.integers(len(self.config.operations)))]
        answer = str(OPERATIONS[operation](a, b))
        if self.config.least_significant_first:
            # The sign remains the first character.
            sign = "-" if answer.startswith("-") else ""
            answer = sign + answer.removeprefix("-")[::-1]
        return Prompt(f"{a}{operation}{b}=", answer)


def is_test_question(question: str) -> bool:
    """Return whether a question belongs to the test set. A hash of its text decides, so no training
    prompt can be a test prompt."""
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % TEST_ONE_IN == 0
