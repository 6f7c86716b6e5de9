"""No reward is lost on a step that does not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import stages.factory
import stages.reward
from pipeline.commands.experiment import run_experiment
from pipeline.graph import Graph, StageNode
from pipeline.metrics import read_metrics
from pipeline.run import Run
from rlinf.artifacts import read_manifest
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.data.trajectory import StepRewards, Trajectory, loss_mask
from rlinf.envs import environments
from rlinf.models.hf_folder import HFFolder
from rlinf.rewards.base import Reward
from stages.context import StageContext, StageInput
from stages.factory import get_reward
from stages.layout import stage_folder
from tests.rlinf.rewards.folders import write_reward_model

Compose = Callable[..., dict[str, Any]]


def trajectories_of(run: Path) -> dict[int, Trajectory]:
    read = map(Trajectory.from_record, records(run, "rollout", "trajectories"))
    return {trajectory.identity.sample: trajectory for trajectory in read}


def rewards_of(run: Path) -> dict[int, StepRewards]:
    read = map(StepRewards.from_record, records(run, "reward", "rewards"))
    return {rewards.identity.sample: rewards for rewards in read}


def records(run: Path, stage: str, channel: str) -> list[Record]:
    folder = stage_folder(run, stage, 0)
    manifest = read_manifest(folder)
    assert manifest is not None
    return list(RecordFileReader((folder / manifest.data).glob(f"{channel}-r*.h5")))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("reward", ["score", "digits"])
def test_a_trajectory_that_ends_on_a_tools_word_is_learned_from(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str
) -> None:
    target = "tests.rlinf.envs.tool_speaks_last:ToolSpeaksLast"
    monkeypatch.setitem(environments._entries, "tool_speaks_last", target)
    # Only the advantages of rewards give a gradient here.
    words = ["iterations=1", "task.name=tool_speaks_last", "algorithm.entropy_coeff=0"]
    run_experiment(compose(*words, f"reward.name={reward}", "evaluate.samples=2"))
    (row,) = read_metrics(tmp_path / "tiny")
    assert row["reward/group_std"] > 0
    assert row["train/grad_norm"] > 0

    trajectories = trajectories_of(tmp_path / "tiny")
    given = rewards_of(tmp_path / "tiny")
    for sample, trajectory in trajectories.items():
        places = loss_mask(trajectory).nonzero()[0]
        found = given[sample].rewards.nonzero()[0]
        assert set(found.tolist()) <= set(places[-1:].tolist())
    # Without any step that counts there is nothing to learn from, nor to compare others with.
    assert row["reward/fully_masked"] == 1
    assert [s for s, record in given.items() if not record.is_included] == [0]
    # What the task knows of a prompt beside its answer is there for the reward.
    assert all(t.extra["hint"] == str(t.prompt_text)[::-1] for t in trajectories.values())
    # Lengths are of what the policy said, without the tool's word.
    lengths = [int(loss_mask(trajectory).sum()) for trajectory in trajectories.values()]
    assert row["rollout/steps"] == sum(lengths)


class Length(Reward):
    """Knows neither task nor scores: the length it is told in the prompt's ``info``."""

    Config = Section
    needs_score = False

    def compute(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[float]:
        assert not scores
        return [float(len(str(trajectory.prompt_text))) for trajectory in trajectories]


def again(run: Run, data: Path, world: ProcessGroupInfo) -> StageContext:
    """The reward stage of the first iteration, once more, by one process of several."""
    inputs = {
        name: StageInput(
            Graph(run.config).output_folder(run.folder, StageNode(*of)), None, None, lambda: False
        )
        for name, of in {"trajectories": ("rollout", 0), "initial": ("sft", 0)}.items()
    }
    data.mkdir(exist_ok=True)
    return StageContext(run.config, "reward", 0, run.folder, data, data, world, inputs)


def test_processes_that_share_the_reward_give_what_one_gives(
    tiny_run: Path, tmp_path: Path
) -> None:
    for rank in range(3):
        stages.reward.run(again(Run.open(tiny_run), tmp_path / "data", ProcessGroupInfo(rank, 3)))
    found = list(RecordFileReader((tmp_path / "data").glob("rewards-r*.h5")))
    assert {r.identity.sample: r.digest() for r in found} == {
        r.identity.sample: r.digest() for r in records(tiny_run, "reward", "rewards")
    }
    assert len(found) == len({record.identity for record in found})


def test_a_reward_ends_when_another_number_of_processes_judges(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[Reward]()

    class Closing(Length):
        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(stages.factory, "reward_class", lambda config: (Closing, Section()))
    ctx = again(Run.open(tiny_run), tmp_path / "data", ProcessGroupInfo())
    first = get_reward(ctx)
    assert get_reward(ctx) is first
    ctx.world = ProcessGroupInfo(1, 2)
    assert get_reward(ctx) is not first
    assert closed == [first]


def test_the_task_scores_only_for_a_reward_that_asks_for_it(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.factory, "reward_class", lambda config: (Length, Section()))
    ctx = again(Run.open(tiny_run), tmp_path / "data", ProcessGroupInfo())
    stages.reward.run(ctx)
    assert ctx.worker_state.environment is None
    assert "score" not in ctx.metrics
    assert ctx.metrics["mean"][0] > 0


def test_what_could_not_be_judged_is_counted_and_written(compose: Compose, tmp_path: Path) -> None:
    """A reward model that takes fewer tokens than some samples have."""
    folder = tmp_path / "reward_model"
    folder.mkdir()
    model = ["reward=reward_model", f"reward.path={write_reward_model(folder)}"]
    run_experiment(compose("iterations=1", *model, "reward.max_length=8", "evaluate.samples=2"))
    trajectories = trajectories_of(tmp_path / "tiny")
    given = rewards_of(tmp_path / "tiny")
    (row,) = read_metrics(tmp_path / "tiny")
    tokenizer = HFFolder(folder).raw_tokenizer
    longer = {
        sample
        for sample, t in trajectories.items()
        if len(tokenizer(f"{t.prompt_text}{t.text}")["input_ids"]) > 8
    }
    assert 0 < len(longer) < len(given), "some are longer, some are not"
    assert row["reward/too_long"] == len(longer)
    assert {s for s, record in given.items() if record.failure} == longer
    assert all(not given[sample].is_included for sample in longer)
    # The mean is of those that were judged.
    rewards = [float(r.rewards.sum()) for s, r in given.items() if s not in longer]
    assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
