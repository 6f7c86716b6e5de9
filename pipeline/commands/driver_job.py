"""The driver of a run as a small Slurm job.

The job runs ``python -m pipeline.commands.driver_job RUN``. It is requeued before its time limit,
when its node is lost, and when the driver was killed. The restarted driver finds pools and jobs by
their job files in the run directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launchers.launcher import JobSpec
from launchers.sbatch import new_tag, submit_restarting, with_tag
from launchers.submission_queue import write_submitted_job
from pipeline.cluster_config import ClusterConfig
from pipeline.plan import Plan, StagePlan
from pipeline.resources import check_quotas, job_resources, plan_job_requests
from pipeline.run import Run
from rlinf import process_tuning
from rlinf.errors import PlanError, RlinfError, SlurmError, SlurmUnresponsiveError
from slurm.client import Partition, SlurmClient, default_partition, partition_names
from slurm.job_limits import check_resources, read_quotas
from slurm.jobs import JOB_FILE, JobResources
from slurm.sbatch_options import portable_options
from slurm.site import PartitionSettings, load_site
from stages.layout import DRIVER_JOB_FOLDER

DEFAULT_TIME_LIMIT_MIN = 24 * 60


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
        PlanError: the cluster lacks them, or accounting does not allow them in addition to the
            plan's jobs.
        SlurmError: Slurm is not installed or does not answer.
    """
    settings, partitions = cluster.driver, client.partitions()
    # The default partition is named, because the site file may have settings for it.
    partition = settings.partition or default_partition(partitions)
    stage_plan = StagePlan(
        partition=partition,
        cpus=settings.cpus,
        mem_mb=settings.mem_mb,
        time_limit_min=settings.time_limit_min or _default_time_limit_min(partition, partitions),
    )
    needs = _without_large_job_settings(job_resources(stage_plan, cluster), cluster, partitions)
    quotas = read_quotas(client)
    max_minutes = quotas.max_minutes(needs) if settings.time_limit_min is None else None
    if max_minutes is not None and needs.time_limit_min is not None:
        needs = replace(needs, time_limit_min=min(needs.time_limit_min, max_minutes[0]))
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

    QOS, constraint and reservation stay only if the site file sets them for the driver's partition
    and that partition has no GPUs. The defaults of the site file may be meant for GPU jobs.
    """
    settings, site = cluster.driver, PartitionSettings()
    partition = partitions.get(needs.partition or "")
    if cluster.site is not None and partition is not None and not partition.gpus:
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
    """Return one day, or the lowest limit of the listed partitions if that is less."""
    names = partition_names(partition or "")
    candidates = [p for p in partitions.values() if p.name in names]
    limits = [p.time_limit_min for p in candidates if p.time_limit_min is not None]
    return min([DEFAULT_TIME_LIMIT_MIN, *limits])


def submit_driver_job(job: JobSpec) -> str:
    """Submit the driver of a run and return its job id. Call it within :func:`start_lock`.

    The tag of the job is written first, so that the job is found even if this process ends before
    it has written the id.

    Raises:
        SlurmError: sbatch refused the job.
    """
    tag = new_tag()
    write_submitted_job(job, tag=tag)
    try:
        job_id = submit_restarting(with_tag(job, tag))
    except SlurmUnresponsiveError:
        raise  # the job may be queued; it is found by its tag
    except SlurmError:
        (job.output_dir / JOB_FILE).unlink()
        raise
    write_submitted_job(job, job_id)
    return job_id


def main(argv: Sequence[str] | None = None) -> int:
    """Drive a run; returns the exit code."""
    from pipeline.commands.experiment import drive

    process_tuning.tune_process()
    parser = argparse.ArgumentParser(prog="python -m pipeline.commands.driver_job")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--iterations", type=int, help="end after this many iterations this time")
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
