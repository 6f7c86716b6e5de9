"""Dispatch of stages to pools: their orders, the sources of their inputs, and who sends what to
whom."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.graph import Graph, StageNode
from pipeline.plan import COMMITTED_TRANSPORTS, WEIGHT_TRANSPORTS, Plan
from pipeline.pools.leases import Lease, PoolState
from pipeline.pools.policy_pools import PolicyPools
from pipeline.pools.rollout_scheduler import RolloutScheduler
from pipeline.run import Run
from rlinf.channels.process_group import DATA_PARALLEL_ONLY, ParallelLayout, ProcessGroupInfo
from rlinf.data.episodes import OPEN_EPISODES
from rlinf.data.record import LARGE_ROW_BYTES
from rlinf.envs import environments
from stages.flow import EVALUATE, WEIGHTS
from stages.worker import messages
from stages.worker.messages import StageOrder, WorkerOrder
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET

FAN_OUT = 2
"""Number of receivers per sender by socket: more would share its link, fewer make longer paths."""
Hosts = Mapping[str, str | None]
"""Node by worker; None if unknown."""
Routes = dict[str, dict[str, str]]
"""Receivers and their transport, by sender."""


def route_tree(
    source: str, host: str | None, receivers: Hosts, *, use_shared_memory: bool, turn: int = 0
) -> Routes:
    """Return a tree of routes from one worker to all receivers, some of which forward the data.

    The data crosses to each node once. The first worker there sends it to the others on its node,
    and on to further nodes.

    Args:
        source: the sending worker.
        host: its node; None if unknown.
        receivers: node by receiver.
        use_shared_memory: whether workers on one node may use shared memory.
        turn: different for each of several sources, so that the receivers share the forwarding.
    """
    names = [worker for worker in receivers if worker != source]
    first = turn % len(names) if names else 0
    nodes: dict[object, list[str]] = defaultdict(list)
    for worker in (*names[first:], *names[:first]):
        at = receivers[worker]
        nodes[(worker,) if at is None else at].append(worker)
    routes: Routes = defaultdict(dict)
    here = nodes.pop(host, []) if host is not None else []
    heads = [workers[0] for workers in nodes.values()]
    _pass_on(routes, source, heads)
    for head, others in [(source, here), *((head, rest) for head, *rest in nodes.values())]:
        if use_shared_memory:
            routes[head] |= dict.fromkeys(others, SHARED_MEMORY)
        else:
            _pass_on(routes, head, others)
    return {sender: to for sender, to in routes.items() if to}


def _pass_on(routes: Routes, source: str, workers: Sequence[str]) -> None:
    """Add a tree of sockets."""
    senders = [source, *workers]
    for number, worker in enumerate(workers):
        routes[senders[number // FAN_OUT]][worker] = SOCKET


BATCH_WAIT_S = 0.5
"""How long orders of an iteration wait for the other stages of the iteration."""
Send = Callable[[str, WorkerOrder], None]
"""Sends an order to a worker."""


class StageDispatcher:
    """Sends the orders of waiting stages to every pool with an active lease.

    Args:
        pools: pools of the run. The list changes as generators join and leave.
        generators: scheduler of rollouts in elastic pools.
        send: sends an order to a worker.
    """

    def __init__(
        self, run: Run, plan: Plan, pools: list[PoolState], generators: RolloutScheduler, send: Send
    ) -> None:
        self._run, self._plan, self._pools, self._send = run, plan, pools, send
        self._generators = generators
        self._graph = Graph(run.config)
        self._flow = self._graph.flow
        self._order_of = {stage: i for i, stage in enumerate(self._flow.stages)}
        self._of = {stage: pools[number] for stage, number in plan.stage_pools().items()}
        self._layouts = {stage: plan.stage_plan(stage).layout for stage in self._of}
        environment = environments.get(run.config.task.name)
        task = run.config.task.validate_options(environment.Config, "task")
        self._large = environment.max_step_bytes(task) >= LARGE_ROW_BYTES
        self._elastic = any(pool.slot is not None for pool in pools)
        self._ranks_of: dict[str, Sequence[int]] = {
            stage: range(
                1 if self._is_collected(stage) or plan.is_single_process(stage) else pool.size
            )
            for stage, pool in self._of.items()
        }
        acts = str(self._flow.rollout_stage)
        for pool in plan.pools:
            beside = {*plan.flow.separate_policy} & {*pool.stages} and acts in pool.stage_ranks
            if beside and self._of[EVALUATE] is self._of[acts]:
                # Evaluations run on the ranks of the simulators.
                self._ranks_of[EVALUATE] = pool.stage_ranks[acts]
            self._ranks_of.update(pool.stage_ranks)
        self.policy_pools = PolicyPools(plan, self._of, self._ranks_of, send)
        self._after_chunks = self._stages_after_chunks()
        self._live: dict[StageNode, dict[str, StageNode]] = {}
        """Live inputs and the nodes that produce them, by dispatched node."""
        self._subscribed: dict[StageNode, set[tuple[str, str, str]]] = defaultdict(set)
        """Inputs with their senders and receivers that were connected, by dispatched node."""

    def pool_of(self, node: StageNode) -> PoolState:
        """Return the pool that runs a stage."""
        return self._of[node.stage]

    def dispatch(self) -> None:
        """Dispatch waiting stages, and connect their live inputs."""
        for pool in self._pools:
            member = pool.active_lease
            if member is None or not pool.waiting:
                continue
            nodes = sorted(pool.waiting, key=self.position)
            if member.size > 1 and time.monotonic() - pool.last_queued_at < BATCH_WAIT_S:
                # All ranks must know all stages of an iteration before the first one starts.
                last = max(pool.stages, key=lambda stage: self._order_of.get(stage, -1))
                complete = {node.iteration for node in nodes if node.stage == last}
                nodes = [
                    n for n in nodes if n.iteration in complete or n.stage not in self._order_of
                ]
            self._decide_sources(pool, member, [n for n in nodes if self.policy_pools.is_ready(n)])
        for pool in self._pools:
            member = pool.active_lease
            if member is not None:
                self._send_orders(pool, member)
        self._subscribe()

    def end_attempt(self, node: StageNode) -> None:
        """Forget an attempt that ended."""
        self._live.pop(node, None)
        self._subscribed.pop(node, None)
        self.policy_pools.end_attempt(node)

    def resend(self, producer: Lease, receiver: Lease) -> None:
        """Send again what was sent over a broken connection."""
        ends = (producer.name, receiver.name)
        for marks in self._subscribed.values():
            for mark in list(marks):
                # Receivers forward the data, so the whole tree is rebuilt.
                within = ends == (mark[2], mark[2])
                if mark[1:] == ends or within:
                    marks.discard(mark)

    def position(self, node: StageNode) -> tuple[int, int, int]:
        """Return the position of a stage in the device schedule (:mod:`stages.device_schedule`)."""
        if node.stage in self._flow.offline:
            return (-1, 0, 0)
        if node.stage not in self._order_of:
            # Just before the rollout with the same weights, so that it delays none with older ones.
            return (node.iteration + self._run.config.rollout.staleness, 0, -1)
        sources = self._flow.stages[node.stage].inputs
        complete = not self._flow.stream_channels & set(sources) and any(
            not s.lag and s.stage in self._order_of for s in sources.values()
        )
        late = complete or node.stage in self._after_chunks
        return (node.iteration, self._plan.num_chunks if late else 0, self._order_of[node.stage])

    def _stages_after_chunks(self) -> frozenset[str]:
        """Return stages that run after all chunks of the batch.

        They use all ranks of a pool whose earlier stages use some each, and would block these; or
        they depend on such a stage.
        """
        late = set[str]()
        for stage, spec in self._flow.stages.items():
            earlier = list(self._flow.stages)[: self._order_of[stage]]
            sides = [
                s
                for pool in self._plan.pools
                for s in pool.stage_ranks
                if self._share_ranks(s, stage)
            ]
            first = [s for s in sides if s in self._order_of]
            among = stage not in sides and bool(first) and set(first) <= set(earlier)
            waits = any(s.stage in late and not s.lag for s in spec.inputs.values())
            if among or waits:
                late.add(stage)
        return frozenset(late)

    def _share_ranks(self, a: str, b: str) -> bool:
        """Return whether two stages share ranks."""
        return self._of[a] is self._of[b] and bool({*self._ranks_of[a]} & {*self._ranks_of[b]})

    def num_chunks(self, stage: str) -> int:
        """Return the number of chunks in which a stage processes its batch.

        If no other stage shares the devices, the engine gets the whole batch at once and emits
        samples as they finish. Chunks would be decoded one after another, each with its own long
        tail.
        """
        others = [s for s in self._flow.stages if s not in self._after_chunks and s != stage]
        alone = not any(self._share_ranks(stage, other) for other in others)
        complete = stage == self._flow.elastic_stage and alone
        return 1 if complete or self.policy_pools.needs_policy(stage) else self._plan.num_chunks

    def _decide_sources(self, pool: PoolState, member: Lease, nodes: list[StageNode]) -> None:
        """Decide where the inputs of stages come from before they are dispatched."""
        for node in nodes:
            if node in self._live:
                continue
            live: dict[str, StageNode] = {}
            for name, source in self._graph.inputs(node).items():
                if name == OPEN_EPISODES:
                    # Read from disk: a live input would keep the previous trajectories in memory
                    # until this rollout ends.
                    continue
                assigned, producer = member.assigned, pool
                if (
                    name == WEIGHTS
                    and (policy := self.policy_pools.serving_lease(node)) is not None
                ):
                    assigned, producer = policy[1].assigned, policy[0]
                here = source in assigned or source in producer.waiting
                if (
                    name in self._flow.stream_channels
                    and len({*self._ranks(node), *self._ranks(source)}) > 1
                ):
                    # Each rank has its own records; the plan may transport them by file.
                    here = here and self._is_streamed(source, node)
                published = (source.stage, name) == (self._flow.publish_stage, WEIGHTS)
                sent = name in self._flow.stream_channels or (
                    published and not self._reads_own_rows(source, node)
                )
                if here or (
                    sent and self._is_in_progress(source) and self._is_streamed(source, node)
                ):
                    live[name] = source
            self._live[node] = live

    def _is_in_progress(self, node: StageNode) -> bool:
        """Return whether a pool is computing a node or will do so soon."""
        return any(
            node in pool.waiting or any(node in m.assigned for m in pool.leases)
            for pool in self._pools
        )

    def _subscribe(self) -> None:
        """Tell producers which workers in other pools wait for their output; again if these
        changed.

        A late receiver gets what was produced before.
        """
        members = self._members()
        for target, live in self._live.items():
            for name, source in live.items():
                producer = next((m for m in members if source in m.assigned), None)
                if producer is None:
                    continue
                # A single worker has the input in memory; so does each rank, for inputs that
                # are no streams.
                receivers = [
                    receiver
                    for receiver in self._receivers(source, target, name)
                    if (name, producer.name, receiver.name) not in self._subscribed[target]
                    and (
                        producer is not receiver
                        or (name in self._flow.stream_channels and producer.size > 1)
                    )
                ]
                self._subscribed[target].update((name, producer.name, m.name) for m in receivers)
                to = {
                    w: host for m in receivers for w, host in self._hosts(target, m, name).items()
                }
                out = self._relative(self._graph.output_folder(self._run.folder, source))
                for source_rank, worker, ways in self._routes(source, target, name, producer, to):
                    self._send(
                        worker,
                        messages.SendOutput(
                            output=out, channel=name, transports=ways, producer=source_rank
                        ),
                    )

    def _receivers(self, source: StageNode, target: StageNode, name: str) -> list[Lease]:
        """Return the leases that receive an input: those that compute the stage, all generators of
        an elastic rollout, or the lease that serves its policy."""
        if name == WEIGHTS and (policy := self.policy_pools.serving_lease(target)) is not None:
            return [policy[1]]
        if not self._only_collects(target):
            return [member for member in self._members() if target in member.assigned]
        if source.stage != self._flow.publish_stage or not self._is_streamed(source, target):
            return []
        pools = [pool for pool in self._pools if pool.slot is not None or pool.also_generates]
        return [member for pool in pools if (member := pool.active_lease) is not None]

    def _hosts(self, target: StageNode, receiver: Lease, name: str) -> dict[str, str | None]:
        """Return the workers of a lease that receive an input of a stage, with their nodes."""
        if name == WEIGHTS and self.policy_pools.needs_policy(target.stage):
            return receiver.hosts(self.policy_pools.ranks())
        return receiver.hosts(
            range(receiver.size) if self._only_collects(target) else self._ranks(target)
        )

    def _only_collects(self, node: StageNode) -> bool:
        """Return whether a node only collects what elastic generators produce."""
        return self._elastic and node.stage == self._flow.elastic_stage

    def _routes(
        self,
        source: StageNode,
        target: StageNode,
        name: str,
        producer: Lease,
        receivers: Mapping[str, str | None],
    ) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Yield the producer, the sender, and its receivers with their transport.

        Records come from all primary ranks of the producer, weights from its rank 0.
        """
        records = name in self._flow.stream_channels
        usual = SOCKET if records else SHARED_MEMORY
        way = self._plan.transports.get(f"{source.stage} -> {target.stage}", usual)
        if not receivers:
            return
        if way in WEIGHT_TRANSPORTS and name == WEIGHTS:
            first = producer.primary_worker
            yield first, first, dict.fromkeys(receivers, way)
            return
        near = way == SHARED_MEMORY
        ranks = self._ranks(source)
        speakers = ProcessGroupInfo(size=len(ranks), layout=self._layout(source)).primary_ranks
        producers = list(producer.hosts(ranks).items())
        for turn, rank in enumerate(speakers if records else [0]):
            first, host = producers[rank]
            for sender, to in route_tree(
                first, host, receivers, use_shared_memory=near, turn=turn
            ).items():
                yield first, sender, to

    def _reads_own_rows(self, source: StageNode, node: StageNode) -> bool:
        """Return whether several processes share the model of a node. Each then reads its rows of
        the published files, unless the plan names a transport."""
        shares = self._flow.all_stages[node.stage].holds == "trainer" and len(self._ranks(node)) > 1
        return shares and f"{source.stage} -> {node.stage}" not in self._plan.transports

    def _is_streamed(self, source: StageNode, node: StageNode) -> bool:
        large = self._large and source.stage == self._flow.rollout_stage
        usual = "file" if large else "socket"
        way = self._plan.transports.get(f"{source.stage} -> {node.stage}", usual)
        return way not in COMMITTED_TRANSPORTS

    def _send_orders(self, pool: PoolState, member: Lease) -> None:
        """Send the orders of all stages whose inputs are decided."""
        ready = [
            node for node in pool.waiting if node in self._live and self.policy_pools.is_ready(node)
        ]
        nodes = sorted(ready, key=self.position)
        orders: dict[str, list[StageOrder]] = defaultdict(list)
        if pool.slot is not None:
            # A generator that waits for weights cannot generate the samples they depend on.
            nodes = [node for node in nodes if not self._has_pending_inputs(node)]
        for node in nodes:
            call = pool.waiting.pop(node)
            ranks = self._ranks(node)
            gathers = self._only_collects(node)
            from_disk = gathers or self.policy_pools.needs_policy(node.stage)
            order = StageOrder(
                node=node.name,
                stage=node.stage,
                iteration=node.iteration,
                position=self._turn(node),
                num_chunks=self.num_chunks(node.stage),
                output=self._relative(call.output_folder),
                attempt=secrets.token_hex(6),
                ranks=tuple(ranks),
                layout=str(self._layout(node)),
                inputs={
                    # A collector and a policy client need only that the weights are committed.
                    name: (self._relative(folder), name in self._live[node] and not from_disk)
                    for name, folder in call.inputs.items()
                },
                receives_trajectories=gathers,
                in_engine_thread=pool.slot is not None,
                policy_workers=self.policy_pools.workers(node),
            )
            if order.policy_workers:
                is_live = WEIGHTS in self._live[node]
                self.policy_pools.begin(node, order, member.workers(ranks), live=is_live)
            if node.stage == self._flow.publish_stage:
                self._generators.invalidate_weights(order.output)
            if gathers:
                weights, gatherer = self._relative(call.inputs["weights"]), member.primary_worker
                self._generators.start_rollout(node, order.output, weights, gatherer)
            member.assigned.add(node)
            for worker in member.workers(ranks):
                orders[worker].append(order)
        for worker, stages in orders.items():
            self._send(worker, messages.RunStages(stages=tuple(stages)))

    def _has_pending_inputs(self, node: StageNode) -> bool:
        """Return whether an input of a node is still being computed."""
        sources = set(self._graph.inputs(node).values())
        assigned = {other for member in self._members() for other in member.assigned}
        return bool(sources & (assigned | {o for pool in self._pools for o in pool.waiting}))

    def primary_worker(self, node: StageNode, member: Lease) -> str:
        """Return the worker that reports the success of a node for all ranks."""
        return member.workers(self._ranks(node))[0]

    def _ranks(self, node: StageNode) -> Sequence[int]:
        """Return the ranks of the pool that compute a node."""
        return self._ranks_of[node.stage]

    def _is_collected(self, stage: str) -> bool:
        """Return whether one process collects what elastic workers produce for a stage."""
        return self._elastic and self._flow.all_stages[stage].elastic

    def _layout(self, node: StageNode) -> ParallelLayout:
        return self._layouts[node.stage] if len(self._ranks(node)) > 1 else DATA_PARALLEL_ONLY

    def _turn(self, node: StageNode) -> tuple[int, int, int]:
        """Return the position of a node in the device schedule: after all chunks if it reads its
        batch from disk."""
        iteration, part, place = self.position(node)
        streams = self._flow.stream_channels & set(self._graph.inputs(node))
        return (
            iteration,
            part if streams <= set(self._live[node]) else self._plan.num_chunks,
            place,
        )

    def _relative(self, folder: Path) -> str:
        return folder.relative_to(self._run.folder).as_posix()

    def _members(self) -> list[Lease]:
        return [member for pool in self._pools for member in pool.leases]
