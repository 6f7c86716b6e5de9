"""A simulator whose picture shows where to go, and data sets of it in LeRobot's layouts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow
from gymnasium.spaces import Box, Dict
from PIL import Image
from pyarrow import parquet

from rlinf.data.video import write_video

SIZE = (16, 24)
TASKS = ("go to the light", "stay in the dark")
LENGTHS = (5, 9, 7)
FPS = 10


def shown(place: float) -> np.ndarray:
    """The picture of a place in [-1, 1], uint8 ``[16, 24, 3]``."""
    picture = np.full((*SIZE, 3), 30, np.uint8)
    column = round((place + 1) / 2 * (SIZE[1] - 4))
    picture[:, column : column + 4] = (240, 200, 40)
    return picture


class Painted(gymnasium.Env[Any, Any]):
    """The first component of an action is to be the light's place, the second one 0."""

    def __init__(self) -> None:
        self.observation_space = Dict(arm=Box(-9, 9, (3,)), front=Box(0, 255, (*SIZE, 3), np.uint8))
        self.action_space = Box(-2, 2, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._drawn(), {}

    def step(self, action: Any) -> Any:
        reward = -float(np.abs(action - [self.place, 0]).sum())
        return self._drawn(), reward, False, False, {"success": reward > -0.3}

    def _drawn(self) -> Any:
        self.place = float(self.np_random.uniform(-1, 1))
        return {"arm": np.array([self.place, 0.5, 2], np.float32), "front": shown(self.place)}


gymnasium.register("Painted-v0", Painted)


def episodes() -> list[dict[str, np.ndarray]]:
    """States ``[T, 3]``, actions ``[T, 2]`` and pictures of each episode."""
    random, found = np.random.default_rng(4), []
    for length in LENGTHS:
        places = random.uniform(-1, 1, length).astype(np.float32)
        state = np.stack([places, np.full(length, 0.5), np.full(length, 2.0)], 1)
        actions = np.stack([places, random.normal(0, 0.01, length)], 1)
        found.append(
            {
                "observation.state": state.astype(np.float32),
                "action": actions.astype(np.float32),
                "pictures": np.stack([shown(float(place)) for place in places]),
            }
        )
    return found


def _info(version: str, kind: str, **paths: str) -> dict[str, Any]:
    def numbers(size: int) -> dict[str, Any]:
        return {"dtype": "float32", "shape": [size], "names": None}

    picture = {"dtype": kind, "shape": [*SIZE, 3], "names": ["height", "width", "channels"]}
    if version == "v2.1":
        picture |= {"shape": [3, *SIZE], "names": ["channels", "height", "width"]}
    return {
        "codebase_version": version,
        "fps": FPS,
        "chunks_size": 1000,
        "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS),
        "features": {
            "observation.state": numbers(3),
            "action": numbers(2),
            "observation.images.cam": picture,
        },
        **paths,
    }


def _cells(pictures: np.ndarray) -> pyarrow.Array:
    cells = []
    for picture in pictures:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        cells.append({"bytes": file.getvalue(), "path": None})
    fields = {"bytes": pyarrow.binary(), "path": pyarrow.string()}
    return pyarrow.array(cells, pyarrow.struct(fields))


def _table(each: dict[str, np.ndarray], kind: str) -> pyarrow.Table:
    columns: dict[str, Any] = {
        name: pyarrow.array(list(each[name]), pyarrow.list_(pyarrow.float32()))
        for name in ("observation.state", "action")
    }
    if kind == "image":
        columns["observation.images.cam"] = _cells(each["pictures"])
    return pyarrow.table(columns)


def version_two(folder: Path, kind: str) -> Path:
    """Version 2.1: a file for each episode and camera, and statistics of each episode."""
    info = _info(
        "v2.1",
        kind,
        data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        video_path="videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    )
    videos = folder / "videos/chunk-000/observation.images.cam"
    for part in (folder / "meta", folder / "data/chunk-000", videos):
        part.mkdir(parents=True)
    lines: dict[str, list[Any]] = {"episodes": [], "episodes_stats": [], "tasks": []}
    for number, each in enumerate(episodes()):
        parquet.write_table(
            _table(each, kind), folder / f"data/chunk-000/episode_{number:06d}.parquet"
        )
        if kind == "video":
            write_video(videos / f"episode_{number:06d}.mp4", each["pictures"], FPS)
        task = TASKS[number % 2]
        row = {"episode_index": number, "tasks": [task], "length": len(each["action"])}
        lines["episodes"].append(row)
        stats = {"action": {"mean": each["action"].mean(0).tolist()}}
        lines["episodes_stats"].append({"episode_index": number, "stats": stats})
    lines["tasks"] = [{"task_index": i, "task": task} for i, task in enumerate(TASKS)]
    for name, rows in lines.items():
        (folder / f"meta/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def version_three(folder: Path, kind: str) -> Path:
    """Version 3.0: all episodes in one file of each kind, in row groups that do not begin with
    them."""
    info = _info(
        "v3.0",
        kind,
        data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    )
    video = folder / "videos/observation.images.cam/chunk-000/file-000.mp4"
    for part in (folder / "meta/episodes/chunk-000", folder / "data/chunk-000", video.parent):
        part.mkdir(parents=True)
    every, rows, first = episodes(), [], 0
    for number, each in enumerate(every):
        length = len(each["action"])
        rows.append(
            {
                "episode_index": number,
                "tasks": [TASKS[number % 2]],
                "length": length,
                "data/chunk_index": 0,
                "data/file_index": 0,
                "dataset_from_index": first,
                "dataset_to_index": first + length,
                "videos/observation.images.cam/chunk_index": 0,
                "videos/observation.images.cam/file_index": 0,
                "videos/observation.images.cam/from_timestamp": first / FPS,
                "videos/observation.images.cam/to_timestamp": (first + length) / FPS,
            }
        )
        first += length
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "meta/episodes/chunk-000/file-000.parquet")
    data = pyarrow.concat_tables([_table(each, kind) for each in every])
    parquet.write_table(data, folder / "data/chunk-000/file-000.parquet", row_group_size=4)
    if kind == "video":
        write_video(video, np.concatenate([each["pictures"] for each in every]), FPS)
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


LAYOUTS = {"v2.1": version_two, "v3.0": version_three}
