"""Offline data: transitions that existed before a run, such as demonstrations.

Supported are trajectory files of rollouts (a ``trajectories-*.h5`` file, or a folder of them), a
LeRobot dataset (:mod:`rlinf.data.lerobot`), or a column file: an HDF5 file with the datasets
``observations`` ``[N, D]``, ``actions`` ``[N, A]``, ``rewards`` ``[N]``, ``terminated`` ``[N]`` (or
``terminals``), and optionally ``truncated`` (or ``timeouts``) and ``next_observations``.

The rewards are the simulator's, as in the trajectories of rollouts. A run transforms them like the
rewards of its own rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import h5py
import numpy as np

from rlinf.channels.record_files import RecordFileReader
from rlinf.data import lerobot
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.data.transitions import (
    InMemoryTransitions,
    concatenate_transitions,
    to_transitions,
    transition_dtype,
)
from rlinf.errors import DataError, InputError

COLUMN_ALIASES = {"terminated": "terminals", "truncated": "timeouts"}
"""Alternative names of columns, as in D4RL."""
REQUIRED_COLUMNS = ("observations", "actions", "rewards", "terminated")
VECTOR_COLUMNS = ("observations", "actions", "next_observations")
"""Columns ``[N, D]``; the others are ``[N]``."""
TRAJECTORY_FILES = "trajectories-*.h5"
RewardFunction = Callable[[Trajectory], np.ndarray]
"""Computes the rewards of a trajectory's steps, ``[T]``, from the rewards of the simulator."""


def check_offline_data(path: Path) -> None:
    """Check that a file or folder has transitions, without reading them.

    Raises:
        DataError: there are no transitions; the message names the missing column.
    """
    if path.is_dir():
        if lerobot.is_lerobot_dataset(path):
            lerobot.LeRobotDataset(path)
        else:
            _find_trajectory_files(path)
        return
    with _open_hdf5(path) as file:
        if "identity" in file:  # a trajectory file
            return
        _find_columns(path, file)


def environment_rewards(trajectory: Trajectory) -> np.ndarray:
    """Return the simulator's rewards, ``[T]``."""
    return np.asarray(trajectory.require("rewards"))


def load_offline_data(
    path: Path, reward: RewardFunction = environment_rewards
) -> InMemoryTransitions:
    """Return all transitions of a file or folder.

    If a column file has no next observations, the observation of the next row is used. The last row
    of a truncated episode, and of a file whose last episode is open, is then dropped.

    Args:
        reward: computes the rewards. For a column file, it is called once with a trajectory of all
            rows, without episode ends.

    Raises:
        DataError: there are no transitions.
    """
    if path.is_dir():
        if lerobot.is_lerobot_dataset(path):
            return _to_memory(path, lerobot.LeRobotDataset(path).trajectories(images=False), reward)
        return _load_records(path, _find_trajectory_files(path), reward)
    with _open_hdf5(path) as file:
        if "identity" not in file:  # a column file
            return InMemoryTransitions(_load_rows(path, file, reward))
    return _load_records(path, [path], reward)


def _find_trajectory_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob(TRAJECTORY_FILES))
    if not files:
        raise DataError(f"algorithm.offline_data: {folder} has no file {TRAJECTORY_FILES}")
    return files


def _open_hdf5(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise DataError(
            f"algorithm.offline_data: {path}: no readable HDF5 file ({error})"
        ) from None


def _load_records(path: Path, files: list[Path], reward: RewardFunction) -> InMemoryTransitions:
    try:
        return _to_memory(path, map(Trajectory.from_record, RecordFileReader(files)), reward)
    except ValueError as error:
        raise DataError(f"algorithm.offline_data: {path}: {error}") from None


def _to_memory(
    path: Path, trajectories: Iterable[Trajectory], reward: RewardFunction
) -> InMemoryTransitions:
    try:
        return InMemoryTransitions(
            concatenate_transitions(to_transitions(t, reward(t)) for t in trajectories)
        )
    except (ValueError, KeyError, InputError) as error:
        raise DataError(f"algorithm.offline_data: {path}: {error}") from None


def _find_columns(path: Path, file: h5py.File) -> dict[str, h5py.Dataset]:
    """Return the datasets of a column file by rlinf's column names, all of one length."""
    columns: dict[str, h5py.Dataset] = {}
    for name in (*REQUIRED_COLUMNS, "truncated", "next_observations"):
        for alias in (name, COLUMN_ALIASES.get(name, name)):
            if alias in file and isinstance(file[alias], h5py.Dataset):
                columns[name] = file[alias]
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        alias = f" (or {COLUMN_ALIASES[missing[0]]})" if missing[0] in COLUMN_ALIASES else ""
        raise DataError(
            f"algorithm.offline_data: {path} has no data set {missing[0]!r}{alias}; it has "
            f"{', '.join(sorted(file)) or 'none'}"
        )
    count = len(columns["observations"])
    for name, column in columns.items():
        if len(column) != count or column.ndim != 1 + (name in VECTOR_COLUMNS):
            raise DataError(
                f"algorithm.offline_data: {path}: {name} is {column.shape}, with {count} "
                "observations"
            )
    return columns


def _load_rows(path: Path, file: h5py.File, reward: RewardFunction) -> np.ndarray:
    columns = _find_columns(path, file)
    observations, actions = columns["observations"], columns["actions"]
    rows = np.zeros(len(observations), transition_dtype(observations.shape[1], actions.shape[1]))
    for name, column in columns.items():
        rows[name] = column[:]
    rows["rewards"] = reward(
        Trajectory(
            identity=RecordId(0, 0),
            observations=rows["observations"],
            actions=rows["actions"],
            rewards=rows["rewards"],
        )
    )
    is_complete = np.ones(len(rows), bool)
    if "next_observations" not in columns and len(rows):
        rows["next_observations"][:-1] = rows["observations"][1:]
        ended = rows["terminated"] == 1
        rows["next_observations"][ended] = rows["observations"][ended]
        # The file has no observation after a truncation or after the last row.
        is_complete = ended | (rows["truncated"] == 0)
        is_complete[-1] &= ended[-1]
    if not is_complete.any():
        raise DataError(f"algorithm.offline_data: {path} has no transitions")
    return rows[is_complete]
