"""No reward is lost on a step that does not count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import execute
from pipeline.metrics import collect
from rlinf.artifacts import read_manifest
from rlinf.channels.file import FileReader
from rlinf.data.counted import counted
from rlinf.data.record import Record
from rlinf.envs import environments
from stages.layout import stage_folder

Compose = Callable[..., dict[str, Any]]


def records(run: Path, stage: str, channel: str) -> dict[int, Record]:
    folder = stage_folder(run, stage, 0)
    manifest = read_manifest(folder)
    assert manifest is not None
    read = FileReader((folder / manifest.data).glob(f"{channel}-r*.h5"))
    return {record.identity.sample: record for record in read}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("reward", ["score", "digits"])
def test_a_trajectory_that_ends_on_a_tools_word_is_learned_from(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str
) -> None:
    target = "tests.rlinf.envs.tool_speaks_last:ToolSpeaksLast"
    monkeypatch.setitem(environments._entries, "tool_speaks_last", target)
    # Only the advantages of rewards give a gradient here.
    words = ["iterations=1", "task.name=tool_speaks_last", "algorithm.entropy_bonus=0"]
    execute(compose(*words, f"reward.name={reward}", "evaluate.samples=2"))
    (row,) = collect(tmp_path / "tiny")
    assert row["reward/group_std"] > 0
    assert row["train/grad_norm"] > 0

    trajectories = records(tmp_path / "tiny", "rollout", "trajectories")
    given = records(tmp_path / "tiny", "reward", "rewards")
    for sample, trajectory in trajectories.items():
        places = counted(trajectory).nonzero()[0]
        found = given[sample].steps["rewards"].nonzero()[0]
        assert set(found.tolist()) <= set(places[-1:].tolist())
    # Without any step that counts there is nothing to learn from, nor to compare others with.
    assert row["reward/uncounted"] == 1
    assert [s for s, record in given.items() if not record.info["keep"]] == [0]
    # Lengths are of what the policy said, without the tool's word.
    lengths = [int(counted(trajectory).sum()) for trajectory in trajectories.values()]
    assert row["rollout/steps"] == sum(lengths)
