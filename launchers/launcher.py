"""The launcher interface: start a job, ask how jobs are, cancel them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlinf.errors import EXIT_BAD_ARTIFACT, EXIT_BAD_INPUT
from slurm.jobs import JobResources, JobStatus


@dataclass(frozen=True)
class JobSpec:
    """A module to run with arguments, what it needs, and where its output and logs go."""

    name: str
    argv: tuple[str, ...]
    output_dir: Path
    log_dir: Path
    resources: JobResources = JobResources()  # noqa: RUF009
    module: str = "stages"
    extra_components: tuple[JobResources, ...] = ()
    """More processes of the same job on other devices; their ranks come after those above."""
    content_key: str = ""
    """Names what the job is made of. One that was submitted with another key is not found again,
    but cancelled."""
    allow_requeue: bool = True
    """Whether Slurm runs it again when it is asked to stop, preempted, or lost with its node; Slurm
    waits minutes before it does."""

    @property
    def components(self) -> tuple[JobResources, ...]:
        """All it asks for; several are a heterogeneous job."""
        return (self.resources, *self.extra_components)


class Launcher(Protocol):
    """Starts jobs; asks about all of them at once."""

    @property
    def poll_interval_s(self) -> float:
        """Seconds that should pass between two calls of :meth:`poll`."""

    def submit(self, job: JobSpec) -> str:
        """Start a job, or find the one already started for the same output; returns its id.

        Raises:
            PlanError: it asks for what the cluster does not have.
            SlurmError: it was refused; carries the message.
        """

    def submit_array(self, jobs: Sequence[JobSpec]) -> list[str]:
        """Start jobs that ask for the same resources, as one job array where there are such.

        Raises:
            PlanError, SlurmError: as :meth:`submit`.
        """

    def submit_hetjob(self, jobs: Sequence[JobSpec]) -> list[str]:
        """Start jobs at the same moment, as one heterogeneous job where there are such.

        Raises:
            PlanError, SlurmError: as :meth:`submit`.
        """

    def poll(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """How these jobs are, by one query."""

    def cancel(self, ids: Collection[str]) -> None:
        """Stop these jobs."""

    def cancel_for_outputs(self, output_dirs: Collection[Path]) -> None:
        """Stop what another process submitted for these outputs and is there still."""

    def close(self) -> None:
        """The driver ends; local processes end with it, cluster jobs go on."""


ERROR_PREFIX = "error: "
"""What stands before the message of an error, which is the last that a program writes."""
MAX_MESSAGE_LINES = 80


def failure_reason(path: Path, code: int | None) -> str:
    """Why a process failed, from its log.

    A process that ends with an agreed code has written a message as the last thing, of one line or
    with a traceback: that alone is the reason. Of any other it is the end of the log.
    """
    if code not in (EXIT_BAD_INPUT, EXIT_BAD_ARTIFACT):
        return log_tail(path)
    lines = log_tail(path, MAX_MESSAGE_LINES).splitlines()
    first = next(
        (n for n in reversed(range(len(lines))) if lines[n].startswith(ERROR_PREFIX)), None
    )
    if first is None:
        return log_tail(path)
    # Slurm's own lines come after what the process wrote.
    message = [line for line in lines[first:] if not line.startswith(("srun: ", "slurmstepd: "))]
    return "\n".join(message).removeprefix(ERROR_PREFIX)


def log_tail(path: Path, lines: int = 15) -> str:
    """The end of a log file, or nothing when there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    kept = [line for line in text.splitlines() if line.strip()]
    return "\n".join(kept[-lines:])
