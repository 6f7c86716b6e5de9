"""A text task: write the digits of a number in reverse order."""

from typing import Any

import numpy as np
from pydantic import Field

from rlinf.config import Section
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import RolloutRequest, TaskSize
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.models.base import ModelSpec
from rlinf.seeding import generator


class ReversalConfig(Section):
    """Keys of the section ``task`` besides its name."""

    digits: int = Field(default=3, ge=1, le=6)


class Reversal(PromptEnvironment):
    Config = ReversalConfig

    @classmethod
    def model_spec(cls, config: ReversalConfig) -> ModelSpec:
        """Return the properties of a new model: the characters that are its tokens."""
        return {"alphabet": "0123456789>"}

    @classmethod
    def task_size(cls, config: ReversalConfig, processor: Any) -> TaskSize:
        return TaskSize(max_prompt_tokens=config.digits + 1)

    def prompts(self, request: RolloutRequest) -> list[Prompt]:
        """Return a prompt for each group. It depends only on the generator's address."""
        iteration = request.iteration if request.split == "train" else -1
        address = (request.seed, "reversal", request.split, iteration + 1)
        return [self._draw(generator(*address, int(group))) for group in request.group_ids]

    def grade(self, response: str, answer: str) -> float:
        return float(response.strip() == answer)

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        """Return episodes for SFT. Without any, set ``sft.max_steps=0``."""
        random = generator(seed, "reversal", "demonstration", step)
        prompts = [self._draw(random) for _ in range(count)]
        questions = self.encode([prompt.text for prompt in prompts])
        answers = self.encode([prompt.answer for prompt in prompts])
        actions = [np.append(answer, self.tokenizer.eos_token_id) for answer in answers]
        return [
            Trajectory(identity=RecordId(step, i), actions=actions[i], prompt=questions[i])
            for i in range(count)
        ]

    def _draw(self, random: np.random.Generator) -> Prompt:
        number = "".join(map(str, random.integers(0, 10, self.config.digits)))
        return Prompt(f"{number}>", number[::-1])
