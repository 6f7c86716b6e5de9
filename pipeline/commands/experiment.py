"""From a composed configuration to a finished run: what every way of starting one calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.commands.driver_job import refuse_beside_job, starting
from pipeline.commands.stop import Stopping, cancel_jobs
from pipeline.driver import Driver, Executor, InProcess, Listener
from pipeline.flow import Graph
from pipeline.launch import ClusterConfig, LauncherExecutor, make_launcher, settled
from pipeline.needs import pool_needs
from pipeline.notices import Notices
from pipeline.notify import announced, check_command
from pipeline.plan import Plan, load_plan
from pipeline.pools.executor import PoolExecutor
from pipeline.report import write_report
from pipeline.run import Run
from pipeline.settle import Choice
from pipeline.show import Console, Trackers
from rlinf import tree
from rlinf.channels.curve import address_on
from rlinf.composing import explained, forced
from rlinf.config import RunConfig, validate
from rlinf.errors import (
    Interrupted,
    PlanError,
    RequeueRequested,
    RunStopped,
    told_of_exhaustion,
)
from rlinf.user_code import reporting_user_errors
from slurm.jobs import Resources, own_job
from slurm.signals import StopFlag
from stages.resident import Resident

log = logging.getLogger("rlinf")


def prepare(values: Mapping[str, Any], choice: Choice = Choice.ASK) -> Run:
    """Validate a composed configuration and make (or reopen) its run directory.

    Args:
        choice: what to do about results that it would not make the same.

    Raises:
        ConfigError, DataError, PlanError, MismatchError: nothing was written.
        RunLockedError: a driver is at work there, or another process starts the run.
    """
    from pipeline.freeze import create_run  # it loads algorithms, as the checks do

    config, plan = checked(values, own_job())
    with starting(Run(config.run.folder, config)):
        return create_run(config, plan.dump(), choice)


def checked(values: Mapping[str, Any], driver: Resources | None = None) -> tuple[RunConfig, Plan]:
    """A composed configuration and its plan, after all checks; nothing is written.

    Args:
        driver: what the job asks for in which the driver will run; None: in none, or it is not
            known yet.

    Raises:
        ConfigError, DataError, PlanError: they cannot be used.
    """
    # They load engines and trainers, which a driver has no use for.
    from pipeline.check import check, check_layouts, completed
    from pipeline.fitting import check_apart

    config = completed(validate(RunConfig, values))
    check(config)
    plan = load_plan(config)
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    if cluster.interface is not None:
        address_on(cluster.interface)
    plan = settled(plan, cluster)
    check_command(cluster.notify)
    if plan.grain == "segment" and cluster.launcher == "inprocess":
        raise PlanError(
            "plan: grain: segment: pools are processes of their own; add cluster=local (this "
            "machine) or cluster=slurm"
        )
    plan.check_edges(Graph(config).edges())
    check_apart(config, plan)
    for number in range(len(plan.pools)):
        pool_needs(plan, number)
    check_layouts(config, plan)
    if cluster.launcher != "inprocess":
        make_launcher(cluster, plan, driver).close()
    return config, plan


def execute(values: Mapping[str, Any], choice: Choice = Choice.ASK) -> Path:
    """Run a composed configuration to its end; returns the path of the report."""
    with told_of_exhaustion(), reporting_user_errors():
        return drive(prepare(values, choice))


def named(words: Sequence[str]) -> Run:
    """The run of a directory, with overrides if any follow, or of the experiment that they compose.

    Raises:
        ConfigError, DataError, PlanError: nothing was written.
    """
    if not is_folder(words):
        return prepare(composed(words))
    folder, further = Path(words[0]), words[1:]
    if not further:
        return Run.open(folder)
    from pipeline.commands.overrides import reopen

    return reopen(folder, further)


def configuration(words: Sequence[str]) -> RunConfig:
    """The checked configuration of the same; no run directory is made.

    Raises:
        ConfigError, DataError: it cannot be used.
    """
    if is_folder(words) and not words[1:]:
        return Run.open(Path(words[0])).config
    from pipeline.check import check, completed
    from pipeline.commands.overrides import changed

    values = changed(Path(words[0]), words[1:]) if is_folder(words) else composed(words)
    config = completed(validate(RunConfig, values))
    check(config)
    return config


def is_folder(words: Sequence[str]) -> bool:
    """Whether words begin with a run directory, which overrides may follow."""
    return bool(words) and "=" not in words[0] and not words[0].startswith(("+", "~", "-"))


def composed(words: Sequence[str]) -> dict[str, Any]:
    """The configuration of a command's overrides, as plain values.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    return compose([forced(word) for word in words])


def compose(overrides: Sequence[str], searchpath: Sequence[str] = ()) -> dict[str, Any]:
    """The configuration Hydra composes, as plain values.

    Args:
        searchpath: folders of further configuration files.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    return compose_in(tree.ROOT / "configs", "config", overrides, searchpath)


def compose_in(
    folder: Path, name: str, overrides: Sequence[str], searchpath: Sequence[str] = ()
) -> dict[str, Any]:
    """The same, beginning with the file ``name`` of a folder.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            further = ",".join(f"file://{Path(path).absolute()}" for path in searchpath)
            path = [f"hydra.searchpath=[{further}]"] if further else []
            whole = hydra_compose(name, [*overrides, *path], return_hydra_config=True)
        # Names of runs may be made of files that were chosen: hydra:runtime.choices.
        HydraConfig.instance().set_config(whole)
        values = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
        plain = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def drive(
    run: Run, overrides: Mapping[str, Any] | None = None, choice: Choice = Choice.ASK
) -> Path:
    """Take a run from where it is to its end and write the report.

    Args:
        overrides: keys of the ``cluster`` section that differ this time.
        choice: what to do about results that this program would not make the same.

    Raises:
        MismatchError: there are some, and nobody chose.
    """
    cluster = cluster_of(run, overrides)
    with (
        told_of_exhaustion(),
        reporting_user_errors(),
        announced(run.folder.name, cluster.notify),
    ):
        _drive(run, cluster, choice, offline=False)
        return write_report(run.folder)


def warm_start(run: Run) -> None:
    """Run the stages before the first iteration, unless that is done."""
    with told_of_exhaustion(), reporting_user_errors():
        _drive(run, cluster_of(run), Choice.ASK, offline=True)


def cluster_of(run: Run, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """The cluster section of a run, with keys that differ this time.

    Raises:
        ConfigError: a key is wrong.
    """
    return validate(ClusterConfig, {**run.config.cluster, **(overrides or {})}, "cluster")


def _drive(run: Run, cluster: ClusterConfig, choice: Choice, *, offline: bool) -> None:
    refuse_beside_job(run)
    with StopFlag() as flag, Console(run, cluster.launcher) as console:
        stop = Stopping(run.folder, flag.is_set)
        executor: Executor
        if cluster.launcher == "inprocess":
            executor = InProcess(run, Resident(progress=console.progress), stop)
        else:
            plan = settled(Plan.read(run.folder), cluster)
            launcher = make_launcher(cluster, plan, own_job())
            if plan.grain == "segment":
                executor = PoolExecutor(run, launcher, plan, cluster, stop, console.progress)
            else:
                executor = LauncherExecutor(run, launcher, plan, cluster, stop)
        trackers = Trackers(run)
        listeners: list[Listener] = [console, Notices(run), trackers]
        try:
            Driver(run, executor, listeners, cluster.retries, offline, choice).drive()
            idle = isinstance(executor, PoolExecutor) and not executor.begun
            if idle and cluster.launcher == "slurm" and not offline:
                # All was done before: pools of a driver that died at the end still wait for one.
                for line in cancel_jobs(run.folder):
                    log.info("left by another driver: %s", line)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; {executor.remains}, and all that was committed stays. "
                f"Go on with: rlinf resume {run.folder}"
            ) from None
        except RequeueRequested:
            if stop.named:
                raise RunStopped(
                    f"stopped by rlinf stop; go on with: rlinf resume {run.folder}"
                ) from None
            raise
        finally:
            trackers.close()
