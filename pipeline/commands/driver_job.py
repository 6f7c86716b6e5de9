"""The driver of a run as a small Slurm job of its own, and what runs in it.

``python -m pipeline.commands.driver_job RUN`` is the driver. Its job is requeued before its limit
and when its node is lost, as those of stages are, and also when the driver was killed. The next
life finds pools and jobs by their notes in the run directory, as any driver does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launchers.backlog import note, noted
from launchers.base import Job
from launchers.sbatch import sbatch_lasting
from pipeline.launch import ClusterConfig, check_quotas, plan_jobs, resources
from pipeline.lock import LOCK, is_driven
from pipeline.plan import Plan, StagePlan
from pipeline.run import Run
from rlinf import machine
from rlinf.errors import PlanError, RlinfError, RunLockedError
from slurm.client import Partition, Queued, SlurmClient, default_partition, partition_names
from slurm.ids import own_id
from slurm.jobs import Resources
from slurm.limits import check_resources
from slurm.quotas import read_quotas
from stages.layout import DRIVER

LONGEST_MIN = 24 * 60


def driver_job(run: Run, needs: Resources) -> Job:
    """The job that drives a run."""
    return Job(
        f"driver/{run.folder.name}",
        (str(run.folder), "--iterations", str(run.config.iterations)),
        run.folder / DRIVER,
        run.folder / "logs" / DRIVER,
        needs,
        "pipeline.commands.driver_job",
    )


def driver_needs(cluster: ClusterConfig, plan: Plan, client: SlurmClient) -> Resources:
    """What the job asks for.

    Raises:
        PlanError: the cluster does not have it, or accounting does not allow it beside the jobs of
            the plan.
        SlurmError: Slurm is not there or does not answer.
    """
    asked, partitions = cluster.driver, client.partitions()
    # By its name, for what the site file says of it.
    partition = asked.partition or default_partition(partitions)
    own = StagePlan(
        partition=partition,
        cpus=asked.cpus,
        mem_mb=asked.mem_mb,
        time_min=asked.time_min or _time_min(partition, partitions),
    )
    needs = resources(own, cluster)
    mail = {} if asked.mail is None else {"mail-user": asked.mail, "mail-type": "END,FAIL"}
    needs = replace(needs, sbatch={**needs.sbatch, **mail})
    quotas = read_quotas(client)
    try:
        check_resources(needs, partitions, "cluster.driver")
        quotas.check(needs, "cluster.driver")
    except PlanError as error:
        raise PlanError(str(error).removeprefix("plan: ")) from None
    if cluster.launcher == "slurm":
        check_quotas(plan, plan_jobs(plan, cluster), quotas, needs)
    return needs


def _time_min(partition: str | None, partitions: dict[str, Partition]) -> int:
    """A day, or less where the partition, or one of a list, allows no more."""
    names = partition_names(partition or "")
    chosen = [p for p in partitions.values() if p.name in names]
    limits = [p.time_limit_min for p in chosen if p.time_limit_min is not None]
    return min([LONGEST_MIN, *limits])


def submit(job: Job) -> str:
    """Submit the driver of a run and note its id, which is returned.

    Raises:
        SlurmError: sbatch refused it.
    """
    identity = sbatch_lasting(job)
    note(job, identity)
    return identity


def refuse_driven(run: Run) -> None:
    """See that a run has no driver.

    Raises:
        RunLockedError: it has one, or the job of one.
    """
    owner = is_driven(run.folder / LOCK)
    if owner is not None:
        raise RunLockedError(
            f"{run.folder}: driven by process {owner.pid} on {owner.host} already; end that "
            f"one first with: rlinf stop {run.folder}"
        )
    refuse_beside_job(run)


def submitted(run: Run, client: SlurmClient | None = None) -> tuple[str, Queued] | None:
    """The job that drives a run and how it is, where there is one that waits or runs.

    Raises:
        SlurmError: one was submitted, and Slurm does not answer.
    """
    identity = noted_job(run)
    if identity is None:
        return None
    status = (client or SlurmClient()).queue().get(identity)
    return None if status is None or not status.state.active else (identity, status)


def noted_job(run: Run) -> str | None:
    """The id of the driver's job that was submitted last."""
    last = noted(run.folder / DRIVER)
    return None if last is None else last.id


def refuse_beside_job(run: Run) -> None:
    """Let no other driver begin while there is a job to drive the run, which may only wait.

    Raises:
        RunLockedError: there is.
    """
    if noted_job(run) in (None, own_id()):
        return
    found = submitted(run)
    if found is not None:
        raise RunLockedError(
            f"{run.folder}: job {found[0]}, {found[1].state.value}, drives this run; see rlinf "
            f"status {run.folder}, or end it with: rlinf stop {run.folder}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Drive; returns the exit code."""
    from pipeline.commands.experiment import drive

    machine.apply()
    parser = argparse.ArgumentParser(prog="python -m pipeline.commands.driver_job")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--iterations", type=int, help="end after so many this time")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        run = Run.open(arguments.run)
        if arguments.iterations is not None:
            config = run.config.model_copy(update={"iterations": arguments.iterations})
            run = Run(run.folder, config)
        report = drive(run)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"report: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
