"""What objects keep comes back as it was, and what cannot is named."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.observations import InvalidEnvConfig, pack_arrays, unpack_arrays
from rlinf.envs.simulators import gymnasium
from rlinf.envs.simulators.episode_state import restore_attributes, save_attributes
from rlinf.envs.vector_env import SyncVectorEnv
from tests.rlinf.envs.keeping_worlds import Engine


def kept() -> dict[str, Any]:
    return {
        "nothing": None,
        "steps": 3,
        "far": float("inf"),
        "pair": (np.float32(0.1), [True, "text"]),
        "last": deque([np.arange(3)], maxlen=2),
        "by_number": {1: {"deep": np.zeros((0, 2), np.int32)}},
    }


def test_types_come_back_with_their_values() -> None:
    """A number of numpy's computes in its own precision, a tuple is no list."""
    other = SimpleNamespace(steps=9, fixed=Engine)
    restore_attributes(
        [other], unpack_arrays(pack_arrays(save_attributes([SimpleNamespace(**kept())])))
    )
    found, wanted = vars(other), kept()
    assert found.pop("fixed") is Engine
    last, first = found.pop("last"), wanted.pop("last")
    assert last.maxlen == 2
    np.testing.assert_array_equal(last[0], first[0])
    deep, same = (each.pop("by_number")[1]["deep"] for each in (found, wanted))
    assert (deep.shape, deep.dtype) == (same.shape, same.dtype)
    assert found == wanted
    assert type(found["pair"][0]) is np.float32


def test_objects_of_one_class_keep_each_their_own() -> None:
    ours = [SimpleNamespace(state=np.full(2, n)) for n in range(2)]
    others = [SimpleNamespace(state=None) for _ in range(2)]
    restore_attributes(others, save_attributes(ours))
    assert [other.state.tolist() for other in others] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState])
def test_generators_go_on_where_they_were_and_stay_the_objects_that_others_hold(make: Any) -> None:
    one, other = make(1), make(2)
    one.normal(size=3)
    state = save_attributes([SimpleNamespace(random=one)])
    holder = SimpleNamespace(random=other)
    restore_attributes([holder], state)
    assert holder.random is other
    np.testing.assert_array_equal(one.normal(size=5), other.normal(size=5))


def test_equal_states_have_equal_bytes() -> None:
    first, second = (pack_arrays(save_attributes([SimpleNamespace(**kept())])) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_what_is_not_plain_is_refused_by_its_name() -> None:
    worlds = SyncVectorEnv(lambda: gymnasium.make("tests.rlinf.envs.keeping_worlds:Foreign-v0", {}))
    worlds.reset([0], [0])
    with pytest.raises(
        InvalidEnvConfig, match=r"task\.carry_over_episodes: Foreign\.engine is of .*Engine, which"
    ):
        worlds.save([0])


@pytest.mark.parametrize("task", ["Hopper-v5", "HalfCheetah-v5", "Pusher-v5"])
def test_robots_go_on_in_worlds_that_are_elsewhere_on_the_ground_or_above_it(task: str) -> None:
    """MuJoCo's data have other arrays with contacts than without."""
    pytest.importorskip("mujoco")
    ours, other = (SyncVectorEnv(lambda: gymnasium.make(task, {})) for _ in range(2))
    random = np.random.default_rng(0)
    ours.reset([0], [0])
    other.reset([0], [0])
    size = ours.spaces()["action"]["shape"][0]
    for seed in range(80):
        action = random.uniform(-1, 1, (1, size)).astype(np.float32)
        (state,), errors = ours.save([0])
        assert not errors
        wanted, _ = ours.step([0], action)
        _, errors = other.restore([0], [state])
        assert not errors
        found, _ = other.step([0], action)
        for name, column in wanted.items():
            np.testing.assert_array_equal(found[name], column)
        if wanted["terminated"].any():
            ours.reset([0], [seed])
    ours.close()
    other.close()
