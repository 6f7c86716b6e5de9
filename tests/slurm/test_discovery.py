"""Answers of several Slurm versions become the same inventory.

``samples/22.05-inventory-*`` were recorded on the dev cluster, with reservations, a drained node,
limits and waiting jobs made for it. The answers of other versions below are written by hand after
those versions' manual pages; no cluster of them was at hand.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlinf.errors import SlurmError
from slurm import discovery, records
from slurm.client import SlurmClient
from slurm.discovery import SlurmOutput, build_inventory, group_nodes
from slurm.inventory import Inventory
from slurm.records import PartitionNode, PendingDemand
from tests.slurm.clusters import large_cluster

SAMPLES = Path(__file__).parent / "samples"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

SINFO = """\
g1|gpu|mixed|64|512000|gpu:a100:4{socket}|ib,hbm80g
g2|gpu|idle|64|512000|gpu:a100:4{socket}|ib,hbm80g
g3|gpu|idle~|64|512000|gpu:a100:4{socket}|cloud,hbm80g
g4|gpu|{broken}|64|512000|gpu:a100:4{socket}|ib,hbm80g
c1|cpu|idle|128|256000|(null)|(null)
"""
PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ml,vision AllowQos=ALL AllocNodes=ALL Default=YES \
QoS=gpu-part DefaultTime=01:00:00 {more}Hidden=NO MaxNodes=16 MaxTime=2-00:00:00 MinNodes=0 LLN=NO \
MaxCPUsPerNode=UNLIMITED {sockets}Nodes=g[1-4] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO \
ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=256 TotalNodes=4 \
SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED {tres}
PartitionName=cpu AllowGroups=ALL DenyAccounts=guest DenyQos=low,lower AllocNodes=ALL Default=NO \
QoS=N/A DefaultTime=NONE {more}Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO \
MaxCPUsPerNode=UNLIMITED {sockets}Nodes=c1 PriorityJobFactor=1 PriorityTier=1 RootOnly=NO \
ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=128 \
TotalNodes=1 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED {tres}
"""
USAGE = (
    "NodeName=g1 Arch=x86_64 CPUAlloc=8 CPUTot=64 Gres=gpu:a100:4 {used}NodeAddr=g1 "
    "Version={version} OS=Linux 4.18.0 #1 SMP RealMemory=512000 State=MIXED Partitions=gpu "
    "CfgTRES=cpu=64,mem=500G,billing=64,gres/gpu=4 AllocTRES=cpu=8,mem=64G,gres/gpu=3 \n"
    "NodeName=c1 Arch=x86_64 CPUAlloc=0 CPUTot=128 Gres=(null) State=IDLE AllocTRES= CapWatts=n/a\n"
)


def pending(per_node: str, whole: str = "cpu=8,mem=8G,node=2,billing=8,gres/gpu=8") -> str:
    """Two waiting jobs, one for both partitions; and some that do not wait for nodes."""
    rows = [
        ("gpu", "2", whole, per_node, "Resources"),
        ("gpu,cpu", "1", "cpu=1,mem=1G,node=1,billing=1", "N/A", "(Priority)"),
        ("gpu", "4", whole, per_node, "Dependency"),
        ("gpu", "4", whole, per_node, "(JobHeldUser)"),
        ("cpu", "1", "cpu=1,node=1", "N/A", "BeginTime"),
    ]
    widths = (200, 12, 250, 100, 60)
    lines = ("".join(f"{v:<{w}}" for v, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines) + "\n"


VERSIONS = {
    "20.11.9": SlurmOutput(
        "20.11.9",
        SINFO.format(socket="(S:0-1)", broken="drained*"),
        PARTITIONS.format(
            more="DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 ", sockets="", tres=""
        ),
        USAGE.format(used="GresDrain=N/A GresUsed=gpu:a100:3(IDX:0-1,3) ", version="20.11.9"),
        pending("gpu:4"),
    ),
    "21.08.8": SlurmOutput(
        "21.08.8",
        SINFO.format(socket="(S:0-1)", broken="draining"),
        PARTITIONS.format(more="DisableRootJobs=NO GraceTime=0 ", sockets="", tres="TRES=cpu=1"),
        USAGE.format(used="GresDrain=N/A GresUsed=gpu:a100:3(IDX:0-2) ", version="21.08.8"),
        # Accounting without AccountingStorageTRES=gres/gpu: only the request per node tells.
        pending("gres:gpu:a100:4", "cpu=8,mem=8G,node=2,billing=8"),
    ),
    "23.11.4": SlurmOutput(
        "23.11.4",
        SINFO.format(socket="", broken="inval"),
        PARTITIONS.format(more="GraceTime=0 ", sockets="MaxCPUsPerSocket=UNLIMITED ", tres=""),
        # Without GresUsed: AllocTRES tells.
        USAGE.format(used="", version="23.11.4"),
        pending("gres/gpu:4"),
    ),
    "25.05.1": SlurmOutput(
        "25.05.1",
        SINFO.format(socket="", broken="blocked"),
        PARTITIONS.format(
            more="ExclusiveTopo=NO GraceTime=0 ",
            sockets="MaxCPUsPerSocket=UNLIMITED ",
            tres="TRES=cpu=1 TRESBillingWeights=(null)",
        ),
        USAGE.format(used="GresDrain=N/A GresUsed=gpu:a100:3(IDX:0-2) ", version="25.05.1"),
        pending("gres/gpu:a100:4", "cpu=8,mem=8G,node=2,gres/gpu=8,gres/gpu:a100=8"),
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_says_the_same(version: str) -> None:
    found = build_inventory(VERSIONS[version], NOW)
    assert found.slurm_version == version
    assert found.limits is None
    gpu, cpu = found.partitions["gpu"], found.partitions["cpu"]
    (group,) = gpu.groups
    assert (group.count, group.idle_nodes, group.down_nodes) == (4, 2, 1)
    assert (group.gpu_type, group.gpus_per_node, group.idle_gpus) == ("a100", 4, 2 * 4 + 1)
    assert group.features == ("hbm80g",), "those that all nodes have"
    assert (gpu.time_limit_min, gpu.max_nodes_per_job, gpu.qos) == (2880, 16, "gpu-part")
    assert gpu.is_default
    assert gpu.allowed_accounts == ("ml", "vision")
    assert gpu.allowed_qos is None
    assert (gpu.queued_jobs, gpu.queued_gpus) == (2, 8)
    assert (cpu.queued_jobs, cpu.queued_gpus) == (1, 0)
    assert cpu.denied_accounts == ("guest",)
    assert cpu.denied_qos == ("low", "lower")
    assert cpu.time_limit_min is cpu.max_nodes_per_job is None
    assert cpu.groups[0].gpus_per_node == 0
    assert found.is_preemptible("cpu")
    assert not found.is_preemptible("gpu")


def recorded() -> Inventory:
    text = {
        name: (SAMPLES / f"22.05-inventory-{name}.txt").read_text()
        for name in ("sinfo", "partitions", "nodes", "squeue", "qos", "assoc")
    }
    answers = SlurmOutput("22.05.8", *text.values())
    return build_inventory(answers, NOW)


def test_memory_per_cpu_of_the_cluster_is_that_of_partitions_without_their_own() -> None:
    output = replace(
        large_cluster(4),
        partitions="PartitionName=p0 State=UP\nPartitionName=p1 DefMemPerCPU=900 State=UP\n",
        settings={"DefMemPerCPU": "500", "MaxMemPerCPU": "800", "DefMemPerNode": "UNLIMITED"},
    )
    found = discovery.build_inventory(output, NOW).partitions
    assert (found["p0"].default_mem_mb_per_cpu, found["p0"].max_mem_mb_per_cpu) == (500, 800)
    assert (found["p1"].default_mem_mb_per_cpu, found["p1"].max_mem_mb_per_cpu) == (900, 800)
    unlimited = replace(output, settings={"DefMemPerNode": "UNLIMITED"})
    assert discovery.build_inventory(unlimited, NOW).partitions["p0"].max_mem_mb_per_cpu is None


def test_recorded_cluster() -> None:
    found = recorded()
    assert set(found.partitions) == {"cpu", "a100", "h100", "gpu", "spot"}
    a100 = found.partitions["a100"]
    assert not a100.is_available
    assert a100.time_limit_min == 60
    assert a100.denied_qos == ("high",)
    assert found.partitions["gpu"].allowed_qos == ("normal", "high")
    assert found.partitions["gpu"].max_nodes_per_job == 2
    assert found.partitions["h100"].queued_jobs == 11
    assert found.partitions["h100"].queued_gpus == 88
    assert [name for name in found.partitions if found.is_preemptible(name)] == ["spot"]


def test_recorded_unlike_nodes_are_groups_of_their_own() -> None:
    a100, h100 = recorded().partitions["gpu"].groups
    assert a100.gpu_type == "a100"
    assert a100.nodes == ("a100-1", "a100-2")
    assert (a100.idle_nodes, a100.down_nodes, a100.idle_gpus) == (0, 1, 0), "one full, one draining"
    assert h100.gpu_type == "h100"
    assert (h100.idle_nodes, h100.down_nodes, h100.idle_gpus) == (0, 0, 2), "one half, one reserved"
    assert recorded().partitions["cpu"].groups[0].down_nodes == 1, "under maintenance"


def test_recorded_limits() -> None:
    limits = recorded().limits
    assert limits is not None
    high = limits.qos["high"]
    assert high.preempts == ("normal",)
    assert (high.max_wall_min, high.max_jobs_per_user, high.max_submit_per_user) == (2880, 4, 20)
    assert high.max_tres_per_user == {"gres/gpu": 8}
    assert high.max_tres_per_job == {"gres/gpu": 4, "node": 1}
    assert limits.qos["normal"].max_wall_min is None
    (mine,) = limits.associations
    assert (mine.cluster, mine.account, mine.qos) == ("dev", "root", ("high", "normal"))
    assert (mine.max_jobs, mine.max_submit, mine.max_wall_min) == (10, 50, 720)
    assert mine.max_tres_per_job == {"gres/gpu:h100": 2}


@pytest.mark.parametrize(
    ("state", "fitness"),
    [
        ("idle", "idle"),
        ("idle~", "idle"),
        ("idle*", "down"),
        ("idle$", "down"),
        ("idle-", "busy"),
        ("idle@", "busy"),
        ("idle%", "busy"),
        ("planned", "busy"),
        ("reserved", "busy"),
        ("mixed", "part"),
        ("mixed-", "busy"),
        ("mixed*", "down"),
        ("allocated", "busy"),
        ("allocated+", "busy"),
        ("allocated#", "busy"),
        ("completing", "busy"),
        ("down*", "down"),
        ("drained", "down"),
        ("draining@", "down"),
        ("fail", "down"),
        ("maint", "down"),
        ("inval", "down"),
        ("reboot_issued", "down"),
        ("unknown", "down"),
        ("a_state_of_slurm_30", "down"),
    ],
)
def test_node_states(state: str, fitness: str) -> None:
    (group,) = group_nodes(
        [PartitionNode("n", "p", state, 8, 1000, "gpu:4", "")], {}, whole_nodes=False
    )
    assert group.down_nodes == (fitness == "down")
    assert group.idle_nodes == (fitness == "idle")
    assert group.idle_gpus == (4 if fitness == "idle" else 0), "unknown use counts as full"


def test_the_rest_of_a_node_is_not_offered_where_nodes_are_not_shared() -> None:
    nodes = [PartitionNode("n", "p", "mixed", 8, 1000, "gpu:a100:4", "")]
    used = {"n": {"a100": 1}}
    assert group_nodes(nodes, used, whole_nodes=False)[0].idle_gpus == 3
    assert group_nodes(nodes, used, whole_nodes=True)[0].idle_gpus == 0


def test_a_gpu_feature_parts_nodes_and_a_rack_does_not() -> None:
    def node(name: str, features: str) -> PartitionNode:
        return PartitionNode(name, "p", "idle", 8, 1000, "gpu:a100:4", features)

    nodes = [node("a", "r1,hbm40g"), node("b", "r1,hbm80g"), node("c", "r2,hbm80g")]
    big, small = group_nodes(nodes, {}, whole_nodes=False)
    assert (big.nodes, big.features) == (("b", "c"), ("hbm80g",))
    assert (small.nodes, small.features) == (("a",), ("hbm40g", "r1"))


def test_a_node_of_several_gpu_types_counts_with_the_most_numerous() -> None:
    nodes = [PartitionNode("n", "p", "mixed", 8, 1000, "gpu:v100:2,gpu:a100:6", "")]
    (group,) = group_nodes(nodes, {"n": {"v100": 2, "a100": 1}}, whole_nodes=False)
    assert (group.gpu_type, group.gpus_per_node, group.idle_gpus) == ("a100", 6, 5)


def test_untyped_gpus_in_use() -> None:
    usage = "NodeName=n Gres=gpu:4 GresUsed=gpu:(null):3(IDX:0-2) State=MIXED"
    assert records.parse_usage(usage) == {"n": {"": 3}}


def test_damaged_lines_are_passed_over() -> None:
    assert records.parse_nodes("CLUSTER: x\n\nslurm_load: error|\n") == []
    assert records.parse_partition_records("No partitions\n\n") == []
    assert records.parse_usage("slurm_load_node error\n\n") == {}
    assert records.parse_pending("gpu 2\n\n") == {}
    assert records.parse_qos("a|b\n||||||||\n") == {}
    assert records.parse_associations("a|b\n") == ()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", {}),
        ("cpu=8,mem=16G,gres/gpu:a100=2", {"cpu": 8, "mem": 16384, "gres/gpu:a100": 2}),
        ("mem=512", {"mem": 512}),
        ("mem=62.50G", {"mem": 64000}),
        ("mem=1T,node=4", {"mem": 1 << 20, "node": 4}),
    ],
)
def test_amounts_of_resources(text: str, want: dict[str, int]) -> None:
    assert records.parse_tres(text) == want


def test_a_cluster_of_5000_nodes() -> None:
    found = build_inventory(large_cluster(5000), NOW)
    whole = found.partitions["all"]
    assert whole.nodes == 5000
    assert [(g.gpu_type, g.count) for g in whole.groups] == [
        ("h100", 1250),
        ("a100", 1250),
        ("nvidia_a40", 1250),
        ("", 1250),
    ], "racks do not part nodes"
    h100 = whole.groups[0]
    states = [i // 4 % 4 for i in range(1, 5000, 4)]
    assert h100.idle_nodes == states.count(0)
    assert h100.down_nodes == states.count(3)
    assert h100.idle_gpus == 8 * states.count(0) + 4 * states.count(1)
    assert sum(p.queued_jobs for p in found.partitions.values()) == 2000


class Scripted(SlurmClient):
    """Answers from a table of commands."""

    def __init__(self, *, accounting: bool) -> None:
        super().__init__()
        self.commands: list[tuple[str, ...]] = []
        self.accounting = accounting

    def run(self, *command: str) -> str:
        self.commands.append(command)
        if command[0] == "sacctmgr" and not self.accounting:
            raise SlurmError("You are not running a supported accounting_storage plugin")
        if command[1] == "--version":
            return "slurm-wlm 22.05.8\n"
        if "config" in command:
            return "AccountingStorageEnforce = associations\nClusterName = dev\n"
        known = {
            records.SINFO_NODES: "sinfo",
            records.SCONTROL_PARTITIONS: "partitions",
            records.SCONTROL_NODE_USAGE: "nodes",
            records.SQUEUE_PENDING: "squeue",
            records.SACCTMGR_QOS: "qos",
        }
        return (SAMPLES / f"22.05-inventory-{known.get(command, 'assoc')}.txt").read_text()


def test_each_question_is_asked_once() -> None:
    client = Scripted(accounting=True)
    found = discovery.discover_inventory(client, NOW)
    assert (found.cluster, found.enforces_limits) == ("dev", False)
    assert found == recorded().model_copy(update={"cluster": "dev", "enforces_limits": False})
    queries = [command[0] for command in client.commands if "--version" not in command]
    assert queries == [
        "sinfo",
        "scontrol",
        "scontrol",
        "squeue",
        "sacctmgr",
        "sacctmgr",
        "scontrol",
    ]


def test_without_accounting_there_are_no_limits() -> None:
    found = discovery.discover_inventory(Scripted(accounting=False), NOW)
    assert found.limits is None
    assert found.partitions == recorded().partitions


def test_a_job_for_two_partitions_waits_in_both() -> None:
    text = pending("gres/gpu:4")
    assert records.parse_pending(text) == {"gpu": PendingDemand(2, 8), "cpu": PendingDemand(1, 0)}
