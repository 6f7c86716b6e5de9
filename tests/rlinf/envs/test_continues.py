"""Episodes that go on over iterations are those of a longer sample, whatever is in between."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.data.episodes import pop_open_episode
from rlinf.data.record import Record
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.episode_runner import EPISODE_METRICS
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.subprocess_env import SimulatorError
from rlinf.errors import ConfigError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from stages.rollout import local_rollout_iter

PENDULUM: dict[str, Any] = {
    "id": "Pendulum-v1",
    "observation": 3,
    "action": {"kind": "box", "size": 1},
    "carry_over_episodes": True,
}
CHEETAH = {**PENDULUM, "id": "HalfCheetah-v5", "observation": 17}
CHEETAH["action"] = {"kind": "box", "size": 6}
FORGETFUL = {**PENDULUM, "id": "tests.rlinf.envs.keeping_worlds:Forgetful-v0", "observation": 1}
SMALL = MLPConfig(hidden=(4,))
STARTS = 3


class Player:
    """A policy that is sure of its actions, in environments that are new in each iteration."""

    def __init__(self, task: dict[str, Any], folder: Path) -> None:
        self.config = GymConfig.model_validate(task)
        bare = self.config.model_copy(update={"images": {}})
        MLPPolicy.create(SMALL, GymEnvironment.model_spec(bare), 0, folder)
        self.engine = DirectEngine(DirectConfig(), MLPPolicy, SMALL)
        self.engine.load(folder, 0)

    def play(
        self, iteration: int, horizon: int, left: dict[int, Record] | None, starts: int = STARTS
    ) -> list[Trajectory]:
        episodes = RolloutRequest(
            0, iteration, "train", range(starts), starts, 1, horizon, 0.0, open_episodes=left
        )
        with closing(GymEnvironment(self.config, None)) as environment:
            return list(local_rollout_iter(environment, self.engine, episodes, "rollout"))

    def iterations(self, count: int, horizon: int) -> Iterator[list[Trajectory]]:
        left: dict[int, Record] = {}
        for iteration in range(count):
            records = self.play(iteration, horizon, left)
            found = [(record.identity.sample, pop_open_episode(record)) for record in records]
            left = {sample: still for sample, still in found if still is not None}
            yield records


@pytest.mark.parametrize(
    "task",
    [
        PENDULUM,
        CHEETAH,
        {**PENDULUM, "num_processes": 2},
        {**PENDULUM, "num_processes": 2, "double_buffer": True},
        {**PENDULUM, "max_parallel_envs": 2},
        {**CHEETAH, "images": {"track": [4, 4]}},
    ],
)
def test_four_samples_are_one_of_four_times_their_length(
    task: dict[str, Any], tmp_path: Path
) -> None:
    player = Player(task, tmp_path)
    whole = player.play(0, 20, {})
    parts = list(player.iterations(4, 5))
    for sample in range(STARTS):
        mine = [records[sample] for records in parts]
        for name, column in whole[sample].to_record().steps.items():
            if name != "bootstrap":
                joined = np.concatenate([record.to_record().steps[name] for record in mine])
                np.testing.assert_array_equal(joined, column, err_msg=name)
        for name in EPISODE_METRICS:
            wanted = whole[sample].scalars()[name]
            assert mine[-1].scalars()[name] == pytest.approx(wanted, rel=1e-12)
        assert [record.episode_length for record in mine] == [5, 10, 15, 20]


def test_a_sample_that_is_cut_off_asks_for_the_value_of_what_follows(tmp_path: Path) -> None:
    """As at any horizon: the episode is neither terminated nor cut off by its simulator there."""
    for records in Player(PENDULUM, tmp_path).iterations(2, 5):
        for record in records:
            assert not record.terminated.any()
            assert not record.truncated.any()
            assert (record.bootstrap_values != 0).tolist() == [False] * 4 + [True]


def test_an_episode_has_the_limit_of_its_simulator_whatever_it_was_cut_into(
    tmp_path: Path,
) -> None:
    task = {**PENDULUM, "kwargs": {"max_episode_steps": 8}}
    ends, lengths = [], []
    for records in Player(task, tmp_path).iterations(4, 4 + 1):
        ends += records[0].truncated.tolist()
        lengths.append(records[0].episode_length)
    assert np.flatnonzero(ends).tolist() == [7, 15]
    assert lengths == [5, 8, 7, 8]


def test_after_an_episode_that_ended_with_its_sample_another_begins(tmp_path: Path) -> None:
    """That of the iteration, as where nothing goes on."""
    player = Player({**PENDULUM, "kwargs": {"max_episode_steps": 5}}, tmp_path)
    assert all(record.open_state is None for record in player.play(0, 5, {}))
    *_, last = player.iterations(2, 5)
    for record, anew in zip(last, player.play(1, 5, None), strict=True):
        assert record.to_record().digest() == anew.to_record().digest()


def test_samples_of_which_nothing_is_left_begin_anew_beside_those_that_go_on(
    tmp_path: Path,
) -> None:
    player = Player(PENDULUM, tmp_path)
    left = {1: pop_open_episode(player.play(0, 5, {})[1])}
    first, second, third = player.play(1, 5, left)  # type: ignore[arg-type]
    anew = player.play(1, 5, None)
    lengths = [record.episode_length for record in (first, second, third)]
    assert lengths == [5, 10, 5]
    for one, other in ((first, anew[0]), (third, anew[2])):
        np.testing.assert_array_equal(one.observations, other.observations)
    assert (second.observations != anew[1].observations).any()


def test_nothing_is_left_where_nothing_is_to_go_on(tmp_path: Path) -> None:
    for record in Player(PENDULUM, tmp_path).play(0, 5, None):
        assert pop_open_episode(record) is None
        assert record.open_state is None
        assert record.open_metrics is None


def test_what_a_dead_process_stepped_begins_anew(tmp_path: Path) -> None:
    """The samples count: their steps were done."""
    with ExitStack() as ending:
        process = ending.enter_context(
            closing(create_simulator_process(GymConfig(id="Pendulum-v1")))
        )
        process.reset([0, 1], [1, 2])
        os.kill(process.pid, signal.SIGKILL)
        states, errors = process.save([0, 1])
        assert [state.size for state in states] == [0, 0]
        assert ["SIGKILL" in errors[row] for row in (0, 1)] == [True, True]
        process.reset([1], [2])
        states, errors = process.save([0, 1])
        assert [state.size > 0 for state in states] == [False, True]
        assert list(errors) == [0]


@pytest.mark.parametrize("processes", [0, 2])
def test_a_world_that_fails_to_save_loses_its_own_episode_alone(
    processes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {"fails": "save", "once": str(tmp_path / "failed")}
    player = Player({**FORGETFUL, "kwargs": kwargs, "num_processes": processes}, tmp_path)
    records = player.play(0, 5, {})
    assert all(loss_mask(record).all() for record in records), "their steps were done"
    (lost,) = [record for record in records if record.open_state is None]
    assert [record.num_failed_episodes for record in records if record is not lost] == [0, 0]
    assert f"group {lost.identity.sample}: the simulator failed to save" in caplog.text
    assert "ZeroDivisionError: no save in this version" in caplog.text
    counts = Counter[str]()
    with closing(GymEnvironment(player.config, None)) as environment:
        environment.score(records, counts)
    assert counts["failed_episodes"] == 1
    left = {
        record.identity.sample: pop_open_episode(record) for record in records if record is not lost
    }
    after = player.play(1, 5, left)  # type: ignore[arg-type]
    lengths = {record.identity.sample: record.episode_length for record in after}
    assert lengths == {s: 5 if s == lost.identity.sample else 10 for s in range(STARTS)}


@pytest.mark.parametrize("processes", [0, 2])
def test_a_state_that_no_world_takes_is_one_message(processes: int, tmp_path: Path) -> None:
    """It is committed, so another attempt has it too: only another simulator helps."""
    task = {**FORGETFUL, "kwargs": {"fails": "restore"}, "num_processes": processes}
    player = Player(task, tmp_path)
    left = {1: pop_open_episode(player.play(0, 5, {})[1])}
    with pytest.raises(SimulatorError) as raised:
        player.play(1, 5, left)  # type: ignore[arg-type]
    assert str(raised.value).startswith(
        "sample 1: this simulator cannot continue the open episode of iteration 0: "
        "ZeroDivisionError: no restore in this version. Restore the versions"
    )
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("fails", ["save", "restore"])
def test_a_world_that_always_fails_to_go_on_is_refused_before_the_run(fails: str) -> None:
    config = GymConfig.model_validate({**FORGETFUL, "kwargs": {"fails": fails}})
    with pytest.raises(
        ConfigError, match=rf"^task\.carry_over_episodes: .*: no {fails} in .*false$"
    ):
        GymEnvironment.verify_spec(config)


@pytest.mark.parametrize(
    "changed",
    [
        {"simulator": "genesis", "id": "reach"},
        {"simulator": "tests.rlinf.envs.speaking_worlds:make"},
    ],
)
def test_a_world_that_is_not_saved_is_refused_before_the_run(changed: dict[str, Any]) -> None:
    config = GymConfig.model_validate({**PENDULUM, **changed})
    with pytest.raises(ConfigError, match=r"task\.carry_over_episodes: this simulator cannot save"):
        GymEnvironment.task_size(config, None)


def test_an_environment_with_unsavable_state_is_refused_at_its_creation() -> None:
    config = GymConfig.model_validate(
        {**PENDULUM, "id": "tests.rlinf.envs.keeping_worlds:Foreign-v0", "observation": 1}
    )
    with pytest.raises(
        ConfigError, match=r"^task\.carry_over_episodes: Foreign\.engine is of .*false$"
    ):
        GymEnvironment.verify_spec(config)
