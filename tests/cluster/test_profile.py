"""The profile pass on a real Slurm: jobs, waits, unlike nodes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from launchers.launcher import JobSpec
from launchers.slurm_launcher import SlurmLauncher
from pipeline.commands.experiment import compose, prepare_run, run_sft
from pipeline.planning.profile.profile_pass import ProfileOptions, profile_run
from rlinf import package_paths
from slurm.client import SlurmClient
from slurm.jobs import JobResources, JobState
from tests.cluster.test_runs import words

pytestmark = pytest.mark.cluster
SITE = package_paths.ROOT / "slurm" / "devcluster" / "site.yaml"
BUSY = """
import os, sys, time
from pathlib import Path
out = Path(sys.argv[1])
spent, start = time.process_time(), time.perf_counter()
while time.process_time() - spent < 0.5:
    pass
seconds = time.perf_counter() - start
part = out / ("." + os.environ["SLURMD_NODENAME"])
part.write_text(str(seconds))
part.rename(out / os.environ["SLURMD_NODENAME"])
if os.environ["RANK"] == "0":
    while len(list(out.glob("?100-?"))) < 2:
        time.sleep(0.05)
    (out / "manifest.json").touch()
"""


def test_the_slow_node_of_a_mixed_job_is_slow_and_the_other_is_not(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy_of_test.py").write_text(BUSY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{package_paths.ROOT}")
    launcher = SlurmLauncher(SlurmClient(poll_interval_s=0.2), unknown_job_timeout_s=5.0)
    needs = JobResources(
        partition="gpu",
        nodes=2,
        constraint="[h100*1&a100*1]",
        mem_mb=300,
        time_limit_min=5,
        duty_cycle={"a100": 0.1},
    )
    out = tmp_path / "out"
    job = JobSpec("test/busy", (str(out),), out, tmp_path / "logs", needs, "busy_of_test")
    identity = launcher.submit(job)
    deadline = time.monotonic() + 60
    while (status := launcher.poll([identity])[identity]).state.is_active:
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    assert status.state is JobState.DONE, status
    seconds = {p.name[:4]: float(p.read_text()) for p in out.glob("?100-?")}
    # Of a core that others use the other one has more than a tenth too.
    assert seconds["a100"] > 0.5 / 0.1 * 0.95
    assert seconds["a100"] > 1.3 * seconds["h100"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_partition_of_two_kinds_is_measured_kind_by_kind(cluster: Path, tmp_path: Path) -> None:
    wanted = words(tmp_path, "cluster=slurm", f"cluster.site={SITE}", "cluster.poll_interval_s=0.2")
    wanted += ["sft.max_steps=0", "plan.defaults.mem_mb=2000", "plan.defaults.partition=cpu"]
    run = prepare_run(
        compose([f"++{w}" if not w.startswith(("experiment", "cluster=")) else w for w in wanted])
    )
    made = profile_run(run, ProfileOptions(partitions=("gpu",), minutes=3, processes=1), run_sft)
    assert list(made.kinds) == ["gpu:a100", "gpu:h100"]
    for kind in made.kinds.values():
        assert {(p.nodes, p.processes) for p in kind.points if p.succeeded} == {(1, 1), (2, 2)}
        assert {entry.name for entry in kind.overheads} >= {"submission", "startup", "trainer_load"}
        assert kind.overhead_s("submission", 1) < 30
        assert [wait.nodes for wait in kind.waits] == [1, 2]
    duties = {name: kind.duty_cycle for name, kind in made.kinds.items()}
    assert duties == {"gpu:a100": 0.5, "gpu:h100": 1.0}
    imports = [kind.overhead_s("imports", 1) for kind in made.kinds.values()]
    assert imports[0] > 1.3 * imports[1]
    # No two jobs of the pass ran at the same time.
    text = SlurmClient().run(
        *("sacct", "-n", "-P", "-X", "-S", "now-15minutes", "--name", "profile-gpu:a100"),
        *("-o", "Start,End"),
    )
    spans = sorted(line.split("|") for line in text.splitlines())
    assert len(spans) >= 2
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_a_partition_that_is_closed_is_refused(cluster: Path, tmp_path: Path) -> None:
    wanted = [*words(tmp_path, "cluster=slurm"), "--partition", "a10"]
    done = subprocess.run(
        [sys.executable, "-m", "rlinf", "profile", *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 65
    assert "--partition a10: no such partition with nodes that are up" in done.stderr
    assert "did you mean 'a100'?" in done.stderr
