"""Dispatch of stages to pools: orders to workers, and routes of inputs between workers."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline.graph import Graph, StageNode
from pipeline.plan import COMMITTED_TRANSPORTS, WEIGHT_TRANSPORTS, Plan
from pipeline.pools.leases import Lease, PoolLease, PoolState
from pipeline.pools.rollout_scheduler import RolloutScheduler
from pipeline.run import Run
from rlinf.channels.process_group import DATA_PARALLEL_ONLY, ParallelLayout, ProcessGroupInfo
from rlinf.data.episodes import OPEN_EPISODES
from rlinf.data.record import LARGE_ROW_BYTES
from rlinf.envs import environments
from stages.flow import EVALUATE, WEIGHTS
from stages.worker import messages
from stages.worker.messages import AttemptEnded, ServePolicy, StageOrder, WorkerOrder
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET

BATCH_WAIT_S = 0.5
"""Seconds for which the orders of a pool with several ranks wait for further stages of their
iteration."""
Send = Callable[[str, WorkerOrder], None]
"""Sends an order to a worker."""


class StageDispatcher:
    """Sends the orders of waiting stages to all pools with an active lease.

    Args:
        pools: pools of the run. The list changes as generators join and leave.
        scheduler: scheduler of rollouts in elastic pools.
        send: sends an order to a worker.
    """

    def __init__(
        self, run: Run, plan: Plan, pools: list[PoolState], scheduler: RolloutScheduler, send: Send
    ) -> None:
        self._run, self._plan, self._pools, self._send = run, plan, pools, send
        self._scheduler = scheduler
        self._graph = Graph(run.config)
        self._flow = self._graph.flow
        self._stage_index = {stage: i for i, stage in enumerate(self._flow.stages)}
        self._pool_by_stage = {stage: pools[number] for stage, number in plan.stage_pools().items()}
        self._layouts = {stage: plan.stage_plan(stage).layout for stage in self._pool_by_stage}
        environment = environments.get(run.config.task.name)
        task = run.config.task.validate_options(environment.Config, "task")
        self._has_large_steps = environment.max_step_bytes(task) >= LARGE_ROW_BYTES
        self._has_elastic_pool = any(pool.slot is not None for pool in pools)
        self._ranks_by_stage: dict[str, Sequence[int]] = {
            stage: range(
                1 if self._is_collected(stage) or plan.is_single_process(stage) else pool.size
            )
            for stage, pool in self._pool_by_stage.items()
        }
        rollout_stage = str(self._flow.rollout_stage)
        policy_stages = {*plan.flow.separate_policy}
        for pool in plan.pools:
            has_both = policy_stages & {*pool.stages} and rollout_stage in pool.stage_ranks
            if has_both and self._pool_by_stage[EVALUATE] is self._pool_by_stage[rollout_stage]:
                # Evaluations run on the ranks of the simulators.
                self._ranks_by_stage[EVALUATE] = pool.stage_ranks[rollout_stage]
            self._ranks_by_stage.update(pool.stage_ranks)
        self.policy_assigner = PolicyAssigner(plan, self._pool_by_stage, self._ranks_by_stage, send)
        self._after_chunks = self._stages_after_chunks()
        self._live: dict[StageNode, dict[str, StageNode]] = {}
        """Live inputs of a node (from memory or streamed, not from disk), with the nodes that
        produce them. A node is added when its sources are decided."""
        self._subscribed: dict[StageNode, set[tuple[str, str, str]]] = defaultdict(set)
        """Transfers to a node that were ordered: (input, sending lease, receiving lease)."""

    def pool_of(self, node: StageNode) -> PoolState:
        return self._pool_by_stage[node.stage]

    def dispatch(self) -> None:
        """Send the orders of waiting stages, and order the transfers of their live inputs."""
        for pool in self._pools:
            lease = pool.active_lease
            if lease is None or not pool.waiting:
                continue
            nodes = sorted(pool.waiting, key=self.position)
            if lease.size > 1 and time.monotonic() - pool.last_queued_at < BATCH_WAIT_S:
                # All ranks must know all stages of an iteration before the first one starts.
                last_stage = max(pool.stages, key=lambda stage: self._stage_index.get(stage, -1))
                iterations = {node.iteration for node in nodes if node.stage == last_stage}
                indices = self._stage_index
                nodes = [n for n in nodes if n.iteration in iterations or n.stage not in indices]
            self._decide_sources(
                pool, lease, [n for n in nodes if self.policy_assigner.is_ready(n)]
            )
        for pool in self._pools:
            lease = pool.active_lease
            if lease is not None:
                self._send_orders(pool, lease)
        self._subscribe()

    def end_attempt(self, node: StageNode) -> None:
        """Forget an attempt that ended."""
        self._live.pop(node, None)
        self._subscribed.pop(node, None)
        self.policy_assigner.end_attempt(node)

    def position(self, node: StageNode) -> tuple[int, int, int]:
        """Return (iteration, chunk, stage index), the order in which stages get a shared device
        (:mod:`stages.device_schedule`)."""
        if node.stage in self._flow.setup_stages:
            return (-1, 0, 0)
        if node.stage not in self._stage_index:
            # An evaluation: just before the rollout that uses the same weights.
            return (node.iteration + self._run.config.rollout.staleness, 0, -1)
        sources = self._flow.stages[node.stage].inputs
        needs_whole_batch = not self._flow.stream_channels & set(sources) and any(
            not s.lag and s.stage in self._stage_index for s in sources.values()
        )
        is_late = needs_whole_batch or node.stage in self._after_chunks
        chunk = self._plan.num_chunks if is_late else 0
        return (node.iteration, chunk, self._stage_index[node.stage])

    def _stages_after_chunks(self) -> frozenset[str]:
        """Return stages that begin after all chunks of the batch have passed the earlier stages.

        Such a stage needs all ranks of its pool, while each earlier stage uses only some: between
        two chunks it would block the earlier stages. Stages that depend on it are late too.
        """
        late = set[str]()
        for stage, spec in self._flow.stages.items():
            earlier = list(self._flow.stages)[: self._stage_index[stage]]
            # Stages that the plan restricts to some ranks, among them ranks of this stage.
            restricted = {
                s
                for pool in self._plan.pools
                for s in pool.stage_ranks
                if self._share_ranks(s, stage)
            }
            in_loop = restricted & self._stage_index.keys()
            blocks_earlier = stage not in restricted and bool(in_loop) and in_loop <= set(earlier)
            depends_on_late = any(s.stage in late and not s.lag for s in spec.inputs.values())
            if blocks_earlier or depends_on_late:
                late.add(stage)
        return frozenset(late)

    def _share_ranks(self, a: str, b: str) -> bool:
        has_common_rank = not {*self._ranks_by_stage[a]}.isdisjoint(self._ranks_by_stage[b])
        return self._pool_by_stage[a] is self._pool_by_stage[b] and has_common_rank

    def num_chunks(self, stage: str) -> int:
        """Return the number of chunks in which a stage processes its batch.

        If no other stage shares the devices, the engine gets the whole batch at once and emits
        samples as they finish. Chunks would be decoded one after another, and each would have a
        long tail.
        """
        others = [s for s in self._flow.stages if s not in self._after_chunks and s != stage]
        is_alone = not any(self._share_ranks(stage, other) for other in others)
        gets_whole_batch = stage == self._flow.elastic_stage and is_alone
        if gets_whole_batch or self.policy_assigner.needs_policy(stage):
            return 1
        return self._plan.num_chunks

    def _decide_sources(self, pool: PoolState, lease: Lease, nodes: list[StageNode]) -> None:
        """Decide which inputs of stages are live, before the orders of the stages are sent."""
        for node in nodes:
            if node in self._live:
                continue
            live: dict[str, StageNode] = {}
            for name, source in self._graph.inputs(node).items():
                if name == OPEN_EPISODES:
                    # Read from disk: a live input would keep the previous trajectories in memory
                    # until this rollout ends.
                    continue
                assigned_nodes, source_pool = lease.assigned, pool
                if (
                    name == WEIGHTS
                    and (serving := self.policy_assigner.serving_lease(node)) is not None
                ):
                    assigned_nodes, source_pool = serving.lease.assigned, serving.pool
                # A local input stays in the memory of the workers that produce it.
                is_local = source in assigned_nodes or source in source_pool.waiting
                if (
                    name in self._flow.stream_channels
                    and len({*self._ranks(node), *self._ranks(source)}) > 1
                ):
                    # Each rank has its own records, which the plan may pass as files.
                    is_local = is_local and self._is_streamed(source, node)
                is_published_weights = (source.stage, name) == (self._flow.publish_stage, WEIGHTS)
                can_be_sent = name in self._flow.stream_channels or (
                    is_published_weights and not self._reads_own_shard(source, node)
                )
                if is_local or (
                    can_be_sent and self._is_in_progress(source) and self._is_streamed(source, node)
                ):
                    live[name] = source
            self._live[node] = live

    def _is_in_progress(self, node: StageNode) -> bool:
        """Return whether a pool is computing a node or will do so soon."""
        return any(
            node in pool.waiting or any(node in lease.assigned for lease in pool.leases)
            for pool in self._pools
        )

    def _subscribe(self) -> None:
        """Order the workers that need an output to fetch it from its producers."""
        leases = self._leases()
        for target, live in self._live.items():
            for name, source in live.items():
                producer = next((lease for lease in leases if source in lease.assigned), None)
                if producer is None:
                    continue
                # Within a lease, only records are sent, and only between several workers: a single
                # worker has its records in memory, and every rank has all other inputs.
                receivers = [
                    receiver
                    for receiver in self._receivers(source, target, name)
                    if (name, producer.name, receiver.name) not in self._subscribed[target]
                    and (
                        producer is not receiver
                        or (name in self._flow.stream_channels and producer.size > 1)
                    )
                ]
                self._subscribed[target].update(
                    (name, producer.name, receiver.name) for receiver in receivers
                )
                workers = [
                    worker
                    for receiver in receivers
                    for worker in self._receiving_workers(target, receiver, name)
                ]
                if name in self._flow.stream_channels:
                    self._order_records(source, target, name, producer, workers)
                else:
                    self._order_weights(source, target, producer, workers)

    def _order_records(
        self,
        source: StageNode,
        target: StageNode,
        channel: str,
        producer: Lease,
        receivers: Sequence[str],
    ) -> None:
        """Order workers to fetch records from all primary ranks of the producer."""
        ranks = self._ranks(source)
        world = ProcessGroupInfo(size=len(ranks), layout=self._layout(source))
        workers = producer.workers(ranks)
        producers = [workers[rank] for rank in world.primary_ranks]
        for receiver in receivers:
            if others := tuple(worker for worker in producers if worker != receiver):
                order = messages.FetchOutput(
                    output=self._output(source),
                    channel=channel,
                    producers=others,
                    transport=self._transport(source, target, SOCKET),
                )
                self._send(receiver, order)

    def _order_weights(
        self, source: StageNode, target: StageNode, producer: Lease, receivers: Sequence[str]
    ) -> None:
        """Order workers to fetch weights from rank 0 of the producer."""
        transport = self._transport(source, target, SHARED_MEMORY)
        publisher = producer.workers(self._ranks(source))[0]
        members = (publisher, *receivers) if transport in WEIGHT_TRANSPORTS else ()
        order = messages.FetchWeights(
            output=self._output(source), producer=publisher, transport=transport, members=members
        )
        for receiver in receivers:
            self._send(receiver, order)

    def _output(self, node: StageNode) -> str:
        return self._relative(self._graph.output_folder(self._run.folder, node))

    def _transport(self, source: StageNode, target: StageNode, default: str) -> str:
        return self._plan.transports.get(f"{source.stage} -> {target.stage}", default)

    def _receivers(self, source: StageNode, target: StageNode, name: str) -> list[Lease]:
        """Return the leases that receive an input: leases that compute the stage, all generators of
        an elastic rollout, or the lease that serves its policy."""
        if name == WEIGHTS and (serving := self.policy_assigner.serving_lease(target)) is not None:
            return [serving.lease]
        if not self._only_collects(target):
            return [lease for lease in self._leases() if target in lease.assigned]
        if source.stage != self._flow.publish_stage or not self._is_streamed(source, target):
            return []
        pools = [pool for pool in self._pools if pool.slot is not None or pool.also_generates]
        return [lease for pool in pools if (lease := pool.active_lease) is not None]

    def _receiving_workers(self, target: StageNode, receiver: Lease, name: str) -> list[str]:
        """Return the workers of a lease that receive an input of a stage."""
        if name == WEIGHTS and self.policy_assigner.needs_policy(target.stage):
            return receiver.workers(self.policy_assigner.ranks())
        if self._only_collects(target):
            return receiver.workers()
        return receiver.workers(self._ranks(target))

    def _only_collects(self, node: StageNode) -> bool:
        """Return whether a node only collects the samples of generators (elastic workers)."""
        return self._has_elastic_pool and node.stage == self._flow.elastic_stage

    def _reads_own_shard(self, source: StageNode, node: StageNode) -> bool:
        """Return whether each process of a node reads its shard of the weights from the published
        files: the trainer has several processes and the plan names no transport."""
        is_trainer = self._flow.all_stages[node.stage].holds == "trainer"
        is_sharded = is_trainer and len(self._ranks(node)) > 1
        return is_sharded and f"{source.stage} -> {node.stage}" not in self._plan.transports

    def _is_streamed(self, source: StageNode, node: StageNode) -> bool:
        """Return whether an output is sent live, and not read from committed files."""
        is_large = self._has_large_steps and source.stage == self._flow.rollout_stage
        default = "file" if is_large else "socket"
        return self._transport(source, node, default) not in COMMITTED_TRANSPORTS

    def _send_orders(self, pool: PoolState, lease: Lease) -> None:
        """Send the orders of all stages whose inputs are decided."""
        ready = [
            node
            for node in pool.waiting
            if node in self._live and self.policy_assigner.is_ready(node)
        ]
        nodes = sorted(ready, key=self.position)
        orders: dict[str, list[StageOrder]] = defaultdict(list)
        if pool.slot is not None:
            # A generator that waits for weights cannot generate the samples from which these
            # weights are computed.
            nodes = [node for node in nodes if not self._has_pending_inputs(node)]
        for node in nodes:
            call = pool.waiting.pop(node)
            ranks = self._ranks(node)
            only_collects = self._only_collects(node)
            from_disk = only_collects or self.policy_assigner.needs_policy(node.stage)
            order = StageOrder(
                node=node.name,
                stage=node.stage,
                iteration=node.iteration,
                position=self._device_position(node),
                num_chunks=self.num_chunks(node.stage),
                output=self._relative(call.output_folder),
                attempt=secrets.token_hex(6),
                ranks=tuple(ranks),
                layout=str(self._layout(node)),
                inputs={
                    # Collectors and simulators only need the weights to be committed.
                    name: (self._relative(folder), name in self._live[node] and not from_disk)
                    for name, folder in call.inputs.items()
                },
                receives_trajectories=only_collects,
                in_engine_thread=pool.slot is not None,
                policy_workers=self.policy_assigner.workers(node),
            )
            if order.policy_workers:
                is_live = WEIGHTS in self._live[node]
                self.policy_assigner.start_serving(node, order, lease.workers(ranks), live=is_live)
            if node.stage == self._flow.publish_stage:
                self._scheduler.invalidate_weights(order.output)
            if only_collects:
                weights, collector = self._relative(call.inputs["weights"]), lease.primary_worker
                self._scheduler.start_rollout(node, order.output, weights, collector)
            lease.assigned.add(node)
            for worker in lease.workers(ranks):
                orders[worker].append(order)
        for worker, stages in orders.items():
            self._send(worker, messages.RunStages(stages=tuple(stages)))

    def _has_pending_inputs(self, node: StageNode) -> bool:
        """Return whether an input of a node is still being computed."""
        sources = set(self._graph.inputs(node).values())
        assigned = {other for lease in self._leases() for other in lease.assigned}
        return bool(sources & (assigned | {o for pool in self._pools for o in pool.waiting}))

    def primary_worker(self, node: StageNode, lease: Lease) -> str:
        """Return the worker that reports the success of a node for all ranks."""
        return lease.workers(self._ranks(node))[0]

    def _ranks(self, node: StageNode) -> Sequence[int]:
        return self._ranks_by_stage[node.stage]

    def _is_collected(self, stage: str) -> bool:
        """Return whether one process collects what generators produce for a stage."""
        return self._has_elastic_pool and self._flow.all_stages[stage].elastic

    def _layout(self, node: StageNode) -> ParallelLayout:
        return self._layouts[node.stage] if len(self._ranks(node)) > 1 else DATA_PARALLEL_ONLY

    def _device_position(self, node: StageNode) -> tuple[int, int, int]:
        """Return :meth:`position`, but after all chunks if a node reads its batch from disk."""
        iteration, chunk, stage_index = self.position(node)
        streams = self._flow.stream_channels & set(self._graph.inputs(node))
        return (
            iteration,
            chunk if streams <= set(self._live[node]) else self._plan.num_chunks,
            stage_index,
        )

    def _relative(self, folder: Path) -> str:
        return folder.relative_to(self._run.folder).as_posix()

    def _leases(self) -> list[Lease]:
        return [lease for pool in self._pools for lease in pool.leases]


class PolicyAssigner:
    """Assigns policy workers, which serve the policy, to stages whose simulators run elsewhere.

    It notifies each side when the other side ends. Without a separate policy stage it does nothing.

    Args:
        pool_by_stage: pool by stage, including the separate policy stage.
        ranks_by_stage: ranks of the pool that compute each stage.
    """

    def __init__(
        self,
        plan: Plan,
        pool_by_stage: Mapping[str, PoolState],
        ranks_by_stage: Mapping[str, Sequence[int]],
        send: Callable[[str, ServePolicy | AttemptEnded], None],
    ) -> None:
        self._pool_by_stage, self._ranks_by_stage, self._send = pool_by_stage, ranks_by_stage, send
        self._policy_stage = next(iter(plan.flow.separate_policy), "")
        self._client_stages = frozenset[str]()
        if self._policy_stage:
            rollout_stage = str(plan.flow.rollout_stage)
            # Evaluations need policy workers too, unless the plan runs them in another pool.
            self._client_stages = frozenset(
                name
                for name in (rollout_stage, EVALUATE)
                if pool_by_stage[name] is pool_by_stage[rollout_stage]
            )
        self._serving: dict[StageNode, tuple[Lease, str]] = {}
        """Serving lease and attempt, by dispatched node."""

    def needs_policy(self, stage: str) -> bool:
        """Return whether a stage has only simulators, and needs policy workers."""
        return stage in self._client_stages

    def is_ready(self, node: StageNode) -> bool:
        """Return whether a node needs no policy workers, or an active lease has them."""
        return (
            not self.needs_policy(node.stage)
            or self._pool_by_stage[self._policy_stage].active_lease is not None
        )

    def serving_lease(self, node: StageNode) -> PoolLease | None:
        """Return the lease that serves or will serve a node; None if it needs no policy workers or
        no lease is active."""
        if not self.needs_policy(node.stage):
            return None
        pool = self._pool_by_stage[self._policy_stage]
        lease = self._serving[node][0] if node in self._serving else pool.active_lease
        return None if lease is None else PoolLease(pool, lease)

    def ranks(self) -> Sequence[int]:
        """Return the ranks of the pool that serve the policy."""
        return self._ranks_by_stage[self._policy_stage]

    def workers(self, node: StageNode) -> tuple[str, ...]:
        """Return the policy workers of a node; rank n queries number n modulo their count."""
        serving = self.serving_lease(node)
        return () if serving is None else tuple(serving.lease.workers(self.ranks()))

    def start_serving(
        self, node: StageNode, order: StageOrder, simulators: list[str], *, live: bool
    ) -> None:
        """Start to serve a dispatched node.

        Args:
            simulators: workers that run the simulators.
            live: whether the weights come from memory or a stream, not from disk.
        """
        serving = self.serving_lease(node)
        if serving is None:
            return
        self._serving[node] = serving.lease, order.attempt
        serving.lease.served.add(node)
        for number, worker in enumerate(order.policy_workers):
            if clients := tuple(simulators[number :: len(order.policy_workers)]):
                policy_order = ServePolicy(
                    node=order.node,
                    stage=order.stage,
                    iteration=order.iteration,
                    position=order.position,
                    output=order.output,
                    attempt=order.attempt,
                    weights=(order.inputs[WEIGHTS][0], live),
                    clients=clients,
                )
                self._send(worker, policy_order)

    def end_attempt(self, node: StageNode) -> None:
        """Stop serving an attempt that ended."""
        lease, attempt = self._serving.pop(node, (None, ""))
        if lease is not None and lease in self._pool_by_stage[self._policy_stage].leases:
            reason = "the attempt of the simulators has ended"
            for worker in lease.workers(self.ranks()):
                self._send(worker, AttemptEnded(node=node.name, attempt=attempt, reason=reason))

    def on_lease_lost(self, lease: Lease) -> None:
        """Notify the simulator workers of a lost serving lease; they report a failed attempt."""
        lease.served.clear()
        reason = "its lease has ended"
        for node, attempt in [(n, a) for n, (other, a) in self._serving.items() if other is lease]:
            clients = self._pool_by_stage[node.stage].leases
            for client in [lease for lease in clients if node in lease.assigned]:
                for worker in client.workers(self._ranks_by_stage[node.stage]):
                    self._send(worker, AttemptEnded(node=node.name, attempt=attempt, reason=reason))

    def is_busy(self, lease: Lease) -> bool:
        """Return whether a lease serves a node."""
        return any(other == lease for other, _ in self._serving.values())

    def count_success(self, node: StageNode) -> None:
        """Count the success of a node for the lease that served it."""
        if node in self._serving:
            self._serving[node][0].num_finished += 1
            self._pool_by_stage[self._policy_stage].failures = 0
