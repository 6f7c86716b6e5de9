"""Steps per second of environments in two processes, compared with Gymnasium's vector environments.

Both sides take the same precomputed actions in the same number of environments, without the default
checks of Gymnasium. On our side a policy looks its actions up in a table, and the trajectories are
recorded; Gymnasium leaves that to its caller.

The task with images renders with this project's camera on both sides, in addition to the state.
Gymnasium's vector environment passes observations in shared memory, which is its default.
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
    """Create a Gymnasium environment with images, as simulator processes render them."""
    import gymnasium
    from gymnasium.spaces import Box, Dict

    class ImageEnv(gymnasium.Env):
        def __init__(self) -> None:
            environment = create_plain_env()
            self._env = CameraWrapper(environment, {CAMERA: SIZE})
            image_space = Box(0, 255, (*SIZE, 3), np.uint8)
            self.observation_space = Dict(
                {"state": environment.observation_space, CAMERA: image_space}
            )
            self.action_space = environment.action_space

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            observation, info = self._env.reset(seed=seed or 0)
            return read_observation(self._env, observation), info

        def step(self, action: Any) -> Any:
            observation, *outcome = self._env.step(action)
            return (read_observation(self._env, observation), *outcome)

        def close(self) -> None:
            self._env.close()

    return ImageEnv()


def create_plain_env() -> Any:
    """Create a Gymnasium environment without its checker, which ours do not have either."""
    import gymnasium

    return gymnasium.make(TASK, disable_env_checker=True)


def measure() -> list[BenchmarkRow]:
    """Measure our environments and Gymnasium's alternately, with equal numbers of environments."""
    # MuJoCo reads these at import, and this process creates an environment to read its spaces.
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = "egl"
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    plain = GymConfig(id=TASK, num_processes=PROCESSES)
    with_images = GymConfig(id=TASK, num_processes=PROCESSES, images={CAMERA: SIZE})
    with (
        closing(GymEnvironment(plain, None)) as ours,
        closing(SyncVectorEnv([create_plain_env] * COUNT)) as sync,
        closing(AsyncVectorEnv([create_plain_env] * COUNT, context="spawn")) as separate,
    ):
        actions = draw_actions(COUNT, STEPS)
        rates = rounds(
            [(play_environment, ours), (step_vector, sync), (step_vector, separate)], actions
        )
    with (
        closing(GymEnvironment(with_images, None)) as ours,
        closing(AsyncVectorEnv([create_image_env] * IMAGE_ENVS, context="spawn")) as separate,
    ):
        image_rates = rounds(
            [(play_environment, ours), (step_vector, separate)],
            draw_actions(IMAGE_ENVS, IMAGE_STEPS),
        )
    speedups = [our_rate / max(gym_rates) for our_rate, *gym_rates in rates]
    return [
        median_row("env_vs_gym", speedups, "x", 1.5, "higher"),
        median_row("env_vs_gym_rendered", [a / b for a, b in image_rates], "x", 1.0, "higher"),
        *(
            median_row(name, list(values), "steps/s", None, "higher")
            for name, values in zip(
                ("env_steps_per_s", "gym_sync_steps_per_s", "gym_async_steps_per_s"),
                zip(*rates, strict=True),
                strict=True,
            )
        ),
    ]


def draw_actions(count: int, steps: int) -> np.ndarray:
    """Return random actions ``[steps, count, 6]``, float32, within the action space."""
    random = np.random.default_rng(0)
    return random.uniform(-1, 1, (steps, count, 6)).astype(np.float32)


Side = tuple[Callable[[Any, np.ndarray], None], Any]


def rounds(sides: Sequence[Side], actions: np.ndarray) -> list[list[float]]:
    """Return the steps per second of each side for each round; the first round is not counted."""
    results = []
    for number in range(-1, ROUNDS):
        rates = []
        for run, target in sides:
            start = time.perf_counter()
            run(target, actions)
            rates.append(actions.shape[0] * actions.shape[1] / (time.perf_counter() - start))
        if number >= 0:
            results.append(rates)
    return results


def step_vector(vector: Any, actions: np.ndarray) -> None:
    """Step a vector environment of Gymnasium."""
    vector.reset(seed=0)
    for action in actions:
        vector.step(action)


def play_environment(environment: GymEnvironment, actions: np.ndarray) -> None:
    """Step our environments and record their trajectories."""
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
    """An engine that measures the seconds that it computes."""

    seconds = 0.0

    def _act(self, request: Record, seed: int, stage: str) -> dict[str, np.ndarray]:
        start = time.perf_counter()
        reply = super()._act(request, seed, stage)
        self.seconds += time.perf_counter() - start
        return reply


def rollout(environment: GymEnvironment, engine: DirectEngine, iteration: int) -> float:
    """Return the seconds of one iteration's rollout."""
    episodes = RolloutRequest(0, iteration, "train", range(BATCH), BATCH, 1, HORIZON, 1.0)
    start = time.perf_counter()
    assert len(list(local_rollout_iter(environment, engine, episodes, "rollout"))) == BATCH
    return time.perf_counter() - start


def measure_overlap() -> list[BenchmarkRow]:
    """Measure rollouts without and with overlap of simulators and policy, alternately."""
    tasks = [GymConfig(id="HalfCheetah-v5", num_processes=n, double_buffer=bool(n)) for n in (0, 1)]
    sequential_env, overlapped_env = (GymEnvironment(task, None) for task in tasks)
    policy = MLPConfig(hidden=HIDDEN)
    engine = TimedEngine(DirectConfig(), MLPPolicy, policy)
    with tempfile.TemporaryDirectory() as folder, closing(sequential_env), closing(overlapped_env):
        MLPPolicy.create(policy, GymEnvironment.read_spec(tasks[0]), 0, Path(folder))
        engine.load(Path(folder), 0)
        ratios, balances = [], []
        for number in range(-1, OVERLAP_ROUNDS):
            engine.seconds = 0.0
            sequential_s = rollout(sequential_env, engine, max(number, 0))
            policy_s = engine.seconds
            overlapped_s = rollout(overlapped_env, engine, max(number, 0))
            # The first round starts processes and creates simulators, so it does not count.
            if number >= 0:
                ratios.append(sequential_s / overlapped_s)
                balances.append((sequential_s - policy_s) / policy_s)
    return [
        median_row("embodied_overlap", ratios, "x", 1.6, "higher"),
        median_row("embodied_balance", balances, "simulator s / policy s", None, "higher"),
    ]
