"""The planner finds plans that ``rlinf run`` lets through: whose jobs a partition takes, and what
accounting allows each of them and all together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.plan import Plan, PlanningSources, StagePlan, parse_plan
from pipeline.planning.planner.available_devices import (
    check_plan_limits,
    select_devices,
    with_counts,
)
from pipeline.planning.planner.build_problem import build_problem
from pipeline.planning.planner.plan_command import build_request, run_plan
from pipeline.planning.planner.planner import assess_plan, propose_plan
from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import Placement
from pipeline.planning.planner.request import PlanRequest
from pipeline.resources import ClusterConfig
from rlinf.config import RunConfig
from rlinf.errors import PlanError
from slurm.inventory import Inventory
from slurm.records import AccountingLimits, Association, QosLimits
from slurm.site import PartitionSettings, SiteConfig, load_site
from tests.pipeline.planning.planner import clusters
from tests.pipeline.planning.planner.test_overlap import EXECUTIONS, Execution, config
from tests.pipeline.planning.planner.test_propose import side_by_side

__all__ = ["config"]
ME = Association(cluster="c", account="me", qos=("small",))


def inventory(
    qos: QosLimits | None = None, of: Association = ME, *kinds: str, **rules: object
) -> Inventory:
    """With rules of the partition of H100s, and limits of the only QOS."""
    whole = clusters.inventory()
    parts = {name: whole.partitions[name] for name in kinds or ("a100", "h100")}
    parts["h100"] = parts["h100"].model_copy(update=rules)
    limits = AccountingLimits(associations=(of,), qos={"small": qos} if qos else {})
    update = {"partitions": parts, "limits": limits, "slurm_version": "22.05.8"}
    return whole.model_copy(update=update)


def ask(
    config: RunConfig,
    there: Inventory,
    execution: Execution,
    site: Path | None = None,
    *,
    given: bool = False,
) -> PlanRequest:
    """With the door of ``rlinf run``."""
    profile = clusters.profile(config, *there.partitions)
    known = load_site(site) if site else SiteConfig()
    found, notes = select_devices(there, known, profile, is_user_plan=given)
    door = partial(check_plan_limits, cluster=ClusterConfig(site=site), inventory=there)
    return PlanRequest(
        config, profile, found, execution=execution, notes=notes, plan_validator=door
    )


def gpus(plan: Plan) -> int:
    """Of the largest job, or of all pools."""
    if plan.pools:
        return sum(sum(pool.devices.values()) for pool in plan.pools)
    return max(stage.nodes * stage.gpus for stage in plan.stages.values())


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"allowed_accounts": ("physics",)}, "takes no jobs of account me, only of physics"),
        ({"denied_accounts": ("me",)}, "takes no jobs of account me;"),
        ({"allowed_qos": ("long",)}, "takes no jobs of QOS small, only of long"),
    ],
)
def test_partitions_that_let_others_in_are_left_out(
    config: RunConfig, rules: dict[str, object], why: str
) -> None:
    profile = clusters.profile(config, "a100", "h100")
    found, notes = select_devices(inventory(**rules), SiteConfig(), profile)
    assert set(found) == {"a100"}
    assert notes[0].startswith("h100 is left out")
    assert why in notes[0]
    with pytest.raises(PlanError, match=f"h100: your jobs cannot run there: .*{why}"):
        select_devices(inventory(**rules), SiteConfig(), profile, ["h100"])
    named = SiteConfig(defaults=PartitionSettings(account="physics", qos="long"))
    assert "h100" in select_devices(inventory(**rules), named, profile)[0]


@EXECUTIONS
def test_a_job_has_no_more_nodes_than_its_partition_allows(
    config: RunConfig, execution: Execution
) -> None:
    profile = clusters.profile(config, "h100")
    whole = inventory(max_nodes_per_job=1)
    found, notes = select_devices(whole, SiteConfig(), profile)
    assert notes[-1] == "h100: a job has at most 1 of its 2 nodes (MaxNodes)"
    request = PlanRequest(config, profile, found, execution=execution)
    proposal = propose_plan(request)
    assert all(stage.nodes == 1 for stage in proposal.plan.stages.values())
    if execution == "jobs":
        train = proposal.plan.stages["train"].model_copy(update={"nodes": 2})
        stages = {**proposal.plan.stages, "train": train}
        with pytest.raises(PlanError, match="2 requested of h100, where a job has at most 1"):
            assess_plan(request, proposal.plan.model_copy(update={"stages": stages}), "plan.yaml")


@EXECUTIONS
@pytest.mark.parametrize(
    ("qos", "most"),
    [
        (QosLimits(max_tres_per_user={"gres/gpu": 2}), 2),
        (QosLimits(max_tres_all_jobs={"gres/gpu": 3}), 3),
        (QosLimits(max_tres_per_user={"gres/gpu:h100": 1, "gres/gpu": 3}), 3),
        # Each process on a GPU asks for four CPUs.
        (QosLimits(max_tres_per_user={"cpu": 8}), 2),
        (QosLimits(max_tres_per_user={"node": 1}), 2),
    ],
)
def test_jobs_together_have_no_more_than_the_qos_allows(
    config: RunConfig, execution: Execution, qos: QosLimits, most: int
) -> None:
    assert gpus(propose_plan(ask(config, inventory(), execution)).plan) > most
    request = ask(config, inventory(qos), execution)
    plan = propose_plan(request).plan
    if not ("node" in qos.max_tres_per_user and plan.pools):
        assert gpus(plan) <= most
    assert all(pool.devices.get("h100", 0) <= most for pool in plan.pools)


@EXECUTIONS
@pytest.mark.parametrize("resource", ["gres/gpu", "node"])
def test_no_job_has_more_than_the_qos_allows_one(
    config: RunConfig, execution: Execution, resource: str
) -> None:
    plan = propose_plan(
        ask(config, inventory(QosLimits(max_tres_per_job={resource: 1})), execution)
    ).plan
    jobs = [plan.stage_plan(stage) for stage in plan.stages]
    assert max(job.nodes * (job.gpus if resource == "gres/gpu" else 1) for job in jobs) == 1


def test_pools_are_no_more_jobs_than_run_at_once(config: RunConfig) -> None:
    assert len(propose_plan(ask(config, inventory(), "pools")).plan.pools) > 1
    own = ME.model_copy(update={"max_jobs": 1})
    request = ask(config, inventory(None, own), "pools")
    proposal = propose_plan(request)
    assert len(proposal.plan.pools) == 1
    assert proposal.plan.pools[0].workers is None
    # The driver may be a job too.
    for jobs in (2, 3):
        request = ask(config, inventory(None, ME.model_copy(update={"max_jobs": jobs})), "pools")
        assert len(propose_plan(request).plan.pools) <= jobs - 1
    # A limit that holds for one partition alone.
    own = own.model_copy(update={"partition": "h100"})
    general = ME.model_copy(update={"default_qos": "small"})
    there = inventory(None, own)
    limits = AccountingLimits(associations=(own, general))
    plan = propose_plan(ask(config, there.model_copy(update={"limits": limits}), "pools")).plan
    assert sum("h100" in pool.devices for pool in plan.pools) <= 1


@EXECUTIONS
def test_a_stage_that_outlasts_the_wall_time_of_the_qos_fits_nowhere(
    config: RunConfig, execution: Execution
) -> None:
    request = ask(config, inventory(QosLimits(max_wall_min=20)), execution)
    for stage in propose_plan(request).plan.stages.values():
        assert (stage.time_limit_min or 0) <= 20
    with pytest.raises(PlanError, match="QOS small allows"):
        propose_plan(ask(config, inventory(QosLimits(max_wall_min=0)), execution))


@EXECUTIONS
def test_where_nothing_fits_the_limit_is_named(config: RunConfig, execution: Execution) -> None:
    # A process on a GPU asks for four.
    tight = inventory(QosLimits(max_tres_per_user={"cpu": 3}), ME, "h100")
    with pytest.raises(PlanError, match=r"4 requested in all, QOS small allows .* 3 \(cpu\)"):
        ask(config, tight, execution)


def test_limits_that_slurm_does_not_enforce_bound_no_plan(config: RunConfig) -> None:
    free = inventory(QosLimits(max_tres_per_user={"gres/gpu": 1})).model_copy(
        update={"enforces_limits": False}
    )
    assert gpus(propose_plan(ask(config, free, "jobs")).plan) > 1


@EXECUTIONS
def test_a_plan_by_hand_over_a_limit_is_refused_with_its_key(
    config: RunConfig, execution: Execution
) -> None:
    plan = propose_plan(ask(config, inventory(), execution)).plan
    tight = ask(config, inventory(QosLimits(max_tres_per_user={"gres/gpu": 1})), execution)
    with pytest.raises(
        PlanError, match=r"gpus: \d requested in all, QOS small allows .* 1|gpus in all"
    ):
        assess_plan(tight, plan, "plan.yaml")


def test_more_nodes_do_not_lift_a_limit(config: RunConfig) -> None:
    request = ask(config, inventory(QosLimits(max_tres_per_job={"gres/gpu": 4})), "jobs")
    more = with_counts(request.devices, {"h100": 16})["h100"]
    assert (more.count, more.max_job_devices) == (16, 4)
    request = ask(config, inventory(QosLimits(max_tres_per_user={"gres/gpu": 3})), "jobs")
    assert with_counts(request.devices, {"h100": 16})["h100"].count == 3


def with_spot() -> Inventory:
    """H100s of which a user has one at a time, and under another name, preempted, any number."""
    whole = inventory(QosLimits(max_tres_per_user={"gres/gpu": 1}))
    nodes = whole.partitions["h100"]
    parts = {
        "h100": nodes.model_copy(update={"qos": "small"}),
        "spot": nodes.model_copy(update={"name": "spot", "preempt_mode": "REQUEUE", "qos": "free"}),
        "top": nodes.model_copy(
            update={"name": "top", "groups": (clusters.group("cpu", 1),), "priority_tier": 9}
        ),
    }
    limits = AccountingLimits(
        associations=(ME.model_copy(update={"qos": ()}),),
        qos={
            "small": QosLimits(max_tres_per_user={"gres/gpu": 1}, preempts=("free",)),
            "free": QosLimits(),
        },
    )
    return whole.model_copy(update={"partitions": parts, "limits": limits})


def test_a_worse_name_of_nodes_is_used_where_the_better_one_allows_less(config: RunConfig) -> None:
    profile = clusters.profile(config, "h100")
    found, _ = select_devices(with_spot(), SiteConfig(), profile)
    assert found["spot"].better_kind == "h100"
    for execution in ("jobs", "pools"):
        plan = propose_plan(PlanRequest(config, profile, found, execution=execution)).plan
        used = {stage.partition for stage in plan.stages.values()}
        assert "spot" in used
        assert all(
            stage.partition == "spot" or stage.nodes * stage.gpus <= 1
            for stage in plan.stages.values()
        )


def test_what_a_user_may_have_of_one_name_is_no_limit_of_the_other(config: RunConfig) -> None:
    profile = clusters.profile(config, "h100")
    found, _ = select_devices(with_spot(), SiteConfig(), profile)
    problem = side_by_side(PlanRequest(config, profile, found), "inference", "train")

    def waits(first: int, *names: str) -> bool:
        """Whether a stage on one device waits for another beside it."""
        jobs = tuple(
            tuple(count * (kind.name == name) for kind in problem.kinds)
            for name, count in zip(names, (first, 1), strict=True)
        )
        predicted = Predictor(problem).predict(Placement(((0,), (1,)), jobs, 1))
        return bool(predicted.start_s[1])

    assert not waits(2, "spot", "h100")
    assert waits(4, "spot", "h100"), "there are four"
    assert waits(1, "h100", "h100")


def test_cpus_of_stages_without_a_gpu_are_counted(config: RunConfig) -> None:
    request = ask(config, inventory(QosLimits(max_tres_per_user={"cpu": 4})), "jobs")
    plan = propose_plan(request).plan
    stages = [plan.stage_plan(name) for name in plan.stages]
    assert all(stage.cpus * stage.processes * stage.nodes <= 4 for stage in stages)


def test_a_plan_by_hand_that_names_no_partition_is_of_the_default_one(config: RunConfig) -> None:
    request = ask(config, inventory(is_default=True), "jobs")
    by_hand = Plan(defaults=StagePlan(gpus=1))
    found = assess_plan(request, by_hand, "plan.yaml")
    assert {row.place for row in found.rows} == {"h100"}
    with pytest.raises(PlanError, match=r"stages\.\w+\.partition: not given; one of a100, h100"):
        assess_plan(ask(config, inventory(), "jobs"), by_hand, "plan.yaml")


TRAIN = {"gpu_type": "h100", "processes": 2, "gpus": 2}
EVERY = ["rollout", "reward", "inference", "train"]


def by_hand(execution: Execution, cpus: int, partition: str | None = "h100") -> Plan:
    """On two H100s."""
    if execution == "jobs":
        train = {**TRAIN, "cpus": cpus, "partition": partition}
        return parse_plan(
            {"defaults": {"partition": partition}, "stages": {"train": train}}, "plan"
        )
    pool = {"stages": EVERY, "devices": {"h100": 2}}
    defaults = {"processes": 2, "cpus": cpus}
    return parse_plan({"defaults": defaults, "pools": [pool]}, "plan")


@EXECUTIONS
@pytest.mark.parametrize("most", [4, 3])
def test_a_plan_by_hand_may_have_fewer_cpus_than_the_planner_asks_for(
    config: RunConfig, execution: Execution, most: int
) -> None:
    """It asks for four with each GPU: one GPU, or none."""
    tight = inventory(QosLimits(max_tres_per_user={"cpu": most}), ME, "h100")
    request = ask(config, tight, execution, given=True)
    found = assess_plan(request, by_hand(execution, 1), "plan.yaml")
    free = ask(config, inventory(None, ME, "h100"), execution)
    expected = assess_plan(free, by_hand(execution, 1), "plan.yaml").forecast
    assert found.forecast.iteration_s == expected.iteration_s
    with pytest.raises(PlanError, match=rf"8 requested in all, QOS small allows .* {most} \(cpu\)"):
        assess_plan(request, by_hand(execution, 4), "plan.yaml")


def test_a_plan_by_hand_is_checked_where_the_planner_finds_no_room(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inventory(QosLimits(max_tres_per_user={"cpu": 3}), ME, "h100").save(tmp_path / "there.json")
    clusters.profile(config, "h100").save(tmp_path / "profile.json")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(by_hand("jobs", 1).to_dict()))
    names = (str(tmp_path / name) for name in ("profile.json", "there.json"))
    sources = PlanningSources(**dict(zip(("profile", "inventory"), names, strict=True)))
    with pytest.raises(PlanError, match="your jobs cannot run there"):
        build_request(config, sources)
    run_plan(config, sources, tmp_path / "out.yaml", "time", (), tmp_path / "plan.yaml")
    assert "no better plan was found" in " ".join(capsys.readouterr().out.split())


@EXECUTIONS
def test_the_default_partition_has_its_own_settings_of_the_site(
    config: RunConfig, execution: Execution, tmp_path: Path
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("partitions: {h100: {qos: long}}\n")
    limits = {"small": QosLimits(max_wall_min=20), "long": QosLimits(max_wall_min=50)}
    me = ME.model_copy(update={"qos": (*limits,), "default_qos": "small"})
    there = inventory(None, me, "h100", is_default=True)
    there = there.model_copy(update={"limits": AccountingLimits(associations=(me,), qos=limits)})
    request = ask(config, there, execution, site)
    for minutes, allowed in ((50, True), (51, False)):
        plan = by_hand(execution, 1, None)
        defaults = plan.defaults.model_copy(update={"time_limit_min": minutes})
        plan = plan.model_copy(update={"defaults": defaults})
        if allowed:
            assert assess_plan(request, plan, "plan.yaml").forecast.iteration_s > 0
        else:
            with pytest.raises(PlanError, match="51 minutes requested, QOS long allows 50"):
                assess_plan(request, plan, "plan.yaml")


def test_pools_that_do_not_say_how_many_gpus_count_with_one_for_each_process(
    config: RunConfig,
) -> None:
    tight = inventory(QosLimits(max_tres_per_user={"gres/gpu": 1}), ME, "h100")
    with pytest.raises(PlanError, match="2 requested in all, QOS small allows all jobs together 1"):
        assess_plan(ask(config, tight, "pools"), by_hand("pools", 1), "plan.yaml")


def test_an_elastic_pool_is_as_many_jobs_as_it_has_workers(config: RunConfig) -> None:
    request = ask(config, inventory(max_nodes_per_job=1), "pools")
    rest = {"stages": EVERY[1:], "devices": {"a100": 2}}
    stages = {"rollout": {"processes": 1, "gpus": 1}, "train": {"processes": 2, "gpus": 2}}

    def given(**keys: Any) -> Plan:
        elastic = {"stages": ["rollout"], "devices": {"h100": 4}, **keys}
        values = {"stages": stages, "pools": [elastic, rest]}
        return parse_plan(values, "plan")

    found = assess_plan(request, given(workers=4), "plan.yaml")
    assert found.forecast.stages["rollout"].breakdown_s["work"] < 40 / 2 / 2
    with pytest.raises(PlanError, match=r"pools\[0\]\.devices: 4 h100 requested, .* at most 2"):
        assess_plan(request, given(), "plan.yaml")
    pins = {"rollout": frozenset({"h100"}), **dict.fromkeys(EVERY[1:], frozenset({"a100"}))}
    plan = propose_plan(replace(request, pins=pins)).plan
    (pool,) = [pool for pool in plan.pools if "rollout" in pool.stages]
    assert (pool.devices, pool.workers) == ({"h100": 4}, 4)


def test_the_limit_is_named_where_other_sizes_are_merely_unknown(config: RunConfig) -> None:
    there = inventory(QosLimits(max_tres_per_job={"gres/gpu": 1}), ME, "h100")
    request = ask(config, there, "jobs")
    own = request.devices["h100"]
    points = [p for p in own.profile.points if p.stage != "train" or p.processes == 2]
    few = own.profile.model_copy(update={"points": tuple(p for p in points if p.samples == 32)})
    request = replace(request, devices={"h100": replace(own, profile=few)})
    with pytest.raises(PlanError, match=r"stage 'train' fits nowhere: h100: .*QOS small allows"):
        build_problem(request)
