"""No part of an observation is lost, and every action that a policy gives is one of the space."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from gymnasium import spaces

from rlinf.data.trajectory import Trajectory
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.envs.observations import InvalidEnvConfig, ObservationSelection
from rlinf.envs.spaces import flatten_env, to_env_actions
from rlinf.errors import ConfigError
from tests.rlinf.envs import test_gym
from tests.rlinf.envs.structured_worlds import GOALS, Sampled

SAMPLED = "tests.rlinf.envs.structured_worlds:Sampled-v0"
LEAVES = st.one_of(
    st.builds(spaces.Discrete, st.integers(1, 3), start=st.integers(-2, 2)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 3), min_size=1, max_size=2)),
    st.builds(spaces.MultiBinary, st.integers(1, 2)),
)
BOXES = st.builds(
    lambda shape: spaces.Box(-2, 3, tuple(shape)), st.lists(st.integers(1, 3), max_size=3)
)


def composed(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=2).map(spaces.Tuple),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2).map(spaces.Dict),
        ),
        max_leaves=3,
    )


@settings(max_examples=60, deadline=None)
@given(composed(st.one_of(LEAVES, BOXES)), st.integers(0, 99))
def test_the_state_is_what_gymnasium_flattens(space: Any, seed: int) -> None:
    world = Sampled(space)
    plain = flatten_env(world, ObservationSelection())
    shown = plain.reset(seed=seed)[0]
    state = shown["state"] if isinstance(shown, dict) else shown
    np.testing.assert_array_equal(state, spaces.flatten(space, world.shown))
    shown = plain.step(np.zeros(2, np.float32))[0]
    state = shown["state"] if isinstance(shown, dict) else shown
    np.testing.assert_array_equal(state, spaces.flatten(space, world.shown))


def test_actions_of_an_integer_box_are_rounded_and_clipped() -> None:
    actions = to_env_actions(spaces.Box(-2, 3, (4,), np.int64), np.array([[2.7, -0.4, -9.0, 9.0]]))
    assert actions.dtype == np.int64
    assert actions.tolist() == [[3, 0, -2, 3]]


@settings(max_examples=60, deadline=None)
@given(st.one_of(composed(LEAVES), composed(BOXES)), st.integers(0, 99))
def test_every_action_of_the_space_can_be_given_and_nothing_else(space: Any, seed: int) -> None:
    """The expert's actions, translated to what a policy gives and back, are carried out as such."""
    world = Sampled("goals", space)
    plain = flatten_env(world, ObservationSelection())
    plain.reset(seed=0)
    space.seed(seed)
    world.expert_action = space.sample  # type: ignore[attr-defined]
    action, given = plain.action_space, np.asarray(plain.expert_action())
    if action is space:
        return
    plain.step(to_env_actions(action, given[None])[0])
    space.seed(seed)
    wanted = spaces.flatten(space, space.sample())
    np.testing.assert_allclose(spaces.flatten(space, world.done), wanted, rtol=1e-6)
    if hasattr(action, "low"):
        plain.step(to_env_actions(action, np.full((1, *action.shape), 99.0))[0])
    else:
        for choice in range(action.n):
            plain.step(to_env_actions(action, np.array([choice]))[0])


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Text(5), "'x' is Text"),
        (spaces.Sequence(spaces.Discrete(2)), "'x' is Sequence"),
        (spaces.Graph(spaces.Box(0, 1, (2,)), None), "'x' is Graph"),
        (spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]), "'x' is OneOf"),
        (spaces.Box(0, 255, (8, 9, 3), np.uint8), r"set task.images.x=\[8, 9\]"),
        (spaces.Box(0, 255, (3, 8, 9), np.uint8), r"images must be \[H, W, 3\]"),
    ],
)
def test_what_has_no_vector_is_refused_by_its_name_or_left_out_on_request(
    space: Any, message: str
) -> None:
    world = Sampled(spaces.Dict(x=space, state=spaces.Box(-1, 1, (2,))))
    with pytest.raises(InvalidEnvConfig, match=message):
        flatten_env(world, ObservationSelection())
    left = flatten_env(world, ObservationSelection(ignored=["x"])).reset(seed=1)[0]
    np.testing.assert_array_equal(left["state"], world.shown["state"])
    with pytest.raises(
        InvalidEnvConfig, match=r"task.ignore_observations: there is no 'y', but x, state"
    ):
        flatten_env(world, ObservationSelection(ignored=["x", "y"]))


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.MultiDiscrete([100, 100]), "10,000 combinations"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,))]), "not both"),
        (spaces.Text(3), "vectors"),
    ],
)
def test_actions_that_no_policy_gives_are_refused(space: Any, text: str) -> None:
    with pytest.raises(InvalidEnvConfig, match=f"task.id: its actions are .*{text}"):
        flatten_env(Sampled("goals", space), ObservationSelection())


@contextmanager
def environment(**keys: Any) -> Iterator[GymEnvironment]:
    found = GymEnvironment(GymConfig.model_validate(keys), None)
    yield found
    found.close()


def played(task: GymEnvironment, action: np.ndarray, starts: int = 2) -> list[Trajectory]:
    def act(samples: np.ndarray, seen: np.ndarray) -> np.ndarray:
        return np.repeat(action[None], len(samples), 0)

    return test_gym.played(task, act, horizon=8, starts=starts, say=lambda _: {})


@pytest.mark.parametrize("processes", [0, 2])
def test_a_goal_beside_the_state_reaches_the_policy(processes: int) -> None:
    config = {"id": SAMPLED, "num_processes": processes}
    assert GymEnvironment.read_spec(GymConfig.model_validate(config))["observation"] == 5
    with environment(**config) as task:
        for record in played(task, np.zeros(2, np.float32)):
            assert record.observations.shape == (8, 5)
            assert record.final_observations.shape[1] == 5
            assert record.observations.std(0).min() > 0
            assert not record.images


def test_a_picture_within_the_observation_is_a_camera() -> None:
    keys: dict[str, Any] = {"id": SAMPLED, "kwargs": {"observation": "pictures"}}
    keys["ignore_observations"] = ["words"]
    with pytest.raises(ConfigError, match=r"set task.images.sensor_rgb=\[4, 5\]"):
        GymEnvironment.read_spec(GymConfig.model_validate(keys))
    keys["images"] = {"sensor_rgb": [4, 5]}
    with environment(**keys) as task:
        record = played(task, np.zeros(2, np.float32), 1)[0]
    assert record.images["sensor_rgb"].shape == (8, 4, 5, 3)
    assert record.images["sensor_rgb"].dtype == np.uint8
    assert record.observations.shape == (8, 2)


def test_environments_that_are_stepped_together_are_flattened_too() -> None:
    keys = {"id": "many", "simulator": "tests.rlinf.envs.structured_worlds:make"}
    spec = GymEnvironment.read_spec(GymConfig.model_validate(keys))
    assert spec == {"observation": 5, "action": {"kind": "discrete", "size": 6}}
    with environment(**keys) as task:
        records = played(task, np.array(5))
    for number, record in enumerate(records):
        seen = record.observations
        wanted = {"state": [[3 * t, number] for t in range(8)], "goal": np.full((8, 3), 7)}
        parts = [wanted[name] for name in GOALS.spaces]
        np.testing.assert_array_equal(seen, np.concatenate(parts, 1))


def test_observations_that_are_choices_are_one_hot() -> None:
    for name, size in (("Blackjack-v1", 45), ("FrozenLake-v1", 16), ("Taxi-v4", 500)):
        assert GymEnvironment.read_spec(GymConfig(id=name))["observation"] == size
