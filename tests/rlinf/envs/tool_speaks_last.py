"""A task whose trajectories end on a step that does not count: a tool has the last word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rlinf.channels.channel import Channel
from rlinf.data.record import Record
from rlinf.envs.arithmetic import ArithmeticEnvironment
from rlinf.envs.base import RolloutRequest
from rlinf.envs.text_environment import Prompt


class ToolSpeaksLast(ArithmeticEnvironment):
    """After each response a tool says something; a response is worth its share of digits.

    The first sample of an iteration has no step that counts at all.
    """

    def simulate(
        self, episodes: RolloutRequest, observations: Channel, actions: Channel
    ) -> Iterator[Record]:
        for made in super().simulate(episodes, observations, actions):
            mask = np.full(len(made) + 1, float(made.identity.sample != 0), np.float32)
            mask[-1] = 0
            settings = {"actions": 3, "logprobs": 0.0}
            steps = {
                name: np.append(column, np.asarray(settings[name], column.dtype))
                for name, column in made.steps.items()
            }
            yield replace(made, steps={**steps, "mask": mask})

    def prompts(self, episodes: RolloutRequest) -> list[Prompt]:
        return [replace(p, info={"hint": p.text[::-1]}) for p in super().prompts(episodes)]

    def grade(self, response: str, answer: str) -> float:
        return sum(c.isdigit() for c in response) / max(1, len(response))
