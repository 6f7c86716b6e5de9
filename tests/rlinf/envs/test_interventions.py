"""What a person did in the policy's place: in trajectories, transitions and demonstrations."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.results import extract_interventions
from rlinf.channels.record_files import RecordFileReader, RecordFileWriter
from rlinf.data.batch import TrainingSample, build_step_batch
from rlinf.data.lerobot import split_episodes
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.data.transitions import executed_actions, to_transitions
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.errors import DataError, InputError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.replay import offline_data
from stages.rollout import local_rollout_iter
from tests.rlinf.envs.helped_worlds import STEPS

HELPED: dict[str, Any] = {
    "simulator": "tests.rlinf.envs.helped_worlds:make",
    "id": "helped",
    "observation": 1,
    "action": {"kind": "box", "size": 2},
}
HORIZON = 23


def collected(folder: Path, chunk: int = 1, **changed: Any) -> list[Trajectory]:
    config = GymConfig.model_validate({**HELPED, **changed})
    small = MLPConfig(hidden=(8,), chunk_size=chunk)
    MLPPolicy.create(small, GymEnvironment.model_spec(config), 0, folder)
    engine = DirectEngine(DirectConfig(), MLPPolicy, small)
    engine.load(folder, 0)
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        episodes = RolloutRequest(0, 0, "train", range(3), 3, 1, HORIZON, 1.0)
        records = list(local_rollout_iter(environment, engine, episodes, "rollout"))
        counts = Counter[str]()
        environment.score(records, counts)
    assert counts["intervened_steps"] == sum(int(r.intervened.sum()) for r in records)
    assert counts["late_steps"] == sum(int(r.late.sum()) for r in records)
    return records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    return collected(tmp_path_factory.mktemp("policy"))


def begun(record: Trajectory) -> np.ndarray:
    """Of each step how many of its episode were before it."""
    return record.observations[:, 0].astype(int)


def test_trajectories_say_where_a_person_acted_and_keep_what_the_policy_drew(
    records: list[Trajectory],
) -> None:
    for record in records:
        acted = record.intervened != 0
        assert (begun(record)[acted] % 3 == 1).all()
        np.testing.assert_array_equal(record.late, begun(record) == 3)
        drawn = np.clip(record.actions, -1, 1)
        np.testing.assert_array_equal(record.executed_actions[~acted], drawn[~acted])
        np.testing.assert_array_equal(record.executed_actions[acted], -drawn[acted])
    assert sum(int(r.intervened.sum()) for r in records) > 0


@pytest.mark.parametrize(
    "options", [{"num_processes": 1}, {"num_processes": 2, "double_buffer": True}]
)
def test_processes_tell_the_same(
    records: list[Trajectory], options: dict[str, Any], tmp_path: Path
) -> None:
    for mine, theirs in zip(records, collected(tmp_path, **options), strict=True):
        for name in ("intervened", "executed_actions", "late"):
            ours, others = getattr(mine, name), getattr(theirs, name)
            np.testing.assert_array_equal(ours, others, err_msg=name)


def test_transitions_have_what_was_carried_out(records: list[Trajectory]) -> None:
    for record in records:
        acted = record.intervened != 0
        rows = to_transitions(record, record.rewards)
        assert len(rows) == HORIZON, "with those steps, and their rewards"
        np.testing.assert_array_equal(rows["actions"][acted], record.executed_actions[acted])
        np.testing.assert_array_equal(rows["actions"][~acted], record.actions[~acted])
        written = np.concatenate([episode["actions"] for episode in split_episodes(record)])
        np.testing.assert_array_equal(written, rows["actions"], err_msg="for LeRobot")


def test_chunks_say_it_of_each_of_their_actions(tmp_path: Path) -> None:
    for record in collected(tmp_path, chunk=2):
        acted = record.intervened
        assert acted.shape == (HORIZON, 2)
        second = np.isin(begun(record) % STEPS, (0,))
        np.testing.assert_array_equal(acted[second][:, 0], 0)
        # An episode of five actions is two chunks and a half: what was not begun is nobody's.
        cut = record.num_executed == 1
        assert cut.any()
        np.testing.assert_array_equal(record.executed_actions[cut][:, 1], 0)
        done = executed_actions(record)
        np.testing.assert_array_equal(done[acted != 0], record.executed_actions[acted != 0])


def test_helped_episodes_become_prior_data(records: list[Trajectory], tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "prior"
    source.mkdir()
    writer = RecordFileWriter(source, "trajectories")
    for record in records:
        writer.put(record.to_record())
    writer.close()
    wanted = []
    for record in records:
        rows = to_transitions(record, record.rewards)
        for start in range(0, HORIZON, STEPS):
            part = slice(start, min(start + STEPS, HORIZON))
            if record.intervened[part].any():
                wanted.append(rows[part])
    result = extract_interventions(source, to)
    assert result.startswith(f"{len(wanted)} episodes, {sum(map(len, wanted))} steps")
    assert 0 < len(wanted) < 3 * -(-HORIZON // STEPS), "some were helped and some were not"
    offline_data.check_offline_data(to)
    found = offline_data.load_offline_data(to)
    np.testing.assert_array_equal(found.take(np.arange(len(found))), np.concatenate(wanted))
    first = next(iter(RecordFileReader(sorted(to.glob("trajectories-*.h5")))))
    again = Trajectory.from_record(first)
    np.testing.assert_array_equal(again.actions, executed_actions(again), "once and for all")
    with pytest.raises(InputError, match="is not empty"):
        extract_interventions(source, to)
    with pytest.raises(DataError, match=r"has no file trajectories-\*\.h5"):
        extract_interventions(tmp_path, tmp_path / "other")


def test_algorithms_of_the_policys_own_choices_refuse_them(records: list[Trajectory]) -> None:
    helped = next(record for record in records if record.intervened.any())
    with pytest.raises(InputError, match="a person acted in it"):
        build_step_batch([TrainingSample(helped)])


def test_an_episode_that_is_lost_at_its_first_step_has_the_same_columns(tmp_path: Path) -> None:
    """As where there is one environment at a time, and nothing else tells."""
    file = tmp_path / "fell"
    lost, whole = (
        collected(tmp_path, kwargs={"falls": str(file)}, num_processes=processes)[0]
        for processes in (1, 0)
    )
    assert not loss_mask(lost)[0]
    assert loss_mask(whole).all()
    shapes = [
        {name: (column.dtype, column.shape) for name, column in one.to_record().steps.items()}
        for one in (lost, whole)
    ]
    assert shapes[0] == shapes[1]
