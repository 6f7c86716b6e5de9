"""An episode goes on in another world, of another process, as it would have in its own."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, create_simulator_process
from rlinf.envs.simulators import simulators
from rlinf.envs.simulators.requirements import get_requirements
from rlinf.envs.subprocess_env import SubprocessVectorEnv
from tests.environments import need_environment

OWN = {
    "gymnasium": (
        *("CartPole-v1", "MountainCar-v0", "Acrobot-v1", "Pendulum-v1"),
        *("HalfCheetah-v5", "Humanoid-v5", "Reacher-v5", "Pusher-v5"),
        "tests.rlinf.envs.keeping_worlds:Own-v0",
    ),
    # Rewards of the second are of places that the environment keeps as views of MuJoCo's memory.
    "metaworld": ("reach-v3", "door-lock-v3"),
}
"""Of each kind of world that is saved, environments that are tried."""
BEFORE, AFTER = 9, 30


def config_of(world: str, id: str) -> GymConfig:
    if world == "gymnasium":
        return GymConfig(id=id)
    need_environment(world)
    return GymConfig(simulator=world, id=id, python=world)


def drawn(space: dict[str, Any], steps: int) -> np.ndarray:
    """Actions ``[steps, 1, ...]`` that a space takes."""
    random = np.random.default_rng(0)
    if space["kind"] == "discrete":
        return random.integers(space["size"], size=(steps, 1))
    return random.uniform(-1, 1, (steps, 1, *space["shape"])).astype(np.float32)


def played(
    process: SubprocessVectorEnv, number: int, actions: np.ndarray
) -> list[dict[str, bytes]]:
    """All that comes of the steps of an episode, and of those that follow it."""
    found = []
    for action in actions:
        came, errors = process.step([number], action)
        assert not errors
        found.append({name: column.tobytes() for name, column in came.items()})
        if came["terminated"][0] or came["truncated"][0]:
            seen = process.reset([number], [8])
            found.append({name: column.tobytes() for name, column in seen.items()})
    return found


def test_every_simulator_that_supports_state_saving_is_tested() -> None:
    assert {
        name for name in simulators.names() if get_requirements(name).supports_state_saving
    } == OWN.keys()


@pytest.mark.parametrize(("world", "id"), [(w, id) for w, ids in OWN.items() for id in ids])
def test_a_restored_episode_continues_bit_for_bit(world: str, id: str) -> None:
    """Beside other worlds, and where another episode was played before."""
    config = config_of(world, id)
    with closing(create_simulator_process(config)) as process:
        actions = drawn(process.spaces()["action"], BEFORE + AFTER)
        process.reset([0], [3])
        for action in actions[:BEFORE]:
            process.step([0], action)
        saved, errors = process.save([0])
        assert not errors
        assert [state.tobytes() for state in process.save([0])[0]] == [saved[0].tobytes()]
        last = played(process, 0, actions[BEFORE:])
    with closing(create_simulator_process(config)) as process:
        first = process.reset([0, 1], [4, 5])
        process.step([0, 1], np.repeat(actions[0], 2, axis=0))
        seen, errors = process.restore([1], saved)
        assert not errors
        assert seen.keys() == first.keys()
        assert played(process, 1, actions[BEFORE:]) == last
