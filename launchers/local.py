"""The local launcher: runs jobs as processes on this machine, one per rank.

``python -m launchers.local N MODULE ARGS`` runs a module as N processes and waits for them.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launchers.launcher import JobSpec, failure_reason, log_tail
from rlinf import process_tuning
from rlinf.channels.process_group import GROUP_VARIABLE, SPEED_WEIGHTS_VARIABLE
from rlinf.errors import (
    EXIT_BAD_ARTIFACT,
    EXIT_BAD_INPUT,
    EXIT_NO_PROGRESS,
    EXIT_REQUEUE,
    PlanError,
)
from rlinf.package_paths import child_python_path
from slurm.jobs import CUDA_VISIBLE_DEVICES, JobResources, JobState, JobStatus, visible_gpus

_DOCUMENTED_CODES = (EXIT_BAD_INPUT, EXIT_BAD_ARTIFACT, EXIT_NO_PROGRESS, EXIT_REQUEUE)


@dataclass
class _StartedJob:
    job: JobSpec
    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]
    """The log of each rank."""
    gpus: tuple[str, ...] = ()
    """GPUs that its processes see."""
    status: JobStatus | None = None
    """The final status; None: no poll has found that the job has ended."""

    @property
    def runs(self) -> bool:
        """Whether one of its processes has not ended."""
        return any(process.poll() is None for process in self.processes)


@dataclass
class LocalLauncher:
    """Launches jobs as local processes. A failed rank ends the other ranks of its job.

    On a machine with several GPUs each job sees as many of them as it has processes, or asks for,
    and jobs that run at the same time get different ones as far as there are enough.
    """

    poll_interval_s: float = 0.05
    _started: dict[str, _StartedJob] = field(default_factory=dict)

    def _choose_gpus(self, job: JobSpec) -> tuple[str, ...]:
        """Return the GPUs for a job: at least one for each process, those with the fewest jobs."""
        gpus = visible_gpus()
        requested = sum(part.nodes * part.gpus_per_node for part in job.components)
        count = max(requested, sum(part.tasks for part in job.components))
        used = Counter(gpu for job in self._started.values() if job.runs for gpu in job.gpus)
        chosen = sorted(gpus, key=lambda gpu: used[gpu])[:count]
        return tuple(gpu for gpu in gpus if gpu in chosen)

    def submit(self, job: JobSpec) -> str:
        job_id = secrets.token_hex(6)
        job.log_dir.mkdir(parents=True, exist_ok=True)
        world_size = sum(component.tasks for component in job.components)
        speed_weights = job.resources.speed_weights
        if isinstance(speed_weights, Mapping):
            raise PlanError(
                f"{job.name}: speed_weights by kind of node ({', '.join(speed_weights)}) need "
                "cluster=slurm; on one machine give one number per process"
            )
        processes, logs, gpus = [], [], self._choose_gpus(job)
        for rank in range(world_size):
            environment = {
                **os.environ,
                **process_tuning.child_environment(),
                **({CUDA_VISIBLE_DEVICES: ",".join(gpus)} if gpus else {}),
                **job.resources.env,
                **(
                    {SPEED_WEIGHTS_VARIABLE: ",".join(map(str, speed_weights))}
                    if speed_weights
                    else {}
                ),
                "PYTHONPATH": child_python_path(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                GROUP_VARIABLE: job_id,
                "RLINF_ATTEMPT": job_id,
            }
            log = job.log_dir / f"{job.name.replace('/', '-')}-{job_id}-r{rank}.log"
            python = job.resources.interpreter or sys.executable
            command = [*job.resources.command_prefix, python, "-m", job.module, *job.argv]
            with log.open("wb") as stream:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        # Safe after a fork: one system call, whose symbol was loaded on import.
                        preexec_fn=process_tuning.die_with_parent,  # noqa: PLW1509
                    )
                )
            logs.append(log)
        self._started[job_id] = _StartedJob(job, processes, logs, gpus)
        return job_id

    def submit_array(self, jobs: Sequence[JobSpec]) -> list[str]:
        return [self.submit(job) for job in jobs]

    def submit_hetjob(self, jobs: Sequence[JobSpec]) -> list[str]:
        return [self.submit(job) for job in jobs]

    def poll(self, ids: Collection[str]) -> dict[str, JobStatus]:
        return {job_id: self._status(self._started[job_id]) for job_id in ids}

    def cancel(self, ids: Collection[str]) -> None:
        for job_id in ids:
            _kill(self._started[job_id].processes)

    def cancel_for_outputs(self, output_dirs: Collection[Path]) -> None:
        """Do nothing, because processes end with the driver that started them."""

    def close(self) -> None:
        self.cancel(list(self._started))

    def _status(self, started: _StartedJob) -> JobStatus:
        if started.status is not None:
            return started.status
        codes = [process.poll() for process in started.processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            _kill(started.processes)
            # A documented exit code of one rank explains more than the crashes that it caused.
            rank = max(failed, key=lambda r: (codes[r] in _DOCUMENTED_CODES, -r))
            code = codes[rank]
            assert code is not None
            reason = failure_reason(started.logs[rank], code)
            if code < 0:
                reason = f"killed by {signal.Signals(-code).name}\n{reason}".strip()
            started.status = JobStatus(JobState.FAILED, code, reason, node=socket.gethostname())
        elif None not in codes:
            started.status = JobStatus(JobState.DONE, 0, node=socket.gethostname())
        else:
            return JobStatus(JobState.RUNNING, node=socket.gethostname())
        return started.status


def _kill(processes: list[subprocess.Popen[bytes]], patience_s: float = 2.0) -> None:
    """End processes and their children, first with SIGTERM and then with SIGKILL."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(p.poll() is None for p in running) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in running:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def main(argv: list[str]) -> int:
    """Start the processes, wait and print their logs. Returns the exit code."""
    count, module, *rest = argv
    launcher = LocalLauncher()
    with tempfile.TemporaryDirectory() as logs:
        resources = JobResources(tasks_per_node=int(count))
        job = JobSpec(module, tuple(rest), Path(logs), Path(logs), resources, module)
        job_id = launcher.submit(job)
        try:
            while (status := launcher.poll([job_id])[job_id]).state.is_active:
                time.sleep(launcher.poll_interval_s)
        finally:
            launcher.close()
        for path in sorted(Path(logs).glob("*.log")):
            print(log_tail(path, 1000), file=sys.stderr)
    return status.exit_code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
