"""Groups without a signal are drawn anew until the batch is full, or often enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import read_metrics
from pipeline.validate_config import validate_config
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import RunConfig, Section, validate
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from rlinf.rewards.base import Reward
from stages.dynamic_sampling import group_by_batch_index
from stages.flow import on_policy
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
BATCH, SIZE = 6, 2
own_rollout = replace(
    on_policy,
    stages={**on_policy.stages, "rollout": replace(on_policy.stages["rollout"], module=__name__)},
)


def run(ctx: Any) -> None:
    """Stand for a rollout stage of one's own."""


class Parity(Reward):
    """Half of the samples have it, so that half of the pairs teach nothing."""

    Config = Section
    needs_score = False

    def compute(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[float]:
        return [float(int(t.actions.sum()) % 2) for t in trajectories]


class Never(Parity):
    def compute(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[float]:
        return [0.0] * len(trajectories)


def values(compose: Compose, name: str, *words: str, reward: str = "Parity") -> dict[str, Any]:
    usual = [f"run.name={name}", f"rollout.batch_size={BATCH}", f"rollout.group_size={SIZE}"]
    usual += [
        "algorithm.filter_zero_variance_groups=true",
        "iterations=1",
        "sft.max_steps=0",
    ]
    usual += ["evaluate.every=0", "evaluate.samples=2"]
    made = compose(*usual, *words)
    return {**made, "reward": {"name": f"{__name__}:{reward}"}}


def dynamic(compose: Compose, name: str, max_resamples: int, **more: Any) -> dict[str, Any]:
    return values(compose, name, f"rollout.max_resamples={max_resamples}", **more)


def samples(run: Path) -> dict[int, Trajectory]:
    found = RecordFileReader(run.glob("it/0000/rollout/*/trajectories-r*.h5"))
    return {record.identity.sample: Trajectory.from_record(record) for record in found}


@pytest.mark.usefixtures("undrawn")
def test_a_batch_is_filled_with_informative_groups(compose: Compose, tmp_path: Path) -> None:
    run_experiment(values(compose, "plain"))
    run_experiment(dynamic(compose, "full", 12))
    (plain,), (full,) = read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "full")
    assert plain["reward/used_fraction"] < 1
    assert full["reward/used_fraction"] == 1
    assert full["rollout/resampled_groups"] >= round((1 - plain["reward/used_fraction"]) * BATCH)
    assert full["rollout/rejected_groups"] == 0
    assert full["train/samples"] == BATCH * SIZE
    first, now = samples(tmp_path / "plain"), samples(tmp_path / "full")
    assert sorted(first) == sorted(now) == list(range(BATCH * SIZE))
    kept = {sample // SIZE for sample in now if same(first[sample], now[sample])}
    # Groups that teach are those of a rollout without it; the others are of other prompts.
    assert len(kept) == round(plain["reward/used_fraction"] * BATCH)
    for sample, record in now.items():
        assert record.group == sample // SIZE
        alike = record.prompt_text == now[sample // SIZE * SIZE].prompt_text
        assert alike


def same(one: Trajectory, other: Trajectory) -> bool:
    return np.array_equal(one.actions, other.actions) and (one.prompt_text == other.prompt_text)


@pytest.mark.usefixtures("undrawn")
def test_groups_are_resampled_no_more_often_than_configured(
    compose: Compose, tmp_path: Path
) -> None:
    run_experiment(dynamic(compose, "never", 2, reward="Never"))
    (row,) = read_metrics(tmp_path / "never")
    assert row["rollout/resampled_groups"] == 2 * BATCH
    assert row["rollout/rejected_groups"] == BATCH
    assert row["reward/used_fraction"] == 0
    assert sorted(samples(tmp_path / "never")) == list(range(BATCH * SIZE))


@pytest.mark.usefixtures("undrawn")
def test_resampling_does_not_depend_on_how_the_batch_is_sharded(
    compose: Compose, tmp_path: Path
) -> None:
    run_experiment(dynamic(compose, "one", 12))
    made = dynamic(compose, "two", 12)
    made["plan"] = {"stages": {"rollout": {"processes": 2}}}
    made["cluster"] = {"launcher": "local"}
    run_experiment(made)
    one, two = samples(tmp_path / "one"), samples(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(same(record, two[sample]) for sample, record in one.items())
    assert {k: v for k, v in contents(tmp_path / "one").items() if "train" in k} == {
        k: v for k, v in contents(tmp_path / "two").items() if "train" in k
    }


def test_samples_are_numbered_by_the_batch_index_they_were_drawn_for() -> None:
    drawn = [
        Trajectory(identity=RecordId(3, number), actions=np.zeros(1), group=number // 2)
        for number in (27, 26, 4, 5)
    ]
    found = group_by_batch_index(drawn, batch_size=6, group_size=2)
    assert {place: [r.identity.sample for r in group] for place, group in found.items()} == {
        1: [2, 3],
        2: [4, 5],
    }
    assert all(r.group == place for place, group in found.items() for r in group)


def test_a_flow_without_the_usual_rollout_refuses_resampling(compose: Compose) -> None:
    made = dynamic(compose, "refused", 2)
    made["flow"] = "tests.stages.test_dynamic_sampling:own_rollout"
    with pytest.raises(ConfigError, match=r"rollout\.max_resamples: flow .* has no rollout that"):
        validate_config(validate(RunConfig, made))


@pytest.mark.parametrize(
    "algorithm", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_an_algorithm_that_keeps_every_group_is_refused(compose: Compose, algorithm: str) -> None:
    made = compose("rollout.max_resamples=2", "rollout.group_size=2")
    made["algorithm"] = {"name": algorithm}
    message = (
        rf"rollout\.max_resamples: algorithm '{algorithm}' keeps groups .*_variance_groups=true"
    )
    with pytest.raises(ConfigError, match=message):
        validate_config(validate(RunConfig, made))
    made["algorithm"] = {"name": "grpo", "filter_zero_variance_groups": True}
    validate_config(validate(RunConfig, made))


def test_the_experiment_has_all_of_dapo(compose: Compose) -> None:
    made = compose(experiment="arithmetic_dapo")
    validate_config(validate(RunConfig, made))
    assert made["algorithm"]["name"] == "dapo"
    assert made["rollout"]["max_resamples"] > 0
    assert made["reward"]["overlong_penalty_start"] < made["reward"]["overlong_penalty_end"]
    assert made["reward"]["overlong_penalty_end"] == made["rollout"]["horizon"]
