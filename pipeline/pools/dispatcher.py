"""What a stage is ordered with: where its inputs come from, and which worker sends what to whom."""

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
"""To how many a worker sends by socket; more would share its link, fewer make longer ways."""
Hosts = Mapping[str, str | None]
"""By worker its node; None: not known."""
Routes = dict[str, dict[str, str]]
"""By sender: to whom, and by which way."""


def route_tree(
    source: str, host: str | None, receivers: Hosts, *, use_shared_memory: bool, turn: int = 0
) -> Routes:
    """From one worker to all takers, of which some pass on what they get.

    It crosses to each node once: the first worker there sends it to the others of the node, and
    on to further nodes.

    Args:
        near: whether those on one node may use its memory.
        turn: of several sources each has another one, so that each taker passes on some.
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
    """A tree of sockets."""
    senders = [source, *workers]
    for number, worker in enumerate(workers):
        routes[senders[number // FAN_OUT]][worker] = SOCKET


BATCH_WAIT_S = 0.5
"""How long orders of an iteration wait for the rest of it."""
Send = Callable[[str, WorkerOrder], None]
"""Sends a worker an order."""


class StageDispatcher:
    """Orders the stages that wait, in every pool that is there.

    Args:
        pools: those of the run; the list changes as generators come and go.
        generators: told of stages that they take part in.
    """

    def __init__(
        self, run: Run, plan: Plan, pools: list[PoolState], generators: RolloutScheduler, send: Send
    ) -> None:
        self._run, self._plan, self._pools, self._send_to = run, plan, pools, send
        self._generators = generators
        self._graph = Graph(run.config)
        self._flow = self._graph.flow
        self._places = {stage: i for i, stage in enumerate(self._flow.stages)}
        self._of = {stage: pools[number] for stage, number in plan.stage_pools().items()}
        self._layouts = {stage: plan.stage_plan(stage).layout for stage in self._of}
        environment = environments.get(run.config.task.name)
        task = run.config.task.validate_options(environment.Config, "task")
        self._large = environment.max_step_bytes(task) >= LARGE_ROW_BYTES
        self._elastic = any(pool.slot is not None for pool in pools)
        self._ranks_of: dict[str, Sequence[int]] = {
            stage: range(1 if self._gathered(stage) or plan.is_single_process(stage) else pool.size)
            for stage, pool in self._of.items()
        }
        acts = str(self._flow.rollout_stage)
        for pool in plan.pools:
            beside = {*plan.flow.separate_policy} & {*pool.stages} and acts in pool.stage_ranks
            if beside and self._of[EVALUATE] is self._of[acts]:
                # Evaluations run where simulators do.
                self._ranks_of[EVALUATE] = pool.stage_ranks[acts]
            self._ranks_of.update(pool.stage_ranks)
        self.policy_pools = PolicyPools(plan, self._of, self._ranks_of, send)
        self._late = self._after_parts()
        self._live: dict[StageNode, dict[str, StageNode]] = {}
        """Of a stage that was ordered: inputs that come from memory, and their makers."""
        self._subscribed: dict[StageNode, set[tuple[str, str, str]]] = defaultdict(set)
        """Of a stage that was ordered: inputs, the workers told to send them, and to which."""

    def pool_of(self, node: StageNode) -> PoolState:
        """The pool where a stage is ordered."""
        return self._of[node.stage]

    def dispatch(self) -> None:
        """Order what waits, and have its inputs sent."""
        for pool in self._pools:
            member = pool.active_lease
            if member is None or not pool.waiting:
                continue
            nodes = sorted(pool.waiting, key=self.position)
            if member.size > 1 and time.monotonic() - pool.last_queued_at < BATCH_WAIT_S:
                # All ranks must know all stages of an iteration when the first of them begins.
                last = max(pool.stages, key=lambda stage: self._places.get(stage, -1))
                whole = {node.iteration for node in nodes if node.stage == last}
                nodes = [n for n in nodes if n.iteration in whole or n.stage not in self._places]
            self._decide(pool, member, [n for n in nodes if self.policy_pools.is_ready(n)])
        for pool in self._pools:
            member = pool.active_lease
            if member is not None:
                self._send(pool, member)
        self._subscribe()

    def end_attempt(self, node: StageNode) -> None:
        """An attempt has ended."""
        self._live.pop(node, None)
        self._subscribed.pop(node, None)
        self.policy_pools.end_attempt(node)

    def resend(self, maker: Lease, taker: Lease) -> None:
        """A connection broke: what was sent by it is sent again."""
        ends = (maker.name, taker.name)
        for marks in self._subscribed.values():
            for mark in list(marks):
                # Takers pass on: the tree is made anew.
                within = ends == (mark[2], mark[2])
                if mark[1:] == ends or within:
                    marks.discard(mark)

    def position(self, node: StageNode) -> tuple[int, int, int]:
        """Where a stage stands in the order of turns (:mod:`stages.device_schedule`)."""
        if node.stage in self._flow.offline:
            return (-1, 0, 0)
        if node.stage not in self._places:
            # Just before the rollout with the same weights: it must hold up none with older ones.
            return (node.iteration + self._run.config.rollout.staleness, 0, -1)
        sources = self._flow.stages[node.stage].inputs
        whole = not self._flow.stream_channels & set(sources) and any(
            not s.lag and s.stage in self._places for s in sources.values()
        )
        late = whole or node.stage in self._late
        return (node.iteration, self._plan.num_chunks if late else 0, self._places[node.stage])

    def _after_parts(self) -> frozenset[str]:
        """Stages whose turns come after all parts of the batch: they have all processes of a pool
        whose earlier stages have some each, and would hold these up; and what waits for them."""
        late = set[str]()
        for stage, spec in self._flow.stages.items():
            earlier = list(self._flow.stages)[: self._places[stage]]
            sides = [
                s for pool in self._plan.pools for s in pool.stage_ranks if self._shares(s, stage)
            ]
            first = [s for s in sides if s in self._places]
            among = stage not in sides and bool(first) and set(first) <= set(earlier)
            waits = any(s.stage in late and not s.lag for s in spec.inputs.values())
            if among or waits:
                late.add(stage)
        return frozenset(late)

    def _shares(self, a: str, b: str) -> bool:
        """Whether two stages have processes in common."""
        return self._of[a] is self._of[b] and bool({*self._ranks_of[a]} & {*self._ranks_of[b]})

    def num_chunks(self, stage: str) -> int:
        """In how many parts a stage takes and makes its batch.

        Where nothing else has turns among them the engine is given the whole batch at once, and
        what it makes is passed on as it comes: parts would be decoded one after another, each with
        its own tail.
        """
        others = [s for s in self._flow.stages if s not in self._late and s != stage]
        alone = not any(self._shares(stage, other) for other in others)
        whole = stage == self._flow.elastic_stage and alone
        return 1 if whole or self.policy_pools.needs_policy(stage) else self._plan.num_chunks

    def _decide(self, pool: PoolState, member: Lease, nodes: list[StageNode]) -> None:
        """Settle where the inputs of stages come from that are about to be ordered."""
        for node in nodes:
            if node in self._live:
                continue
            live: dict[str, StageNode] = {}
            for name, source in self._graph.inputs(node).items():
                if name == OPEN_EPISODES:
                    # It is read from disk. To hold the rollout before would keep its trajectories
                    # in memory until this one has ended.
                    continue
                held, maker = member.assigned, pool
                if (
                    name == WEIGHTS
                    and (policy := self.policy_pools.serving_lease(node)) is not None
                ):
                    held, maker = policy[1].assigned, policy[0]
                here = source in held or source in maker.waiting
                if (
                    name in self._flow.stream_channels
                    and len({*self._ranks(node), *self._ranks(source)}) > 1
                ):
                    # Ranks of one pool have each their own records: the plan may have them read.
                    here = here and self._sent_live(source, node)
                published = (source.stage, name) == (self._flow.publish_stage, WEIGHTS)
                sent = name in self._flow.stream_channels or (
                    published and not self._by_rows(source, node)
                )
                if here or (sent and self._under_way(source) and self._sent_live(source, node)):
                    live[name] = source
            self._live[node] = live

    def _under_way(self, node: StageNode) -> bool:
        """Whether a pool makes it now or soon."""
        return any(
            node in pool.waiting or any(node in m.assigned for m in pool.leases)
            for pool in self._pools
        )

    def _subscribe(self) -> None:
        """Tell the maker of an input which workers elsewhere wait for it; again if they changed.

        Those that come late are sent what was made before.
        """
        members = self._members()
        for target, live in self._live.items():
            for name, source in live.items():
                maker = next((m for m in members if source in m.assigned), None)
                if maker is None:
                    continue
                # One worker has it in its memory; so has each rank its own part of what is
                # no stream.
                takers = [
                    taker
                    for taker in self._takers(source, target, name)
                    if (name, maker.name, taker.name) not in self._subscribed[target]
                    and (
                        maker is not taker
                        or (name in self._flow.stream_channels and maker.size > 1)
                    )
                ]
                self._subscribed[target].update((name, maker.name, m.name) for m in takers)
                to = {w: host for m in takers for w, host in self._hosts(target, m, name).items()}
                out = self._relative(self._graph.output_folder(self._run.folder, source))
                for source_rank, worker, ways in self._routes(source, target, name, maker, to):
                    self._send_to(
                        worker,
                        messages.SendOutput(
                            output=out, channel=name, transports=ways, producer=source_rank
                        ),
                    )

    def _takers(self, source: StageNode, target: StageNode, name: str) -> list[Lease]:
        """The members that compute a stage; of a rollout in claims all those that may generate, and
        of the weights of one that asks the one that answers."""
        if name == WEIGHTS and (policy := self.policy_pools.serving_lease(target)) is not None:
            return [policy[1]]
        if not self._gathers(target):
            return [member for member in self._members() if target in member.assigned]
        if source.stage != self._flow.publish_stage or not self._sent_live(source, target):
            return []
        pools = [pool for pool in self._pools if pool.slot is not None or pool.also_generates]
        return [member for pool in pools if (member := pool.active_lease) is not None]

    def _hosts(self, target: StageNode, taker: Lease, name: str) -> dict[str, str | None]:
        """The workers of a member that take an input of a stage, and where they are."""
        if name == WEIGHTS and self.policy_pools.needs_policy(target.stage):
            return taker.hosts(self.policy_pools.ranks())
        return taker.hosts(range(taker.size) if self._gathers(target) else self._ranks(target))

    def _gathers(self, node: StageNode) -> bool:
        """Whether what others generate is only gathered where this is ordered."""
        return self._elastic and node.stage == self._flow.elastic_stage

    def _routes(
        self,
        source: StageNode,
        target: StageNode,
        name: str,
        maker: Lease,
        takers: Mapping[str, str | None],
    ) -> Iterator[tuple[str, str, dict[str, str]]]:
        """The maker, the sender, and the takers with the way to each.

        Records come from all ranks of the maker that speak, weights from its rank 0 alone.
        """
        records = name in self._flow.stream_channels
        usual = SOCKET if records else SHARED_MEMORY
        way = self._plan.transports.get(f"{source.stage} -> {target.stage}", usual)
        if not takers:
            return
        if way in WEIGHT_TRANSPORTS and name == WEIGHTS:
            first = maker.primary_worker
            yield first, first, dict.fromkeys(takers, way)
            return
        near = way == SHARED_MEMORY
        ranks = self._ranks(source)
        speakers = ProcessGroupInfo(size=len(ranks), layout=self._layout(source)).primary_ranks
        makers = list(maker.hosts(ranks).items())
        for turn, rank in enumerate(speakers if records else [0]):
            first, host = makers[rank]
            for sender, to in route_tree(
                first, host, takers, use_shared_memory=near, turn=turn
            ).items():
                yield first, sender, to

    def _by_rows(self, source: StageNode, node: StageNode) -> bool:
        """Whether several processes share its model: each reads its rows of the published files,
        unless the plan says how the whole is to come."""
        shares = self._flow.all_stages[node.stage].holds == "trainer" and len(self._ranks(node)) > 1
        return shares and f"{source.stage} -> {node.stage}" not in self._plan.transports

    def _sent_live(self, source: StageNode, node: StageNode) -> bool:
        large = self._large and source.stage == self._flow.rollout_stage
        usual = "file" if large else "socket"
        way = self._plan.transports.get(f"{source.stage} -> {node.stage}", usual)
        return way not in COMMITTED_TRANSPORTS

    def _send(self, pool: PoolState, member: Lease) -> None:
        """Order all stages whose inputs are settled."""
        ready = [
            node for node in pool.waiting if node in self._live and self.policy_pools.is_ready(node)
        ]
        nodes = sorted(ready, key=self.position)
        orders: dict[str, list[StageOrder]] = defaultdict(list)
        if pool.slot is not None:
            # A generator that waited for weights could not generate what they are made from.
            nodes = [node for node in nodes if not self._to_come(node)]
        for node in nodes:
            call = pool.waiting.pop(node)
            ranks = self._ranks(node)
            gathers = self._gathers(node)
            apart = gathers or self.policy_pools.needs_policy(node.stage)
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
                    # The gatherer, and who asks, need of the weights only that they are committed.
                    name: (self._relative(folder), name in self._live[node] and not apart)
                    for name, folder in call.inputs.items()
                },
                receives_trajectories=gathers,
                in_engine_thread=pool.slot is not None,
                policy_workers=self.policy_pools.workers(node),
            )
            if order.policy_workers:
                comes = WEIGHTS in self._live[node]
                self.policy_pools.begin(node, order, member.workers(ranks), live=comes)
            if node.stage == self._flow.publish_stage:
                self._generators.invalidate_weights(order.output)
            if gathers:
                weights, gatherer = self._relative(call.inputs["weights"]), member.primary_worker
                self._generators.start_rollout(node, order.output, weights, gatherer)
            member.assigned.add(node)
            for worker in member.workers(ranks):
                orders[worker].append(order)
        for worker, stages in orders.items():
            self._send_to(worker, messages.RunStages(stages=tuple(stages)))

    def _to_come(self, node: StageNode) -> bool:
        """Whether an input of a stage is still being made."""
        sources = set(self._graph.inputs(node).values())
        given = {other for member in self._members() for other in member.assigned}
        return bool(sources & (given | {o for pool in self._pools for o in pool.waiting}))

    def primary_worker(self, node: StageNode, member: Lease) -> str:
        """The worker that says for all that a stage went well."""
        return member.workers(self._ranks(node))[0]

    def _ranks(self, node: StageNode) -> Sequence[int]:
        """Those of its pool that compute a stage."""
        return self._ranks_of[node.stage]

    def _gathered(self, stage: str) -> bool:
        """Whether one process gathers what workers that come and go make of it."""
        return self._elastic and self._flow.all_stages[stage].elastic

    def _layout(self, node: StageNode) -> ParallelLayout:
        return self._layouts[node.stage] if len(self._ranks(node)) > 1 else DATA_PARALLEL_ONLY

    def _turn(self, node: StageNode) -> tuple[int, int, int]:
        """Where it takes its turns: after all parts of its batch where it reads them from disk."""
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
