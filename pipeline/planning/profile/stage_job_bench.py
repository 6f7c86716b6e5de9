"""Measures stages as separate jobs, one after another, as in a run of the execution ``jobs``."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from pipeline.cluster_config import ClusterConfig
from pipeline.driver import Driver
from pipeline.graph import Graph
from pipeline.job_executor import JobExecutor, create_launcher
from pipeline.metrics import stage_manifest
from pipeline.plan import Plan, StagePlan
from pipeline.planning.profile.schema import Overhead
from pipeline.resume import create_run
from pipeline.run import Run
from rlinf.artifacts import MANIFEST, commit_output, read_manifest
from rlinf.config import EvaluateSection, RunSection
from rlinf.errors import RequeueRequested
from stages.flow import flow_of
from stages.identity import CodeSnapshot, stage_key
from stages.layout import offline_folder

log = logging.getLogger("rlinf")

MEASURED_ITERATIONS = 3
"""Number of iterations. In the first one nothing is loaded, so only its dispatches are used."""
QUEUED_DISPATCH_FACTOR = 3.0
"""A dispatch that took longer than this many times the fastest one has waited for nodes."""


def measure_stage_jobs(
    run: Run, cluster: ClusterConfig, resources: StagePlan, folder: Path, deadline: float
) -> list[Overhead]:
    """Run a few iterations with each stage as a job of one process, in a separate run folder.

    Finished stages of an earlier call are not repeated.

    Args:
        deadline: time to stop, in seconds since the epoch; finished stages are used.

    Raises:
        StageError: a stage failed.
    """
    plan = Plan(defaults=resources)
    scratch = clone_run(run, plan, folder, "alone", MEASURED_ITERATIONS)

    def is_late() -> bool:
        return time.time() > deadline

    executor = JobExecutor(scratch, create_launcher(cluster, plan), plan, cluster, is_late)
    try:
        Driver(scratch, executor, max_retries=cluster.max_retries).drive()
    except RequeueRequested:
        log.warning("time is up before all stages ran as separate jobs")
        executor.cancel()
    return stage_job_overheads(scratch)


def stage_job_overheads(run: Run) -> list[Overhead]:
    """Return the dispatch times of all stages together, and imports and work of each stage."""
    graph = Graph(run.config)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for node in graph.nodes():
        manifest = stage_manifest(run.folder, *node)
        if manifest is None or node.stage not in graph.flow.stages:
            continue
        began, start, end = (manifest.timing[name] for name in ("began", "start", "end"))
        inputs = graph.inputs(node).values()
        sources = [stage_manifest(run.folder, *s) for s in inputs if s.stage in graph.flow.stages]
        input_ends = [source.timing["end"] for source in sources if source is not None]
        if input_ends:
            times["dispatch", ""].append(began - max(input_ends))
        if node.iteration:
            times["imports", node.stage].append(start - began)
            times["alone", node.stage].append(end - start)
    if times:
        fastest = min(times["dispatch", ""])
        on_free_nodes = [s for s in times["dispatch", ""] if s <= QUEUED_DISPATCH_FACTOR * fastest]
        times["dispatch", ""] = on_free_nodes or [fastest]
    return [
        Overhead.of([max(0.0, s) for s in seconds], name=name, stage=stage, nodes=1, processes=1)
        for (name, stage), seconds in times.items()
    ]


def clone_run(run: Run, plan: Plan, root: Path, name: str, iterations: int) -> Run:
    """Create a run with the same work and another plan, a finished SFT and no evaluation."""
    config = run.config.model_copy(
        update={
            "run": RunSection(name=name, root=root),
            "iterations": iterations,
            "evaluate": EvaluateSection(every=0, samples=1),
            "plan": None,
        }
    )
    clone = create_run(config, plan.to_dict())
    for stage in flow_of(config).offline:
        source, target = (offline_folder(owner.folder, stage) for owner in (run, clone))
        if target.exists():
            continue
        partial = target.with_name(f"{target.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        # Rename at the end, because the manifest must not exist before the other files.
        shutil.copytree(source, partial, copy_function=os.link)
        manifest = read_manifest(source)
        if manifest is not None:
            # The original used other evaluation settings, so give it the key of this run.
            (partial / MANIFEST).unlink()
            code = CodeSnapshot.from_checkout(clone.config, stage).digest(stage)
            key = stage_key(clone.config, stage, 0, manifest.inputs, code)
            commit_output(partial, replace(manifest, key=key))
        partial.rename(target)
    return clone
