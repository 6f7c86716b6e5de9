"""Compose, validate, create or reopen, and drive a run. All commands and the Python API use these
functions. ``words`` are overrides (``key=value``); in some, the first word is a run directory."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.callbacks import (
    ProgressCallback,
    TrackerCallback,
    check_notify_command,
    notify_at_end,
)
from pipeline.driver import Driver, RunCallback
from pipeline.executors import InProcessExecutor, StageExecutor
from pipeline.gpu_hours import GpuBudget, GpuHours, MeteredLauncher, check_budget, driver_gpus
from pipeline.graph import Graph
from pipeline.health_checks import HealthCheckCallback
from pipeline.plan import Plan, load_plan
from pipeline.report import write_report
from pipeline.resources import (
    ClusterConfig,
    discover_cluster,
    plan_job_requests,
    pool_resources,
    resolve_plan,
)
from pipeline.resume import OnMismatch
from pipeline.run import Run, read_run_record, write_problem_sets
from pipeline.run_control import StopRequest, check_no_driver_job, start_lock
from rlinf import package_paths
from rlinf.config import RunConfig, validate
from rlinf.errors import (
    ConfigError,
    InterruptedByUser,
    PlanError,
    RequeueRequested,
    RunStopped,
    translate_resource_errors,
)
from rlinf.hydra_config import force_add, to_config_error
from rlinf.user_code import translate_user_errors
from slurm.jobs import JobResources, current_job_resources
from slurm.stop_signals import StopFlag
from stages.layout import CONFIG_FILE, PLAN_FILE
from stages.runner import read_config_values
from stages.worker_state import WorkerState

if TYPE_CHECKING:
    from pipeline.pools.executor import PoolExecutor  # imported when the plan has pools
    from rlinf.envs.base import TaskSize
    from slurm.inventory import Inventory


def prepare_run(values: Mapping[str, Any], on_mismatch: OnMismatch = OnMismatch.ERROR) -> Run:
    """Validate a composed configuration, and create or reopen its run directory.

    Args:
        on_mismatch: handling of results that this configuration would not reproduce.

    Raises:
        ConfigError, DataError, PlanError, MismatchError: nothing was written.
        RunLockedError: the run has a driver, or another process is starting it.
    """
    # Imported lazily: these load algorithms and policies.
    from pipeline.disk_space import check_disk_space
    from pipeline.resume import create_run

    config, plan, size = _validate(values, current_job_resources())
    check_disk_space(config)
    with start_lock(Run(config.run.folder, config)):
        run = create_run(config, plan.to_dict(), on_mismatch)
        write_problem_sets(run.folder, size.problem_sets)
        return run


def validate_experiment(
    values: Mapping[str, Any],
    driver: JobResources | None = None,
    inventory: Inventory | None = None,
) -> tuple[RunConfig, Plan]:
    """Return a composed configuration and its plan after all checks; nothing is written.

    Args:
        driver: resources of the job in which the driver will run; None if it runs in no job or
            they are unknown.
        inventory: a saved inventory of the cluster; None queries Slurm if its jobs are used.

    Raises:
        ConfigError, DataError, PlanError: configuration or plan is invalid.
    """
    return _validate(values, driver, inventory)[:2]


def _validate(
    values: Mapping[str, Any],
    driver: JobResources | None = None,
    inventory: Inventory | None = None,
) -> tuple[RunConfig, Plan, TaskSize]:
    """Return configuration, plan and size of the task; see :func:`validate_experiment`."""
    # Imported lazily: these load engines and trainers, which a driver does not need.
    from pipeline.validate_config import (
        check_gpu_counts,
        check_layouts,
        check_residency,
        check_separate_policy,
        complete_config,
        validate_config,
    )

    config = complete_config(validate(RunConfig, values))
    size = validate_config(config)
    plan = load_plan(config)
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    if cluster.network_interface is not None:
        from rlinf.channels.curve_sockets import interface_address

        interface_address(cluster.network_interface)
    inventory = inventory or discover_cluster(cluster)
    plan = resolve_plan(plan, cluster, inventory)
    check_notify_command(cluster.notify_command)
    if plan.execution == "pools" and cluster.launcher == "inprocess":
        raise PlanError(
            "plan: pools need processes of their own; add cluster=local (this "
            "machine) or cluster=slurm"
        )
    plan.check_transports(Graph(config).edges())
    check_separate_policy(config, plan)
    for number in range(len(plan.pools)):
        pool_resources(plan, number)
    check_layouts(config, plan)
    check_residency(config, plan, cluster.launcher)
    if config.budget.gpu_hours is not None:
        requests = plan_job_requests(plan, cluster) if cluster.launcher == "slurm" else {}
        jobs = [job for alternatives in requests.values() for job in alternatives]
        check_budget(config.budget.gpu_hours, cluster.launcher, jobs)
    check_gpu_counts(config, plan)
    if inventory is not None and cluster.launcher == "slurm":
        from pipeline.job_executor import check_plan_fits

        check_plan_fits(cluster, plan, inventory, driver)
    return config, plan, size


def run_experiment(values: Mapping[str, Any], on_mismatch: OnMismatch = OnMismatch.ERROR) -> Path:
    """Run a composed configuration to its end; returns the path of the report."""
    with translate_resource_errors(), translate_user_errors():
        return drive(prepare_run(values, on_mismatch))


def open_run(words: Sequence[str]) -> Run:
    """Open a run directory (the first word) with overrides, or prepare the run of an experiment.

    Raises:
        ConfigError, DataError, PlanError: nothing was written.
    """
    if not is_run_folder(words):
        return prepare_run(compose_words(words))
    folder, further = Path(words[0]), words[1:]
    if not further:
        return Run.open(folder)
    return reopen_run(folder, further)


def load_configuration(words: Sequence[str]) -> RunConfig:
    """Return the validated configuration of a run directory or experiment, without creating a run.

    Raises:
        ConfigError, DataError: the configuration is invalid.
    """
    if is_run_folder(words) and not words[1:]:
        return Run.open(Path(words[0])).config
    from pipeline.validate_config import complete_config, validate_config

    values = (
        apply_overrides(Path(words[0]), words[1:]) if is_run_folder(words) else compose_words(words)
    )
    config = complete_config(validate(RunConfig, values))
    validate_config(config)
    return config


def is_run_folder(words: Sequence[str]) -> bool:
    """Return whether the first word is a run directory; overrides may follow."""
    return bool(words) and "=" not in words[0] and not words[0].startswith(("+", "~", "-"))


def compose_words(words: Sequence[str]) -> dict[str, Any]:
    """Compose the overrides of a command; returns plain values.

    Raises:
        ConfigError: Hydra cannot compose the overrides.
    """
    return compose([force_add(word) for word in words])


def compose(overrides: Sequence[str], searchpath: Sequence[str] = ()) -> dict[str, Any]:
    """Compose a configuration with Hydra; returns plain values.

    Args:
        searchpath: folders of further configuration files.

    Raises:
        ConfigError: Hydra cannot compose the configuration.
    """
    return compose_from(package_paths.ROOT / "configs", "config", overrides, searchpath)


def compose_from(
    folder: Path, name: str, overrides: Sequence[str], searchpath: Sequence[str] = ()
) -> dict[str, Any]:
    """Compose a configuration from the file ``name`` of a folder.

    Raises:
        ConfigError: Hydra cannot compose the configuration.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            folders = ",".join(f"file://{Path(path).absolute()}" for path in searchpath)
            extra = [f"hydra.searchpath=[{folders}]"] if folders else []
            composed = hydra_compose(name, [*overrides, *extra], return_hydra_config=True)
        # Run names may contain chosen files (hydra:runtime.choices).
        HydraConfig.instance().set_config(composed)
        values = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        result = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise to_config_error(error) from None
    assert isinstance(result, dict)
    return {str(key): value for key, value in result.items()}


def drive(
    run: Run, overrides: Mapping[str, Any] | None = None, on_mismatch: OnMismatch = OnMismatch.ERROR
) -> Path:
    """Drive a run to its end and write the report; returns its path.

    Args:
        overrides: keys of the ``cluster`` section that differ from the run's configuration.
        on_mismatch: handling of results that this driver would not reproduce.

    Raises:
        MismatchError: there are such results, and ``on_mismatch`` is ERROR.
    """
    cluster = cluster_config(run, overrides)
    with (
        translate_resource_errors(),
        translate_user_errors(),
        notify_at_end(run.folder.name, cluster.notify_command),
    ):
        _drive(run, cluster, on_mismatch, setup_only=False)
        return write_report(run.folder)


def run_sft(run: Run) -> None:
    """Run the setup stages (SFT), which precede the first iteration, unless they are finished."""
    with translate_resource_errors(), translate_user_errors():
        _drive(run, cluster_config(run), OnMismatch.ERROR, setup_only=True)


def cluster_config(run: Run, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """Return the cluster section of a run, with overrides that are not saved.

    Raises:
        ConfigError: a key is unknown or a value invalid.
    """
    return validate(ClusterConfig, {**run.config.cluster, **(overrides or {})}, "cluster")


def _drive(run: Run, cluster: ClusterConfig, on_mismatch: OnMismatch, *, setup_only: bool) -> None:
    check_no_driver_job(run)
    gpu_hours = GpuHours(run.folder)
    budget = GpuBudget(gpu_hours, run.config.budget.gpu_hours, driver_gpus(cluster.launcher))
    with StopFlag() as flag, ProgressCallback(run, cluster.launcher) as progress:
        stop = StopRequest(run.folder, flag.is_set)
        executor: StageExecutor
        pools: PoolExecutor | None = None
        if cluster.launcher == "inprocess":
            executor = InProcessExecutor(
                run,
                WorkerState(on_progress=progress.on_stage_progress),
                stop,
                60 * (cluster.progress_timeout_min or 0),
            )
        else:
            from pipeline.job_executor import JobExecutor, create_launcher

            inventory = discover_cluster(cluster)
            plan = resolve_plan(Plan.from_run(run.folder), cluster, inventory)
            launcher = create_launcher(cluster, plan, current_job_resources(), inventory)
            if cluster.launcher == "slurm":
                from slurm.client import SlurmClient

                launcher = MeteredLauncher(launcher, gpu_hours, SlurmClient().elapsed_s)
            if plan.execution == "pools":
                from pipeline.pools.executor import PoolExecutor

                pools = PoolExecutor(run, launcher, plan, cluster, stop, progress.on_stage_progress)
            executor = pools or JobExecutor(run, launcher, plan, cluster, stop)
        trackers = TrackerCallback(run)
        callbacks: list[RunCallback] = [progress, HealthCheckCallback(run), trackers]
        try:
            driver = Driver(
                run, executor, callbacks, cluster.max_retries, setup_only, on_mismatch, budget
            )
            driver.drive()
            if driver.is_over_budget:
                log.warning(
                    "budget.gpu_hours: %s; the run ends before its last iteration. Continue with: "
                    "rlinf resume %s budget.gpu_hours=...",
                    budget.describe(),
                    run.folder,
                )
            never_started = pools is not None and not pools.has_started
            if never_started and cluster.launcher == "slurm" and not setup_only:
                from pipeline.commands.stop import cancel_run_jobs

                # Nothing was left to compute, but the pools of an earlier driver may still wait.
                for line in cancel_run_jobs(run.folder):
                    log.info("remaining from an earlier driver: %s", line)
        except KeyboardInterrupt:
            raise InterruptedByUser(
                f"interrupted; {executor.interrupt_note}, and all committed results are kept. "
                f"Continue with: rlinf resume {run.folder}"
            ) from None
        except RequeueRequested:
            if stop.is_requested:
                raise RunStopped(
                    f"stopped by rlinf stop; continue with: rlinf resume {run.folder}"
                ) from None
            raise
        finally:
            trackers.close()


def reopen_run(
    folder: Path, words: Sequence[str], on_mismatch: OnMismatch = OnMismatch.ERROR
) -> Run:
    """Open a run as ``rlinf run`` would with ``words`` added to the original overrides.

    Args:
        words: overrides of the frozen configuration.

    Raises:
        ConfigError, DataError, PlanError, MismatchError: nothing was written.
        RunLockedError: the run has a driver, or another process is starting it.
    """
    from pipeline.resume import create_run  # imported lazily: loads algorithms

    config, plan, names_plan = validate_overrides(folder, words, current_job_resources())
    with start_lock(Run(config.run.folder, config)):
        return create_run(config, plan.to_dict() if names_plan else None, on_mismatch)


def validate_overrides(
    folder: Path,
    words: Sequence[str],
    driver: JobResources | None = None,
    inventory: Inventory | None = None,
) -> tuple[RunConfig, Plan, bool]:
    """Return the validated configuration and plan of a run with overrides; nothing is written.

    If an override names a plan, or the run directory has none, the plan is that of the
    configuration and the third value is True. Otherwise it is that of the run directory.

    Args:
        driver: see :func:`validate_experiment`, also for ``inventory``.

    Raises:
        ConfigError, DataError, PlanError: configuration or plan is invalid.
    """
    values = apply_overrides(folder, words)
    names_plan = any(_key(word) == "plan" for word in words)
    plan_file = Run.open(folder).folder / PLAN_FILE
    if names_plan or not plan_file.exists():
        return *validate_experiment(values, driver, inventory), True
    config_plan = values.get("plan")
    config, plan = validate_experiment(
        {**values, "plan": yaml.safe_load(plan_file.read_text("utf-8"))}, driver, inventory
    )
    return config.model_copy(update={"plan": config_plan}), plan, False


def apply_overrides(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return the frozen values of a run with overrides.

    ``SECTION=NAME`` replaces the whole section by ``configs/SECTION/NAME.yaml``.

    Raises:
        ConfigError: an override cannot be composed, or sets ``run``, ``hydra`` or ``experiment``.
    """
    folder = Run.open(folder).folder
    for word in words:
        if _key(word).split(".")[0] in ("run", "hydra") or _key(word) == "experiment":
            raise ConfigError(
                f"{word}: cannot change in a resumed run ({folder}); remove it, or start another "
                "run with rlinf run"
            )
    values = read_config_values(folder / CONFIG_FILE)
    record = read_run_record(folder)
    for key in (record.derived if record is not None else None) or ():
        section, _, name = key.partition(".")
        # If the task stays, so do the values derived from its environment, which may not be
        # installed here.
        if section != "task" or any(_key(word).split(".")[0] == "task" for word in words):
            values[section][name] = None
    values["run"] = {"name": folder.name, "root": str(folder.parent)}
    choices = [word for word in words if _is_config_group(word)]
    base = {key: value for key, value in values.items() if key not in map(_key, choices)}
    value_overrides = [force_add(word) for word in words if word not in choices]
    with tempfile.TemporaryDirectory() as scratch:
        text = yaml.safe_dump({"defaults": ["_self_"], **_escape(base)}, sort_keys=False)
        Path(scratch, "frozen.yaml").write_text(text, encoding="utf-8")
        all_overrides = [*(f"+{word}" for word in choices), *value_overrides]
        searchpath = [str(package_paths.ROOT / "configs")]
        return compose_from(Path(scratch), "frozen", all_overrides, searchpath)


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _is_config_group(word: str) -> bool:
    """Return whether an override chooses a file of a section (``SECTION=NAME``)."""
    return force_add(word) == word and (package_paths.ROOT / "configs" / _key(word)).is_dir()


def _escape(value: Any) -> Any:
    """Escape ``${`` in a frozen value, so that Hydra does not resolve it as an interpolation."""
    if isinstance(value, Mapping):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


log = logging.getLogger("rlinf")
