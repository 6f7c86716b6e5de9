"""Registers its tasks with Gymnasium when it is imported."""

from __future__ import annotations

from types import SimpleNamespace
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
        self.sums, self.seeded = torch.zeros(self.num_envs), 0.0
        self.steps = torch.zeros(self.num_envs, dtype=torch.long)

    def reset(self, seed: int | None = None, env_ids: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.seeded = float(seed)
        which = torch.arange(self.num_envs) if env_ids is None else env_ids
        self._reset_idx(which)
        return self._observed(), {}

    def _reset_idx(self, env_ids: torch.Tensor) -> None:
        assert env_ids.dtype == torch.int64
        self.sums[env_ids], self.steps[env_ids] = self.seeded, 0

    def step(self, action: torch.Tensor) -> Any:
        action = torch.where(action > 50, torch.nan, action)
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


class DirectEnv(Env):
    """One of the direct kind, which has no managers: its reset is of all environments."""

    def __init__(self, cfg: Any, render_mode: str | None = None, **kwargs: Any) -> None:
        super().__init__(cfg, render_mode, **kwargs)
        self.scene = SimpleNamespace(write_data_to_sim=lambda: self.called.append("write"))
        self.sim = SimpleNamespace(forward=lambda: self.called.append("forward"))
        self.called: list[str] = []

    def reset(self, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        return super().reset(seed)

    def _get_observations(self) -> dict[str, Any]:
        assert self.called[-2:] == ["write", "forward"]
        return self._observed()


for name in ("Isaac-Sum-v0", "Isaac-Sum-Visuomotor-v0", "Isaac-Sum-Direct-v0"):
    gymnasium.register(
        name,
        DirectEnv if "Direct" in name else Env,
        disable_env_checker=True,
        kwargs={"env_cfg_entry_point": f"isaaclab_tasks:{name}"},
    )
