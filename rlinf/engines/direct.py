"""An engine for policies that act by one call: batches, randomness and versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.capabilities import SINGLE_PASS_ACTIONS
from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.device_memory import OffloadableTensors, move_to_device
from rlinf.engines.base import (
    ACTION_REQUEST_COLUMNS,
    NO_HOOKS,
    Engine,
    RequestReceiver,
    RolloutHooks,
    check_columns,
)
from rlinf.models.base import Policy, copy_weights
from rlinf.models.device import DeviceName, local_device
from rlinf.seeding import generator

BATCH_MULTIPLE = 8
"""Batches are filled up to a multiple. Matrix products treat rows that fill no whole tile apart,
and round them otherwise: an answer would depend on who else is in the batch."""


class DirectConfig(Section):
    """One call of the policy per time step."""

    threads: int = Field(default=1, gt=0)
    """Torch threads; small networks want one."""
    python: str | None = None
    """The interpreter of the stages that compute with it; see :mod:`rlinf.interpreters`."""
    device: DeviceName = "cpu"
    """Small networks answer sooner on the CPU."""


class DirectEngine(OffloadableTensors, Engine):
    """Answers each request at once by :meth:`rlinf.models.base.Policy.act`.

    All columns of a request but ``sample`` are the observation, all that the policy gives are the
    reply's. A row's answer does not depend on the other rows.
    """

    Config = DirectConfig
    requires = frozenset({SINGLE_PASS_ACTIONS})

    def __init__(self, config: DirectConfig, policy: type[Policy], policy_config: Any) -> None:
        self._config, self._class, self._policy_config = config, policy, policy_config
        self.device = local_device(config.device)
        self._policy: Any = None
        self._noise: dict[int, np.ndarray] = {}
        self._address: tuple[Any, ...] = ()

    def load(self, folder: Path, version: int) -> None:
        self.close()  # the old ones leave the memory first
        # Also where they come while samples are under way: of tensors that are made in inference
        # mode no later state can take the place.
        with torch.inference_mode(False):
            self._policy = self._class.load(folder, self._policy_config)
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
        for request in requests:
            check_columns(request, ACTION_REQUEST_COLUMNS)
            self.load_newer_weights(hooks)
            steps = self._act(request, seed, stage)
            if hooks.newer_weights is not None:
                steps["version"] = np.full(len(request), self.version)
            yield Record(request.identity, steps, info={"version": self.version})

    def _act(self, request: Record, seed: int, stage: str) -> dict[str, np.ndarray]:
        """Columns of the reply."""
        temperature = float(request.info["temperature"])
        seen = {name: self._rows(c) for name, c in request.steps.items() if name != "sample"}
        noise = None if temperature == 0 else self._rows(self._draw(request, seed, stage))
        found = self._policy.act(seen, noise, temperature)
        columns = {name: column[: len(request)].cpu().numpy() for name, column in found.items()}
        return {"sample": request.steps["sample"], **columns}

    def _draw(self, request: Record, seed: int, stage: str) -> np.ndarray:
        """Noise ``[n, ...]`` of this time step.

        A sample's noise is drawn for the whole horizon when it is first seen; drawing it step by
        step would take longer than a small network.
        """
        horizon, time = int(request.info["horizon"]), int(request.info["time"])
        address = (seed, request.identity.iteration, stage, horizon)
        if address != self._address:
            self._noise, self._address = {}, address
        rows = []
        for sample in request.steps["sample"].tolist():
            table = self._noise.get(sample)
            if table is None:
                random = generator(seed, request.identity.iteration, stage, sample)
                table = self._noise[sample] = self._policy.draw_noise(random, horizon)
            rows.append(table[time])
        return np.stack(rows)

    def _rows(self, column: np.ndarray) -> Tensor:
        """On the device, with zero rows to the next multiple of :data:`ROWS`."""
        count = len(column)
        filled = np.zeros((count + -count % BATCH_MULTIPLE, *column.shape[1:]), column.dtype)
        filled[:count] = column
        return torch.from_numpy(filled).to(self.device)
