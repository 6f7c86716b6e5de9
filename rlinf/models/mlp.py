"""Small actor-critic networks for vector observations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import Batch, Policy, Spec, StepOutputs, pad

WEIGHTS, SETTINGS = "model.safetensors", "config.json"


class MLPConfig(Section):
    """Two hyperbolic-tangent networks of equal shape, one for the policy, one for the value."""

    hidden: tuple[int, ...] = (64, 64)
    normalise_observations: bool = False
    """Standardise observations by running statistics, which travel with the weights."""
    initial_log_std: float = 0.0
    """Of a Gaussian policy; it is learned, the same for all states."""
    observation_clip: float = Field(default=10.0, gt=0)


class ActorCritic(nn.Module):
    """From observations ``[..., D]`` to action parameters ``[..., A]`` and values ``[...]``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        size, out = settings["observation"], settings["action"]["size"]
        self.policy = _network([size, *settings["hidden"], out], gain=0.01)
        self.value = _network([size, *settings["hidden"], 1], gain=1.0)
        self.log_std = nn.Parameter(torch.full((out,), float(settings["initial_log_std"])))
        self.log_std.requires_grad_(settings["action"]["kind"] == "box")
        self.clip = float(settings["observation_clip"])
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("square", torch.ones(size, dtype=torch.float64))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Action parameters, log standard deviations and values."""
        deviation = self.square.clamp(min=1e-8).sqrt()
        scaled = ((observations - self.mean) / deviation).float().clamp(-self.clip, self.clip)
        return self.policy(scaled), self.log_std, self.value(scaled)[..., 0]


class MLPPolicy(Policy):
    """A policy whose steps are the actions of an episode."""

    Config = MLPConfig
    module: ActorCritic

    def __init__(self, module: ActorCritic, settings: dict[str, Any]) -> None:
        self.module = module
        self.settings = settings

    @classmethod
    def check(cls, config: MLPConfig, spec: Spec) -> None:
        if "observation" not in spec:
            raise ConfigError(
                "model.name: 'mlp' needs a task with observation vectors; this is a text task, "
                "use a language model"
            )

    @classmethod
    def create(cls, config: MLPConfig, spec: Spec, seed: int, folder: Path) -> None:
        cls.check(config, spec)
        settings = {**spec, **config.model_dump(mode="json")}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = ActorCritic(settings)
        cls(module, settings).save(folder, dict(module.state_dict()))

    @classmethod
    def processor(cls, folder: Path, config: MLPConfig) -> None:
        return None

    @classmethod
    def load(cls, folder: Path, config: MLPConfig) -> MLPPolicy:
        try:
            settings = json.loads((folder / SETTINGS).read_text())
            module = ActorCritic(settings)
            module.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise DataError(f"{folder}: not a policy folder ({error})") from None
        return cls(module, settings)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        (folder / SETTINGS).write_text(json.dumps(self.settings, indent=1, sort_keys=True))
        save_file({k: v.contiguous() for k, v in sorted(tensors.items())}, folder / WEIGHTS)

    def collate(self, records: Sequence[Record]) -> Batch:
        length = max(len(record) for record in records)
        return {
            "observations": pad([r.steps["observations"] for r in records], length),
            "actions": pad([r.steps["actions"] for r in records], length),
            "mask": pad([np.ones(len(r), np.float32) for r in records], length),
        }

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        out, log_std, values = self.module(batch["observations"])
        logprobs, spread = self.judge(out, log_std, batch["actions"], temperature)
        mask = batch["mask"]
        return StepOutputs(logprobs * mask, spread * mask if entropy else None, values * mask)

    def judge(
        self, out: Tensor, log_std: Tensor, actions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of actions given the network's output."""
        if self.discrete:
            kind = Categorical(logits=out / (temperature or 1.0), validate_args=False)
            return kind.log_prob(actions), kind.entropy()
        normal = Normal(out, log_std.exp() * (temperature or 1.0), validate_args=False)
        return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)

    @property
    def discrete(self) -> bool:
        """Whether actions are numbered choices rather than vectors."""
        return bool(self.settings["action"]["kind"] == "discrete")

    @torch.no_grad()
    def observe(self, records: Sequence[Record]) -> None:
        """Fold a batch of observations into the running statistics (Chan et al.'s update)."""
        if not self.settings["normalise_observations"]:
            return
        seen = np.concatenate([record.steps["observations"] for record in records])
        batch = torch.as_tensor(seen, dtype=torch.float64)
        old, new = self.module.seen, float(len(batch))
        mean, variance = batch.mean(0), batch.var(0, unbiased=False)
        total = old + new
        delta = mean - self.module.mean
        combined = self.module.square * old + variance * new + delta**2 * old * new / total
        self.module.square.copy_(combined / total)
        self.module.mean.add_(delta * new / total)
        self.module.seen.copy_(total)


def _network(sizes: list[int], gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        last = i + 2 == len(sizes)
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, gain if last else 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, nn.Tanh()]
    return nn.Sequential(*layers)
