"""Conversion of demonstrations between LeRobot's format and trajectories."""

from __future__ import annotations

from pathlib import Path

from rlinf.channels.record_files import RecordFileReader, RecordFileWriter
from rlinf.data import lerobot
from rlinf.data.episodes import intervened_episodes
from rlinf.data.trajectory import Trajectory
from rlinf.errors import DataError, InputError

TRAJECTORY_FILES = "trajectories-*.h5"


def extract_interventions(source: Path, to: Path) -> str:
    """Write the episodes in which a person intervened, with the executed actions
    (:mod:`rlinf.data.episodes`).

    Args:
        source: a folder with ``trajectories-*.h5`` of rollouts.
        to: a new folder.

    Returns:
        A summary of what was written.

    Raises:
        InputError: the target is not empty, or the trajectories do not record interventions.
        DataError: there are no trajectories, or a person intervened in none of them.
    """
    if to.exists() and any(to.iterdir()):
        raise InputError(f"{to}: the folder exists and is not empty; choose a new one")
    files = sorted(source.glob(TRAJECTORY_FILES))
    if not files:
        raise DataError(f"{source}: has no file {TRAJECTORY_FILES}")
    episodes: list[Trajectory] = []
    for trajectory in map(Trajectory.from_record, RecordFileReader(files)):
        episodes += intervened_episodes(trajectory, first=len(episodes))
    if not episodes:
        raise DataError(f"{source}: no episode in which a person acted")
    to.mkdir(parents=True, exist_ok=True)
    writer = RecordFileWriter(to, "trajectories")
    for episode in episodes:
        writer.put(episode.to_record())
    writer.close()
    steps = sum(map(len, episodes))
    return (
        f"{len(episodes)} episodes, {steps} steps written to {to}; "
        f"use them with algorithm.offline_data={to}"
    )


def convert_demonstrations(
    source: Path, to: Path, *, fps: int, task: str, png: bool, solved: bool
) -> str:
    """Convert a LeRobot data set to trajectories, or trajectories to a LeRobot data set.

    Args:
        source: the folder of a data set, or one with ``trajectories-*.h5`` of rollouts.
        to: a new folder.
        fps, task, png: settings of a written LeRobot data set.
        solved: whether every episode of a LeRobot source solved its task.

    Returns:
        A summary of what was written.

    Raises:
        InputError: the target is not empty.
        DataError: the source has neither format, or is incomplete.
    """
    if to.exists() and any(to.iterdir()):
        raise InputError(f"{to}: the folder exists and is not empty; choose a new one")
    if lerobot.is_lerobot_dataset(source):
        dataset = lerobot.LeRobotDataset(source, all_successful=solved)
        to.mkdir(parents=True, exist_ok=True)
        writer = RecordFileWriter(to, "trajectories")
        for trajectory in dataset.trajectories():
            writer.put(trajectory.to_record())
        writer.close()
        return f"{writer.count} episodes written to {to}; use them with algorithm.offline_data={to}"
    files = sorted(source.glob(TRAJECTORY_FILES))
    if not files:
        raise DataError(
            f"{source}: neither a LeRobot data set (no {lerobot.INFO_FILE}) nor a folder with "
            f"{TRAJECTORY_FILES}"
        )
    try:
        trajectories = map(Trajectory.from_record, RecordFileReader(files))
        count = lerobot.write_lerobot_dataset(to, trajectories, fps=fps, task=task, png=png)
    except ValueError as error:
        raise DataError(f"{source}: {error}") from None
    return f"{count} episodes written to {to}"
