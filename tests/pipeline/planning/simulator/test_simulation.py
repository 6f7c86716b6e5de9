"""Disturbances cost what they must, and the same seed gives the same run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pipeline.commands.cli import app
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import (
    GpuKind,
    Placement,
    PlacementProblem,
    PlacementStage,
)
from pipeline.planning.simulator import Scenario, simulate
from pipeline.planning.simulator.scenario import LengthDistribution, StragglerModel
from pipeline.planning.simulator.simulation import completion_s, relative_lengths
from rlinf.errors import PlanError
from tests.pipeline.planning.planner.problems import random_placement, random_problem


def two_pools(chunks: int = 4, **changes: object) -> tuple[PlacementProblem, Placement]:
    """Rollout of 8 s on four GPUs of ``a``, then train of 4 s on two of ``b``."""
    problem = PlacementProblem(
        [
            PlacementStage("rollout", {"a": np.arange(5) / 32}),
            PlacementStage("train", {"b": np.arange(3) / 8}, ("rollout",)),
        ],
        [
            GpuKind("a", 4, waits_s=((1, 100),), interruptions_per_hour=40),
            GpuKind("b", 2, waits_s=((1, 40),)),
        ],
        sync_s={("b", "a"): 1.0},
        **changes,  # type: ignore[arg-type]
    )
    return problem, Placement(((0,), (1,)), ((4, 0), (0, 2)), chunks)


ALL = Scenario(
    startup_s=5,
    lengths=LengthDistribution(samples=64),
    stragglers=StragglerModel(per_gpu_hour=5),
    queue=True,
    losses=True,
    walltime_s=3600,
)


def test_without_disturbances_iterations_take_the_predicted_time() -> None:
    trace = simulate(*two_pools(), iterations=3)
    assert trace.iteration_s == pytest.approx([8 + 4 / 4 + 1] * 3)
    assert trace.idle_shares == pytest.approx([0.2, 0.6])
    assert trace.gpu_hours == pytest.approx(6 * 30 / 3600)
    for seed in range(40):
        problem = random_problem(seed, (12, 8), 1 + seed % 5)
        placement = random_placement(problem, seed)
        predicted = float(Predictor(problem).predict(placement).total_s)
        if np.isfinite(predicted):
            assert simulate(problem, placement, iterations=2).mean_s == pytest.approx(predicted)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [simulate(*two_pools(), ALL, 30, seed) for seed in (5, 5, 6)]
    assert runs[0].iteration_starts == runs[1].iteration_starts
    assert runs[0].iteration_starts != runs[2].iteration_starts


def test_the_first_iteration_waits_for_the_slowest_job() -> None:
    """Waits of 100 and 40 s on average: the later of two exponential times is 111 s."""
    starts = [
        simulate(*two_pools(), Scenario(queue=True, startup_s=5), 1, seed).iteration_starts[0]
        for seed in range(1000)
    ]
    assert np.mean(starts) == pytest.approx(5 + 140 - 1 / (1 / 100 + 1 / 40), rel=0.1)


def test_an_interruption_costs_the_wait_and_the_lost_work() -> None:
    trace = simulate(*two_pools(), Scenario(queue=True, losses=True), 400)
    assert trace.interruptions > 5
    # At most 2 s of a wait are hidden while the pool is idle, and at most one chunk is repeated.
    waited_s = trace.down_s[0]
    lost_s = trace.iteration_s.sum() - 400 * 10 - waited_s
    assert abs(lost_s) <= 2 * trace.interruptions
    assert waited_s / trace.interruptions == pytest.approx(100, rel=0.5)
    assert trace.down_s[1] == 0
    # Repeated work is not counted as work.
    assert trace.busy_s[0] == pytest.approx(400 * 8.0)


def test_a_slow_gpu_holds_up_training_but_only_its_share_of_the_rollout() -> None:
    problem, placement = two_pools(chunks=1)
    always = StragglerModel(per_gpu_hour=1000, factor=2.0, mean_s=1e5)
    trace = simulate(problem, placement, Scenario(stragglers=always), 5)
    assert trace.iteration_s == pytest.approx(2 * 12 + 1, rel=1e-3)
    rare = Scenario(stragglers=StragglerModel(per_gpu_hour=2.0, factor=2.0, mean_s=600))
    rollout, train = simulate(problem, placement, rare, 500).busy_s / 500
    # One of four GPUs slows the rollout by less than a quarter, one of two all of the training.
    assert 1 < rollout / 8 < train / 4 < 2


def test_jobs_that_reach_their_time_limit_are_replaced() -> None:
    trace = simulate(*two_pools(), Scenario(queue=True, walltime_s=300), 60)
    assert trace.renewals >= 2
    assert trace.iteration_s.sum() > 600
    with pytest.raises(PlanError, match="jobs end before startup_s"):
        simulate(*two_pools(), Scenario(startup_s=5, walltime_s=1), 1)


def test_interruptions_without_end_are_an_error() -> None:
    problem, placement = two_pools()
    kinds = [replace(kind, interruptions_per_hour=1e7) for kind in problem.kinds]
    with pytest.raises(PlanError, match="interruptions_per_hour"):
        simulate(replace(problem, kinds=kinds), placement, Scenario(losses=True), 1)


def test_workers_end_with_their_longest_samples() -> None:
    """With two slots, samples of 1, 1 and 2 steps end after 1, 1 and 3; steps cost 1 + running."""
    lengths = np.array([[1.0, 1.0, 2.0]])
    assert completion_s(lengths, 2, 1.0, 1.0) == pytest.approx([1 * 3 + 2 * 2])
    assert completion_s(lengths, 3, 1.0, 0.0) == pytest.approx([2.0])


@pytest.mark.parametrize("more", [{}, {"sigma": 0.0}])
def test_relative_lengths_have_mean_one(more: dict[str, object]) -> None:
    lengths = LengthDistribution.model_validate({"samples": 8, "longest": 4.0, **more})
    drawn = relative_lengths(lengths, 100_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(1, rel=0.02)
    assert drawn.max() <= 4.0


def test_unequal_lengths_change_iterations_but_not_their_mean() -> None:
    lengths = LengthDistribution(samples=64)
    trace = simulate(*two_pools(), Scenario(lengths=lengths), 50)
    assert trace.mean_s == pytest.approx(10, rel=0.05)
    assert trace.iteration_s.std() > 0
    wrong = lengths.model_copy(update={"stage": "rolout"})
    with pytest.raises(PlanError, match=r"lengths.stage: no stage 'rolout'.*'rollout'"):
        simulate(*two_pools(), Scenario(lengths=wrong), 1)


def test_a_placement_must_fit_the_problem() -> None:
    problem, placement = two_pools()
    for changed, message in (
        (replace(placement, pools=((0,), (0,))), "every stage must be in one pool"),
        (replace(placement, num_chunks=0), "chunks must be at least 1"),
        (replace(placement, gpus=((5, 0), (0, 2))), "5 a are requested, of 4"),
        (replace(placement, gpus=((4, 0), (0, 0))), "cannot run"),
    ):
        with pytest.raises(PlanError, match=message):
            simulate(problem, changed)


def test_a_problem_file_is_simulated_by_the_command(tmp_path: Path) -> None:
    problem = tmp_path / "problem.yaml"
    problem.write_text(
        "kinds: {h100: {gpus: 4}}\n"
        "stages:\n"
        "  rollout: {seconds: {h100: {1: 40, 2: 20}}}\n"
        "  train: {seconds: {h100: {1: 20, 2: 10}}, after: [rollout]}\n"
        "pools: [{stages: [rollout], devices: {h100: 2}}, {stages: [train], devices: {h100: 2}}]\n"
        "num_chunks: 2\n"
    )
    scenario = tmp_path / "scenario.yaml"
    result = CliRunner().invoke(app, ["simulate", str(problem), "--iterations", "2"])
    assert "25.0 s" in result.output
    words = ["simulate", str(problem), "--scenario", str(scenario)]
    for text, message in (
        ("capacity: 2", "scenario.capacity: unknown key"),
        (
            "walltime: {limit_s: 9}",
            "unknown key; it was removed: give walltime_s",
        ),
    ):
        scenario.write_text(text)
        result = CliRunner().invoke(app, words)
        assert message in str(result.exception)
    scenario.write_text("{stragglers: {per_gpu_hour: 1}, queue: true, losses: true, startup_s: 3}")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "iteration, simulated" in result.output
    assert "without a job" in result.output
