"""The driver of a run as a small Slurm job of its own, and what runs in it.

``python -m pipeline.commands.driver_job RUN`` is the driver. Its job is requeued before its limit
and when its node is lost, as those of stages are, and also when the driver was killed. The next
life finds pools and jobs by their notes in the run directory, as any driver does.
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
from pipeline.job_executor import ClusterConfig, check_quotas, job_resources, plan_job_requests
from pipeline.lock import LOCK_FILE, RunLock, living_owner
from pipeline.plan import Plan, StagePlan
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
"""In the driver's folder: which process makes or changes the run, or submits its driver."""


def driver_job(run: Run, needs: JobResources) -> JobSpec:
    """The job that drives a run."""
    return JobSpec(
        f"driver/{run.folder.name}",
        (str(run.folder), "--iterations", str(run.config.iterations)),
        run.folder / DRIVER_JOB_FOLDER,
        run.folder / "logs" / DRIVER_JOB_FOLDER,
        needs,
        "pipeline.commands.driver_job",
    )


def driver_resources(cluster: ClusterConfig, plan: Plan, client: SlurmClient) -> JobResources:
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
        time_limit_min=asked.time_limit_min or _time_min(partition, partitions),
    )
    needs = _small(job_resources(own, cluster), cluster, partitions)
    quotas = read_quotas(client)
    longest = quotas.max_minutes(needs) if asked.time_limit_min is None else None
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


def _small(
    needs: JobResources, cluster: ClusterConfig, partitions: Mapping[str, Partition]
) -> JobResources:
    """Return what the driver asks for without what a site file says for larger jobs.

    QOS, constraint and reservation are kept where the site file says them of the driver's own
    partition and that has no GPUs; those of the defaults may be for GPUs.
    """
    asked, site = cluster.driver, PartitionSettings()
    found = partitions.get(needs.partition or "")
    if cluster.site is not None and found is not None and not found.gpus:
        site = load_site(cluster.site).overrides_for(needs.partition)
    mail = {} if asked.mail is None else {"mail-user": asked.mail, "mail-type": "END,FAIL"}
    return replace(
        needs,
        account=asked.account or needs.account,
        qos=asked.qos or site.qos,
        constraint=asked.constraint or site.constraint,
        reservation=asked.reservation or site.reservation,
        exclude=asked.exclude or needs.exclude,
        sbatch={**portable_options(needs.sbatch), **mail, **asked.sbatch},
    )


def _time_min(partition: str | None, partitions: dict[str, Partition]) -> int:
    """A day, or less where the partition, or one of a list, allows no more."""
    names = partition_names(partition or "")
    chosen = [p for p in partitions.values() if p.name in names]
    limits = [p.time_limit_min for p in chosen if p.time_limit_min is not None]
    return min([DEFAULT_TIME_LIMIT_MIN, *limits])


@contextlib.contextmanager
def start_lock(run: Run) -> Iterator[None]:
    """Be the only one who makes or changes a run, or submits a driver for it.

    Whoever is refused has written nothing. A folder that was made for a start which failed before
    it wrote anything is removed again.

    Raises:
        RunLockedError: another process is at it, or the run has a driver.
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
    """Submit the driver of a run and note its id, which is returned; within :func:`starting`.

    The mark of the job is noted first: should this process end before it has noted the id, the job
    is found by its mark.

    Raises:
        SlurmError: sbatch refused it.
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
    """See that a run has no driver.

    Raises:
        RunLockedError: it has one, or the job of one.
    """
    owner = living_owner(run.folder / LOCK_FILE)
    if owner is not None:
        raise RunLockedError(
            f"{run.folder}: driven by process {owner.pid} on {owner.host} already; end that "
            f"one first with: rlinf stop {run.folder}"
        )
    check_no_driver_job(run)


def find_driver_job(run: Run, client: SlurmClient | None = None) -> tuple[str, QueuedJob] | None:
    """The job that drives a run and how it is, where there is one that waits or runs.

    Raises:
        SlurmError: one was submitted, and Slurm does not answer.
    """
    last = read_job_note(run.folder / DRIVER_JOB_FOLDER)
    if last is None:
        return None
    client = client or SlurmClient()
    ids = last.find_ids(client)
    queue = client.queue() if ids else {}
    there = ((i, queue[i]) for i in ids if i in queue and queue[i].state.is_active)
    return next(there, None)


def last_driver_job_id(run: Run) -> str | None:
    """The id of the driver's job that was submitted last; None where it has none, or not yet."""
    last = read_job_note(run.folder / DRIVER_JOB_FOLDER)
    return None if last is None else last.id or None


def check_no_driver_job(run: Run) -> None:
    """Let no other driver begin while there is a job to drive the run, which may only wait.

    Raises:
        RunLockedError: there is.
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
    """Drive; returns the exit code."""
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
