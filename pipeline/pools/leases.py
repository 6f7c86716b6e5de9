"""The driver's state of pools and their leases, and the jobs of leases. A lease is a job of a pool;
it is renewed before it ends."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from launchers.launcher import JobSpec
from pipeline.graph import StageNode
from pipeline.plan import Plan, StagePlan
from pipeline.resources import ClusterConfig, job_resources, pool_resources, stage_interpreter
from pipeline.run import Run
from rlinf.config import json_digest
from rlinf.errors import PlanError
from stages.flow import POLICY_SUFFIX
from stages.layout import CODE_FILE, POOLS_FOLDER, worker_name
from stages.runner import StageCall
from stages.timeout_retries import MAX_TIMEOUTS

MAX_RENEWAL_LEAD_S, RENEWAL_LEAD_SHARE = 300.0, 0.25
"""A lease is renewed this many seconds before its end, or at this share of its length before its
end if that is less."""


@dataclass(eq=False)
class Lease:
    """One lease of a pool: a job and its workers."""

    name: str
    """Prefix of the names of its workers."""
    job: str
    """Job id."""
    size: int
    """Number of workers."""
    worker_info: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Description that each connected worker sent (host, end of its job, ...), by rank."""
    started_at: float = field(default_factory=time.time)
    """Unix time at which this driver submitted or found the job."""
    ends_at: float | None = None
    """Unix time at which the job reaches its time limit; None if unknown."""
    assigned: set[StageNode] = field(default_factory=set)
    """Nodes whose orders were sent to its workers and that have not ended."""
    served: set[StageNode] = field(default_factory=set)
    """Nodes of other leases for which it served the policy, finished or not."""
    num_finished: int = 0
    """Number of nodes and work items that it finished or served."""
    is_leaving: bool = False
    """Whether its workers were ordered to stop."""
    hetjob_leases: tuple[Lease, ...] = ()
    """Other leases in the same heterogeneous job, which start and end together."""

    @property
    def is_ready(self) -> bool:
        """Whether all workers are connected."""
        return len(self.worker_info) == self.size

    def add_worker(self, info: dict[str, Any]) -> None:
        """Add a connected worker with its information."""
        self.worker_info[int(info["rank"])] = info
        if (ends_at := info.get("ends")) is not None:
            self.ends_at = ends_at if self.ends_at is None else min(ends_at, self.ends_at)

    @property
    def needs_renewal(self) -> bool:
        """Whether to submit a successor, because the lease ends soon."""
        if self.ends_at is None:
            return False
        length_s = self.ends_at - self.started_at
        return self.ends_at - time.time() < min(MAX_RENEWAL_LEAD_S, RENEWAL_LEAD_SHARE * length_s)

    def workers(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Return the names of workers, by default of all ranks."""
        return [
            worker_name(self.name, rank) for rank in (range(self.size) if ranks is None else ranks)
        ]

    @property
    def primary_worker(self) -> str:
        """The worker of rank 0."""
        return worker_name(self.name, 0)


@dataclass(eq=False)
class PoolState:
    """A pool of the plan, or one worker of an elastic pool (a generator)."""

    number: int
    """Index of the pool in the plan."""
    stages: tuple[str, ...]
    """Stages of the pool; empty for all workers of an elastic pool except the first."""
    resources: tuple[StagePlan, ...]
    """Resources of each component of its job."""
    slot: int | None = None
    """Index of a worker of an elastic pool; None for other pools."""
    leases: list[Lease] = field(default_factory=list)
    """Oldest first."""
    finishing: list[Lease] = field(default_factory=list)
    """Abandoned leases that may still finish their writes."""
    waiting: dict[StageNode, StageCall] = field(default_factory=dict)
    """Nodes that the driver started and that are not dispatched yet."""
    last_queued_at: float = 0.0
    """Monotonic time at which the newest node in ``waiting`` was added."""
    lease_number: int = 0
    """Number of the newest lease, the name of its folder."""
    failures: int = 0
    """Consecutive leases that failed before they finished anything."""
    reason: str = ""
    """Cause of the last failure."""
    retry_at: float = 0.0
    """Monotonic time before which no lease is submitted."""
    unproductive_leases: int = 0
    """Consecutive leases that reached their end with assigned work but finished nothing."""
    is_retired: bool = False
    """Whether the pool is no longer needed and ends as soon as it has no work."""
    also_generates: bool = False
    """Whether its workers generate work items besides their stages."""

    @property
    def name(self) -> str:
        """``2`` for pool 2, and ``2w1`` for worker 1 of the elastic pool 2."""
        return str(self.number) if self.slot is None else f"{self.number}w{self.slot}"

    @property
    def size(self) -> int:
        """Number of workers of a lease."""
        return sum(part.nodes * part.processes for part in self.resources)

    def check_lease_length(self, lease: Lease) -> None:
        """Check that leases are long enough for their work. Called when Slurm ends ``lease``, or
        when its workers leave.

        Raises:
            PlanError: too many consecutive leases have finished nothing.
        """
        if lease.num_finished:
            self.unproductive_leases = 0
        elif (lease.assigned or lease.served) and lease.needs_renewal:
            self.unproductive_leases += 1
            if self.unproductive_leases == MAX_TIMEOUTS:
                served_stages = {node.stage + POLICY_SUFFIX for node in lease.served}
                stages = ", ".join(sorted({node.stage for node in lease.assigned} | served_stages))
                raise PlanError(
                    f"plan: pools[{self.number}]: {MAX_TIMEOUTS} of its jobs reached their time "
                    f"limit before they finished {stages}, which starts again each time: raise "
                    "time_limit_min of its stages, choose a partition with a longer limit, or "
                    "reduce the work"
                )

    @property
    def active_lease(self) -> Lease | None:
        """The newest lease whose workers are all connected.

        None while an abandoned lease may still commit: the next attempt would compute the same
        output and remove the files of earlier attempts.
        """
        if self.is_retired or self.finishing:
            return None
        leases = reversed(self.leases)
        return next((lease for lease in leases if lease.is_ready and not lease.is_leaving), None)


class PoolLease(NamedTuple):
    """A lease with its pool."""

    pool: PoolState
    lease: Lease


def rank_of(worker: str) -> int:
    """Return the rank in the name of a worker."""
    return int(worker.rpartition("-r")[2])


def pool_states(plan: Plan) -> list[PoolState]:
    """Return the states of a plan's pools; an elastic pool starts with its first worker."""
    states = []
    for i, pool in enumerate(plan.pools):
        slot, resources = None if pool.workers is None else 0, pool_resources(plan, i)
        state = PoolState(i, pool.stages, resources, slot, also_generates=pool.also_generates)
        states.append(state)
    return states


def pool_folder(run: Run, pool: PoolState) -> Path:
    """Return the folder with the job files of a pool's leases, one subfolder per lease number."""
    return run.folder / POOLS_FOLDER / pool.name


def pool_job(run: Run, plan: Plan, cluster: ClusterConfig, pool: PoolState) -> JobSpec:
    """Return the job of a pool's current lease."""
    name = f"pool-{pool.name}-{pool.lease_number}"
    timeout_s = str(cluster.driver_reconnect_timeout_s)
    argv = ["--run", str(run.folder), "--name", name, "--orphan-s", timeout_s]
    stage_pools, flow = plan.stage_pools(), plan.flow
    if "delta" in plan.transports.values():
        argv.append("--deltas")
    trainer_stages = [name for name, stage in flow.stages.items() if stage.holds == "trainer"]
    if any(stage_pools[stage] != stage_pools[flow.publish_stage] for stage in trainer_stages):
        # A reference policy in another pool needs the weights in the trainer's precision. Engines
        # receive the same weights, and cast them themselves.
        argv.append("--uncast")
    stages = [s for s, i in stage_pools.items() if i == pool.number and s in flow.all_stages]
    python = stage_interpreter(run.config, flow, *stages)
    resources, *extra_components = (job_resources(part, cluster, python) for part in pool.resources)
    job = JobSpec(
        f"pool/{name}",
        tuple(argv),
        pool_folder(run, pool) / str(pool.lease_number),
        run.folder / "logs" / POOLS_FOLDER,
        resources,
        "stages.worker.main",
        tuple(extra_components),
        allow_requeue=False,
    )
    return replace(job, content_key=_content_key(run, job))


def _content_key(run: Run, job: JobSpec) -> str:
    """Return a digest of everything that the workers of a pool depend on: arguments, resources,
    configuration and loaded code."""
    # Only the driver uses the number of iterations; the schedule length is frozen separately.
    config = run.config.model_dump(mode="json", exclude={"cluster", "iterations", "log"})
    path = run.folder / CODE_FILE
    code = path.read_text() if path.exists() else ""  # a dry run has no folder
    parts = [asdict(part) for part in job.components]
    return json_digest([job.module, [*job.argv], parts, config, code])
