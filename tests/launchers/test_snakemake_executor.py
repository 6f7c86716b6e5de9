"""The executor of Snakemake gives a rule what the drivers give the same stage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_executor_plugin_rlinf import Executor, resources

from launchers.launcher import JobSpec


class Launcher:
    """Notes jobs; ``cpu`` is the cluster's default partition."""

    def __init__(self) -> None:
        self.jobs: list[JobSpec] = []
        self.num_queries = 0
        self.client = self

    def run(self, *command: str) -> str:
        if command[0] == "sinfo":
            return ""
        self.num_queries += 1
        return "PartitionName=gpu Default=NO\nPartitionName=cpu Default=YES\n"

    def submit(self, job: JobSpec) -> str:
        self.jobs.append(job)
        return "1"


def executor(site: Path | None) -> tuple[Any, Launcher]:
    made, launcher = Executor.__new__(Executor), Launcher()
    made._launcher = launcher
    made.workflow = SimpleNamespace(executor_settings=SimpleNamespace(site=site))
    made.logger = SimpleNamespace(info=lambda text: None)
    made.report_job_submission = lambda info: None
    return made, launcher


def rule(folder: Path, **wanted: object) -> Any:
    return SimpleNamespace(
        name="train",
        wildcards=[],
        params={"argv": ["train"]},
        output=[folder / "manifest.json"],
        log=[folder / "train.log"],
        resources=wanted,
    )


def test_a_rule_without_a_partition_has_the_settings_of_the_default_one(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("defaults: {account: team}\npartitions: {cpu: {qos: long}, gpu: {qos: low}}\n")
    made, launcher = executor(site)
    made.run_job(rule(tmp_path))
    made.run_job(rule(tmp_path, slurm_partition="gpu"))
    made.run_job(rule(tmp_path))
    requests = [
        (job.resources.partition, job.resources.account, job.resources.qos) for job in launcher.jobs
    ]
    assert requests == [("cpu", "team", "long"), ("gpu", "team", "low"), ("cpu", "team", "long")]
    assert launcher.num_queries == 1


def test_without_a_site_file_slurm_is_not_asked(tmp_path: Path) -> None:
    made, launcher = executor(None)
    made.run_job(rule(tmp_path))
    assert launcher.jobs[0].resources.partition is None
    assert launcher.num_queries == 0


@pytest.mark.parametrize("expected", ["", "None", None])
def test_a_partition_left_open_is_the_default_one(expected: str | None) -> None:
    assert resources({"slurm_partition": expected}, None, "cpu").partition == "cpu"
