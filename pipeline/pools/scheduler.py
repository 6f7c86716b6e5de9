"""The scheduler of the pools' work items: whole stages, and shares of rollouts.

A whole stage is computed by the workers of one lease. The rollout of an elastic pool is computed in
shares: a *collector*, a worker with that stage, fetches the trajectories of all shares.
*Generators*, the workers of the elastic pool, compute shares. So do *helpers*, workers of pools
with other stages, until no start is pending; they then pass their long samples to generators.

A work item is waiting, then assigned to workers, then it ends. A stage whose lease is lost returns
to the driver, which may start it again. The starts of a lost share are pending again, and are
assigned in the order of the batch, so that its first starts complete early.

The scheduler reads no clock and no file and knows no sockets; the executor connects it with them.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from pipeline.graph import Graph, StageNode
from pipeline.plan import WEIGHT_TRANSPORTS
from pipeline.pools.leases import Lease, PoolState
from pipeline.pools.stage_placement import StagePlacement
from pipeline.pools.worker_speeds import WorkerSpeeds
from pipeline.run import Run
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.data.episodes import OPEN_EPISODES
from rlinf.errors import EXIT_BAD_INPUT, EXIT_REQUEUE, InputError, StageError, short_reason
from stages.flow import POLICY_SUFFIX, WEIGHTS
from stages.layout import partial_samples_channel
from stages.live_store import evict_oldest
from stages.runner import StageCall
from stages.worker.messages import (
    AttemptEnded,
    CancelWork,
    FetchOutput,
    FetchWeights,
    GenerateStarts,
    PartialSamples,
    ReassignWork,
    RunStages,
    ServePolicy,
    StageOrder,
    WorkerOrder,
    WorkItemEnded,
)
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET

BATCH_WAIT_S = 0.5
"""Seconds for which the stages of a pool with several ranks wait for further stages of their
iteration."""
MAX_IN_FLIGHT = 2
"""Shares of a worker beyond which it gets no pending starts: one in progress, and the next one."""
HISTORY_SIZE = 64
"""Maximum number of known weights, and of shares of ended rollouts."""
log = logging.getLogger("rlinf")
Send = Callable[[str, WorkerOrder], None]
"""Sends an order to a worker."""


@dataclass(eq=False)
class StageItem:
    """A stage that a lease computes."""

    node: StageNode
    lease: Lease
    workers: list[str]
    """Workers of the lease that compute it; the first reports its success for all."""
    order: StageOrder
    live: dict[str, StageNode]
    """Inputs from memory or other workers instead of disk, with the nodes that produce them."""
    policy_lease: Lease | None = None
    """Lease that serves the policy to its simulators; None: it needs none, or it was lost."""
    transfers: set[tuple[str, Lease, Lease]] = field(default_factory=set)
    """Transfers of inputs that were ordered: (input, sending lease, receiving lease)."""
    pending: list[int] | None = None
    """Sorted starts that no worker generates. None: the stage collects no rollout, or its collector
    has not reported yet of which starts it has the trajectories."""
    partial: list[tuple[tuple[int, ...], PartialSamples]] = field(default_factory=list)
    """Starts whose samples a helper began, and which a generator must continue."""
    num_shares: int = 0
    has_committed_weights: bool = False
    is_ending: bool = False
    """Whether no start was pending once; helpers then get no more shares."""

    @property
    def weights(self) -> str:
        """Folder of its weights, relative to the run."""
        return self.order.inputs[WEIGHTS][0]

    def requeue(self, starts: Iterable[int]) -> None:
        """Return starts to the pending ones."""
        self.pending = sorted([*(self.pending or ()), *starts])


@dataclass(eq=False)
class ShareItem:
    """Some starts of a rollout, which one worker generates."""

    name: str
    """Unique in the run."""
    node: StageNode
    worker: str
    number: int
    """Index in its rollout; -1 if it has no starts and only loads the worker's engine."""
    starts: tuple[int, ...]
    weights_attempt: str | None
    """The attempt that produced its weights; None if these were committed."""
    partial: PartialSamples | None
    """Samples that another worker began; None if there are none."""
    is_reassigned: bool = False
    """Whether its worker was ordered to pass the last samples to another worker."""


class WorkScheduler:
    """Assigns all work items of a run to the workers of its pools.

    Args:
        pools: pools of the run. The list changes as generators join and leave.
        send: sends an order to a worker.
        is_committed: returns whether the output in a folder, relative to the run, is committed.
        max_failures: number of failed shares of a rollout beyond which the run fails.
    """

    def __init__(
        self,
        run: Run,
        placement: StagePlacement,
        pools: list[PoolState],
        send: Send,
        is_committed: Callable[[str], bool],
        max_failures: int,
    ) -> None:
        self._run, self._placement, self._pools, self._send = run, placement, pools, send
        self._is_committed, self._max_failures = is_committed, max_failures
        self._graph, self._flow = Graph(run.config), placement.flow
        self._waiting: dict[StageNode, StageCall] = {}
        self._queued_at: dict[PoolState, float] = {}
        """Time at which the newest stage of each pool was added."""
        self._stages: dict[StageNode, StageItem] = {}
        """Assigned stages."""
        self._shares: dict[str, dict[str, ShareItem]] = defaultdict(dict)
        """Assigned shares of all rollouts, by worker and name."""
        self._late_shares: dict[str, ShareItem] = {}
        """Shares of ended rollouts, whose reports may still arrive, by name."""
        self._failures = Counter[StageNode]()
        """Number of failed shares."""
        self._live_weights: dict[str, dict[str, str]] = {}
        """Attempt that produced uncommitted weights, by their folder and by worker with them in
        memory."""
        self._weights_iteration: dict[str, int] = {}
        """Iteration of the last weights that a worker has reported."""
        self._ready_workers: set[str] = set()
        """Workers with a loaded engine; only these get starts."""
        self.speeds = WorkerSpeeds()

    def add(self, node: StageNode, call: StageCall, now: float) -> None:
        """Add a stage to the queue; ``now`` is in the same seconds as in :meth:`dispatch`."""
        self._waiting[node] = call
        self._queued_at[self._placement.pool(node.stage)] = now

    def remove(self, node: StageNode) -> None:
        """Remove a waiting stage."""
        del self._waiting[node]

    def waiting(self, pool: PoolState) -> dict[StageNode, StageCall]:
        """Return the waiting stages of a pool, the first to compute first."""
        nodes = [n for n in self._waiting if self._placement.pool(n.stage) is pool]
        return {node: self._waiting[node] for node in sorted(nodes, key=self._placement.position)}

    @property
    def unfinished(self) -> set[StageNode]:
        """The waiting and the assigned stages."""
        return {*self._waiting, *self._stages}

    def is_busy(self, lease: Lease) -> bool:
        """Return whether a lease computes a work item, or serves the policy of one."""
        return any(lease in (item.lease, item.policy_lease) for item in self._stages.values()) or (
            any(self._num_shares(worker) for worker in lease.workers())
        )

    def dispatch(self, now: float) -> None:
        """Assign waiting stages and pending starts, and order the transfers of live inputs."""
        for pool in self._pools:
            lease = pool.active_lease
            if lease is not None:
                self._assign_stages(lease, self._next_stages(lease, now))
        for item in self._stages.values():
            for name, source in item.live.items():
                self._order_transfer(item, name, source)
        self._assign_shares()

    def on_joined(self, worker: str) -> None:
        """Requeue the shares of a worker that joined: it may be another process, or still have
        shares of an earlier driver."""
        self._ready_workers.discard(worker)
        self._cancel_shares(worker)

    def on_collected(self, worker: str, node: str, starts: Sequence[int]) -> None:
        """Handle the report of a collector: the starts of which it has the trajectories."""
        item = self._find_stage(node, worker)
        if item is not None:
            missing = set(range(self._run.config.rollout.batch_size)).difference(starts)
            item.pending = sorted(missing)

    def on_weights(self, worker: str, weights: str, attempt: str, iteration: int) -> None:
        """Handle the report of a worker that has uncommitted weights of an iteration in memory."""
        self._live_weights.setdefault(weights, {})[worker] = attempt
        evict_oldest(self._live_weights, HISTORY_SIZE)
        self._weights_iteration[worker] = iteration

    def on_ended(self, worker: str, report: WorkItemEnded) -> StageItem | ShareItem | None:
        """Handle the end of a work item.

        Returns:
            The item if it is a stage, or a share that was computed; its ``starts`` are those that
            are finished. None for other reports.

        Raises:
            InputError: bad input of a share, or an error in the user's code.
            StageError: shares of a rollout failed too often.
        """
        item = self._find_stage(report.work_item, worker)
        if item is not None:
            # The primary worker reports success for all ranks.
            if not report.exit_code and worker != item.workers[0]:
                return None
            self._end_stage(item)
            return item
        share = self._late_shares.pop(report.work_item, None)
        if share is None:
            share = self._shares.get(worker, {}).get(report.work_item)
            if share is None:
                return None
            if report.exit_code:
                self._on_share_failed(share, report)
            else:
                self._on_share_finished(share, report)
        if report.exit_code or share.number < 0 or not report.spans:
            return None
        if share.partial is None and not report.unfinished_starts:
            seconds = sum(end - start for name, start, end in report.spans if name == "generate")
            self.speeds.record(worker, len(share.starts), seconds)
        return share

    def on_lease_lost(self, lease: Lease) -> list[StageNode]:
        """Requeue the shares of a lost lease; return its stages, which are no longer assigned."""
        for worker in lease.workers():
            self._ready_workers.discard(worker)
            self._weights_iteration.pop(worker, None)
            self.speeds.forget(worker)
            self._requeue_shares(worker)
        lost = [item for item in self._stages.values() if item.lease is lease]
        for item in lost:
            self._end_stage(item)
        for item in self._stages.values():
            if item.policy_lease is lease:
                # The simulators then report a failed attempt.
                item.policy_lease = None
                self._send_attempt_ended(item, item.workers, "its lease has ended")
        return [item.node for item in lost]

    # Stages

    def _find_stage(self, name: str, worker: str) -> StageItem | None:
        """Return an assigned stage of a worker."""
        items = (item for item in self._stages.values() if item.node.name == name)
        return next((item for item in items if worker in item.workers), None)

    def _next_stages(self, lease: Lease, now: float) -> list[StageNode]:
        """Return the waiting stages of a lease's pool whose orders can be sent now."""
        pool, index = lease.pool, self._placement.stage_index
        nodes = list(self.waiting(pool))
        if lease.size > 1 and nodes and now - self._queued_at[pool] < BATCH_WAIT_S:
            # All ranks must know all stages of an iteration before the first one starts.
            last_stage = max(pool.stages, key=lambda stage: index.get(stage, -1))
            iterations = {node.iteration for node in nodes if node.stage == last_stage}
            nodes = [n for n in nodes if n.iteration in iterations or n.stage not in index]
        if pool.slot is not None:
            # A generator that waits for weights cannot generate the samples from which these
            # weights are computed.
            in_progress = self.unfinished
            nodes = [n for n in nodes if in_progress.isdisjoint(self._graph.inputs(n).values())]
        has_policy = self._policy_lease is not None
        return [n for n in nodes if has_policy or not self._placement.needs_policy(n.stage)]

    @property
    def _policy_lease(self) -> Lease | None:
        """The active lease that serves the policy to simulators of other pools."""
        stage = self._placement.policy_stage
        return None if stage is None else self._placement.pool(stage).active_lease

    def _assign_stages(self, lease: Lease, nodes: Sequence[StageNode]) -> None:
        orders: dict[str, list[StageOrder]] = defaultdict(list)
        for node in nodes:
            item = self._stage_item(lease, node)
            self._stages[node] = item
            del self._waiting[node]
            lease.stages.add(node.stage)
            if item.policy_lease is not None:
                self._serve_policy(item, item.policy_lease)
            if node.stage == self._flow.publish_stage:
                self._live_weights.pop(item.order.output, None)
            for worker in item.workers:
                orders[worker].append(item.order)
        for worker, stages in orders.items():
            self._send(worker, RunStages(stages=tuple(stages)))

    def _stage_item(self, lease: Lease, node: StageNode) -> StageItem:
        placement, call = self._placement, self._waiting[node]
        policy_lease = self._policy_lease if placement.needs_policy(node.stage) else None
        live = {}
        for name, source in self._graph.inputs(node).items():
            receiver = policy_lease if policy_lease is not None and name == WEIGHTS else lease
            if self._is_live(node, name, source, receiver):
                live[name] = source
        only_collects = placement.only_collects(node.stage)
        # Collectors and simulators only need the weights to be committed.
        from_disk = only_collects or policy_lease is not None
        iteration, chunk, index = placement.position(node)
        # Another attempt must not come after a running stage that waits for its output.
        is_awaited = any(node in item.live.values() for item in self._stages.values())
        streams = self._flow.stream_channels & set(self._graph.inputs(node))
        if not is_awaited and not streams <= live.keys():
            chunk = placement.last_chunk  # it reads its batch from disk
        ranks = placement.ranks(node.stage)
        order = StageOrder(
            node=node.name,
            stage=node.stage,
            iteration=node.iteration,
            position=(iteration, chunk, index),
            num_chunks=placement.num_chunks(node.stage),
            output=self._relative(call.output_folder),
            attempt=secrets.token_hex(6),
            ranks=tuple(ranks),
            layout=str(placement.layout(node.stage)),
            inputs={
                name: (self._relative(folder), name in live and not from_disk)
                for name, folder in call.inputs.items()
            },
            receives_trajectories=only_collects,
            in_engine_thread=lease.pool.slot is not None,
            policy_workers=() if policy_lease is None else self._policy_workers(policy_lease),
        )
        return StageItem(node, lease, lease.workers(ranks), order, live, policy_lease)

    def _is_live(self, node: StageNode, name: str, source: StageNode, lease: Lease) -> bool:
        """Return whether a lease gets an input of a node from memory or from other workers."""
        placement = self._placement
        if name == OPEN_EPISODES:
            # A live input would keep the previous trajectories in memory until this rollout ends.
            return False
        producer = self._stages.get(source)
        if producer is None and source not in self._waiting:
            return False
        is_stream = name in self._flow.stream_channels
        is_published = (source.stage, name) == (self._flow.publish_stage, WEIGHTS)
        can_be_sent = is_stream or (
            is_published and not placement.reads_own_shard(source.stage, node.stage)
        )
        if can_be_sent and placement.is_streamed(source.stage, node.stage):
            return True
        # A local input stays in the memory of the workers that produce it. Of records, each rank
        # has only its own.
        is_local = placement.pool(source.stage) is lease.pool and (
            producer is None or producer.lease is lease
        )
        ranks = {*placement.ranks(node.stage), *placement.ranks(source.stage)}
        return is_local and not (is_stream and len(ranks) > 1)

    def _end_stage(self, item: StageItem) -> None:
        """Forget a stage that has ended, and cancel what belongs to it."""
        del self._stages[item.node]
        if item.policy_lease is not None:
            reason = "the attempt of the simulators has ended"
            self._send_attempt_ended(item, self._policy_workers(item.policy_lease), reason)
        assigned = [share for shares in self._shares.values() for share in shares.values()]
        ended = [share for share in assigned if share.node == item.node]
        for share in ended:
            self._late_shares[share.name] = self._shares[share.worker].pop(share.name)
        evict_oldest(self._late_shares, HISTORY_SIZE)
        for worker in {share.worker for share in ended}:
            self._cancel_shares(worker)

    def _policy_workers(self, lease: Lease) -> tuple[str, ...]:
        """Return the workers of a lease that serve the policy; rank n of the simulators queries
        number n modulo their count."""
        return tuple(lease.workers(self._placement.ranks(str(self._placement.policy_stage))))

    def _serve_policy(self, item: StageItem, policy_lease: Lease) -> None:
        order = item.order
        policy_lease.stages.add(order.stage + POLICY_SUFFIX)
        for number, worker in enumerate(order.policy_workers):
            if clients := tuple(item.workers[number :: len(order.policy_workers)]):
                live = WEIGHTS in item.live
                self._send(worker, ServePolicy(stage=order, has_live_weights=live, clients=clients))

    def _send_attempt_ended(self, item: StageItem, workers: Iterable[str], reason: str) -> None:
        order = AttemptEnded(node=item.node.name, attempt=item.order.attempt, reason=reason)
        for worker in workers:
            self._send(worker, order)

    def _order_transfer(self, item: StageItem, name: str, source: StageNode) -> None:
        """Order the workers that need an input to fetch it, once its producer is assigned."""
        producer = self._stages.get(source)
        if producer is None:
            return
        is_stream = name in self._flow.stream_channels
        for lease, workers in self._receivers(item, name, source):
            key = (name, producer.lease, lease)
            # Within a lease, only records are sent, and only between several workers: a single
            # worker has its records in memory, and every rank has all other inputs.
            is_local = producer.lease is lease and not (is_stream and lease.size > 1)
            if key in item.transfers or is_local:
                continue
            item.transfers.add(key)
            if is_stream:
                self._order_records(producer, item, name, workers)
            else:
                self._order_weights(producer, item, workers)

    def _receivers(
        self, item: StageItem, name: str, source: StageNode
    ) -> list[tuple[Lease, Sequence[str]]]:
        """Return the workers that receive an input, by lease: workers that compute the stage, all
        generators and helpers of an elastic rollout, or the workers that serve its policy."""
        if name == WEIGHTS and item.order.policy_workers:
            lease = item.policy_lease
            return [] if lease is None else [(lease, self._policy_workers(lease))]
        if not item.order.receives_trajectories:
            return [(item.lease, item.workers)]
        is_streamed = self._placement.is_streamed(source.stage, item.node.stage)
        if source.stage != self._flow.publish_stage or not is_streamed:
            return []
        pools = [pool for pool in self._pools if pool.slot is not None or pool.also_generates]
        leases = [lease for pool in pools if (lease := pool.active_lease) is not None]
        return [(lease, lease.workers()) for lease in leases]

    def _order_records(
        self, producer: StageItem, target: StageItem, channel: str, receivers: Sequence[str]
    ) -> None:
        """Order workers to fetch records from all primary ranks of the producer."""
        source, placement = producer.node.stage, self._placement
        world = ProcessGroupInfo(size=len(producer.workers), layout=placement.layout(source))
        producers = [producer.workers[rank] for rank in world.primary_ranks]
        for receiver in receivers:
            if others := tuple(worker for worker in producers if worker != receiver):
                order = FetchOutput(
                    output=producer.order.output,
                    channel=channel,
                    producers=others,
                    transport=placement.transport(source, target.node.stage, SOCKET),
                )
                self._send(receiver, order)

    def _order_weights(
        self, producer: StageItem, target: StageItem, receivers: Sequence[str]
    ) -> None:
        """Order workers to fetch weights from the primary worker of the producer."""
        source, publisher = producer.node.stage, producer.workers[0]
        transport = self._placement.transport(source, target.node.stage, SHARED_MEMORY)
        order = FetchWeights(
            output=producer.order.output,
            producer=publisher,
            transport=transport,
            members=(publisher, *receivers) if transport in WEIGHT_TRANSPORTS else (),
        )
        for receiver in receivers:
            self._send(receiver, order)

    def _relative(self, folder: Path) -> str:
        return folder.relative_to(self._run.folder).as_posix()

    # Shares of rollouts

    def _assign_shares(self) -> None:
        """Assign pending starts to workers that are about to be idle, the earliest rollout first.

        A worker gets no share of a rollout for whose weights it would have to wait: meanwhile it
        could not compute the earlier rollouts on which these weights depend.
        """
        items = sorted(self._stages.values(), key=lambda item: item.node.iteration)
        rollouts = [r for r in items if r.pending is not None and self._has_weights(r)]
        computing = [item.lease for item in items]
        leases = [pool.active_lease for pool in self._pools if pool.slot is not None]
        generators = [x.primary_worker for x in leases if x is not None and x not in computing]
        helpers = self._helpers()
        # Number of rollouts, from the first one, of which a worker may get shares.
        limits = {w: self._num_usable(w, rollouts) for w in [*generators, *helpers]}
        is_ending = bool(generators) and any(rollout.is_ending for rollout in rollouts)
        for worker, last_iteration in helpers.items():
            num_early = sum(rollout.node.iteration <= last_iteration for rollout in rollouts)
            limits[worker] = 0 if is_ending else min(num_early, limits[worker])
        # An engine loads from committed files.
        committed = next((rollout for rollout in rollouts if rollout.has_committed_weights), None)
        usable = [*generators, *(worker for worker in helpers if limits[worker])]
        for worker in usable:
            if committed and worker not in self._ready_workers and not self._num_shares(worker):
                self._send_share(committed, worker, ())
        ready = [worker for worker in usable if worker in self._ready_workers]
        ready_generators = [worker for worker in generators if worker in self._ready_workers]
        for rollout in rollouts:
            self._assign_partial(rollout, ready_generators)
        self._assign_pending(rollouts, self.speeds.speeds(ready), limits)
        for rollout in rollouts:
            if any(self._can_use_weights(worker, rollout) for worker in ready_generators):
                self._reassign_helpers(rollout, helpers)

    def _helpers(self) -> dict[str, int]:
        """Return the workers of pools with ``also_generates``, each with the earliest iteration
        that its pool still has to compute. A helper generates for no later iteration."""
        helpers = {}
        for pool in self._pools:
            lease = pool.active_lease
            if not pool.also_generates or lease is None:
                continue
            assigned = [item.node for item in self._stages.values() if item.lease is lease]
            nodes = [*self.waiting(pool), *assigned]
            iterations = {self._placement.position(node)[0] for node in nodes}
            for worker in lease.workers():
                # Ignore the iteration whose weights the worker has: only its commit remains.
                newest = self._weights_iteration.get(worker, -1)
                later = (iteration for iteration in iterations if iteration > newest)
                helpers[worker] = min(later, default=sys.maxsize)
        return helpers

    def _assign_partial(self, rollout: StageItem, generators: Sequence[str]) -> None:
        """Assign samples that helpers began to generators; without generators, start them anew."""
        partial, rollout.partial = rollout.partial, []
        for starts, samples in partial:
            usable = [w for w in generators if self._can_use_weights(w, rollout)]
            if usable:
                self._send_share(rollout, min(usable, key=self._num_shares), starts, samples)
            elif generators:
                rollout.partial.append((starts, samples))
            else:
                rollout.requeue(starts)

    def _assign_pending(
        self, rollouts: Sequence[StageItem], speeds: Mapping[str, float], limits: Mapping[str, int]
    ) -> None:
        """Assign pending starts until each worker has :data:`MAX_IN_FLIGHT` shares.

        Args:
            speeds: starts per second by worker.
            limits: number of rollouts, from the first one, of which a worker may get shares.
        """
        total = sum(speeds.values())
        for in_flight in range(MAX_IN_FLIGHT):
            for index, rollout in enumerate(rollouts):
                assert rollout.pending is not None
                num_pending = len(rollout.pending)
                for worker, speed in speeds.items():
                    is_full = self._num_shares(worker) > in_flight or index >= limits[worker]
                    if rollout.pending and not is_full:
                        size = self.speeds.share_size(num_pending, speed / total)
                        starts, rollout.pending = rollout.pending[:size], rollout.pending[size:]
                        self._send_share(rollout, worker, tuple(starts))

    def _reassign_helpers(self, rollout: StageItem, helpers: Iterable[str]) -> None:
        """Order helpers to pass their last samples to generators if no start is pending."""
        if rollout.pending:
            return
        for share in [share for worker in helpers for share in self._shares[worker].values()]:
            is_last = share.node == rollout.node and bool(share.starts)
            if is_last and not share.is_reassigned:
                rollout.is_ending = share.is_reassigned = True
                self._send(share.worker, ReassignWork(work_item=share.name))

    def _send_share(
        self,
        rollout: StageItem,
        worker: str,
        starts: tuple[int, ...],
        partial: PartialSamples | None = None,
    ) -> None:
        name, number, attempt = secrets.token_hex(6), -1, None
        label = node_name = rollout.node.name
        if starts:
            number, rollout.num_shares = rollout.num_shares, rollout.num_shares + 1
            label = f"{node_name} work item {number}"
        if partial is not None:
            attempt = partial.weights_attempt
        elif not rollout.has_committed_weights:
            attempt = self._live_weights[rollout.weights][worker]
        share = ShareItem(name, rollout.node, worker, number, starts, attempt, partial)
        self._shares[worker][name] = share
        collector, output = rollout.workers[0], rollout.order.output
        if starts:
            fetch = FetchOutput(
                output=output,
                channel="trajectories",
                producers=(worker,),
                transport=SOCKET,
                work_item=name,
                source_attempt=attempt,
            )
            self._send(collector, fetch)
        order = GenerateStarts(
            work_item=name,
            label=label,
            iteration=rollout.node.iteration,
            output=output,
            weights=rollout.weights,
            weights_attempt=attempt,
            receiver=collector,
            starts=starts,
            partial=partial,
        )
        self._send(worker, order)

    def _on_share_finished(self, share: ShareItem, report: WorkItemEnded) -> None:
        del self._shares[share.worker][share.name]
        if not share.starts:
            self._ready_workers.add(share.worker)
        unfinished = tuple(s for s in share.starts if s in report.unfinished_starts)
        share.starts = tuple(s for s in share.starts if s not in unfinished)
        rollout = self._stages[share.node]
        if unfinished and report.num_partial_samples:
            samples = PartialSamples(
                worker=share.worker,
                item_number=share.number,
                channel=partial_samples_channel(share.name),
                num_samples=report.num_partial_samples,
                weights_attempt=share.weights_attempt,
            )
            rollout.partial.append((unfinished, samples))
        else:
            rollout.requeue(unfinished)

    def _on_share_failed(self, share: ShareItem, report: WorkItemEnded) -> None:
        del self._shares[share.worker][share.name]
        rollout, name = self._stages[share.node], share.node.name
        rollout.requeue(share.starts)
        # The worker may have lost the weights or its engine, or the weights were withdrawn.
        self._live_weights.get(rollout.weights, {}).pop(share.worker, None)
        rollout.has_committed_weights = False
        self._failures[share.node] += report.exit_code != EXIT_REQUEUE
        if report.exit_code == EXIT_BAD_INPUT:
            raise InputError(f"{name}: {report.reason}")
        log.warning("%s on %s: %s", name, share.worker, short_reason(report.reason))
        if self._failures[share.node] > self._max_failures:
            raise StageError(f"{name} failed on {share.worker}: {report.reason}")

    def _cancel_shares(self, worker: str) -> None:
        """Requeue all shares of a worker, and order it to cancel them."""
        self._requeue_shares(worker)
        self._send(worker, CancelWork())

    def _requeue_shares(self, worker: str) -> None:
        for share in self._shares.pop(worker, {}).values():
            self._stages[share.node].requeue(share.starts)

    def _num_shares(self, worker: str) -> int:
        return len(self._shares.get(worker, ()))

    def _has_weights(self, rollout: StageItem) -> bool:
        """Return whether any worker can use the weights of a rollout."""
        if not rollout.has_committed_weights:
            rollout.has_committed_weights = self._is_committed(rollout.weights)
        return rollout.has_committed_weights or bool(self._live_weights.get(rollout.weights))

    def _can_use_weights(self, worker: str, rollout: StageItem) -> bool:
        """Return whether a worker has the weights of a rollout, or can read them."""
        has_live_weights = worker in self._live_weights.get(rollout.weights, ())
        return rollout.has_committed_weights or has_live_weights

    def _num_usable(self, worker: str, rollouts: Iterable[StageItem]) -> int:
        """Return the number of rollouts before the first whose weights a worker cannot use."""
        return len(list(takewhile(lambda item: self._can_use_weights(worker, item), rollouts)))
