"""Simulator and policy beside each other against taking turns: HalfCheetah, one core each.

Both collect the same rollouts, byte for byte, with the same network. Its width makes the policy's
work about equal to the simulator's: where one side has all the work there is nothing to overlap.
Published for rollouts of embodied policies: 1.61 to 1.88 times.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.row import BenchmarkRow, median_row
from rlinf.data.record import Record
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymEnvironment
from rlinf.envs.gym_config import GymConfig
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from stages.rollout_loop import local_rollout_iter

HIDDEN = (1152, 1152)
BATCH, HORIZON, ROUNDS = 256, 48, 7


class TimedEngine(DirectEngine):
    """The engine, which also counts its own seconds."""

    seconds = 0.0

    def _act(self, request: Record, seed: int, stage: str) -> dict[str, np.ndarray]:
        start = time.perf_counter()
        reply = super()._act(request, seed, stage)
        self.seconds += time.perf_counter() - start
        return reply


def rollout(environment: GymEnvironment, engine: DirectEngine, iteration: int) -> float:
    """Seconds of one iteration's rollout."""
    episodes = RolloutRequest(0, iteration, "train", range(BATCH), BATCH, 1, HORIZON, 1.0)
    start = time.perf_counter()
    assert len(list(local_rollout_iter(environment, engine, episodes, "rollout"))) == BATCH
    return time.perf_counter() - start


def measure() -> list[BenchmarkRow]:
    """Taking turns and overlapped, in turns."""
    tasks = [GymConfig(id="HalfCheetah-v5", num_processes=n, double_buffer=n + 1) for n in (0, 1)]
    turns, beside = (GymEnvironment(task, None) for task in tasks)
    policy = MLPConfig(hidden=HIDDEN)
    engine = TimedEngine(DirectConfig(), MLPPolicy, policy)
    with tempfile.TemporaryDirectory() as folder, closing(turns), closing(beside):
        MLPPolicy.create(policy, GymEnvironment.read_spec(tasks[0]), 0, Path(folder))
        engine.load(Path(folder), 0)
        ratios, balances = [], []
        for number in range(-1, ROUNDS):
            engine.seconds = 0.0
            apart = rollout(turns, engine, max(number, 0))
            answering = engine.seconds
            together = rollout(beside, engine, max(number, 0))
            # The first round starts processes and makes simulators.
            if number >= 0:
                ratios.append(apart / together)
                balances.append((apart - answering) / answering)
    return [
        median_row("embodied_overlap", ratios, "x", 1.6, "higher"),
        median_row("embodied_balance", balances, "simulator s / policy s", None, "higher"),
    ]
