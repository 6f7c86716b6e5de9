"""Stages as jobs of their own, one after another, as a run of grain ``stage`` has them."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from pipeline.driver import Driver
from pipeline.flow import Graph
from pipeline.freeze import create_run
from pipeline.launch import ClusterConfig, LauncherExecutor, make_launcher
from pipeline.metrics import manifest_of
from pipeline.plan import Plan, StagePlan
from pipeline.planning.profile.schema import Overhead
from pipeline.run import Run
from rlinf.artifacts import MANIFEST, commit, read_manifest
from rlinf.config import EvaluateSection, RunSection
from rlinf.errors import RequeueRequested
from stages.code import Code
from stages.flow import flow_of
from stages.identity import stage_key
from stages.layout import offline_folder

log = logging.getLogger("rlinf")

ITERATIONS = 3
"""The first has no checkpoint to load: of it only dispatches count."""
WAITED = 3.0
"""A dispatch that took so many times longer than the quickest was waiting for nodes."""


def measure(
    run: Run, cluster: ClusterConfig, resources: StagePlan, folder: Path, end: float
) -> list[Overhead]:
    """Drive a few iterations of a run, each stage a job of one process, in a folder of their own.

    What was done before is not done again.

    Args:
        end: when to give up, in seconds since the epoch; what is finished by then counts.

    Raises:
        StageError: a stage failed.
    """
    plan = Plan(defaults=resources)
    scratch = like(run, plan, folder, "alone", ITERATIONS)

    def late() -> bool:
        return time.time() > end

    executor = LauncherExecutor(scratch, make_launcher(cluster, plan), plan, cluster, late)
    try:
        Driver(scratch, executor, retries=cluster.retries).drive()
    except RequeueRequested:
        log.warning("time is up before all stages ran as jobs of their own")
        executor.cancel()
    return overheads(scratch)


def overheads(run: Run) -> list[Overhead]:
    """Dispatch of all stages together; of each its imports, and what came after."""
    graph = Graph(run.config)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for node in graph.nodes():
        manifest = manifest_of(run.folder, *node)
        if manifest is None or node.stage not in graph.flow.stages:
            continue
        began, start, end = (manifest.timing[name] for name in ("began", "start", "end"))
        inputs = graph.inputs(node).values()
        known = [manifest_of(run.folder, *s) for s in inputs if s.stage in graph.flow.stages]
        ends = [source.timing["end"] for source in known if source is not None]
        if ends:
            found["dispatch", ""].append(began - max(ends))
        if node.iteration:
            found["imports", node.stage].append(start - began)
            found["alone", node.stage].append(end - start)
    if found:
        quickest = min(found["dispatch", ""])
        kept = [s for s in found["dispatch", ""] if s <= WAITED * quickest]
        found["dispatch", ""] = kept or [quickest]
    return [
        Overhead.of([max(0.0, s) for s in seconds], name=name, stage=stage, nodes=1, processes=1)
        for (name, stage), seconds in found.items()
    ]


def like(run: Run, plan: Plan, root: Path, name: str, iterations: int) -> Run:
    """A run of the same work under another plan, warm-started already, hardly evaluated."""
    config = run.config.model_copy(
        update={
            "run": RunSection(name=name, root=root),
            "iterations": iterations,
            "evaluate": EvaluateSection(every=0, samples=1),
            "plan": None,
        }
    )
    made = create_run(config, plan.dump())
    for stage in flow_of(config).offline:
        source, target = (offline_folder(one.folder, stage) for one in (run, made))
        if target.exists():
            continue
        partly = target.with_name(f"{target.name}.part")
        shutil.rmtree(partly, ignore_errors=True)
        # The manifest must not be there before the files.
        shutil.copytree(source, partly, copy_function=os.link)
        manifest = read_manifest(source)
        if manifest is not None:
            # It was evaluated on more samples, and is to count all the same.
            (partly / MANIFEST).unlink()
            code = Code.of(made.config, stage).digest(stage)
            key = stage_key(made.config, stage, 0, manifest.inputs, code)
            commit(partly, replace(manifest, key=key))
        partly.rename(target)
    return made
