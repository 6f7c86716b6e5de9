"""A simulator with vectors of three, and a policy that says what it thinks of each number."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from torch import Tensor

from rlinf.models.actor_critic import MLPPolicy
from rlinf.models.base import Batch, StepOutputs


class Reaching(gymnasium.Env[np.ndarray, np.ndarray]):
    """An action is to be what was seen; episodes have eight steps."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = Box(-3, 3, (3,))
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._drawn(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        reward = -float(np.square(action - self.wanted).sum())
        return self._drawn(), reward, self.steps == 8, False, {}

    def _drawn(self) -> np.ndarray:
        self.wanted = self.np_random.normal(size=3).astype(np.float32)
        return self.wanted


gymnasium.register("Reaching-v0", Reaching)


class PerNumber(MLPPolicy):
    """Log-probabilities and entropies of each number of an action: ``[..., 3]``."""

    def logprobs_and_entropy(
        self, out: Tensor, log_std: Tensor, actions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scale = log_std.expand_as(out)
        logprobs = -0.5 * ((actions - out) / scale.exp()) ** 2 - scale - math.log(2 * math.pi) / 2
        return logprobs, scale + math.log(2 * math.pi * math.e) / 2

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        out, log_std, values = self.module(batch["observations"])
        logprobs, spread = self.logprobs_and_entropy(out, log_std, batch["actions"], temperature)
        mask = batch["mask"][..., None]
        return StepOutputs(
            logprobs * mask, spread * mask if entropy else None, values * batch["mask"]
        )
