"""Demonstrations go to LeRobot's format and back, and what is not there is said."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="the extra 'lerobot' is not installed")
pytest.importorskip("av", reason="the extra 'lerobot' is not installed")
import pyarrow
from PIL import Image
from pyarrow import parquet
from typer.testing import CliRunner

from pipeline.commands.cli import app
from rlinf.channels.record_files import RecordFileReader, write_records
from rlinf.data import lerobot
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.data.transitions import to_transitions
from rlinf.data.video import read_video, write_video
from rlinf.errors import DataError, InputError
from rlinf.replay import offline_data

SIZE = (48, 64)


def picture(number: int) -> np.ndarray:
    """A bar that moves over a slope of gray; uint8 ``[48, 64, 3]``."""
    shown = np.repeat(np.linspace(20, 200, SIZE[1], dtype=np.uint8)[None], SIZE[0], 0)
    shown[:, 2 * number % SIZE[1] :][:, :4] = 250
    return np.repeat(shown[..., None], 3, -1)


def trajectory(sample: int, lengths: list[int], solved: list[bool], images: bool) -> Trajectory:
    """Episodes one after the other; what is not solved is cut off."""
    random = np.random.default_rng(sample)
    count = sum(lengths)
    ends = np.cumsum(lengths) - 1
    terminated, truncated = np.zeros((2, count), np.uint8)
    terminated[ends[solved]] = 1
    truncated[ends[~np.array(solved)]] = 1
    cut = np.flatnonzero(truncated)
    return Trajectory(
        identity=RecordId(0, sample),
        observations=random.normal(size=(count, 5)).astype(np.float32),
        actions=random.normal(size=(count, 2)).astype(np.float32),
        rewards=random.normal(size=count).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        success=terminated,
        logprobs=np.zeros(count, np.float32),
        images={"front": np.stack([picture(sample + k) for k in range(count)])} if images else {},
        truncation_steps=cut,
        final_observations=np.zeros((len(cut), 5), np.float32),
        extra={"instruction": f"task {sample % 2}"},
    )


THREE = [([5, 7], [True, False]), ([4], [False]), ([9], [True])]


@pytest.mark.parametrize("png", [True, False])
@pytest.mark.parametrize("frames", [20_000, 6])
def test_episodes_come_back(
    tmp_path: Path, png: bool, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that were not solved all but the last step; with few frames in several files."""
    monkeypatch.setattr(lerobot, "FRAMES_PER_FILE", frames)
    given = [trajectory(i, *each, images=True) for i, each in enumerate(THREE)]
    wanted = [episode for record in given for episode in lerobot.split_episodes(record)]
    count = lerobot.write_lerobot_dataset(tmp_path / "set", given, fps=20, task="", png=png)
    found = list(lerobot.LeRobotDataset(tmp_path / "set").trajectories())
    assert count == len(found) == len(wanted) == 4
    assert [record.extra["instruction"] for record in found] == [f"task {i}" for i in (0, 0, 1, 0)]
    files = 1 if frames > 100 else 2
    assert len(list((tmp_path / "set/data").rglob("*.parquet"))) == files
    assert len(list((tmp_path / "set").rglob("*.mp4"))) == (0 if png else files)
    for record, episode in zip(found, wanted, strict=True):
        solved = bool(episode["terminated"][-1])
        length = len(episode["rewards"]) - (not solved)
        assert len(record) == length
        for name in ("observations", "actions", "rewards", "terminated", "success"):
            np.testing.assert_array_equal(getattr(record, name), episode[name][:length])
        difference = record.images["front"].astype(int) - episode["images.front"][:length]
        assert np.abs(difference).max() <= (0 if png else 40)
        assert np.abs(difference).mean() <= (0 if png else 2)
        rows = to_transitions(record, record.rewards)
        assert rows["terminated"].tolist() == episode["terminated"][:length].tolist()
        assert rows["truncated"][-1] == (not solved)
        np.testing.assert_array_equal(
            rows["next_observations"][-1], episode["observations"][-1], "of the step left out"
        )


@pytest.mark.parametrize("version", [2, 3])
def test_a_folder_is_read_by_any_path_that_leads_to_it(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "sets/one"
    if version == 2:
        home.mkdir(parents=True)
        version_two(home, features=FLAG)
    else:
        given = [trajectory(i, *each, images=True) for i, each in enumerate(THREE)]
        lerobot.write_lerobot_dataset(home, given, fps=20, task="", png=True)
    (tmp_path / "link").symlink_to("sets/one")
    absolute = list(lerobot.LeRobotDataset(home).trajectories())
    monkeypatch.chdir(tmp_path)
    paths = ["sets/one", "link", "sets/../sets/one", "./sets/one/"]
    found = {path: list(lerobot.LeRobotDataset(Path(path)).trajectories()) for path in paths}
    monkeypatch.chdir(home)
    found |= {
        path: list(lerobot.LeRobotDataset(Path(path)).trajectories()) for path in (".", "../one")
    }
    for path, records in found.items():
        assert len(records) == len(absolute), path
        for one, other in zip(records, absolute, strict=True):
            np.testing.assert_array_equal(one.actions, other.actions, path)


def test_a_folder_whose_episodes_are_not_all_described_is_refused(tmp_path: Path) -> None:
    given = [trajectory(i, *each, images=False) for i, each in enumerate(THREE)]
    lerobot.write_lerobot_dataset(tmp_path / "set", given, fps=20, task="")
    for table in (tmp_path / "set/meta/episodes").rglob("*.parquet"):
        table.unlink()
    with pytest.raises(DataError, match="describes 0 of 4 episodes"):
        list(lerobot.LeRobotDataset(tmp_path / "set").trajectories())


def test_instructions_that_a_policy_saw_are_the_tasks_of_episodes(tmp_path: Path) -> None:
    record = trajectory(0, [5, 7], [True, True], images=False)
    column = np.zeros((12, 256), np.uint8)
    for rows, text in ((slice(0, 5), "öffne die Schublade"), (slice(5, 12), "push the button")):
        column[rows, : len(text.encode())] = np.frombuffer(text.encode(), np.uint8)
    seen = replace(record, instruction=column)
    lerobot.write_lerobot_dataset(tmp_path / "set", [seen], fps=20, task="another")
    found = [
        r.extra["instruction"] for r in lerobot.LeRobotDataset(tmp_path / "set").trajectories()
    ]
    assert found == ["öffne die Schublade", "push the button"]


def test_a_folder_has_what_version_three_says(tmp_path: Path) -> None:
    """Files, columns and their types, as ``LeRobotDataset`` of version 3.0 expects them."""
    given = [trajectory(i, *each, images=True) for i, each in enumerate(THREE)]
    lerobot.write_lerobot_dataset(tmp_path / "set", given, fps=20, task="")
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (4, 25, 2)
    assert info["splits"] == {"train": "0:4"}
    assert info["features"]["observation.images.front"]["dtype"] == "video"
    data = parquet.read_table(tmp_path / "set/data/chunk-000/file-000.parquet")
    in_files = {name for name in info["features"] if not name.startswith("observation.images")}
    assert set(data.column_names) == in_files
    assert data.column("index").to_pylist() == list(range(25))
    assert data.column("timestamp").to_pylist()[:5] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    episodes = parquet.read_table(tmp_path / "set/meta/episodes/chunk-000/file-000.parquet")
    first, second, *_ = episodes.to_pylist()
    assert first["tasks"] == ["task 0"]
    assert (second["dataset_from_index"], second["dataset_to_index"]) == (5, 12)
    assert second["videos/observation.images.front/from_timestamp"] == pytest.approx(0.25)
    stats = json.loads((tmp_path / "set/meta/stats.json").read_text())
    every = np.concatenate([record.actions for record in given])
    np.testing.assert_allclose(stats["action"]["mean"], every.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["action"]["std"], every.std(0), rtol=1e-5)
    assert np.shape(stats["observation.images.front"]["max"]) == (3, 1, 1)
    assert stats["observation.images.front"]["max"][0][0][0] <= 1


def version_two(folder: Path, **changes: Any) -> Path:
    """Two episodes as version 2.1 writes them, without success unless it is among the changes."""
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": None},
        "action": {"dtype": "float32", "shape": [1], "names": None},
        "observation.images.top": {"dtype": "video", "shape": [48, 64, 3], "names": None},
        **changes.pop("features", {}),
    }
    info = {
        "codebase_version": "v2.1",
        "fps": 10,
        "chunks_size": 1000,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/"
        "episode_{episode_index:06d}.mp4",
        "features": {name: each for name, each in features.items() if each},
        **changes,
    }
    videos = folder / "videos/chunk-000/observation.images.top"
    for part in (folder / "meta", folder / "data/chunk-000", videos):
        part.mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(info))
    lines = []
    for number, length in enumerate((3, 4)):
        lines.append({"episode_index": number, "tasks": ["push"], "length": length})
        state = [[float(number), float(k), 0.5] for k in range(length)]
        success = [False] * (length - 1) + [number == 1]
        columns = {"observation.state": state, "action": [float(k) for k in range(length)]}
        if "next.success" in info["features"]:
            columns["next.success"] = success
        path = folder / f"data/chunk-000/episode_{number:06d}.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        frames = [picture(k) for k in range(length)]
        write_video(videos / f"episode_{number:06d}.mp4", frames, 10)
    (folder / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


FLAG = {"next.success": {"dtype": "bool", "shape": [1], "names": None}}


def test_version_two_is_read(tmp_path: Path) -> None:
    first, second = lerobot.LeRobotDataset(version_two(tmp_path, features=FLAG)).trajectories()
    assert first.observations.tolist() == [[0, 0, 0.5], [0, 1, 0.5]]
    assert first.final_observations.tolist() == [[0, 2, 0.5]]
    assert second.actions.tolist() == [[0], [1], [2], [3]]
    assert second.rewards.tolist() == [0, 0, 0, 1], "success where there is no reward"
    assert second.images["top"].shape == (4, *SIZE, 3)
    assert (first.success_once, second.success_once) == (0, 1)


def test_without_a_success_flag_there_is_one_clear_error(tmp_path: Path) -> None:
    folder = version_two(tmp_path / "set")
    with pytest.raises(DataError, match=r"info.json: .*no feature 'next.success'.*--solved"):
        offline_data.check_offline_data(folder)
    records = list(lerobot.LeRobotDataset(folder, all_successful=True).trajectories())
    assert [record.terminated.tolist() for record in records] == [[0, 0, 1], [0, 0, 0, 1]]
    out = CliRunner().invoke(app, ["demonstrations", str(folder), str(tmp_path / "out")])
    assert isinstance(out.exception, DataError)
    out = CliRunner().invoke(
        app, ["demonstrations", str(folder), str(tmp_path / "out"), "--solved"]
    )
    assert out.exit_code == 0, out.output
    assert len(offline_data.load_offline_data(tmp_path / "out")) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebase_version": "v1.6"}, r"version 1.6; versions 2.0"),
        ({"features": {**FLAG, "action": None}}, r"no feature 'action' \(executed actions\)"),
        ({"codebase_version": None}, "version None"),
    ],
)
def test_a_folder_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        lerobot.LeRobotDataset(version_two(tmp_path, **{"features": FLAG, **changes}))


def test_damage_is_named_by_its_file(tmp_path: Path) -> None:
    folder = version_two(tmp_path, features=FLAG)
    video = folder / "videos/chunk-000/observation.images.top/episode_000001.mp4"
    video.write_bytes(b"none")
    with pytest.raises(DataError, match=r"episode_000001.mp4: no readable video"):
        list(lerobot.LeRobotDataset(folder).trajectories())
    (folder / "data/chunk-000/episode_000000.parquet").unlink()
    with pytest.raises(DataError, match=r"episode_000000.parquet: no readable Parquet"):
        list(lerobot.LeRobotDataset(folder).trajectories(images=False))


def pictured(folder: Path, cell: dict[str, Any]) -> Path:
    """A data set of one step whose picture is a cell."""
    image = {"observation.images.top": {"dtype": "image", "shape": [4, 4, 3], "names": None}}
    version_two(folder, features={**FLAG, **image})
    rows = [{"observation.state": [0.0], "action": 0.0, "next.success": True}]
    table = pyarrow.Table.from_pylist([row | {"observation.images.top": cell} for row in rows])
    parquet.write_table(table, folder / "data/chunk-000/episode_000000.parquet")
    line = {"episode_index": 0, "tasks": ["push"], "length": 1}
    (folder / "meta/episodes.jsonl").write_text(json.dumps(line))
    return folder


def test_pictures_are_read_from_the_folder_alone(tmp_path: Path) -> None:
    secret = tmp_path / "private.png"
    Image.fromarray(np.full((4, 4, 3), 77, np.uint8)).save(secret)
    for number, path in enumerate((str(secret), "../private.png", "link.png", "pipe", "meta")):
        folder = pictured(tmp_path / str(number), {"bytes": None, "path": path})
        (folder / "link.png").symlink_to(secret)
        os.mkfifo(folder / "pipe")
        with pytest.raises(DataError, match=r"leads out of the folder|is no file"):
            list(lerobot.LeRobotDataset(folder).trajectories())
    folder = pictured(tmp_path / "good", {"bytes": None, "path": "images/own.png"})
    (folder / "images").mkdir()
    secret.rename(folder / "images/own.png")
    (record,) = lerobot.LeRobotDataset(folder).trajectories()
    assert record.images["top"].mean() == 77


def test_links_of_the_hub_s_cache_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "datasets--a--b"
    folder = version_two(cache / "snapshots/0123", features=FLAG)
    (cache / "blobs").mkdir()
    for number, path in enumerate(p for p in folder.rglob("*") if p.is_file()):
        path.rename(cache / f"blobs/{number}")
        path.symlink_to(cache / f"blobs/{number}")
    assert len(list(lerobot.LeRobotDataset(folder).trajectories())) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_path": "../set/{episode_index}.parquet"}, "no readable Parquet"),
        ({"data_path": "/etc/{episode_index}.parquet"}, "leads out of the folder"),
        ({"data_path": "../{episode_index}.parquet"}, "leads out of the folder"),
        ({"video_path": "../{video_key}.mp4"}, "leads out of the folder"),
        ({"data_path": "data/{episode_index.__class__}"}, "placeholders may be {episode_chunk}"),
        ({"data_path": "data/{file_index}"}, "placeholders may be {episode_chunk}"),
        ({"data_path": "data/{episode_index:0999999999d}"}, "placeholders may be"),
        ({"data_path": "data"}, "is no file"),
        ({"data_path": 3}, "damaged"),
    ],
)
def test_paths_of_the_description_stay_in_the_folder(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = version_two(tmp_path / "set", features=FLAG, **changes)
    with pytest.raises(DataError, match=message):
        list(lerobot.LeRobotDataset(folder).trajectories())


def test_a_video_that_lists_other_files_is_none(tmp_path: Path) -> None:
    write_video(tmp_path / "private.mp4", [picture(0)], 10)
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile private.mp4\n")
    with pytest.raises(DataError, match="no readable video"):
        list(read_video(tmp_path / "list.mp4"))


def test_it_is_prior_data_for_learning(tmp_path: Path) -> None:
    given = [trajectory(i, *each, images=False) for i, each in enumerate(THREE)]
    lerobot.write_lerobot_dataset(tmp_path / "set", given, fps=20, task="")
    held = offline_data.load_offline_data(tmp_path / "set")
    assert len(held) == 25 - 2, "the last steps of two are left out"
    rows = held.take(np.arange(5))
    np.testing.assert_array_equal(rows["observations"], given[0].observations[:5])


def test_trajectories_of_a_run_go_there_and_back_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    given = [trajectory(i, *each, images=True) for i, each in enumerate(THREE)]
    records = [each.to_record() for each in given]
    write_records(tmp_path / "ours/trajectories-r000-p000.h5", records)
    for words in (
        ["ours", "set", "--fps", "10", "--task", "reach", "--png"],
        ["set", "back"],
    ):
        paths = [str(tmp_path / word) for word in words[:2]]
        out = CliRunner().invoke(app, ["demonstrations", *paths, *words[2:]])
        assert out.exit_code == 0, out.output
    back = list(RecordFileReader((tmp_path / "back").glob("trajectories-*.h5")))
    assert [len(record) for record in back] == [5, 6, 3, 9]
    first = given[0].images["front"][:5]
    np.testing.assert_array_equal(np.asarray(back[0].steps["images.front"]), first)
    out = CliRunner().invoke(app, ["demonstrations", str(tmp_path), str(tmp_path / "other")])
    assert isinstance(out.exception, DataError)
    out = CliRunner().invoke(app, ["demonstrations", str(tmp_path / "set"), str(tmp_path / "ours")])
    assert isinstance(out.exception, InputError)


def test_steps_that_do_not_count_are_no_demonstration() -> None:
    record = trajectory(0, [5, 7], [True, False], images=False)
    record.mask = np.r_[np.zeros(5), np.ones(7)].astype(np.float32)
    assert [len(e["done"]) for e in lerobot.split_episodes(record)] == [7]
    record.success = None
    with pytest.raises(InputError, match="no 'success'"):
        list(lerobot.split_episodes(record))


def test_a_video_of_odd_size_has_all_its_pictures(tmp_path: Path) -> None:
    frames = [picture(k)[:47, :63] for k in range(9)]
    assert write_video(tmp_path / "a.mp4", frames, 20) == 9
    found = list(read_video(tmp_path / "a.mp4"))
    assert len(found) == 9
    for given, shown in zip(frames, found, strict=True):
        assert shown.shape == (48, 64, 3)
        assert np.abs(shown[:47, :63].astype(int) - given).mean() < 2
    with pytest.raises(ValueError, match="one size"):
        write_video(tmp_path / "b.mp4", [frames[0], frames[0][:20]], 20)


def test_chunks_of_actions_are_no_demonstration() -> None:
    record = trajectory(0, [4], [True], images=False)
    record.num_executed = np.full(4, 8, np.int32)
    with pytest.raises(InputError, match="acts by chunks"):
        list(lerobot.split_episodes(record))
