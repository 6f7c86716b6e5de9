"""Kinds of devices, told apart as the planner needs them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pipeline.planning.profile.kinds import kinds_of, local_kind, of_partitions
from rlinf.errors import PlanError
from slurm.inventory import Inventory, NodeGroup, PartitionInventory
from slurm.site import PartitionSite, Site


def group(gpu: str, count: int = 2, **more: object) -> NodeGroup:
    gpus = 4 if gpu else 0
    values = {"gpu_type": gpu, "gpus_per_node": gpus, "cpus_per_node": 8, "mem_mb_per_node": 1000}
    return NodeGroup(count=count, **{**values, **more})


def inventory(**partitions: tuple[NodeGroup, ...]) -> Inventory:
    return Inventory(
        schema_version=1,
        taken=datetime(2026, 1, 1, tzinfo=UTC),
        slurm_version="22.05.8",
        partitions={
            name: PartitionInventory(name=name, groups=groups, time_limit_min=None)
            for name, groups in partitions.items()
        },
    )


CLUSTER = inventory(
    a100=(group("a100"),),
    gpu=(group("a100"), group("h100", features=("h100",)), group("")),
    cpu=(group("", features=("slow",)),),
    gone=(group("v100", down_nodes=2),),
)


def test_a_partition_of_two_gpus_is_two_kinds() -> None:
    kinds = kinds_of(CLUSTER, Site())
    assert list(kinds) == ["a100", "cpu", "gpu:a100", "gpu:h100"]
    assert kinds["gpu:h100"].devices_per_node == 4
    assert kinds["cpu"].devices_per_node == 8


def test_the_duty_cycle_follows_the_node_into_mixed_partitions() -> None:
    site = Site(defaults=PartitionSite(duty_cycle={"a100": 0.5, "slow": 0.25}))
    duties = {name: kind.duty_cycle for name, kind in kinds_of(CLUSTER, site).items()}
    assert duties == {"a100": 0.5, "cpu": 0.25, "gpu:a100": 0.5, "gpu:h100": 1.0}


def test_partitions_and_kinds_are_both_understood() -> None:
    kinds = kinds_of(CLUSTER, Site())
    assert [k.name for k in of_partitions(kinds, ["gpu", "a100"])] == [
        "gpu:a100",
        "gpu:h100",
        "a100",
    ]
    assert [k.name for k in of_partitions(kinds, ["gpu:h100", "gpu:h100"])] == ["gpu:h100"]
    with pytest.raises(PlanError, match=r"--partition a10: .*did you mean 'a100'"):
        of_partitions(kinds, ["a10"])


def test_this_machine_is_a_kind() -> None:
    kind = local_kind()
    assert kind.devices_per_node >= 1
    assert kind.partition == ""
