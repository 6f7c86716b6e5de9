"""Simulators that cannot run here: their adapters play against recordings of their interfaces.

Calls, arguments, shapes and what happens at the end of an episode are as their sources have them;
the dynamics are a sum of actions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinf.envs.gym import GymConfig, create_simulator_process
from rlinf.envs.subprocess_env import SubprocessVectorEnv

RECORDED = Path(__file__).with_name("recorded")


@contextlib.contextmanager
def simulation(task: dict[str, Any], **changed: Any) -> Iterator[SubprocessVectorEnv]:
    config = GymConfig.model_validate({**task, **changed})
    with contextlib.closing(create_simulator_process(config)) as process:
        yield process
