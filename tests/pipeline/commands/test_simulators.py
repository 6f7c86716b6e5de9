"""``rlinf doctor --env``: what a simulator lacks is told, all of it at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.cli import main
from pipeline.commands.doctor import check_simulator
from rlinf.errors import ConfigError
from rlinf.interpreters import ENVIRONMENTS_VARIABLE
from tests.environments import need_environment


def findings_of(task: str, *overrides: str) -> list[tuple[str, str, str]]:
    return [(f.level, f.check, f.detail) for f in check_simulator(task, overrides)]


def test_a_simulator_that_lacks_nothing_begins_an_episode() -> None:
    *before, (level, what, detail) = findings_of("cartpole")
    assert [row[:2] for row in before] == [
        ("ok", "simulator"),
        ("ok", "interpreter"),
        ("ok", "packages"),
    ]
    assert (level, what) == ("ok", "episode")
    assert "state [4]; no images configured (task.images)" in detail


def test_all_that_is_missing_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENTS_VARIABLE, str(tmp_path))
    found = findings_of("calvin", f"task.kwargs.chains={tmp_path}/none.json")
    assert [row[:2] for row in found] == [
        ("ok", "simulator"),
        ("fail", "interpreter"),
        ("fail", "files"),
        ("fail", "files"),
        ("warn", "episode"),
    ]
    assert "make env NAME=calvin makes it" in found[1][2]
    assert found[2][2].startswith("task.kwargs.folder: is not set; give a clone of")
    assert found[3][2].startswith(f"task.kwargs.chains: there is no {tmp_path}/none.json; give")


@pytest.mark.parametrize("task", ["maniskill_gpu", "isaaclab"])
def test_a_simulator_on_a_gpu_lacks_one_where_there_is_none(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    found = {check: (level, detail) for level, check, detail in findings_of(task)}
    level, detail = found["GPU"]
    assert level == "fail"
    assert "the simulator needs an NVIDIA" in detail
    assert found["episode"][0] == "warn"


def test_a_world_model_lacks_its_file_until_one_is_fitted() -> None:
    level, check, detail = findings_of("world_model")[3]
    assert (level, check) == ("fail", "files")
    assert detail.startswith("task.kwargs.model: is not set; give the file of a world model")


def test_packages_that_an_interpreter_lacks_are_all_named() -> None:
    python = need_environment("gym")
    found = dict(row[1:] for row in findings_of("metaworld", f"task.python={python}"))
    assert found["packages"] == "metaworld not found; install them there"
    missing = dict(row[1:] for row in findings_of("libero", "task.python=gym"))["packages"]
    assert missing == "libero, robosuite not found; make env NAME=gym installs them"


@pytest.mark.parametrize(
    ("task", "override", "message"),
    [
        ("cartpole", "task.id=CartPoel-v1", r"task\.id: cannot make 'CartPoel-v1'"),
        ("cartpole", "task.observation=5", r"task\.observation: 5 is not what CartPole-v1 has"),
        ("halfcheetah", "task.images={trak: [8, 8]}", r"task\.images\.trak: no such camera"),
    ],
)
def test_an_episode_that_cannot_begin_says_why(task: str, override: str, message: str) -> None:
    if task == "halfcheetah":
        pytest.importorskip("mujoco")
    level, what, detail = findings_of(task, override)[-1]
    assert (level, what) == ("fail", "episode")
    assert re.match(message, detail), detail


def test_a_task_that_steps_no_simulator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--env arithmetic: task 'arithmetic' has no simulator"):
        findings_of("arithmetic")
    with pytest.raises(ConfigError, match=r"task=metawrld: no such task; did you mean .?metaworld"):
        findings_of("metawrld")


def test_the_command_ends_with_1_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENVIRONMENTS_VARIABLE, str(tmp_path))
    for words, code in (
        (["doctor", "--env", "metaworld"], 1),
        (["doctor", "--env", "cartpole", "task.id=CartPole-v0"], 0),
        (["doctor", "task.id=CartPole-v0"], 65),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == code, words
    assert "need --env NAME" in capsys.readouterr().err
