"""The pools of a run and their leases. A lease is a job of a pool with its workers; the lease
manager renews leases before they end, and replaces leases that are lost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launchers.launcher import JobSpec, Launcher
from launchers.submission_queue import read_submitted_job
from pipeline.job_executor import QueueLog
from pipeline.plan import Plan, StagePlan
from pipeline.resources import ClusterConfig, job_resources, pool_resources, stage_interpreter
from pipeline.run import Run
from rlinf.config import json_digest
from rlinf.errors import EXIT_BAD_INPUT, EXIT_REQUEUE, InputError, PlanError, StageError
from slurm.jobs import JOB_FILE, JobState, JobStatus
from stages.layout import CODE_FILE, POOLS_FOLDER, worker_name
from stages.timeout_retries import MAX_TIMEOUTS
from stages.worker.messages import ShutDown

MAX_RENEWAL_LEAD_S, RENEWAL_LEAD_SHARE = 300.0, 0.25
"""A lease is renewed this many seconds before its end, or at this share of its length before its
end if that is less."""
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
"""Seconds before a failed pool is submitted again: after one failure, and at most."""
_NON_FAILURE_CODES = (None, 0, EXIT_REQUEUE)
"""Exit codes of jobs that did not fail; None: unknown."""
log = logging.getLogger("rlinf")


@dataclass(eq=False)
class Lease:
    """One lease of a pool: a job and its workers."""

    pool: PoolState
    name: str
    """Prefix of the names of its workers."""
    job: str
    """Job id."""
    worker_info: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Description that each connected worker sent (host, end of its job, ...), by rank."""
    started_at: float = field(default_factory=time.time)
    """Unix time at which this driver submitted or found the job."""
    ends_at: float | None = None
    """Unix time at which the job reaches its time limit; None if unknown."""
    stages: set[str] = field(default_factory=set)
    """Stages that it got; a stage of another pool whose policy it serves has a suffix."""
    num_finished: int = 0
    """Number of work items that it finished or served."""
    is_leaving: bool = False
    """Whether its workers were ordered to stop."""
    write_until: float = 0.0
    """Monotonic time until which its workers may finish their writes after it was abandoned."""
    hetjob_leases: tuple[Lease, ...] = ()
    """Other leases in the same heterogeneous job, which start and end together."""

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.pool.size

    @property
    def is_ready(self) -> bool:
        """Whether all workers are connected."""
        return len(self.worker_info) == self.size

    @property
    def may_write(self) -> bool:
        """Whether a worker may still finish its writes after the lease was abandoned."""
        return bool(self.worker_info) and time.monotonic() < self.write_until

    @property
    def needs_renewal(self) -> bool:
        """Whether to submit a successor, because the lease ends soon."""
        if self.ends_at is None:
            return False
        length_s = self.ends_at - self.started_at
        return self.ends_at - time.time() < min(MAX_RENEWAL_LEAD_S, RENEWAL_LEAD_SHARE * length_s)

    def add_worker(self, info: dict[str, Any]) -> None:
        """Add a connected worker with its information."""
        self.worker_info[int(info["rank"])] = info
        if (ends_at := info.get("ends")) is not None:
            self.ends_at = ends_at if self.ends_at is None else min(ends_at, self.ends_at)

    @property
    def primary_worker(self) -> str:
        """The worker of rank 0."""
        return worker_name(self.name, 0)

    def workers(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Return the names of workers, by default of all ranks."""
        return [
            worker_name(self.name, rank) for rank in (range(self.size) if ranks is None else ranks)
        ]


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
    abandoned: list[Lease] = field(default_factory=list)
    """Leases that were replaced and whose jobs are not cancelled yet."""
    lease_number: int = 0
    """Number of the newest lease, the name of its folder."""
    failures: int = 0
    """Consecutive leases that failed before they finished anything."""
    reason: str = ""
    """Cause of the last failure."""
    retry_at: float = 0.0
    """Monotonic time before which no lease is submitted."""
    unproductive_leases: int = 0
    """Consecutive leases that reached their end with work but finished nothing."""
    is_retired: bool = False
    """Whether the pool is no longer needed and ends as soon as it has no work."""
    also_generates: bool = False
    """Whether its workers compute shares of rollouts besides their stages."""

    @property
    def name(self) -> str:
        """``2`` for pool 2, and ``2w1`` for worker 1 of the elastic pool 2."""
        return str(self.number) if self.slot is None else f"{self.number}w{self.slot}"

    @property
    def size(self) -> int:
        """Number of workers of a lease."""
        return sum(part.nodes * part.processes for part in self.resources)

    @property
    def is_finishing(self) -> bool:
        """Whether an abandoned lease may still commit."""
        return any(lease.write_until for lease in self.abandoned)

    @property
    def active_lease(self) -> Lease | None:
        """The newest lease whose workers are all connected.

        None while an abandoned lease may still commit: the next attempt would compute the same
        output and remove the files of earlier attempts.
        """
        if self.is_retired or self.is_finishing:
            return None
        leases = reversed(self.leases)
        return next((lease for lease in leases if lease.is_ready and not lease.is_leaving), None)


def pool_states(plan: Plan) -> list[PoolState]:
    """Return the states of a plan's pools; an elastic pool starts with its first worker."""
    states = []
    for i, pool in enumerate(plan.pools):
        slot, resources = None if pool.workers is None else 0, pool_resources(plan, i)
        state = PoolState(i, pool.stages, resources, slot, also_generates=pool.also_generates)
        states.append(state)
    return states


class LeaseManager:
    """Keeps a job running for every pool of a run.

    Args:
        pools: pools of the run; the manager adds and removes generators.
        is_busy: returns whether a lease has work.
        shut_down: sends a worker the order to shut down.
        on_lost: called with a lease that can do no more work, and the reason.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        cluster: ClusterConfig,
        launcher: Launcher,
        pools: list[PoolState],
        is_busy: Callable[[Lease], bool],
        shut_down: Callable[[str, ShutDown], None],
        on_lost: Callable[[Lease, str], None],
    ) -> None:
        self._run, self._plan, self._cluster, self._launcher = run, plan, cluster, launcher
        self._pools, self._is_busy = pools, is_busy
        self._shut_down, self._on_lost = shut_down, on_lost
        self._queue = QueueLog(is_enabled=cluster.launcher == "slurm")
        self._lost: dict[Lease, str] = {}
        """Leases that lost a worker since the last :meth:`replace_lost`, with the reason."""

    @property
    def leases(self) -> list[Lease]:
        """All leases that are in use."""
        return [lease for pool in self._pools for lease in pool.leases]

    @property
    def generators(self) -> list[PoolState]:
        """The states of the elastic pool's workers: each has its own, with a ``slot``."""
        return [pool for pool in self._pools if pool.slot is not None]

    def find(self, worker: str) -> Lease | None:
        """Return the lease of a worker; None if the lease is no longer used."""
        name = worker.rpartition("-r")[0]
        return next((lease for lease in self.leases if lease.name == name), None)

    def start(self, num_generators: int) -> None:
        """Submit all pools or find their running jobs. Jobs of another plan, configuration or code
        are cancelled."""
        for pools in self._start_groups():
            self._start(pools)
        self.scale(num_generators)
        current_folders = {
            str(pool_folder(self._run, pool) / str(pool.lease_number)) for pool in self._pools
        }
        job_files = (self._run.folder / POOLS_FOLDER).glob(f"*/*/{JOB_FILE}")
        self._launcher.cancel_for_outputs(
            [file.parent for file in job_files if str(file.parent) not in current_folders]
        )

    def scale(self, target: int) -> None:
        """Keep the generators of the first ``target`` slots: add missing ones, retire others."""
        generators = {pool.slot: pool for pool in self.generators}
        for slot in range(target):
            if slot not in generators:
                number = self.generators[0].number
                pool = PoolState(number, (), pool_resources(self._plan, number, slot), slot)
                self._pools.append(pool)
                self._start([pool])
        for pool in generators.values():
            pool.is_retired = pool.slot is not None and pool.slot >= target

    def on_joined(self, worker: str, description: dict[str, Any]) -> Lease | None:
        """Add a worker to its lease, and return the lease; None if the worker must leave."""
        lease = self.find(worker)
        if lease is None:
            # The lease was abandoned, or an earlier driver has already renewed it.
            self._shut_down(worker, ShutDown())
        else:
            lease.add_worker(description)
        return lease

    def on_worker_left(self, worker: str) -> None:
        """Handle the end of a worker that was ordered to leave or whose job ends."""
        lease = self._disconnect(worker)
        if lease is not None:
            self._check_length(lease)
            self._lose(lease, f"pool {lease.pool.name} stopped")

    def on_worker_lost(self, worker: str, reason: str) -> None:
        """Note a worker that is silent, or that another process replaced."""
        lease = self._disconnect(worker)
        if lease is not None:
            self._lost.setdefault(lease, f"{worker}: {reason}")

    def replace_lost(self) -> None:
        """Replace the leases whose workers were lost."""
        lost, self._lost = self._lost, {}
        # Slurm may know the reason by now; abandoned jobs are no longer queried.
        statuses = self._launcher.poll([lease.job for lease in lost]) if lost else {}
        for lease, reason in lost.items():
            if lease not in lease.pool.leases:
                continue  # another loss of this poll took it along
            if statuses[lease.job].state.is_active:
                self.abandon(lease, reason)
            else:
                self._on_job_ended(lease, statuses[lease.job])

    def count_finished(self, lease: Lease | None) -> None:
        """Count a work item that a lease finished or served."""
        if lease is not None:
            lease.num_finished += 1
            lease.pool.failures = 0

    def poll_jobs(self) -> None:
        """Query the jobs of all leases at once, and handle the leases whose jobs have ended."""
        leases = self.leases
        statuses = self._launcher.poll([lease.job for lease in leases]) if leases else {}
        ended = [x for x in leases if x.job in statuses and not statuses[x.job].state.is_active]
        for lease in [x for x in leases if x.job in statuses and x not in ended]:
            self._queue.on_status(f"pool {lease.pool.name}", lease.job, statuses[lease.job])
        # If leases end together, handle the failed lease first, because it is the cause.
        for lease in sorted(ended, key=lambda x: statuses[x.job].exit_code in _NON_FAILURE_CODES):
            if lease in lease.pool.leases:
                self._on_job_ended(lease, statuses[lease.job])

    def renew(self) -> None:
        """Submit missing jobs, submit successors of leases that end soon, and dismiss leases whose
        successors are connected."""
        self._retire()
        for pools in self._start_groups():
            if any(pool.is_retired for pool in pools):
                continue
            newest = [pool.leases[-1] for pool in pools if pool.leases]
            may_submit = all(time.monotonic() >= pool.retry_at for pool in pools)
            needs_renewal = all(lease.is_ready for lease in newest) and any(
                lease.needs_renewal for lease in newest
            )
            if may_submit and (not newest or needs_renewal):
                for pool in pools:
                    pool.lease_number += 1
                self._submit(pools)
        for pool in [pool for pool in self._pools if not pool.is_retired]:
            active = pool.active_lease
            for lease in pool.leases[:-1]:
                if lease is not active and not self._is_busy(lease) and not lease.is_leaving:
                    self._dismiss(lease)

    def abandon(self, lease: Lease, reason: str, *, count_failure: bool = True) -> None:
        """Replace a lease that cannot continue; :meth:`cancel_abandoned` will cancel its job.

        If all its workers are connected, they may first finish their writes, such as a checkpoint
        when another pool of the same heterogeneous job was lost.

        Args:
            count_failure: whether it counts toward the pool's limit of failures.

        Raises:
            StageError: the pool has failed too often.
        """
        self._lose(lease, reason)
        pool, was_leaving = lease.pool, lease.is_leaving
        if lease.is_ready and not was_leaving:
            patience_s = float(job_resources(pool.resources[0], self._cluster).signal_delay_s)
            lease.write_until = time.monotonic() + patience_s
            self._dismiss(lease, patience_s)
        pool.leases.remove(lease)
        pool.abandoned.append(lease)
        if was_leaving:
            return
        log.warning("pool %s: %s", pool.name, reason)
        for other in lease.hetjob_leases:
            if other in other.pool.leases and not other.is_leaving:
                shared_reason = f"started together with pool {pool.name}"
                self.abandon(other, shared_reason, count_failure=False)
        if count_failure:
            self._count_failure(lease, reason)

    def cancel_abandoned(self) -> list[str]:
        """Cancel the jobs of abandoned leases whose workers have left or had enough time.

        Returns:
            The workers of these leases.
        """
        expired = [
            lease
            for pool in self._pools
            for lease in pool.abandoned
            if not any(other.may_write for other in (lease, *lease.hetjob_leases))
        ]
        if expired:
            self._launcher.cancel([lease.job for lease in expired])
        for lease in expired:
            lease.pool.abandoned.remove(lease)
        return [worker for lease in expired for worker in lease.workers()]

    def dismiss_all(self) -> None:
        """Order all workers to shut down."""
        for lease in self.leases:
            self._dismiss(lease)

    def cancel_all(self) -> None:
        """Cancel all jobs."""
        abandoned = [lease for pool in self._pools for lease in pool.abandoned]
        self._launcher.cancel([lease.job for lease in [*self.leases, *abandoned]])

    def _disconnect(self, worker: str) -> Lease | None:
        """Remove a worker from its lease, and return the lease if it is in use."""
        name, _, rank = worker.rpartition("-r")
        for pool in self._pools:
            for lease in [*pool.leases, *pool.abandoned]:
                if lease.name == name:
                    lease.worker_info.pop(int(rank), None)
                    return lease if lease in pool.leases else None
        return None

    def _lose(self, lease: Lease, reason: str) -> None:
        self._on_lost(lease, reason)
        lease.stages.clear()

    def _check_length(self, lease: Lease) -> None:
        """Check that leases are long enough for their work. Called when Slurm ends ``lease``, or
        when its workers leave.

        Raises:
            PlanError: too many consecutive leases have finished nothing.
        """
        pool = lease.pool
        if lease.num_finished:
            pool.unproductive_leases = 0
        elif lease.stages and lease.needs_renewal:
            pool.unproductive_leases += 1
            if pool.unproductive_leases == MAX_TIMEOUTS:
                raise PlanError(
                    f"plan: pools[{pool.number}]: {MAX_TIMEOUTS} of its jobs reached their time "
                    f"limit before they finished {', '.join(sorted(lease.stages))}, which starts "
                    "again each time: raise time_limit_min of its stages, choose a partition with "
                    "a longer limit, or reduce the work"
                )

    def _count_failure(self, lease: Lease, reason: str) -> None:
        pool = lease.pool
        pool.failures = 0 if lease.num_finished else pool.failures + 1
        pool.reason = reason
        # An elastic pool fails only if all of its workers fail, except those that had bad input.
        may_work = [other for other in self.generators if other.retry_at < math.inf]
        generators = [other for other in may_work if not other.is_retired]
        pools = [pool] if pool.slot is None else generators
        if all(other.failures > self._cluster.max_retries for other in pools):
            raise StageError(f"pool {pool.name} failed {pool.failures} times: {reason}")
        pause_s = min(MIN_PAUSE_S * 2 ** max(0, pool.failures - 1), MAX_PAUSE_S)
        pool.retry_at = time.monotonic() + (pause_s if pool.failures else 0)

    def _on_job_ended(self, lease: Lease, status: JobStatus) -> None:
        """Handle the end of the job of a lease.

        Raises:
            InputError: a retry cannot help.
        """
        pool, reason = lease.pool, f"job {lease.job} {status.state.value}: {status.reason}".strip()
        if status.exit_code == EXIT_BAD_INPUT:
            self._lose(lease, reason)
            # Do not cancel the job: a job on hold counts as failed too, and stays in the queue.
            pool.leases.remove(lease)
            if pool.slot is None or not any(other.active_lease for other in self.generators):
                raise InputError(f"pool {pool.name}: {status.reason}")
            log.warning("pool %s continues without this worker: %s", pool.name, status.reason)
            pool.retry_at = math.inf
            return
        if status.exit_code == EXIT_REQUEUE or status.state is JobState.PREEMPTED:
            self._check_length(lease)
            # Slurm may stop any number of jobs: count this lease as productive, not as a failure.
            lease.num_finished = max(1, lease.num_finished)
            reason = f"job {lease.job} stopped by Slurm, for example at its time limit"
        self.abandon(lease, reason)

    def _start_groups(self) -> list[list[PoolState]]:
        """Return groups of pools; the pools of a group start together."""
        hetjob_pools = [p for p in self._pools if self._plan.hetjob and p.slot is None]
        single = [[pool] for pool in self._pools if pool not in hetjob_pools]
        return [hetjob_pools, *single] if hetjob_pools else single

    def _start(self, pools: Sequence[PoolState]) -> None:
        for pool in pools:
            folders = pool_folder(self._run, pool).glob("*")
            numbers = [int(path.name) for path in folders if path.name.isdigit()]
            pool.lease_number = max(numbers, default=0)
        jobs = [self._job(pool) for pool in pools]
        if any(
            (submitted := read_submitted_job(job.output_dir)) is not None
            and submitted.key != job.content_key
            for job in jobs
        ):
            # A new lease name, because workers of the last lease may still run.
            for pool in pools:
                pool.lease_number += 1
        self._submit(pools)

    def _job(self, pool: PoolState) -> JobSpec:
        return pool_job(self._run, self._plan, self._cluster, pool)

    def _retire(self) -> None:
        """Dismiss retired generators when they have no work."""
        for pool in [pool for pool in self._pools if pool.is_retired]:
            for lease in list(pool.leases):
                if not lease.is_ready:
                    pool.leases.remove(lease)
                    pool.abandoned.append(lease)
                elif not self._is_busy(lease) and not lease.is_leaving:
                    self._dismiss(lease)
            if not pool.leases and not pool.abandoned:
                self._pools.remove(pool)

    def _dismiss(self, lease: Lease, commit_timeout_s: float = 0.0) -> None:
        """Order workers to stop; they have ``commit_timeout_s`` seconds to finish their writes."""
        lease.is_leaving = True
        for worker in lease.workers():
            self._shut_down(worker, ShutDown(commit_timeout_s=commit_timeout_s))

    def _submit(self, pools: Sequence[PoolState]) -> None:
        jobs = [self._job(pool) for pool in pools]
        for job in jobs:
            job.output_dir.mkdir(parents=True, exist_ok=True)
        launcher = self._launcher
        ids = launcher.submit_hetjob(jobs) if len(jobs) > 1 else [launcher.submit(jobs[0])]
        leases = [
            Lease(pool, job.name.removeprefix("pool/"), job_id)
            for pool, job, job_id in zip(pools, jobs, ids, strict=True)
        ]
        for job, lease in zip(jobs, leases, strict=True):
            partitions = ",".join(str(part.partition) for part in job.components)
            self._queue.on_submit(f"pool {lease.pool.name}", lease.job, partitions)
            lease.hetjob_leases = tuple(other for other in leases if other is not lease)
            lease.pool.leases.append(lease)


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
