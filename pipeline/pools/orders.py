"""What a stage is ordered with: where its inputs come from, and which worker sends what to whom."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.flow import Graph, Node
from pipeline.plan import AFTER_COMMIT, FOR_WEIGHTS, Plan
from pipeline.pools.answering import Answering
from pipeline.pools.generators import Generators
from pipeline.pools.leases import Member, PoolState
from pipeline.pools.routes import tree
from pipeline.run import Run
from rlinf.channels.world import ALONE, ParallelLayout, World
from rlinf.data.left_open import OPEN
from rlinf.data.record import LARGE_BYTES
from rlinf.envs import environments
from stages.flow import EVALUATE, WEIGHTS
from stages.worker import messages
from stages.worker.inbox import SHARED_MEMORY, SOCKET
from stages.worker.messages import Order, StageOrder

HOLD_S = 0.5
"""How long orders of an iteration wait for the rest of it."""
Send = Callable[[str, Order], None]
"""Sends a worker an order."""


class Orders:
    """Orders the stages that wait, in every pool that is there.

    Args:
        pools: those of the run; the list changes as generators come and go.
        generators: told of stages that they take part in.
    """

    def __init__(
        self, run: Run, plan: Plan, pools: list[PoolState], generators: Generators, send: Send
    ) -> None:
        self._run, self._plan, self._pools, self._send_to = run, plan, pools, send
        self._generators = generators
        self._graph = Graph(run.config)
        self._flow = self._graph.flow
        self._places = {stage: i for i, stage in enumerate(self._flow.stages)}
        self._of = {stage: pools[number] for stage, number in plan.homes().items()}
        self._layouts = {stage: plan.of(stage).layout for stage in self._of}
        environment = environments.get(run.config.task.name)
        task = run.config.task.options(environment.Config, "task")
        self._large = environment.row_bytes(task) >= LARGE_BYTES
        self._elastic = any(pool.slot is not None for pool in pools)
        self._ranks_of: dict[str, Sequence[int]] = {
            stage: range(1 if self._gathered(stage) or plan.alone(stage) else pool.size)
            for stage, pool in self._of.items()
        }
        acts = str(self._flow.acts)
        for pool in plan.pools:
            beside = {*plan.flow.apart} & {*pool.stages} and acts in pool.ranks
            if beside and self._of[EVALUATE] is self._of[acts]:
                # Evaluations run where simulators do.
                self._ranks_of[EVALUATE] = pool.ranks[acts]
            self._ranks_of.update(pool.ranks)
        self.answering = Answering(plan, self._of, self._ranks_of, send)
        self._late = self._after_parts()
        self._live: dict[Node, dict[str, Node]] = {}
        """Of a stage that was ordered: inputs that come from memory, and their makers."""
        self._subscribed: dict[Node, set[tuple[str, str, str]]] = defaultdict(set)
        """Of a stage that was ordered: inputs, the workers told to send them, and to which."""

    def home(self, node: Node) -> PoolState:
        """The pool where a stage is ordered."""
        return self._of[node.stage]

    def give(self) -> None:
        """Order what waits, and have its inputs sent."""
        for pool in self._pools:
            member = pool.active
            if member is None or not pool.waiting:
                continue
            nodes = sorted(pool.waiting, key=self.position)
            if member.size > 1 and time.monotonic() - pool.since < HOLD_S:
                # All ranks must know all stages of an iteration when the first of them begins.
                last = max(pool.stages, key=lambda stage: self._places.get(stage, -1))
                whole = {node.iteration for node in nodes if node.stage == last}
                nodes = [n for n in nodes if n.iteration in whole or n.stage not in self._places]
            self._decide(pool, member, [n for n in nodes if self.answering.can(n)])
        for pool in self._pools:
            member = pool.active
            if member is not None:
                self._send(pool, member)
        self._subscribe()

    def over(self, node: Node) -> None:
        """An attempt has ended."""
        self._live.pop(node, None)
        self._subscribed.pop(node, None)
        self.answering.over(node)

    def renew(self, maker: Member, taker: Member) -> None:
        """A connection broke: what was sent by it is sent again."""
        ends = (maker.name, taker.name)
        for marks in self._subscribed.values():
            for mark in list(marks):
                # Takers pass on: the tree is made anew.
                within = ends == (mark[2], mark[2])
                if mark[1:] == ends or within:
                    marks.discard(mark)

    def position(self, node: Node) -> tuple[int, int, int]:
        """Where a stage stands in the order of turns (:mod:`stages.turns`)."""
        if node.stage in self._flow.offline:
            return (-1, 0, 0)
        if node.stage not in self._places:
            # Just before the rollout with the same weights: it must hold up none with older ones.
            return (node.iteration + self._run.config.rollout.staleness, 0, -1)
        sources = self._flow.stages[node.stage].inputs
        whole = not self._flow.streams & set(sources) and any(
            not s.back and s.stage in self._places for s in sources.values()
        )
        late = whole or node.stage in self._late
        return (node.iteration, self._plan.chunks if late else 0, self._places[node.stage])

    def _after_parts(self) -> frozenset[str]:
        """Stages whose turns come after all parts of the batch: they have all processes of a pool
        whose earlier stages have some each, and would hold these up; and what waits for them."""
        late = set[str]()
        for stage, spec in self._flow.stages.items():
            earlier = list(self._flow.stages)[: self._places[stage]]
            sides = [s for pool in self._plan.pools for s in pool.ranks if self._shares(s, stage)]
            first = [s for s in sides if s in self._places]
            among = stage not in sides and bool(first) and set(first) <= set(earlier)
            waits = any(s.stage in late and not s.back for s in spec.inputs.values())
            if among or waits:
                late.add(stage)
        return frozenset(late)

    def _shares(self, a: str, b: str) -> bool:
        """Whether two stages have processes in common."""
        return self._of[a] is self._of[b] and bool({*self._ranks_of[a]} & {*self._ranks_of[b]})

    def parts(self, stage: str) -> int:
        """In how many parts a stage takes and makes its batch.

        Where nothing else has turns among them the engine is given the whole batch at once, and
        what it makes is passed on as it comes: parts would be decoded one after another, each with
        its own tail.
        """
        others = [s for s in self._flow.stages if s not in self._late and s != stage]
        alone = not any(self._shares(stage, other) for other in others)
        whole = stage == self._flow.elastic and alone
        return 1 if whole or self.answering.asks(stage) else self._plan.chunks

    def _decide(self, pool: PoolState, member: Member, nodes: list[Node]) -> None:
        """Settle where the inputs of stages come from that are about to be ordered."""
        for node in nodes:
            if node in self._live:
                continue
            live: dict[str, Node] = {}
            for name, source in self._graph.inputs(node).items():
                if name == OPEN:
                    # It is read from disk. To hold the rollout before would keep its trajectories
                    # in memory until this one has ended.
                    continue
                held, maker = member.given, pool
                if name == WEIGHTS and (policy := self.answering.by(node)) is not None:
                    held, maker = policy[1].given, policy[0]
                here = source in held or source in maker.waiting
                if (
                    name in self._flow.streams
                    and len({*self._ranks(node), *self._ranks(source)}) > 1
                ):
                    # Ranks of one pool have each their own records: the plan may have them read.
                    here = here and self._sent_live(source, node)
                published = (source.stage, name) == (self._flow.publishes, WEIGHTS)
                sent = name in self._flow.streams or (published and not self._by_rows(source, node))
                if here or (sent and self._under_way(source) and self._sent_live(source, node)):
                    live[name] = source
            self._live[node] = live

    def _under_way(self, node: Node) -> bool:
        """Whether a pool makes it now or soon."""
        return any(
            node in pool.waiting or any(node in m.given for m in pool.members)
            for pool in self._pools
        )

    def _subscribe(self) -> None:
        """Tell the maker of an input which workers elsewhere wait for it; again if they changed.

        Those that come late are sent what was made before.
        """
        members = self._members()
        for target, live in self._live.items():
            for name, source in live.items():
                maker = next((m for m in members if source in m.given), None)
                if maker is None:
                    continue
                # One worker has it in its memory; so has each rank its own part of what is
                # no stream.
                takers = [
                    taker
                    for taker in self._takers(source, target, name)
                    if (name, maker.name, taker.name) not in self._subscribed[target]
                    and (maker is not taker or (name in self._flow.streams and maker.size > 1))
                ]
                self._subscribed[target].update((name, maker.name, m.name) for m in takers)
                to = {w: host for m in takers for w, host in self._hosts(target, m, name).items()}
                out = self._relative(self._graph.folder(self._run.folder, source))
                for source_rank, worker, ways in self._routes(source, target, name, maker, to):
                    self._send_to(
                        worker, messages.Send(out=out, channel=name, to=ways, maker=source_rank)
                    )

    def _takers(self, source: Node, target: Node, name: str) -> list[Member]:
        """The members that compute a stage; of a rollout in claims all those that may generate, and
        of the weights of one that asks the one that answers."""
        if name == WEIGHTS and (policy := self.answering.by(target)) is not None:
            return [policy[1]]
        if not self._gathers(target):
            return [member for member in self._members() if target in member.given]
        if source.stage != self._flow.publishes or not self._sent_live(source, target):
            return []
        pools = [pool for pool in self._pools if pool.slot is not None or pool.helps]
        return [member for pool in pools if (member := pool.active) is not None]

    def _hosts(self, target: Node, taker: Member, name: str) -> dict[str, str | None]:
        """The workers of a member that take an input of a stage, and where they are."""
        if name == WEIGHTS and self.answering.asks(target.stage):
            return taker.hosts(self.answering.ranks())
        return taker.hosts(range(taker.size) if self._gathers(target) else self._ranks(target))

    def _gathers(self, node: Node) -> bool:
        """Whether what others generate is only gathered where this is ordered."""
        return self._elastic and node.stage == self._flow.elastic

    def _routes(
        self,
        source: Node,
        target: Node,
        name: str,
        maker: Member,
        takers: Mapping[str, str | None],
    ) -> Iterator[tuple[str, str, dict[str, str]]]:
        """The maker, the sender, and the takers with the way to each.

        Records come from all ranks of the maker that speak, weights from its rank 0 alone.
        """
        records = name in self._flow.streams
        usual = SOCKET if records else SHARED_MEMORY
        way = self._plan.transports.get(f"{source.stage} -> {target.stage}", usual)
        if not takers:
            return
        if way in FOR_WEIGHTS and name == WEIGHTS:
            first = maker.first
            yield first, first, dict.fromkeys(takers, way)
            return
        near = way == SHARED_MEMORY
        ranks = self._ranks(source)
        speakers = World(size=len(ranks), layout=self._layout(source)).speakers
        makers = list(maker.hosts(ranks).items())
        for turn, rank in enumerate(speakers if records else [0]):
            first, host = makers[rank]
            for sender, to in tree(first, host, takers, near=near, turn=turn).items():
                yield first, sender, to

    def _by_rows(self, source: Node, node: Node) -> bool:
        """Whether several processes share its model: each reads its rows of the published files,
        unless the plan says how the whole is to come."""
        shares = self._flow.table[node.stage].loads == "trainer" and len(self._ranks(node)) > 1
        return shares and f"{source.stage} -> {node.stage}" not in self._plan.transports

    def _sent_live(self, source: Node, node: Node) -> bool:
        large = self._large and source.stage == self._flow.acts
        usual = "file" if large else "socket"
        way = self._plan.transports.get(f"{source.stage} -> {node.stage}", usual)
        return way not in AFTER_COMMIT

    def _send(self, pool: PoolState, member: Member) -> None:
        """Order all stages whose inputs are settled."""
        ready = [node for node in pool.waiting if node in self._live and self.answering.can(node)]
        nodes = sorted(ready, key=self.position)
        orders: dict[str, list[StageOrder]] = defaultdict(list)
        if pool.slot is not None:
            # A generator that waited for weights could not generate what they are made from.
            nodes = [node for node in nodes if not self._to_come(node)]
        for node in nodes:
            call = pool.waiting.pop(node)
            ranks = self._ranks(node)
            gathers = self._gathers(node)
            apart = gathers or self.answering.asks(node.stage)
            order = StageOrder(
                node=node.name,
                stage=node.stage,
                iteration=node.iteration,
                position=self._turn(node),
                parts=self.parts(node.stage),
                out=self._relative(call.out),
                attempt=secrets.token_hex(6),
                ranks=tuple(ranks),
                layout=str(self._layout(node)),
                inputs={
                    # The gatherer, and who asks, need of the weights only that they are committed.
                    name: (self._relative(folder), name in self._live[node] and not apart)
                    for name, folder in call.inputs.items()
                },
                gathers=gathers,
                queued=pool.slot is not None,
                asks=self.answering.workers(node),
            )
            if order.asks:
                comes = WEIGHTS in self._live[node]
                self.answering.begin(node, order, member.workers(ranks), live=comes)
            if node.stage == self._flow.publishes:
                self._generators.gone(order.out)
            if gathers:
                weights, gatherer = self._relative(call.inputs["weights"]), member.first
                self._generators.begin(node, order.out, weights, gatherer)
            member.given.add(node)
            for worker in member.workers(ranks):
                orders[worker].append(order)
        for worker, stages in orders.items():
            self._send_to(worker, messages.Run(stages=tuple(stages)))

    def _to_come(self, node: Node) -> bool:
        """Whether an input of a stage is still being made."""
        sources = set(self._graph.inputs(node).values())
        given = {other for member in self._members() for other in member.given}
        return bool(sources & (given | {o for pool in self._pools for o in pool.waiting}))

    def speaker(self, node: Node, member: Member) -> str:
        """The worker that says for all that a stage went well."""
        return member.workers(self._ranks(node))[0]

    def _ranks(self, node: Node) -> Sequence[int]:
        """Those of its pool that compute a stage."""
        return self._ranks_of[node.stage]

    def _gathered(self, stage: str) -> bool:
        """Whether one process gathers what workers that come and go make of it."""
        return self._elastic and self._flow.table[stage].elastic

    def _layout(self, node: Node) -> ParallelLayout:
        return self._layouts[node.stage] if len(self._ranks(node)) > 1 else ALONE

    def _turn(self, node: Node) -> tuple[int, int, int]:
        """Where it takes its turns: after all parts of its batch where it reads them from disk."""
        iteration, part, place = self.position(node)
        streams = self._flow.streams & set(self._graph.inputs(node))
        return (iteration, part if streams <= set(self._live[node]) else self._plan.chunks, place)

    def _relative(self, folder: Path) -> str:
        return folder.relative_to(self._run.folder).as_posix()

    def _members(self) -> list[Member]:
        return [member for pool in self._pools for member in pool.members]
