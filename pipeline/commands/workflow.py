"""The Snakemake workflow: the graph of a run as inputs, outputs, arguments and resources of
rules."""

from __future__ import annotations

import atexit
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.commands.experiment import compose, prepare_run
from pipeline.executors import stage_call
from pipeline.graph import Graph, StageNode
from pipeline.lock import LOCK_FILE, RunLock
from pipeline.plan import Plan, StagePlan
from pipeline.resources import stage_interpreter
from pipeline.resume import OnMismatch, check_resumable
from pipeline.run import Run
from pipeline.run_control import check_no_driver_job
from pipeline.run_state import RunState, is_skipped
from rlinf.artifacts import MANIFEST
from rlinf.channels.process_group import LAYOUT_VARIABLE, SPEED_WEIGHTS_VARIABLE
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError, PlanError
from stages.flow import EVALUATE
from stages.layout import CONFIG_FILE, PLAN_FILE

DEFAULT_EXPERIMENT = "arithmetic_short"
"""Experiment of ``snakemake`` without arguments: a few iterations, each stage a process."""
RUNS = Path("runs")
"""Folder in which a run is found by its name."""
ITERATION = "iteration"
"""Name of the rule that runs all stages of an iteration (``jobs=iteration``)."""

log = logging.getLogger("rlinf")


def prepare_workflow(
    settings: Mapping[str, Any], *, is_driver: bool = True, dry_run: bool = False
) -> Workflow:
    """Prepare the workflow of ``--config experiment=... key=value``, or of a run: ``run=NAME``.

    Keys are those of the configuration with ``__`` instead of dots, which Snakemake forbids, or
    sections as YAML: ``rollout__batch_size=32`` or ``rollout='{batch_size: 32}'``. With
    ``jobs=iteration`` the stages of an iteration are one job.

    Args:
        is_driver: False in a job of the workflow: its run exists, and the main process drives it.
        dry_run: whether to write nothing into an existing run.

    Raises:
        ConfigError, DataError, PlanError: nothing was written.
        RunLockedError: the run has a driver.
    """
    remaining = dict(settings)
    on_mismatch = OnMismatch.from_flags(
        redo=bool(remaining.pop("redo", 0)), keep=bool(remaining.pop("keep", 0))
    )
    jobs = remaining.pop("jobs", "stage")
    if jobs not in ("stage", ITERATION):
        raise ConfigError(f"jobs: stage or {ITERATION} (got {jobs!r})")
    run_name = remaining.get("run")
    if isinstance(run_name, str):
        further = sorted(remaining.keys() - {"run"})
        if further:
            raise ConfigError(
                f"run={run_name} continues that run unchanged; remove {', '.join(further)}, "
                "or start another run with experiment=... run__name=..."
            )
        run = Run.open(_find_run_folder(run_name))
        if is_driver and not dry_run:
            check_no_driver_job(run)
        return Workflow(run, on_mismatch, by_iteration=jobs == ITERATION)
    experiment = remaining.pop("experiment", DEFAULT_EXPERIMENT)
    overrides = [f"experiment={experiment}", *(f"++{word}" for word in _flatten(remaining))]
    values = compose(overrides)
    config = validate(RunConfig, values)
    if config.budget.gpu_hours is not None:
        raise ConfigError(
            "budget.gpu_hours: Snakemake decides when jobs start, and cannot end a run for its "
            "GPU-hours; leave the budget out, or use: rlinf run"
        )
    if config.checkpoint.save_every > 1:
        raise ConfigError(
            "checkpoint.save_every: with Snakemake each stage is a process, which must read the "
            "checkpoint from disk; leave it at 1, or use pools with: rlinf run"
        )
    if dry_run and (config.run.folder / CONFIG_FILE).exists():
        run = Run(config.run.folder, config)
    elif is_driver:
        run = prepare_run(values, on_mismatch)
    else:
        run = Run.open(config.run.folder)
    return Workflow(run, on_mismatch, by_iteration=jobs == ITERATION)


def _find_run_folder(name: str) -> Path:
    """Return the run directory of a path, or of a name in ``runs``."""
    path = Path(name).expanduser()
    return RUNS / name if not path.exists() and (RUNS / name).is_dir() else path


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        dotted = prefix + key.replace("__", ".")
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{dotted}.")
        else:
            yield f"{dotted}={'null' if value is None else value}"


class Workflow:
    """The rules of one run."""

    def __init__(self, run: Run, on_mismatch: OnMismatch, *, by_iteration: bool = False) -> None:
        """Read the plan of a run.

        Args:
            by_iteration: whether all stages of an iteration are one job.

        Raises:
            PlanError: with ``by_iteration``, a stage has several processes; or the plan places the
                policy of rollouts separately.
        """
        self._run, self._on_mismatch = run, on_mismatch
        self._lock: RunLock | None = None
        self.folder = run.folder
        self._graph = Graph(run.config)
        self._plan = Plan.from_run(run.folder)
        for policy in self._plan.flow.separate_policy:
            raise PlanError(
                f"plan.pools: {policy}: Snakemake runs each stage as one job, with simulators and "
                f"policy; use rlinf run, or remove {policy} from the plan"
            )
        self.report = str(run.folder / "report" / "report.html")
        self.profile = str(run.folder / "profile.json")
        self.plan_file = str(run.folder / PLAN_FILE)
        self.plan_page = str((run.folder / PLAN_FILE).with_suffix(".html"))
        self.setup_stages = list(self._graph.flow.setup_stages)
        self._last_stage = list(self._graph.flow.stages)[-1]
        self.iteration_rules = [*self._graph.flow.stages, EVALUATE]
        """Names of the rules that run once per iteration or version."""
        if by_iteration:
            self.iteration_rules = [ITERATION, EVALUATE]
            stage_plans = {s: self._plan.stage_plan(s) for s in self._graph.flow.stages}
            parallel = [s for s, p in stage_plans.items() if p.nodes * p.processes > 1]
            if parallel:
                raise PlanError(
                    f"jobs=iteration: the plan gives {parallel[0]} several processes; "
                    "run each stage as a job (jobs=stage)"
                )
        self.python = shlex.quote(sys.executable)

    def check_resumable(self) -> None:
        """Check that the committed results match the configuration, because Snakemake sees only
        files.

        Raises:
            MismatchError: they do not match, and neither redo nor keep is set.
            RunLockedError: results must be archived or accepted, and the run has a driver.
        """
        if self._on_mismatch is not OnMismatch.ERROR:
            self.acquire_lock()
        if self._plan.execution == "pools":
            log.warning(
                "the plan has pools, which Snakemake does not support: every stage becomes a job; "
                "rlinf run uses the pools"
            )
        state = RunState(self._run, self._graph)
        check_resumable(state, self._on_mismatch)
        if self._on_mismatch is OnMismatch.RECOMPUTE:
            # Snakemake checks only that files exist: unverified results would count as finished.
            for node in list(state.unverified):
                state.archive(node)
        if not all(Path(target).exists() for target in self.targets()):
            # Snakemake would not rebuild the inputs of an existing report.
            Path(self.report).unlink(missing_ok=True)

    def acquire_lock(self) -> None:
        """Acquire the driver lock of the run until this process ends.

        Raises:
            RunLockedError: another driver owns the run.
        """
        if self._lock is None:
            self._lock = RunLock(self.folder / LOCK_FILE)
            atexit.register(self._lock.release)

    def output(self, stage: str) -> str:
        """Return the path of a stage's manifest, with ``{i}`` for the iteration."""
        node = StageNode(self._last_stage if stage == ITERATION else stage, 0)
        if stage in self.setup_stages:
            return str(self._manifest(node))
        return str(self._manifest(node)).replace("/0000/", "/{i}/")

    def inputs(self, stage: str) -> Callable[[Any], dict[str, str]]:
        """Return an input function: the manifests that a stage reads, by name."""

        def function(wildcards: Any) -> dict[str, str]:
            iteration = int(getattr(wildcards, "i", 0))
            if stage != ITERATION:
                sources = self._graph.inputs(StageNode(stage, iteration))
                return {name: str(self._manifest(source)) for name, source in sources.items()}
            manifests, last_stage = {}, self._last_stage
            for reader in self._graph.flow.stages:
                for source in self._graph.inputs(StageNode(reader, iteration)).values():
                    is_setup = source.stage in self.setup_stages
                    if is_setup or source.iteration != iteration:
                        target = source if is_setup else StageNode(last_stage, source.iteration)
                        name = f"{target.stage}_{target.iteration}"
                        manifests[name] = str(self._manifest(target))
            return manifests

        return function

    def argv(self, stage: str) -> Callable[[Any], list[str]]:
        """Return a params function: the arguments after ``python -m`` and :meth:`module`."""

        def function(wildcards: Any) -> list[str]:
            node = StageNode(stage, int(getattr(wildcards, "i", 0)))
            if stage == ITERATION:
                return ["--run", str(self.folder), "--iteration", str(node.iteration)]
            return list(stage_call(self._run, self._graph, node).argv())

        return function

    def module(self, stage: str) -> str:
        return "pipeline.commands.iteration" if stage == ITERATION else "stages"

    def program(self, stage: str) -> str:
        """Return the part of a rule's shell command that precedes the arguments.

        It is a parameter of the rule: Snakemake formats the shell command when a job runs, after
        the loop that defines the rules, so the variables of the loop would have their last values.
        """
        plan = self._rule_resources(stage)
        module = self.module(stage)
        ranks = f"launchers.local {plan.processes} " if plan.processes > 1 else ""
        weights = plan.speed_weights
        speeds = (
            f"{SPEED_WEIGHTS_VARIABLE}={','.join(map(str, weights))} "
            if isinstance(weights, tuple)
            else ""
        )
        layout = f"{LAYOUT_VARIABLE}={plan.layout} " if plan.layout.parallel_dims() else ""
        python = shlex.quote(self._interpreter(stage) or sys.executable)
        return f"{speeds}{layout}{python} -m {ranks}{module}"

    def _interpreter(self, stage: str) -> str | None:
        """Return the Python interpreter of a rule's stages; None: this one."""
        flow = self._graph.flow
        return stage_interpreter(
            self._run.config, flow, *(flow.stages if stage == ITERATION else [stage])
        )

    def log(self, stage: str) -> str:
        name = f"{stage}-{{i}}" if stage in self.iteration_rules else stage
        return str(self.folder / "logs" / "snakemake" / f"{name}.log")

    def resources(self, stage: str) -> dict[str, Any]:
        """Return the resources of a stage under the names of Snakemake and its Slurm plugin."""
        plan = self._rule_resources(stage)
        kind = f"{plan.gpu_type}:" if plan.gpu_type else ""
        values = {
            "slurm_partition": plan.partition,
            "nodes": plan.nodes,
            "tasks": plan.nodes * plan.processes,
            "cpus_per_task": plan.cpus,
            "mem_mb": plan.mem_mb,
            "runtime": plan.time_limit_min,
            "gres": f"gpu:{kind}{plan.gpus}" if plan.gpus else None,
            "constraint": plan.constraint,
            "shares": None if plan.speed_weights is None else json.dumps(plan.speed_weights),
            "interpreter": self._interpreter(stage),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _rule_resources(self, stage: str) -> StagePlan:
        """Return the resources of a rule's job; for an iteration, the maximum over its stages and
        their total time."""
        if stage != ITERATION:
            return self._plan.stage_plan(stage)
        plans = [self._plan.stage_plan(name) for name in self._graph.flow.stages]
        memory = [plan.mem_mb for plan in plans if plan.mem_mb is not None]
        times = [plan.time_limit_min for plan in plans]
        largest = max(plans, key=lambda plan: plan.gpus)
        update = {
            "cpus": max(plan.cpus for plan in plans),
            "mem_mb": max(memory) if memory else None,
            "time_limit_min": None if None in times else sum(time or 0 for time in times),
        }
        return largest.model_copy(update=update)

    def targets(self) -> list[str]:
        """Return the manifests that make a run complete: newest weights and all evaluations."""
        count = self._graph.iterations
        newest = StageNode(self._graph.flow.publish_stage, count - 1)
        nodes = [StageNode(EVALUATE, v) for v in range(count + 1) if self._graph.is_evaluated(v)]
        nodes = [node for node in nodes if not is_skipped(self._graph, self.folder, node)]
        return [str(self._manifest(node)) for node in [newest, *nodes]]

    def _manifest(self, node: StageNode) -> Path:
        return self._graph.output_folder(self.folder, node) / MANIFEST
