"""Groups without a signal are drawn anew until the batch is full, or often enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.check import check
from pipeline.commands.experiment import execute
from pipeline.metrics import collect
from rlinf.channels.file import FileReader
from rlinf.config import RunConfig, Section, validate
from rlinf.data.record import Identity, Record
from rlinf.errors import ConfigError
from rlinf.rewards.base import Reward
from stages.dynamic_sampling import by_place
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
BATCH, SIZE = 6, 2


class Parity(Reward):
    """Half of the samples have it, so that half of the pairs teach nothing."""

    Config = Section
    needs_score = False

    def judge(self, trajectories: Sequence[Record], scores: Sequence[float]) -> list[float]:
        return [float(int(t.steps["actions"].sum()) % 2) for t in trajectories]


class Never(Parity):
    def judge(self, trajectories: Sequence[Record], scores: Sequence[float]) -> list[float]:
        return [0.0] * len(trajectories)


def values(compose: Compose, name: str, *words: str, reward: str = "Parity") -> dict[str, Any]:
    usual = [f"run.name={name}", f"rollout.batch={BATCH}", f"rollout.group_size={SIZE}"]
    usual += ["algorithm.drop_equal_groups=true", "iterations=1", "warm_start.max_steps=0"]
    usual += ["evaluate.every=0", "evaluate.samples=2"]
    made = compose(*usual, *words)
    return {**made, "reward": {"name": f"{__name__}:{reward}"}}


def dynamic(compose: Compose, name: str, refills: int, **more: Any) -> dict[str, Any]:
    words = ["++flow=dynamic_sampling", f"rollout.refills={refills}"]
    return values(compose, name, *words, **more)


def samples(run: Path) -> dict[int, Record]:
    found = FileReader(run.glob("it/0000/rollout/*/trajectories-r*.h5"))
    return {record.identity.sample: record for record in found}


@pytest.mark.usefixtures("undrawn")
def test_a_batch_is_filled_with_groups_that_teach(compose: Compose, tmp_path: Path) -> None:
    execute(values(compose, "plain"))
    execute(dynamic(compose, "full", 12))
    (plain,), (full,) = collect(tmp_path / "plain"), collect(tmp_path / "full")
    assert plain["reward/kept_share"] < 1
    assert full["reward/kept_share"] == 1
    assert full["rollout/refilled"] >= round((1 - plain["reward/kept_share"]) * BATCH)
    assert full["rollout/unfilled"] == 0
    assert full["train/samples"] == BATCH * SIZE
    first, now = samples(tmp_path / "plain"), samples(tmp_path / "full")
    assert sorted(first) == sorted(now) == list(range(BATCH * SIZE))
    kept = {sample // SIZE for sample in now if same(first[sample], now[sample])}
    # Groups that teach are those of a rollout without it; the others are of other prompts.
    assert len(kept) == round(plain["reward/kept_share"] * BATCH)
    for sample, record in now.items():
        assert record.info["group"] == sample // SIZE
        alike = record.info["prompt_text"] == now[sample // SIZE * SIZE].info["prompt_text"]
        assert alike


def same(one: Record, other: Record) -> bool:
    return np.array_equal(one.steps["actions"], other.steps["actions"]) and (
        one.info["prompt_text"] == other.info["prompt_text"]
    )


@pytest.mark.usefixtures("undrawn")
def test_it_draws_no_more_often_than_it_may(compose: Compose, tmp_path: Path) -> None:
    execute(dynamic(compose, "never", 2, reward="Never"))
    (row,) = collect(tmp_path / "never")
    assert row["rollout/refilled"] == 2 * BATCH
    assert row["rollout/unfilled"] == BATCH
    assert row["reward/kept_share"] == 0
    assert sorted(samples(tmp_path / "never")) == list(range(BATCH * SIZE))


@pytest.mark.usefixtures("undrawn")
def test_what_comes_does_not_depend_on_how_the_batch_is_shared_out(
    compose: Compose, tmp_path: Path
) -> None:
    execute(dynamic(compose, "one", 12))
    made = dynamic(compose, "two", 12)
    made["plan"] = {"stages": {"rollout": {"processes": 2}}}
    made["cluster"] = {"launcher": "local"}
    execute(made)
    one, two = samples(tmp_path / "one"), samples(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(same(record, two[sample]) for sample, record in one.items())
    assert {k: v for k, v in contents(tmp_path / "one").items() if "train" in k} == {
        k: v for k, v in contents(tmp_path / "two").items() if "train" in k
    }


def test_samples_are_those_of_the_place_they_were_drawn_for() -> None:
    drawn = [Record(Identity(3, number), info={"group": number // 2}) for number in (27, 26, 4, 5)]
    found = by_place(drawn, batch=6, size=2)
    assert {place: [r.identity.sample for r in group] for place, group in found.items()} == {
        1: [2, 3],
        2: [4, 5],
    }
    assert all(r.info["group"] == place for place, group in found.items() for r in group)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["++flow=dynamic_sampling"], r"rollout\.refills: flow 'dynamic_sampling' draws groups"),
        (["rollout.refills=2"], r"rollout\.refills: flow 'on_policy' draws nothing anew"),
    ],
)
def test_a_cap_is_said_where_something_is_drawn_anew(
    compose: Compose, words: list[str], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        check(validate(RunConfig, values(compose, "refused", *words)))


@pytest.mark.parametrize(
    "algorithm", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_what_keeps_every_group_is_refused(compose: Compose, algorithm: str) -> None:
    made = compose("++flow=dynamic_sampling", "rollout.refills=2", "rollout.group_size=2")
    made["algorithm"] = {"name": algorithm}
    said = rf"rollout\.refills: algorithm '{algorithm}' keeps groups .*drop_equal_groups=true"
    with pytest.raises(ConfigError, match=said):
        check(validate(RunConfig, made))
    made["algorithm"] = {"name": "grpo", "drop_equal_groups": True}
    check(validate(RunConfig, made))


def test_the_experiment_has_all_of_dapo(compose: Compose) -> None:
    made = compose(experiment="arithmetic_dapo")
    check(validate(RunConfig, made))
    assert made["algorithm"]["name"] == "dapo"
    assert made["flow"] == "dynamic_sampling"
    assert made["rollout"]["refills"] > 0
    assert made["reward"]["overlong_from"] < made["reward"]["overlong_to"]
    assert made["reward"]["overlong_to"] == made["rollout"]["horizon"]
