"""A run whose own code raises ends at once, by one traceback that begins at the user's line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf import package_paths
from rlinf.errors import EXIT_BAD_INPUT
from tests.conftest import TINY

REWARD = """
from pathlib import Path

from rlinf.rewards.base import Reward

CALLS = Path(__file__).with_name("calls")


def difficulty(trajectory):
    return trajectory.extra["difficulty"]


class Own(Reward):
    def compute(self, trajectories, scores):
        with CALLS.open("a") as calls:
            calls.write("x")
        {body}
"""
BROKEN = "return [difficulty(trajectory) for trajectory in trajectories]"
ONCE = """if len(CALLS.read_text()) == 1:
            raise ConnectionError("the grader restarts")
        return list(scores)"""
ENDS = "raise SystemExit(0)"
PLAN = {
    "pools": [{"stages": ["rollout", "reward", "inference", "train"], "devices": {"local": 1}}],
}
PLACES = {"inprocess": [], "local": ["cluster=local"], "pools": ["cluster=local", "plan=plan.yaml"]}


ALGORITHM = """
from rlinf.algorithms.group_relative import GRPO


class Own(GRPO):
    def compute_advantages(self, batch):
        return {}["no key"]
"""
TASK = """
from rlinf.envs.arithmetic import ArithmeticEnvironment


class Own(ArithmeticEnvironment):
    def grade(self, response, answer):
        return {}["no key"]
"""


def launch(folder: Path, body: str, *more: str) -> subprocess.CompletedProcess[str]:
    """``rlinf run`` with a reward of the user's, in the user's folder."""
    (folder / "own_reward.py").write_text(REWARD.format(body=body))
    return launch_with(folder, "reward.name=own_reward:Own", *more)


def launch_with(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "plan.yaml").write_text(json.dumps(PLAN))
    small = [word.removeprefix("++") for word in TINY]
    words = ["experiment=arithmetic_grpo", "log.trackers=[]", *small, "iterations=1", *more]
    return subprocess.run(
        [sys.executable, "-m", "rlinf.launch", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "place", ["inprocess", "local", pytest.param("pools", marks=pytest.mark.slow)]
)
def test_user_code_that_raises_ends_the_run_at_once(tmp_path: Path, place: str) -> None:
    ended = launch(tmp_path, BROKEN, *PLACES[place])
    assert ended.returncode == EXIT_BAD_INPUT, ended.stderr
    assert (tmp_path / "calls").read_text() == "x", "it is not tried again"
    written = ended.stdout + ended.stderr
    assert written.count("Traceback") == 1, written
    assert len(written.splitlines()) < 40
    message = ended.stderr[ended.stderr.rindex("error: ") :]
    assert "reward.name: own_reward:Own raised KeyError: 'difficulty'" in message
    frames = [line for line in message.splitlines() if line.startswith("  File ")]
    assert [frame.rpartition(" ")[2] for frame in frames] == ["compute", "<listcomp>", "difficulty"]
    assert all("own_reward.py" in frame for frame in frames)
    assert "a trajectory has the fields identity, actions, " in message
    assert "prompt_text" in message, "the fields there are"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("section", "source", "frame"),
    [("algorithm", ALGORITHM, "compute_advantages"), ("task", TASK, "grade")],
)
def test_every_part_that_raises_ends_the_run_at_once(
    tmp_path: Path, section: str, source: str, frame: str
) -> None:
    (tmp_path / "own_part.py").write_text(source)
    ended = launch_with(tmp_path, f"{section}.name=own_part:Own")
    assert ended.returncode == EXIT_BAD_INPUT, ended.stderr
    assert (ended.stdout + ended.stderr).count("Traceback") == 1, ended.stderr
    message = ended.stderr[ended.stderr.rindex("error: ") :]
    assert f"{section}.name: own_part:Own raised KeyError: 'no key'" in message
    frames = [line for line in message.splitlines() if line.startswith("  File ")]
    assert [line.rpartition(" ")[2] for line in frames] == [frame]


def test_user_code_that_raises_in_a_check_ends_the_command_before_the_run(tmp_path: Path) -> None:
    check = (
        "pass\n\n    @classmethod\n    def check(cls, options, run):\n        return {}['no key']"
    )
    ended = launch(tmp_path, check)
    assert ended.returncode == EXIT_BAD_INPUT, ended.stderr
    message = ended.stderr[ended.stderr.index("error: ") :]
    assert message.startswith("error: reward.name: own_reward:Own raised KeyError: 'no key'")
    assert message.count("Traceback") == 1
    assert len(message.splitlines()) < 8
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(600)
def test_user_code_that_lost_a_connection_is_tried_again(tmp_path: Path) -> None:
    ended = launch(tmp_path, ONCE)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "calls").read_text() == "xx"
    assert "raised ConnectionError: the grader restarts); trying again" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert str(package_paths.ROOT) not in ended.stderr


@pytest.mark.timeout(600)
def test_user_code_does_not_end_the_run_as_if_it_were_done(tmp_path: Path) -> None:
    ended = launch(tmp_path, ENDS)
    assert ended.returncode == EXIT_BAD_INPUT, ended.stderr
    assert "own_reward:Own raised SystemExit: 0" in ended.stderr
