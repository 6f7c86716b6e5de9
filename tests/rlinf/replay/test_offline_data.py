"""Demonstrations and data sets are read, or refused by the name of the column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rlinf.channels.record_files import write_records
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import DataError
from rlinf.replay import offline_data

COLUMNS: dict[str, Any] = {
    "observations": np.arange(10, dtype=np.float32).reshape(5, 2),
    "actions": np.zeros((5, 1), np.float64),
    "rewards": np.arange(5.0),
    "terminals": np.array([False, True, False, False, False]),
    "timeouts": np.array([False, False, False, True, False]),
}


def written(path: Path, columns: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file[name] = column
    return path


def test_columns_with_what_came_next_are_taken_whole(tmp_path: Path) -> None:
    given = {**COLUMNS, "next_observations": COLUMNS["observations"] + 100}
    path = written(tmp_path / "data.hdf5", given)
    offline_data.check_offline_data(path)
    rows = offline_data.load_offline_data(path).take(np.arange(5))
    np.testing.assert_array_equal(rows["next_observations"], COLUMNS["observations"] + 100)
    assert rows["terminated"].tolist() == [0, 1, 0, 0, 0]
    assert rows["truncated"].tolist() == [0, 0, 0, 1, 0]


def test_without_it_rows_whose_next_is_unknown_are_left_out(tmp_path: Path) -> None:
    held = offline_data.load_offline_data(written(tmp_path / "data.hdf5", COLUMNS))
    rows = held.take(np.arange(len(held)))
    assert rows["rewards"].tolist() == [0, 1, 2], "a cut and the last row have no next one"
    assert rows["next_observations"][[0, 2]].tolist() == [[2, 3], [6, 7]]


def test_trajectories_of_a_rollout_are_read(tmp_path: Path) -> None:
    trajectory = Trajectory(
        identity=RecordId(0, 0),
        observations=np.ones((3, 2), np.float32),
        actions=np.zeros((3, 1)),
        rewards=np.arange(3, dtype=np.float32),
        terminated=np.zeros(3, np.uint8),
        truncation_steps=np.array([2]),
        final_observations=np.full((1, 2), 9, np.float32),
    )
    write_records(tmp_path / "trajectories-r000-p000.h5", [trajectory.to_record()])
    for path in (tmp_path, tmp_path / "trajectories-r000-p000.h5"):
        offline_data.check_offline_data(path)
        rows = offline_data.load_offline_data(path).take(np.arange(3))
        assert rows["next_observations"][:, 0].tolist() == [1, 1, 9]
        assert rows["truncated"].tolist() == [0, 0, 1]


def test_what_holds_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no file trajectories-\*\.h5"):
        offline_data.check_offline_data(tmp_path)
    with pytest.raises(DataError, match="no readable HDF5 file"):
        offline_data.check_offline_data(tmp_path / "missing.hdf5")
    lacking = {name: column for name, column in COLUMNS.items() if name != "terminals"}
    with pytest.raises(DataError, match=r"no data set 'terminated' \(or terminals\)"):
        offline_data.check_offline_data(written(tmp_path / "lacking.hdf5", lacking))
    with pytest.raises(DataError, match=r"rewards is \(4,\), with 5 observations"):
        offline_data.check_offline_data(
            written(tmp_path / "short.hdf5", {**COLUMNS, "rewards": np.zeros(4)})
        )


def test_rewards_are_what_a_run_makes_of_the_simulators(tmp_path: Path) -> None:
    path = written(tmp_path / "data.hdf5", COLUMNS)
    held = offline_data.load_offline_data(path, lambda record: record.rewards * 0.1)
    np.testing.assert_allclose(held.take(np.arange(3))["rewards"], [0, 0.1, 0.2], rtol=1e-6)
