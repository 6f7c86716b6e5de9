"""The driver of a run as a small Slurm job, and ``rlinf submit``, which submits this job.

The job runs ``python -m pipeline.commands.driver_job RUN``. It is requeued before its time limit,
after the loss of its node, and after the driver was killed. The restarted driver finds pools and
jobs by their job files in the run directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from launchers.launcher import JobSpec
from launchers.sbatch import (
    batch_script,
    check_submission,
    new_tag,
    restarting_script,
    submit_restarting,
)
from launchers.submission_queue import write_submitted_job
from pipeline.commands.experiment import (
    cluster_config,
    compose_words,
    is_run_folder,
    validate_experiment,
    validate_overrides,
)
from pipeline.graph import Graph
from pipeline.job_executor import check_plan_fits, stage_job
from pipeline.plan import Plan, StagePlan
from pipeline.pools.leases import PoolState, pool_job, pool_states
from pipeline.resources import (
    ClusterConfig,
    check_job_limits,
    discover_cluster,
    job_resources,
    plan_job_requests,
    pool_resources,
    resolve_plan,
    stage_interpreter,
)
from pipeline.resume import OnMismatch, check_resumable, create_run
from pipeline.run import Run
from pipeline.run_control import start_lock
from pipeline.run_state import RunState
from rlinf import process_tuning
from rlinf.artifacts import write_user_file
from rlinf.errors import ConfigError, PlanError, RlinfError, SlurmError, SlurmUnresponsiveError
from slurm.client import SlurmClient
from slurm.discovery import discover_inventory
from slurm.inventory import (
    Inventory,
    PartitionInventory,
    load_inventory,
    partition_without_gpus,
)
from slurm.job_limits import check_resources, cluster_limits_from_inventory
from slurm.jobs import JOB_FILE, JobResources, partition_names
from slurm.sbatch_options import check_log_folder, portable_options
from slurm.site import PartitionSettings, load_site
from stages.layout import CONFIG_FILE, DRIVER_JOB_FOLDER, PLAN_FILE
from stages.runner import StageCall

DEFAULT_TIME_LIMIT_MIN = 24 * 60
DEFAULT_MEM_MB = 4000


def driver_job(run: Run, resources: JobResources) -> JobSpec:
    """Return the job that drives a run."""
    return JobSpec(
        f"driver/{run.folder.name}",
        (str(run.folder), "--iterations", str(run.config.iterations)),
        run.folder / DRIVER_JOB_FOLDER,
        run.folder / "logs" / DRIVER_JOB_FOLDER,
        resources,
        "pipeline.commands.driver_job",
    )


def driver_resources(cluster: ClusterConfig, plan: Plan, inventory: Inventory) -> JobResources:
    """Return the resources of the driver's job.

    Args:
        inventory: the inventory of the cluster.

    Raises:
        PlanError: the cluster lacks these resources, or accounting does not allow them in addition
            to the plan's jobs.
    """
    if cluster.site is not None:
        load_site(cluster.site).check_partitions(inventory.partitions, cluster.site)

    def accepts(partition: str) -> bool:
        try:
            _driver_resources_on(partition, cluster, inventory)
        except PlanError:
            return False
        return True

    # Name the partition also if it is the default one: the site file may have settings for it.
    partition = cluster.driver.partition or partition_without_gpus(inventory, accepts)
    resources = _driver_resources_on(partition, cluster, inventory)
    if cluster.launcher == "slurm":
        jobs = plan_job_requests(plan, cluster)
        check_job_limits(plan, jobs, cluster_limits_from_inventory(inventory), resources)
    return resources


def _driver_resources_on(
    partition: str | None, cluster: ClusterConfig, inventory: Inventory
) -> JobResources:
    """Return the resources of the driver's job in a partition, or in each of a list.

    Raises:
        PlanError: the partition or accounting does not allow such a job.
    """
    settings, partitions = cluster.driver, inventory.partitions
    own = [partitions[name] for name in partition_names(partition or "") if name in partitions]
    mem_mb = DEFAULT_MEM_MB if all(p.knows_memory for p in own) else None
    stage_plan = StagePlan(
        partition=partition,
        cpus=settings.cpus,
        mem_mb=settings.mem_mb or mem_mb,
        time_limit_min=settings.time_limit_min or _default_time_limit_min(own),
    )
    resources = _without_large_job_settings(job_resources(stage_plan, cluster), cluster, partitions)
    cluster_limits = cluster_limits_from_inventory(inventory)
    max_minutes = cluster_limits.max_minutes(resources) if settings.time_limit_min is None else None
    if max_minutes is not None and resources.time_limit_min is not None:
        resources = replace(resources, time_limit_min=min(resources.time_limit_min, max_minutes[0]))
    try:
        check_resources(resources, partitions, "cluster.driver")
        cluster_limits.check(resources, "cluster.driver")
    except PlanError as error:
        raise PlanError(str(error).removeprefix("plan: ")) from None
    return resources


def _without_large_job_settings(
    resources: JobResources, cluster: ClusterConfig, partitions: Mapping[str, PartitionInventory]
) -> JobResources:
    """Return the resources without settings of the site file that are for larger jobs.

    QOS, constraint and reservation stay only if the site file sets them for the driver's partition
    and that partition has no GPUs. The defaults of the site file may be meant for GPU jobs. A
    driver that submits jobs runs outside of the container, which may lack the commands of Slurm.
    """
    settings, site = cluster.driver, PartitionSettings()
    partition = partitions.get(resources.partition or "")
    if cluster.site is not None and partition is not None and not partition.gpus:
        site = load_site(cluster.site).overrides_for(resources.partition)
    submits_jobs = cluster.launcher == "slurm"
    mail = {} if settings.mail is None else {"mail-user": settings.mail, "mail-type": "END,FAIL"}
    return replace(
        resources,
        account=settings.account or resources.account,
        qos=settings.qos or site.qos,
        constraint=settings.constraint or site.constraint,
        reservation=settings.reservation or site.reservation,
        exclude=settings.exclude or resources.exclude,
        python_command=() if submits_jobs else resources.python_command,
        srun={} if submits_jobs else resources.srun,
        sbatch={**portable_options(resources.sbatch), **mail, **settings.sbatch},
    )


def _default_time_limit_min(partitions: Sequence[PartitionInventory]) -> int:
    """Return one day, or the lowest limit of the partitions if that is less."""
    limits = [p.time_limit_min for p in partitions if p.time_limit_min is not None]
    return min([DEFAULT_TIME_LIMIT_MIN, *limits])


def submit_driver_job(job: JobSpec) -> str:
    """Submit the driver of a run and return its job id. Call it within :func:`start_lock`.

    The tag, a random text in the job's comment, is written first, so that the job can be found even
    if this process ends before it has written the id.

    Raises:
        SlurmError: sbatch refused the job.
    """
    tag = new_tag()
    write_submitted_job(job, tag=tag)
    try:
        job_id = submit_restarting(job, tag)
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


def submit_run(
    words: Sequence[str], driver: Mapping[str, Any], on_mismatch: OnMismatch = OnMismatch.ERROR
) -> list[str]:
    """Submit the driver of a run as a job; returns one line per action.

    Args:
        words: a run directory with overrides of its configuration, or overrides that compose an
            experiment.
        driver: keys of ``cluster.driver`` that differ from the configuration.
        on_mismatch: handling of results that the run would not reproduce.

    Raises:
        ConfigError, DataError, PlanError, RunLockedError, MismatchError: nothing was submitted.
        SlurmError: Slurm does not answer, or refused the job.
    """
    run, plan, is_new_plan = _run_and_plan(words)
    cluster = _cluster_with_driver(run, driver)
    resources = driver_resources(cluster, plan, _survey())
    with start_lock(run):
        if is_run_folder(words) and not words[1:]:
            with run.lock():
                check_resumable(RunState(run, Graph(run.config)), on_mismatch)
        else:
            run = create_run(run.config, plan.to_dict() if is_new_plan else None, on_mismatch)
        job_id = submit_driver_job(driver_job(run, resources))
    lines = [f"run {run.folder}: the driver is job {job_id} on {resources.partition}"]
    if cluster.launcher != "slurm":
        lines.append(
            f"cluster={cluster.launcher}: all stages run inside that job and share its resources"
        )
    return [
        *lines,
        f"follow it with: rlinf status {run.folder}",
        f"stop it with: rlinf stop {run.folder}",
    ]


def write_dry_run(
    words: Sequence[str], driver: Mapping[str, Any] | None, source: Path | None = None
) -> list[str]:
    """Write sbatch scripts, configuration and plan beside the run directory; returns output lines.

    Args:
        driver: as for :func:`submit_run`; None if the driver would run in this process.
        source: a saved inventory of the cluster, which replaces Slurm. None queries Slurm, and lets
            sbatch test each script.

    Raises:
        ConfigError, DataError, PlanError: as :func:`submit_run`.
        SlurmError: as :func:`submit_run`; or the scripts were written, but sbatch would refuse one.
    """
    inventory = None if source is None else load_inventory(source)
    run, plan, _ = _run_and_plan(words, inventory)
    cluster = _cluster_with_driver(run, driver or {})
    if driver is None and cluster.launcher != "slurm":
        raise ConfigError(
            f"--dry-run: cluster={cluster.launcher} submits nothing; add cluster=slurm"
        )
    scripts = {}
    if driver is not None:
        resources = driver_resources(cluster, plan, inventory or _survey())
        scripts["driver"] = restarting_script(driver_job(run, resources))
    if cluster.launcher == "slurm":
        jobs = _pool_jobs(run, plan, cluster) if plan.pools else _stage_jobs(run, plan, cluster)
        scripts |= {name: batch_script(parts) for name, parts in jobs}
    target = run.folder.with_name(f"{run.folder.name}.dry-run")
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old_script in target.glob("*.sh"):
        old_script.unlink()
    config = run.config.model_dump(mode="json")
    write_user_file(target / CONFIG_FILE, yaml.safe_dump(config, sort_keys=False))
    write_user_file(target / PLAN_FILE, yaml.safe_dump(plan.to_dict(), sort_keys=False))
    for name, text in scripts.items():
        write_user_file(target / f"{name}.sh", text)
    paths = [target / f"{name}.sh" for name in scripts]
    names = ", ".join(path.name for path in paths)
    lines = [f"{target}: {CONFIG_FILE}, {PLAN_FILE}, {names}"]
    lines += _test_scripts(paths) if source is None else [f"sbatch was not called: --from {source}"]
    return [*lines, "nothing was submitted"]


def _test_scripts(scripts: Sequence[Path]) -> list[str]:
    """Let sbatch test batch scripts without submitting them; returns its answers.

    Raises:
        SlurmError: sbatch would refuse a script.
    """
    lines, num_refused = ["sbatch --test-only:"], 0
    for script in scripts:
        try:
            lines.append(f"  {script.name}: {check_submission(script)}")
        except SlurmUnresponsiveError as error:
            lines.append(f"  {script.name}: no answer ({error})")
        except SlurmError as error:
            num_refused += 1
            lines.append(f"  {script.name}: refused: {error}")
    if num_refused:
        raise SlurmError(
            f"{scripts[0].parent}: sbatch would refuse {num_refused} of {len(scripts)} scripts; "
            "change the plan or the site file (cluster.site)\n" + "\n".join(lines)
        )
    return lines


def _survey() -> Inventory:
    return discover_inventory(SlurmClient(), with_usage=False)


def _run_and_plan(
    words: Sequence[str], inventory: Inventory | None = None
) -> tuple[Run, Plan, bool]:
    """Return the run, whose directory may not exist yet, its plan, and whether the plan is new (not
    that of the run directory)."""
    if not is_run_folder(words):
        config, plan = validate_experiment(compose_words(words), None, inventory)
        return Run(config.run.folder, config), plan, True
    folder = Path(words[0])
    if words[1:]:
        config, plan, names_plan = validate_overrides(folder, words[1:], None, inventory)
        return Run(config.run.folder, config), plan, names_plan
    run = Run.open(folder)
    cluster = cluster_config(run)
    inventory = inventory or discover_cluster(cluster)
    plan = resolve_plan(Plan.from_run(run.folder), cluster, inventory)
    if inventory is not None and cluster.launcher == "slurm":
        # The cluster may have changed since the run was created.
        check_plan_fits(cluster, plan, inventory)
    return run, plan, False


def _cluster_with_driver(run: Run, driver: Mapping[str, Any]) -> ClusterConfig:
    check_log_folder(run.folder)
    configured = run.config.cluster.get("driver") or {}
    return cluster_config(run, {"driver": {**configured, **driver}})


def _stage_jobs(
    run: Run, plan: Plan, cluster: ClusterConfig
) -> Iterator[tuple[str, list[JobSpec]]]:
    """Yield the name of every stage, and a list with the job of its first node."""
    graph = Graph(run.config)
    yielded: set[str] = set()
    for node in takewhile(lambda node: node.iteration < 2, graph.nodes()):
        if node.stage in yielded:
            continue
        yielded.add(node.stage)
        inputs = {
            name: graph.output_folder(run.folder, source)
            for name, source in graph.inputs(node).items()
        }
        out = graph.output_folder(run.folder, node)
        call = StageCall(node.stage, run.folder / CONFIG_FILE, out, node.iteration, inputs)
        python = stage_interpreter(run.config, plan.flow, node.stage)
        resources = job_resources(plan.stage_plan(node.stage), cluster, python)
        yield node.stage, [stage_job(node, call, run.folder, resources)]


def _pool_jobs(run: Run, plan: Plan, cluster: ClusterConfig) -> Iterator[tuple[str, list[JobSpec]]]:
    """Yield the name and the jobs of each script; pools of a heterogeneous job share a script."""
    states = pool_states(plan)
    for state in [state for state in states if state.slot is not None]:
        number = state.number
        for slot in range(1, plan.pools[number].workers or 1):
            states.append(PoolState(number, (), pool_resources(plan, number, slot), slot))
    components = [state for state in states if plan.hetjob and state.slot is None]
    if components:
        yield "pools", [pool_job(run, plan, cluster, state) for state in components]
    for state in states:
        if state not in components:
            yield f"pool-{state.name}", [pool_job(run, plan, cluster, state)]
