"""Demonstrations in the format of LeRobot, read: versions 2.0 to 3.0 of it.

See ``docs/source/lerobot-dataset-v3.mdx`` of huggingface/lerobot; :mod:`rlinf.data.lerobot_writer`
writes it. An episode is a trajectory here:

=============================  ===================================================
feature there                  column of steps here
=============================  ===================================================
``observation.state``          ``observations``
``action``                     ``actions``
``next.reward``                ``rewards``; without it, 1 where the task is solved
``next.success``               ``success``
``observation.images.CAMERA``  ``images.CAMERA``
task                           ``instruction`` in ``info``
=============================  ===================================================

What was seen after the last step of an episode is not in the format: the last step of one that
did not end by solving its task is left out, and its observation is what was seen after the one
before.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.record import Identity, Record, Scalar
from rlinf.data.transitions import CUT_OBSERVATIONS, CUT_STEPS
from rlinf.data.video import read_video
from rlinf.errors import DataError, require
from rlinf.private import places_of

INFO = Path("meta/info.json")
STATE, ACTION, REWARD, SUCCESS = "observation.state", "action", "next.reward", "next.success"
CAMERAS = "observation.images."
PLACEHOLDER = re.compile(r"\{(\w+)(?::(0?\d{1,2}d))?\}")
"""In the paths that ``meta/info.json`` gives; ``{chunk_index:03d}``, for instance."""
NEEDED = {STATE: "vectors that a policy sees", ACTION: "what was done"}


@dataclass(frozen=True)
class Episode:
    """Where one is: rows of a file of steps, and of each camera's video its first picture."""

    number: int
    task: str
    data: Path
    start: int
    length: int
    videos: dict[str, tuple[Path, int]]


class Dataset:
    """A folder of demonstrations.

    Raises:
        DataError: it is none, of a version that is not known, or lacks a feature.
        MissingPackageError: the package that reads it is not installed.
    """

    def __init__(self, folder: Path, *, solved: bool = False) -> None:
        """``solved``: all episodes count as solved at their last step, whatever they say."""
        require("pyarrow", "lerobot", f"{folder}: a data set of LeRobot")
        self.folder, self._solved = folder, solved
        path = folder / INFO
        try:
            self.info: dict[str, Any] = json.loads(self._own(INFO).read_text())
            version = str(self.info["codebase_version"]).lstrip("v")
            self.features: dict[str, dict[str, Any]] = dict(self.info["features"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: no description of a data set of LeRobot ({error})") from None
        self._major = version.partition(".")[0]
        if self._major not in ("2", "3"):
            raise DataError(f"{path}: version {version}; those from 2.0 to 3.0 can be read")
        for name, meaning in NEEDED.items():
            if name not in self.features:
                has = ", ".join(sorted(self.features))
                raise DataError(f"{path}: there is no feature {name!r} ({meaning}); it has {has}")
        if SUCCESS not in self.features and not solved:
            raise DataError(
                f"{path}: there is no feature {SUCCESS!r}, so nothing says which episodes solved "
                "their task; add it, or where all did, say so: rlinf demonstrations --solved"
            )
        self.cameras = {
            "images." + name.removeprefix(CAMERAS).removeprefix("observation."): name
            for name, feature in self.features.items()
            if feature["dtype"] in ("image", "video")
        }

    @property
    def fps(self) -> int:
        return int(self.info["fps"])

    def records(self, *, images: bool = True) -> Iterator[Record]:
        """The episodes as trajectories, one after the other.

        Args:
            images: whether pictures are read too.

        Raises:
            DataError: a file is missing or is not as ``meta`` says.
        """
        table: tuple[Path | None, Any] = (None, None)
        videos: dict[str, _Video] = {}
        for episode in self._episodes():
            if table[0] != episode.data:
                table = (episode.data, _table(episode.data))
            rows = table[1].slice(episode.start, episode.length)
            if len(rows) != episode.length or not episode.length:
                raise DataError(f"{episode.data}: episode {episode.number} is not all there")
            yield self._record(episode, rows, self._pictures(episode, rows, videos, images))

    def _record(self, episode: Episode, rows: Any, pictures: dict[str, np.ndarray]) -> Record:
        length = episode.length
        success = np.zeros(length, np.uint8)
        if self._solved:
            success[-1] = 1
        else:
            success[:] = _column(rows, SUCCESS).reshape(length)
        rewards = success.astype(np.float32)
        if REWARD in self.features:
            rewards = _column(rows, REWARD).reshape(length).astype(np.float32)
        terminated = np.zeros(length, np.uint8)
        terminated[-1] = success[-1]
        steps: dict[str, np.ndarray] = {
            "observations": _column(rows, STATE).reshape(length, -1).astype(np.float32),
            "actions": _column(rows, ACTION).reshape(length, -1).astype(np.float32),
            "rewards": rewards,
            "terminated": terminated,
            "truncated": np.zeros(length, np.uint8),
            "success": success,
            **pictures,
        }
        after, at = steps["observations"][:0], np.zeros(0, np.int64)
        if not terminated[-1]:
            after, length = steps["observations"][-1:], length - 1
            at = np.array([length - 1], np.int64) if length else at
            steps = {name: column[:length] for name, column in steps.items()}
            steps["truncated"][-1:] = 1
        info: dict[str, Scalar] = {
            "group": episode.number,
            "return": float(rewards.sum()),
            "episode_length": float(episode.length),
            "success_once": float(success.any()),
            "success_at_end": float(success[-1]),
            "instruction": episode.task,
        }
        context = {CUT_STEPS: at, CUT_OBSERVATIONS: after[: len(at)]}
        return Record(Identity(0, episode.number), steps, context, info)

    def _pictures(
        self, episode: Episode, rows: Any, videos: dict[str, _Video], images: bool
    ) -> dict[str, np.ndarray]:
        found = {}
        for own, name in self.cameras.items() if images else ():
            if self.features[name]["dtype"] == "image":
                cells = rows.column(name).to_pylist()
                found[own] = np.stack([self._picture(cell) for cell in cells])
                continue
            path, first = episode.videos[name]
            if name not in videos or not videos[name].reaches(path, first):
                videos[name] = _Video(path)
            found[own] = videos[name].take(first, episode.length)
        return found

    def _picture(self, cell: dict[str, Any]) -> np.ndarray:
        """One that is in a cell, as a file or by its path."""
        from PIL import Image, UnidentifiedImageError

        try:
            source = io.BytesIO(cell["bytes"]) if cell["bytes"] else self._own(cell["path"])
            with Image.open(source) as picture:
                return np.asarray(picture.convert("RGB"))
        except (OSError, UnidentifiedImageError, TypeError) as error:
            raise DataError(f"{self.folder}: {cell.get('path')}: no picture ({error})") from None

    def _own(self, path: Path | str) -> Path:
        """A file of the data set, which comes from anywhere: what it names must lie in it.

        Raises:
            DataError: it leads elsewhere, or is no file that can be read to its end.
        """
        found = (self.folder / path).resolve()
        if not any(found.is_relative_to(place) for place in places_of(self.folder)):
            raise DataError(
                f"{self.folder}: {path} leads out of the folder, to {found}; a data set has its "
                "files in it, so copy this one there (cp -L)"
            )
        if found.exists() and not found.is_file():
            raise DataError(f"{self.folder}: {path} is no file")
        return self.folder / path

    def _named(self, option: str, **values: Any) -> Path:
        """A file whose path ``meta/info.json`` gives with placeholders.

        Raises:
            DataError: others than these, or as :meth:`_own`.
        """
        template = self.info[option]
        text = PLACEHOLDER.sub("", template)
        names = {match[1] for match in PLACEHOLDER.finditer(template)}
        if "{" in text or "}" in text or not names <= values.keys():
            raise DataError(
                f"{self.folder / INFO}: {option} is {template[:200]!r}; its placeholders may be "
                f"{', '.join(f'{{{name}}}' for name in values)}"
            )
        put = PLACEHOLDER.sub(lambda match: format(values[match[1]], match[2] or ""), template)
        return self._own(put)

    def _episodes(self) -> Iterator[Episode]:
        videos = [name for name in self.cameras.values() if self.features[name]["dtype"] == "video"]
        count = 0
        try:
            for episode in (self._of_three if self._major == "3" else self._of_two)(videos):
                count += 1
                yield episode
            wanted = max(1, int(self.info.get("total_episodes", 1)))
            if count < wanted:
                raise DataError(
                    f"{self.folder / 'meta'}: describes {count} of {wanted} episodes "
                    "(total_episodes of info.json); a file is missing, so copy the whole folder"
                )
        except (KeyError, OSError, ValueError, TypeError) as error:
            raise DataError(f"{self.folder / 'meta'}: damaged ({error!r})") from None

    def _of_three(self, videos: list[str]) -> Iterator[Episode]:
        """Many episodes to a file; where each is stands in the tables of ``meta/episodes``."""
        starts: dict[Path, int] = {}
        for table in sorted((self.folder / "meta/episodes").glob("*/*.parquet")):
            for row in _table(self._own(table.relative_to(self.folder))).to_pylist():
                at = {k: int(row[f"data/{k}"]) for k in ("chunk_index", "file_index")}
                data = self._named("data_path", **at)
                first = int(row["dataset_from_index"])
                start = first - starts.setdefault(data, first)
                places = {}
                for name in videos:
                    at = {k: int(row[f"videos/{name}/{k}"]) for k in at}
                    path = self._named("video_path", video_key=name, **at)
                    seconds = float(row[f"videos/{name}/from_timestamp"])
                    places[name] = (path, round(seconds * self.fps))
                task = " ".join(row["tasks"])
                number = int(row["episode_index"])
                yield Episode(number, task, data, start, int(row["length"]), places)

    def _of_two(self, videos: list[str]) -> Iterator[Episode]:
        """A file for each episode, and one for each of its cameras."""
        for line in self._own("meta/episodes.jsonl").read_text().splitlines():
            row = json.loads(line)
            number = int(row["episode_index"])
            at = {
                "episode_chunk": number // int(self.info["chunks_size"]),
                "episode_index": number,
            }
            places = {name: (self._named("video_path", video_key=name, **at), 0) for name in videos}
            data = self._named("data_path", **at)
            task = " ".join(row["tasks"])
            yield Episode(number, task, data, 0, int(row["length"]), places)


class _Video:
    """Pictures of a file, which is read once from its begin to its end."""

    def __init__(self, path: Path) -> None:
        self._path, self._next, self._pictures = path, 0, read_video(path)

    def reaches(self, path: Path, first: int) -> bool:
        """Whether a picture of a file is still to come."""
        return path == self._path and first >= self._next

    def take(self, first: int, count: int) -> np.ndarray:
        found = []
        while self._next < first + count:
            picture = next(self._pictures, None)
            if picture is None:
                raise DataError(f"{self._path}: ends at picture {self._next} of {first + count}")
            if self._next >= first:
                found.append(picture)
            self._next += 1
        return np.stack(found)


def is_dataset(folder: Path) -> bool:
    """Whether a folder looks like one."""
    return (folder / INFO).is_file()


def _table(path: Path) -> Any:
    """Rows of a Parquet file.

    Raises:
        DataError: there is none.
    """
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_table(path, partitioning=None).combine_chunks()
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: no readable Parquet file ({error})") from None


def _column(rows: Any, name: str) -> np.ndarray:
    """Numbers of a feature, one after the other.

    Raises:
        DataError: it is not there, or has gaps.
    """
    if name not in rows.column_names:
        raise DataError(f"{name!r} is a feature of the data set, and not in a file of it")
    found = rows.column(name).combine_chunks()
    while hasattr(found, "flatten") and found.type.num_fields:
        found = found.flatten()
    if found.null_count:
        raise DataError(f"{name!r}: {found.null_count} values are missing")
    return np.asarray(found.to_numpy(zero_copy_only=False))
