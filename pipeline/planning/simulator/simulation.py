"""The simulation: processes of pools that work, wait, pass on and are lost.

In every iteration a pool takes its stages in the order of the problem and finishes one before it
turns to the next, which it brings in (``switch_s``) as soon as it is free. A stage is cut into
micro-batches where it streams to or from another pool; it starts with its first input, and each
micro-batch costs it ``chunk_s``. A cycle in several pools takes one micro-batch after the other
through all its steps, in two halves that swap places. A stage that is in several pools begins when
the last of them comes to it. New weights move as soon as they are trained.
An iteration ends when all stages are done and the weights have arrived; the next begins then.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from pipeline.planning.planner.problem import Placement, Problem
from pipeline.planning.simulator.lengths import DecodingStage, Part
from pipeline.planning.simulator.network import SharedNetwork
from pipeline.planning.simulator.pool import Pool
from pipeline.planning.simulator.scenario import (
    Lengths,
    Network,
    Replica,
    Scenario,
    check,
    generator,
)
from pipeline.planning.simulator.trace import Span, Trace
from pipeline.planning.simulator.work import Edge, Group, Speed, Work
from rlinf.errors import PlanError

Array = np.ndarray
Process = Generator[Any, Any, Any]
MOST_REPEATS = 1000
"""Of one iteration, all of them lost."""


def simulate(
    problem: Problem,
    placement: Placement,
    scenario: Scenario | None = None,
    iterations: int = 20,
    seed: int = 0,
) -> Trace:
    """Run ``iterations`` under a placement; the same seed gives the same trace.

    Raises:
        PlanError: the placement does not fit the problem, a stage cannot run on its pool, channels
            are so small that pools wait for each other for ever, a micro-batch does not fit into a
            job, or the scenario names a stage or kind that the problem does not have.
    """
    if iterations < 1:
        raise PlanError(f"iterations: must be at least 1 (got {iterations})")
    scenario = scenario or Scenario()
    check(scenario, [stage.name for stage in problem.stages], [kind.name for kind in problem.kinds])
    work = Work(problem, placement)
    if scenario.capacity is not None and scenario.losses is not None:
        # Whether pools wait for ever does not depend on times, and losses would go on for ever.
        _Run(work, Scenario(capacity=scenario.capacity), 1, seed).run()
    return _Run(work, scenario, iterations, seed).run()


class _Channel:
    """Micro-batches on their way from one stage to another, in order."""

    def __init__(self, env: simpy.Environment, capacity: int | None) -> None:
        self.arrived = simpy.Container(env)
        self.room = None if capacity is None else simpy.Container(env, init=capacity)


@dataclass
class _Cycle:
    """A cycle whose pools wait for each other."""

    begin: simpy.Event
    end: simpy.Event
    joined: int = 0


@dataclass
class _Iteration:
    """What the pools tell each other about one iteration."""

    number: int
    channels: dict[Edge, _Channel]
    trained: simpy.Event
    """The new weights are there, where they were made."""
    left: dict[int, float] = field(default_factory=dict)
    """By pool: when it was done with its stages."""
    cycles: dict[int, _Cycle] = field(default_factory=dict)


class _Run:
    def __init__(self, work: Work, scenario: Scenario, count: int, seed: int) -> None:
        self.work, self.scenario, self.count, self.seed = work, scenario, count, seed
        self.problem, self.placement, self.home = work.problem, work.placement, work.home
        self.names = [stage.name for stage in self.problem.stages]
        self.env = simpy.Environment()
        self.trace = Trace(self.problem, self.placement)
        self.masks = [work.at_work(s) for s in range(len(self.names))]
        self.network = _network(self.env, work, scenario.network)
        self.decoding = self._decoding()
        self.redo = self.env.event()
        """Happens when the iteration has to start again."""
        self.pools = [
            Pool(self.env, p, self.problem.kinds, gpus, scenario, seed, self.trace, self._lost)
            for p, gpus in enumerate(self.placement.gpus)
        ]
        self.tasks: list[simpy.Process] = []
        """Of the iteration that goes on."""
        self.full: dict[Edge, int] = {}
        """How many senders wait for room."""

    def run(self) -> Trace:
        """All iterations."""
        main = self.env.process(self._main())
        try:
            self.env.run(until=main)
        except RuntimeError:
            # No event is left that could end a wait.
            if main.triggered or not any(self.full.values()):
                raise
            raise PlanError(self._stuck()) from None
        for pool in self.pools:
            self.trace.holds += pool.close()
        return self.trace

    def _main(self) -> Process:
        yield self.env.all_of([self.env.process(pool.start()) for pool in self.pools])
        self.trace.begins.append(self.env.now)
        for i in range(self.count):
            first = self.trace.redone
            while not (yield from self._attempt(i)):
                self.trace.redone += 1
                if self.trace.redone - first == MOST_REPEATS:
                    raise PlanError(
                        f"losses: iteration {i} was lost {MOST_REPEATS} times in a row and would "
                        "never end; lower losses.per_hour, or set losses.redo: micro-batch"
                    )
            self.trace.begins.append(self.env.now)

    def _attempt(self, i: int) -> Process:
        """One iteration; False when something lost makes it start again."""
        counted = [busy.copy() for busy in self.trace.gpu_busy]
        first = len(self.trace.spans)
        self.redo, self.tasks, self.full = self.env.event(), [], {}
        state = _Iteration(
            i,
            {edge: self._channel(edge) for group in self.work.groups for edge in group.outputs},
            self.env.event(),
        )
        parts = [self._task(self._serve(p, state)) for p in range(len(self.pools))]
        if self.work.sync:
            parts.append(self._task(self._send_weights(state)))
        yield self.env.all_of(parts) | self.redo
        if self.redo.triggered:
            for task in self.tasks:
                if task.is_alive:
                    task.interrupt()
            self.trace.gpu_busy = counted
            self.trace.mark_redone(first)
            return False
        last = max(state.left, key=lambda p: state.left[p])
        slowest = self.names[self.work.groups[self.work.turns[last][-1]].stages[-1]]
        for p, since in state.left.items():
            self.trace.waited(p, slowest, state.left[last] - since)
            self.trace.waited(p, "weights", self.env.now - state.left[last])
        return True

    def _task(self, work: Process) -> simpy.Process:
        """A process that ends quietly when the iteration starts again."""

        def quiet() -> Process:
            try:
                yield from work
            except simpy.Interrupt:
                return

        task = self.env.process(quiet())
        self.tasks.append(task)
        return task

    def _lost(self) -> None:
        """A pool was lost at work."""
        losses = self.scenario.losses
        if losses is not None and losses.redo == "iteration" and not self.redo.triggered:
            self.redo.succeed()

    # One pool

    def _serve(self, p: int, state: _Iteration) -> Process:
        """A pool's work in one iteration."""
        for g in self.work.turns[p]:
            group = self.work.groups[g]
            yield from self.pools[p].work(
                self.work.switch_s(p, g), self.names[group.stages[0]], state.number, kind="switch"
            )
            if len(group.pools) == 1:
                yield from self._alone(p, group, state)
            else:
                yield from self._join(p, g, state)
        state.left[p] = self.env.now

    def _alone(self, p: int, group: Group, state: _Iteration) -> Process:
        """The stages of a group in turns, all in this pool."""
        pool, i = self.pools[p], state.number
        beside = [self.pools[q] for q in group.pools if q != p]
        yield from self._take_whole(p, group, state)
        decoding = self.decoding.get(group.stages[0])
        if decoding:
            pieces, busy = decoding.iteration(generator(self.seed, "lengths", i), group.pieces)
            nominal, took = pieces.sum(), 0.0
        for k in range(group.pieces):
            yield from self._take(p, group, state)
            for s in group.stages:
                seconds = group.shares[k] * self.work.speeds[s].seconds
                if decoding:
                    seconds = pieces[k]
                if s == group.stages[-1]:
                    seconds += group.overhead_s
                spent = yield from pool.work(seconds, self.names[s], i, k, beside=beside)
                if decoding:
                    took += spent
                else:
                    self._count(s, spent)
            yield from self._pass_on(p, group, k, state)
        if decoding:
            worked = busy if len(group.pools) == 1 else busy.mean()
            for q, mask in self.masks[group.stages[0]].items():
                self.trace.gpu_busy[q][mask] += worked * (took / nominal)
        self._finish(group, state)

    def _take_whole(self, p: int, group: Group, state: _Iteration) -> Process:
        """All of the inputs that the group cannot begin on a part of."""
        for edge in group.inputs:
            if not self.problem.stages[edge[1]].streams:
                for _ in range(self.work.pieces[edge[0]]):
                    yield from self._get(p, edge, state)

    def _take(self, p: int, group: Group, state: _Iteration) -> Process:
        """The next micro-batch of the other inputs."""
        for edge in group.inputs:
            if self.problem.stages[edge[1]].streams:
                yield from self._get(p, edge, state)

    def _get(self, p: int, edge: Edge, state: _Iteration) -> Process:
        since, channel = self.env.now, state.channels[edge]
        yield channel.arrived.get(1)
        if channel.room is not None:
            yield channel.room.put(1)
        self.trace.waited(p, self.names[edge[0]], self.env.now - since)

    def _pass_on(self, p: int, group: Group, micro_batch: int, state: _Iteration) -> Process:
        for edge in group.outputs:
            since, channel = self.env.now, state.channels[edge]
            if channel.room is not None:
                self.full[edge] = self.full.get(edge, 0) + 1
                yield channel.room.get(1)
                self.full[edge] -= 1
            self.trace.waited(p, f"room in {self.names[edge[1]]}", self.env.now - since)
            if self.network is None:
                channel.arrived.put(1)
            else:
                self._task(self._send(edge, micro_batch, state))

    def _finish(self, group: Group, state: _Iteration) -> None:
        if self.work.sync and self.work.sync[0] in group.stages:
            state.trained.succeed()

    def _count(self, s: int, seconds: float) -> None:
        for pool, mask in self.masks[s].items():
            self.trace.gpu_busy[pool][mask] += seconds

    # What moves between pools

    def _channel(self, edge: Edge) -> _Channel:
        streams = self.problem.stages[edge[1]].streams
        return _Channel(self.env, self.scenario.capacity if streams else None)

    def _send(self, edge: Edge, micro_batch: int, state: _Iteration) -> Process:
        assert self.network is not None
        assert self.scenario.network is not None
        source, target = (self.names[s] for s in edge)
        whole = self.scenario.network.payload.get(source, {}).get(target, 0.0)
        start = self.env.now
        yield from self._transfer(edge, whole / self.work.pieces[edge[0]])
        self.trace.spans.append(
            Span(
                self.home[edge[1]][0],
                source,
                state.number,
                micro_batch,
                "transfer",
                start,
                self.env.now,
            )
        )
        state.channels[edge].arrived.put(1)

    def _send_weights(self, state: _Iteration) -> Process:
        assert self.work.sync is not None
        yield state.trained
        source, start = self.work.sync[0], self.env.now
        network = self.scenario.network
        if network is not None and network.weights_bytes is not None:
            yield from self._transfer(self.work.sync, network.weights_bytes)
        else:
            yield self.env.timeout(self.work.sync_s())
        pool = self.pools[self.home[source][0]]
        pool.note(self.names[source], state.number, 0, "sync", start, self.env.now)

    def _transfer(self, edge: Edge, size: float) -> Process:
        assert self.network is not None
        links = (("out", self.home[edge[0]]), ("in", self.home[edge[1]]), "fabric")
        yield from self.network.send(size, links)

    # A stage on several pools, or a cycle over them

    def _join(self, p: int, g: int, state: _Iteration) -> Process:
        """Work on a group together; whoever comes last leads."""
        group = self.work.groups[g]
        cycle = state.cycles.setdefault(g, _Cycle(self.env.event(), self.env.event()))
        cycle.joined += 1
        if cycle.joined < len(group.pools):
            since = self.env.now
            yield cycle.begin
            partners = [self.names[s] for s in group.stages if p not in self.home[s]]
            self.trace.waited(p, (partners or ["the others"])[0], self.env.now - since)
            yield cycle.end
            return
        cycle.begin.succeed()
        if len({self.home[s] for s in group.stages}) == 1:
            yield from self._alone(p, group, state)
            cycle.end.succeed()
            return
        yield from self._take_whole(p, group, state)
        for k in range(group.pieces):
            yield from self._take(p, group, state)
            start = self.env.now
            yield self.env.all_of([self._task(self._half(group, state)) for _ in range(2)])
            if group.overhead_s:
                overheads = [self._hand_over(q, group, state) for q in group.pools]
                yield self.env.all_of([self._task(each) for each in overheads])
            for q in group.pools:
                first = next(s for s in group.stages if q in self.home[s])
                self.pools[q].note(self.names[first], state.number, k, "work", start, self.env.now)
            yield from self._pass_on(p, group, k, state)
        self._finish(group, state)
        cycle.end.succeed()

    def _half(self, group: Group, state: _Iteration) -> Process:
        """Half of a micro-batch on its way through all steps."""
        steps = self.problem.cycle_steps
        # It keeps a pool for as long as its next stage is there, too.
        for home, members in itertools.groupby(group.stages * steps, lambda s: self.home[s]):
            pool, *beside = (self.pools[p] for p in home)
            with pool.turn.request() as turn:
                yield turn
                for s in members:
                    seconds = self.work.speeds[s].seconds / (2 * steps * group.pieces)
                    spent = yield from pool.work(
                        seconds, self.names[s], state.number, kind=None, beside=beside
                    )
                    self._count(s, spent)

    def _hand_over(self, p: int, group: Group, state: _Iteration) -> Process:
        name = self.names[group.stages[0]]
        yield from self.pools[p].work(group.overhead_s, name, state.number, kind=None)

    def _stuck(self) -> str:
        edges = [f"{self.names[a]} to {self.names[b]}" for (a, b), n in self.full.items() if n]
        return (
            f"channels of {self.scenario.capacity} micro-batches are too small for this placement: "
            f"pools wait for each other for ever ({', '.join(edges)} is full); allow "
            f"{self.placement.chunks}, or do not place a stage with what comes two stages later"
        )

    def _decoding(self) -> dict[int, DecodingStage]:
        """The stage whose samples have lengths."""
        lengths = self.scenario.lengths
        if lengths is None:
            return {}
        s = self.names.index(lengths.stage)
        if self.problem.stages[s].cycle is not None:
            raise PlanError(f"lengths.stage: {lengths.stage!r} is part of a cycle, which has steps")
        speed = self.work.speeds[s]
        parts = _parts(lengths, speed, [kind.name for kind in self.problem.kinds])
        # The mask follows whole workers: what does not make one idles.
        self.masks[s] = self.work.at_work(s, [part.workers * part.gpus for part in parts])
        return {s: DecodingStage(lengths, parts, speed.seconds, self.seed)}


def _network(env: simpy.Environment, work: Work, network: Network | None) -> SharedNetwork | None:
    """Links out of and into each pool, and the fabric."""
    if network is None:
        return None
    known = network.gpu_bytes_per_s
    capacities: dict[Any, float] = {}
    for s, home in work.home.items():
        speed = 0.0
        for n, kind in zip(work.placement.gpus_of(s), work.problem.kinds, strict=True):
            if n and kind.name not in known:
                raise PlanError(f"network.gpu_bytes_per_s: nothing for {kind.name!r}")
            speed += n * known.get(kind.name, 0.0)
        capacities["out", home] = capacities["in", home] = speed
    if network.fabric_bytes_per_s is not None:
        capacities["fabric"] = network.fabric_bytes_per_s
    return SharedNetwork(env, capacities, network.latency_s)


def _parts(lengths: Lengths, speed: Speed, kinds: list[str]) -> list[Part]:
    """Workers of each kind, and their samples in proportion to its share of the work."""
    parts, left, weight = [], lengths.samples, 1.0
    for kind, share, used in zip(kinds, speed.shares, speed.used, strict=True):
        replica = lengths.replicas.get(kind, Replica())
        workers = int(used) // replica.gpus
        if used and not workers:
            raise PlanError(
                f"lengths.replicas.{kind}: a worker has {replica.gpus} GPUs, but the pool {used}"
            )
        samples = round(left * share / weight) if weight > 1e-12 else 0
        left, weight = left - samples, weight - share
        parts.append(Part(workers, replica.gpus, replica.slots, replica.fixed_share, samples))
    return parts
