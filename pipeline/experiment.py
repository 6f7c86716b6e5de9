"""From a composed configuration to a finished run: what every way of starting one calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.check import check
from pipeline.driver import Driver, Executor, InProcess, Listener
from pipeline.flow import Graph
from pipeline.launch import ClusterConfig, LauncherExecutor, make_launcher
from pipeline.leases import pool_needs
from pipeline.plan import Plan, load_plan
from pipeline.pools import PoolExecutor
from pipeline.report import write_report
from pipeline.run import Run
from pipeline.show import Console, Trackers
from rlinf import tree
from rlinf.channels.curve import address_on
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError, PlanError, told_of_exhaustion
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
    if cluster.interface is not None:
        address_on(cluster.interface)
    if plan.grain == "segment" and cluster.launcher == "inprocess":
        raise PlanError(
            "plan: grain: segment: pools are processes of their own; add cluster=local (this "
            "machine) or cluster=slurm"
        )
    plan.check_edges(Graph(config).edges())
    for number in range(len(plan.pools)):
        pool_needs(plan, number)
    if cluster.launcher != "inprocess":
        make_launcher(cluster, plan).close()
    return Run.create(config, plan.dump())


def execute(values: Mapping[str, Any]) -> Path:
    """Run a composed configuration to its end; returns the path of the report."""
    with told_of_exhaustion():
        return drive(prepare(values))


def named(words: Sequence[str]) -> Run:
    """The run of a directory, or of the experiment that overrides compose.

    Raises:
        ConfigError, DataError, PlanError: nothing was written.
    """
    if _is_folder(words):
        return Run.open(Path(words[0]))
    return prepare(compose(_forced(words)))


def configuration(words: Sequence[str]) -> RunConfig:
    """The checked configuration of the same; no run directory is made.

    Raises:
        ConfigError, DataError: it cannot be used.
    """
    if _is_folder(words):
        return Run.open(Path(words[0])).config
    config = validate(RunConfig, compose(_forced(words)))
    check(config)
    return config


def _is_folder(words: Sequence[str]) -> bool:
    return len(words) == 1 and "=" not in words[0]


def _forced(words: Sequence[str]) -> list[str]:
    from rlinf.launch import forced

    return [forced(word) for word in words]


def compose(overrides: list[str]) -> dict[str, Any]:
    """The configuration Hydra composes, as plain values.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(tree.ROOT / "configs"), version_base="1.3"):
            values = hydra_compose("config", overrides)
        plain = OmegaConf.to_container(values, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def drive(run: Run, overrides: Mapping[str, Any] | None = None) -> Path:
    """Take a run from where it is to its end and write the report.

    Args:
        overrides: keys of the ``cluster`` section that differ this time.
    """
    with told_of_exhaustion():
        _drive(run, overrides or {}, offline=False)
        return write_report(run.folder)


def warm_start(run: Run) -> None:
    """Run the stages before the first iteration, unless that is done."""
    with told_of_exhaustion():
        _drive(run, {}, offline=True)


def _drive(run: Run, overrides: Mapping[str, Any], *, offline: bool) -> None:
    cluster = validate(ClusterConfig, {**run.config.cluster, **overrides}, "cluster")
    with StopFlag() as stop, Console(run) as console:
        executor: Executor
        if cluster.launcher == "inprocess":
            executor = InProcess(run, {"progress": console.progress}, stop.is_set)
        else:
            plan = Plan.read(run.folder)
            launcher = make_launcher(cluster, plan)
            if plan.grain == "segment":
                executor = PoolExecutor(run, launcher, plan, cluster, stop.is_set, console.progress)
            else:
                executor = LauncherExecutor(run, launcher, plan, cluster, stop.is_set)
        listeners: list[Listener] = [console, Trackers(run)]
        Driver(run, executor, listeners, cluster.retries, offline).drive()
