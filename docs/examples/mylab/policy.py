"""A linear policy and value function for vector observations and discrete actions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributions import Categorical

from rlinf.data.batch import pad_right
from rlinf.data.trajectory import Trajectory
from rlinf.models.base import Batch, ModelSpec, Policy, StepOutputs
from rlinf.registry import OBSERVATIONS, SINGLE_PASS_ACTIONS, VALUE_ESTIMATES
from rlinf.safetensors_io import load_tensors


class Linear(Policy):
    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, VALUE_ESTIMATES})

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.module = nn.Linear(spec["observation"], spec["action"]["size"] + 1)

    @classmethod
    def create(cls, config: Any, spec: ModelSpec, seed: int, folder: Path) -> None:
        cls(spec).save(folder, {n: t.zero_() for n, t in cls(spec).module.state_dict().items()})

    @classmethod
    def load(cls, folder: Path, config: Any) -> "Linear":
        policy = cls(json.loads((folder / "spec.json").read_text()))
        policy.module.load_state_dict(load_tensors(folder / "weights.safetensors"))
        return policy

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        (folder / "spec.json").write_text(json.dumps(self.spec))
        save_file(tensors, folder / "weights.safetensors")

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        return random.gumbel(size=(steps, self.spec["action"]["size"])).astype(np.float32)

    def act(self, observations: Batch, noise: Any, temperature: float) -> Batch:
        policy, value = self._heads(observations["observation"], temperature)
        action = (policy.logits if noise is None else policy.logits + noise).argmax(-1)
        return {"action": action, "logprob": policy.log_prob(action), "value": value}

    def collate(self, trajectories: list[Trajectory]) -> Batch:
        length = max(map(len, trajectories))
        columns = {
            "observations": [t.observations for t in trajectories],
            "actions": [t.actions for t in trajectories],
            "mask": [np.ones(len(t), np.float32) for t in trajectories],
        }
        return {name: pad_right(arrays, length) for name, arrays in columns.items()}

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        policy, values = self._heads(batch["observations"], temperature)
        logprobs = policy.log_prob(batch["actions"])
        return StepOutputs(logprobs, policy.entropy() if entropy else None, values)

    def _heads(self, observations: Tensor, temperature: float) -> tuple[Categorical, Tensor]:
        outputs = self.module(observations.float())
        return Categorical(logits=outputs[..., :-1] / (temperature or 1.0)), outputs[..., -1]
