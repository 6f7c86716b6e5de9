"""Plans of execution ``stage``: the best by the measured numbers, explained, and kept as a file."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.commands.experiment import compose
from pipeline.plan import Plan, parse_plan
from pipeline.planning.planner.available_devices import select_devices, with_counts
from pipeline.planning.planner.build_problem import build_problem
from pipeline.planning.planner.plan_command import write_proposal
from pipeline.planning.planner.plan_proposal import PlanProposal
from pipeline.planning.planner.plan_tables import print_proposal
from pipeline.planning.planner.planner import assess_plan, propose_plan
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import PlacementProblem
from pipeline.planning.planner.request import PlanRequest, parse_pins
from pipeline.planning.planner.search import solve
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError
from slurm.inventory import Inventory
from slurm.site import SiteConfig
from stages.flow import on_policy
from tests.pipeline.planning.planner import clusters


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return validate(RunConfig, compose(["experiment=arithmetic_grpo", "rollout.batch_size=16"]))


def ask(
    config: RunConfig, *partitions: str, site: SiteConfig | None = None, **more: object
) -> PlanRequest:
    profile = clusters.profile(config)
    found, notes = select_devices(clusters.inventory(), site or SiteConfig(), profile, partitions)
    pins = parse_pins(more.pop("pins", ()), found, on_policy)  # type: ignore[arg-type]
    return PlanRequest(config, profile, found, pins=pins, notes=notes, **more)  # type: ignore[arg-type]


def rows(proposal: PlanProposal) -> dict[str, tuple[str, str]]:
    return {row.stage: (row.place, row.size) for row in proposal.rows}


def test_each_stage_goes_where_the_measured_times_are_least(config: RunConfig) -> None:
    proposal = propose_plan(ask(config, "a100", "h100"))
    assert rows(proposal)["rollout"] == rows(proposal)["train"] == ("h100", "2x2")
    forecast = proposal.forecast
    overhead = sum(clusters.OVERHEADS[name] for name in ("submission", "startup", "imports"))
    for stage, load in (("rollout", "engine_load"), ("train", "trainer_load")):
        expected = overhead + clusters.OVERHEADS[load] + clusters.work(stage, "h100", 4)
        assert forecast.stages[stage].seconds == pytest.approx(expected, rel=0.02)
        assert sum(forecast.stages[stage].breakdown_s.values()) == pytest.approx(
            forecast.stages[stage].seconds
        )


def test_stages_that_do_not_wait_for_each_other_run_side_by_side(config: RunConfig) -> None:
    """Reward and inference both wait for the rollout alone."""
    forecast = propose_plan(ask(config, "h100")).forecast
    stages = forecast.stages
    assert stages["reward"].start_s == stages["inference"].start_s == stages["rollout"].seconds
    longer = max(stages["reward"].seconds, stages["inference"].seconds)
    assert stages["train"].start_s == pytest.approx(stages["rollout"].seconds + longer)
    chain = ("rollout", "train", "sync")
    total = longer + sum(stages[stage].seconds for stage in chain)
    assert forecast.iteration_s == pytest.approx(total)


def test_stages_side_by_side_find_room_together(config: RunConfig) -> None:
    """Each alone is quickest on all H100s: together, one of them goes elsewhere or waits."""
    both = side_by_side(ask(config, "a100", "h100"), "inference", "train")
    best = solve(both)[0]
    alone = [solve(replace(both, stages=[stage]))[0] for stage in both.stages]
    assert [one.placement.gpus for one in alone] == [((0, 4),), ((0, 4),)]
    assert all(one.is_optimal for one in alone)
    assert sum(h100 for _, h100 in best.placement.gpus) <= 4
    assert best.cost < sum(one.cost for one in alone)
    assert best.prediction.start_s.tolist() == [0, 0]
    # With nowhere else to go the second one waits.
    waits = Predictor(both).predict(replace(best.placement, gpus=((0, 4), (0, 4))))
    assert waits.start_s.tolist() == [0, waits.finish_s[0]]


def side_by_side(request: PlanRequest, *names: str) -> PlacementProblem:
    """Jobs of some stages that need no other stage."""
    problem, _ = build_problem(request)
    stages = [replace(s, after=()) for s in problem.stages if s.name in names]
    return replace(problem, stages=stages)


def test_jobs_longer_than_their_partition_allows_are_not_planned(config: RunConfig) -> None:
    request = ask(config, "a100", "h100")
    devices = {
        "a100": request.devices["a100"],
        "h100": replace(request.devices["h100"], time_limit_min=0),
    }
    proposal = propose_plan(replace(request, devices=devices))
    assert {place for place, _ in rows(proposal).values()} == {"a100"}
    devices["a100"] = replace(devices["a100"], time_limit_min=0)
    with pytest.raises(
        PlanError, match=r"'rollout' fits nowhere: .*h100: start and work take .* jobs of 0"
    ):
        propose_plan(replace(request, devices=devices))


@pytest.mark.parametrize("objective", ["time", "gpu-hours", "money", "time-to-end"])
def test_no_combination_of_jobs_costs_less(config: RunConfig, objective: str) -> None:
    request = ask(config, "a100", "h100", objective=objective)
    problem, _ = build_problem(request)
    every = [
        [(n, 0) for n in np.flatnonzero(stage.rates["a100"])]
        + [(0, n) for n in np.flatnonzero(stage.rates["h100"])]
        for stage in problem.stages
    ]
    jobs = np.array(list(itertools.product(*every)))
    gpus = [jobs[:, s].T for s in range(len(problem.stages))]
    found = Predictor(problem).predict_batch(tuple((s,) for s in range(len(gpus))), gpus, 1)
    costs = request.get_objective().cost(problem, found.total_s, found.busy_s, gpus)
    assert propose_plan(request).forecast.cost == pytest.approx(costs.min())


def test_gpu_hours_are_saved_where_more_devices_bring_little(config: RunConfig) -> None:
    quick = propose_plan(ask(config, "h100"))
    thrifty = propose_plan(ask(config, "h100", objective="gpu-hours"))
    assert thrifty.forecast.gpu_hours < quick.forecast.gpu_hours
    assert thrifty.forecast.iteration_s > quick.forecast.iteration_s


def test_money_follows_the_prices_of_the_site(config: RunConfig) -> None:
    dear = SiteConfig.model_validate({"partitions": {"h100": {"cost_per_gpu_hour": 100.0}}})
    request = ask(config, "a100", "h100", site=dear, objective="money")
    # Prices are part of the inventory, as rlinf inventory saves it.
    found, _ = select_devices(
        clusters.inventory().with_site_settings(dear), dear, request.profile, ["a100", "h100"]
    )
    priced = propose_plan(replace(request, devices=found))
    assert {place for place, _ in rows(priced).values()} == {"a100"}


@pytest.mark.parametrize("execution", ["jobs", "pools"])
def test_devices_without_a_price_beside_others_are_named(config: RunConfig, execution: Any) -> None:
    site = SiteConfig.model_validate({"partitions": {"h100": {"cost_per_gpu_hour": 2.5}}})
    request = ask(config, "a100", "h100", "cpu", site=site, objective="money", execution=execution)
    priced, _ = select_devices(
        clusters.inventory().with_site_settings(site), site, request.profile, ["h100"]
    )
    some = propose_plan(replace(request, devices={**request.devices, **priced}))
    assert any("no price for a100, cpu: each GPU" in note for note in some.notes)
    for other in (
        propose_plan(request),
        propose_plan(replace(request, devices=priced)),
        propose_plan(
            replace(request, devices={**request.devices, **priced}, objective="gpu-hours")
        ),
    ):
        assert not any("price" in note for note in other.notes)


def test_stages_that_need_no_gpu_are_not_charged_for_one(config: RunConfig) -> None:
    for objective in ("money", "gpu-hours", "time"):
        proposal = propose_plan(ask(config, "h100", objective=objective))
        stages = proposal.plan.stages
        held = sum(
            row.forecast.seconds * stages[row.stage].nodes * stages[row.stage].gpus
            for row in proposal.rows
        )
        assert stages["reward"].gpus == 0
        assert proposal.forecast.gpu_hours == pytest.approx(held / 3600)
        if objective != "time":
            assert proposal.forecast.cost == pytest.approx(held / 3600)


def test_a_long_queue_counts_in_the_time_to_the_end(config: RunConfig) -> None:
    profile = clusters.profile(config, h100=600.0)
    found, _ = select_devices(clusters.inventory(), SiteConfig(), profile, ["a100", "h100"])
    request = PlanRequest(config, profile, found, objective="time-to-end")
    assert {place for place, _ in rows(propose_plan(request)).values()} == {"a100"}
    assert rows(propose_plan(replace(request, objective="time")))["train"][0] == "h100"


def test_pins_are_kept(config: RunConfig) -> None:
    proposal = propose_plan(ask(config, "a100", "h100", pins=("train=a100", "rollout=a100")))
    assert rows(proposal)["train"][0] == rows(proposal)["rollout"][0] == "a100"
    assert rows(proposal)["inference"][0] == "h100"


def test_the_plan_is_a_file_that_says_the_same_when_read(config: RunConfig, tmp_path: Path) -> None:
    proposal = propose_plan(ask(config), ["h100=8"])
    page = write_proposal(proposal, tmp_path / "plan.yaml", "arithmetic")
    again = parse_plan(yaml.safe_load((tmp_path / "plan.yaml").read_text()), "plan.yaml")
    assert again == proposal.plan
    assert again.stage_plan("sft") == again.stage_plan("train")
    assert again.stage_plan("evaluate") == again.stage_plan("rollout")
    text = page.read_text()
    assert "Predicted iteration" in text
    assert "h100=8" in text
    assert "src=" not in text


def test_alternatives_are_worse_and_say_why(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    proposal = propose_plan(ask(config))
    costs = [other.cost for other in proposal.alternatives]
    assert costs == sorted(costs)
    assert len(costs) == 4
    assert costs[0] >= proposal.forecast.cost
    assert all(other.reason for other in proposal.alternatives)
    print_proposal(proposal)
    printed = capsys.readouterr().out
    assert "reason" in printed
    assert "no plan is better" in " ".join(printed.split())


def test_what_if_tells_the_best_plan_of_another_cluster(config: RunConfig) -> None:
    request = ask(config, "a100", "h100")
    cases = {case.case: case.seconds for case in propose_plan(request, ["h100=2"]).what_ifs}
    fewer = replace(request, devices=with_counts(request.devices, {"h100": 2}))
    assert cases["h100=2"] == propose_plan(fewer).forecast.iteration_s
    assert cases["h100=8"] < propose_plan(request).forecast.iteration_s < cases["without h100"]


def test_more_processes_than_were_measured_are_marked(config: RunConfig) -> None:
    request = ask(config, "h100")
    more = replace(request, devices=with_counts(request.devices, {"h100": 16}))
    proposal = propose_plan(more)
    assert rows(proposal)["rollout"] == ("h100", "8x2")
    assert any("more processes than were measured" in note for note in proposal.notes)

    def width(p: PlanProposal) -> float:
        stage = p.forecast.stages["rollout"]
        return (stage.high_s - stage.low_s) / stage.seconds

    assert width(proposal) > 2 * width(propose_plan(request))


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (("train",), "expected STAGE=KIND"),
        (("trian=h100",), "no stage 'trian'.*did you mean 'train'"),
        (("train=h10",), "no kind 'h10'.*did you mean 'h100'"),
    ],
)
def test_a_pin_that_means_nothing_is_refused(
    config: RunConfig, pins: tuple[str, ...], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        ask(config, "a100", "h100", pins=pins)


def test_what_cannot_be_asked_is_refused(config: RunConfig) -> None:
    request = ask(config, "a100", "h100")
    with pytest.raises(PlanError, match="nodes of h100 have 2"):
        propose_plan(request, ["h100=3"])
    with pytest.raises(PlanError, match="expected KIND=NUMBER"):
        propose_plan(request, ["h100"])
    with pytest.raises(PlanError, match="did you mean 'money'"):
        propose_plan(replace(request, objective="mony"))
    with pytest.raises(PlanError, match=r"no partition 'h10'.*did you mean 'h100'"):
        ask(config, "h10")


def test_a_partition_without_measurements_is_left_out_or_refused(config: RunConfig) -> None:
    profile = clusters.profile(config, "a100")
    found, notes = select_devices(clusters.inventory(), SiteConfig(), profile)
    # The A100s of the partition ``gpu`` are the nodes that were measured.
    assert set(found) == {"a100", "gpu:a100"}
    assert any("h100 was not measured" in note for note in notes)
    with pytest.raises(PlanError, match=r"nothing measured on 'h100'.*rlinf profile --partition"):
        select_devices(clusters.inventory(), SiteConfig(), profile, ["h100"])
    with pytest.raises(PlanError, match="it has a100, but this cluster has cpu"):
        select_devices(_without("a100", "gpu", "h100"), SiteConfig(), profile)


def _without(*names: str) -> Inventory:
    whole = clusters.inventory()
    kept = {name: p for name, p in whole.partitions.items() if name not in names}
    return whole.model_copy(update={"partitions": kept})


def test_a_stage_that_failed_everywhere_says_why(config: RunConfig) -> None:
    request = ask(config, "h100")
    own = request.devices["h100"]
    points = [
        p.model_copy(update={"time": None, "failure": "out of memory"}) if p.stage == "train" else p
        for p in own.profile.points
    ]
    broken = replace(own, profile=own.profile.model_copy(update={"points": tuple(points)}))
    with pytest.raises(PlanError, match=r"'train' fits nowhere: h100: .*out of memory"):
        propose_plan(replace(request, devices={"h100": broken}))


def test_memory_of_a_node_limits_its_processes(config: RunConfig) -> None:
    request = ask(config, "h100")
    own = request.devices["h100"]
    small = replace(own, kind=replace(own.kind, mem_mb_per_node=700))
    proposal = propose_plan(replace(request, devices={"h100": small}))
    assert rows(proposal)["train"] == ("h100", "2x1")


@pytest.mark.parametrize(
    ("gpu", "memory", "gpus"),
    [("rtx4090", "device", 4), ("rtx4090", None, 4), ("h100", "host", 2), ("rtx4090", "host", 2)],
)
def test_a_gpu_of_unknown_model_has_memory_of_its_own(
    config: RunConfig, gpu: str, memory: Any, gpus: int
) -> None:
    """Two processes of 22 GiB do not share the 30 GB of a node, but have a GPU each."""
    own = ask(config, "h100").devices["h100"]
    points = tuple(p.model_copy(update={"peak_memory_bytes": 22 << 30}) for p in own.profile.points)
    changed = replace(
        own,
        kind=replace(own.kind, mem_mb_per_node=30_000, gpu_type=gpu),
        profile=own.profile.model_copy(update={"points": points, "memory": memory}),
    )
    for execution in ("jobs", "pools"):
        request = replace(ask(config, "h100", execution=execution), devices={"h100": changed})
        if execution == "pools":
            assert bool(build_problem(request)[0].stages[-1].switch_s) == (gpus == 4)
            continue
        plan = propose_plan(request).plan.stages["train"]
        assert plan.nodes * plan.processes == gpus
        assert (plan.mem_mb is None) == (gpus == 4)
        most = plan.model_copy(update={"processes": 2, "gpus": 2})
        edited = Plan(stages={**propose_plan(request).plan.stages, "train": most})
        if gpus == 4:
            assert assess_plan(request, edited, "plan.yaml").forecast.iteration_s > 0
        else:
            with pytest.raises(PlanError, match=r"processes: 2 a node need"):
                assess_plan(request, edited, "plan.yaml")


def test_by_default_pools_are_proposed_unless_jobs_are_better(config: RunConfig) -> None:
    by_default, jobs, pools = (
        propose_plan(ask(config, "a100", "h100", execution=execution))
        for execution in (None, "jobs", "pools")
    )
    assert pools.forecast.cost < jobs.forecast.cost
    assert by_default.plan == pools.plan
    limits = {stage.time_limit_min for stage in pools.plan.stages.values()}
    assert limits == {60}, "of the partition: some sites refuse jobs without a limit"
    assert any("with --execution jobs an iteration would take" in n for n in by_default.notes)
    # Pools hold devices that jobs need only for a part of the time.
    costs = [
        propose_plan(ask(config, "h100", execution=execution, objective="gpu-hours"))
        for execution in (None, "jobs", "pools")
    ]
    best = min(costs[1:], key=lambda proposal: proposal.forecast.cost)
    assert costs[0].plan.execution == best.plan.execution
