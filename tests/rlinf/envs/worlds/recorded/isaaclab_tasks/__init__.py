"""Registers its tasks with Gymnasium when it is imported."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from isaaclab.app import launched

assert launched, "imported before the application was started"
LIMIT = 4


class _Terminations:
    active_terms: ClassVar[list[str]] = ["time_out", "success"]

    def __init__(self, count: int) -> None:
        self.done = {name: torch.zeros(count, dtype=torch.bool) for name in self.active_terms}

    def get_term(self, name: str) -> torch.Tensor:
        return self.done[name]


class Env(gymnasium.Env):  # type: ignore[type-arg]
    """A batch of environments: the sum of what was done, and how many steps it took."""

    def __init__(self, cfg: Any, render_mode: str | None = None, **kwargs: Any) -> None:
        self.cfg, self.num_envs, self.device = cfg, cfg.num_envs, torch.device(cfg.device)
        self.single_action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
        self.termination_manager = _Terminations(self.num_envs)
        self.sums = torch.zeros(self.num_envs)
        self.steps = torch.zeros(self.num_envs, dtype=torch.long)

    def reset(self, seed: int | None = None, env_ids: Any = None, options: Any = None) -> Any:
        self.sums[:], self.steps[:] = float(seed or 0), 0
        return self._observed(), {}

    def step(self, action: torch.Tensor) -> Any:
        assert action.shape == (self.num_envs, 2)
        assert action.dtype == torch.float32
        self.sums, self.steps = self.sums + action.sum(1), self.steps + 1
        done = self.termination_manager.done
        done["success"], done["time_out"] = self.sums >= 10, self.steps >= LIMIT
        reward = self.sums.clone()
        ended = done["success"] | done["time_out"]
        self.sums[ended], self.steps[ended] = -1.0, 0
        return self._observed(), reward, done["success"], done["time_out"], {}

    def _observed(self) -> dict[str, Any]:
        state = torch.stack([self.sums, self.steps.float()], 1)
        if not self.cfg.cameras:
            return {"policy": state}
        picture = self.sums[:, None, None, None].expand(-1, 4, 5, 3).to(torch.uint8)
        return {"policy": {"sums": state[:, :1], "table_cam": picture, "steps": state[:, 1:]}}


for name in ("Isaac-Sum-v0", "Isaac-Sum-Visuomotor-v0"):
    gymnasium.register(
        name,
        Env,
        disable_env_checker=True,
        kwargs={"env_cfg_entry_point": f"isaaclab_tasks:{name}"},
    )
