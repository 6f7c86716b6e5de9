"""``rlinf submit``: check a run and submit its driver as a job, or only write the job scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from launchers.launcher import JobSpec
from launchers.sbatch import batch_script, restarting_script
from pipeline.cluster_config import ClusterConfig
from pipeline.commands.driver_job import driver_job, driver_resources
from pipeline.commands.driver_job import submit_driver_job as submit_job
from pipeline.commands.experiment import (
    cluster_config,
    compose_words,
    is_run_folder,
    validate_experiment,
    validate_overrides,
)
from pipeline.graph import Graph
from pipeline.job_executor import stage_job
from pipeline.plan import Plan
from pipeline.pools.leases import PoolState, pool_job, pool_states
from pipeline.resources import job_resources, pool_resources, resolve_plan, stage_interpreter
from pipeline.resume import OnMismatch, check_resumable, create_run
from pipeline.run import Run
from pipeline.run_control import start_lock
from pipeline.run_state import RunState
from rlinf.artifacts import write_user_file
from rlinf.errors import ConfigError
from slurm.client import SlurmClient
from slurm.sbatch_options import check_log_folder
from stages.layout import CONFIG_FILE, PLAN_FILE
from stages.runner import StageCall


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
    needs = driver_resources(cluster, plan, SlurmClient())
    with start_lock(run):
        if is_run_folder(words) and not words[1:]:
            with run.lock():
                check_resumable(RunState(run, Graph(run.config)), on_mismatch)
        else:
            run = create_run(run.config, plan.to_dict() if is_new_plan else None, on_mismatch)
        job_id = submit_job(driver_job(run, needs))
    lines = [f"run {run.folder}: the driver is job {job_id} on {needs.partition}"]
    if cluster.launcher != "slurm":
        lines.append(
            f"cluster={cluster.launcher}: all stages run inside that job and share its resources"
        )
    return [
        *lines,
        f"follow it with: rlinf status {run.folder}",
        f"stop it with: rlinf stop {run.folder}",
    ]


def write_dry_run(words: Sequence[str], driver: Mapping[str, Any] | None) -> list[str]:
    """Write the sbatch scripts, configuration and plan beside the run directory; returns one line
    each.

    Args:
        driver: as for :func:`submit_run`; None: the driver would run in this process.

    Raises:
        ConfigError, DataError, PlanError, SlurmError: as :func:`submit_run`.
    """
    run, plan, _ = _run_and_plan(words)
    cluster = _cluster_with_driver(run, driver or {})
    if driver is None and cluster.launcher != "slurm":
        raise ConfigError(
            f"--dry-run: cluster={cluster.launcher} submits nothing; add cluster=slurm"
        )
    scripts = {}
    if driver is not None:
        needs = driver_resources(cluster, plan, SlurmClient())
        scripts["driver"] = restarting_script(driver_job(run, needs))
    if cluster.launcher == "slurm":
        jobs = _pools(run, plan, cluster) if plan.pools else _stages(run, plan, cluster)
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
    names = ", ".join(f"{name}.sh" for name in scripts)
    return [f"{target}: {CONFIG_FILE}, {PLAN_FILE}, {names}", "nothing was submitted"]


def _run_and_plan(words: Sequence[str]) -> tuple[Run, Plan, bool]:
    """Return the run, whose directory may not exist yet, its plan, and whether the plan is new."""
    if not is_run_folder(words):
        config, plan = validate_experiment(compose_words(words))
        return Run(config.run.folder, config), plan, True
    folder = Path(words[0])
    if words[1:]:
        config, plan, names_plan = validate_overrides(folder, words[1:])
        return Run(config.run.folder, config), plan, names_plan
    run = Run.open(folder)
    return run, resolve_plan(Plan.from_run(run.folder), cluster_config(run)), False


def _cluster_with_driver(run: Run, driver: Mapping[str, Any]) -> ClusterConfig:
    check_log_folder(run.folder)
    configured = run.config.cluster.get("driver") or {}
    return cluster_config(run, {"driver": {**configured, **driver}})


def _stages(run: Run, plan: Plan, cluster: ClusterConfig) -> Iterator[tuple[str, list[JobSpec]]]:
    """Yield the first job of every stage."""
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
        needs = job_resources(plan.stage_plan(node.stage), cluster, python)
        yield node.stage, [stage_job(node, call, run.folder, needs)]


def _pools(run: Run, plan: Plan, cluster: ClusterConfig) -> Iterator[tuple[str, list[JobSpec]]]:
    """Yield the jobs of all pools; pools of a heterogeneous job share one script."""
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
