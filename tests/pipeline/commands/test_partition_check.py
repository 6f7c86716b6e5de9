"""``rlinf doctor --partition``: what recorded reports of jobs mean, and the request of a job."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.cli import main
from pipeline.commands.node_probe import (
    FILES_CHECK,
    GPU_CHECK,
    NODE_LINK,
    NODES_LINK,
    SOCKET_CHECK,
    STAGES_CHECK,
    Link,
    LocalDisk,
    ProbeTask,
    RankReport,
    partition_link,
)
from pipeline.commands.partition_check import (
    ProbeJob,
    job_findings,
    job_request,
    smallest_batch,
)
from pipeline.plan import StagePlan
from pipeline.planning.profile.device_kinds import DeviceKind, list_kinds
from pipeline.run import collect_provenance
from rlinf.config import RunConfig, validate
from slurm.inventory import Inventory, NodeGroup, PartitionInventory
from slurm.jobs import JobState, JobStatus
from slurm.site import SiteConfig

H100 = "NVIDIA H100 80GB HBM3"
GIB = 1 << 30


def report(rank: int, **values: Any) -> RankReport:
    """The report of a healthy process on a node with two H100s."""
    link = Link(peer="node-0", backend="nccl", bytes_per_s=200e9)
    between = Link(peer="node-1", backend="nccl", interface="ib0", bytes_per_s=40e9)
    healthy = {
        "rank": rank,
        "local_rank": rank % 2,
        "host": f"node-{rank // 2}",
        "python": "/env/bin/python",
        "versions": collect_provenance()["versions"],
        "import_s": 4.0,
        "gpus": (H100, H100),
        "cuda": "12.8",
        "driver": (f"{H100}, 570.86.15",) * 2,
        "matrix_flops": 700e12,
        "server_address": "tcp://10.0.0.1:4000",
        "server_interface": "ib0",
        "round_trip_s": 0.0004,
        "clock_difference_s": -0.002,
        "links": {NODE_LINK: link, NODES_LINK: between} if rank == 0 else {},
        "write_bytes_per_s": 2e9 if rank == 0 else None,
        "read_bytes_per_s": 3e9 if rank == 2 else None,
        "visible_here_s": 0.02 if rank == 0 else None,
        "visible_node_s": 0.01 if rank == 2 else None,
        "disks": {
            "/tmp": LocalDisk(total_bytes=900 * GIB, free_bytes=800 * GIB, write_bytes_per_s=1e9),
            "/dev/shm": LocalDisk(total_bytes=500 * GIB, free_bytes=499 * GIB),
        },
    }
    return RankReport(**{**healthy, **values})


def job(*changes: dict[str, Any], number: int = 0, **settings: Any) -> ProbeJob:
    """A finished job of two nodes; ``changes`` replace values of the reports, rank by rank."""
    kind = DeviceKind("h100", "h100", 2, 64, 1000000, 2, "h100", "h100-sxm")
    task = ProbeTask(
        folder=Path("/runs/.doctor-1"),
        job=number,
        num_jobs=1,
        tasks_per_node=2,
        nodes=2,
        gpus_per_node=settings.pop("gpus_per_node", 2),
        config=settings.pop("config", None),
    )
    plan = StagePlan(partition="h100", nodes=2, processes=2, gpus=2)
    reports = [report(rank, **(changes[rank] if rank < len(changes) else {})) for rank in range(4)]
    return ProbeJob(
        kind,
        task,
        plan,
        **{"status": JobStatus(JobState.DONE, 0), "reports": reports, **settings},
    )


def findings(*jobs: ProbeJob) -> dict[str, tuple[str, str]]:
    """Level and detail of the findings of the last job by check; of several the first."""
    found = list(job_findings(jobs[-1], jobs))
    assert all(finding.check.startswith("h100: ") for finding in found)
    return {f.check.removeprefix("h100: "): (f.level, f.detail) for f in reversed(found)}


def test_a_healthy_partition_has_no_problem() -> None:
    found = findings(job())
    assert {level for level, _ in found.values()} == {"ok"}
    assert found["matrix rate"][1].endswith("71% of the data sheet of h100-sxm")
    assert "driver 570.86.15" in found[GPU_CHECK][1]
    assert found[NODE_LINK][1] == "NCCL on node-0: 200.00 GB/s"
    assert found[NODES_LINK][1] == "NCCL between node-0 and node-1 by ib0: 40.00 GB/s"
    assert found[SOCKET_CHECK][1].endswith("tcp://10.0.0.1:4000 by ib0; round trip 0.4 ms")
    assert found["rename"][1] == "other nodes see it after 0.02 s"
    assert "/tmp" not in found["clock"][1]


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"gpus": (), "cuda": ""}, "built without CUDA) sees 0; driver: NVIDIA H100 80GB HBM3"),
        ({"gpus": (), "cuda": ""}, "Install a torch for CUDA"),
        ({"gpus": (), "cuda": "12.8"}, "Update the driver"),
        ({"gpus": (), "cuda": "12.8", "driver": ()}, "so the node has no driver"),
        ({"gpus": (), "cuda": "12.8", "driver": ()}, "bind the driver into the container"),
        ({"gpus": (H100,)}, "Slurm gave 2 per node, and torch"),
    ],
)
def test_a_job_that_does_not_see_its_gpus_is_not_fit(change: dict[str, Any], remedy: str) -> None:
    level, detail = findings(job(*[{**change, "matrix_flops": None}] * 4))[GPU_CHECK]
    assert level == "fail"
    assert remedy in detail


def test_links_without_gpus_say_that_they_are_gloo() -> None:
    link = Link(peer="node-1", backend="gloo", interface="eth0", bytes_per_s=1e9)
    change = {"gpus": (), "cuda": "", "matrix_flops": None, "links": {NODES_LINK: link}}
    level, detail = findings(job(change, *[{**change, "links": {}}] * 3))[NODES_LINK]
    assert level == "ok"
    assert detail.endswith("by eth0: 1.00 GB/s (Gloo, because torch sees no GPU)")
    none = findings(job(*[{"gpus": ()}] * 4, gpus_per_node=0))
    assert none[GPU_CHECK] == ("ok", "the partition has none; links are measured with Gloo")


SLOW = Link(peer="node-1", backend="nccl", interface="eth0", bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("check", "level", "change", "text"),
    [
        ("matrix rate", "warn", {"matrix_flops": 300e12}, "30% of the data sheet"),
        (NODES_LINK, "warn", {"links": {NODES_LINK: SLOW}}, "less than 2. Set cluster.network"),
        (NODES_LINK, "fail", {"errors": {NODES_LINK: "timed out"}}, "timed out (NCCL between"),
        (SOCKET_CHECK, "fail", {"errors": {SOCKET_CHECK: "no answer"}}, "rlinf submit"),
        ("clock", "warn", {"clock_difference_s": 70.0}, "node-0 is 70.0 s behind this machine"),
        ("clock", "warn", {"clock_difference_s": -70.0}, "70.0 s ahead of this machine"),
        (FILES_CHECK, "warn", {"write_bytes_per_s": 1e7}, "take 23 min"),
        (FILES_CHECK, "fail", {"errors": {FILES_CHECK: "no such file"}}, "all nodes share"),
        ("rename", "warn", {"visible_here_s": 20.0}, "after 20.00 s"),
        ("local disk", "warn", {"disks": {"/dev/shm": LocalDisk(
            total_bytes=GIB, free_bytes=GIB >> 4)}}, "rlinf clean"),
        ("imports", "warn", {"import_s": 90.0}, "90 s: each job starts slowly"),
        ("Python", "warn", {"versions": {"python": "3.9.1"}}, "python 3.9.1 on node-0"),
    ],
)  # fmt: skip
def test_each_problem_has_a_remedy(
    check: str, level: str, change: dict[str, Any], text: str
) -> None:
    found = findings(job(change))[check]
    assert found[0] == level
    assert text in found[1]


def test_the_link_between_partitions_is_that_of_the_later_job() -> None:
    link = Link(peer="node-9", backend="nccl", interface="ib0", bytes_per_s=20e9)
    second = job({"links": {partition_link(1): link}}, number=1)
    assert findings(job(), second)["link to h100"][1].startswith("NCCL between node-0 and node-9")
    lonely = job({"errors": {partition_link(1): "waited 60 s"}, "links": {}}, number=1)
    assert findings(job(reports=[]), lonely)["link to h100"][0] == "warn"
    assert findings(job(), lonely)["link to h100"][0] == "fail"


def test_a_job_that_does_not_finish_says_where_it_stopped() -> None:
    queued = job(status=JobStatus(JobState.PENDING, None, "Priority"), reports=[])
    assert list(findings(queued)) == ["job"]
    assert "it has not started (Priority). Give it more time" in findings(queued)["job"][1]
    hanging = job({}, {"step": NODE_LINK}, status=JobStatus(JobState.RUNNING))
    assert f"stopped: rank 1 on node-0 in {NODE_LINK!r}" in findings(hanging)["job"][1]
    dead = job(status=JobStatus(JobState.FAILED, 1, "No module named 'torch'"), reports=[])
    assert findings(dead)["job"][1].endswith("see setup and python_command of the site file")
    refused = job(refusal="sbatch refused the job: Invalid qos specification", reports=[])
    assert findings(refused) == {
        "job": (
            "fail",
            "sbatch refused the job: Invalid qos specification. Set account, qos or constraint "
            "of this partition in the site file (--site)",
        )
    }


def test_the_stages_of_an_experiment_are_reported_with_the_start_of_the_engine() -> None:
    config = Path("/runs/.doctor-1/run-0/config.yaml")
    times = {"stages": {"sft": 1.0, "rollout": 20.0, "train": 5.0}, "engine_load_s": 15.0}
    level, detail = findings(job(times, config=config))[STAGES_CHECK]
    assert level == "ok"
    assert detail.endswith("rollout 20.0 s, train 5.0 s; the engine started in 15.0 s of these")
    failed = job({"errors": {STAGES_CHECK: "CUDA is out of memory"}}, config=config)
    assert findings(failed)[STAGES_CHECK][0] == "fail"


def cluster(**groups: NodeGroup) -> Inventory:
    return Inventory(
        schema_version=1,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        slurm_version="24.05.4",
        partitions={
            name: PartitionInventory(name=name, groups=(group,), time_limit_min=4)
            for name, group in groups.items()
        },
    )


def test_a_job_asks_for_two_processes_on_two_nodes_where_there_are_as_many() -> None:
    gpu = {"gpu_type": "a100", "cpus_per_node": 64, "mem_mb_per_node": 500000}
    cpu = {"cpus_per_node": 64, "mem_mb_per_node": 1000}
    inventory = cluster(
        full=NodeGroup(count=9, gpus_per_node=4, **gpu),
        single=NodeGroup(count=1, gpus_per_node=1, **gpu),
        cpus=NodeGroup(count=3, **cpu),
        one=NodeGroup(count=1, **cpu),
    )
    shapes = {
        name: (plan.nodes, plan.processes, plan.gpus, plan.mem_mb, plan.time_limit_min)
        for name, kind in list_kinds(inventory, SiteConfig()).items()
        for plan in [job_request(kind, 5, inventory)]
    }
    assert shapes == {
        "full": (2, 2, 2, 16000, 4),
        "single": (1, 1, 1, 8000, 4),
        "cpus": (2, 1, 0, 1000, 4),
        "one": (1, 2, 0, 1000, 4),
    }


def test_the_batch_is_halved_while_each_process_has_samples(compose: Any) -> None:
    config = validate(RunConfig, compose("rollout.batch_size=24", "algorithm.minibatches=2"))
    assert smallest_batch(config, 1) == 3
    assert smallest_batch(config, 4) == 6
    assert smallest_batch(config, 16) == 24


def test_wrong_words_end_the_command_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "runs"
    for words, message in (
        (["--partition", "cpu", "--env", "cartpole"], "--env and --partition exclude each other"),
        (["experiment=cartpole_ppo"], "overrides need --env NAME"),
        (["--site", "site.yaml"], "--site site.yaml: it needs --partition NAME"),
        (["--partition", "cpu", "--folder", str(folder)], "this machine has no Slurm"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *words])
        assert ended.value.code, words
        assert message in capsys.readouterr().err
    assert not folder.exists()
