"""Execution in resident pools: one job per pool, whose workers take orders for many iterations.

The executor connects the workers' control link with three objects: the scheduler assigns work
items, the lease manager keeps jobs running, and the autoscaler sets the number of generators. Pool
jobs find the driver through the run directory, in whatever order they start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from launchers.launcher import Launcher
from pipeline.executors import Outcome
from pipeline.graph import Graph, StageNode
from pipeline.plan import Plan
from pipeline.pools.autoscaler import Autoscaler
from pipeline.pools.leases import Lease, LeaseManager, pool_states
from pipeline.pools.pool_status import write_pools_status
from pipeline.pools.scheduler import ShareItem, StageItem, WorkScheduler
from pipeline.pools.stage_placement import StagePlacement
from pipeline.pools.work_log import append_work
from pipeline.resources import ClusterConfig
from pipeline.run import Run
from rlinf.artifacts import MANIFEST, read_manifest
from rlinf.channels.control_link import (
    REASON_DEPARTED,
    Controller,
    PeerEvent,
    PeerJoined,
    PeerLost,
)
from rlinf.errors import (
    EXIT_REQUEUE,
    ArtifactError,
    DataError,
    RequeueRequested,
    RlinfError,
    StageError,
)
from stages.layout import CHANNELS_FOLDER, POOLS_FOLDER, STATUS_FILE, WORK_ITEM
from stages.runner import StageCall
from stages.worker.messages import (
    CollectedStarts,
    WeightsAvailable,
    WorkerOrder,
    WorkItemEnded,
    read_report,
)
from stages.worker_state import StageProgressCallback

PROGRESS_KEYS = ("stage", "done", "total", "unit", "note")
"""Keys of an active stage in a worker's status: the arguments of the progress callback."""
EVENT_WAIT_S = 0.25
"""Maximum seconds that the driver waits for events of workers at a time."""
STATUS_INTERVAL_S = 1.0
"""Seconds between two updates of progress, status file and number of generators."""
LEAVE_TIMEOUT_S = 10.0
"""Seconds that workers have to stop before their jobs are cancelled."""


@dataclass
class PoolExecutor:
    """An executor that computes stages with resident workers."""

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
        self._pools = pool_states(self.plan)
        self._placement = StagePlacement(self.run.config, self.plan, self._pools)
        self._scheduler = WorkScheduler(
            self.run,
            self._placement,
            self._pools,
            self._send,
            self._is_committed,
            self.cluster.max_retries,
        )
        self._lease_manager = LeaseManager(
            self.run,
            self.plan,
            self.cluster,
            self.launcher,
            self._pools,
            self._scheduler.is_busy,
            self._send,
            self._on_lease_lost,
        )
        self._autoscaler = Autoscaler(self.run, self.plan, self._scheduler.speeds)
        self._outcomes: dict[StageNode, Outcome] = {}
        """Outcomes that were not returned yet."""
        self._jobs_polled_at = self._status_written_at = 0.0
        self._controller: Controller | None = None

    def _start_pools(self) -> None:
        """Start the pools. Called when there is work and no other driver owns the run."""
        self.has_started = True
        (self.run.folder / POOLS_FOLDER).mkdir(exist_ok=True)
        self._controller = Controller(
            self.run.folder / CHANNELS_FOLDER, interface=self.cluster.bind_interface
        )
        self._lease_manager.start(self._autoscaler.target)

    @property
    def _control(self) -> Controller:
        assert self._controller is not None
        return self._controller

    def _send(self, worker: str, order: WorkerOrder) -> None:
        self._control.send_order(worker, order.to_dict())

    def _is_committed(self, folder: str) -> bool:
        try:
            return read_manifest(self.run.folder / folder) is not None
        except ArtifactError:
            return False  # the worker that reads it reports the error

    def start(self, node: StageNode, call: StageCall) -> None:
        if self._controller is None:
            self._start_pools()
        self._scheduler.add(node, call, time.monotonic())

    def poll(self) -> dict[StageNode, Outcome]:
        """Return new outcomes; blocks for up to about :data:`EVENT_WAIT_S` seconds."""
        if self.should_stop():
            raise RequeueRequested("the driver received a stop signal; resume the run to continue")
        if self._controller is None:
            return {}
        self._scheduler.dispatch(time.monotonic())
        for event in self._control.poll_events(EVENT_WAIT_S):
            self._handle(event)
        self._lease_manager.replace_lost()
        has_polled_jobs = time.monotonic() - self._jobs_polled_at > self.launcher.poll_interval_s
        if has_polled_jobs:
            self._jobs_polled_at = time.monotonic()
            self._lease_manager.poll_jobs()
        # First finish nodes that an abandoned lease has committed: after the lease is cancelled,
        # they would be dispatched again.
        for pool in [pool for pool in self._pools if has_polled_jobs or pool.is_finishing]:
            if pool.active_lease is None:
                self._finish_committed(self._scheduler.waiting(pool))
        for worker in self._lease_manager.cancel_abandoned():
            self._control.forget_peer(worker)
        self._lease_manager.renew()
        if time.monotonic() - self._status_written_at > STATUS_INTERVAL_S:
            self._status_written_at = time.monotonic()
            self._lease_manager.scale(self._autoscaler.target)
            self._report_progress()
        return self._take_outcomes()

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
        leases = self._lease_manager.leases
        try:
            self._lease_manager.dismiss_all()
            deadline = time.monotonic() + LEAVE_TIMEOUT_S
            while any(lease.worker_info for lease in leases) and time.monotonic() < deadline:
                for event in self._control.poll_events(EVENT_WAIT_S):
                    with contextlib.suppress(RlinfError):  # a failure changes nothing now
                        self._handle(event)
        finally:
            self._lease_manager.cancel_all()
            (self.run.folder / POOLS_FOLDER / STATUS_FILE).unlink(missing_ok=True)

    def _handle(self, event: PeerEvent) -> None:
        if isinstance(event, PeerJoined):
            lease = self._lease_manager.on_joined(event.worker, event.description)
            if lease is not None and (lease.pool.slot is not None or lease.pool.also_generates):
                self._scheduler.on_joined(event.worker)
        elif isinstance(event, PeerLost):
            if event.reason == REASON_DEPARTED:
                self._lease_manager.on_worker_left(event.worker)
            else:
                self._lease_manager.on_worker_lost(event.worker, event.reason)
        else:
            try:
                report = read_report(event.content)
            except DataError as error:
                raise StageError(
                    f"{event.worker} sent a malformed report ({error}): its program is broken or "
                    "of another version; see its log"
                ) from None
            match report:
                case CollectedStarts():
                    self._scheduler.on_collected(event.worker, report.node, report.starts)
                case WeightsAvailable():
                    weights = report.output, report.attempt, report.iteration
                    self._scheduler.on_weights(event.worker, *weights)
                case WorkItemEnded():
                    item = self._scheduler.on_ended(event.worker, report)
                    if isinstance(item, StageItem):
                        self._on_stage_ended(item, report)
                    elif item is not None:
                        self._on_share_ended(item, report)

    def _on_stage_ended(self, item: StageItem, report: WorkItemEnded) -> None:
        node, flow = item.node, self._placement.flow
        if report.exit_code and item.lease.size > 1:
            # The other ranks may wait for this rank in a collective, or would mix files of two
            # attempts. The driver counts this as a failure of the stage.
            reason = f"{node.name} failed on one rank"
            self._lease_manager.abandon(item.lease, reason, count_failure=False)
        elif not report.exit_code:
            self._lease_manager.count_finished(item.lease)
            self._lease_manager.count_finished(item.policy_lease)
            # ``train``, beside which ``sync`` runs. The autoscaler ignores the time of ``sync``.
            if node.stage == flow.stages[flow.publish_stage].colocate_with:
                pools = self._lease_manager.generators
                leases = [pool.active_lease for pool in pools if not pool.is_retired]
                workers = {lease.primary_worker for lease in leases if lease is not None}
                self._autoscaler.adjust(node.iteration, workers)
        self._outcomes[node] = Outcome(report.exit_code, report.reason)

    def _on_share_ended(self, share: ShareItem, report: WorkItemEnded) -> None:
        self._lease_manager.count_finished(self._lease_manager.find(share.worker))
        self._autoscaler.record(share.node.name, share.worker, len(share.starts))
        row = {
            "node": share.node.name,
            "worker": share.worker,
            "host": report.host,
            "work_item": share.number,
            "starts": share.starts,
            "unfinished_starts": report.unfinished_starts,
            "continues": None if share.partial is None else share.partial.item_number,
            "spans": report.spans,
            "used_disk_fallback": report.used_disk_fallback,
        }
        append_work(self.run.folder, row)

    def _on_lease_lost(self, lease: Lease, reason: str) -> None:
        for node in self._scheduler.on_lease_lost(lease):
            self._outcomes[node] = Outcome(EXIT_REQUEUE, reason)

    def _finish_committed(self, waiting: dict[StageNode, StageCall]) -> None:
        """Finish the waiting nodes that an earlier lease has committed."""
        for node, stage_call in waiting.items():
            if (stage_call.output_folder / MANIFEST).exists():
                self._scheduler.remove(node)
                self._outcomes[node] = Outcome(0)

    def _take_outcomes(self) -> dict[StageNode, Outcome]:
        """Return the outcomes that can be reported. A success waits for the outcomes of its inputs,
        which may be reported later."""
        unfinished, reportable = self._scheduler.unfinished, {}
        for node in sorted(self._outcomes, key=self._placement.position):
            inputs = self._graph.inputs(node).values()
            if self._outcomes[node].exit_code or unfinished.isdisjoint(inputs):
                reportable[node] = self._outcomes.pop(node)
            else:
                unfinished.add(node)
        return reportable

    def _report_progress(self) -> None:
        """Report progress to the console, and write the file for ``rlinf status``."""
        peers = self._control.known_peers()
        for lease in self._lease_manager.leases:
            peer = peers.get(lease.primary_worker)
            for row in peer.status.get("active_stages", ()) if peer and peer.alive else ():
                # The worker that collects the rollout reports the progress of the whole batch.
                if row["total"] and row["compute_s"] is None and row["stage"] != WORK_ITEM:
                    self.progress(*(row[key] for key in PROGRESS_KEYS))
        waiting = {pool: list(self._scheduler.waiting(pool)) for pool in self._pools}
        write_pools_status(self.run.folder, waiting, peers)
