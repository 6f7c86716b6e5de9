"""An engine for policies that act by one forward pass: no cache, no tokens."""

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
from rlinf.engines.base import ACTION_REQUEST, NO_HOOKS, Engine, Hooks, Requests, check_columns
from rlinf.fit import ACTOR_CRITIC
from rlinf.models.base import copy_weights
from rlinf.seeding import generator

ROWS = 8
"""Batches are filled up to a multiple. Matrix products treat rows that fill no whole tile apart,
and round them otherwise: an answer would depend on who else is in the batch."""


class DirectConfig(Section):
    """One forward pass per time step."""

    threads: int = Field(default=1, gt=0)
    """Torch threads; small networks want one."""


class DirectEngine(Engine):
    """Answers each observation batch at once.

    A request holds ``sample`` and ``observation`` ``[n, D]``; ``info["time"]`` is the time step,
    below ``info["horizon"]``. Replies hold ``action`` (int64 ``[n]`` or float32 ``[n, A]``),
    ``logprob`` and ``value``, float32 ``[n]``. Temperature 0 takes the mode. A row's answer does
    not depend on the other rows.
    """

    Config = DirectConfig
    needs = frozenset({ACTOR_CRITIC})

    def __init__(self, config: DirectConfig, policy: type, policy_config: Any) -> None:
        self._config, self._class, self._policy_config = config, policy, policy_config
        self._policy: Any = None
        self._noise: dict[int, np.ndarray] = {}
        self._address: tuple[Any, ...] = ()

    def load(self, folder: Path, version: int) -> None:
        self._policy = self._class.load(folder, self._policy_config)  # type: ignore[attr-defined]
        self._policy.module.eval()
        self.version = version

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = -1
        copy_weights(self._policy.module, tensors)
        self.version = version

    def resident(self) -> dict[str, list[Tensor]]:
        if self._policy is None:
            return {}
        return {"weights": [*self._policy.module.state_dict().values()]}

    def close(self) -> None:
        self._policy, self._noise, self.version = None, {}, -1

    @torch.inference_mode()
    def generate(
        self, requests: Requests, *, seed: int, stage: str, hooks: Hooks = NO_HOOKS
    ) -> Iterator[Record]:
        torch.set_num_threads(self._config.threads)
        for request in requests:
            self.refreshed(hooks)
            yield self._answer(request, seed, stage, hooks)

    def _answer(self, request: Record, seed: int, stage: str, hooks: Hooks) -> Record:
        check_columns(request, ACTION_REQUEST)
        temperature = float(request.info["temperature"])
        policy = self._policy
        count = len(request)
        observed = _filled_up(request.steps["observation"])
        out, log_std, values = policy.module(torch.from_numpy(observed))
        if temperature == 0:
            actions = out.argmax(-1) if policy.discrete else out
        else:
            noise = self._draw(request, seed, stage, out.shape[-1])
            if policy.discrete:
                # The largest of logits plus Gumbel noise is a sample of their distribution.
                actions = (out / temperature + noise).argmax(-1)
            else:
                actions = out + noise * log_std.exp() * temperature
        logprobs, _ = policy.judge(out, log_std, actions, temperature)
        steps = {
            "sample": request.steps["sample"],
            "action": actions[:count].numpy(),
            "logprob": logprobs[:count].numpy(),
            "value": values[:count].numpy(),
        }
        if hooks.newer is not None:
            steps["version"] = np.full(count, self.version)
        return Record(request.identity, steps, info={"version": self.version})

    def _draw(self, request: Record, seed: int, stage: str, size: int) -> Tensor:
        """Noise ``[n, size]`` of this time step: Gumbel for choices, normal for vectors.

        A sample's noise is drawn for the whole horizon when it is first seen; drawing it step by
        step would take longer than the network.
        """
        horizon, time = int(request.info["horizon"]), int(request.info["time"])
        address = (seed, request.identity.iteration, stage, horizon, size)
        if address != self._address:
            self._noise, self._address = {}, address
        rows = []
        for sample in request.steps["sample"].tolist():
            table = self._noise.get(sample)
            if table is None:
                random = generator(seed, request.identity.iteration, stage, sample)
                draw = random.gumbel if self._policy.discrete else random.standard_normal
                table = draw(size=(horizon, size)).astype(np.float32)
                self._noise[sample] = table
            rows.append(table[time])
        return torch.from_numpy(_filled_up(np.stack(rows)))


def _filled_up(rows: np.ndarray) -> np.ndarray:
    """``rows`` with zero rows to the next multiple of :data:`ROWS`."""
    missing = -len(rows) % ROWS
    return np.pad(rows, ((0, missing), (0, 0))) if missing else np.array(rows)
