"""The driver of a run as a small Slurm job.

The job runs ``python -m pipeline.commands.driver_job RUN``. It is requeued before its time limit,
when its node is lost, and when the driver was killed. The restarted driver finds pools and jobs by
their notes in the run directory.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launchers.launcher import JobSpec
from launchers.sbatch import new_tag, submit_restarting, with_tag
from launchers.submission_queue import JOB_NOTE, read_job_note, write_job_note
from pipeline.cluster_config import ClusterConfig
from pipeline.lock import LOCK_FILE, RunLock, living_owner
from pipeline.plan import Plan, StagePlan
from pipeline.resources import check_quotas, job_resources, plan_job_requests
from pipeline.run import Run, explain_write_errors
from rlinf import process_tuning
from rlinf.errors import PlanError, RlinfError, RunLockedError, SlurmError, SlurmUnresponsiveError
from slurm.client import Partition, QueuedJob, SlurmClient, default_partition, partition_names
from slurm.job_limits import check_resources, read_quotas
from slurm.jobs import JobResources, current_job_id
from slurm.sbatch_options import portable_options
from slurm.site import PartitionSettings, load_site
from stages.layout import DRIVER_JOB_FOLDER

DEFAULT_TIME_LIMIT_MIN = 24 * 60
START_LOCK = "starts.json"
"""Lock file in the driver's folder, for processes that create or change the run or submit its
driver."""


def driver_job(run: Run, needs: JobResources) -> JobSpec:
    """Return the job that drives a run."""
    return JobSpec(
        f"driver/{run.folder.name}",
        (str(run.folder), "--iterations", str(run.config.iterations)),
        run.folder / DRIVER_JOB_FOLDER,
        run.folder / "logs" / DRIVER_JOB_FOLDER,
        needs,
        "pipeline.commands.driver_job",
    )


def driver_resources(cluster: ClusterConfig, plan: Plan, client: SlurmClient) -> JobResources:
    """Return the resources of the driver's job.

    Raises:
        PlanError: the cluster lacks them, or accounting does not allow them beside the plan's jobs.
        SlurmError: Slurm is not installed or does not answer.
    """
    settings, partitions = cluster.driver, client.partitions()
    # The default partition is named, because the site file may have settings for it.
    partition = settings.partition or default_partition(partitions)
    own = StagePlan(
        partition=partition,
        cpus=settings.cpus,
        mem_mb=settings.mem_mb,
        time_limit_min=settings.time_limit_min or _default_time_limit_min(partition, partitions),
    )
    needs = _without_large_job_settings(job_resources(own, cluster), cluster, partitions)
    quotas = read_quotas(client)
    longest = quotas.max_minutes(needs) if settings.time_limit_min is None else None
    if longest is not None and needs.time_limit_min is not None:
        needs = replace(needs, time_limit_min=min(needs.time_limit_min, longest[0]))
    try:
        check_resources(needs, partitions, "cluster.driver")
        quotas.check(needs, "cluster.driver")
    except PlanError as error:
        raise PlanError(str(error).removeprefix("plan: ")) from None
    if cluster.launcher == "slurm":
        check_quotas(plan, plan_job_requests(plan, cluster), quotas, needs)
    return needs


def _without_large_job_settings(
    needs: JobResources, cluster: ClusterConfig, partitions: Mapping[str, Partition]
) -> JobResources:
    """Return the resources without settings of the site file for larger jobs.

    QOS, constraint and reservation stay if the site file sets them for the driver's own partition
    and that has no GPUs; defaults may be meant for GPUs.
    """
    settings, site = cluster.driver, PartitionSettings()
    found = partitions.get(needs.partition or "")
    if cluster.site is not None and found is not None and not found.gpus:
        site = load_site(cluster.site).overrides_for(needs.partition)
    mail = {} if settings.mail is None else {"mail-user": settings.mail, "mail-type": "END,FAIL"}
    return replace(
        needs,
        account=settings.account or needs.account,
        qos=settings.qos or site.qos,
        constraint=settings.constraint or site.constraint,
        reservation=settings.reservation or site.reservation,
        exclude=settings.exclude or needs.exclude,
        sbatch={**portable_options(needs.sbatch), **mail, **settings.sbatch},
    )


def _default_time_limit_min(partition: str | None, partitions: dict[str, Partition]) -> int:
    """Return one day, or the limit of the partition (or of one in a list) if it is lower."""
    names = partition_names(partition or "")
    chosen = [p for p in partitions.values() if p.name in names]
    limits = [p.time_limit_min for p in chosen if p.time_limit_min is not None]
    return min([DEFAULT_TIME_LIMIT_MIN, *limits])


@contextlib.contextmanager
def start_lock(run: Run) -> Iterator[None]:
    """Lock the creation or change of a run, and the submission of its driver.

    A refused process has written nothing. An empty folder of a failed start is removed.

    Raises:
        RunLockedError: another process has the lock, or the run has a driver.
        InputError: no permission to write there.
    """
    at = run.folder / DRIVER_JOB_FOLDER
    with explain_write_errors(run.folder):
        at.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            lock = RunLock(at / START_LOCK)
        except (RunLockedError, FileNotFoundError):  # the other one may just have removed it
            raise RunLockedError(
                f"{run.folder}: another process is starting this run or submitting its driver; "
                f"see rlinf status {run.folder}"
            ) from None
    try:
        check_not_driven(run)
        yield
    finally:
        lock.release()
        with contextlib.suppress(OSError):  # they hold something
            at.rmdir()
            run.folder.rmdir()


def submit_driver_job(job: JobSpec) -> str:
    """Submit the driver of a run and return its job id. Call it within :func:`start_lock`.

    The mark of the job is written first, so that the job is found even if this process ends before
    it has written the id.

    Raises:
        SlurmError: sbatch refused the job.
    """
    mark = new_tag()
    write_job_note(job, tag=mark)
    try:
        identity = submit_restarting(with_tag(job, mark))
    except SlurmUnresponsiveError:
        raise  # it may be queued, and is found by its mark
    except SlurmError:
        (job.output_dir / JOB_NOTE).unlink()
        raise
    write_job_note(job, identity)
    return identity


def check_not_driven(run: Run) -> None:
    """Check that a run has no driver.

    Raises:
        RunLockedError: it has a driver or a driver job.
    """
    owner = living_owner(run.folder / LOCK_FILE)
    if owner is not None:
        raise RunLockedError(
            f"{run.folder}: driven by process {owner.pid} on {owner.host} already; end that "
            f"one first with: rlinf stop {run.folder}"
        )
    check_no_driver_job(run)


def find_driver_job(run: Run, client: SlurmClient | None = None) -> tuple[str, QueuedJob] | None:
    """Return id and state of the pending or running driver job of a run, if there is one.

    Raises:
        SlurmError: a job was submitted, and Slurm does not answer.
    """
    last = read_job_note(run.folder / DRIVER_JOB_FOLDER)
    if last is None:
        return None
    client = client or SlurmClient()
    ids = last.find_ids(client)
    queue = client.queue() if ids else {}
    active = ((i, queue[i]) for i in ids if i in queue and queue[i].state.is_active)
    return next(active, None)


def last_driver_job_id(run: Run) -> str | None:
    """Return the id of the last submitted driver job; None if there is none, or no id yet."""
    last = read_job_note(run.folder / DRIVER_JOB_FOLDER)
    return None if last is None else last.id or None


def check_no_driver_job(run: Run) -> None:
    """Check that no other job, even a pending one, drives the run.

    Raises:
        RunLockedError: there is one.
    """
    last = read_job_note(run.folder / DRIVER_JOB_FOLDER)
    if last is None or last.id == current_job_id():
        return
    found = find_driver_job(run)
    if found is not None and found[0] != current_job_id():
        raise RunLockedError(
            f"{run.folder}: job {found[0]}, {found[1].state.value}, drives this run; see rlinf "
            f"status {run.folder}, or end it with: rlinf stop {run.folder}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Drive a run; returns the exit code."""
    from pipeline.commands.experiment import drive

    process_tuning.tune_process()
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
