"""Datasets in LeRobot's format: reads versions 2.0 to 3.0 and writes version 3.0.

See ``docs/source/lerobot-dataset-v3.mdx`` of huggingface/lerobot. An episode becomes a trajectory:

=============================  ===================================================
LeRobot                        field of the trajectory
=============================  ===================================================
``observation.state``          ``observations``
``action``                     ``actions``
``next.reward``                ``rewards``; if missing, 1 where the task is solved
``next.success``               ``success``
``observation.images.CAMERA``  ``images[CAMERA]``
task                           ``instruction`` in ``extra``
=============================  ===================================================

The format has no observation after the last step of an episode. If an episode ends without success,
its last step is dropped, and the observation before that step is the final observation.
"""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.episodes import INSTRUCTION_COLUMN, decode_instruction
from rlinf.data.record import IMAGE_PREFIX, LazyArray, RecordId
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.data.transitions import executed_actions, reject_action_chunks
from rlinf.data.video import read_frames, read_video, write_video
from rlinf.errors import DataError, InputError, require_package
from rlinf.verified_io import allowed_link_targets

INFO_FILE = Path("meta/info.json")
STATE_FEATURE, ACTION_FEATURE, REWARD_FEATURE, SUCCESS_FEATURE = (
    "observation.state",
    "action",
    "next.reward",
    "next.success",
)
CAMERA_FEATURE_PREFIX = "observation.images."
PLACEHOLDER = re.compile(r"\{(\w+)(?::(0?\d{1,2}d))?\}")
"""Placeholder in the path templates of ``meta/info.json``, such as ``{chunk_index:03d}``."""
REQUIRED_FEATURES = {
    STATE_FEATURE: "vectors that a policy observes",
    ACTION_FEATURE: "executed actions",
}
"""Features that a dataset must have, with their meaning for error messages."""


@dataclass(frozen=True)
class LeRobotEpisode:
    """Location of an episode: its rows in a data file, and its first frame in each video."""

    index: int
    instruction: str
    data_file: Path
    first_row: int
    """Index of the episode's first row in ``data_file``."""
    length: int
    """Number of rows, and of frames of each video."""
    videos: dict[str, tuple[Path, int]]
    """Video file, and index of the episode's first frame in it, by feature."""


class LeRobotDataset:
    """A LeRobot dataset in a folder.

    Raises:
        DataError: the folder is not a dataset, has an unknown version, or lacks a feature.
        MissingPackageError: pyarrow is not installed.
    """

    def __init__(self, folder: Path, *, all_successful: bool = False) -> None:
        """
        Args:
            all_successful: count all episodes as solved at their last step.
        """
        require_package("pyarrow", "lerobot", f"{folder}: a LeRobot dataset")
        self.folder, self._all_successful = folder, all_successful
        path = folder / INFO_FILE
        try:
            self.info: dict[str, Any] = json.loads(self._resolve(INFO_FILE).read_text())
            version = str(self.info["codebase_version"]).lstrip("v")
            self.features: dict[str, dict[str, Any]] = dict(self.info["features"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: no description of a LeRobot dataset ({error})") from None
        self._major = version.partition(".")[0]
        if self._major not in ("2", "3"):
            raise DataError(f"{path}: version {version}; versions 2.0 to 3.0 can be read")
        for name, meaning in REQUIRED_FEATURES.items():
            if name not in self.features:
                existing = ", ".join(sorted(self.features))
                raise DataError(
                    f"{path}: there is no feature {name!r} ({meaning}); it has {existing}"
                )
        if SUCCESS_FEATURE not in self.features and not all_successful:
            raise DataError(
                f"{path}: there is no feature {SUCCESS_FEATURE!r}, which marks successful "
                "episodes; add it, or use rlinf demonstrations --solved if all are successful"
            )
        self.cameras = {
            name.removeprefix(CAMERA_FEATURE_PREFIX).removeprefix("observation."): name
            for name, feature in self.features.items()
            if feature["dtype"] in ("image", "video")
        }
        """Feature of each camera, by the camera's name."""

    @property
    def fps(self) -> int:
        return int(self.info["fps"])

    @property
    def action_size(self) -> int:
        """Number of components of an action."""
        return int(np.prod(self.features[ACTION_FEATURE]["shape"]))

    @property
    def state_size(self) -> int:
        """Number of components of a state."""
        return int(np.prod(self.features[STATE_FEATURE]["shape"]))

    def image_size(self, camera: str) -> tuple[int, int]:
        """Return height and width of a camera's images."""
        feature = self.features[self.cameras[camera]]
        names, shape = feature.get("names") or ["height"], feature["shape"]
        height, width = shape[1:] if str(names[0]).startswith("channel") else shape[:2]
        return int(height), int(width)

    def episodes(self) -> list[LeRobotEpisode]:
        """Return the locations of all episodes.

        Raises:
            DataError: ``meta`` is damaged.
        """
        return list(self._episodes())

    def read_column(self, feature: str) -> np.ndarray:
        """Return a numeric feature of all steps, float32 ``[N, D]``, file by file.

        Raises:
            DataError: a file is missing or lacks the feature.
        """
        files = dict.fromkeys(episode.data_file for episode in self._episodes())
        tables = (_read_table(path, [feature]) for path in files)
        columns = [_column(rows, feature).reshape(len(rows), -1) for rows in tables]
        return np.concatenate(columns).astype(np.float32)

    def demonstration(self, episode: LeRobotEpisode) -> Trajectory:
        """Return the states, actions and images of all steps of an episode; images are read when
        they are used.

        Raises:
            DataError: a file is missing or contradicts ``meta``.
        """
        rows = _read_rows(episode, 0, episode.length, [STATE_FEATURE, ACTION_FEATURE])
        observations, actions = (
            _column(rows, name).reshape(episode.length, -1).astype(np.float32)
            for name in (STATE_FEATURE, ACTION_FEATURE)
        )
        images: dict[str, Any] = {}
        for camera, name in self.cameras.items():
            shape = (episode.length, *self.image_size(camera), 3)
            read = functools.partial(self._read_images, episode, name, shape[1:])
            images[camera] = LazyArray(read, shape, np.dtype(np.uint8))
        return Trajectory(
            identity=RecordId(0, episode.index),
            observations=observations,
            actions=actions,
            images=images,
        )

    def _read_images(
        self, episode: LeRobotEpisode, name: str, shape: tuple[int, ...], start: int, stop: int
    ) -> np.ndarray:
        """Return the images of a camera's feature at some steps, uint8 ``[n, H, W, 3]``."""
        if self.features[name]["dtype"] == "image":
            cells = _read_rows(episode, start, stop, [name]).column(name).to_pylist()
            images = np.stack([self._decode_image(cell) for cell in cells])
        else:
            path, first = episode.videos[name]
            images = read_frames(path, first + start, stop - start, self.fps)
        if images.shape[1:] != shape:
            raise DataError(
                f"{self.folder}: {name} of episode {episode.index} has images of "
                f"{list(images.shape[1:])}, and {INFO_FILE} says {list(shape)}"
            )
        return images

    def trajectories(self, *, images: bool = True) -> Iterator[Trajectory]:
        """Yield the episodes as trajectories.

        Args:
            images: whether to read images too.

        Raises:
            DataError: a file is missing or contradicts ``meta``.
        """
        table_path: Path | None = None
        table: Any = None
        videos: dict[str, _VideoReader] = {}
        for episode in self._episodes():
            if table_path != episode.data_file:
                table_path, table = episode.data_file, _read_table(episode.data_file)
            rows = table.slice(episode.first_row, episode.length)
            if len(rows) != episode.length or not episode.length:
                raise DataError(f"{episode.data_file}: episode {episode.index} is incomplete")
            yield self._trajectory(episode, rows, self._images(episode, rows, videos, images))

    def _trajectory(
        self, episode: LeRobotEpisode, rows: Any, images: dict[str, np.ndarray]
    ) -> Trajectory:
        length = episode.length
        success = np.zeros(length, np.uint8)
        if self._all_successful:
            success[-1] = 1
        else:
            success[:] = _column(rows, SUCCESS_FEATURE).reshape(length)
        rewards = success.astype(np.float32)
        if REWARD_FEATURE in self.features:
            rewards = _column(rows, REWARD_FEATURE).reshape(length).astype(np.float32)
        terminated = np.zeros(length, np.uint8)
        terminated[-1] = success[-1]
        observations = _column(rows, STATE_FEATURE).reshape(length, -1).astype(np.float32)
        final_observations, truncation_steps = observations[:0], np.zeros(0, np.int64)
        truncated = np.zeros(length, np.uint8)
        # The last observation of a truncated episode is the one after its last remaining step.
        if not terminated[-1]:
            final_observations, length = observations[-1:], length - 1
            if length:
                truncation_steps = np.array([length - 1], np.int64)
            truncated[:length][-1:] = 1
        trajectory = Trajectory(
            identity=RecordId(0, episode.index),
            observations=observations,
            actions=_column(rows, ACTION_FEATURE).reshape(len(rows), -1).astype(np.float32),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            success=success,
            images=images,
            truncation_steps=truncation_steps,
            final_observations=final_observations[: len(truncation_steps)],
            group=episode.index,
            episode_return=float(rewards.sum()),
            episode_length=float(episode.length),
            success_once=float(success.any()),
            success_at_end=float(success[-1]),
            extra={INSTRUCTION_COLUMN: episode.instruction},
        )
        return trajectory.slice_steps(0, length)

    def _images(
        self, episode: LeRobotEpisode, rows: Any, videos: dict[str, _VideoReader], images: bool
    ) -> dict[str, np.ndarray]:
        """Return the images of each camera, ``[length, H, W, 3]``; empty if not ``images``."""
        columns = {}
        for camera, name in self.cameras.items() if images else ():
            if self.features[name]["dtype"] == "image":
                cells = rows.column(name).to_pylist()
                columns[camera] = np.stack([self._decode_image(cell) for cell in cells])
                continue
            path, first = episode.videos[name]
            if name not in videos or not videos[name].can_read(path, first):
                videos[name] = _VideoReader(path)
            columns[camera] = videos[name].read(first, episode.length)
        return columns

    def _decode_image(self, cell: dict[str, Any]) -> np.ndarray:
        """Return the image of a table cell, which has the bytes or the path of an image file."""
        from PIL import Image, UnidentifiedImageError

        try:
            source = io.BytesIO(cell["bytes"]) if cell["bytes"] else self._resolve(cell["path"])
            with Image.open(source) as image:
                return np.asarray(image.convert("RGB"))
        except (OSError, UnidentifiedImageError, TypeError) as error:
            raise DataError(
                f"{self.folder}: {cell.get('path')}: no readable image ({error})"
            ) from None

    def _resolve(self, path: Path | str) -> Path:
        """Return the path of a file in the folder.

        Raises:
            DataError: the path, which is untrusted, leads out of the folder, or is no regular file.
        """
        target = (self.folder / path).resolve()
        if not any(target.is_relative_to(folder) for folder in allowed_link_targets(self.folder)):
            raise DataError(
                f"{self.folder}: {path} leads out of the folder, to {target}; a dataset must "
                "contain its files, so copy this one there (cp -L)"
            )
        if target.exists() and not target.is_file():
            raise DataError(f"{self.folder}: {path} is no file")
        return self.folder / path

    def _path_from_template(self, option: str, **values: Any) -> Path:
        """Return the path of a file whose template is in ``meta/info.json``.

        Args:
            option: key of the template.
            values: values of the placeholders.

        Raises:
            DataError: the template has other placeholders, or :meth:`_resolve` rejects the path.
        """
        template = self.info[option]
        remaining = PLACEHOLDER.sub("", template)
        names = {match[1] for match in PLACEHOLDER.finditer(template)}
        if "{" in remaining or "}" in remaining or not names <= values.keys():
            raise DataError(
                f"{self.folder / INFO_FILE}: {option} is {template[:200]!r}; its placeholders may "
                f"be {', '.join(f'{{{name}}}' for name in values)}"
            )
        path = PLACEHOLDER.sub(lambda match: format(values[match[1]], match[2] or ""), template)
        return self._resolve(path)

    def _episodes(self) -> Iterator[LeRobotEpisode]:
        videos = [name for name in self.cameras.values() if self.features[name]["dtype"] == "video"]
        count = 0
        try:
            for episode in (self._episodes_v3 if self._major == "3" else self._episodes_v2)(videos):
                count += 1
                yield episode
            expected = max(1, int(self.info.get("total_episodes", 1)))
            if count < expected:
                raise DataError(
                    f"{self.folder / 'meta'}: describes {count} of {expected} episodes "
                    "(total_episodes of info.json); a file is missing, so copy the whole folder"
                )
        except (KeyError, OSError, ValueError, TypeError) as error:
            raise DataError(f"{self.folder / 'meta'}: damaged ({error!r})") from None

    def _episodes_v3(self, videos: list[str]) -> Iterator[LeRobotEpisode]:
        """Yield the episodes of version 3: a file has several; ``meta/episodes`` locates them."""
        first_indices: dict[Path, int] = {}  # index, in the whole dataset, of each file's first row
        for table in sorted((self.folder / "meta/episodes").glob("*/*.parquet")):
            for row in _read_table(self._resolve(table.relative_to(self.folder))).to_pylist():
                keys = ("chunk_index", "file_index")
                indices = {key: int(row[f"data/{key}"]) for key in keys}
                data_file = self._path_from_template("data_path", **indices)
                first_index = int(row["dataset_from_index"])
                first_row = first_index - first_indices.setdefault(data_file, first_index)
                locations = {}
                for name in videos:
                    indices = {key: int(row[f"videos/{name}/{key}"]) for key in keys}
                    path = self._path_from_template("video_path", video_key=name, **indices)
                    seconds = float(row[f"videos/{name}/from_timestamp"])
                    locations[name] = (path, round(seconds * self.fps))
                instruction = " ".join(row["tasks"])
                index, length = int(row["episode_index"]), int(row["length"])
                yield LeRobotEpisode(index, instruction, data_file, first_row, length, locations)

    def _episodes_v2(self, videos: list[str]) -> Iterator[LeRobotEpisode]:
        """Yield the episodes of version 2: one file per episode and camera."""
        for line in self._resolve("meta/episodes.jsonl").read_text().splitlines():
            row = json.loads(line)
            index = int(row["episode_index"])
            indices = {
                "episode_chunk": index // int(self.info["chunks_size"]),
                "episode_index": index,
            }
            locations = {
                name: (self._path_from_template("video_path", video_key=name, **indices), 0)
                for name in videos
            }
            data_file = self._path_from_template("data_path", **indices)
            instruction = " ".join(row["tasks"])
            yield LeRobotEpisode(index, instruction, data_file, 0, int(row["length"]), locations)


class _VideoReader:
    """Reads the frames of a video file once, in order."""

    def __init__(self, path: Path) -> None:
        self._path, self._next, self._images = path, 0, read_video(path)

    def can_read(self, path: Path, first: int) -> bool:
        """Return whether the reader's file is ``path`` and frame ``first`` is still ahead."""
        return path == self._path and first >= self._next

    def read(self, first: int, count: int) -> np.ndarray:
        """Return ``count`` frames from frame ``first`` on, ``[count, H, W, 3]``."""
        frames = []
        while self._next < first + count:
            image = next(self._images, None)
            if image is None:
                raise DataError(f"{self._path}: ends at frame {self._next} of {first + count}")
            if self._next >= first:
                frames.append(image)
            self._next += 1
        return np.stack(frames)


def is_lerobot_dataset(folder: Path) -> bool:
    """Return whether a folder looks like a LeRobot dataset."""
    return (folder / INFO_FILE).is_file()


def _read_table(path: Path, columns: list[str] | None = None) -> Any:
    """Return the rows of a Parquet file.

    Args:
        columns: the columns to read; None: all.

    Raises:
        DataError: the file cannot be read.
    """
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_table(path, columns=columns, partitioning=None).combine_chunks()
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: no readable Parquet file ({error})") from None


def _read_rows(episode: LeRobotEpisode, start: int, stop: int, columns: list[str]) -> Any:
    """Return columns of some steps of an episode; of the file, only their row groups are read.

    Raises:
        DataError: the file cannot be read, or has fewer rows.
    """
    from pyarrow import ArrowException, parquet

    path, first = episode.data_file, episode.first_row + start
    groups, group_start, skipped = list[int](), 0, 0
    try:
        with parquet.ParquetFile(path) as file:
            if missing := [name for name in columns if name not in file.schema_arrow.names]:
                raise DataError(f"{path}: no column {missing[0]!r}, a feature of the dataset")
            for index in range(file.num_row_groups):
                group_stop = group_start + file.metadata.row_group(index).num_rows
                if group_stop > first and group_start < episode.first_row + stop:
                    skipped = skipped if groups else group_start
                    groups.append(index)
                group_start = group_stop
            rows = file.read_row_groups(groups, columns).slice(first - skipped, stop - start)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: no readable Parquet file ({error})") from None
    if len(rows) != stop - start:
        raise DataError(f"{path}: episode {episode.index} is incomplete")
    return rows


def _column(rows: Any, name: str) -> np.ndarray:
    """Return the values of a feature, flattened.

    Raises:
        DataError: the column is missing or has missing values.
    """
    if name not in rows.column_names:
        raise DataError(f"{name!r} is a feature of the dataset, but missing in one of its files")
    values = rows.column(name).combine_chunks()
    while hasattr(values, "flatten") and values.type.num_fields:
        values = values.flatten()
    if values.null_count:
        raise DataError(f"{name!r}: {values.null_count} values are missing")
    return np.asarray(values.to_numpy(zero_copy_only=False))


LEROBOT_VERSION = "v3.0"
"""Version of the format that is written."""
FRAMES_PER_FILE = 20_000
"""A file ends after the episode in which it reaches this number of frames."""
FILES_PER_FOLDER = 1000
"""Number of files in each of the folders that the format calls chunks."""
FEATURE_COLUMNS = {
    STATE_FEATURE: "observations",
    ACTION_FEATURE: "actions",
    REWARD_FEATURE: "rewards",
    SUCCESS_FEATURE: "success",
}
"""Field of the trajectory that is written as each feature."""
DONE_FEATURE = "next.done"
STATISTICS_STRIDE = 10
"""The statistics use the first image of each this many consecutive images."""
SCALAR_FEATURES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Data type of the features that the format requires of every frame."""


def split_episodes(trajectory: Trajectory) -> Iterator[dict[str, np.ndarray]]:
    """Yield the columns of each episode of a trajectory; ``done`` is 1 at the step that ended it.

    Episodes with masked steps are left out.

    Raises:
        InputError: the trajectory lacks columns that only a simulator provides.
    """
    needed = (*FEATURE_COLUMNS.values(), "terminated", "truncated")
    if missing := [name for name in needed if getattr(trajectory, name) is None]:
        raise InputError(
            f"{trajectory.identity}: the trajectory has no {missing[0]!r}; demonstrations need "
            "trajectories of a simulator (task.name=gym)"
        )
    reject_action_chunks(trajectory)
    done = np.asarray(trajectory.terminated) | np.asarray(trajectory.truncated)
    done = done.astype(np.uint8)
    ends = (np.flatnonzero(done) + 1).tolist()
    if not ends or ends[-1] < len(trajectory):
        ends.append(len(trajectory))
    mask, start = loss_mask(trajectory), 0
    steps = {**trajectory.to_record().steps, "actions": executed_actions(trajectory)}
    for end in ends:
        if mask[start:end].all():
            episode = {name: np.asarray(column[start:end]) for name, column in steps.items()}
            yield {**episode, "done": done[start:end]}
        start = end


class LeRobotWriter:
    """Writes a LeRobot dataset, episode by episode."""

    def __init__(self, folder: Path, *, fps: int, task: str, robot: str = "", png: bool = False):
        """
        Args:
            folder: a new or empty folder.
            fps: frames per second.
            task: instruction of episodes without one.
            robot: type of the robot.
            png: store images losslessly in Parquet files, not as videos.

        Raises:
            InputError: the folder is not empty.
            MissingPackageError: pyarrow is not installed.
        """
        require_package("pyarrow", "lerobot", "writing a LeRobot dataset")
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder}: exists and is not empty")
        self._folder, self._fps, self._task, self._png = folder, fps, task, png
        self._robot = robot
        self._tasks: dict[str, int] = {}
        """Index of each task, by instruction."""
        self._cameras: dict[str, tuple[int, ...]] = {}
        """Shape of the images, by image column."""
        self._sizes: dict[str, int] = {}
        """Number of components of an observation and of an action, by feature."""
        self._episodes: list[dict[str, Any]] = []
        """Rows of ``meta/episodes``."""
        self._stats: dict[str, _FeatureStats] = {}
        self._buffered: list[dict[str, np.ndarray]] = []
        """Columns of the episodes that are not written yet."""
        self._frames, self._written_frames, self._files = 0, 0, 0
        """Numbers of added frames, of written frames, and of written data files."""

    def add_trajectory(self, trajectory: Trajectory) -> None:
        """Add the episodes of a trajectory.

        Raises:
            InputError: the columns differ from the columns of earlier episodes.
        """
        default_task = str(trajectory.extra.get(INSTRUCTION_COLUMN) or self._task)
        for episode in split_episodes(trajectory):
            self._check_columns(trajectory, episode)
            # If the instruction is a column, its first row is the instruction of the first step.
            task = (
                decode_instruction(episode[INSTRUCTION_COLUMN][0])
                if INSTRUCTION_COLUMN in episode
                else default_task
            )
            task_index = self._tasks.setdefault(task, len(self._tasks))
            length = len(episode["done"])
            self._episodes.append(
                {
                    "episode_index": len(self._episodes),
                    "tasks": [task],
                    "length": length,
                    "data/chunk_index": self._files // FILES_PER_FOLDER,
                    "data/file_index": self._files % FILES_PER_FOLDER,
                    "dataset_from_index": self._frames,
                    "dataset_to_index": self._frames + length,
                    **self._video_location(length),
                    "meta/episodes/chunk_index": 0,
                    "meta/episodes/file_index": 0,
                }
            )
            frame = np.arange(length)
            self._buffered.append(
                {
                    **episode,
                    "timestamp": frame / self._fps,
                    "frame_index": frame,
                    "episode_index": np.full(length, len(self._episodes) - 1),
                    "index": self._frames + frame,
                    "task_index": np.full(length, task_index),
                }
            )
            self._frames += length
            if self._frames - self._written_frames >= FRAMES_PER_FILE:
                self._flush()

    def close(self) -> None:
        """Write the remaining episodes and the metadata.

        Raises:
            InputError: there is no episode.
        """
        if not self._episodes:
            raise InputError(f"{self._folder}: no complete episode to write")
        self._flush()
        import pyarrow
        from pyarrow import parquet

        meta = self._folder / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        table = pyarrow.Table.from_pylist(self._episodes)
        parquet.write_table(table, meta / "episodes/chunk-000/file-000.parquet")
        # The format in which pandas writes a table that is indexed by task.
        tasks = {"task_index": [*self._tasks.values()], "task": [*self._tasks]}
        columns = [
            {"name": n, "field_name": n, "pandas_type": p, "numpy_type": kind, "metadata": None}
            for n, p, kind in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        ]
        index = {"index_columns": ["task"], "columns": columns, "column_indexes": []}
        table = pyarrow.table(tasks).replace_schema_metadata({"pandas": json.dumps(index)})
        parquet.write_table(table, meta / "tasks.parquet")
        stats = {name: feature.values() for name, feature in self._stats.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4))
        (self._folder / INFO_FILE).write_text(json.dumps(self._info(), indent=4))

    def _check_columns(self, trajectory: Trajectory, episode: dict[str, np.ndarray]) -> None:
        cameras = {n: a.shape[1:] for n, a in episode.items() if n.startswith(IMAGE_PREFIX)}
        sizes = {
            name: int(np.prod(episode[FEATURE_COLUMNS[name]].shape[1:]))
            for name in (STATE_FEATURE, ACTION_FEATURE)
        }
        if not self._sizes:
            self._cameras, self._sizes = cameras, sizes
        if (cameras, sizes) != (self._cameras, self._sizes):
            raise InputError(
                f"{trajectory.identity}: {sizes} and images {cameras} differ from those of "
                f"earlier episodes, {self._sizes} and {self._cameras}"
            )

    def _video_location(self, length: int) -> dict[str, Any]:
        """Return the location of the next episode's frames."""
        location: dict[str, Any] = {}
        first_frame = self._frames - self._written_frames
        for name in () if self._png else self._cameras:
            key = f"videos/{_camera_feature(name)}"
            location[f"{key}/chunk_index"] = self._files // FILES_PER_FOLDER
            location[f"{key}/file_index"] = self._files % FILES_PER_FOLDER
            location[f"{key}/from_timestamp"] = first_frame / self._fps
            location[f"{key}/to_timestamp"] = (first_frame + length) / self._fps
        return location

    def _flush(self) -> None:
        """Write the buffered episodes: a data file, and one video per camera."""
        if not self._buffered:
            return
        import pyarrow
        from pyarrow import parquet

        chunk, file = divmod(self._files, FILES_PER_FOLDER)
        file_name = f"chunk-{chunk:03d}/file-{file:03d}"
        columns = {}
        for name, column in FEATURE_COLUMNS.items():
            values = np.concatenate([episode[column] for episode in self._buffered])
            self._add_to_stats(name, values)
            if name in self._sizes:
                flat = pyarrow.array(values.astype(np.float32).ravel())
                columns[name] = pyarrow.FixedSizeListArray.from_arrays(flat, self._sizes[name])
            else:
                columns[name] = pyarrow.array(
                    values.astype("float32" if name == REWARD_FEATURE else "?")
                )
        done = np.concatenate([episode["done"] for episode in self._buffered])
        columns[DONE_FEATURE] = pyarrow.array(done.astype(np.bool_))
        for name, dtype in SCALAR_FEATURES.items():
            values = np.concatenate([episode[name] for episode in self._buffered])
            columns[name] = pyarrow.array(values.astype(dtype))
        for name in self._cameras:
            images = [image for episode in self._buffered for image in episode[name]]
            # Image statistics are per channel, for values in [0, 1].
            for image in images[::STATISTICS_STRIDE]:
                self._add_to_stats(_camera_feature(name), image.reshape(-1, 3) / 255, is_image=True)
            if self._png:
                cells = [{"bytes": _encode_png(image), "path": None} for image in images]
                fields = {"bytes": pyarrow.binary(), "path": pyarrow.string()}
                columns[_camera_feature(name)] = pyarrow.array(cells, pyarrow.struct(fields))
            else:
                video = self._folder / "videos" / _camera_feature(name) / f"{file_name}.mp4"
                video.parent.mkdir(parents=True, exist_ok=True)
                write_video(video, images, self._fps)
        path = self._folder / "data" / f"{file_name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(columns), path)
        self._buffered, self._written_frames, self._files = [], self._frames, self._files + 1

    def _add_to_stats(self, name: str, values: np.ndarray, *, is_image: bool = False) -> None:
        rows = values.reshape(len(values), -1).astype(np.float64)
        self._stats.setdefault(name, _FeatureStats(is_image)).add(rows)

    def _info(self) -> dict[str, Any]:
        def numeric_feature(name: str, dtype: str) -> dict[str, Any]:
            return {"dtype": dtype, "shape": [self._sizes.get(name, 1)], "names": None}

        dtypes = {
            STATE_FEATURE: "float32",
            ACTION_FEATURE: "float32",
            REWARD_FEATURE: "float32",
            SUCCESS_FEATURE: "bool",
        }
        features = {
            name: numeric_feature(name, dtype)
            for name, dtype in {**dtypes, DONE_FEATURE: "bool"}.items()
        }
        for name, shape in self._cameras.items():
            features[_camera_feature(name)] = {
                "dtype": "image" if self._png else "video",
                "shape": [*(size + size % 2 for size in shape[:2]), 3] if not self._png else shape,
                "names": ["height", "width", "channels"],
            }
        features |= {name: numeric_feature(name, dtype) for name, dtype in SCALAR_FEATURES.items()}
        videos = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        return {
            "codebase_version": LEROBOT_VERSION,
            "robot_type": self._robot or None,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_FOLDER,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": videos if self._cameras and not self._png else None,
            "features": features,
        }


class _FeatureStats:
    """Minimum, maximum, mean and standard deviation of a feature."""

    def __init__(self, is_image: bool) -> None:
        self._is_image = is_image
        # Rows: pixels of images, or vectors. Items: images, or vectors.
        self._rows, self._items = 0, 0
        self._min = self._max = self._sum = self._square_sum = np.zeros(0)

    def add(self, rows: np.ndarray) -> None:
        """Add values ``[n, D]``; an image has one row per pixel."""
        low, high = rows.min(0), rows.max(0)
        if not self._rows:
            self._min, self._max = low, high
            self._sum = self._square_sum = np.zeros_like(low)
        self._min, self._max = np.minimum(self._min, low), np.maximum(self._max, high)
        self._sum = self._sum + rows.sum(0)
        self._square_sum = self._square_sum + np.square(rows).sum(0)
        self._rows += len(rows)
        self._items += 1 if self._is_image else len(rows)

    def values(self) -> dict[str, Any]:
        mean = self._sum / self._rows
        deviation = np.sqrt(np.maximum(self._square_sum / self._rows - np.square(mean), 0))
        statistics = {"min": self._min, "max": self._max, "mean": mean, "std": deviation}
        shape = (-1, 1, 1) if self._is_image else (-1,)
        lists = {name: value.reshape(shape).tolist() for name, value in statistics.items()}
        return {**lists, "count": [self._items]}


def write_lerobot_dataset(folder: Path, trajectories: Iterable[Trajectory], **options: Any) -> int:
    """Write trajectories as a dataset and return the number of episodes.

    Args:
        options: arguments of :class:`LeRobotWriter`.
    """
    writer = LeRobotWriter(folder, **options)
    for trajectory in trajectories:
        writer.add_trajectory(trajectory)
    writer.close()
    return len(writer._episodes)


def _camera_feature(column: str) -> str:
    return CAMERA_FEATURE_PREFIX + column.removeprefix(IMAGE_PREFIX)


def _encode_png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
