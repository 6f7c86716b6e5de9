"""The workflow: clean, quick to plan at length, and the same bytes as the project's driver."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf import tree

pytest.importorskip("snakemake", reason="the extra 'slurm' is not installed")


def snakemake(*words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *words],
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_lint_is_clean(tmp_path: Path) -> None:
    done = snakemake("--lint", "--config", f"run__root={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Congratulations" in done.stdout + done.stderr


def test_a_thousand_iterations_can_be_planned(tmp_path: Path) -> None:
    start = time.monotonic()
    done = snakemake(
        "-n", "-c2", "--quiet", "rules", "--config", "iterations=1000", f"run__root={tmp_path}"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert counts["train"] == counts["rollout"] == "1000"
    # The benchmark row dag_1000_s has the figure; this only catches a superlinear planner.
    assert time.monotonic() - start < 200


def test_the_profile_comes_after_the_warm_start_and_only_when_asked_for(tmp_path: Path) -> None:
    words = ["-n", "-p", "-c1", "--config", f"run__root={tmp_path}", "run__name=p"]
    asked = snakemake("profile", *words)
    assert asked.returncode == 0, asked.stderr[-2000:]
    out = tmp_path / "p" / "profile.json"
    assert f"-m rlinf.cli profile {tmp_path / 'p'} --out {out}" in asked.stdout
    assert "rule warm_start" in asked.stdout
    assert "rule rollout" not in asked.stdout
    assert "rule profile" not in snakemake(*words, "iterations=1").stdout


def test_the_shipped_workflow_runs_the_embodied_experiment(tmp_path: Path) -> None:
    words = ["experiment=cartpole_ppo", "iterations=1", f"run__root={tmp_path}", "run__name=cp"]
    words += ["rollout__batch=2", "rollout__horizon=16", "evaluate__samples=2"]
    words += ["algorithm__minibatches=1"]
    done = snakemake("-c2", "--config", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "cp"
    assert (run / "it/0000/sync/manifest.json").exists()
    again = snakemake("-n", "-c2", "--config", *words)
    assert "Nothing to be done" in again.stdout + again.stderr
    report = snakemake("--report", str(tmp_path / "snakemake.html"), "--config", *words)
    assert report.returncode == 0, report.stderr[-2000:]
    assert (tmp_path / "snakemake.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_longer_schedule_replaces_what_a_shorter_one_made(tmp_path: Path) -> None:
    """With a falling learning rate the updates of 1 of 1 and 1 of 2 iterations differ."""
    words = ["experiment=cartpole_ppo", f"run__root={tmp_path}", "run__name=cp"]
    words += ["rollout__batch=2", "rollout__horizon=16", "evaluate__samples=2"]
    words += ["algorithm__minibatches=1", "algorithm__schedule=linear"]
    assert snakemake("-c2", "--config", *words, "iterations=1").returncode == 0
    manifest = tmp_path / "cp/it/0000/train/manifest.json"
    short = manifest.read_text()
    planned = snakemake("-n", "-c2", "--config", *words, "iterations=2")
    assert planned.returncode == 0, planned.stderr[-2000:]
    assert manifest.read_text() == short, "a dry run must not touch anything"
    done = snakemake("-c2", "--config", *words, "iterations=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(manifest.read_text())["key"] != json.loads(short)["key"]
