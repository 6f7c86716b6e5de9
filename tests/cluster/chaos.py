"""Faults, drawn from a seed, that strike a run on the dev cluster while it goes on.

A storm starts a driver and lets faults strike at random moments until enough have. A driver that
ends badly, by a fault or of itself, is started again, as a person would; the run must come to its
end all the same.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlinf import package_paths
from rlinf.artifacts import read_manifest
from rlinf.errors import ArtifactError
from tests.pipeline.helpers import start_driver

STAGES = ("-m stages", "launchers.job_entrypoint")
"""What the processes of stages and workers are called, on this machine and in a job."""
PAUSE_S = (0.5, 5.0)
CLOCK_S = (5.0, 60.0)
PREEMPTED_S = 10.0
"""Longer than jobs may go on once they are preempted."""
SEEKS_S = 10.0
"""How long a fault waits for something that it can strike."""
PATIENCE_S = 240.0
"""How long a run may stand still once nothing strikes it any more."""


@dataclass
class Storm:
    """A run and what happened to it."""

    words: list[str]
    root: Path
    """The run's ``run.root``; by it its processes are known."""
    state: Path
    """Of the dev cluster."""
    rng: random.Random
    logs: Path
    """Where the driver's words go."""
    struck: list[str] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    """Faults that found nothing to strike."""
    restarts: int = 0

    def __post_init__(self) -> None:
        # Beside the run's filesystem, which may be full.
        self._log = self.logs / f"{self.root.name}.log"
        self._driver = start_driver(self.words, self._log)

    def strike(self, owed: Counter[str]) -> None:
        """Let the faults that are owed of each kind happen, or as many as the run leaves time for:
        in rounds of one each, every round in an order of its own. Those that struck are owed no
        more."""
        while kinds := sorted(+owed):
            for kind in self.rng.sample(kinds, len(kinds)):
                time.sleep(self.rng.uniform(*PAUSE_S))
                if self._ended():
                    return
                if self._happens(kind):
                    self.struck.append(kind)
                    owed[kind] -= 1
                else:
                    self.missed[kind] += 1

    def _happens(self, kind: str) -> bool:
        """Whether it found something to strike in good time."""
        latest = time.monotonic() + SEEKS_S
        while not (struck := FAULTS[kind](self)) and time.monotonic() < latest:
            if self._ended():
                break
            time.sleep(0.2)
        return struck

    def settle(self) -> None:
        """Wait for the run's end.

        Raises:
            AssertionError: it does not come any nearer.
        """
        deadline, committed = time.monotonic() + PATIENCE_S, -1
        while not self._ended():
            assert time.monotonic() < deadline, f"{self.struck}\n{self.log}"
            with contextlib.suppress(FileNotFoundError):  # retention prunes meanwhile
                count = sum(1 for _ in self.root.rglob("manifest.json"))
                if count > committed:
                    deadline, committed = time.monotonic() + PATIENCE_S, count
            time.sleep(0.5)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")[-20_000:]

    def processes(self, *words: str) -> list[psutil.Process]:
        """The run's processes whose command line holds one of these."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if str(self.root) in line and any(word in line for word in words):
                    found.append(process)
        return found

    def jobs(self) -> list[str]:
        """Ids of the run's jobs that run."""
        shown = _call("squeue", "-h", "-t", "RUNNING", "-o", "%A").split()
        return [job for job in shown if self.mine(job)]

    def still_s(self) -> float:
        """How long something is to stand still: shorter or longer than workers may be silent."""
        return 60.0 if self.rng.random() < 0.1 else self.rng.uniform(2.0, 12.0)

    def kill_driver(self) -> None:
        self._driver.kill()
        self._driver.wait()

    def mine(self, job: str) -> bool:
        return str(self.root) in _call("scontrol", "show", "job", job)

    def _ended(self) -> bool:
        """Whether the run came to its end; a driver that failed is started again."""
        code = self._driver.poll()
        if code is None:
            return False
        if code == 0:
            return True
        self.restarts += 1
        assert self.restarts < 20 + len(self.struck), self.log
        self._driver = start_driver(self.words, self._log)
        return False


def kill_stage(storm: Storm) -> bool:
    """kill -9 of a stage or worker, or of one rank of it."""
    return _signal(storm, storm.processes(*STAGES), signal.SIGKILL)


def kill_driver(storm: Storm) -> bool:
    storm.kill_driver()
    return True


def stop_stage(storm: Storm) -> bool:
    """A process stands still for a while, as on a node that swaps or hangs."""
    found = storm.processes(*STAGES)
    if not _signal(storm, found, signal.SIGSTOP):
        return False
    time.sleep(storm.still_s())
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
    return True


def cancel_job(storm: Storm) -> bool:
    return _job(storm, "scancel")


def requeue_job(storm: Storm) -> bool:
    """What a failed node does to the job of a stage; those of pools refuse it."""
    return _job(storm, "scontrol", "requeue")


def preempt_job(storm: Storm) -> bool:
    """A job of a higher tier takes the node of one that may be preempted."""
    shown = _call("squeue", "-h", "-t", "RUNNING", "-p", "spot", "-o", "%A %N")
    mine = sorted(row for row in shown.splitlines() if storm.mine(row.split()[0]))
    if not mine:
        return False
    node = storm.rng.choice(mine).split()[1]
    where = ("-p", "gpu", "-w", node, "--exclusive", "--time=1", "-o", "/dev/null")
    job = _call("sbatch", "--parsable", *where, "--wrap", "sleep 1").strip()
    # Others may have the node for longer.
    time.sleep(PREEMPTED_S)
    _call("scancel", job)
    return True


def node_down(storm: Storm) -> bool:
    """A node fails and comes back."""
    nodes = sorted(set(_call("squeue", "-h", "-t", "RUNNING", "-o", "%N").split()))
    if not nodes:
        return False
    node = storm.rng.choice(nodes)
    _call("scontrol", "update", f"nodename={node}", "state=down", "reason=chaos")
    time.sleep(1)
    _call("scontrol", "update", f"nodename={node}", "state=resume")
    return True


def kill_slurmd(storm: Storm) -> bool:
    """A node's daemon dies and is started again."""
    pids = sorted((storm.state / "run").glob("slurmd-*.pid"))
    _restart(storm.rng.choice(pids))
    return True


def restart_slurmctld(storm: Storm) -> bool:
    _restart(storm.state / "run" / "slurmctld.pid")
    return True


def corrupt_file(storm: Storm) -> bool:
    """A bit of a committed file changes."""
    files: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # what is pruned or swept meanwhile
        for out in storm.root.rglob("manifest.json"):
            files += _committed(out.parent)
    if not files:
        return False
    path = storm.rng.choice(sorted(files)[-6:])
    try:
        size = path.stat().st_size
        with path.open("r+b") as file:
            at = storm.rng.randrange(size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    except OSError:
        return False
    return True


def _committed(out: Path) -> list[Path]:
    """The data of an output: a change before the commit nobody could tell from the result."""
    with contextlib.suppress(OSError, ArtifactError):
        if manifest := read_manifest(out):
            return [
                out / manifest.data / name
                for name in manifest.files
                if name.endswith((".h5", ".safetensors"))
            ]
    return []


def full_disk(storm: Storm) -> bool:
    """The run's filesystem is full for a while; only if it is one of its own."""
    if not storm.root.parent.is_mount():
        return False
    filler = storm.root.parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        while stream.write(bytes(1 << 20)):
            pass
    time.sleep(storm.rng.uniform(*PAUSE_S))
    filler.unlink()
    return True


def cut_off(storm: Storm) -> bool:
    """A node's network is gone for a while; in mode ``net`` of the dev cluster."""
    links = sorted(path.name for path in Path("/sys/class/net").glob("v[0-9]*"))
    if not links:
        return False
    link = storm.rng.choice(links)
    _call("ip", "link", "set", link, "down")
    time.sleep(storm.still_s())
    _call("ip", "link", "set", link, "up")
    return True


def clock_step(storm: Storm) -> bool:
    """The clock jumps, and back a while later."""
    step = storm.rng.choice((-1, 1)) * storm.rng.uniform(*CLOCK_S)
    try:
        _step(step)
    except PermissionError:
        return False
    time.sleep(storm.rng.uniform(*PAUSE_S))
    _step(-step)
    return True


FAULTS: dict[str, Callable[[Storm], bool]] = {
    fault.__name__: fault
    for fault in (
        kill_stage,
        kill_driver,
        stop_stage,
        cancel_job,
        requeue_job,
        preempt_job,
        node_down,
        kill_slurmd,
        restart_slurmctld,
        corrupt_file,
        full_disk,
        cut_off,
        clock_step,
    )
}


def _step(seconds: float) -> None:
    now = time.clock_gettime(time.CLOCK_REALTIME)
    time.clock_settime(time.CLOCK_REALTIME, now + seconds)


def _signal(storm: Storm, processes: list[psutil.Process], number: signal.Signals) -> bool:
    if not processes:
        return False
    with contextlib.suppress(psutil.Error):
        storm.rng.choice(sorted(processes, key=lambda p: p.pid)).send_signal(number)
        return True
    return False


def _job(storm: Storm, *command: str) -> bool:
    jobs = storm.jobs()
    if not jobs:
        return False
    job = storm.rng.choice(sorted(jobs))
    return subprocess.run([*command, job], capture_output=True, check=False).returncode == 0


def restart_nodes(state: Path) -> None:
    """Every node's daemon anew."""
    _restart(*sorted((state / "run").glob("slurmd-*.pid")))


def _restart(*pid_files: Path) -> None:
    for pid_file in pid_files:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
    time.sleep(0.5)
    # Starts what does not run, and brings nodes back.
    subprocess.run(
        [package_paths.ROOT / "slurm/devcluster/up.sh"],
        capture_output=True,
        timeout=120,
        check=True,
    )


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout
