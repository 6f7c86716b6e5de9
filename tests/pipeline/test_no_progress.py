"""A run whose reward hangs goes on: the stage is ended, its stacks are in the log, and it is
retried with the results of an undisturbed run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.pipeline.helpers import contents
from tests.pipeline.test_user_errors import PLACES, launch_with

REWARD = """
import os
import threading
import time
from pathlib import Path

from rlinf.rewards.base import Reward

HANGS = Path(__file__).with_name("hangs")


def wait_for_ever():
    while True:
        time.sleep(0.05)


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


class Own(Reward):
    def compute(self, trajectories, scores):
        if HANGS.exists() and os.environ.get("RANK", "0") == "0":
            kind = HANGS.read_text()
            HANGS.unlink()
            wait_for_a_lock() if kind == "lock" else wait_for_ever()
        return list(scores)
"""
MINUTES = 0.5
"""The deadline; a stage of this run makes its first step earlier, also on a busy machine."""


def run(folder: Path, name: str, kind: str, *words: str) -> str:
    """Run with a reward that hangs once; returns what the driver and its stages wrote."""
    (folder / "own_reward.py").write_text(REWARD)
    if kind:
        (folder / "hangs").write_text(kind)
    settings = [f"run.name={name}", f"cluster.progress_timeout_min={MINUTES}"]
    ended = launch_with(folder, "reward.name=own_reward:Own", *words, *settings)
    assert ended.returncode == 0, ended.stderr
    assert not (folder / "hangs").exists()
    logs = [path.read_text() for path in (folder / "runs" / name / "logs").rglob("*.log")]
    return ended.stdout + ended.stderr + "\n".join(logs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("inprocess", "loop"),
        pytest.param("local", "loop", marks=pytest.mark.slow),
        pytest.param("local", "lock", marks=pytest.mark.slow),
        pytest.param("pools", "loop", marks=pytest.mark.slow),
        pytest.param("pools", "lock", marks=pytest.mark.slow),
    ],
)
def test_a_stage_that_hangs_is_ended_and_retried(tmp_path: Path, place: str, kind: str) -> None:
    written = run(tmp_path, "hanging", kind, *PLACES[place])
    function = "wait_for_a_lock" if kind == "lock" else "wait_for_ever"
    assert re.search(rf'own_reward\.py", line \d+ in {function}', written), written
    assert "reward/0: no progress for 0.5 min (cluster.progress_timeout_min)" in written
    assert re.search(r"reward/0 failed \(.*no progress for 0\.5 min", written), written
    run(tmp_path, "undisturbed", "", *PLACES[place])
    runs = tmp_path / "runs"
    assert contents(runs / "hanging") == contents(runs / "undisturbed")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_ranks_of_a_stage_write_their_stacks(tmp_path: Path) -> None:
    plan = {"stages": {"reward": {"processes": 2}}}
    (tmp_path / "two.yaml").write_text(json.dumps(plan))
    words = ["cluster=local", "plan=two.yaml"]
    written = run(tmp_path, "hanging", "loop", *words)
    # Rank 1 has computed, and waits for the commit of rank 0.
    assert "in wait_for_ever" in written
    assert "in wait_for_commit" in written
    run(tmp_path, "undisturbed", "", *words)
    runs = tmp_path / "runs"
    assert contents(runs / "hanging") == contents(runs / "undisturbed")
