"""The workflow: clean, quick to plan at length, and the same bytes as the project's driver."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.commands.experiment import compose, run_experiment
from rlinf import package_paths
from tests.pipeline.helpers import contents

pytest.importorskip("snakemake", reason="the extra 'slurm' is not installed")


def snakemake(*words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *words],
        cwd=package_paths.ROOT,
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


def test_a_dry_run_fits_on_a_screen_and_starts_few_processes(tmp_path: Path) -> None:
    done = snakemake("-n", "-c2", "--config", f"run__root={tmp_path}")
    assert done.returncode == 0, done.stderr[-2000:]
    output = (done.stdout + done.stderr).splitlines()
    assert len(output) <= 100
    (total,) = {int(line.split()[1]) for line in output if line.startswith("total ")}
    assert total <= 40


def test_one_job_can_be_a_whole_iteration(tmp_path: Path) -> None:
    """The same bytes as with a job for each stage; a run is gone on with, and reported, by name."""
    words = ["experiment=cartpole_ppo", "iterations=2", f"run__root={tmp_path}"]
    words += [
        "rollout={batch_size: 2, horizon: 16}",
        "evaluate={samples: 2}",
        "algorithm__minibatches=1",
    ]
    done = snakemake("-c2", "--config", *words, "run__name=whole", "jobs=iteration")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rule rollout" not in done.stdout + done.stderr
    run_experiment(compose(["experiment=cartpole_ppo", *overrides(tmp_path)]))
    assert contents(tmp_path / "whole") == contents(tmp_path / "stages")
    (tmp_path / "whole" / "report" / "report.html").unlink()
    again = snakemake("-c2", "--config", f"run={tmp_path / 'whole'}")
    assert again.returncode == 0, again.stderr[-3000:]
    assert (tmp_path / "whole" / "report" / "report.html").exists()
    refused = snakemake("-n", "--config", f"run={tmp_path / 'whole'}", "iterations=3")
    assert refused.returncode
    assert "remove iterations" in refused.stdout + refused.stderr


def test_each_rule_has_the_processes_of_its_own_stage(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("stages: {train: {processes: 2, speed_weights: [1, 3]}}")
    words = ["experiment=cartpole_ppo", "iterations=1", f"run__root={tmp_path}", "run__name=two"]
    words += ["rollout={batch_size: 2, horizon: 16}", "evaluate={samples: 2}", f"plan={plan}"]
    done = snakemake("-c2", "--config", *words, "algorithm__minibatches=1")
    assert done.returncode == 0, done.stderr[-3000:]
    worlds = {
        stage: json.loads((tmp_path / "two/it/0000" / stage / "manifest.json").read_text())["world"]
        for stage in ("rollout", "train")
    }
    assert worlds == {"rollout": 1, "train": 2}


def overrides(root: Path) -> list[str]:
    return [
        "iterations=2",
        f"++run.root={root}",
        "++run.name=stages",
        "++rollout.batch_size=2",
        "++rollout.horizon=16",
        "++evaluate.samples=2",
        "++algorithm.minibatches=1",
    ]


def test_the_profile_comes_after_sft_and_only_on_request(tmp_path: Path) -> None:
    words = ["-n", "-p", "-c1", "--quiet", "host"]  # instead of the default profile's
    words += ["--config", f"run__root={tmp_path}", "run__name=p"]
    request = snakemake("profile", *words)
    assert request.returncode == 0, request.stderr[-2000:]
    out = tmp_path / "p" / "profile.json"
    assert f"-m rlinf profile {tmp_path / 'p'} --out {out}" in request.stdout
    assert "rule sft" in request.stdout
    assert "rule rollout" not in request.stdout
    assert "rule profile" not in snakemake(*words, "iterations=1").stdout


def test_the_shipped_workflow_runs_the_embodied_experiment(tmp_path: Path) -> None:
    words = ["experiment=cartpole_ppo", "iterations=1", f"run__root={tmp_path}", "run__name=cp"]
    words += ["rollout__batch_size=2", "rollout__horizon=16", "evaluate__samples=2"]
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
@pytest.mark.timeout(900)
def test_added_iterations_keep_what_is_there_and_other_settings_are_refused(tmp_path: Path) -> None:
    """With a falling learning rate, whose course is frozen at the first start."""
    words = ["experiment=cartpole_ppo", f"run__root={tmp_path}", "run__name=cp"]
    words += ["rollout__batch_size=2", "rollout__horizon=16", "evaluate__samples=2"]
    words += ["algorithm__minibatches=1", "optimizer__schedule=linear"]
    assert snakemake("-c2", "--config", *words, "iterations=1").returncode == 0
    manifest = tmp_path / "cp/it/0000/train/manifest.json"
    short = manifest.read_text()
    done = snakemake("-c2", "--config", *words, "iterations=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert manifest.read_text() == short
    before = sorted(path for path in tmp_path.rglob("*") if ".snakemake" not in path.parts)
    refused = snakemake("-c2", "--config", *words, "iterations=2", "optimizer__lr=0.5")
    assert refused.returncode == 65
    assert "optimizer.lr: " in refused.stderr
    after = sorted(path for path in tmp_path.rglob("*") if ".snakemake" not in path.parts)
    assert after == before
    again = snakemake("-c2", "--config", *words, "iterations=2", "optimizer__lr=0.5", "redo=1")
    assert again.returncode == 0, again.stderr[-3000:]
    assert list(tmp_path.glob("cp/archive/*/it/0000/train/manifest.json"))
    assert json.loads(manifest.read_text())["key"] != json.loads(short)["key"]
