"""The throttle slows a command by what it says, and leaves everything else of it alone."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from launchers.launcher import JobSpec
from launchers.local import LocalLauncher
from launchers.throttle import (
    CPU_CGROUP_ROOT,
    SIGNAL_PERIOD_S,
    current_cpu_cgroup,
    node_duty_cycle,
    run_phase_s,
    throttle_by_signals,
)
from rlinf import package_paths
from rlinf.errors import PlanError
from slurm.jobs import JobResources, JobState
from slurm.site import load_site

QUOTAS_WORK = os.access(CPU_CGROUP_ROOT / current_cpu_cgroup(), os.W_OK)
BUSY = """
import sys, time
start, spent = time.perf_counter(), time.process_time()
while time.process_time() - spent < float(sys.argv[1]):
    pass
print(time.perf_counter() - start)
"""


def throttled(duty: float, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launchers.throttle", str(duty), *command],
        cwd=package_paths.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(not QUOTAS_WORK, reason="no cpu controller of cgroup v1 to write to")
@pytest.mark.parametrize("duty", [0.25, 0.5, 0.8])
def test_each_thread_and_process_of_a_command_has_its_share_of_a_core(duty: float) -> None:
    code = """
import hashlib, subprocess, sys, threading, time
def share():
    start, spent = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < 2.0:
        hashlib.sha256(bytes(1 << 16))
    found = (time.thread_time() - spent) / (time.perf_counter() - start)
    sys.stdout.write(f"{found} ")  # in one piece, beside the other thread
    sys.stdout.flush()
if sys.argv[1] == "first":
    threads = [threading.Thread(target=share) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    subprocess.run([sys.executable, "-c", sys.argv[2], "second", ""], check=True)
else:
    share()
"""
    process = throttled(duty, sys.executable, "-c", code, "first", code)
    shares = [float(line) for line in process.communicate(timeout=60)[0].split()]
    # Less where others want the cores too; now and then one of them is seen with more.
    assert len(shares) == 3
    assert sorted(shares)[1] < duty + 0.15
    assert not list((CPU_CGROUP_ROOT / current_cpu_cgroup()).glob(f"rlinf-{process.pid}*"))


@pytest.mark.parametrize("duty", [0.25, 0.5, 0.8])
def test_without_quotas_a_command_stands_still_for_the_rest_of_the_time(
    duty: float,
) -> None:
    """Counted is how often it is found stopped; where others want the cores too, who stops it and
    lets it go on wakes late, both times."""
    process = subprocess.Popen([sys.executable, "-c", BUSY, "600"], process_group=0)
    thread = threading.Thread(target=throttle_by_signals, args=(process, duty))
    thread.start()
    share = standing(psutil.Process(process.pid))
    process.kill()
    thread.join(30)
    assert share == pytest.approx(1 - duty, abs=0.2)


def test_jobs_of_one_machine_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = []
    for job in range(117, 121):
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        begins.append(run_phase_s())
    begins.sort()
    gaps = [
        after - before
        for before, after in itertools.pairwise([*begins, begins[0] + SIGNAL_PERIOD_S])
    ]
    assert min(gaps) > SIGNAL_PERIOD_S / 10


def standing(process: psutil.Process) -> float:
    """The share of the time in which a process is found stopped."""
    chance, stopped = random.Random(0), []
    for _ in range(400):
        time.sleep(chance.uniform(0.002, 0.008))
        stopped.append(process.status() == psutil.STATUS_STOPPED)
    return statistics.mean(stopped)


def test_the_exit_code_is_the_commands_own() -> None:
    assert throttled(0.5, sys.executable, "-c", "raise SystemExit(66)").wait(30) == 66


def test_a_killed_command_looks_killed() -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    assert throttled(0.5, sys.executable, "-c", code).wait(30) == -signal.SIGKILL


def test_a_warning_reaches_the_command_but_not_its_helpers() -> None:
    code = """
import signal, subprocess, sys, time
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
told = []
signal.signal(signal.SIGUSR2, lambda *_: told.append("USR2"))
signal.signal(signal.SIGTERM, lambda *_: told.append("TERM"))
print("ready", flush=True)
while len(told) < 2:
    time.sleep(0.01)
print(*told, helper.poll())
helper.kill()
"""
    process = throttled(0.2, sys.executable, "-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR2)
    time.sleep(4 * SIGNAL_PERIOD_S)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "USR2 TERM None\n"
    assert process.returncode == 0


@pytest.mark.parametrize("moment", [0.3, 0.31, 0.32, 0.33])
def test_a_killed_throttle_leaves_nothing_stopped_behind(moment: float) -> None:
    process = throttled(0.3, sys.executable, "-c", "while True: pass")
    while not (children := psutil.Process(process.pid).children()):
        time.sleep(0.01)
    (child,) = children
    time.sleep(0.2 + moment)
    process.kill()
    process.wait(30)
    child.wait(10)
    assert not child.is_running()


def test_a_site_with_a_duty_cycle_slows_local_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy_of_test.py").write_text(BUSY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = LocalLauncher()
    needs = JobResources(duty_cycle=0.25)
    identity = launcher.submit(JobSpec("busy", ("0.3",), tmp_path, tmp_path, needs, "busy_of_test"))
    while (state := launcher.poll([identity])[identity].state).is_active:
        time.sleep(0.05)
    assert state is JobState.DONE
    (printed,) = tmp_path.glob("*.log")
    # 0.3 s of a core in four times as long, less what is left of a slice at either end.
    assert float(printed.read_text().split()[-1]) > 0.9


def test_a_duty_cycle_by_kind_of_node_holds_on_nodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert node_duty_cycle("0.5") == 0.5
    assert node_duty_cycle("a100=0.5,h100=0.9") == 1.0


def test_a_site_says_the_duty_cycle_of_partitions_or_of_kinds(tmp_path: Path) -> None:
    site = load_site(package_paths.ROOT / "slurm" / "devcluster" / "site.yaml")
    assert (
        site.settings_for("gpu").duty_cycle_for("a100")
        == site.settings_for("a100").duty_cycle_for("a100")
        == 0.5
    )
    assert site.settings_for("gpu").duty_cycle_for("h100") == 1.0
    needs = JobResources(
        duty_cycle=site.settings_for("gpu").duty_cycle, python_command=("apptainer",)
    )
    assert needs.command_prefix[1:] == ("-m", "launchers.throttle", "a100=0.5", "apptainer")
    path = tmp_path / "site.yaml"
    path.write_text("defaults: {duty_cycle: {a100: 1.5}}")
    with pytest.raises(PlanError, match=r"duty_cycle"):
        load_site(path)
