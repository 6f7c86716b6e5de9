"""Execution in resident pools: one job per pool, whose workers take orders for many iterations.

Pool jobs find the driver through the run directory, in whatever order they start. A stage may be
dispatched before its inputs are committed: inputs from the same pool stay in memory, and records
from other pools are streamed. Everything else is read from disk. Workers of an elastic pool are
called generators.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launchers.launcher import JobSpec, Launcher
from launchers.submission_queue import read_submitted_job
from pipeline.executors import Outcome
from pipeline.graph import Graph, StageNode
from pipeline.job_executor import QueueLog
from pipeline.plan import Plan
from pipeline.pools.autoscaler import autoscale, target_size
from pipeline.pools.dispatcher import Send, StageDispatcher
from pipeline.pools.leases import (
    Lease,
    PoolLease,
    PoolState,
    pool_folder,
    pool_job,
    pool_states,
    rank_of,
)
from pipeline.pools.pool_status import write_pools_status
from pipeline.pools.rollout_scheduler import RolloutScheduler
from pipeline.resources import ClusterConfig, job_resources, pool_resources
from pipeline.run import Run
from rlinf.artifacts import MANIFEST
from rlinf.channels.control_link import Controller, PeerJoined, PeerLost, PeerReport
from rlinf.errors import (
    EXIT_BAD_INPUT,
    EXIT_REQUEUE,
    DataError,
    InputError,
    RequeueRequested,
    StageError,
)
from slurm.jobs import JOB_FILE, JobState, JobStatus, parent_job_id
from stages.layout import CHANNELS_FOLDER, POOLS_FOLDER, STATUS_FILE, WORK_ITEM
from stages.runner import StageCall
from stages.worker.messages import (
    CancelWork,
    CollectedPrompts,
    FetchOutput,
    GenerateStarts,
    ShutDown,
    StageEnded,
    WeightsAvailable,
    WorkerOrder,
    WorkerReport,
    WorkItemEnded,
    read_report,
)
from stages.worker.record_transfer import SOCKET
from stages.worker_state import StageProgressCallback

PROGRESS_KEYS = ("stage", "done", "total", "unit", "note")
"""Keys of an active stage in a worker's status: the arguments of the progress callback."""
EVENT_WAIT_S = 0.25
"""Maximum seconds that the driver waits for events of workers at a time."""
STATUS_INTERVAL_S = 1.0
"""Seconds between two updates of progress, status file and number of generators."""
LEAVE_TIMEOUT_S = 10.0
"""Seconds that workers have to stop before their jobs are cancelled."""
_NON_FAILURE_CODES = (None, 0, EXIT_REQUEUE)
"""Exit codes of jobs that did not fail; None: unknown."""
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
"""Seconds before a failed pool is submitted again: after one failure, and at most."""
log = logging.getLogger("rlinf")


@dataclass
class PoolExecutor:
    """An executor that dispatches stages to resident workers."""

    run: Run
    launcher: Launcher
    plan: Plan
    cluster: ClusterConfig
    should_stop: Callable[[], bool] = lambda: False
    progress: StageProgressCallback = lambda *_: None
    supports_streaming: bool = True
    interrupt_note: str = "its pools were stopped"
    """Outcome for the jobs, for the message after an interrupt."""
    has_started: bool = False
    """Whether the pools were started, because there was work for them."""

    def __post_init__(self) -> None:
        self._graph = Graph(self.run.config)
        self._flow = self._graph.flow
        self._pools = pool_states(self.plan)
        settings = self.run.config.rollout
        self._scheduler = RolloutScheduler(
            self.run.folder, settings.batch_size, self.cluster.max_retries
        )
        self._unreported: dict[StageNode, Outcome] = {}
        """Outcomes that wait for the outcomes of their inputs."""
        self._jobs_polled_at = self._status_written_at = 0.0
        self._controller: Controller | None = None
        self._dispatcher = StageDispatcher(
            self.run, self.plan, self._pools, self._scheduler, self._send
        )
        self._lease_manager = LeaseManager(
            self.run, self.plan, self.cluster, self.launcher, self._pools, self._is_busy, self._send
        )

    def _start_pools(self) -> None:
        """Start the pools. Called when there is work and no other driver owns the run."""
        self.has_started = True
        (self.run.folder / POOLS_FOLDER).mkdir(exist_ok=True)
        self._controller = Controller(
            self.run.folder / CHANNELS_FOLDER, interface=self.cluster.bind_interface
        )
        self._lease_manager.start()

    @property
    def _control(self) -> Controller:
        assert self._controller is not None
        return self._controller

    def _send(self, worker: str, order: WorkerOrder) -> None:
        self._control.send_order(worker, order.to_dict())

    def start(self, node: StageNode, call: StageCall) -> None:
        if self._controller is None:
            self._start_pools()
        pool = self._dispatcher.pool_of(node)
        pool.waiting[node] = call
        pool.last_queued_at = time.monotonic()

    def poll(self) -> dict[StageNode, Outcome]:
        """Return new outcomes; blocks for up to about :data:`EVENT_WAIT_S` seconds."""
        if self.should_stop():
            raise RequeueRequested("the driver received a stop signal; resume the run to continue")
        if self._controller is None:
            return {}
        self._dispatcher.dispatch()
        self._assign_work()
        outcomes: dict[StageNode, Outcome] = {}
        for event in self._control.poll_events(EVENT_WAIT_S):
            if isinstance(event, PeerReport):
                try:
                    report = read_report(event.content)
                except DataError as error:
                    raise StageError(
                        f"{event.worker} sent a malformed report ({error}): its "
                        f"program is broken or of another version; see its log"
                    ) from None
                self._on_report(event.worker, report, outcomes)
            elif isinstance(event, PeerJoined):
                self._on_joined(event)
            elif isinstance(event, PeerLost):
                self._on_lost(event, outcomes)
        if time.monotonic() - self._jobs_polled_at > self.launcher.poll_interval_s:
            self._jobs_polled_at = time.monotonic()
            self._poll_jobs(outcomes)
            self._finish_committed(self._pools, outcomes)
        # First finish nodes that an abandoned lease has committed: after the lease is cancelled,
        # they would be dispatched again.
        self._finish_committed([pool for pool in self._pools if pool.finishing], outcomes)
        self._lease_manager.cancel_abandoned(self._control)
        self._lease_manager.renew_leases()
        if time.monotonic() - self._status_written_at > STATUS_INTERVAL_S:
            self._lease_manager.scale()
        self._report_progress()
        unfinished = {node for lease in self._leases() for node in lease.assigned}
        unfinished |= {node for pool in self._pools for node in pool.waiting}
        self._unreported.update(outcomes)
        reportable: dict[StageNode, Outcome] = {}
        for node in sorted(self._unreported, key=self._dispatcher.position):
            # A success waits for the outcomes of its inputs, which may be reported later.
            if self._unreported[node].exit_code or not unfinished & set(
                self._graph.inputs(node).values()
            ):
                reportable[node] = self._unreported.pop(node)
            else:
                unfinished.add(node)
        return reportable

    def stop(self, *, keep_jobs: bool = False) -> None:
        """Dismiss the pools, or let them wait for the next driver for a limited time."""
        try:
            if not keep_jobs and self._controller is not None:
                self._dismiss()
        finally:
            if self._controller is not None:
                self._controller.close()
            self.launcher.close()

    def _dismiss(self) -> None:
        leases = self._leases()
        try:
            for lease in leases:
                for worker in lease.workers():
                    self._send(worker, ShutDown())
            deadline = time.monotonic() + LEAVE_TIMEOUT_S
            while any(lease.worker_info for lease in leases) and time.monotonic() < deadline:
                for event in self._control.poll_events(EVENT_WAIT_S):
                    owner = self._find_lease(event.worker)
                    if isinstance(event, PeerReport):
                        with contextlib.suppress(DataError):
                            if isinstance(report := read_report(event.content), WorkItemEnded):
                                self._scheduler.on_report(event.worker, report)
                    elif isinstance(event, PeerLost) and owner is not None:
                        owner.lease.worker_info.pop(rank_of(event.worker), None)
        finally:
            leases += self._lease_manager.abandoned_leases
            self.launcher.cancel([lease.job for lease in leases])
            (self.run.folder / POOLS_FOLDER / STATUS_FILE).unlink(missing_ok=True)

    def _leases(self) -> list[Lease]:
        return [lease for pool in self._pools for lease in pool.leases]

    def _assign_work(self) -> None:
        leases = [lease for p in self._generators() if (lease := p.active_lease) is not None]
        workers = [lease.primary_worker for lease in leases if not lease.assigned]
        for worker, order in self._scheduler.next_orders(workers, self._helpers()):
            if isinstance(order, GenerateStarts) and order.starts:
                fetch = FetchOutput(
                    output=order.output,
                    channel="trajectories",
                    producers=(worker,),
                    transport=SOCKET,
                    work_item=order.work_item,
                    source_attempt=order.weights_attempt,
                )
                self._send(order.receiver, fetch)
            self._send(worker, order)

    def _helpers(self) -> dict[str, int]:
        """Return the workers of pools with ``also_generates``, each with the earliest iteration
        that its pool still has to compute."""
        helpers = {}
        for pool in self._pools:
            lease = pool.active_lease
            if pool.also_generates and lease is not None:
                nodes = lease.assigned | pool.waiting.keys()
                iterations = {self._dispatcher.position(node)[0] for node in nodes}
                for worker in lease.workers():
                    # Ignore the iteration whose weights the worker has: only its commit remains.
                    newest = self._scheduler.weights_iteration(worker)
                    later = (iteration for iteration in iterations if iteration > newest)
                    helpers[worker] = min(later, default=sys.maxsize)
        return helpers

    def _end_attempt(self, node: StageNode) -> None:
        """End an attempt; generators drop their work for this node."""
        self._dispatcher.end_attempt(node)
        for worker in self._scheduler.end_rollout(node):
            self._drop_work(worker)

    def _drop_work(self, worker: str) -> None:
        """Order a generator to drop its work items, and requeue them. It may then get others."""
        self._scheduler.on_worker_lost(worker)
        self._send(worker, CancelWork())

    def _generators(self) -> list[PoolState]:
        """Return the states of the elastic pool's workers: each has its own, with a ``slot``."""
        return [pool for pool in self._pools if pool.slot is not None]

    def _find_lease(self, worker: str) -> PoolLease | None:
        """Return the lease of a worker with its pool; None if the lease is no longer used."""
        for pool in self._pools:
            for lease in pool.leases:
                if worker in lease.workers():
                    return PoolLease(pool, lease)
        return None

    def _on_joined(self, event: PeerJoined) -> None:
        owner = self._find_lease(event.worker)
        if owner is None:
            # An earlier driver has already renewed the lease of this worker.
            self._send(event.worker, ShutDown())
            return
        pool, lease = owner
        lease.add_worker(event.description)
        if pool.slot is not None or pool.also_generates:
            # The worker may still have work of an earlier driver.
            self._drop_work(event.worker)

    def _on_report(
        self, worker: str, report: WorkerReport, outcomes: dict[StageNode, Outcome]
    ) -> None:
        owner = self._find_lease(worker)
        match report:
            case WorkItemEnded():
                succeeded = self._scheduler.on_report(worker, report)
                if owner is not None and succeeded:
                    owner.pool.failures = 0
                    owner.lease.num_finished += 1
            case WeightsAvailable():
                self._scheduler.on_weights(worker, report.output, report.attempt, report.iteration)
            case CollectedPrompts() | StageEnded():
                stage, _, iteration = report.node.partition("/")
                node = StageNode(stage, int(iteration))
                if owner is None or node not in owner.lease.assigned:
                    return
                primary_worker = self._dispatcher.primary_worker(node, owner.lease)
                if isinstance(report, CollectedPrompts):
                    self._scheduler.on_collected(node, report.starts)
                elif report.exit_code or worker == primary_worker:
                    # The primary worker reports success for all ranks.
                    self._on_stage_ended(*owner, node, report, outcomes)

    def _on_stage_ended(
        self,
        pool: PoolState,
        lease: Lease,
        node: StageNode,
        report: StageEnded,
        outcomes: dict[StageNode, Outcome],
    ) -> None:
        lease.assigned.discard(node)
        if report.exit_code == 0:
            self._dispatcher.policy_assigner.count_success(node)
        self._end_attempt(node)
        if report.exit_code == 0:
            lease.num_finished += 1
            pool.failures = 0
            # ``train``, beside which ``sync`` runs. The autoscaler ignores the time of ``sync``.
            last_measured_stage = self._flow.stages[self._flow.publish_stage].colocate_with
            if node.stage == last_measured_stage:
                generators = self._generators()
                autoscale(
                    self.run, self.plan, self._flow, generators, self._scheduler, node.iteration
                )
        elif lease.size > 1:
            # The other ranks may wait for this rank in a collective, or would mix files of two
            # attempts. The driver counts this as a failure of the stage.
            reason = f"{node.name} failed on one rank"
            self._abandon(pool, lease, reason, outcomes, count_failure=False)
        outcomes[node] = Outcome(report.exit_code, report.reason)

    def _on_lost(self, event: PeerLost, outcomes: dict[StageNode, Outcome]) -> None:
        owner = self._find_lease(event.worker)
        if owner is None:
            return
        pool, lease = owner
        lease.worker_info.pop(rank_of(event.worker), None)
        if event.reason == "left":
            pool.check_lease_length(lease)
            self._requeue_nodes(lease, f"pool {pool.name} stopped", outcomes)
            return
        # Slurm may know the reason by now; abandoned jobs are no longer queried.
        status = self.launcher.poll([lease.job])[lease.job]
        if status.state.is_active:
            self._abandon(pool, lease, f"{event.worker}: {event.reason}", outcomes)
        else:
            self._handle_ended_job(pool, lease, status, outcomes)

    def _requeue_nodes(self, lease: Lease, reason: str, outcomes: dict[StageNode, Outcome]) -> None:
        """Requeue all nodes of a lease, without counting a failure."""
        for node in lease.assigned:
            self._end_attempt(node)
            outcomes[node] = Outcome(EXIT_REQUEUE, reason)
        lease.assigned.clear()
        self._dispatcher.policy_assigner.on_lease_lost(lease)
        for worker in lease.workers():
            self._scheduler.on_worker_lost(worker)

    def _abandon(
        self,
        pool: PoolState,
        lease: Lease,
        reason: str,
        outcomes: dict[StageNode, Outcome],
        *,
        count_failure: bool = True,
    ) -> None:
        """Cancel and replace a lease that cannot continue. With ``count_failure``, it counts toward
        the pool's limit of failures."""
        self._requeue_nodes(lease, reason, outcomes)
        was_leaving = lease.is_leaving
        self._lease_manager.abandon(pool, lease)
        if lease in pool.leases:
            pool.leases.remove(lease)
        if was_leaving:
            return
        log.warning("pool %s: %s", pool.name, reason)
        for other in self._pools:
            hetjob_leases = [m for m in other.leases if m in lease.hetjob_leases]
            for other_lease in [m for m in hetjob_leases if not m.is_leaving]:
                shared_reason = f"started together with pool {pool.name}"
                self._abandon(other, other_lease, shared_reason, outcomes, count_failure=False)
        if not count_failure:
            return
        pool.failures = 0 if lease.num_finished else pool.failures + 1
        pool.reason = reason
        # An elastic pool fails only if all of its workers fail.
        generators = [p for p in self._generators() if not p.is_retired]
        pools = [pool] if pool.slot is None else generators
        if all(p.failures > self.cluster.max_retries for p in pools):
            raise StageError(f"pool {pool.name} failed {pool.failures} times: {reason}")
        pause = min(MIN_PAUSE_S * 2 ** max(0, pool.failures - 1), MAX_PAUSE_S)
        pool.retry_at = time.monotonic() + (pause if pool.failures else 0)

    def _finish_committed(
        self, pools: Sequence[PoolState], outcomes: dict[StageNode, Outcome]
    ) -> None:
        """Finish nodes whose pool has no active lease, if an earlier lease has committed them."""
        for pool in [pool for pool in pools if pool.active_lease is None]:
            for node, stage_call in list(pool.waiting.items()):
                if (stage_call.output_folder / MANIFEST).exists():
                    del pool.waiting[node]
                    outcomes[node] = Outcome(0)

    def _poll_jobs(self, outcomes: dict[StageNode, Outcome]) -> None:
        ended_leases = self._lease_manager.ended_leases()
        # If leases end together, handle the failed lease first, because it is the cause.
        for pool, lease, status in sorted(
            ended_leases, key=lambda end: end[2].exit_code in _NON_FAILURE_CODES
        ):
            if lease in pool.leases:
                self._handle_ended_job(pool, lease, status, outcomes)

    def _handle_ended_job(
        self, pool: PoolState, lease: Lease, status: JobStatus, outcomes: dict[StageNode, Outcome]
    ) -> None:
        """Handle the end of the job of a lease.

        Raises:
            InputError: a retry cannot help.
        """
        reason = f"job {lease.job} {status.state.value}: {status.reason}".strip()
        if status.exit_code == EXIT_BAD_INPUT:
            self._requeue_nodes(lease, reason, outcomes)
            # Do not cancel the job: a job on hold counts as failed too, and stays in the queue.
            pool.leases.remove(lease)
            if not any(other.active_lease for other in self._generators() if pool.slot is not None):
                raise InputError(f"pool {pool.name}: {status.reason}")
            log.warning("pool %s continues without this worker: %s", pool.name, status.reason)
            pool.retry_at = math.inf
            return
        if status.exit_code == EXIT_REQUEUE or status.state is JobState.PREEMPTED:
            pool.check_lease_length(lease)
            # Slurm may stop any number of jobs: count this lease as productive, not as a failure.
            lease.num_finished = max(1, lease.num_finished)
            reason = f"job {lease.job} stopped by Slurm, for example at its time limit"
        self._abandon(pool, lease, reason, outcomes)

    def _is_busy(self, lease: Lease) -> bool:
        serves_policy = self._dispatcher.policy_assigner.is_busy(lease)
        return (
            bool(lease.assigned)
            or serves_policy
            or any(self._scheduler.is_busy(worker) for worker in lease.workers())
        )

    def _report_progress(self) -> None:
        """Report progress to the console, and write the file for ``rlinf status``."""
        if time.monotonic() - self._status_written_at < STATUS_INTERVAL_S:
            return
        self._status_written_at = time.monotonic()
        peers = self._control.known_peers()
        for pool in self._pools:
            for lease in pool.leases:
                peer = peers.get(lease.primary_worker)
                if peer is None or not peer.alive:
                    continue
                for row in peer.status.get("active_stages", ()):
                    # The worker that collects the rollout reports the progress of the whole batch.
                    if row["total"] and row["compute_s"] is None and row["stage"] != WORK_ITEM:
                        self.progress(*(row[key] for key in PROGRESS_KEYS))
        write_pools_status(self.run.folder, self._pools, peers)


class LeaseManager:
    """Keeps a job running for every pool of a run.

    Args:
        pools: pools of the run; the manager adds and removes generators.
        is_busy: returns whether a lease has work.
        send: sends an order to a worker.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        cluster: ClusterConfig,
        launcher: Launcher,
        pools: list[PoolState],
        is_busy: Callable[[Lease], bool],
        send: Send,
    ) -> None:
        self._run, self._plan, self._cluster, self._launcher = run, plan, cluster, launcher
        self._pools, self._is_busy, self._send = pools, is_busy, send
        self._first_generator = next((p for p in pools if p.slot is not None), None)
        self._queue = QueueLog(is_enabled=cluster.launcher == "slurm")
        self._abandoned: list[tuple[Lease, float]] = []
        """Abandoned leases, each with the monotonic time until which its workers may write."""

    def start(self) -> None:
        """Submit all pools or find their running jobs. Jobs of another plan, configuration or code
        are cancelled."""
        for pools in self._start_groups():
            self._start(pools)
        self.scale()
        current_folders = {
            str(pool_folder(self._run, pool) / str(pool.lease_number)) for pool in self._pools
        }
        job_files = (self._run.folder / POOLS_FOLDER).glob(f"*/*/{JOB_FILE}")
        self._launcher.cancel_for_outputs(
            [file.parent for file in job_files if str(file.parent) not in current_folders]
        )

    @property
    def abandoned_leases(self) -> list[Lease]:
        """Abandoned leases whose jobs are not cancelled yet."""
        return [lease for lease, _ in self._abandoned]

    def ended_leases(self) -> list[tuple[PoolState, Lease, JobStatus]]:
        """Return the leases whose jobs have ended; queries all pools at once."""
        jobs = [lease.job for pool in self._pools for lease in pool.leases]
        statuses = self._launcher.poll(jobs) if jobs else {}
        ended = []
        for pool in self._pools:
            for lease in pool.leases:
                status = statuses.get(lease.job)
                if status is not None and status.state.is_active:
                    self._queue.on_status(f"pool {pool.name}", lease.job, status)
                elif status is not None:
                    ended.append((pool, lease, status))
        return ended

    def scale(self) -> None:
        """Adjust the number of generators to its target."""
        first = self._first_generator
        if first is None:
            return
        generators = [pool for pool in self._pools if pool.slot is not None]
        target = target_size(self._run.folder, self._plan, first.number)
        for slot in range(len(generators), target):
            pool = PoolState(first.number, (), pool_resources(self._plan, first.number, slot), slot)
            self._pools.append(pool)
            self._start([pool])
        for pool in generators[target:]:
            pool.is_retired = True

    def renew_leases(self) -> None:
        """Submit missing jobs, submit successors of leases that end soon, and dismiss leases whose
        successors are connected."""
        self._retire()
        for pools in self._start_groups():
            if any(pool.is_retired for pool in pools):
                continue
            newest = [pool.leases[-1] for pool in pools if pool.leases]
            is_missing = not newest and all(time.monotonic() >= pool.retry_at for pool in pools)
            needs_renewal = all(lease.is_ready for lease in newest) and any(
                lease.needs_renewal for lease in newest
            )
            if is_missing or needs_renewal:
                for pool in pools:
                    pool.lease_number += 1
                self._submit(pools)
        for pool in [pool for pool in self._pools if not pool.is_retired]:
            active = pool.active_lease
            for lease in pool.leases[:-1]:
                if lease is not active and not self._is_busy(lease) and not lease.is_leaving:
                    self._dismiss(lease)

    def abandon(self, pool: PoolState, lease: Lease) -> None:
        """Abandon a lease: :meth:`cancel_abandoned` will cancel its job.

        If all its workers are connected, they may first finish their writes, such as a checkpoint
        when another pool of the same heterogeneous job was lost.
        """
        patience_s = 0.0
        if lease.is_ready and not lease.is_leaving:
            patience_s = float(job_resources(pool.resources[0], self._cluster).signal_delay_s)
            self._dismiss(lease, patience_s)
            pool.finishing.append(lease)
        self._abandoned.append((lease, time.monotonic() + patience_s))

    def cancel_abandoned(self, control: Controller) -> None:
        """Cancel the jobs of abandoned leases whose workers have left or had enough time."""
        peers, now = control.known_peers(), time.monotonic()
        finishing_jobs = {
            parent_job_id(lease.job)
            for lease, deadline in self._abandoned
            if now < deadline and any(w in peers and peers[w].alive for w in lease.workers())
        }
        expired = [a for a, _ in self._abandoned if parent_job_id(a.job) not in finishing_jobs]
        if not expired:
            return
        self._abandoned = [entry for entry in self._abandoned if entry[0] not in expired]
        for pool in self._pools:
            pool.finishing = [lease for lease in pool.finishing if lease not in expired]
        self._launcher.cancel([lease.job for lease in expired])
        for lease in expired:
            for worker in lease.workers():
                control.forget_peer(worker)

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
                    self._launcher.cancel([lease.job])
                elif not self._is_busy(lease) and not lease.is_leaving:
                    self._dismiss(lease)
            if not pool.leases:
                self._pools.remove(pool)

    def _dismiss(self, lease: Lease, commit_timeout_s: float = 0.0) -> None:
        """Order workers to stop; they have ``commit_timeout_s`` seconds to finish their writes."""
        lease.is_leaving = True
        for worker in lease.workers():
            self._send(worker, ShutDown(commit_timeout_s=commit_timeout_s))

    def _submit(self, pools: Sequence[PoolState]) -> None:
        jobs = [self._job(pool) for pool in pools]
        for job in jobs:
            job.output_dir.mkdir(parents=True, exist_ok=True)
        launcher = self._launcher
        ids = launcher.submit_hetjob(jobs) if len(jobs) > 1 else [launcher.submit(jobs[0])]
        leases = [
            Lease(job.name.removeprefix("pool/"), job_id, pool.size)
            for pool, job, job_id in zip(pools, jobs, ids, strict=True)
        ]
        for pool, job, lease in zip(pools, jobs, leases, strict=True):
            partitions = ",".join(str(part.partition) for part in job.components)
            self._queue.on_submit(f"pool {pool.name}", lease.job, partitions)
            lease.hetjob_leases = tuple(other for other in leases if other is not lease)
            pool.leases.append(lease)
