"""An inventory survives its file, names what is wrong in one, and tells what changed."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlinf.errors import InputError, PlanError
from slurm.inventory import Inventory, NodeGroup, PartitionInventory, load_inventory
from slurm.records import AccountingLimits, Association, QosLimits
from slurm.site import PartitionSettings, SiteConfig

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def cluster(*groups: NodeGroup, limits: AccountingLimits | None = None, **rules: Any) -> Inventory:
    """One partition ``gpu``."""
    partition = PartitionInventory(name="gpu", groups=groups, **{"time_limit_min": 60, **rules})
    return Inventory(
        schema_version=1,
        created_at=NOW,
        slurm_version="23.11.4",
        partitions={"gpu": partition},
        limits=limits,
    )


A100 = NodeGroup(
    count=4, gpu_type="a100", gpus_per_node=4, cpus_per_node=64, mem_mb_per_node=512000
)

words = st.text(string.ascii_lowercase + string.digits + "_-.", min_size=1, max_size=8)
amounts = st.integers(0, 10**6)
perhaps = st.none() | amounts
positive = st.none() | st.floats(1e-6, 1e15)
tables = st.dictionaries(words, amounts, max_size=3)
lists = st.lists(words, max_size=3).map(tuple)


@st.composite
def groups(draw: st.DrawFn) -> NodeGroup:
    count, per_node = draw(st.integers(1, 50)), draw(st.integers(0, 8))
    down = draw(st.integers(0, count))
    return NodeGroup(
        count=count,
        gpu_type=draw(words) if per_node else "",
        gpus_per_node=per_node,
        cpus_per_node=draw(amounts),
        mem_mb_per_node=draw(amounts),
        features=draw(lists),
        nodes=draw(st.just(()) | st.just(tuple(f"n{i}" for i in range(count)))),
        idle_nodes=draw(st.integers(0, count - down)),
        idle_gpus=draw(st.integers(0, (count - down) * per_node)),
        down_nodes=down,
        gpu_model=draw(words),
        gpu_memory_gib=draw(positive),
        intra_node_bandwidth_bytes_per_s=draw(positive),
        inter_node_bandwidth_bytes_per_s=draw(positive),
        cost_per_gpu_hour=draw(positive),
        slowdown=draw(st.floats(0.01, 100)),
    )


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    partitions = {}
    for name in draw(st.lists(words, max_size=3, unique=True)):
        partitions[name] = PartitionInventory(
            name=name,
            groups=tuple(
                draw(st.lists(groups(), max_size=3, unique_by=lambda group: group.description))
            ),
            time_limit_min=draw(perhaps),
            preempt_mode=draw(st.sampled_from(["OFF", "REQUEUE", "GANG,SUSPEND"])),
            priority_tier=draw(amounts),
            is_available=draw(st.booleans()),
            is_default=draw(st.booleans()),
            qos=draw(words),
            allowed_qos=draw(st.none() | lists),
            denied_accounts=draw(lists),
            max_nodes_per_job=draw(perhaps),
            queued_jobs=draw(amounts),
            queued_gpus=draw(amounts),
        )
    qos = st.builds(QosLimits, preempts=lists, max_wall_min=perhaps, max_tres_per_user=tables)
    association = st.builds(Association, cluster=words, account=words, qos=lists, max_jobs=perhaps)
    limits = st.builds(
        AccountingLimits,
        qos=st.dictionaries(words, qos, max_size=2),
        associations=st.lists(association, max_size=2).map(tuple),
    )
    return Inventory(
        schema_version=1,
        created_at=draw(st.datetimes(timezones=st.just(UTC))),
        slurm_version=draw(words),
        partitions=partitions,
        limits=draw(st.none() | limits),
    )


@given(inventories())
def test_text_and_back(inventory: Inventory) -> None:
    assert Inventory.model_validate(json.loads(inventory.to_json())) == inventory


def test_a_saved_inventory_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"
    inventory = cluster(A100, limits=AccountingLimits(qos={"normal": QosLimits()}))
    inventory.save(path)
    assert load_inventory(path) == inventory
    assert list(tmp_path.iterdir()) == [path]


def spoil(change: Callable[[Any], Any]) -> str:
    values = json.loads(cluster(A100).to_json())
    change(values)
    return json.dumps(values)


def group_of(values: Any) -> Any:
    return values["partitions"]["gpu"]["groups"][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "expected an inventory"),
        ("{}", "schema_version: Field required"),
        (spoil(lambda v: v.pop("partitions")), ": partitions: Field required"),
        (spoil(lambda v: v.update(schema_version=2)), "schema_version: 2; this program reads 1"),
        (spoil(lambda v: v.update(taken="noon")), ": taken: "),
        (
            spoil(lambda v: v.update(partition={})),
            "partition: unknown key; did you mean 'partitions'",
        ),
        (
            spoil(lambda v: group_of(v).pop("count")),
            r"partitions\.gpu\.groups\.0\.count: Field required",
        ),
        (
            spoil(lambda v: group_of(v).update(down_nodes=-1)),
            r"partitions\.gpu\.groups\.0\.down_nodes: .*greater than or equal to 0 \(got -1\)",
        ),
        (
            spoil(lambda v: group_of(v).update(gpu_memory_gib=0)),
            r"groups\.0\.gpu_memory_gib: .*greater than 0",
        ),
        (spoil(lambda v: group_of(v).update(idle_nodes=5)), "5 idle and 0 down nodes of 4"),
        (spoil(lambda v: group_of(v).update(idle_gpus=17)), "17 idle GPUs"),
        (spoil(lambda v: group_of(v).update(nodes=["a"])), "1 names for 4 nodes"),
        (
            spoil(lambda v: v["partitions"]["gpu"].update(queued_jobs=-3)),
            r"partitions\.gpu\.queued_jobs: .*\(got -3\)",
        ),
        (spoil(lambda v: v["partitions"]["gpu"].update(name="cpu")), "gpu.name is 'cpu'"),
        (
            spoil(lambda v: v["partitions"]["gpu"]["groups"].append(group_of(v))),
            "two groups of equal nodes",
        ),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "inventory.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message) as caught:
        load_inventory(path)
    assert str(path) in str(caught.value)


def test_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no file .*rlinf inventory --save"):
        load_inventory(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot be read"):
        load_inventory(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot be read"):
        load_inventory(tmp_path / "binary")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    cluster(A100).save(tmp_path / "new" / "inventory.json")
    with pytest.raises(InputError, match=r"choose another file"):
        cluster(A100).save(tmp_path / "new" / "inventory.json" / "inventory.json")


def test_preemption_by_priority_or_by_qos() -> None:
    preempting = AccountingLimits(qos={"high": QosLimits(preempts=("low",))})
    peaceful = AccountingLimits(qos={"normal": QosLimits()})
    assert not cluster(A100, preempt_mode="OFF", limits=preempting).is_preemptible("gpu")
    assert not cluster(A100, preempt_mode="GANG", limits=preempting).is_preemptible("gpu")
    assert cluster(A100, preempt_mode="REQUEUE", limits=preempting).is_preemptible("gpu")
    assert cluster(A100, preempt_mode="GANG,SUSPEND", limits=preempting).is_preemptible("gpu")
    assert not cluster(A100, preempt_mode="REQUEUE", limits=peaceful).is_preemptible("gpu")
    assert cluster(A100, preempt_mode="REQUEUE", limits=None).is_preemptible("gpu")


def test_data_sheets_fill_in_what_the_site_does_not_say() -> None:
    (group,) = cluster(A100).with_site_settings(SiteConfig()).partitions["gpu"].groups
    assert (group.gpu_model, group.gpu_memory_gib) == ("a100-40gb", 40)
    assert group.intra_node_bandwidth_bytes_per_s is None


def test_the_site_file_comes_first() -> None:
    result = PartitionSettings(
        gpu_model="a100-sxm4-80gb",
        gpu_memory_gib=79.2,
        intra_node_bandwidth_gb_per_s=300,
        inter_node_bandwidth_gb_per_s=25,
        cost_per_gpu_hour=1.5,
        slowdown=1.2,
    )
    described = cluster(A100).with_site_settings(SiteConfig(partitions={"gpu": result}))
    (group,) = described.partitions["gpu"].groups
    assert group.gpu_model == "a100-80gb-sxm"
    assert group.gpu_memory_gib == 79.2
    assert group.intra_node_bandwidth_bytes_per_s == 300e9
    assert group.inter_node_bandwidth_bytes_per_s == 25e9
    assert (group.cost_per_gpu_hour, group.slowdown) == (1.5, 1.2)
    again = described.with_site_settings(SiteConfig())
    assert again == cluster(A100).with_site_settings(SiteConfig()), (
        "nothing of the former site is left"
    )


def test_the_site_names_a_gpu_only_where_gres_leaves_it_open() -> None:
    h100, untyped = (A100.model_copy(update={"gpu_type": kind}) for kind in ("h100", ""))
    cpu = A100.model_copy(update={"gpu_type": "", "gpus_per_node": 0})
    site = SiteConfig(defaults=PartitionSettings(gpu_model="a100-80gb-pcie", gpu_memory_gib=80))
    found = cluster(h100, untyped, cpu).with_site_settings(site).partitions["gpu"].groups
    assert [group.gpu_model for group in found] == ["h100-sxm", "a100-80gb-pcie", ""]
    assert found[2].gpu_memory_gib is None


def test_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError, match="timezone"):
        Inventory(
            schema_version=1,
            created_at=datetime(2026, 1, 2),
            slurm_version="23.11.4",
            partitions={},
        )
