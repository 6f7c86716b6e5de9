"""PPO with chunks of actions, through all stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import read_metrics
from rlinf.artifacts import read_manifest
from rlinf.channels.record_files import RecordFileReader
from rlinf.data.record import Record

Compose = Callable[..., dict[str, Any]]
SMALL = (
    "model.chunk_size=3",
    "rollout.batch_size=4",
    "rollout.horizon=16",
    "algorithm.minibatches=2",
    "algorithm.epochs=2",
    "evaluate.samples=2",
    "evaluate.horizon=10",
    "iterations=2",
)


def rolled_out(values: dict[str, Any], iteration: int) -> tuple[list[Record], dict[str, float]]:
    """Trajectories of an iteration, and what inference measured of them."""
    place = Path(values["run"]["root"]) / values["run"]["name"] / "it" / f"{iteration:04d}"
    manifests = [read_manifest(place / stage) for stage in ("rollout", "inference")]
    assert all(manifest is not None for manifest in manifests)
    rollout, inference = manifests
    data = place / "rollout" / rollout.data  # type: ignore[union-attr]
    return list(RecordFileReader(data.glob("*.h5"))), inference.metrics  # type: ignore[union-attr]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_two_iterations_agree_about_log_probs_at_every_level(compose: Compose, level: str) -> None:
    pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
    values = compose(*SMALL, f"algorithm.logprob_level={level}", experiment="cartpole_ppo")
    run_experiment(values)
    for iteration in range(2):
        records, measured = rolled_out(values, iteration)
        assert measured["logprob_diff_max"] < 1e-5
        cut_short = 0
        for record in records:
            assert record.steps["logprobs"].shape == (16, 3, 1)
            assert (record.steps["submask"].sum((1, 2)) == record.steps["executed"]).all()
            cut_short += int((record.steps["executed"] < 3).sum())
        assert cut_short, "episodes of CartPole end within chunks"


@pytest.mark.usefixtures("undrawn")
def test_actions_with_values_of_their_own_are_learned_from(
    compose: Compose, tmp_path: Path
) -> None:
    """Through rollout, reward, inference and training; the critic alone learns at first."""
    pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
    words = ["model.value_level=action", "algorithm.logprob_level=action"]
    values = compose(*SMALL, *words, "algorithm.critic_warmup=1", experiment="cartpole_ppo")
    run_experiment(values)
    records, measured = rolled_out(values, 1)
    assert measured["logprob_diff_max"] < 1e-5
    for record in records:
        steps = record.steps
        assert steps["values"].shape == steps["action_rewards"].shape == (16, 3)
        assert (steps["values"][:, 0] != steps["values"][:, 1]).all()
        # CartPole gives 1 for each action.
        assert (steps["action_rewards"].sum(1) == steps["executed"]).all()
    warming, learning = read_metrics(tmp_path / "cartpole_ppo")
    assert warming["train/approx_kl"] == pytest.approx(0, abs=1e-9)
    assert learning["train/approx_kl"] > 1e-6
    assert warming["train/value_loss"] > 0


@pytest.mark.usefixtures("undrawn")
def test_simulators_in_processes_give_the_same_run(compose: Compose) -> None:
    pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
    found = []
    for name, processes in (("here", 0), ("apart", 2)):
        values = compose(
            *(*SMALL, f"run.name={name}", f"task.num_processes={processes}"),
            experiment="cartpole_ppo",
        )
        run_experiment(values)
        found.append(rolled_out(values, 1)[0])
    for one, other in zip(*found, strict=True):
        assert one.digest() == other.digest()
