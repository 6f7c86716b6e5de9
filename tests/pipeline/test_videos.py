"""Videos of held-out episodes: every step is there, and filming changes nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco", reason="the extra 'sims' is not installed")
pytest.importorskip("av", reason="the extra 'video' is not installed")
from pipeline.commands.experiment import run_experiment
from pipeline.report.page import write_report
from pipeline.validate_config import validate_config
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import RunConfig, validate
from rlinf.data.record import Record
from rlinf.data.video import read_video
from rlinf.envs.gym import GymConfig, create_simulator_process
from rlinf.errors import ConfigError
from rlinf.seeding import generator

Compose = Callable[..., dict[str, Any]]
SIZE = (48, 64)
SMALL = (
    "task.id=InvertedPendulum-v5",
    "task.observation=4",
    "task.action={kind: box, size: 1}",
    "iterations=0",
    "evaluate.samples=3",
    "evaluate.horizon=9",
)
FILMED = (*SMALL, "evaluate.videos=2", f"task.video={{free: {list(SIZE)}}}")


def evaluated(run: Path) -> tuple[list[Path], list[Record]]:
    """Videos of the first evaluation of a run, and its trajectories."""
    (data,) = (run / "evaluate/0000").glob("data-*")
    return sorted(data.glob("videos/*")), list(RecordFileReader(data.glob("trajectories-*.h5")))


@pytest.mark.usefixtures("undrawn")
def test_a_video_has_each_step_of_an_episode(compose: Compose, tmp_path: Path) -> None:
    run_experiment(compose(*FILMED, "run.name=filmed", experiment="halfcheetah_ppo"))
    run_experiment(compose(*SMALL, "run.name=plain", experiment="halfcheetah_ppo"))
    videos, records = evaluated(tmp_path / "filmed")
    assert [video.name for video in videos] == ["0000-free.mp4", "0001-free.mp4"]
    none, plain = evaluated(tmp_path / "plain")
    assert none == []
    assert [r.digest() for r in records] == [r.digest() for r in plain]
    task = GymConfig.model_validate({"id": "InvertedPendulum-v5", "images": {"free": SIZE}})
    with closing(create_simulator_process(task)) as process:
        for number, video in enumerate(videos):
            shown = list(read_video(video))
            assert len(shown) == len(records[number]) <= 9
            seed = int(generator(0, 0, "test", "reset", number, 0).integers(2**31))
            seen = process.reset([0], [seed])["free"][0]
            for picture, action in zip(shown, records[number].steps["actions"], strict=True):
                assert np.abs(picture.astype(int) - seen).mean() < 3
                seen = process.step([0], action[None])[0]["seen.free"][0]
    page = write_report(tmp_path / "filmed")
    links = re.findall(r'href="([^"]*\.mp4)"', page.read_text())
    assert {(page.parent / link).resolve() for link in links} >= {v.resolve() for v in videos}
    assert all((page.parent / link).is_file() for link in links)


@pytest.mark.usefixtures("undrawn")
def test_cameras_that_the_policy_sees_film_too(compose: Compose, tmp_path: Path) -> None:
    words = ("model=cnn", "model.hidden=[8]", "model.features_dim=8", "evaluate.videos=1")
    images = f"task.images={{free: {list(SIZE)}}}"
    run_experiment(compose(*SMALL, *words, images, "run.name=seen", experiment="halfcheetah_ppo"))
    (video,), (first, *_) = evaluated(tmp_path / "seen")
    shown = np.stack(list(read_video(video))).astype(int)
    assert np.abs(shown - first.steps["images.free"]).mean() < 3


@pytest.mark.parametrize(
    ("words", "experiment", "message"),
    [
        (["evaluate.videos=2"], "halfcheetah_ppo", r"evaluate\.videos: .* no cameras; set task"),
        (["evaluate.videos=2"], "arithmetic_grpo", r"evaluate\.videos: .* no cameras"),
        (
            ["task.images={track: [48, 48]}", "task.video={track: [64, 64]}"],
            "halfcheetah_ppo",
            r"video\.track: it is in images too",
        ),
    ],
)
def test_what_cannot_be_filmed_is_refused(
    compose: Compose, words: list[str], experiment: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_config(validate(RunConfig, compose(*words, experiment=experiment)))
