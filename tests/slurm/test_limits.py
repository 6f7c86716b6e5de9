"""What a cluster cannot give is refused before submission, with the key and a hint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlinf.errors import PlanError
from slurm.discovery import build_partitions
from slurm.inventory import NodeGroup, PartitionInventory
from slurm.job_limits import check_resources
from slurm.jobs import JobResources
from slurm.site import load_site


def partition(
    name: str, gpu: str = "", limit: int | None = None, **more: Any
) -> PartitionInventory:
    """A partition of two nodes with four GPUs each, or of one node without a GPU."""
    count, gpus = (2, 4) if gpu else (1, 0)
    group = NodeGroup(
        count=count, gpu_type=gpu, gpus_per_node=gpus, cpus_per_node=8, mem_mb_per_node=16000
    )
    return PartitionInventory(name=name, groups=(group,), time_limit_min=limit, **more)


CLUSTER = {
    "a100": partition("a100", "a100", 1440, is_default=True),
    "cpu": partition("cpu"),
    "h100": partition("h100", "h100", 60),
    "old": partition("old", "v100", is_available=False),
}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"partition": "a10"}, "no partition 'a10' here; did you mean 'a100'"),
        ({"partition": "a100", "gpus_per_node": 1, "gpu_type": "h100"}, "no GPU 'h100'"),
        ({"partition": "a100", "gpus_per_node": 5}, "5 requested, nodes of .*'a100' have 4"),
        ({"partition": "cpu", "gpus_per_node": 1}, "has no GPUs"),
        ({"partition": "a100", "time_limit_min": 2000}, "allows 1440"),
        ({"nodes": 3}, "3 requested, partition 'a100' has 2"),
        ({"cpus_per_task": 3, "tasks_per_node": 4}, "12 requested"),
        ({"mem_mb": 99999}, "99999 requested"),
        ({"partition": "old"}, r"partition 'old' is not up and starts no jobs; choose another"),
        ({"partition": "a100,hundred"}, "no partition 'hundred' here"),
        ({"partition": "a100, old"}, "partition 'old' is not up"),
        ({"partition": "a100,h100", "time_limit_min": 90}, "partition 'h100' allows 60"),
        ({"partition": "a100,h100", "gpus_per_node": 1, "gpu_type": "a100"}, "'h100' has no GPU"),
        ({"partition": "a100,"}, "no partition '' here"),
    ],
)
def test_impossible_requests(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_resources(JobResources(**wanted), CLUSTER, "stages.train")


def test_a_possible_request_passes() -> None:
    check_resources(
        JobResources("a100", nodes=2, gpus_per_node=4, gpu_type="a100", time_limit_min=60),
        CLUSTER,
        "stages.train",
    )


def test_a_list_of_partitions_passes_where_each_can() -> None:
    check_resources(
        JobResources("a100,h100", nodes=2, gpus_per_node=4, time_limit_min=60),
        CLUSTER,
        "stages.train",
    )


GPU = "PartitionName=gpu Default=YES MaxTime=1-00:00:00 State=UP\n"
UNLIKE = (
    "".join(f"big{n}|gpu|idle|64|500000|gpu:a100:8|\n" for n in range(2)),
    "".join(f"mix{n}|gpu|idle|32|250000|gpu:a100:4,gpu:mig:2|\n" for n in range(10)),
)


@pytest.mark.parametrize("lines", [UNLIKE, UNLIKE[::-1]])
def test_nodes_must_have_all_that_is_asked_at_once_in_whatever_order_they_are_told(
    lines: Sequence[str],
) -> None:
    unlike = build_partitions("".join(lines), GPU)
    mixed, big = unlike["gpu"].groups
    assert (mixed.gpus, big.gpus) == ({"a100": 4, "mig": 2}, {"a100": 8})
    small = {"gpus_per_node": 4, "gpu_type": "a100"}
    possible: dict[str, Any]
    request: dict[str, Any]
    for possible in (
        {**small, "nodes": 12, "cpus_per_task": 32},
        {**small, "nodes": 2, "cpus_per_task": 64, "mem_mb": 500000},
        {"nodes": 2, "gpus_per_node": 8, "gpu_type": "a100"},
        {"nodes": 12, "gpus_per_node": 6},
        {"nodes": 10, "gpus_per_node": 2, "gpu_type": "mig"},
    ):
        check_resources(JobResources(**possible), unlike, "stages.train")
    for request, words in (
        (
            {"nodes": 3, "gpus_per_node": 8},
            r"3 requested with 8 GPUs, 1 CPUs on each,.* has 2 such",
        ),
        ({**small, "nodes": 12, "cpus_per_task": 64}, "12 requested with 4 a100, 64 CPUs on each"),
        ({**small, "nodes": 3, "mem_mb": 300000}, r"300000 MiB on each, .*gpu' has 2 such nodes"),
        ({"gpus_per_node": 2, "gpu_type": "mig", "mem_mb": 300000}, "has 0 such nodes"),
        ({"nodes": 3, "gpus_per_node": 8}, r"2 with 8 x a100, 64 CPUs, 500000 MiB"),
        ({**small, "gpus_per_node": 9}, r"gpus: 9 requested, nodes of partition 'gpu' have 8"),
        ({"cpus_per_task": 65}, r"cpus: 65 requested, nodes of partition 'gpu' have 64"),
    ):
        with pytest.raises(PlanError, match=words):
            check_resources(JobResources(**request), unlike, "stages.train")


@pytest.mark.parametrize(("sizes", "most"), [("2", 2), ("UNLIMITED", None)])
def test_a_job_of_more_nodes_than_its_partition_allows_is_refused(
    sizes: str, most: int | None
) -> None:
    nodes = "".join(f"n{n}|gpu|idle|8|16000|(null)|\n" for n in range(4))
    partitions = build_partitions(nodes, f"PartitionName=gpu Default=YES MaxNodes={sizes}\n")
    assert partitions["gpu"].max_nodes_per_job == most
    check_resources(JobResources(nodes=2), partitions, "stages.train")
    if most is not None:
        with pytest.raises(PlanError, match=r"nodes: 4 requested, partition 'gpu' allows a job 2"):
            check_resources(JobResources(nodes=4), partitions, "stages.train")


def test_the_settings_of_a_list_of_partitions_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(
        "defaults: {account: x}\n"
        "partitions: {a100: {setup: [module load cuda]}, h100: {setup: [module load cuda]}, "
        "spot: {qos: low}}"
    )
    site = load_site(path)
    assert site.settings_for("a100,h100") == site.settings_for("a100")
    with pytest.raises(PlanError, match=r"a100,spot needs the same settings.*qos is None"):
        site.settings_for("a100,spot")


def test_example_sites_are_valid() -> None:
    folder = Path(__file__).parents[2] / "slurm" / "sites"
    sites = {path.name: load_site(path) for path in folder.glob("*.yaml")}
    assert len(sites) >= 2
    modules = sites["example-modules.yaml"]
    assert modules.settings_for("a100").account == "my-project", "defaults hold for every partition"
    assert modules.settings_for("preempt").signal_delay_s == 60


def test_a_misspelt_site_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("defaults: {acount: x}")
    with pytest.raises(PlanError, match=r"defaults\.acount.*did you mean 'account'"):
        load_site(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_model: h1000", r"partitions\.gpu\.gpu_model: unknown GPU 'h1000'; did you mean 'h"),
        ("gpu_model: tpu", "unknown GPU 'tpu'; valid: a100-40gb, a100-80gb-pcie"),
        ("gpu_memory_gib: 0", r"gpu_memory_gib: .*greater than 0"),
        ("intra_node_bandwidth_gb_per_s: -1", r"intra_node_bandwidth_gb_per_s: .*greater than 0"),
        ("inter_node_bandwidth_gb_per_s: .inf", r"inter_node_bandwidth_gb_per_s: .*finite"),
        ("cost_per_gpu_hour: free", r"cost_per_gpu_hour: .*number"),
        ("intra_node_bandwidth: 3", "did you mean 'intra_node_bandwidth_gb_per_s'"),
    ],
)
def test_wrong_hardware_in_a_site_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"partitions: {{gpu: {{{text}}}}}")
    with pytest.raises(PlanError, match=message) as caught:
        load_site(path)
    assert str(path) in str(caught.value)


def test_hardware_is_no_part_of_a_jobs_resources(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("defaults: {account: x, gpu_model: h100, gpu_memory_gib: 80}")
    resources = JobResources(**load_site(path).settings_for("gpu").resource_arguments())
    assert resources.account == "x"
    assert resources.gpu_type is None
