"""Episodes of LeRobot data sets as demonstrations: both layouts, pictures read as they are used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="the extra 'lerobot' is not installed")
pytest.importorskip("av", reason="the extra 'lerobot' is not installed")
pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pyarrow import parquet

from rlinf.data.episodes import decode_instruction
from rlinf.data.lerobot import LeRobotDataset
from rlinf.data.record import LazyArray
from rlinf.envs.dataset_demonstrations import LeRobotDemonstrations
from rlinf.errors import DataError
from rlinf.models.action_encoding import compute_statistics
from rlinf.models.lerobot_folder import compute_dataset_statistics
from tests.pipeline.painted import LAYOUTS, SIZE, TASKS, episodes

CAMERAS = {"cam": "front"}
SPEC: dict[str, Any] = {
    "observation": 3,
    "action": {"kind": "box", "size": 2},
    "images": {"front": list(SIZE)},
}
KINDS = ("image", "video")


@pytest.fixture(params=[(layout, kind) for layout in LAYOUTS for kind in KINDS], ids=" ".join)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    layout, kind = request.param
    return LAYOUTS[layout](tmp_path / "set", kind)


def difference(found: Any, wanted: np.ndarray) -> float:
    """The mean difference of pictures; videos lose some."""
    return float(np.abs(np.asarray(found).astype(int) - wanted).mean())


def test_all_steps_of_all_episodes_are_demonstrations(folder: Path) -> None:
    data = LeRobotDemonstrations(folder, CAMERAS, instruction=True)
    data.check(SPEC)
    assert len(data) == 3
    for number, wanted in enumerate(episodes()):
        found = data[number]
        np.testing.assert_array_equal(found.observations, wanted["observation.state"])
        np.testing.assert_array_equal(found.actions, wanted["action"])
        assert list(found.images) == ["front"]
        assert difference(found.images["front"], wanted["pictures"]) < 8
        assert {decode_instruction(row) for row in found.instruction} == {TASKS[number % 2]}


def test_pictures_of_some_steps_are_those_of_these_steps(folder: Path) -> None:
    """Also in the middle of a file, and across the borders of its row groups."""
    data = LeRobotDemonstrations(folder, CAMERAS, instruction=False)
    for number, wanted in enumerate(episodes()):
        found = data[number]
        assert found.instruction is None
        for start, stop in ((0, 1), (1, 4), (3, len(found)), (len(found) - 1, len(found))):
            part = found.slice_steps(start, stop)
            assert isinstance(part.images["front"], LazyArray)
            assert part.images["front"].shape == (stop - start, *SIZE, 3)
            assert difference(part.images["front"], wanted["pictures"][start:stop]) < 8


def test_a_text_of_ones_own_replaces_the_instructions(folder: Path) -> None:
    data = LeRobotDemonstrations(folder, CAMERAS, instruction="push")
    assert {decode_instruction(row) for row in data[1].instruction} == {"push"}
    with pytest.raises(DataError, match=r"episode 0: .*at most 256"):
        LeRobotDemonstrations(folder, CAMERAS, instruction="far " * 80)[0]


def test_statistics_are_those_of_all_steps(folder: Path) -> None:
    found = compute_dataset_statistics(folder)
    for feature in ("observation.state", "action"):
        every = np.concatenate([each[feature] for each in episodes()])
        for name, wanted in compute_statistics(every).items():
            np.testing.assert_allclose(found[feature][name], wanted, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("spec", "cameras", "message"),
    [
        (
            {"observation": 4},
            CAMERAS,
            r"observation\.state has 3 numbers, and task\.observation is",
        ),
        (
            {"action": {"kind": "box", "size": 7}},
            CAMERAS,
            r"action has 2 .* task\.action\.size is 7",
        ),
        ({"action": {"kind": "discrete", "size": 2}}, CAMERAS, "the task's are discrete"),
        ({}, {}, r"demonstration_camera_map: no camera .* mapped to front .*its cameras: cam"),
        ({}, {"camera": "front"}, r"demonstration_camera_map: .* has no camera; its cameras: cam"),
        ({"images": {"front": [8, 8]}}, CAMERAS, r"task\.images\.front: \[8, 8\].*\[16, 24\]"),
    ],
)
def test_what_does_not_fit_the_task_is_named(
    tmp_path: Path, spec: dict[str, Any], cameras: dict[str, str], message: str
) -> None:
    data = LeRobotDemonstrations(LAYOUTS["v3.0"](tmp_path / "set", "image"), cameras, False)
    with pytest.raises(DataError, match=message):
        data.check({**SPEC, **spec})


def without(path: Path, key: str) -> None:
    """Rewrite lines of JSON, a JSON file, or a table, without a key."""
    if path.suffix == ".parquet":
        table = parquet.read_table(path)
        parquet.write_table(table.drop_columns([key]), path)
        return
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row[key]
    path.write_text("\n".join(map(json.dumps, rows)))


def read(folder: Path) -> None:
    data = LeRobotDemonstrations(folder, CAMERAS, instruction=True)
    data.check(SPEC)
    for number in range(len(data)):
        np.asarray(data[number].images["front"])


@pytest.mark.parametrize(
    ("layout", "path", "key", "message"),
    [
        ("v2.1", "meta/info.json", "features", r"info\.json: .*'features'"),
        ("v2.1", "meta/info.json", "chunks_size", r"meta: damaged \(KeyError\('chunks_size'"),
        ("v2.1", "meta/episodes.jsonl", "tasks", r"meta: damaged \(KeyError\('tasks'"),
        ("v3.0", "meta/episodes/chunk-000/file-000.parquet", "length", r"KeyError\('length'"),
        ("v3.0", "data/chunk-000/file-000.parquet", "action", "no column 'action'"),
        (
            "v3.0",
            "data/chunk-000/file-000.parquet",
            "observation.images.cam",
            "no column 'obs.*cam'",
        ),
    ],
)
def test_a_missing_key_is_named(
    tmp_path: Path, layout: str, path: str, key: str, message: str
) -> None:
    folder = LAYOUTS[layout](tmp_path / "set", "image")
    without(folder / path, key)
    with pytest.raises(DataError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"none"), "no readable video"),
        (lambda path: path.unlink(), "no readable video"),
        (
            lambda path: path.write_bytes((path.parent / "episode_000000.mp4").read_bytes()),
            "has 5 of",
        ),
    ],
)
def test_a_damaged_video_is_named(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = LAYOUTS["v2.1"](tmp_path / "set", "video")
    spoil(folder / "videos/chunk-000/observation.images.cam/episode_000001.mp4")
    with pytest.raises(DataError, match=rf"episode_000001\.mp4: {message}"):
        read(folder)


def test_pictures_of_another_size_than_described_are_refused(tmp_path: Path) -> None:
    folder = LAYOUTS["v3.0"](tmp_path / "set", "image")
    path = folder / "meta/info.json"
    path.write_text(path.read_text().replace("[16, 24, 3]", "[24, 24, 3]"))
    data = LeRobotDemonstrations(folder, CAMERAS, instruction=False)
    with pytest.raises(DataError, match=r"images of \[16, 24, 3\], and meta/info.json says"):
        np.asarray(data[0].images["front"])


def test_a_whole_feature_is_read_file_by_file(tmp_path: Path) -> None:
    folder = LAYOUTS["v2.1"](tmp_path / "set", "video")
    found = LeRobotDataset(folder, all_successful=True).read_column("action")
    np.testing.assert_array_equal(found, np.concatenate([each["action"] for each in episodes()]))
