"""Simulate and generate exchange records; the same address gives the same experience."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from pipeline.commands.experiment import run_experiment
from pipeline.validate_config import validate_config
from rlinf.channels.channel import Channel, LocalChannel
from rlinf.config import RunConfig, validate
from rlinf.data.record import Record
from rlinf.data.trajectory import Trajectory
from rlinf.data.transitions import to_transitions
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.errors import ConfigError, MissingPackageError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.seeding import generator
from stages.rollout import local_rollout_iter

POLICY = MLPConfig(hidden=(16,))


@pytest.fixture(params=["CartPole-v1", "Pendulum-v1"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[GymEnvironment, DirectEngine]:
    task = GymConfig(id=request.param)
    MLPPolicy.create(POLICY, GymEnvironment.read_spec(task), 0, tmp_path)
    engine = DirectEngine(DirectConfig(), MLPPolicy, POLICY)
    engine.load(tmp_path, 4)
    return GymEnvironment(task, None), engine


def run(
    parts: tuple[GymEnvironment, DirectEngine], starts: range, split: str = "train"
) -> list[Trajectory]:
    episodes = RolloutRequest(1, 2, split, starts, 4, 1, 40, 1.0 if split == "train" else 0.0)  # type: ignore[arg-type]
    return sorted(
        local_rollout_iter(*parts, episodes, "rollout"), key=lambda record: record.identity
    )


def test_trajectories_are_those_of_a_plain_loop_over_their_own_policy(
    parts: tuple[GymEnvironment, DirectEngine], tmp_path: Path
) -> None:
    import torch

    policy = MLPPolicy.load(tmp_path, POLICY)
    for record in run(parts, range(3)):
        assert len(record) == 40
        assert record.policy_version == 4
        with torch.no_grad():
            outputs = policy.evaluate(policy.collate([record]), 1.0)
        np.testing.assert_allclose(outputs.logprobs[0], record.logprobs, atol=1e-5)
        np.testing.assert_allclose(outputs.values[0], record.values, atol=1e-5)
        cut = record.bootstrap_values != 0
        assert not np.any(cut & (record.terminated == 1)), "no value after a real end"
        if not record.terminated[-1]:
            assert cut[-1], "an open segment is bootstrapped"


def test_experience_does_not_depend_on_who_collects_it(
    parts: tuple[GymEnvironment, DirectEngine],
) -> None:
    whole = run(parts, range(4))
    pieces = run(parts, range(0, 4, 2)) + run(parts, range(1, 4, 2))
    for a, b in zip(whole, sorted(pieces, key=lambda r: r.identity), strict=True):
        assert a.identity == b.identity
        ours, theirs = a.to_record().steps, b.to_record().steps
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_evaluation_plays_one_episode_with_the_best_action(
    parts: tuple[GymEnvironment, DirectEngine],
) -> None:
    first, second = run(parts, range(3), "test"), run(parts, range(3), "test")
    assert [r.scalars() for r in first] == [r.scalars() for r in second]
    for record in first:
        assert record.num_episodes <= 1
        assert record.episode_return == pytest.approx(float(record.rewards.sum()), rel=1e-4)


def value_of(observations: np.ndarray) -> np.ndarray:
    """What the scripted engine says states are worth."""
    return np.asarray(observations.sum(-1) + 10, np.float32)


def say_values(observations: np.ndarray) -> dict[str, np.ndarray]:
    return {"value": value_of(observations)}


def script(
    act: Callable[[np.ndarray, np.ndarray], np.ndarray],
    say: Callable[[np.ndarray], dict[str, np.ndarray]],
) -> Any:
    """An engine that acts by a function of sample numbers and observations, and says more."""

    def serve(observations: Channel, actions: Channel) -> None:
        for request in observations:
            samples, seen = request.steps["sample"], request.steps["observation"]
            steps = {"sample": samples, "action": act(samples, seen), **say(seen)}
            steps["logprob"] = np.zeros(len(samples), np.float32)
            actions.put(Record(request.identity, steps, info={"version": 1}))
        actions.close()

    return serve


def balance(samples: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Pushes towards where the pole falls, sample 0 always to the left."""
    return np.where(samples == 0, 0, (seen[:, 2] + seen[:, 3] > 0)).astype(np.int64)


def played(
    task: GymEnvironment,
    act: Callable[[np.ndarray, np.ndarray], np.ndarray] = balance,
    *,
    iteration: int = 2,
    split: Literal["train", "test"] = "train",
    group_size: int = 1,
    horizon: int = 40,
    starts: int = 3,
    say: Callable[[np.ndarray], dict[str, np.ndarray]] = say_values,
) -> list[Trajectory]:
    """Some starts, simulated against a scripted engine."""
    request, answers = LocalChannel(), LocalChannel()
    worker = threading.Thread(target=script(act, say), args=(request, answers))
    worker.start()
    episodes = RolloutRequest(1, iteration, split, range(starts), starts, group_size, horizon, 1.0)
    records = list(task.simulate(episodes, request, answers))
    worker.join(timeout=30)
    assert not worker.is_alive(), "the environment closes the observation channel"
    return records


def test_rewards_ends_and_bootstraps_are_those_of_a_plain_loop() -> None:
    import gymnasium

    limit, horizon = 15, 40
    task = GymEnvironment(GymConfig(id="CartPole-v1", kwargs={"max_episode_steps": limit}), None)
    kinds = set()
    for record in played(task, horizon=horizon):
        start, episode = record.identity.sample, 0
        world = gymnasium.make("CartPole-v1", max_episode_steps=limit)

        def reset(episode: int, start: int = start, world: Any = world) -> np.ndarray:
            random = generator(1, 2, "train", "reset", start, episode)
            return np.asarray(world.reset(seed=int(random.integers(2**31)))[0])

        seen = reset(0)
        for t in range(horizon):
            row = {name: column[t] for name, column in record.to_record().steps.items()}
            np.testing.assert_array_equal(row["observations"], seen.astype(np.float32))
            seen, reward, terminated, truncated, _ = world.step(int(row["actions"]))
            truncated = truncated and not terminated
            assert (row["rewards"], row["terminated"], row["truncated"]) == (
                reward,
                terminated,
                truncated,
            )
            cut = truncated or (t + 1 == horizon and not terminated)
            expected = value_of(seen.astype(np.float32)) if cut else 0
            assert row["bootstrap"] == pytest.approx(expected, rel=1e-6)
            kinds.add((bool(terminated), bool(cut), t + 1 == horizon))
            if terminated or truncated:
                episode += 1
                seen = reset(episode)
        assert record.num_episodes == episode
    assert {(True, False, False), (False, True, False), (False, True, True)} <= kinds


def test_samples_of_a_group_share_their_start_and_not_their_actions() -> None:
    task = GymEnvironment(GymConfig(id="CartPole-v1"), None)
    records = played(task, group_size=2)
    first = [tuple(record.observations[0]) for record in records]
    assert [record.group for record in records] == [0, 0, 1, 1, 2, 2]
    assert [a == b for a, b in zip(first, first[1:], strict=False)] == [1, 0, 1, 0, 1]
    assert not np.array_equal(records[0].actions, records[1].actions)


@pytest.mark.parametrize("name", ["CartPole-v1", "HalfCheetah-v5"])
def test_experience_does_not_depend_on_what_a_simulator_did_before(name: str) -> None:
    if name == "HalfCheetah-v5":
        pytest.importorskip("mujoco")

    def act(samples: np.ndarray, seen: np.ndarray) -> np.ndarray:
        if name == "CartPole-v1":
            return balance(samples, seen)
        return np.sin(7 * seen[:, :6]).astype(np.float32)

    used, fresh = (GymEnvironment(GymConfig(id=name), None) for _ in range(2))
    played(used, act, iteration=1, split="test", horizon=33)
    for a, b in zip(played(used, act), played(fresh, act), strict=True):
        assert a.to_record().digest() == b.to_record().digest()


def test_iterations_and_splits_begin_in_different_states() -> None:
    task = GymEnvironment(GymConfig(id="CartPole-v1"), None)
    runs = [played(task), played(task, iteration=3), played(task, split="test")]
    first = {record.observations[0].tobytes() for run in runs for record in run}
    assert len(first) == 9


def test_a_segment_whose_last_step_ends_the_episode_has_no_bootstrap() -> None:
    task = GymEnvironment(GymConfig(id="CartPole-v1"), None)
    ends = int(played(task)[0].terminated.argmax())
    record = played(task, horizon=ends + 1)[0]
    assert record.terminated[-1]
    assert not record.bootstrap_values.any()


def test_actions_are_clipped_for_the_simulator_and_kept_as_drawn() -> None:
    pytest.importorskip("mujoco")
    # HalfCheetah charges for the action it is given, however large.
    task = GymEnvironment(GymConfig(id="HalfCheetah-v5"), None)
    rewards = []
    for size in (50.0, 1.0):
        record = played(task, lambda n, _, size=size: np.full((len(n), 6), size, np.float32))[0]
        assert (record.actions == size).all()
        rewards.append(record.rewards)
    np.testing.assert_array_equal(*rewards)


def test_without_gymnasium_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingPackageError, match="sims"):
        GymEnvironment.read_spec(GymConfig(id="CartPole-v1"))


def test_mujoco_leaves_no_log_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    spec = GymEnvironment.read_spec(GymConfig(id="HalfCheetah-v5"))
    bounds = {"low": [-1.0] * 6, "high": [1.0] * 6, "dtype": "float32"}
    assert spec == {"observation": 17, "action": {"kind": "box", "size": 6, **bounds}}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("processes", [0, 2])
def test_whatever_a_policy_says_of_its_actions_is_in_the_trajectory(processes: int) -> None:
    """The denoising chain of an action, say; a policy without a value head gives no values."""

    def chain(seen: np.ndarray) -> dict[str, np.ndarray]:
        return {"chain": seen[:, None, :2] * np.arange(3, dtype=np.float32)[None, :, None]}

    task = GymEnvironment(GymConfig(id="CartPole-v1", num_processes=processes), None)
    records = played(task, horizon=9, say=chain)
    task.close()
    for record in records:
        np.testing.assert_array_equal(
            record.policy_columns["chain"], chain(record.observations)["chain"]
        )
        assert record.values is None
        assert record.bootstrap_values is None


def test_a_run_is_checked_without_a_simulator(
    monkeypatch: pytest.MonkeyPatch, compose: Callable[..., dict[str, Any]]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    validate_config(validate(RunConfig, compose(experiment="cartpole_ppo")))


@pytest.mark.usefixtures("undrawn")
def test_the_first_stage_sees_that_the_configuration_knows_the_simulator(
    compose: Callable[..., dict[str, Any]],
) -> None:
    with pytest.raises(ConfigError, match=r"task.observation: 5 is not what CartPole-v1 has; .* 4"):
        run_experiment(compose("task.observation=5", experiment="cartpole_ppo"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"id": "CartPoel-v1"}, "CartPoel-v1"),
        ({"id": "nowhere:Thing-v0"}, "nowhere"),
        ({"kwargs": {"wind": 3}}, "wind"),
        ({"id": "Blackjack-v1"}, "4 is not what"),
        ({"id": "Pendulum-v1"}, "4 is not what"),
        ({"action": {"kind": "box", "size": 2}}, "is not what CartPole"),
    ],
)
def test_a_simulator_that_is_another_is_refused(changes: dict[str, Any], text: str) -> None:
    right = {"id": "CartPole-v1", "observation": 4, "action": {"kind": "discrete", "size": 2}}
    with pytest.raises(ConfigError, match=rf"task\.\w+: .*{text}"):
        GymEnvironment.verify_spec(GymConfig.model_validate({**right, **changes}))


def test_what_a_policy_is_made_for_must_be_said() -> None:
    with pytest.raises(ConfigError, match=r"task.action: is not set.*read from the simulator"):
        GymEnvironment.model_spec(GymConfig(id="CartPole-v1", observation=4))


@pytest.mark.parametrize("limit", [7, 1000])
def test_what_was_seen_after_a_cut_is_kept(limit: int) -> None:
    """It is the observation that acting on from there would have begun with."""
    task = GymConfig(id="Pendulum-v1", kwargs={"max_episode_steps": limit})

    def push(samples: np.ndarray, seen: np.ndarray) -> np.ndarray:
        return np.full((len(samples), 1), 0.5, np.float32)

    environment = GymEnvironment(task, None)
    record = played(environment, push, horizon=30)[0]
    cut = record.truncation_steps.tolist()
    assert cut == ([6, 13, 20, 27, 29] if limit == 7 else [29])
    longer = played(environment, push, horizon=31)[0]
    last = record.final_observations[-1]
    np.testing.assert_array_equal(last, longer.observations[30])
    rows = to_transitions(record, record.rewards)
    assert rows["truncated"].nonzero()[0].tolist() == cut
    assert not rows["terminated"].any()
    environment.close()
