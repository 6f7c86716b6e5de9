"""Trajectories as demonstrations in the format of LeRobot, version 3.0 (:mod:`rlinf.data.lerobot`).

All that a version 3.0 folder has: ``meta/info.json``, ``meta/stats.json``, ``meta/tasks.parquet``,
``meta/episodes``, ``data``, and ``videos`` unless pictures are to lie in ``data`` as PNG, without a
loss.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.counted import counted
from rlinf.data.instructions import INSTRUCTION, decoded
from rlinf.data.lerobot import ACTION, CAMERAS, INFO, REWARD, STATE, SUCCESS
from rlinf.data.record import Record
from rlinf.data.transitions import carried_out, refuse_chunks
from rlinf.data.video import write_video
from rlinf.errors import InputError, require

VERSION = "v3.0"
FRAMES_PER_FILE = 20_000
CHUNK_FILES = 1000
PICTURES = "images."
COLUMNS = {STATE: "observations", ACTION: "actions", REWARD: "rewards", SUCCESS: "success"}
DONE = "next.done"
EVERY_PICTURE = 10
"""Of so many pictures one counts in their statistics."""
SCALARS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


def episodes_of(trajectory: Record) -> Iterator[dict[str, np.ndarray]]:
    """The columns of each whole episode of a trajectory, without those that do not count; ``done``
    is 1 at the last step of one that ended or was cut off.

    Raises:
        InputError: it has not the columns of a simulator's trajectories.
    """
    steps = trajectory.steps
    lacking = [name for name in (*COLUMNS.values(), "terminated", "truncated") if name not in steps]
    if lacking:
        raise InputError(
            f"{trajectory.identity}: the trajectory has no {lacking[0]!r}; demonstrations are made "
            "of trajectories that a simulator gave (task.name=gym)"
        )
    refuse_chunks(trajectory)
    done = (np.asarray(steps["terminated"]) | np.asarray(steps["truncated"])).astype(np.uint8)
    ends = [*(np.flatnonzero(done) + 1).tolist()]
    if not ends or ends[-1] < len(trajectory):
        ends.append(len(trajectory))
    counts, start = counted(trajectory), 0
    steps = {**steps, "actions": carried_out(trajectory)}
    for end in ends:
        if counts[start:end].all():
            part = {name: np.asarray(column[start:end]) for name, column in steps.items()}
            yield {**part, "done": done[start:end]}
        start = end


class Writer:
    """Writes a folder, an episode at a time."""

    def __init__(self, folder: Path, *, fps: int, task: str, robot: str = "", png: bool = False):
        """
        Args:
            folder: a new one.
            fps: pictures of a second.
            task: what episodes that do not say it are to do.
            robot: its type.
            png: whether pictures are to be kept without a loss, in Parquet files.

        Raises:
            InputError: the folder holds something.
            MissingPackageError: a package that writes it is not installed.
        """
        require("pyarrow", "lerobot", "writing a data set of LeRobot")
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder}: exists and is not empty")
        self._folder, self._fps, self._task, self._png = folder, fps, task, png
        self._robot = robot
        self._tasks: dict[str, int] = {}
        self._cameras: dict[str, tuple[int, ...]] = {}
        self._sizes: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._stats: dict[str, _Stats] = {}
        self._waiting: list[dict[str, np.ndarray]] = []
        self._frames, self._written, self._files = 0, 0, 0

    def put(self, trajectory: Record) -> None:
        """Add the episodes of a trajectory.

        Raises:
            InputError: they have other columns than those before.
        """
        said = str(trajectory.info.get(INSTRUCTION) or self._task)
        for episode in episodes_of(trajectory):
            self._alike(trajectory, episode)
            # What a policy saw in words is a column; its first row is what the episode began with.
            task = decoded(episode[INSTRUCTION][0]) if INSTRUCTION in episode else said
            number = self._tasks.setdefault(task, len(self._tasks))
            length = len(episode["done"])
            self._episodes.append(
                {
                    "episode_index": len(self._episodes),
                    "tasks": [task],
                    "length": length,
                    "data/chunk_index": self._files // CHUNK_FILES,
                    "data/file_index": self._files % CHUNK_FILES,
                    "dataset_from_index": self._frames,
                    "dataset_to_index": self._frames + length,
                    **self._places(length),
                    "meta/episodes/chunk_index": 0,
                    "meta/episodes/file_index": 0,
                }
            )
            frame = np.arange(length)
            self._waiting.append(
                {
                    **episode,
                    "timestamp": frame / self._fps,
                    "frame_index": frame,
                    "episode_index": np.full(length, len(self._episodes) - 1),
                    "index": self._frames + frame,
                    "task_index": np.full(length, number),
                }
            )
            self._frames += length
            if self._frames - self._written >= FRAMES_PER_FILE:
                self._flush()

    def close(self) -> None:
        """Write what is left, and what says what there is.

        Raises:
            InputError: there is no episode.
        """
        if not self._episodes:
            raise InputError(f"{self._folder}: no whole episode to write")
        self._flush()
        import pyarrow
        from pyarrow import parquet

        meta = self._folder / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        table = pyarrow.Table.from_pylist(self._episodes)
        parquet.write_table(table, meta / "episodes/chunk-000/file-000.parquet")
        # As pandas writes a table whose index is the task.
        tasks = {"task_index": [*self._tasks.values()], "task": [*self._tasks]}
        columns = [
            {"name": n, "field_name": n, "pandas_type": of, "numpy_type": kind, "metadata": None}
            for n, of, kind in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        ]
        index = {"index_columns": ["task"], "columns": columns, "column_indexes": []}
        table = pyarrow.table(tasks).replace_schema_metadata({"pandas": json.dumps(index)})
        parquet.write_table(table, meta / "tasks.parquet")
        stats = {name: each.values() for name, each in self._stats.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4))
        (self._folder / INFO).write_text(json.dumps(self._info(), indent=4))

    def _alike(self, trajectory: Record, episode: dict[str, np.ndarray]) -> None:
        cameras = {n: a.shape[1:] for n, a in episode.items() if n.startswith(PICTURES)}
        sizes = {name: int(np.prod(episode[COLUMNS[name]].shape[1:])) for name in (STATE, ACTION)}
        if not self._sizes:
            self._cameras, self._sizes = cameras, sizes
        if (cameras, sizes) != (self._cameras, self._sizes):
            raise InputError(
                f"{trajectory.identity}: {sizes} and pictures {cameras} are not those of the "
                f"episodes before, {self._sizes} and {self._cameras}"
            )

    def _places(self, length: int) -> dict[str, Any]:
        """Where the pictures of the next episode are."""
        found: dict[str, Any] = {}
        begin = self._frames - self._written
        for name in () if self._png else self._cameras:
            key = f"videos/{_feature(name)}"
            found[f"{key}/chunk_index"] = self._files // CHUNK_FILES
            found[f"{key}/file_index"] = self._files % CHUNK_FILES
            found[f"{key}/from_timestamp"] = begin / self._fps
            found[f"{key}/to_timestamp"] = (begin + length) / self._fps
        return found

    def _flush(self) -> None:
        """Write a file of steps, and one of each camera."""
        if not self._waiting:
            return
        import pyarrow
        from pyarrow import parquet

        chunk, file = divmod(self._files, CHUNK_FILES)
        place = f"chunk-{chunk:03d}/file-{file:03d}"
        columns = {}
        for name, own in COLUMNS.items():
            values = np.concatenate([episode[own] for episode in self._waiting])
            self._count(name, values)
            if name in self._sizes:
                flat = pyarrow.array(values.astype(np.float32).ravel())
                columns[name] = pyarrow.FixedSizeListArray.from_arrays(flat, self._sizes[name])
            else:
                columns[name] = pyarrow.array(values.astype("float32" if name == REWARD else "?"))
        done = np.concatenate([episode["done"] for episode in self._waiting])
        columns[DONE] = pyarrow.array(done.astype(np.bool_))
        for name, kind in SCALARS.items():
            values = np.concatenate([episode[name] for episode in self._waiting])
            columns[name] = pyarrow.array(values.astype(kind))
        for name in self._cameras:
            pictures = [picture for episode in self._waiting for picture in episode[name]]
            # Channels have statistics, between 0 and 1.
            for picture in pictures[::EVERY_PICTURE]:
                self._count(_feature(name), picture.reshape(-1, 3) / 255, channels=True)
            if self._png:
                cells = [{"bytes": _png(picture), "path": None} for picture in pictures]
                kinds = {"bytes": pyarrow.binary(), "path": pyarrow.string()}
                columns[_feature(name)] = pyarrow.array(cells, pyarrow.struct(kinds))
            else:
                video = self._folder / "videos" / _feature(name) / f"{place}.mp4"
                video.parent.mkdir(parents=True, exist_ok=True)
                write_video(video, pictures, self._fps)
        path = self._folder / "data" / f"{place}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(columns), path)
        self._waiting, self._written, self._files = [], self._frames, self._files + 1

    def _count(self, name: str, values: np.ndarray, *, channels: bool = False) -> None:
        rows = values.reshape(len(values), -1).astype(np.float64)
        self._stats.setdefault(name, _Stats(channels)).add(rows)

    def _info(self) -> dict[str, Any]:
        def numbers(name: str, kind: str) -> dict[str, Any]:
            return {"dtype": kind, "shape": [self._sizes.get(name, 1)], "names": None}

        kinds = {STATE: "float32", ACTION: "float32", REWARD: "float32", SUCCESS: "bool"}
        features = {name: numbers(name, kind) for name, kind in {**kinds, DONE: "bool"}.items()}
        for name, shape in self._cameras.items():
            features[_feature(name)] = {
                "dtype": "image" if self._png else "video",
                "shape": [*(size + size % 2 for size in shape[:2]), 3] if not self._png else shape,
                "names": ["height", "width", "channels"],
            }
        features |= {name: numbers(name, kind) for name, kind in SCALARS.items()}
        videos = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        return {
            "codebase_version": VERSION,
            "robot_type": self._robot or None,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK_FILES,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": videos if self._cameras and not self._png else None,
            "features": features,
        }


class _Stats:
    """Of a feature's numbers: least, largest, mean and deviation of each."""

    def __init__(self, channels: bool) -> None:
        self._channels, self._rows, self._items = channels, 0, 0
        self._least = self._most = self._sum = self._square = np.zeros(0)

    def add(self, rows: np.ndarray) -> None:
        """Numbers ``[n, D]``; of a picture a row for each of its points."""
        least, most = rows.min(0), rows.max(0)
        if not self._rows:
            self._least, self._most = least, most
            self._sum = self._square = np.zeros_like(least)
        self._least, self._most = np.minimum(self._least, least), np.maximum(self._most, most)
        self._sum, self._square = self._sum + rows.sum(0), self._square + np.square(rows).sum(0)
        self._rows += len(rows)
        self._items += 1 if self._channels else len(rows)

    def values(self) -> dict[str, Any]:
        mean = self._sum / self._rows
        deviation = np.sqrt(np.maximum(self._square / self._rows - np.square(mean), 0))
        named = {"min": self._least, "max": self._most, "mean": mean, "std": deviation}
        shape = (-1, 1, 1) if self._channels else (-1,)
        found = {name: value.reshape(shape).tolist() for name, value in named.items()}
        return {**found, "count": [self._items]}


def write(folder: Path, trajectories: Iterable[Record], **options: Any) -> int:
    """Write trajectories as a data set; returns how many episodes there are.

    Args:
        options: of :class:`Writer`.
    """
    writer = Writer(folder, **options)
    for trajectory in trajectories:
        writer.put(trajectory)
    writer.close()
    return len(writer._episodes)


def _feature(camera: str) -> str:
    """What a column of pictures is called there."""
    return CAMERAS + camera.removeprefix(PICTURES)


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()
