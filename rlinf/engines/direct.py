"""The engine for policies that compute an action in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.device_memory import OffloadableTensors, move_to_device, use_device
from rlinf.engines.base import (
    ACTION_REQUEST_COLUMNS,
    NO_HOOKS,
    Engine,
    RequestReceiver,
    RolloutHooks,
    check_columns,
)
from rlinf.models.base import DeviceName, Policy, copy_weights, local_device
from rlinf.registry import SINGLE_PASS_ACTIONS
from rlinf.seeding import generator

BATCH_MULTIPLE = 8
"""Batches are padded to a multiple of this size. Otherwise actions would depend on the batch size,
because matmuls round the rows of incomplete tiles differently."""


class DirectConfig(Section):
    """Options of the engine with one forward pass per time step."""

    threads: int = Field(default=1, gt=0)
    """Torch threads; one is best for small networks."""
    python: str | None = None
    """Python interpreter of the stages that use the engine; see :mod:`rlinf.interpreters`."""
    device: DeviceName = "cpu"
    """Device of the policy; small networks are faster on the CPU."""


class DirectEngine(OffloadableTensors, Engine):
    """An engine that answers each request with one call of :meth:`rlinf.models.base.Policy.act`.

    All columns of a request except ``sample`` are the observation. The reply has all outputs of the
    policy. A row does not depend on the other rows.
    """

    Config = DirectConfig
    requires = frozenset({SINGLE_PASS_ACTIONS})

    def __init__(self, config: DirectConfig, policy: type[Policy], policy_config: Any) -> None:
        self._config, self._policy_class, self._policy_config = config, policy, policy_config
        self.device = local_device(config.device)
        self._policy: Any = None
        self._noise: dict[int, np.ndarray] = {}
        """Noise of all time steps, by sample, for the requests with :attr:`_noise_key`."""
        self._noise_key: tuple[Any, ...] = ()
        """Seed, iteration, stage and horizon."""

    def load(self, folder: Path, version: int) -> None:
        self.close()  # free the old weights first
        # Not in inference mode, because later weights could not overwrite inference tensors.
        with torch.inference_mode(False):
            self._policy = self._policy_class.load(folder, self._policy_config)
            move_to_device(self._policy.module.eval(), self.device)
        self.version = version

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = -1
        copy_weights(self._policy.module, tensors)
        self.version = version

    def tensor_groups(self) -> dict[str, list[Tensor]]:
        if self._policy is None:
            return {}
        return {"weights": [*self._policy.module.state_dict().values()]}

    def close(self) -> None:
        self.drop_host_copies()
        self._policy, self._noise, self.version = None, {}, -1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        torch.set_num_threads(self._config.threads)
        use_device(self.device)
        for request in requests:
            check_columns(request, ACTION_REQUEST_COLUMNS)
            self.load_newer_weights(hooks)
            steps = self._act(request, seed, stage)
            if hooks.newer_weights is not None:
                steps["version"] = np.full(len(request), self.version)
            yield Record(request.identity, steps, info={"version": self.version})

    def _act(self, request: Record, seed: int, stage: str) -> dict[str, np.ndarray]:
        temperature = float(request.info["temperature"])
        inputs = {name: self._pad(c) for name, c in request.steps.items() if name != "sample"}
        noise = None if temperature == 0 else self._pad(self._draw_noise(request, seed, stage))
        outputs = self._policy.act(inputs, noise, temperature)
        columns = {name: column[: len(request)].cpu().numpy() for name, column in outputs.items()}
        return {"sample": request.steps["sample"], **columns}

    def _draw_noise(self, request: Record, seed: int, stage: str) -> np.ndarray:
        """Return the noise ``[n, ...]`` of this time step.

        The noise of a sample is drawn for the entire horizon at its first step, because drawing it
        step by step would be slower than a small network.
        """
        horizon, time = int(request.info["horizon"]), int(request.info["time"])
        key = (seed, request.identity.iteration, stage, horizon)
        if key != self._noise_key:
            self._noise, self._noise_key = {}, key
        rows = []
        for sample in request.steps["sample"].tolist():
            sample_noise = self._noise.get(sample)
            if sample_noise is None:
                rng = generator(seed, request.identity.iteration, stage, sample)
                sample_noise = self._noise[sample] = self._policy.draw_noise(rng, horizon)
            rows.append(sample_noise[time])
        return np.stack(rows)

    def _pad(self, column: np.ndarray) -> Tensor:
        """Move a column to the device, with zero rows up to a multiple of BATCH_MULTIPLE."""
        count = len(column)
        padded = np.zeros((count + -count % BATCH_MULTIPLE, *column.shape[1:]), column.dtype)
        padded[:count] = column
        return torch.from_numpy(padded).to(self.device)
