"""The launcher interface: start jobs, poll their status, cancel them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlinf.errors import EXIT_BAD_ARTIFACT, EXIT_BAD_INPUT, EXIT_NO_PROGRESS
from slurm.jobs import JobResources, JobStatus


@dataclass(frozen=True)
class JobSpec:
    """A module to run, its arguments and resources, and the folders of its output and logs."""

    name: str
    argv: tuple[str, ...]
    output_dir: Path
    log_dir: Path
    resources: JobResources = JobResources()  # noqa: RUF009
    module: str = "stages"
    extra_components: tuple[JobResources, ...] = ()
    """Resources of more processes on other devices; their ranks follow those of ``resources``."""
    content_key: str = ""
    """Digest of the job's content. An earlier driver's active job for the same output is adopted if
    it has the same key, and cancelled otherwise."""
    allow_requeue: bool = True
    """Whether Slurm runs the job again after a stop signal, a preemption or a node failure. Such a
    restart takes some minutes."""

    @property
    def components(self) -> tuple[JobResources, ...]:
        """The resources of all components; several components form a heterogeneous job."""
        return (self.resources, *self.extra_components)


class Launcher(Protocol):
    """Starts jobs and polls all of them at once."""

    @property
    def poll_interval_s(self) -> float:
        """Minimum seconds between two calls of :meth:`poll`."""

    def submit(self, job: JobSpec) -> str:
        """Start a job, or find the running job for the same output. Returns its id.

        Raises:
            PlanError: the job requests resources that the cluster does not have.
            SlurmError: the job was refused, with Slurm's message.
        """

    def submit_array(self, jobs: Sequence[JobSpec]) -> list[str]:
        """Start jobs with equal resources, as one job array if the launcher has arrays.

        Raises:
            PlanError, SlurmError: as :meth:`submit`.
        """

    def submit_hetjob(self, jobs: Sequence[JobSpec]) -> list[str]:
        """Start jobs at the same time, as one heterogeneous job if the launcher has such jobs.

        Raises:
            PlanError, SlurmError: as :meth:`submit`.
        """

    def poll(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """Return the status of these jobs with a single query."""

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel these jobs."""

    def cancel_for_outputs(self, output_dirs: Collection[Path]) -> None:
        """Cancel active jobs that another process submitted for these outputs."""

    def close(self) -> None:
        """Release resources when the driver ends: local processes end, cluster jobs continue."""


ERROR_PREFIX = "error: "
"""Prefix of an error message, which is the last output of a program."""
MAX_MESSAGE_LINES = 80
"""Lines at the end of a log in which an error message is searched for."""


def failure_reason(path: Path, code: int | None) -> str:
    """Return the reason of a process's failure from its log.

    If the exit code means bad input, a damaged artifact or no progress, the reason is the error
    message that the process printed last, maybe after a traceback. Otherwise the reason is the end
    of the log.
    """
    if code not in (EXIT_BAD_INPUT, EXIT_BAD_ARTIFACT, EXIT_NO_PROGRESS):
        return log_tail(path)
    lines = log_tail(path, MAX_MESSAGE_LINES).splitlines()
    first = next(
        (n for n in reversed(range(len(lines))) if lines[n].startswith(ERROR_PREFIX)), None
    )
    if first is None:
        return log_tail(path)
    # Slurm's own lines follow the output of the process.
    message = [line for line in lines[first:] if not line.startswith(("srun: ", "slurmstepd: "))]
    return "\n".join(message).removeprefix(ERROR_PREFIX)


def log_tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a log file; "" if it does not exist."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    filled_lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(filled_lines[-lines:])
