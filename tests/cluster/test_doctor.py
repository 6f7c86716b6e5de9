"""``rlinf doctor --partition`` on a real Slurm: its jobs, a refusal and a queue that stands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf import package_paths
from tests.cluster.test_pools import shown
from tests.conftest import TINY

pytestmark = pytest.mark.cluster


def doctor(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "rlinf", "doctor", "--folder", str(folder), *words],
        cwd=package_paths.ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "COLUMNS": "400"},
    )
    return done.returncode, done.stdout + done.stderr


def test_a_partition_without_gpus_is_fit_for_an_experiment(cluster: Path, tmp_path: Path) -> None:
    experiment = [word.removeprefix("++") for word in TINY if "run.name" not in word]
    words = ["--partition", "cpu", "experiment=arithmetic_grpo", *experiment]
    code, output = doctor(tmp_path, *words)
    assert code == 0, output
    assert "the partition has none; links are measured with Gloo" in output
    assert "GLOO on cpu-1: " in output
    assert "rollout " in output
    assert "train " in output
    assert "the engine started in" in output
    assert output.splitlines()[-1].startswith("fit: no check of")
    assert not list(tmp_path.iterdir())


def test_gpus_that_torch_does_not_see_are_reported_and_links_are_measured(
    cluster: Path, tmp_path: Path
) -> None:
    """The GPUs of the dev cluster are fake."""
    code, output = doctor(tmp_path, "--partition", "a100", "--partition", "h100")
    assert code == 1, output
    assert "Slurm gave 2 per node, and torch" in output
    for link in ("a100-1 and a100-2", "h100-1 and h100-2"):
        assert f"GLOO between {link}" in output
    assert "h100: link to a100" in output
    assert "(Gloo, because torch sees no GPU)" in output
    assert "not fit: " in output.splitlines()[-1]
    # The logs of a failed check stay.
    assert len(list(tmp_path.glob(".doctor-*/logs/*_log.err"))) == 8


def test_a_wrong_partition_a_refused_job_and_a_full_queue_are_findings(
    cluster: Path, tmp_path: Path
) -> None:
    code, output = doctor(tmp_path, "--partition", "h10")
    assert code == 65
    assert "--partition h10: no such partition" in output
    assert "did you mean 'h100'" in output
    site = tmp_path / "site.yaml"
    site.write_text("partitions: {cpu: {qos: nosuchqos}}\n")
    code, output = doctor(tmp_path, "--partition", "cpu", "--site", str(site))
    assert code == 1
    assert "nosuchqos" in output or "Invalid qos" in output
    assert "(--site)" in output
    job = shown(
        *(
            "sbatch",
            "--parsable",
            "-p",
            "cpu",
            "--exclusive",
            "-t",
            "5",
            "-o",
            "/dev/null",
            "--wrap",
            "sleep 120",
        )
    )[0]
    try:
        deadline = time.monotonic() + 30
        while "RUNNING" not in shown("squeue", "-j", job, "-h", "-o", "%T"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        start = time.monotonic()
        code, output = doctor(tmp_path, "--partition", "cpu", "--minutes", "0.5")
        assert time.monotonic() - start < 80
        assert code == 1
        assert "not checked: it has not started" in output
    finally:
        subprocess.run(["scancel", job], check=True)
    assert shown("squeue", "-h", "-n", "doctor-cpu") == []
