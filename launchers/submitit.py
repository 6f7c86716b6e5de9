"""Jobs through submitit, watched by our own poller.

submitit writes the batch script and starts the callable; its watcher, its result files and its
requeueing are left aside: they look rarely, guess time-outs from run times, and restart pickles.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers.base import Job, Resources, State, Status, tail
from launchers.job import ModuleCall
from rlinf import threads
from rlinf.errors import SlurmError
from rlinf.tree import python_path
from slurm.client import SlurmClient

MANIFEST = "manifest.json"
NOTE = "job.json"


@dataclass
class _Watched:
    job: Job
    since: float


@dataclass
class SubmititLauncher:
    """See the module."""

    client: SlurmClient
    grace_s: float = 20.0
    """How long a job may be known neither to queue nor accounting before it has vanished."""
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _missing: dict[str, float] = field(default_factory=dict)

    @property
    def poll_s(self) -> float:
        """Seconds that should pass between two calls of :meth:`poll`."""
        return self.client.poll_s

    def submit(self, job: Job) -> str:
        return self.submit_array([job])[0]

    def submit_array(self, jobs: Sequence[Job]) -> list[str]:
        """See :class:`launchers.base.Launcher`; jobs still queued or running are found again."""
        known = [self._adopt(job) for job in jobs]
        missing = [job for job, identity in zip(jobs, known, strict=True) if identity is None]
        submitted = time.time()
        fresh = iter(self._sbatch(missing) if missing else [])
        out = []
        for job, adopted in zip(jobs, known, strict=True):
            identity = adopted or next(fresh)
            self._watched[identity] = _Watched(job, time.time())
            if adopted is None:
                note = {"id": identity, "name": job.name, "submitted": submitted}
                _write(job.out / NOTE, note)
            out.append(identity)
        return out

    def poll(self, ids: Collection[str]) -> dict[str, Status]:
        """By manifests first, then one ``squeue``, then one ``sacct`` for jobs that ended."""
        found: dict[str, Status] = {}
        for identity in ids:
            if (self._watched[identity].job.out / MANIFEST).exists():
                found[identity] = Status(State.DONE, 0)
        open_ids = [identity for identity in ids if identity not in found]
        if not open_ids:
            return found
        queue = self.client.queue()
        ended = []
        for identity in open_ids:
            status = queue.get(identity)
            if status is not None and status.state.active:
                found[identity] = status
                self._missing.pop(identity, None)
            else:
                ended.append(identity)
        accounts = self.client.accounting(ended) if ended else {}
        for identity in ended:
            found[identity] = self._end(identity, queue.get(identity), accounts.get(identity))
        return found

    def cancel(self, ids: Collection[str]) -> None:
        self.client.cancel(ids)

    def close(self) -> None:
        """Jobs go on without the driver; the next one finds them by their notes."""

    def _adopt(self, job: Job) -> str | None:
        """The job already queued or running for this output, if there is one."""
        try:
            identity = str(json.loads((job.out / NOTE).read_text())["id"])
        except (OSError, ValueError, KeyError):
            return None
        status = self.client.queue().get(identity)
        return identity if status is not None and status.state.active else None

    def _end(self, identity: str, queued: Status | None, account: Status | None) -> Status:
        """The status of a job that is no longer active in the queue."""
        watched = self._watched[identity]
        if (watched.job.out / MANIFEST).exists():
            return Status(State.DONE, 0)
        code = self._exit_code(identity)
        status = account if account is not None and not account.state.active else queued
        if status is None and code is None:
            since = self._missing.setdefault(identity, time.time())
            if time.time() - since < self.grace_s:
                return Status(State.RUNNING, None, "no longer in the queue")
            return Status(State.VANISHED, None, "neither queue nor accounting knows this job")
        if status is None:
            status = Status(State.FAILED if code else State.DONE)
        if status.state is State.DONE and code in (None, 0):
            since = self._missing.setdefault(identity, time.time())
            if time.time() - since < self.grace_s:
                # The manifest of a job that ended well may show late on a network filesystem.
                return Status(State.RUNNING, None, "ended; waiting for its manifest")
        if code is None:
            code = status.exit_code
        reason = f"job {identity} {status.reason or status.state.value}".strip()
        return Status(
            State.FAILED if status.state is State.DONE else status.state,
            code or None,
            f"{reason}\n{tail(_log(watched.job, identity))}".strip(),
            status.partition,
            status.node,
        )

    def _exit_code(self, identity: str) -> int | None:
        path = self._watched[identity].job.logs / f"{identity}.exit"
        try:
            return int(json.loads(path.read_text())["code"])
        except (OSError, ValueError, KeyError):
            return None

    def _sbatch(self, jobs: Sequence[Job]) -> list[str]:
        import submitit
        from submitit.core.utils import FailedJobError

        first = jobs[0]
        for job in jobs:
            if job.resources != first.resources or job.logs != first.logs:
                raise ValueError(f"{job.name} and {first.name} cannot be one array")
            job.out.mkdir(parents=True, exist_ok=True)
        first.logs.mkdir(parents=True, exist_ok=True)
        path = tuple(python_path().split(os.pathsep))
        options: dict[str, Any] = {}
        needs = first.resources
        if needs.prefix:
            own = () if needs.python else (sys.executable,)
            options["slurm_python"] = " ".join([*needs.prefix, *own])
        executor = submitit.AutoExecutor(folder=first.logs, cluster="slurm", **options)
        executor.update_parameters(**parameters(first.name, needs, path))
        configuration = {k: v for k, v in os.environ.items() if k == "SLURM_CONF"}
        shares = needs.shares or ()
        pairs = tuple(shares.items() if isinstance(shares, Mapping) else (("", s) for s in shares))
        logs = str(first.logs)
        calls = [ModuleCall(job.module, job.argv, path, logs, pairs) for job in jobs]
        try:
            # Inside another job, sbatch would inherit that job's settings.
            with submitit.helpers.clean_env():
                os.environ.update(configuration)
                with executor.batch():
                    submitted = [executor.submit(call) for call in calls]
            return [str(entry.job_id) for entry in submitted]
        except FailedJobError as error:
            raise SlurmError(f"{first.name}: sbatch refused the job: {_cause(error)}") from None


def parameters(name: str, needs: Resources, path: tuple[str, ...]) -> dict[str, Any]:
    """submitit's keywords for what a job asks for: the one place that translates them."""
    import shlex

    env = {**threads.environment(), "PYTHONPATH": os.pathsep.join(path), **needs.env}
    exports = [f"export {key}={shlex.quote(value)}" for key, value in sorted(env.items())]
    further: dict[str, Any] = {"requeue": True, "open-mode": "append", **needs.sbatch}
    if needs.reservation:
        further["reservation"] = needs.reservation
    if needs.gpus_per_node:
        kind = f"{needs.gpu_type}:" if needs.gpu_type else ""
        further["gres"] = f"gpu:{kind}{needs.gpus_per_node}"
    wanted: dict[str, Any] = {
        "name": name.replace("/", "-"),
        "nodes": needs.nodes,
        "tasks_per_node": needs.tasks_per_node,
        "cpus_per_task": needs.cpus_per_task,
        "timeout_min": needs.time_min,
        "slurm_mem": f"{needs.mem_mb}M" if needs.mem_mb else None,
        "slurm_partition": needs.partition,
        "slurm_account": needs.account,
        "slurm_qos": needs.qos,
        "slurm_constraint": needs.constraint,
        "slurm_exclude": needs.exclude,
        "slurm_signal_delay_s": needs.signal_delay_s,
        "slurm_setup": [*exports, *needs.setup],
        # One dead rank must not leave the others waiting for it.
        "slurm_srun_args": ["--kill-on-bad-exit=1"],
        "slurm_additional_parameters": further,
    }
    return {key: value for key, value in wanted.items() if value is not None}


def _cause(error: Exception) -> str:
    """Slurm's own words out of submitit's error."""
    lines = [line for line in str(error).splitlines() if "sbatch: error" in line]
    return "; ".join(line.split("sbatch: error:")[-1].strip() for line in lines) or str(error)


def _log(job: Job, identity: str) -> Path:
    return job.logs / f"{identity}_0_log.err"


def _write(path: Path, values: dict[str, Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(values))
    temporary.replace(path)
