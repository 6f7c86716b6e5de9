"""The configuration of a registered task."""

from __future__ import annotations

from types import SimpleNamespace

from isaaclab.app import launched


def parse_env_cfg(
    task_name: str,
    device: str = "cuda:0",
    num_envs: int | None = None,
    use_fabric: bool | None = None,
) -> SimpleNamespace:
    pictured = "Visuomotor" in task_name
    assert launched[-1] == {"headless": True, "enable_cameras": pictured}
    return SimpleNamespace(device=device, num_envs=num_envs, cameras=pictured)
