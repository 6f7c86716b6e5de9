"""What goes wrong costs what it must, and the same seed gives the same run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pipeline.commands.cli import app
from pipeline.planning.planner.problem import GpuKind, Placement, PlacementProblem, PlacementStage
from pipeline.planning.planner.search import solve
from pipeline.planning.simulator import Scenario, simulate
from pipeline.planning.simulator.scenario import (
    DecodingReplica,
    InterruptionModel,
    LengthDistribution,
    NetworkModel,
    QueueWaitModel,
    StragglerModel,
    Walltime,
)
from pipeline.planning.simulator.simulate_command import load_problem
from pipeline.planning.simulator.simulated_pool import completion_times, relative_lengths
from pipeline.planning.simulator.simulation import fair_rates
from pipeline.planning.simulator.studies import SCENARIOS, STUDIES
from rlinf.config import validate
from rlinf.errors import ConfigError, PlanError


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


def test_a_pipeline_takes_the_slower_stage_the_last_piece_and_the_weights() -> None:
    trace = simulate(*two_pools(), iterations=3)
    assert trace.iteration_s == pytest.approx([8 + 4 / 4 + 1] * 3)
    assert trace.idle_share(0) == pytest.approx(0.2)
    assert trace.idle_share(1) == pytest.approx(0.6)
    assert trace.longest_waits(1)[0][0] == "rollout"
    assert dict(trace.longest_waits(0)) == pytest.approx({"train": 0.1, "weights": 0.1})
    assert trace.gpu_hours == pytest.approx(6 * 30 / 3600)


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


def test_jobs_wait_in_the_queue_and_the_slowest_is_waited_for() -> None:
    trace = simulate(*two_pools(), Scenario(queue=QueueWaitModel(spread="none"), startup_s=5), 1)
    assert trace.iteration_starts == pytest.approx([105, 115])


def test_a_loss_costs_the_micro_batch_or_the_iteration_and_the_wait() -> None:
    problem, placement = two_pools()
    for redo in ("micro-batch", "iteration"):
        losses = InterruptionModel(per_hour={"a": 40, "b": 0}, redo=redo)
        queue = QueueWaitModel(spread="none")
        trace = simulate(problem, placement, Scenario(queue=queue, losses=losses), 200)
        hurt = [loss for loss in trace.interruptions if loss.while_working]
        assert len(hurt) > 5
        assert trace.repeated_iterations == (len(hurt) if redo == "iteration" else 0)
        # Waits of 100 s each; a loss while idle is partly hidden.
        assert trace.total_s > 100 + 2000 + 100 * len(hurt)
        lost = sum(s.end - s.start for s in trace.spans if s.activity == "redone")
        assert 0 < lost <= len(hurt) * (2 if redo == "micro-batch" else 2 * 10)
        # What was lost is not counted as work.
        assert trace.gpu_busy[0] == pytest.approx(np.full(4, 200 * 8.0))


def test_the_expected_time_with_losses_is_what_the_planner_says() -> None:
    from pipeline.planning.planner.problem import TimeToFinish

    problem, placement = two_pools()
    kinds = [replace(kind, interruptions_per_hour=2.0) for kind in problem.kinds]
    problem = replace(problem, kinds=kinds)
    scenario = Scenario(
        queue=QueueWaitModel(spread="none"), losses=InterruptionModel(redo="iteration")
    )
    total = np.mean([simulate(problem, placement, scenario, 1000, s).total_s for s in range(8)])
    gpus = [np.array(pool)[:, None] for pool in placement.gpus]
    expected = TimeToFinish(1000).cost(problem, np.array([10.0]), gpus)[0]
    assert total == pytest.approx(expected, rel=0.05)


def test_a_slow_gpu_holds_up_training_but_only_its_share_of_rollout() -> None:
    always = StragglerModel(per_gpu_hour=1e6, factor=2.0, mean_s=1e9)
    problem, placement = two_pools(chunks=1)
    trace = simulate(problem, placement, Scenario(stragglers=always), 5)
    # All GPUs are slow nearly at once.
    assert trace.iteration_s[1:] == pytest.approx(2 * 12 + 1, rel=1e-3)
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


def test_leases_end_and_jobs_follow_each_other() -> None:
    problem, placement = two_pools()
    queue = QueueWaitModel(spread="none")
    late = simulate(problem, placement, Scenario(queue=queue, walltime=Walltime(limit_s=300)), 60)
    early = simulate(
        problem, placement, Scenario(queue=queue, walltime=Walltime(limit_s=300, lead_s=110)), 60
    )
    assert late.renewals > 0
    assert early.total_s < late.total_s
    assert all(hold.end - hold.start <= 300 + 1e-6 for hold in late.allocations + early.allocations)
    with pytest.raises(PlanError, match="more than a job of 1 s"):
        simulate(problem, placement, Scenario(walltime=Walltime(limit_s=1)), 1)
    with pytest.raises(ConfigError, match="lead_s must be below limit_s"):
        validate(Scenario, {"walltime": {"limit_s": 10, "lead_s": 10}})


def test_channels_hold_back_the_sender_and_may_be_too_small() -> None:
    problem, placement = two_pools(chunks=8)
    slow = replace(
        problem,
        stages=[problem.stages[0], replace(problem.stages[1], rates={"b": np.arange(3) / 64})],
    )
    trace = simulate(slow, placement, Scenario(capacity=1), 2)
    assert trace.mean_s == pytest.approx(8 / 8 + 32 + 1)
    assert "room in train" in dict(trace.longest_waits(0))
    rates = {"a": np.arange(5) / 32}
    loop = PlacementProblem(
        [
            PlacementStage("rollout", rates),
            PlacementStage("reward", {"b": np.arange(3) / 8}, ("rollout",)),
            PlacementStage("train", rates, ("reward",)),
        ],
        problem.kinds,
        sync=None,
    )
    stuck = Placement(((0, 2), (1,)), ((4, 0), (0, 2)), 8)
    with pytest.raises(PlanError, match="wait for each other for ever"):
        simulate(loop, stuck, Scenario(capacity=2), 1)
    assert simulate(loop, stuck, Scenario(capacity=8), 1).mean_s == pytest.approx(8 + 8)


def test_transfers_share_the_network_fairly() -> None:
    links = [frozenset({"x", "fabric"}), frozenset({"y", "fabric"}), frozenset({"y"})]
    assert fair_rates(links, {"x": 1.0, "y": 10.0, "fabric": 4.0}) == pytest.approx([1, 3, 7])
    problem, placement = two_pools()
    network = NetworkModel(
        latency_s=0,
        gpu_bytes_per_s={"a": 10, "b": 5},
        payload={"rollout": {"train": 80}},
        weights_bytes=40,
    )
    trace = simulate(problem, placement, Scenario(network=network), 2)
    # The last quarter of 80 bytes into two GPUs of 5 B/s; 40 bytes out of them.
    assert trace.mean_s == pytest.approx(8 + 2 + 1 + 4)


def test_continuous_batching_by_hand() -> None:
    """Two slots, lengths 3, 1, 2: one ends after 1 step, both others after 3."""
    times = completion_times(np.array([[3.0, 1.0, 2.0]]), 2, fixed=1.0, per_sample=1.0)
    assert times == pytest.approx(np.array([[3.0, 9.0, 9.0]]))


def test_lengths_have_mean_one_and_a_profiled_stage_keeps_its_mean_time() -> None:
    lengths = LengthDistribution(samples=64, sigma=1.0, replicas={"a": DecodingReplica(slots=8)})
    drawn = relative_lengths(lengths, 200_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(1, rel=0.01)
    assert drawn.max() <= lengths.longest
    problem, placement = two_pools(chunks=1)
    profiled = simulate(problem, placement, Scenario(lengths=lengths), 200)
    assert profiled.mean_s == pytest.approx(13, rel=0.05)
    raw = lengths.model_copy(update={"profiled": False})
    assert simulate(problem, placement, Scenario(lengths=raw), 200).mean_s > 14


def test_what_does_not_fit_is_refused() -> None:
    problem, placement = two_pools()
    for wrong, message in (
        (replace(placement, pools=((0,), (0,))), "every stage must be in a pool"),
        (replace(placement, gpus=((5, 0), (0, 2))), "5 a are requested, of 4"),
        (replace(placement, gpus=((0, 2), (4, 0))), "'rollout': cannot run on 2 b"),
    ):
        with pytest.raises(PlanError, match=message):
            simulate(problem, wrong)
    with pytest.raises(PlanError, match="no stage 'rolout'; did you mean 'rollout'"):
        simulate(
            problem, placement, Scenario(lengths=LengthDistribution(stage="rolout", samples=1))
        )


PROBLEM = """
kinds: {a: {gpus: 4}, b: {gpus: 2}}
stages:
  rollout: {seconds: {a: {1: 32, 4: 8}}}
  train: {seconds: {b: {2: 4}}, after: [rollout]}
pools: [{stages: [rollout], devices: {a: 4}}, {stages: [train], devices: {b: 2}}]
num_chunks: 4
"""


def test_the_command_simulates_a_file_and_draws(tmp_path: Path) -> None:
    file, png, page = tmp_path / "problem.yaml", tmp_path / "g.png", tmp_path / "g.html"
    file.write_text(PROBLEM)
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("capacity: 2\n")
    arguments = ["simulate", str(file), "--scenario", str(scenario), "--iterations", "3"]
    arguments += ["--seed", "7"]
    result = CliRunner().invoke(app, [*arguments, "--png", str(png), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "iteration: 9.0 s (q10 9.0, q90 9.0); predicted 9.0" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<svg" in text
    assert f"Scenario: {scenario}" in text
    assert "<pre>capacity: 2\n</pre>" in text
    tiles = {label: value for value, label in re.findall(r"<b>(.*?)</b><span>(.*?)</span>", text)}
    assert tiles["iteration, simulated"] == "9.0 s"
    assert tiles["iteration, predicted"] == "9.0 s (+0.0%)"
    assert tiles["seed"] == "7"
    assert "cost of 3 iterations" in tiles
    scenario.write_text("capacitty: 2\n")
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "did you mean 'capacity'" in str(result.exception)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{a: {1: 32, 4: 8}}", "{c: {1: 32}}"), "no kind 'c'"),
        (("{2: 4}", "{3: 4}"), "3 GPUs, but there are 2"),
        (("stages: [train]", "stages: [trian]"), "no stage 'trian'; did you mean 'train'"),
        (("num_chunks", "num_chunk"), "unknown key"),
    ],
)
def test_a_wrong_problem_file_is_refused(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    file = tmp_path / "problem.yaml"
    file.write_text(PROBLEM.replace(*change))
    result = CliRunner().invoke(app, ["simulate", str(file)])
    assert isinstance(result.exception, PlanError)
    assert message in str(result.exception)


NET = {"gpu_bytes_per_s": {"a": 1e9, "b": 1e9}}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"lengths": {"samples": 9, "sigma": 50}}, "lengths.sigma"),
        ({"lengths": {"samples": 9, "longest": float("inf")}}, "lengths.longest"),
        ({"lengths": {"samples": 9, "empirical": [0, 0]}}, "lengths.empirical"),
        ({"lengths": {"samples": 9, "empirical": [-1, 3]}}, "lengths.empirical"),
        ({"losses": {"per_hour": {"a": -1}}}, "losses.per_hour.a"),
        ({"network": {"gpu_bytes_per_s": {"a": 0, "b": 1e9}}}, "network.gpu_bytes_per_s.a"),
        ({"network": NET | {"payload": {"rollout": {"train": -1}}}}, "network.payload.rollout"),
    ],
)
def test_numbers_that_cannot_be_are_refused(values: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        validate(Scenario, values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lengths": {"samples": 9, "replicas": {"c": {}}}}, "lengths.replicas: no kind 'c'"),
        ({"losses": {"per_hour": {"aa": 1}}}, "losses.per_hour: no kind 'aa'"),
        (
            {"stragglers": {"per_gpu_hour": 1, "balanced": ["rollouts"]}},
            "stragglers.balanced: no stage 'rollouts'; did you mean 'rollout'",
        ),
        (
            {"network": {"gpu_bytes_per_s": {"a": 1e9, "b": 1e9, "c": 1e9}}},
            "network.gpu_bytes_per_s: no kind 'c'",
        ),
        ({"network": NET | {"payload": {"rollou": {}}}}, "network.payload: no stage 'rollou'"),
        (
            {"network": NET | {"payload": {"rollout": {"trian": 1}}}},
            "network.payload.rollout: no stage 'trian'; did you mean 'train'",
        ),
    ],
)
def test_a_scenario_of_other_stages_or_kinds_is_refused(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        simulate(*two_pools(), validate(Scenario, values), iterations=1)


@pytest.mark.parametrize("redo", ["micro-batch", "iteration"])
def test_losses_that_leave_no_time_to_work_are_refused(redo: str) -> None:
    endless = validate(Scenario, {"losses": {"per_hour": {"a": 1e5}, "redo": redo}})
    with pytest.raises(PlanError, match=r"losses: .* would never end; lower losses\.per_hour"):
        simulate(*two_pools(), endless, iterations=1)


def test_gpus_that_become_slow_all_the_time_are_refused() -> None:
    with pytest.raises(PlanError, match=r"stragglers\.per_gpu_hour: 1e\+09 makes 4 GPUs slow"):
        simulate(*two_pools(), Scenario(stragglers=StragglerModel(per_gpu_hour=1e9)), iterations=1)


ONE_KIND = """
kinds: {a: {gpus: 4}}
stages:
  rollout: {seconds: {a: {1: 8, 2: 4, 4: 2}}}
  train: {seconds: {a: {1: 8, 2: 4, 4: 2}}, after: [rollout]}
"""


def test_a_problem_without_micro_batches_is_refused(tmp_path: Path) -> None:
    (tmp_path / "problem.yaml").write_text(ONE_KIND + "micro_batches: []\n")
    with pytest.raises(PlanError, match="micro_batches"):
        load_problem(str(tmp_path / "problem.yaml"), None)


def test_a_plan_whose_pool_evaluates_now_and_then_is_played(tmp_path: Path) -> None:
    (tmp_path / "problem.yaml").write_text(ONE_KIND)
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "{pools: [{stages: [rollout, train], devices: {a: 3}}, "
        "{stages: [evaluate], devices: {a: 1}}]}"
    )
    problem, placement = load_problem(str(tmp_path / "problem.yaml"), plan)
    assert placement.pools == ((0, 1),)
    assert simulate(problem, placement, iterations=1).iteration_s == pytest.approx([8])
