"""A text task: write the digits of a number in reverse order."""

from typing import Any

import numpy as np
from pydantic import Field

from rlinf.config import Section
from rlinf.data.record import Identity, Record
from rlinf.envs.base import Episodes, Extent
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.models.base import Spec
from rlinf.seeding import generator


class ReversalConfig(Section):
    """Keys of the section ``task``, beside its name."""

    digits: int = Field(default=3, ge=1, le=6)


class Reversal(PromptEnvironment):
    Config = ReversalConfig

    @classmethod
    def describe(cls, config: ReversalConfig) -> Spec:
        """What a new model must know: the characters that are its tokens."""
        return {"alphabet": "0123456789>"}

    @classmethod
    def extent(cls, config: ReversalConfig, processor: Any) -> Extent:
        return Extent(longest_prompt=config.digits + 1)

    def prompts(self, episodes: Episodes) -> list[Prompt]:
        """One for each start; randomness has an address, so any process draws the same."""
        iteration = episodes.iteration if episodes.split == "train" else -1
        where = (episodes.seed, "reversal", episodes.split, iteration + 1)
        return [self._draw(generator(*where, int(start))) for start in episodes.starts]

    def grade(self, response: str, answer: str) -> float:
        return float(response.strip() == answer)

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        """What the warm start imitates; a task without any needs ``warm_start.max_steps=0``."""
        random = generator(seed, "reversal", "demonstration", step)
        prompts = [self._draw(random) for _ in range(count)]
        asked = self.encode([prompt.text for prompt in prompts])
        said = self.encode([prompt.answer for prompt in prompts])
        stop = self.tokenizer.eos_token_id
        return [
            Record(Identity(step, i), {"actions": np.append(said[i], stop)}, {"prompt": asked[i]})
            for i in range(count)
        ]

    def _draw(self, random: np.random.Generator) -> Prompt:
        number = "".join(map(str, random.integers(0, 10, self.config.digits)))
        return Prompt(f"{number}>", number[::-1])
