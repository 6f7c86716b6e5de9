"""The planner finds plans that ``rlinf run`` lets through: whose jobs a partition takes, and what
accounting allows each of them and all together."""

from __future__ import annotations

from functools import partial

import pytest

from pipeline.launch import ClusterConfig, check_quotas
from pipeline.plan import Plan, StagePlan
from pipeline.planning.planner.devices import devices_of, with_counts
from pipeline.planning.planner.propose import assess, propose
from pipeline.planning.planner.request import Request
from rlinf.config import RunConfig
from rlinf.errors import PlanError
from slurm.inventory import Association, Inventory, Limits, QosLimits
from slurm.quotas import quotas_of
from slurm.site import PartitionSite, Site
from tests.pipeline.planning.planner import clusters
from tests.pipeline.planning.planner.test_overlap import GRAINS, Grain, config

__all__ = ["config"]
ME = Association(cluster="c", account="me", qos=("small",))


def inventory(
    qos: QosLimits | None = None, of: Association = ME, *kinds: str, **rules: object
) -> Inventory:
    """With rules of the partition of H100s, and limits of the only QOS."""
    whole = clusters.inventory()
    parts = {name: whole.partitions[name] for name in kinds or ("a100", "h100")}
    parts["h100"] = parts["h100"].model_copy(update=rules)
    limits = Limits(associations=(of,), qos={"small": qos} if qos else {})
    update = {"partitions": parts, "limits": limits, "slurm_version": "22.05.8"}
    return whole.model_copy(update=update)


def ask(config: RunConfig, there: Inventory, grain: Grain, site: Site | None = None) -> Request:
    """With the door of ``rlinf run``."""
    profile = clusters.profile(config, *there.partitions)
    found, notes = devices_of(there, site or Site(), profile)
    door = partial(check_quotas, cluster=ClusterConfig(), quotas=quotas_of(there))
    return Request(config, profile, found, grain=grain, notes=notes, door=door)


def gpus(plan: Plan) -> int:
    """Of the largest job, or of all pools."""
    if plan.pools:
        return sum(sum(pool.gpus.values()) for pool in plan.pools)
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
    found, notes = devices_of(inventory(**rules), Site(), profile)
    assert set(found) == {"a100"}
    assert notes[0].startswith("h100 is left out")
    assert why in notes[0]
    with pytest.raises(PlanError, match=f"h100: jobs of yours do not run there: .*{why}"):
        devices_of(inventory(**rules), Site(), profile, ["h100"])
    named = Site(defaults=PartitionSite(account="physics", qos="long"))
    assert "h100" in devices_of(inventory(**rules), named, profile)[0]


@GRAINS
def test_a_job_has_no_more_nodes_than_its_partition_allows(config: RunConfig, grain: Grain) -> None:
    profile = clusters.profile(config, "h100")
    whole = inventory(max_nodes_per_job=1)
    found, notes = devices_of(whole, Site(), profile)
    assert notes[-1] == "h100: a job has at most 1 of its 2 nodes (MaxNodes)"
    asked = Request(config, profile, found, grain=grain)
    proposal = propose(asked)
    assert all(stage.nodes == 1 for stage in proposal.plan.stages.values())
    if grain == "stage":
        train = proposal.plan.stages["train"].model_copy(update={"nodes": 2})
        stages = {**proposal.plan.stages, "train": train}
        with pytest.raises(PlanError, match="nodes: 2 asked of h100, where a job has at most 1"):
            assess(asked, proposal.plan.model_copy(update={"stages": stages}), "plan.yaml")


@GRAINS
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
    config: RunConfig, grain: Grain, qos: QosLimits, most: int
) -> None:
    assert gpus(propose(ask(config, inventory(), grain)).plan) > most
    asked = ask(config, inventory(qos), grain)
    plan = propose(asked).plan
    if not ("node" in qos.max_tres_per_user and plan.pools):
        assert gpus(plan) <= most
    assert all(pool.gpus.get("h100", 0) <= most for pool in plan.pools)


@GRAINS
@pytest.mark.parametrize("resource", ["gres/gpu", "node"])
def test_no_job_has_more_than_the_qos_allows_one(
    config: RunConfig, grain: Grain, resource: str
) -> None:
    plan = propose(ask(config, inventory(QosLimits(max_tres_per_job={resource: 1})), grain)).plan
    jobs = [plan.of(stage) for stage in plan.stages]
    assert max(job.nodes * (job.gpus if resource == "gres/gpu" else 1) for job in jobs) == 1


def test_pools_are_no_more_jobs_than_run_at_once(config: RunConfig) -> None:
    assert len(propose(ask(config, inventory(), "segment")).plan.pools) > 1
    own = ME.model_copy(update={"max_jobs": 1})
    asked = ask(config, inventory(None, own), "segment")
    proposal = propose(asked)
    assert len(proposal.plan.pools) == 1
    assert proposal.plan.pools[0].workers is None
    # A limit that holds for one partition alone.
    own = own.model_copy(update={"partition": "h100"})
    general = ME.model_copy(update={"default_qos": "small"})
    there = inventory(None, own)
    limits = Limits(associations=(own, general))
    plan = propose(ask(config, there.model_copy(update={"limits": limits}), "segment")).plan
    assert sum("h100" in pool.gpus for pool in plan.pools) <= 1


@GRAINS
def test_a_stage_that_outlasts_the_wall_time_of_the_qos_fits_nowhere(
    config: RunConfig, grain: Grain
) -> None:
    asked = ask(config, inventory(QosLimits(max_wall_min=20)), grain)
    for stage in propose(asked).plan.stages.values():
        assert (stage.time_min or 0) <= 20
    with pytest.raises(PlanError, match="QOS small allows"):
        propose(ask(config, inventory(QosLimits(max_wall_min=0)), grain))


@GRAINS
def test_where_nothing_fits_the_limit_is_named(config: RunConfig, grain: Grain) -> None:
    # A process on a GPU asks for four.
    tight = inventory(QosLimits(max_tres_per_user={"cpu": 3}), ME, "h100")
    with pytest.raises(PlanError, match=r"4 asked in all, QOS small allows .* 3 \(cpu\)"):
        ask(config, tight, grain)


def test_limits_that_slurm_does_not_enforce_bound_no_plan(config: RunConfig) -> None:
    free = inventory(QosLimits(max_tres_per_user={"gres/gpu": 1})).model_copy(
        update={"enforces_limits": False}
    )
    assert gpus(propose(ask(config, free, "stage")).plan) > 1


@GRAINS
def test_a_plan_by_hand_over_a_limit_is_refused_with_its_key(
    config: RunConfig, grain: Grain
) -> None:
    plan = propose(ask(config, inventory(), grain)).plan
    tight = ask(config, inventory(QosLimits(max_tres_per_user={"gres/gpu": 1})), grain)
    with pytest.raises(
        PlanError, match=r"gpus: \d asked in all, QOS small allows .* 1|gpus in all"
    ):
        assess(tight, plan, "plan.yaml")


def test_more_nodes_do_not_lift_a_limit(config: RunConfig) -> None:
    asked = ask(config, inventory(QosLimits(max_tres_per_job={"gres/gpu": 4})), "stage")
    more = with_counts(asked.devices, {"h100": 16})["h100"]
    assert (more.count, more.job_devices) == (16, 4)
    asked = ask(config, inventory(QosLimits(max_tres_per_user={"gres/gpu": 3})), "stage")
    assert with_counts(asked.devices, {"h100": 16})["h100"].count == 3


def test_a_worse_name_of_nodes_is_used_where_the_better_one_allows_less(config: RunConfig) -> None:
    whole = inventory(QosLimits(max_tres_per_user={"gres/gpu": 1}))
    nodes = whole.partitions["h100"]
    parts = {
        "h100": nodes.model_copy(update={"qos": "small"}),
        "spot": nodes.model_copy(update={"name": "spot", "preempt_mode": "REQUEUE", "qos": "free"}),
        "top": nodes.model_copy(
            update={"name": "top", "groups": (clusters.group("cpu", 1),), "priority_tier": 9}
        ),
    }
    limits = Limits(
        associations=(ME.model_copy(update={"qos": ()}),),
        qos={
            "small": QosLimits(max_tres_per_user={"gres/gpu": 1}, preempts=("free",)),
            "free": QosLimits(),
        },
    )
    there = whole.model_copy(update={"partitions": parts, "limits": limits})
    profile = clusters.profile(config, "h100")
    found, _ = devices_of(there, Site(), profile)
    assert found["spot"].same_as == "h100"
    for grain in ("stage", "segment"):
        plan = propose(Request(config, profile, found, grain=grain)).plan
        used = {stage.partition for stage in plan.stages.values()}
        assert "spot" in used
        assert all(
            stage.partition == "spot" or stage.nodes * stage.gpus <= 1
            for stage in plan.stages.values()
        )


def test_cpus_of_stages_without_a_gpu_are_counted(config: RunConfig) -> None:
    asked = ask(config, inventory(QosLimits(max_tres_per_user={"cpu": 4})), "stage")
    plan = propose(asked).plan
    stages = [plan.of(name) for name in plan.stages]
    assert all(stage.cpus * stage.processes * stage.nodes <= 4 for stage in stages)


def test_a_plan_by_hand_that_names_no_partition_is_of_the_default_one(config: RunConfig) -> None:
    asked = ask(config, inventory(default=True), "stage")
    by_hand = Plan(defaults=StagePlan(gpus=1))
    found = assess(asked, by_hand, "plan.yaml")
    assert {row.place for row in found.rows} == {"h100"}
    with pytest.raises(PlanError, match=r"stages\.\w+\.partition: not given; one of a100, h100"):
        assess(ask(config, inventory(), "stage"), by_hand, "plan.yaml")
