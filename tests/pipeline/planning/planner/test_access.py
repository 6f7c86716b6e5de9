"""Partitions that do not let this user in, and those whose jobs have few nodes."""

from __future__ import annotations

import pytest

from pipeline.planning.planner.devices import devices_of
from pipeline.planning.planner.propose import assess, propose
from pipeline.planning.planner.request import Request
from rlinf.config import RunConfig
from rlinf.errors import PlanError
from slurm.inventory import Association, Inventory, Limits
from slurm.site import PartitionSite, Site
from tests.pipeline.planning.planner import clusters
from tests.pipeline.planning.planner.test_overlap import GRAINS, Grain, config

__all__ = ["config"]
ME = Limits(associations=(Association(cluster="c", account="me", qos=("small",)),))


def inventory(**rules: object) -> Inventory:
    """With rules of the partition of H100s."""
    whole = clusters.inventory()
    parts = {name: whole.partitions[name] for name in ("a100", "h100")}
    parts["h100"] = parts["h100"].model_copy(update=rules)
    return whole.model_copy(update={"partitions": parts, "limits": ME})


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"allowed_accounts": ("physics",)}, "it lets in account physics alone, yours: me"),
        ({"denied_accounts": ("me",)}, "it does not let in account me"),
        ({"allowed_qos": ("long",)}, "it lets in QOS long alone, yours: small"),
    ],
)
def test_partitions_that_let_others_in_are_left_out(
    config: RunConfig, rules: dict[str, object], why: str
) -> None:
    profile = clusters.profile(config, "a100", "h100")
    found, notes = devices_of(inventory(**rules), Site(), profile)
    assert set(found) == {"a100"}
    assert notes == (f"partition h100 is left out: {why}",)
    with pytest.raises(PlanError, match=f"partition h100: jobs of yours do not run there: {why}"):
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
