"""Resident pools: one job per pool, whose workers take orders for many iterations.

Pools are jobs of their own that find the driver through the run directory, in whatever order the
queue starts them. A stage may be ordered before its inputs are committed: inputs made in the same
pool stay in its memory, records made in another are sent while they are made. What is not in
memory any more (a pool was lost, or came late) is read from disk once it is committed.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.base import Launcher
from pipeline.driver import Outcome
from pipeline.flow import Graph, Node
from pipeline.launch import ClusterConfig, QueueLog, resources
from pipeline.metrics import busy_s
from pipeline.needs import pool_needs
from pipeline.plan import FOR_WEIGHTS, Plan
from pipeline.pools.generators import Generators
from pipeline.pools.jobs import homes, pool_folder, pool_job, pool_states
from pipeline.pools.leases import Member, PoolState, rank_of
from pipeline.pools.routes import tree
from pipeline.pools.scaling import automatic, put_down, wished
from pipeline.pools.status import write_pools
from pipeline.run import Run
from rlinf.artifacts import MANIFEST
from rlinf.channels.control import Controller, Joined, Lost, Report
from rlinf.errors import (
    EXIT_BAD_INPUT,
    EXIT_REQUEUE,
    InputError,
    RequeueRequested,
    StageError,
)
from slurm.ids import whole_of
from slurm.jobs import State, Status
from stages.flow import WEIGHTS
from stages.layout import CHANNELS, POOLS, STATUS
from stages.names import CLAIM
from stages.runner import StageCall
from stages.worker.inbox import SHARED_MEMORY, SOCKET

PROGRESS = ("stage", "done", "total", "what")
EVENTS_S = 0.25
HOLD_S = 0.5
"""How long orders of an iteration wait for the rest of it."""
STATUS_S = 1.0
LEAVE_S = 10.0
"""How long workers have to leave before their jobs are cancelled."""
_NO_FAILURE = (None, 0, EXIT_REQUEUE)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
log = logging.getLogger("rlinf")


@dataclass
class PoolExecutor:
    """Gives the stages of a run to resident workers."""

    run: Run
    launcher: Launcher
    plan: Plan
    cluster: ClusterConfig
    stopping: Callable[[], bool] = lambda: False
    progress: Callable[[str, int, int, str], None] = lambda *_: None
    live: bool = True
    """Stages may start before their inputs are committed."""
    remains: str = "its pools were stopped"

    def __post_init__(self) -> None:
        self._graph = Graph(self.run.config)
        self._flow = self._graph.flow
        self._places = {stage: i for i, stage in enumerate(self._flow.stages)}
        self._pools = pool_states(self.plan)
        self._of = {stage: self._pools[number] for stage, number in homes(self.plan).items()}
        self._elastic = next((p for p in self._pools if p.slot is not None), None)
        settings = self.run.config.rollout
        self._generators = Generators(self.run.folder, settings.batch, self.cluster.retries)
        self._live: dict[Node, dict[str, Node]] = {}
        """Of a stage that was ordered: inputs that come from memory, and who makes them."""
        self._subscribed: dict[Node, set[tuple[str, str, str]]] = defaultdict(set)
        """Of a stage that was ordered: inputs, who has been told to send them, and to whom."""
        self._held: dict[Node, Outcome] = {}
        """Successes of stages whose inputs have not been reported yet."""
        self._ending: list[tuple[Member, float]] = []
        """Leases that were given up, and until when they may write."""
        self._looked = self._told = 0.0
        self._queue = QueueLog(shown=self.cluster.launcher == "slurm")
        self._controller: Controller | None = None

    def _begin(self) -> None:
        """Call the pools in: not before there is work, nor while another driver has the run."""
        (self.run.folder / POOLS).mkdir(exist_ok=True)
        self._controller = Controller(self.run.folder / CHANNELS, interface=self.cluster.listens_on)
        for pools in self._units():
            self._open(pools)
        self._scale()

    @property
    def _control(self) -> Controller:
        assert self._controller is not None
        return self._controller

    def start(self, node: Node, call: StageCall) -> None:
        if self._controller is None:
            self._begin()
        pool = self._of[node.stage]
        pool.waiting[node] = call
        pool.since = time.monotonic()

    def ended(self) -> dict[Node, Outcome]:
        """Outcomes that have come in; waits a little for one."""
        if self.stopping():
            raise RequeueRequested("the driver was asked to stop; resume the run to go on")
        if self._controller is None:
            return {}
        self._order()
        self._claim()
        ended: dict[Node, Outcome] = {}
        for event in self._control.events(EVENTS_S):
            if isinstance(event, Report):
                try:
                    self._reported(event, ended)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise StageError(
                        f"{event.worker} sent a report that makes no sense ({error!r}): its "
                        f"program is broken or of another version; its log says more"
                    ) from error
            elif isinstance(event, Joined):
                self._joined(event)
            elif isinstance(event, Lost):
                self._lost(event, ended)
        if time.monotonic() - self._looked > self.launcher.poll_s:
            self._looked = time.monotonic()
            self._look(ended)
            self._committed_meanwhile(ended)
        self._cancel_ended()
        self._keep_up()
        if time.monotonic() - self._told > STATUS_S:
            self._scale()
        self._tell()
        busy = {node for member in self._members() for node in member.given}
        busy |= {node for pool in self._pools for node in pool.waiting}
        self._held.update(ended)
        free: dict[Node, Outcome] = {}
        for node in sorted(self._held, key=self._position):
            # A success waits for those it was made from, which may be reported after it.
            if self._held[node].exit_code or not busy & set(self._graph.inputs(node).values()):
                free[node] = self._held.pop(node)
            else:
                busy.add(node)
        return free

    def stop(self, *, leave: bool = False) -> None:
        """Let the pools go, or leave them to the next driver, for which they wait a while."""
        try:
            if not leave and self._controller is not None:
                self._dismiss()
        finally:
            if self._controller is not None:
                self._controller.close()
            self.launcher.close()

    def _dismiss(self) -> None:
        members = self._members()
        try:
            for member in members:
                for worker in member.workers(member.size):
                    self._control.send(worker, {"do": "leave"})
            deadline = time.monotonic() + LEAVE_S
            while any(m.joined for m in members) and time.monotonic() < deadline:
                for event in self._control.events(EVENTS_S):
                    found = self._member(event.worker)
                    if isinstance(event, Report) and "claim" in event.content:
                        self._generators.reported(event.worker, event.content)
                    elif isinstance(event, Lost) and found is not None:
                        found[1].joined.pop(rank_of(event.worker), None)
        finally:
            ending = [member for member, _ in self._ending]
            self.launcher.cancel([member.job for member in [*members, *ending]])
            (self.run.folder / POOLS / STATUS).unlink(missing_ok=True)

    # Orders

    def _order(self) -> None:
        """Order what waits, in every pool that is there."""
        for pool in self._pools:
            member = pool.active
            if member is None or not pool.waiting:
                continue
            nodes = sorted(pool.waiting, key=self._position)
            if member.size > 1 and time.monotonic() - pool.since < HOLD_S:
                # All ranks must know all stages of an iteration when the first of them begins.
                last = max(pool.stages, key=lambda stage: self._places.get(stage, -1))
                whole = {node.iteration for node in nodes if node.stage == last}
                nodes = [n for n in nodes if n.iteration in whole or n.stage not in self._places]
            self._decide(pool, member, nodes)
        for pool in self._pools:
            member = pool.active
            if member is not None:
                self._send(pool, member)
        self._subscribe()

    def _decide(self, pool: PoolState, member: Member, nodes: list[Node]) -> None:
        """Settle where the inputs of stages come from that are about to be ordered."""
        for node in nodes:
            if node in self._live:
                continue
            live: dict[str, Node] = {}
            for name, source in self._graph.inputs(node).items():
                here = source in member.given or source in pool.waiting
                sent = name in self._flow.streams or (source.stage, name) == (
                    self._flow.publishes,
                    WEIGHTS,
                )
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
        """Tell who makes something which workers elsewhere wait for it; again if they changed.

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
                    for taker in self._takers(source, target)
                    if (name, maker.name, taker.name) not in self._subscribed[target]
                    and (maker is not taker or (name in self._flow.streams and maker.size > 1))
                ]
                self._subscribed[target].update((name, maker.name, m.name) for m in takers)
                to = {w: host for m in takers for w, host in self._hosts(target, m).items()}
                out = self._relative(self._graph.folder(self.run.folder, source))
                for source_rank, worker, ways in self._routes(source, target, name, maker, to):
                    order = {"do": "send", "out": out, "channel": name, "to": ways}
                    self._control.send(worker, {**order, "maker": source_rank})

    def _members(self) -> list[Member]:
        return [member for pool in self._pools for member in pool.members]

    def _takers(self, source: Node, target: Node) -> list[Member]:
        """Who computes a stage; of a rollout in claims all those that may generate."""
        if not self._gathers(target):
            return [member for member in self._members() if target in member.given]
        if source.stage != self._flow.publishes or not self._sent_live(source, target):
            return []
        pools = [pool for pool in self._pools if pool.slot is not None or pool.helps]
        return [member for pool in pools if (member := pool.active) is not None]

    def _hosts(self, target: Node, taker: Member) -> dict[str, str | None]:
        """The workers of a member that compute a stage, and where they are."""
        return taker.hosts(taker.size if self._gathers(target) else self._ranks(target))

    def _gathers(self, node: Node) -> bool:
        """Whether what others generate is only gathered where this is ordered."""
        return self._elastic is not None and node.stage == self._flow.generates

    def _renew(self, maker: str, taker: str) -> None:
        """A connection broke: what was sent by it is sent again, as long as both are there."""
        makers, takers = self._member(maker), self._member(taker)
        if makers is not None and takers is not None:
            ends = (makers[1].name, takers[1].name)
            for marks in self._subscribed.values():
                for mark in list(marks):
                    # Those who take pass on: the tree is made anew.
                    within = ends == (mark[2], mark[2])
                    if mark[1:] == ends or within:
                        marks.discard(mark)

    def _routes(
        self,
        source: Node,
        target: Node,
        name: str,
        maker: Member,
        takers: Mapping[str, str | None],
    ) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Who made it, who sends it, and to whom by which way.

        Records come from all ranks of the maker, weights from its rank 0 alone.
        """
        usual = SOCKET if name in self._flow.streams else SHARED_MEMORY
        way = self.plan.transports.get(f"{source.stage} -> {target.stage}", usual)
        if not takers:
            return
        if way in FOR_WEIGHTS and name == WEIGHTS:
            (first,) = maker.workers(1)
            yield first, first, dict.fromkeys(takers, way)
            return
        near = way == SHARED_MEMORY
        makers = maker.hosts(self._ranks(source) if name in self._flow.streams else 1)
        for turn, (first, host) in enumerate(makers.items()):
            for sender, to in tree(first, host, takers, near=near, turn=turn).items():
                yield first, sender, to

    def _sent_live(self, source: Node, node: Node) -> bool:
        edge = f"{source.stage} -> {node.stage}"
        return self.plan.transports.get(edge, "socket") != "file"

    def _send(self, pool: PoolState, member: Member) -> None:
        """Order all stages whose inputs are settled."""
        nodes = [node for node in sorted(pool.waiting, key=self._position) if node in self._live]
        orders: dict[str, list[dict[str, Any]]] = defaultdict(list)
        if pool.slot is not None:
            # A generator that waited for weights could not generate what they are made from.
            nodes = [node for node in nodes if not self._to_come(node)]
        for node in nodes:
            call = pool.waiting.pop(node)
            ranks = self._ranks(node)
            gathers = self._gathers(node)
            order = {
                "node": node.name,
                "stage": node.stage,
                "iteration": node.iteration,
                "position": self._turn(node),
                "out": self._relative(call.out),
                "attempt": secrets.token_hex(6),
                "ranks": ranks,
                "inputs": {
                    # Who gathers needs of the weights only that they are committed.
                    name: [self._relative(folder), name in self._live[node] and not gathers]
                    for name, folder in call.inputs.items()
                },
                "gathers": gathers,
                "queued": pool.slot is not None,
            }
            if node.stage == self._flow.publishes:
                self._generators.gone(str(order["out"]))
            if gathers:
                weights, gatherer = self._relative(call.inputs["weights"]), member.workers(1)[0]
                self._generators.begin(node, str(order["out"]), weights, gatherer)
            member.given.add(node)
            for worker in member.workers(ranks):
                orders[worker].append(order)
        for worker, stages in orders.items():
            self._control.send(worker, {"do": "run", "stages": stages})

    def _to_come(self, node: Node) -> bool:
        """Whether an input of a stage is still being made."""
        sources = set(self._graph.inputs(node).values())
        given = {other for member in self._members() for other in member.given}
        return bool(sources & (given | {o for pool in self._pools for o in pool.waiting}))

    def _position(self, node: Node) -> tuple[int, int, int]:
        """Where a stage stands in the order of turns (:mod:`stages.turns`)."""
        if node.stage in self._flow.offline:
            return (-1, 0, 0)
        if node.stage not in self._places:
            # Just before the rollout with the same weights: it must hold up none with older ones.
            return (node.iteration + self.run.config.rollout.staleness, 0, -1)
        sources = self._flow.stages[node.stage].inputs
        whole = not self._flow.streams & set(sources) and any(
            not s.back and s.stage in self._places for s in sources.values()
        )
        return (node.iteration, self.plan.chunks if whole else 0, self._places[node.stage])

    def _ranks(self, node: Node) -> int:
        stage = self._flow.table[node.stage]
        if stage.whole or (self._elastic is not None and stage.elastic):
            return 1
        return self._of[node.stage].size

    def _turn(self, node: Node) -> tuple[int, int, int]:
        """Where it takes its turns: after all parts of its batch where it reads them from disk."""
        iteration, part, place = self._position(node)
        streams = self._flow.streams & set(self._graph.inputs(node))
        return (iteration, part if streams <= set(self._live[node]) else self.plan.chunks, place)

    def _relative(self, folder: Path) -> str:
        return folder.relative_to(self.run.folder).as_posix()

    # Generators

    def _claim(self) -> None:
        """Keep all generators busy."""
        members = [m for pool in self._slots() if (m := pool.active) is not None]
        workers = [m.workers(1)[0] for m in members if not m.given]
        for worker, order in self._generators.orders(workers, self._helpers()):
            self._control.send(worker, order)

    def _helpers(self) -> dict[str, int]:
        """Workers that generate beside their stages, and the earliest iteration these are of."""
        helpers = {}
        for pool in self._pools:
            member = pool.active
            if pool.helps and member is not None:
                nodes = member.given | pool.waiting.keys()
                iterations = {self._position(node)[0] for node in nodes}
                for worker in member.workers(member.size):
                    # What its newest weights come of is computed, and only to be committed.
                    done = self._generators.version(worker)
                    left = (iteration for iteration in iterations if iteration > done)
                    helpers[worker] = min(left, default=sys.maxsize)
        return helpers

    def _over(self, node: Node) -> None:
        """An attempt has ended: whatever generators still do for it is in vain."""
        self._live.pop(node, None)
        self._subscribed.pop(node, None)
        for worker in self._generators.end(node):
            self._drop(worker)

    def _drop(self, worker: str) -> None:
        """Have a generator forget its claims; others get them, and it gets new ones."""
        self._generators.lost(worker)
        self._control.send(worker, {"do": "drop"})

    def _slots(self) -> list[PoolState]:
        return [pool for pool in self._pools if pool.slot is not None]

    def _scale(self) -> None:
        """Have as many generators as was asked for."""
        first = self._elastic
        if first is None:
            return
        slots = self._slots()
        count = wished(self.run.folder, self.plan, first.number)
        for slot in range(len(slots), count):
            pool = PoolState(first.number, (), pool_needs(self.plan, first.number, slot), slot)
            self._pools.append(pool)
            self._open([pool])
        for pool in slots[count:]:
            pool.retired = True

    def _follow(self, iteration: int) -> None:
        """Have as many generators as pay after what an iteration cost, if that is left to us."""
        first, folder = self._elastic, self.run.folder
        if first is None or not automatic(folder, self.plan, first.number):
            return
        slots = [pool for pool in self._slots() if not pool.retired]
        there = [m.workers(1)[0] for pool in slots if (m := pool.active) is not None]
        if len(there) < len(slots):
            return  # the queue has not given yet what was asked for
        generates = str(self._flow.generates)
        stages = [s for s in self._flow.stages if s not in (generates, self._flow.publishes)]
        rest = sum(busy_s(folder, stage, iteration) for stage in stages)
        overlap = self.run.config.rollout.staleness > 0
        load = self._generators.load(Node(generates, iteration), there, rest, overlap=overlap)
        if load is None:
            return
        pool = self.plan.pools[first.number]
        best = load.best(len(there), pool.workers or 1, pool.max_workers or len(there))
        if best != len(there):
            log.info(
                "pool %s: %d workers instead of %d; iterations are to take %.3g s, not %.3g s",
                first.number,
                best,
                len(there),
                load.iteration_s(best),
                load.iteration_s(len(there)),
            )
            put_down(folder, first.number, best, by_hand=False)

    # Workers and their jobs

    def _units(self) -> list[list[PoolState]]:
        """The pools, by those that start together."""
        bundle = [p for p in self._pools if self.plan.together and p.slot is None]
        alone = [[pool] for pool in self._pools if pool not in bundle]
        return [bundle, *alone] if bundle else alone

    def _open(self, pools: Sequence[PoolState]) -> None:
        for pool in pools:
            leases = pool_folder(self.run, pool).glob("*")
            known = [int(path.name) for path in leases if path.name.isdigit()]
            pool.lease = max(known, default=0)
        self._submit(pools)

    def _member(self, worker: str) -> tuple[PoolState, Member] | None:
        for pool in self._pools:
            for member in pool.members:
                if worker in member.workers(member.size):
                    return pool, member
        return None

    def _joined(self, event: Joined) -> None:
        found = self._member(event.worker)
        if found is not None:
            found[1].joined[int(event.about["rank"])] = event.about
            if found[0].slot is not None or found[0].helps:
                # It may still do what an earlier driver asked for.
                self._drop(event.worker)
        else:
            # A lease that an earlier driver had already renewed.
            self._control.send(event.worker, {"do": "leave"})

    def _reported(self, event: Report, ended: dict[Node, Outcome]) -> None:
        found = self._member(event.worker)
        if "claim" in event.content:
            done = self._generators.reported(event.worker, event.content)
            if found is not None and done:
                found[0].failures, found[1].finished = 0, found[1].finished + 1
            return
        if "weights" in event.content:
            weights = (event.content[key] for key in ("weights", "attempt", "iteration"))
            self._generators.has(event.worker, *weights)
            return
        if "cut" in event.content:
            self._renew(event.worker, str(event.content["cut"]))
            return
        stage, _, iteration = str(event.content["node"]).partition("/")
        node = Node(stage, int(iteration))
        if found is None or node not in found[1].given:
            return
        pool, member = found
        if "there" in event.content:
            self._generators.arrived(node, event.content["there"])
            return
        code = int(event.content["code"])
        if code == 0 and rank_of(event.worker):
            return  # rank 0 speaks for all when a stage went well
        member.given.discard(node)
        self._over(node)
        if code == 0:
            member.finished += 1
            pool.failures = 0
            if node.stage == self._flow.stages[self._flow.publishes].like:
                self._follow(node.iteration)
        elif member.size > 1:
            # The other ranks may wait for this one in the middle of a collective, or for its next
            # attempt with the files of this one. The driver counts it, as the stage's failure.
            self._give_up(pool, member, f"{node.name} failed on one rank", ended, counts=False)
        ended[node] = Outcome(code, str(event.content["reason"]))

    def _lost(self, event: Lost, ended: dict[Node, Outcome]) -> None:
        found = self._member(event.worker)
        if found is None:
            return
        pool, member = found
        member.joined.pop(rank_of(event.worker), None)
        if event.reason == "left":
            self._hand_back(member, f"pool {pool.name} stopped", ended)
            return
        # Why it died Slurm may know by now, and nobody asks it once the job is given up.
        status = self.launcher.poll([member.job])[member.job]
        if status.state.active:
            self._give_up(pool, member, f"{event.worker}: {event.reason}", ended)
        else:
            self._over_with(pool, member, status, ended)

    def _hand_back(self, member: Member, reason: str, ended: dict[Node, Outcome]) -> None:
        """What a member had to do must be started again; that is nobody's failure."""
        for node in member.given:
            self._over(node)
            ended[node] = Outcome(EXIT_REQUEUE, reason)
        member.given.clear()
        for worker in member.workers(member.size):
            self._generators.lost(worker)

    def _give_up(
        self,
        pool: PoolState,
        member: Member,
        reason: str,
        ended: dict[Node, Outcome],
        *,
        counts: bool = True,
    ) -> None:
        """A member that cannot go on is cancelled and replaced."""
        self._hand_back(member, reason, ended)
        leaving = member.leaving
        self._end(pool, member)
        if member in pool.members:
            pool.members.remove(member)
        if leaving:
            return
        log.warning("pool %s: %s", pool.name, reason)
        for other in self._pools:
            for fellow in [m for m in other.members if m in member.fellows and not m.leaving]:
                what = f"started together with pool {pool.name}"
                self._give_up(other, fellow, what, ended, counts=False)
        if not counts:
            return
        pool.failures = 0 if member.finished else pool.failures + 1
        pool.reason = reason
        # Of an elastic pool one worker that works is enough.
        fellows = [p for p in self._slots() if not p.retired] if pool.slot is not None else [pool]
        if all(fellow.failures > self.cluster.retries for fellow in fellows):
            raise StageError(f"pool {pool.name} failed {pool.failures} times: {reason}")
        pause = min(FIRST_PAUSE_S * 2 ** max(0, pool.failures - 1), LONGEST_PAUSE_S)
        pool.resume = time.monotonic() + (pause if pool.failures else 0)

    def _end(self, pool: PoolState, member: Member) -> None:
        """End a lease that was given up.

        Where all its workers are there, they end what they are writing first: a checkpoint, say,
        when a pool that started together with the trainer's was lost.
        """
        patience_s = 0.0
        if member.ready and not member.leaving:
            patience_s = float(resources(pool.needs[0], self.cluster).signal_delay_s)
            self._let_go(member, patience_s)
        self._ending.append((member, time.monotonic() + patience_s))

    def _cancel_ended(self) -> None:
        """Cancel the jobs that were given up, and all of whose workers have left or had time to."""
        seen, now = self._control.workers(), time.monotonic()
        waits = {
            whole_of(member.job)
            for member, until in self._ending
            if now < until and any(w in seen and seen[w].alive for w in member.workers(member.size))
        }
        over = [member for member, _ in self._ending if whole_of(member.job) not in waits]
        if not over:
            return
        self._ending = [entry for entry in self._ending if entry[0] not in over]
        self.launcher.cancel([member.job for member in over])
        for member in over:
            for worker in member.workers(member.size):
                self._control.forget(worker)

    def _committed_meanwhile(self, ended: dict[Node, Outcome]) -> None:
        """What waits for a pool that is not there, and was committed by a lease that ended."""
        for pool in [pool for pool in self._pools if pool.active is None]:
            for node, call in list(pool.waiting.items()):
                if (call.out / MANIFEST).exists():
                    del pool.waiting[node]
                    ended[node] = Outcome(0)

    def _look(self, ended: dict[Node, Outcome]) -> None:
        """Ask how the jobs are: one query for all pools."""
        jobs = [member.job for member in self._members()]
        statuses: Mapping[str, Status] = self.launcher.poll(jobs) if jobs else {}
        for pool in self._pools:
            for member in pool.members:
                if (status := statuses.get(member.job)) is not None and status.state.active:
                    self._queue.seen(f"pool {pool.name}", member.job, status)
        over = [
            (pool, member, status)
            for pool in self._pools
            for member in pool.members
            if (status := statuses.get(member.job)) is not None and not status.state.active
        ]
        # Of those that end together the one that failed comes first: it is to blame.
        for pool, member, status in sorted(over, key=lambda end: end[2].exit_code in _NO_FAILURE):
            if member in pool.members:
                self._over_with(pool, member, status, ended)

    def _over_with(
        self, pool: PoolState, member: Member, status: Status, ended: dict[Node, Outcome]
    ) -> None:
        """A member's job has ended, or was given up by who submitted it.

        Raises:
            InputError: no other try helps.
        """
        what = f"job {member.job} {status.state.value}: {status.reason}".strip()
        if status.exit_code == EXIT_BAD_INPUT:
            self._hand_back(member, what, ended)
            pool.members.remove(member)  # and not cancelled: one that is held stays in the queue
            if not any(other.active for other in self._slots() if pool.slot is not None):
                raise InputError(f"pool {pool.name}: {status.reason}")
            log.warning("pool %s does without this worker: %s", pool.name, status.reason)
            pool.resume = math.inf
            return
        if status.exit_code == EXIT_REQUEUE or status.state is State.PREEMPTED:
            member.finished = max(1, member.finished)
            what = f"job {member.job} stopped for Slurm, at the end of its time say"
        self._give_up(pool, member, what, ended)

    def _keep_up(self) -> None:
        """Submit what is missing, renew leases that end, let go of those that were renewed."""
        self._retire()
        for pools in self._units():
            if any(pool.retired for pool in pools):
                continue
            newest = [pool.members[-1] for pool in pools if pool.members]
            missing = not newest and all(time.monotonic() >= pool.resume for pool in pools)
            ends = all(member.ready for member in newest) and any(m.due for m in newest)
            if missing or ends:
                for pool in pools:
                    pool.lease += 1
                self._submit(pools)
        for pool in [pool for pool in self._pools if not pool.retired]:
            active = pool.active
            for member in pool.members[:-1]:
                if member is not active and not self._busy(member) and not member.leaving:
                    self._let_go(member)

    def _retire(self) -> None:
        """Let generators go that are not wanted any more, when they are through."""
        for pool in [pool for pool in self._pools if pool.retired]:
            for member in list(pool.members):
                if not member.ready:
                    pool.members.remove(member)
                    self.launcher.cancel([member.job])
                elif not self._busy(member) and not member.leaving:
                    self._let_go(member)
            if not pool.members:
                self._pools.remove(pool)

    def _busy(self, member: Member) -> bool:
        return bool(member.given) or any(
            self._generators.busy(worker) for worker in member.workers(member.size)
        )

    def _let_go(self, member: Member, commits_s: float = 0.0) -> None:
        """Have workers leave, which may take so long to end what they are writing."""
        member.leaving = True
        for worker in member.workers(member.size):
            self._control.send(worker, {"do": "leave", "commits_s": commits_s})

    def _submit(self, pools: Sequence[PoolState]) -> None:
        jobs = [pool_job(self.run, self.plan, self.cluster, pool) for pool in pools]
        for job in jobs:
            job.out.mkdir(parents=True, exist_ok=True)
        launcher = self.launcher
        ids = launcher.submit_together(jobs) if len(jobs) > 1 else [launcher.submit(jobs[0])]
        members = [
            Member(job.name.removeprefix("pool/"), identity, pool.size)
            for pool, job, identity in zip(pools, jobs, ids, strict=True)
        ]
        for pool, job, member in zip(pools, jobs, members, strict=True):
            partitions = ",".join(str(part.partition) for part in job.components)
            self._queue.submitted(f"pool {pool.name}", member.job, partitions)
            member.fellows = tuple(other for other in members if other is not member)
            pool.members.append(member)

    def _tell(self) -> None:
        """Progress for the console, and a file for ``rlinf status``."""
        if time.monotonic() - self._told < STATUS_S:
            return
        self._told = time.monotonic()
        workers = self._control.workers()
        for pool in self._pools:
            for member in pool.members:
                seen = workers.get(member.workers(1)[0])
                for row in seen.status.get("doing", ()) if seen is not None and seen.alive else ():
                    # Of a claim on a part of the batch the whole tells: who gathers it.
                    if row["total"] and row["took_s"] is None and row["stage"] != CLAIM:
                        self.progress(*(row[key] for key in PROGRESS))
        write_pools(self.run.folder, self._pools, workers)
