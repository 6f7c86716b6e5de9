"""Several tasks in a run, and episodes that go on after they terminated."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.data.episodes import pop_open_episode
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process, task_ids
from rlinf.errors import ConfigError, InputError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from stages.evaluate import scores_by_task
from stages.rollout import local_rollout_iter

ALL: dict[str, Any] = {
    "simulator": "tests.rlinf.envs.several_worlds:make",
    "id": "ALL",
    "append_task_one_hot": True,
    "observation": 4,
    "action": {"kind": "box", "size": 2},
}
NAMES = ["one", "two", "three"]


def played(folder: Path, split: Any, starts: int, **changed: Any) -> list[Trajectory]:
    """``changed``: keys of the task, or of the episodes."""
    of: dict[str, Any] = {
        **{"seed": 0, "iteration": 0, "split": split, "group_ids": range(starts)},
        **{"num_groups": starts, "groups_per_batch": None},
        **{"group_size": 1, "horizon": 6, "temperature": 1.0, "open_episodes": None},
    }
    of |= {name: changed.pop(name) for name in of.keys() & changed.keys()}
    config = GymConfig.model_validate({**ALL, **changed})
    small = MLPConfig(hidden=(4,))
    bare = config.model_copy(update={"images": {}, "instruction": False})
    MLPPolicy.create(small, GymEnvironment.model_spec(bare), 0, folder)
    engine = DirectEngine(DirectConfig(), MLPPolicy, small)
    engine.load(folder, 0)
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        records = local_rollout_iter(environment, engine, RolloutRequest(**of), "rollout")
        return sorted(records, key=lambda record: record.identity)


@pytest.mark.parametrize("processes", [0, 2])
def test_tasks_take_turns_over_starts_and_iterations_and_are_told(
    processes: int, tmp_path: Path
) -> None:
    found = []
    for iteration in range(3):
        for record in played(tmp_path, "train", 4, iteration=iteration, num_processes=processes):
            seen = record.observations
            (task,) = {int(shown) // 10 for shown in seen[:, 0].tolist()}
            assert (seen[:, 1:] == np.eye(3)[task]).all()
            assert record.task == NAMES[task]
            assert record.num_episodes == 2
            found.append(task)
    assert found == [0, 1, 2] * 4


def test_batches_that_are_drawn_several_times_are_of_all_tasks(tmp_path: Path) -> None:
    """Turns go on from one batch to the next, not from one iteration's last draw."""
    found = []
    for iteration in range(3):
        drawn = {"num_groups": 6, "groups_per_batch": 2, "iteration": iteration}
        found.append([r.task for r in played(tmp_path, "train", 2, **drawn)])
    assert found == [["one", "two"], ["three", "one"], ["two", "three"]]


def test_samples_of_a_group_are_of_one_task(tmp_path: Path) -> None:
    records = played(tmp_path, "train", 2, group_size=2)
    assert [record.task for record in records] == ["one", "one", "two", "two"]


def test_held_out_starts_are_of_each_task_in_each_of_its_states(tmp_path: Path) -> None:
    records = played(tmp_path, "test", 6, iteration=5)
    assert [record.task for record in records] == NAMES * 2
    begun = [record.observations[0, 0] for record in records]
    assert begun == [0, 10, 20, 1, 11, 21]


def test_pictures_and_instructions_are_of_the_task_that_is_there(tmp_path: Path) -> None:
    settings = {
        "append_task_one_hot": False,
        "observation": 1,
        "images": {"side": [2, 2]},
        "instruction": True,
    }
    config = GymConfig.model_validate({**ALL, **settings})
    GymEnvironment.verify_spec(config)
    with contextlib.closing(create_simulator_process(config)) as process:
        seen = process.reset([0, 1], [0, 0], None, [4, 8])
        assert seen["side"][:, 0, 0, 0].tolist() == [1, 2]
        assert [bytes(row).rstrip(b"\0") for row in seen["instruction"]] == [b"do two", b"do three"]
        shown = process.demonstrate(0, 10)
        assert shown["success"].tolist() == [0, 1]


def test_an_episode_that_is_open_goes_on_in_its_own_task(tmp_path: Path) -> None:
    left: dict[int, Record] = {}
    for iteration in range(2):
        records = played(
            tmp_path,
            "train",
            4,
            iteration=iteration,
            open_episodes=left,
            horizon=2,
            carry_over_episodes=True,
        )
        assert [record.task for record in records] == [*NAMES, "one"]
        found = [(record.identity.sample, pop_open_episode(record)) for record in records]
        left = {sample: still for sample, still in found if still is not None}
        if not iteration:
            assert len(left) == 4
    first = [record.observations[0].tolist() for record in records]
    np.testing.assert_allclose([row[0] for row in first], [0.2, 10.2, 20.2, 0.2], rtol=1e-6)
    assert [row[1:] for row in first] == [*np.eye(3).tolist(), [1, 0, 0]]


@pytest.mark.parametrize("processes", [0, 1])
def test_terminations_are_ignored_and_success_is_counted(processes: int, tmp_path: Path) -> None:
    task = {"ignore_terminations": True, "score_by_success": True, "num_processes": processes}
    for record in played(tmp_path, "train", 1, horizon=7, id="FIRST", observation=3, **task):
        assert not record.terminated.any()
        assert record.truncated.tolist() == [0, 0, 0, 0, 1, 0, 0]
        assert [record.success_once, record.success_at_end, record.episode_length] == [1, 0, 5]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"append_task_one_hot": False, "observation": 1},
            r"task\.append_task_one_hot: there are 3 tasks, and the policy",
        ),
        ({"id": "one"}, r"task\.append_task_one_hot: there is one task; set it to false"),
        (
            {"simulator": "isaaclab", "id": ["A", "B"]},
            r"task\.id: isaaclab steps all environments together, of one task",
        ),
        (
            {
                "simulator": "genesis",
                "id": "reach",
                "append_task_one_hot": False,
                "ignore_terminations": True,
            },
            r"task\.ignore_terminations: genesis steps all .*; set it to false",
        ),
        ({"id": ["one", "none"], "observation": 3}, r"task\.id: there is no none"),
        ({"id": ["one", "wide"], "observation": 3}, r"task\.id: wide has other spaces"),
        ({"observation": 1}, r"task\.observation: 1 is not what .* has; set it to 4"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = GymConfig.model_validate({**ALL, **changed})
    with pytest.raises((ConfigError, InputError), match=message):
        GymEnvironment.task_size(config, None)
        GymEnvironment.verify_spec(config)
        played(tmp_path, "train", 2, **changed)


def test_a_name_for_several_tasks_is_a_list_of_them() -> None:
    assert task_ids(GymConfig.model_validate(ALL)) == NAMES
    suite = GymConfig.model_validate({"simulator": "libero", "id": "libero_spatial"})
    assert task_ids(suite) == [f"libero_spatial/{number}" for number in range(10)]
    assert (
        GymEnvironment.num_tasks(GymConfig.model_validate({"simulator": "metaworld", "id": "MT50"}))
        == 50
    )


def test_evaluation_has_a_score_of_each_task() -> None:
    def of(task: str | None) -> Trajectory:
        return Trajectory(identity=RecordId(0, 0), actions=np.zeros(1), task=task)

    scores = [1.0, 0.0, 3.0, float("nan"), 7.0]
    tasks = ["one", "two", "one", "two", None]
    assert scores_by_task([of(task) for task in tasks], scores) == {"one": [1.0, 3.0], "two": [0.0]}
