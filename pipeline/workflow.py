"""What the Snakefile needs: the graph of a run as inputs, outputs, arguments and resources."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.committed import Committed
from pipeline.experiment import compose
from pipeline.experiment import prepare as prepare_run
from pipeline.flow import Graph, Node
from pipeline.plan import Plan
from pipeline.run import Run
from pipeline.settle import Choice, settle_frozen
from rlinf.artifacts import MANIFEST
from rlinf.trainers.world import SHARES
from stages.layout import CONFIG, PLAN
from stages.runner import StageCall

DEFAULT_EXPERIMENT = "arithmetic_grpo"

log = logging.getLogger("rlinf")


def prepare(settings: Mapping[str, Any]) -> Workflow:
    """The workflow of ``--config experiment=... key=value``, or of an existing ``run=FOLDER``.

    Keys are those of the configuration with ``__`` for a dot (Snakemake allows no dots in keys).
    """
    chosen = dict(settings)
    choice = Choice.of(redo=bool(chosen.pop("redo", 0)), keep=bool(chosen.pop("keep", 0)))
    if "run" in chosen:
        return Workflow(Run.open(Path(str(chosen["run"]))), choice)
    experiment = chosen.pop("experiment", DEFAULT_EXPERIMENT)
    overrides = [f"experiment={experiment}"]
    overrides += [f"++{key.replace('__', '.')}={value}" for key, value in chosen.items()]
    return Workflow(prepare_run(compose(overrides), choice), choice)


class Workflow:
    """One run, seen as rules."""

    def __init__(self, run: Run, choice: Choice) -> None:
        self._run, self._choice = run, choice
        self.folder = run.folder
        self._config = run.folder / CONFIG
        self._graph = Graph(run.config)
        self._plan = Plan.read(run.folder)
        self.report = str(run.folder / "report" / "report.html")
        self.profile = str(run.folder / "profile.json")
        self.plan_file = str(run.folder / PLAN)
        self.plan_page = str((run.folder / PLAN).with_suffix(".html"))
        self.offline = list(self._graph.flow.offline)
        self.iterated = [*self._graph.flow.stages, "evaluate"]
        self.python = shlex.quote(sys.executable)

    def settle(self) -> None:
        """See that what is committed is this configuration's, as Snakemake takes it to be.

        Raises:
            MismatchError: it is not, and nobody chose what to do.
        """
        if self._plan.grain == "segment":
            log.warning(
                "the plan has pools (grain: segment), which Snakemake does not use: every stage "
                "becomes a job; rlinf run gives them to the pools"
            )
        settle_frozen(Committed(self._run, self._graph), self._choice)

    def output(self, stage: str) -> str:
        """The manifest of a stage; with ``{i}`` where there is one per iteration."""
        if stage in self.offline:
            return str(self._manifest(Node(stage, 0)))
        return str(self._manifest(Node(stage, 0))).replace("/0000/", "/{i}/")

    def inputs(self, stage: str) -> Callable[[Any], dict[str, str]]:
        """An input function: the manifests a stage reads, by name."""

        def function(wildcards: Any) -> dict[str, str]:
            node = Node(stage, int(getattr(wildcards, "i", 0)))
            return {
                name: str(self._manifest(source))
                for name, source in self._graph.inputs(node).items()
            }

        return function

    def argv(self, stage: str) -> Callable[[Any], list[str]]:
        """A params function: the arguments after ``python -m stages``."""

        def function(wildcards: Any) -> list[str]:
            node = Node(stage, int(getattr(wildcards, "i", 0)))
            inputs = {
                name: self._graph.folder(self.folder, source)
                for name, source in self._graph.inputs(node).items()
            }
            out = self._graph.folder(self.folder, node)
            return list(StageCall(stage, self._config, out, node.iteration, inputs).argv())

        return function

    def command(self, stage: str) -> str:
        """Shell command of a stage's rule, for executors that run one."""
        count = self._plan.of(stage).processes
        ranks = f"-m launchers.ranks {count} stages" if count > 1 else "-m stages"
        shares = self._plan.of(stage).shares
        speeds = f"{SHARES}={','.join(map(str, shares))} " if isinstance(shares, tuple) else ""
        return f"{speeds}{self.python} {ranks} {{params.argv:q}} > {{log:q}} 2>&1"

    def log(self, stage: str) -> str:
        """Log file of a stage's rule."""
        name = f"{stage}-{{i}}" if stage in self.iterated else stage
        return str(self.folder / "logs" / "snakemake" / f"{name}.log")

    def resources(self, stage: str) -> dict[str, Any]:
        """What the plan gives a stage, in the words of Snakemake and its Slurm plugin."""
        plan = self._plan.of(stage)
        kind = f"{plan.gpu_type}:" if plan.gpu_type else ""
        values = {
            "slurm_partition": plan.partition,
            "nodes": plan.nodes,
            "tasks": plan.nodes * plan.processes,
            "cpus_per_task": plan.cpus,
            "mem_mb": plan.mem_mb,
            "runtime": plan.time_min,
            "gres": f"gpu:{kind}{plan.gpus}" if plan.gpus else None,
            "constraint": plan.constraint,
            "shares": None if plan.shares is None else json.dumps(plan.shares),
        }
        return {name: value for name, value in values.items() if value is not None}

    def targets(self) -> list[str]:
        """The manifests a finished run has and nothing else depends on."""
        last = self._graph.iterations
        nodes = [Node("evaluate", v) for v in range(last + 1) if self._graph.evaluated(v)]
        return [str(self._manifest(node)) for node in [Node("sync", last - 1), *nodes]]

    def _manifest(self, node: Node) -> Path:
        return self._graph.folder(self.folder, node) / MANIFEST
