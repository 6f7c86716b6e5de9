"""The checks of a job, in processes of this machine: they meet, measure and report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pipeline.commands.experiment import compose_words, prepare_run
from pipeline.commands.node_probe import (
    FILES_CHECK,
    NODE_LINK,
    SOCKET_CHECK,
    STAGES_CHECK,
    NodeProbe,
    ProbeTask,
    RankReport,
    partition_link,
)
from pipeline.commands.partition_check import read_reports, time_server
from pipeline.resources import ClusterConfig
from rlinf import package_paths
from rlinf.artifacts import MANIFEST
from rlinf.channels.process_group import GROUP_VARIABLE, ProcessGroupInfo
from stages.layout import CONFIG_FILE
from tests.conftest import TINY

LOCAL = ClusterConfig(launcher="slurm", network_interface="lo")


def task(folder: Path, job: int, **values: object) -> ProbeTask:
    made = ProbeTask(
        folder=folder, job=job, num_jobs=2, tasks_per_node=2, nodes=1, gpus_per_node=0
    ).model_copy(update=values)
    made.job_folder.mkdir()
    (made.job_folder / "task.json").write_text(made.model_dump_json())
    return made


def start(made: ProbeTask, rank: int, size: int) -> subprocess.Popen[bytes]:
    env = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    env |= {GROUP_VARIABLE: f"job-{made.job}", "RLINF_INTERFACE": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.commands.node_probe", str(made.job_folder / "task.json")],
        cwd=package_paths.ROOT,
        env={**os.environ, **env},
    )


def test_two_jobs_measure_their_links_the_filesystem_and_the_clock(tmp_path: Path) -> None:
    pair, single = task(tmp_path, 0), task(tmp_path, 1, tasks_per_node=1)
    with time_server(tmp_path, LOCAL):
        processes = [start(pair, 0, 2), start(pair, 1, 2), start(single, 0, 1)]
        assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    (first, second), (other,) = read_reports(pair), read_reports(single)
    for report in (first, second, other):
        assert report.errors == {}
        assert report.step == ""
        assert report.round_trip_s is not None
        assert report.clock_difference_s is not None
        assert abs(report.clock_difference_s) <= report.round_trip_s
        assert report.server_interface == "lo"
        assert report.versions["python"] == sys.version.split()[0]
    for report in (first, second):
        assert report.links[NODE_LINK].backend == "gloo"
        assert report.links[NODE_LINK].bytes_per_s > 1e7
    name = partition_link(1)
    assert first.links[name].bytes_per_s > 1e7
    assert other.links[name].bytes_per_s > 1e7
    assert first.write_bytes_per_s
    assert first.read_bytes_per_s
    assert first.visible_here_s is not None
    assert set(first.disks) >= {"/dev/shm"}
    assert not second.disks
    assert (pair.job_folder / MANIFEST).exists()


def test_two_nodes_read_each_others_files(tmp_path: Path) -> None:
    """The processes are two nodes of one process each, as their task has it."""
    made = task(tmp_path, 0, nodes=2, tasks_per_node=1, num_jobs=1)
    with time_server(tmp_path, LOCAL):
        processes = [start(made, 0, 2), start(made, 1, 2)]
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    first, second = read_reports(made)
    assert first.errors == second.errors == {}
    assert first.write_bytes_per_s
    assert second.read_bytes_per_s
    assert first.visible_here_s is not None
    assert second.visible_node_s is not None


def test_a_check_that_fails_is_reported_and_the_next_one_follows(tmp_path: Path) -> None:
    made = task(tmp_path, 0, tasks_per_node=1, num_jobs=1)
    probe = NodeProbe(made, ProcessGroupInfo(), RankReport(rank=0, local_rank=0, host="here"))
    probe.run()  # without a server
    (report,) = read_reports(made)
    assert set(report.errors) == {SOCKET_CHECK, FILES_CHECK}
    assert "cannot be read on this node" in report.errors[SOCKET_CHECK]
    assert report.disks


def test_the_stages_of_a_run_are_tried_up_to_the_training_step(tmp_path: Path) -> None:
    words = [word.removeprefix("++") for word in TINY]
    words += ["experiment=arithmetic_grpo", f"run.root={tmp_path}", "log.trackers=[]"]
    run = prepare_run(compose_words([*words, "sft.max_steps=0"]))
    made = task(tmp_path, 0, tasks_per_node=1, num_jobs=1, config=run.folder / CONFIG_FILE)
    report = RankReport(rank=0, local_rank=0, host="here")
    NodeProbe(made, ProcessGroupInfo(), report).check_stages()
    (report,) = read_reports(made)
    assert list(report.stages)[-1] == "train"
    assert "rollout" in report.stages
    assert report.engine_load_s is not None
    assert (run.folder / "it/0000/train/manifest.json").exists()


def test_the_stage_that_fails_is_named(tmp_path: Path) -> None:
    made = task(tmp_path, 0, tasks_per_node=1, num_jobs=1, config=tmp_path / "none.yaml")
    probe = NodeProbe(made, ProcessGroupInfo(), RankReport(rank=0, local_rank=0, host="here"))
    probe.run()
    (report,) = read_reports(made)
    assert "none.yaml: no such file" in report.errors[STAGES_CHECK]
