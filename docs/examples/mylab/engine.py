"""An engine that asks the policy for one action at a time."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.record import Record
from rlinf.engines.base import NO_HOOKS, Engine, RequestReceiver, RolloutHooks
from rlinf.models.base import copy_weights
from rlinf.registry import SINGLE_PASS_ACTIONS
from rlinf.seeding import generator


class OneByOne(Engine):
    requires = frozenset({SINGLE_PASS_ACTIONS})

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        self._class, self._options, self._policy = policy, policy_config, None

    def load(self, folder: Path, version: int) -> None:
        self._policy, self.version = self._class.load(folder, self._options), version

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        copy_weights(self._policy.module, tensors)
        self.version = version

    def close(self) -> None:
        self._policy, self.version = None, -1

    @torch.inference_mode()
    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        for request in requests:
            self.load_newer_weights(hooks)
            rows = [self._act(request, row, seed, stage) for row in range(len(request))]
            steps = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            steps["sample"] = request.steps["sample"]
            if hooks.newer_weights is not None:
                steps["version"] = np.full(len(request), self.version)
            yield Record(request.identity, steps, info={"version": self.version})

    def _act(self, request: Record, row: int, seed: int, stage: str) -> dict[str, np.ndarray]:
        """Return columns ``[1, ...]`` of one sample. Its random numbers do not depend on others."""
        info, sample = request.info, int(request.steps["sample"][row])
        observations = {name: torch.tensor(column[[row]]) for name, column in request.steps.items()}
        noise = None
        if info["temperature"]:
            random = generator(seed, request.identity.iteration, stage, sample)
            noise = torch.tensor(self._policy.draw_noise(random, info["horizon"])[[info["time"]]])
        outputs = self._policy.act(observations, noise, info["temperature"])
        return {name: column.numpy() for name, column in outputs.items()}
