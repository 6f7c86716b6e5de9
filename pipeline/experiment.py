"""From a composed configuration to a finished run: what every way of starting one calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.check import check
from pipeline.driver import Driver, Executor, InProcess, Listener
from pipeline.launch import ClusterConfig, LauncherExecutor, make_launcher
from pipeline.plan import Plan, load_plan
from pipeline.report import write_report
from pipeline.run import Run
from pipeline.show import Console, Trackers
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError, storage_error
from slurm.signals import StopFlag


def prepare(values: Mapping[str, Any]) -> Run:
    """Validate a composed configuration and make (or reopen) its run directory.

    Raises:
        ConfigError, DataError, PlanError: nothing was written.
    """
    config = validate(RunConfig, values)
    check(config)
    plan = load_plan(config)
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    if plan.grain == "segment":
        raise PlanError(
            "plan: grain: segment: no driver runs pools yet; make a plan with --grain stage"
        )
    if cluster.launcher != "inprocess":
        make_launcher(cluster, plan).close()
    return Run.create(config, plan.dump())


def execute(values: Mapping[str, Any]) -> Path:
    """Run a composed configuration to its end; returns the path of the report."""
    return drive(prepare(values))


def drive(run: Run, overrides: Mapping[str, Any] | None = None) -> Path:
    """Take a run from where it is to its end and write the report.

    Args:
        overrides: keys of the ``cluster`` section that differ this time.
    """
    cluster = validate(ClusterConfig, {**run.config.cluster, **(overrides or {})}, "cluster")
    try:
        return _drive(run, cluster)
    except OSError as error:
        full = storage_error(error)
        if full is not None:
            raise full from error
        raise


def _drive(run: Run, cluster: ClusterConfig) -> Path:
    with StopFlag() as stop, Console(run) as console:
        executor: Executor
        if cluster.launcher == "inprocess":
            executor = InProcess(run, {"progress": console.progress}, stop.is_set)
        else:
            plan = Plan.read(run.folder)
            executor = LauncherExecutor(
                run, make_launcher(cluster, plan), plan, cluster, stop.is_set
            )
        listeners: list[Listener] = [console, Trackers(run)]
        Driver(run, executor, listeners, cluster.retries).drive()
    return write_report(run.folder)
