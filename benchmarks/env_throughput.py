"""Environments on two processes beside Gymnasium's vectors of them: steps per second.

Both sides take the same actions, drawn beforehand, in as many environments, without the checks that
Gymnasium makes by default. Here a policy that only reads its actions from a table answers time
loops, and all that came of the steps is recorded, which Gymnasium leaves to its caller.

The task with pictures renders the same way on both sides: by the camera of this project, beside the
state. Its vector of Gymnasium hands observations over in shared memory, as is its default.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.row import BenchmarkRow, median_row
from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.cameras import CameraWrapper
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.envs.observations import read_observation
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from stages.rollout import local_rollout_iter

TASK, PROCESSES, ROUNDS = "HalfCheetah-v5", 2, 7
COUNT, STEPS = 16, 400
CAMERA, SIZE = "track", (128, 128)
IMAGE_ENVS, IMAGE_STEPS = 4, 60


def create_image_env() -> Any:
    """A world of Gymnasium with pictures, as simulator processes make them."""
    import gymnasium
    from gymnasium.spaces import Box, Dict

    class ImageEnv(gymnasium.Env):
        def __init__(self) -> None:
            world = create_plain_env()
            self._world = CameraWrapper(world, {CAMERA: SIZE})
            picture = Box(0, 255, (*SIZE, 3), np.uint8)
            self.observation_space = Dict({"state": world.observation_space, CAMERA: picture})
            self.action_space = world.action_space

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seen, info = self._world.reset(seed=seed or 0)
            return read_observation(self._world, seen), info

        def step(self, action: Any) -> Any:
            seen, *came = self._world.step(action)
            return (read_observation(self._world, seen), *came)

        def close(self) -> None:
            self._world.close()

    return ImageEnv()


def create_plain_env() -> Any:
    """A world of Gymnasium without its checker, as ours have none."""
    import gymnasium

    return gymnasium.make(TASK, disable_env_checker=True)


def measure() -> list[BenchmarkRow]:
    """Ours and theirs in turns, as many environments each."""
    # Read when MuJoCo is imported, for spaces are asked of a world in this process.
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = "egl"
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    plain = GymConfig(id=TASK, num_processes=PROCESSES)
    pictured = GymConfig(id=TASK, num_processes=PROCESSES, images={CAMERA: SIZE})
    with (
        closing(GymEnvironment(plain, None)) as ours,
        closing(SyncVectorEnv([create_plain_env] * COUNT)) as sync,
        closing(AsyncVectorEnv([create_plain_env] * COUNT, context="spawn")) as separate,
    ):
        actions = draw_actions(COUNT, STEPS)
        found = rounds(
            [(play_environment, ours), (step_vector, sync), (step_vector, separate)], actions
        )
    with (
        closing(GymEnvironment(pictured, None)) as ours,
        closing(AsyncVectorEnv([create_image_env] * IMAGE_ENVS, context="spawn")) as separate,
    ):
        rendered = rounds(
            [(play_environment, ours), (step_vector, separate)],
            draw_actions(IMAGE_ENVS, IMAGE_STEPS),
        )
    better = [mine / max(others) for mine, *others in found]
    return [
        median_row("env_vs_gym", better, "x", 1.5, "higher"),
        median_row("env_vs_gym_rendered", [a / b for a, b in rendered], "x", 1.0, "higher"),
        *(
            median_row(name, list(values), "steps/s", None, "higher")
            for name, values in zip(
                ("env_steps_per_s", "gym_sync_steps_per_s", "gym_async_steps_per_s"),
                zip(*found, strict=True),
                strict=True,
            )
        ),
    ]


def draw_actions(count: int, steps: int) -> np.ndarray:
    """Actions ``[steps, count, 6]`` float32, in the space."""
    random = np.random.default_rng(0)
    return random.uniform(-1, 1, (steps, count, 6)).astype(np.float32)


Side = tuple[Callable[[Any, np.ndarray], None], Any]


def rounds(sides: Sequence[Side], actions: np.ndarray) -> list[list[float]]:
    """Return the steps per second of each side for each round; the first round is not counted."""
    found = []
    for number in range(-1, ROUNDS):
        rates = []
        for run, what in sides:
            start = time.perf_counter()
            run(what, actions)
            rates.append(actions.shape[0] * actions.shape[1] / (time.perf_counter() - start))
        if number >= 0:
            found.append(rates)
    return found


def step_vector(vector: Any, actions: np.ndarray) -> None:
    """A vector of Gymnasium."""
    vector.reset(seed=0)
    for action in actions:
        vector.step(action)


def play_environment(environment: GymEnvironment, actions: np.ndarray) -> None:
    """Ours, recorded."""
    steps, count, _ = actions.shape
    requests, answers = LocalChannel(), LocalChannel()

    def answer() -> None:
        for request in requests:
            sample = request.steps["sample"]
            reply = {"sample": sample, "action": actions[int(request.info["time"]), sample]}
            answers.put(Record(request.identity, reply, info={"version": 0}))
        answers.close()

    policy = threading.Thread(target=answer)
    policy.start()
    episodes = RolloutRequest(0, 0, "train", range(count), count, 1, steps, 1.0)
    assert len(list(environment.simulate(episodes, requests, answers))) == count
    policy.join()


HIDDEN = (1152, 1152)
BATCH, HORIZON, OVERLAP_ROUNDS = 256, 48, 7


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


def measure_overlap() -> list[BenchmarkRow]:
    """Taking turns and overlapped, in turns."""
    tasks = [GymConfig(id="HalfCheetah-v5", num_processes=n, double_buffer=bool(n)) for n in (0, 1)]
    turns, beside = (GymEnvironment(task, None) for task in tasks)
    policy = MLPConfig(hidden=HIDDEN)
    engine = TimedEngine(DirectConfig(), MLPPolicy, policy)
    with tempfile.TemporaryDirectory() as folder, closing(turns), closing(beside):
        MLPPolicy.create(policy, GymEnvironment.read_spec(tasks[0]), 0, Path(folder))
        engine.load(Path(folder), 0)
        ratios, balances = [], []
        for number in range(-1, OVERLAP_ROUNDS):
            engine.seconds = 0.0
            sequential = rollout(turns, engine, max(number, 0))
            answering = engine.seconds
            together = rollout(beside, engine, max(number, 0))
            # The first round starts processes and makes simulators.
            if number >= 0:
                ratios.append(sequential / together)
                balances.append((sequential - answering) / answering)
    return [
        median_row("embodied_overlap", ratios, "x", 1.6, "higher"),
        median_row("embodied_balance", balances, "simulator s / policy s", None, "higher"),
    ]
