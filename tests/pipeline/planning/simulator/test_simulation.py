"""Disturbances cost what they must, and the same seed gives the same run."""

from __future__ import annotations

import re
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
    TimeToFinish,
)
from pipeline.planning.planner.search import solve
from pipeline.planning.simulator import Scenario, simulate
from pipeline.planning.simulator.scenario import (
    InterruptionModel,
    LengthDistribution,
    QueueWaitModel,
    StragglerModel,
    Walltime,
)
from pipeline.planning.simulator.simulate_command import load_problem
from pipeline.planning.simulator.simulation import completion_s, relative_lengths
from pipeline.planning.simulator.studies import SCENARIOS, STUDIES
from rlinf.config import validate
from rlinf.errors import ConfigError, PlanError
from tests.pipeline.planning.planner.problems import random_placement, random_problem


def two_pools(chunks: int = 4, **changes: object) -> tuple[PlacementProblem, Placement]:
    """Rollout of 8 s on four GPUs of ``a``, then train of 4 s on two of ``b``."""
    problem = PlacementProblem(
        [
            PlacementStage("rollout", {"a": np.arange(5) / 32}),
            PlacementStage("train", {"b": np.arange(3) / 8}, ("rollout",)),
        ],
        [GpuKind("a", 4, wait_s=100), GpuKind("b", 2, wait_s=40)],
        sync_s={("b", "a"): 1.0},
        **changes,  # type: ignore[arg-type]
    )
    return problem, Placement(((0,), (1,)), ((4, 0), (0, 2)), chunks)


EXACT_WAITS = QueueWaitModel(spread="none")


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


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_the_same_seed_gives_the_same_run(scenario: str) -> None:
    study = STUDIES["7b-64"]
    placement = solve(study.problem)[0].placement
    runs = [
        simulate(study.problem, placement, study.scenario(scenario), 30, seed) for seed in (5, 5, 6)
    ]
    assert runs[0].iteration_starts == runs[1].iteration_starts
    assert runs[0].spans == runs[1].spans
    if scenario in ("tails", "all"):
        assert runs[0].iteration_starts != runs[2].iteration_starts


def test_the_first_iteration_waits_for_the_slowest_job() -> None:
    trace = simulate(*two_pools(), Scenario(queue=EXACT_WAITS, startup_s=5), 1)
    assert trace.iteration_starts == pytest.approx([105, 115])


@pytest.mark.parametrize("redo", ["micro-batch", "iteration"])
def test_an_interruption_costs_the_wait_and_the_lost_work(redo: str) -> None:
    losses = InterruptionModel.model_validate({"per_hour": {"a": 40, "b": 0}, "redo": redo})
    trace = simulate(*two_pools(), Scenario(queue=EXACT_WAITS, losses=losses), 200)
    assert trace.interruptions > 5
    # Waits of 100 s each, of which at most 2 s are hidden while the pool is idle.
    lost_s = trace.total_s - 100 - 2000 - 98 * trace.interruptions
    most = 2 if redo == "micro-batch" else 10
    assert 0 < lost_s <= trace.interruptions * (2 + most)
    assert trace.down_s == pytest.approx([100 * trace.interruptions, 0])
    # Repeated work is not counted as work.
    assert trace.busy_s[0] == pytest.approx(200 * 8.0)


def test_the_expected_time_with_interruptions_is_that_of_the_planner() -> None:
    problem, placement = two_pools()
    kinds = [replace(kind, interruptions_per_hour=2.0) for kind in problem.kinds]
    problem = replace(problem, kinds=kinds)
    scenario = Scenario(queue=EXACT_WAITS, losses=InterruptionModel(redo="iteration"))
    total = np.mean([simulate(problem, placement, scenario, 1000, s).total_s for s in range(8)])
    gpus = [np.array(pool)[:, None] for pool in placement.gpus]
    expected = TimeToFinish(1000).cost(problem, np.array([10.0]), gpus)[0]
    assert total == pytest.approx(expected, rel=0.05)


def test_a_slow_gpu_holds_up_training_but_only_its_share_of_the_rollout() -> None:
    problem, placement = two_pools(chunks=1)
    always = StragglerModel(per_gpu_hour=1000, factor=2.0, mean_s=1e5)
    trace = simulate(problem, placement, Scenario(stragglers=always), 5)
    assert trace.iteration_s == pytest.approx(2 * 12 + 1, rel=1e-3)
    rare = StragglerModel(per_gpu_hour=1.0, factor=2.0, mean_s=600)
    balanced, lockstep = (
        simulate(
            problem,
            placement,
            Scenario(stragglers=rare.model_copy(update={"balanced": names})),
            500,
        ).mean_s
        for names in (frozenset({"rollout", "train"}), frozenset())
    )
    assert 13 < balanced < lockstep


def test_jobs_that_reach_their_time_limit_are_replaced() -> None:
    late, early = (
        simulate(*two_pools(), Scenario(queue=EXACT_WAITS, walltime=walltime), 60)
        for walltime in (Walltime(limit_s=300), Walltime(limit_s=300, lead_s=110))
    )
    assert late.renewals >= 2
    assert late.total_s > 100 + 600 + 100
    assert early.total_s == pytest.approx(100 + 600)
    with pytest.raises(PlanError, match="jobs end before startup_s"):
        simulate(*two_pools(), Scenario(startup_s=5, walltime=Walltime(limit_s=1)), 1)
    with pytest.raises(ConfigError, match="lead_s must be below limit_s"):
        validate(Scenario, {"walltime": {"limit_s": 10, "lead_s": 10}})


def test_interruptions_without_end_are_an_error() -> None:
    losses = InterruptionModel(per_hour={"a": 1e7}, redo="iteration")
    with pytest.raises(PlanError, match=r"losses\.per_hour"):
        simulate(*two_pools(), Scenario(losses=losses), 1)


def test_workers_end_with_their_longest_samples() -> None:
    """With two slots, samples of 1, 1 and 2 steps end after 1, 1 and 3; steps cost 1 + running."""
    lengths = np.array([[1.0, 1.0, 2.0]])
    assert completion_s(lengths, 2, 1.0, 1.0) == pytest.approx([1 * 3 + 2 * 2])
    assert completion_s(lengths, 3, 1.0, 0.0) == pytest.approx([2.0])


@pytest.mark.parametrize("more", [{}, {"sigma": 0.0}, {"empirical": (1.0, 2.0, 9.0)}])
def test_relative_lengths_have_mean_one(more: dict[str, object]) -> None:
    lengths = LengthDistribution.model_validate({"samples": 8, "longest": 4.0, **more})
    drawn = relative_lengths(lengths, 100_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(1, rel=0.02)
    assert drawn.max() <= 4.0


def test_unequal_lengths_take_longer_unless_the_profile_has_them() -> None:
    problem, placement = two_pools()
    lengths = LengthDistribution(samples=64, slots=4)
    profiled = simulate(problem, placement, Scenario(lengths=lengths), 50)
    equal = lengths.model_copy(update={"profiled": False})
    longer = simulate(problem, placement, Scenario(lengths=equal), 50)
    assert profiled.mean_s == pytest.approx(10, rel=0.05)
    assert longer.mean_s > 1.1 * profiled.mean_s
    assert profiled.iteration_s.std() > 0
    with pytest.raises(PlanError, match=r"gpus_per_worker.*the pool 4"):
        wide = lengths.model_copy(update={"gpus_per_worker": 8})
        simulate(problem, placement, Scenario(lengths=wide), 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lengths": {"stage": "rolout", "samples": 1}}, "lengths.stage: no stage 'rolout'"),
        ({"losses": {"per_hour": {"c": 1}}}, "losses.per_hour: no kind 'c'"),
        ({"stragglers": {"per_gpu_hour": 1, "balanced": ["x"]}}, "no stage 'x'"),
    ],
)
def test_unknown_names_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        simulate(*two_pools(), Scenario.model_validate(values), 1)


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


def test_a_study_and_a_problem_file_are_simulated_by_the_command(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="did you mean '7b-64'"):
        load_problem("7b-46", None)
    chart = tmp_path / "gantt.png"
    words = ["7b-64", "--scenario", "all", "--png", str(chart)]
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code == 0, result.output
    assert "iteration, simulated" in result.output
    assert "without a job" in result.output
    assert chart.read_bytes().startswith(b"\x89PNG")
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
    scenario.write_text("capacity: 2\n")
    result = CliRunner().invoke(app, ["simulate", str(problem), "--iterations", "2"])
    assert "25.0 s" in result.output
    result = CliRunner().invoke(app, ["simulate", str(problem), "--scenario", str(scenario)])
    assert "capacity" in str(result.exception)
