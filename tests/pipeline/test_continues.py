"""Runs whose episodes go on over iterations: the same bytes however they are driven or cut off."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.experiment import drive, run_experiment
from pipeline.run import Run
from pipeline.validate_config import validate_config
from rlinf.artifacts import is_pruned
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import RunConfig, validate
from rlinf.data.episodes import OPEN_EPISODES
from rlinf.data.record import Record
from rlinf.errors import ConfigError
from rlinf.hydra_config import force_add
from tests.pipeline.helpers import contents, killed_until_it_ends, output, run_here

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
ITERATIONS, BATCH, HORIZON = 4, 4, 8
SMALL = [
    *("task.carry_over_episodes=true", f"iterations={ITERATIONS}", f"rollout.batch_size={BATCH}"),
    *(f"rollout.horizon={HORIZON}", "algorithm.minibatches=2", "algorithm.epochs=1"),
    *("evaluate.every=0", "evaluate.samples=1", "evaluate.horizon=4"),
    *("checkpoint.keep_trajectories=1", "optimizer.lr_decay_iterations=4"),
]
APART = {
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
    ],
}
RANKS = {
    "num_chunks": 2,
    "stages": {stage: {"processes": 2} for stage in ("rollout", "inference", "train")},
    "pools": [{"stages": ["rollout", "reward", "inference", "train"], "devices": {"local": 2}}],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, left alone, in one process."""
    root = tmp_path_factory.mktemp("continues")
    words = [*SMALL, "run.name=reference", f"run.root={root}", "log.trackers=[]"]
    run_here(["experiment=cartpole_ppo", *words])
    return root / "reference"


def rollout(run: Path, iteration: int) -> tuple[list[Record], dict[int, Record]]:
    """Its trajectories, and what they left open."""
    _, data = output(run, "it", f"{iteration:04d}", "rollout")
    found = [
        list(RecordFileReader(data.glob(f"{name}-r*.h5")))
        for name in ("trajectories", OPEN_EPISODES)
    ]
    return found[0], {record.identity.sample: record for record in found[1]}


def made(run: Path, iterations: int) -> dict[str, str]:
    """Digests of what its iterations made."""
    found = {name: digest for name, digest in contents(run).items() if name.startswith("it/")}
    assert len(found) == 5 * iterations
    return found


def test_episodes_are_longer_than_samples_and_what_is_needed_is_kept(reference: Path) -> None:
    there = [not is_pruned(reference / f"it/{n:04d}/rollout") for n in range(ITERATIONS)]
    assert there == [True, False, True, True]
    (before, left), (after, _) = (rollout(reference, n) for n in (2, 3))
    assert 0 < len(left) < BATCH + 1
    for one, other in zip(before, after, strict=True):
        ended = one.steps["terminated"][-1] | one.steps["truncated"][-1]
        assert ended == (one.identity.sample not in left)
        assert not any(name.startswith(OPEN_EPISODES) for name in one.context), "it is kept apart"
        if not ended:
            seen = one.context["cut_observations"][-1]
            assert other.steps["observations"][0].tolist() == seen.tolist()
    longest = max(r.info["episode_length"] for n in (0, 2, 3) for r in rollout(reference, n)[0])
    assert longest > HORIZON


@pytest.mark.parametrize(("plan", "iterations"), [(None, 2), (APART, ITERATIONS)])
def test_processes_and_pools_give_the_same_bytes(
    reference: Path,
    compose: Compose,
    tmp_path: Path,
    plan: dict[str, Any] | None,
    iterations: int,
) -> None:
    words = [*SMALL, "run.name=other", f"iterations={iterations}"]
    values = compose(*words, experiment="cartpole_ppo")
    run_experiment(values | {"plan": plan, "cluster": {"launcher": "local"}})
    assert made(tmp_path / "other", iterations).items() <= contents(reference).items()


def test_processes_that_share_the_batch_go_on_with_the_same_episodes(
    reference: Path, compose: Compose, tmp_path: Path
) -> None:
    values = compose(*SMALL, "run.name=ranks", experiment="cartpole_ppo")
    run_experiment(values | {"plan": RANKS, "cluster": {"launcher": "local"}})
    for one, other in zip(rollout(reference, 3)[0], rollout(tmp_path / "ranks", 3)[0], strict=True):
        assert one.info["episode_length"] == other.info["episode_length"]
        torch.testing.assert_close(*(torch.tensor(r.steps["observations"]) for r in (one, other)))


def test_a_run_that_is_ended_and_begun_again_gives_the_same_bytes(
    reference: Path, compose: Compose, tmp_path: Path
) -> None:
    for iterations in (1, 3, ITERATIONS):
        words = [*SMALL, "run.name=cut", f"iterations={iterations}"]
        run_experiment(compose(*words, experiment="cartpole_ppo"))
    assert made(tmp_path / "cut", ITERATIONS) == made(reference, ITERATIONS)


def test_a_damaged_rollout_is_made_again_from_the_one_before(
    reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "reference"
    shutil.copytree(reference, run)
    for later in ("reward", "inference", "train", "sync"):
        shutil.rmtree(run / f"it/0003/{later}")
    shutil.rmtree(run / "evaluate/0004")
    _, data = output(run, "it", "0003", "rollout")
    (file,) = data.glob(f"{OPEN_EPISODES}-r*.h5")
    file.write_bytes(file.read_bytes()[:-7])
    drive(Run.open(run))
    assert contents(run) == contents(reference)


def test_stale_rollouts_go_on_with_the_episodes_of_the_last(
    compose: Compose, tmp_path: Path
) -> None:
    """In pools, where they run ahead, as stage by stage."""
    words = [*SMALL, "algorithm=async_ppo", "iterations=3"]
    run_experiment(compose(*words, "run.name=alone", experiment="cartpole_ppo"))
    pools = compose(*words, "run.name=pools", experiment="cartpole_ppo")
    run_experiment(pools | {"plan": APART, "cluster": {"launcher": "local"}})
    assert contents(tmp_path / "alone") == contents(tmp_path / "pools")


@pytest.mark.parametrize("where", [{}, {"plan": APART, "cluster": {"launcher": "local"}}])
def test_episodes_go_on_while_newer_weights_come_in(
    compose: Compose, tmp_path: Path, where: dict[str, Any]
) -> None:
    """Which weights chose a step depends on timing; what the next rollout takes is on disk."""
    words = [*SMALL, "algorithm=async_ppo", "rollout.in_flight_updates=true", "run.name=flight"]
    run_experiment(
        compose(*words, "checkpoint.keep_trajectories=9", experiment="cartpole_ppo") | where
    )
    went_on = 0
    for n in range(1, ITERATIONS):
        (before, left), (after, _) = (rollout(tmp_path / "flight", i) for i in (n - 1, n))
        for one, other in zip(before, after, strict=True):
            versions = other.steps["versions"].tolist()
            assert versions == sorted(versions)
            assert {n - 1, n} >= set(versions), "no older than staleness allows"
            if one.identity.sample in left:
                seen = one.context["cut_observations"][-1]
                assert other.steps["observations"][0].tolist() == seen.tolist()
                went_on += 1
    assert went_on


def test_transitions_of_episodes_that_go_on_are_replayed(compose: Compose, tmp_path: Path) -> None:
    words = [
        "task.carry_over_episodes=true",
        "iterations=3",
        "rollout.batch_size=2",
        "rollout.horizon=8",
    ]
    words += ["evaluate.every=0", "evaluate.samples=1", "evaluate.horizon=4", "run.name=sac"]
    run_experiment(compose(*words, experiment="pendulum_sac"))
    _, left = rollout(tmp_path / "sac", 2)
    assert {record.context["open_measured"][1] for record in left.values()} == {24}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killing_the_driver_anywhere_changes_nothing(reference: Path, tmp_path: Path) -> None:
    words = ["experiment=cartpole_ppo", "log.trackers=[]", "run.name=killed"]
    words += [f"run.root={tmp_path}", *map(force_add, SMALL)]
    chance = random.Random(0)
    killed_until_it_ends(
        words, tmp_path / "log", chance, seconds=(3.0, 5.0), attempts=14, last_s=120
    )
    assert contents(tmp_path / "killed") == contents(reference)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rollout.group_size=2"],
            r"task\.carry_over_episodes: the samples of a group .*group_size=1",
        ),
        (
            ["rollout.max_resamples=1"],
            r"task\.carry_over_episodes: .* leave rollout\.max_resamples out",
        ),
        (["task.simulator=genesis"], r"task\.carry_over_episodes: this simulator cannot save"),
        (["task.carry_over_episodes=1"], r"task\.carry_over_episodes: .*boolean"),
    ],
)
def test_episodes_that_cannot_continue_are_refused(
    compose: Compose, words: list[str], message: str
) -> None:
    values = compose(*SMALL, *words, experiment="cartpole_ppo")
    with pytest.raises(ConfigError, match=message):
        validate_config(validate(RunConfig, values))
