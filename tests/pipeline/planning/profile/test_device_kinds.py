"""Kinds of devices, told apart as the planner needs them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pipeline.planning.profile.device_kinds import (
    describe_excluded_nodes,
    list_kinds,
    local_kind,
    select_kinds,
)
from rlinf.errors import PlanError
from slurm.inventory import Inventory, NodeGroup, PartitionInventory
from slurm.site import PartitionSettings, SiteConfig


def group(gpu: str, count: int = 2, **more: object) -> NodeGroup:
    gpus = 4 if gpu else 0
    values = {"gpu_type": gpu, "gpus_per_node": gpus, "cpus_per_node": 8, "mem_mb_per_node": 1000}
    return NodeGroup(count=count, **{**values, **more})


def inventory(**partitions: tuple[NodeGroup, ...]) -> Inventory:
    return Inventory(
        schema_version=1,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
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
    kinds = list_kinds(CLUSTER, SiteConfig())
    assert list(kinds) == ["a100", "cpu", "gpu:a100", "gpu:h100"]
    assert kinds["gpu:h100"].devices_per_node == 4
    assert kinds["cpu"].devices_per_node == 8


def test_a_gpu_without_a_cpu_is_not_counted() -> None:
    cluster = inventory(a100=(group("a100", cpus_per_node=2),))
    assert list_kinds(cluster, SiteConfig())["a100"].devices_per_node == 2


def test_the_duty_cycle_follows_the_node_into_mixed_partitions() -> None:
    site = SiteConfig(defaults=PartitionSettings(duty_cycle={"a100": 0.5, "slow": 0.25}))
    duties = {name: kind.duty_cycle for name, kind in list_kinds(CLUSTER, site).items()}
    assert duties == {"a100": 0.5, "cpu": 0.25, "gpu:a100": 0.5, "gpu:h100": 1.0}


def test_partitions_and_kinds_are_both_understood() -> None:
    kinds = list_kinds(CLUSTER, SiteConfig())
    assert [k.name for k in select_kinds(kinds, ["gpu", "a100"])] == [
        "gpu:a100",
        "gpu:h100",
        "a100",
    ]
    assert [k.name for k in select_kinds(kinds, ["gpu:h100", "gpu:h100"])] == ["gpu:h100"]
    with pytest.raises(PlanError, match=r"--partition a10: .*did you mean 'a100'"):
        select_kinds(kinds, ["a10"])


def test_this_machine_is_a_kind() -> None:
    kind = local_kind()
    assert kind.devices_per_node >= 1
    assert kind.partition == ""


LARGE, SMALL = (
    group(
        "a100",
        count,
        features=("a100", f"{size}gb", "ib"),
        cpus_per_node=cpus,
        gpu_model=f"a100-{size}gb",
        gpu_memory_gib=size,
    )
    for count, size, cpus in ((4, 80, 64), (3, 40, 32))
)


def test_gpus_of_one_name_and_two_sizes_are_told_apart_by_a_feature() -> None:
    cluster = inventory(gpu=(LARGE, SMALL))
    (kind,) = list_kinds(cluster, SiteConfig()).values()
    assert (kind.nodes, kind.constraint) == (4, "80gb")
    assert describe_excluded_nodes(kind, cluster) == (
        "gpu is the nodes of 4 x a100, a100, 80gb, 64 CPUs, 1000 MiB; left out are 3 of 4 x a100, "
        "a100, 40gb, 32 CPUs, 1000 MiB"
    )
    site = SiteConfig(defaults=PartitionSettings(constraint="new|fast"))
    (kind,) = list_kinds(cluster, site).values()
    assert kind.constraint == "(new|fast)&80gb"


def test_where_no_feature_tells_them_apart_it_is_said() -> None:
    bare = [g.model_copy(update={"features": ()}) for g in (LARGE, SMALL)]
    cluster = inventory(gpu=tuple(bare))
    (kind,) = list_kinds(cluster, SiteConfig()).values()
    assert kind.constraint == ""
    assert "jobs may run there, because no feature distinguishes them" in describe_excluded_nodes(
        kind, cluster
    )


def test_nodes_with_the_same_gpus_and_other_cpus_need_no_feature() -> None:
    cluster = inventory(gpu=(group("a100", 3), group("a100", 2, cpus_per_node=4)))
    (kind,) = list_kinds(cluster, SiteConfig()).values()
    assert (kind.nodes, kind.constraint) == (3, "")
    assert describe_excluded_nodes(kind, cluster).endswith(
        "left out are 2 of 4 x a100, 4 CPUs, 1000 MiB"
    )
    assert describe_excluded_nodes(list_kinds(CLUSTER, SiteConfig())["gpu:a100"], CLUSTER) == ""
