"""``python -m launchers.throttle DUTY COMMAND...``: run a command for a share of the time only.

The nodes of a dev cluster have the same speed; this program slows some nodes. If the ``cpu``
controller of cgroup v1 is writable, every thread of the command gets a quota in slices of
milliseconds; else the command's process group is stopped and continued several times a second.
Child processes of the command are slowed too. Stop signals are forwarded, and the exit status is
that of the command.
``DUTY`` is a number, or ``KIND=NUMBER,...`` by kind of node (a GPU's GRES name or a feature); other
nodes are not slowed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from launchers.job_entrypoint import node_attributes
from rlinf.process_tuning import die_with_parent

CPU_CGROUP_ROOT = Path("/sys/fs/cgroup/cpu")
"""Root of the ``cpu`` controller; cgroups with a quota are created in this process's cgroup."""
QUOTA_PERIOD_US = 10_000
"""Period of the quotas. Kernels schedule every few milliseconds; with a shorter period threads get
less than their quota."""
THREAD_SCAN_S = 0.05
"""Seconds between scans for new threads, which share the quota of their creator until then."""
SIGNAL_PERIOD_S = 0.04
"""Period of stopping and continuing: longer than scheduler slices, shorter than stages."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""For every n, its first n multiples modulo 1 are spread evenly over [0, 1)."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run ``argv[1:]`` at duty cycle ``argv[0]``. Returns its exit code."""
    duty = node_duty_cycle(argv[0])
    process = subprocess.Popen(
        argv[1:],
        process_group=0,
        # Safe after a fork: it makes one system call, whose symbol was loaded on import.
        preexec_fn=die_with_parent,  # noqa: PLW1509
    )

    def forward(number: int, frame: FrameType | None) -> None:
        # Only the command gets the signal, because its children do not expect it. A stopped process
        # gets the signal as soon as it continues.
        if process.returncode is None:
            os.kill(process.pid, number)

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward)
    if duty < 1 and not throttle_by_cgroup(process, duty):
        throttle_by_signals(process, duty)
    code = process.wait()
    if code < 0:
        # End by the same signal as the command, so that the parent process sees it.
        signal.signal(-code, signal.SIG_DFL) if -code in FORWARDED_SIGNALS else None
        os.kill(os.getpid(), -code)
    return code


def node_duty_cycle(text: str) -> float:
    """Return the duty cycle of this node, above 0 and at most 1."""
    if "=" not in text:
        return float(text)
    node = os.environ.get("SLURMD_NODENAME")
    attributes = node_attributes(node) if node else set()
    shares = (part.split("=") for part in text.split(","))
    return min((float(share) for kind, share in shares if kind in attributes), default=1.0)


def throttle_by_cgroup(process: subprocess.Popen[bytes], duty: float) -> bool:
    """Give each thread of ``process`` and of its children a quota until the process has ended.

    One quota for all threads would slow a program with two threads twice as much as a program with
    one thread.

    Returns:
        True if the process was throttled; False if cgroups cannot be created.
    """
    try:
        own_cgroup = CPU_CGROUP_ROOT / current_cpu_cgroup()
        root = own_cgroup / f"rlinf-{process.pid}"
        for leftover in own_cgroup.glob("rlinf-*"):  # of a killed throttle
            if not Path("/proc", leftover.name.removeprefix("rlinf-")).exists():
                _remove(leftover)
        _set_quota(root / str(process.pid), process.pid, duty)
    except OSError:
        return False
    while True:
        try:
            process.wait(THREAD_SCAN_S)
        except subprocess.TimeoutExpired:
            for tasks_file in root.glob("*/tasks"):
                # A cgroup is named after its thread. Threads that this thread creates start in the
                # same cgroup; each then gets a cgroup and a quota of its own.
                threads = {*map(int, tasks_file.read_text().split())}
                for thread in threads - {int(tasks_file.parent.name)}:
                    with suppress(OSError):  # it has ended
                        _set_quota(root / str(thread), thread, duty)
                if not threads:
                    tasks_file.parent.rmdir()
        else:
            break
    _remove(root)
    return True


def current_cpu_cgroup() -> str:
    """Return the path of this process's cgroup of the ``cpu`` controller; "" for the root."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    entries = [line.split(":", 2) for line in lines]
    return next((path for _, names, path in entries if names == "cpu"), "").lstrip("/")


def _set_quota(cgroup: Path, thread: int, duty: float) -> None:
    """Create a cgroup with a quota and move a thread into it."""
    cgroup.mkdir(parents=True, exist_ok=True)
    (cgroup / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US))
    (cgroup / "cpu.cfs_quota_us").write_text(str(round(QUOTA_PERIOD_US * duty)))
    (cgroup / "tasks").write_text(str(thread))


def _remove(root: Path) -> None:
    """Remove a cgroup and its children, except those with threads."""
    for group in (*root.glob("*/"), root):
        with suppress(OSError):
            group.rmdir()


def throttle_by_signals(process: subprocess.Popen[bytes], duty: float) -> None:
    """Stop and continue the process group of ``process`` until it has ended.

    The group runs in the same part of every period of the machine's clock. So a late wake-up does
    not delay later ones, and the ranks of a job run and pause together, as on a slower device.
    """
    phase_s = run_phase_s()
    while duty < 1:
        time.sleep(max(0.0, SIGNAL_PERIOD_S * duty - (time.time() - phase_s) % SIGNAL_PERIOD_S))
        if not _signal(process, signal.SIGSTOP):
            return
        time.sleep(SIGNAL_PERIOD_S - (time.time() - phase_s) % SIGNAL_PERIOD_S)
        if not _signal(process, signal.SIGCONT):
            return


def run_phase_s() -> float:
    """Return the time (s) within a period at which this job continues. It differs between jobs, so
    that the jobs on one machine do not all run at once."""
    return SIGNAL_PERIOD_S * (int(os.environ.get("SLURM_JOB_ID", "0")) * GOLDEN_RATIO % 1)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """Signal the process group. Returns False if ``process`` has ended.

    The group's id is not reused until ``process`` has been waited for.
    """
    if process.poll() is not None:
        return False
    os.killpg(process.pid, number)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
