"""Demonstrations from one format into the other: of LeRobot, and ours."""

from __future__ import annotations

from pathlib import Path

from rlinf.channels.record_files import RecordFileReader, RecordFileWriter
from rlinf.data import lerobot
from rlinf.data.episodes import intervened_episodes
from rlinf.data.record import Record
from rlinf.errors import DataError, InputError

TRAJECTORY_FILES = "trajectories-*.h5"


def extract_interventions(source: Path, to: Path) -> str:
    """Write the episodes of trajectories in which a person acted as trajectories, in which actions
    are those that were carried out (:mod:`rlinf.data.episodes`).

    Args:
        source: a folder with ``trajectories-*.h5`` as rollouts write them.
        to: a new folder.

    Returns:
        What was written, in words.

    Raises:
        InputError: the target holds something, or the trajectories do not say where a person acted.
        DataError: there are no trajectories, or a person acted in none of them.
    """
    if to.exists() and any(to.iterdir()):
        raise InputError(f"{to}: exists and is not empty")
    files = sorted(source.glob(TRAJECTORY_FILES))
    if not files:
        raise DataError(f"{source}: has no file {TRAJECTORY_FILES}")
    found: list[Record] = []
    for trajectory in RecordFileReader(files):
        found += intervened_episodes(trajectory, first=len(found))
    if not found:
        raise DataError(f"{source}: a person acted in none of its episodes")
    to.mkdir(parents=True, exist_ok=True)
    writer = RecordFileWriter(to, "trajectories")
    for record in found:
        writer.put(record)
    writer.close()
    steps = sum(map(len, found))
    return f"{len(found)} episodes, {steps} steps, in {to}, for algorithm.offline_data={to}"


def convert_demonstrations(
    source: Path, to: Path, *, fps: int, task: str, png: bool, solved: bool
) -> str:
    """Write a data set of LeRobot as trajectories, or trajectories as such a data set.

    Args:
        source: a folder of a data set, or one with ``trajectories-*.h5`` as rollouts write them.
        to: a new folder.
        fps, task, png: of what is written for LeRobot; see :class:`lerobot_writer.Writer`.
        solved: of what is read from there; see :class:`lerobot.Dataset`.

    Returns:
        What was written, in words.

    Raises:
        InputError: the target holds something.
        DataError: the source is neither, or lacks something.
    """
    if to.exists() and any(to.iterdir()):
        raise InputError(f"{to}: exists and is not empty")
    if lerobot.is_lerobot_dataset(source):
        found = lerobot.LeRobotDataset(source, all_successful=solved)
        to.mkdir(parents=True, exist_ok=True)
        writer = RecordFileWriter(to, "trajectories")
        for record in found.trajectories():
            writer.put(record)
        writer.close()
        return f"{writer.count} episodes in {to}, for algorithm.offline_data={to}"
    files = sorted(source.glob(TRAJECTORY_FILES))
    if not files:
        raise DataError(
            f"{source}: neither a data set of LeRobot ({lerobot.INFO_FILE}) nor a folder with "
            f"{TRAJECTORY_FILES}"
        )
    try:
        count = lerobot.write_lerobot_dataset(
            to, RecordFileReader(files), fps=fps, task=task, png=png
        )
    except ValueError as error:
        raise DataError(f"{source}: {error}") from None
    return f"{count} episodes in {to}"
