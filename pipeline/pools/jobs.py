"""The jobs of pools, and which pool each stage belongs to: all that follows from the plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from launchers.base import Job
from pipeline.launch import ClusterConfig, interpreter_of, resources
from pipeline.needs import pool_needs
from pipeline.plan import Plan
from pipeline.pools.leases import PoolState
from pipeline.run import Run
from rlinf.config import digest
from stages.layout import CODE, POOLS


def pool_states(plan: Plan) -> list[PoolState]:
    """The pools; of an elastic one the first worker."""
    return [
        PoolState(
            i,
            pool.stages,
            pool_needs(plan, i),
            None if pool.workers is None else 0,
            helps=pool.helps_rollout,
        )
        for i, pool in enumerate(plan.pools)
    ]


def pool_folder(run: Run, pool: PoolState) -> Path:
    """Where the leases of a pool are noted, each in a folder with its number."""
    return run.folder / POOLS / pool.name


def pool_job(run: Run, plan: Plan, cluster: ClusterConfig, pool: PoolState) -> Job:
    """The job of a pool's present lease."""
    name = f"pool-{pool.name}-{pool.lease}"
    argv = ["--run", str(run.folder), "--name", name, "--orphan-s", str(cluster.pool_grace_s)]
    of, flow = plan.homes(), plan.flow
    if "delta" in plan.transports.values():
        argv.append("--deltas")
    readers = [name for name, stage in flow.stages.items() if stage.loads == "trainer"]
    if any(of[stage] != of[flow.publishes] for stage in readers):
        # A reference elsewhere takes what engines take, and evaluates what is trained:
        # engines then cast.
        argv.append("--uncast")
    here = [stage for stage, number in of.items() if number == pool.number and stage in flow.table]
    python = interpreter_of(run.config, flow, *here)
    needs, *further = (resources(part, cluster, python) for part in pool.needs)
    job = Job(
        f"pool/{name}",
        tuple(argv),
        pool_folder(run, pool) / str(pool.lease),
        run.folder / "logs" / POOLS,
        needs,
        "stages.worker.main",
        tuple(further),
        requeues=False,
    )
    return replace(job, key=_key(run, job))


def _key(run: Run, job: Job) -> str:
    """A digest of all that the workers of a pool go by: what they are started with, on what, the
    configuration that they read and the code that they have in memory."""
    # How far a run goes is the driver's matter: a schedule's length is frozen apart from it.
    config = run.config.model_dump(mode="json", exclude={"cluster", "iterations", "log"})
    path = run.folder / CODE
    code = path.read_text() if path.exists() else ""  # a dry run has no folder
    parts = [asdict(part) for part in job.components]
    return digest([job.module, [*job.argv], parts, config, code])
