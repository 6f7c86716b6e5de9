"""The simulation: processes of pools that work, wait, transfer and are interrupted.

In every iteration a pool runs its stages in the order of the problem. It finishes one before the
next, which it loads (``switch_s``) as soon as it is free. A stage is divided into micro-batches if
it streams to or from another pool; it starts with its first input, and each micro-batch costs
``chunk_s``. A cycle in several pools sends one micro-batch after the other through all its steps,
in two halves that alternate. A stage in several pools begins when the last of them reaches it. New
weights move as soon as they are trained. An iteration ends when all stages are done and the weights
have arrived; then the next one begins.

The predictor judges a placement by formulas; this module shares none of them (only which stages
form a cycle), so that each can verify the other.

Transfers share the network as fluid flows at max-min fair rates. Rates grow together until a link
is full; the flows on it keep their rate and the others go on growing (progressive filling;
Bertsekas and Gallager, Data Networks, section 6.5.2). Rates are recomputed whenever a flow starts
or ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from pipeline.planning.planner.predictor import lockstep_groups
from pipeline.planning.planner.problem import (
    Placement,
    PlacementProblem,
    PlacementStage,
    pools_of_stages,
)
from pipeline.planning.simulator.decoding import DecodingStage, DecodingWorkers
from pipeline.planning.simulator.scenario import (
    DecodingReplica,
    LengthDistribution,
    NetworkModel,
    Scenario,
    check_scenario,
    random_generator,
)
from pipeline.planning.simulator.simulated_pool import SimulatedPool
from pipeline.planning.simulator.trace import SimulationTrace, TraceSpan
from rlinf.errors import PlanError


class _Flow:
    def __init__(self, size: float, links: frozenset[Hashable], done: simpy.Event) -> None:
        self.left, self.links, self.done, self.rate = size, links, done, 0.0


class SharedNetwork:
    """Links with capacities in bytes/s, and the flows on them."""

    def __init__(
        self, env: simpy.Environment, capacities: Mapping[Hashable, float], latency_s: float = 0.0
    ) -> None:
        self._env, self._capacities, self._latency = env, capacities, latency_s
        self._flows: list[_Flow] = []
        self._since = env.now
        self._change = 0

    def send(self, size: float, links: Iterable[Hashable]) -> Generator[Any, Any, None]:
        """Yield until ``size`` bytes have crossed all ``links``.

        The latency comes first. Links without a capacity are no limit.
        """
        yield self._env.timeout(self._latency)
        known = frozenset(link for link in links if link in self._capacities)
        if size <= 0 or not known:
            return
        flow = _Flow(size, known, self._env.event())
        self._advance()
        self._flows.append(flow)
        self._share()
        yield flow.done

    def _advance(self) -> None:
        elapsed = self._env.now - self._since
        for flow in self._flows:
            flow.left -= flow.rate * elapsed
        self._since = self._env.now

    def _share(self) -> None:
        for flow, rate in zip(
            self._flows, fair_rates([f.links for f in self._flows], self._capacities), strict=True
        ):
            flow.rate = rate
        self._change += 1
        if self._flows:
            self._env.process(self._wait(self._change))

    def _wait(self, change: int) -> Generator[Any, Any, None]:
        first = min(self._flows, key=lambda flow: flow.left / flow.rate)
        yield self._env.timeout(max(0.0, first.left / first.rate))
        if change != self._change:
            return
        self._advance()
        # Equal flows end together; rounding errors must not cause another event.
        ended = [f for f in self._flows if f is first or f.left <= 1e-9 * f.rate]
        self._flows = [f for f in self._flows if f not in ended]
        for flow in ended:
            flow.done.succeed()
        self._share()


def fair_rates(
    flows: list[frozenset[Hashable]], capacities: Mapping[Hashable, float]
) -> list[float]:
    """Return max-min fair rates of flows that each cross the given links."""
    rates = [0.0] * len(flows)
    free = dict(capacities)
    growing = set(range(len(flows)))
    while growing:
        crowd: dict[Hashable, int] = {}
        for i in growing:
            for link in flows[i]:
                crowd[link] = crowd.get(link, 0) + 1
        step = min((free[link] / count for link, count in crowd.items()), default=math.inf)
        if math.isinf(step):
            raise ValueError("a flow crosses no link with a capacity")
        full = {link for link, count in crowd.items() if free[link] <= step * count * (1 + 1e-12)}
        for i in growing:
            rates[i] += step
        for link, count in crowd.items():
            free[link] -= step * count
        growing = {i for i in growing if not flows[i] & full}
    return rates


Array = np.ndarray
Edge = tuple[int, int]
"""Numbers of two stages in different pools; the second consumes the output of the first."""


@dataclass(frozen=True)
class StageSpeed:
    """The speed of a stage on its pool."""

    seconds: float
    """Duration of an iteration's work."""
    shares: Array
    """Part of the work of each kind, ``[kinds]``."""
    used: Array
    """Working GPUs, int ``[kinds]``."""


@dataclass(frozen=True)
class StageGroup:
    """Stages that work as one: a single stage, or those of a cycle."""

    stages: tuple[int, ...]
    pools: tuple[int, ...]
    """Pool numbers, ascending; several if a cycle is in several pools, or if pools overlap."""
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    num_chunks: int
    """Number of micro-batches: as many as it streams from or to other pools, else 1."""
    overhead_s: float
    """Overhead of each micro-batch; 0 without exchange with other pools."""
    shares: tuple[float, ...]
    """Share of the stages' time of each micro-batch: 1 in total, more if micro-batches are produced
    one after another and repeat some of it."""


class PlacementWork:
    """The work of each pool of a placement in every iteration, from measured rates.

    Raises:
        PlanError: the placement does not fit the problem, or a stage cannot run on its pool.
    """

    def __init__(self, problem: PlacementProblem, placement: Placement) -> None:
        _check(problem, placement)
        self.problem, self.placement = problem, placement
        stages = problem.stages
        index = {stage.name: s for s, stage in enumerate(stages)}
        self.home = pools_of_stages(placement.pools)
        """The pools that each stage works on, by stage."""
        self.speeds = [
            stage_speed(problem, stage, placement.gpus_of(s)) for s, stage in enumerate(stages)
        ]
        edges = [(index[name], s) for s, stage in enumerate(stages) for name in stage.after]
        self.groups = [self._group(members, edges) for members in lockstep_groups(problem)]
        self.pieces = {s: group.num_chunks for group in self.groups for s in group.stages}
        """Number of micro-batches by stage."""
        self.turns = [
            [g for g, group in enumerate(self.groups) if p in group.pools]
            for p in range(len(placement.pools))
        ]
        """Groups of each pool, in the order of their work."""
        ends = problem.sync
        known = ends is not None and all(name in index for name in ends)
        self.sync: Edge | None = (index[ends[0]], index[ends[1]]) if ends and known else None
        """Source and target stage of the weights; None if they stay in their pool."""
        if self.sync and set(self.home[self.sync[0]]) & set(self.home[self.sync[1]]):
            self.sync = None

    def switch_s(self, pool: int, group: int) -> float:
        """Return the seconds until a pool with other stages has loaded a group's stages.

        Each kind of GPU loads one stage after the other, and all kinds at the same time.
        """
        if len(self.turns[pool]) == 1:
            return 0.0
        mine = [s for s in self.groups[group].stages if pool in self.home[s]]
        return max(
            sum(self.problem.stages[s].switch_s.get(kind, 0.0) for s in mine)
            for kind in self.kinds(pool)
        )

    def sync_s(self) -> float:
        """Return the seconds of the weight transfer; 0 if they stay in their pool."""
        if self.sync is None:
            return 0.0
        source, target = (
            {kind for pool in self.home[s] for kind in self.kinds(pool)} for s in self.sync
        )
        return max(self.problem.sync_s.get((a, b), 0.0) for a in source for b in target)

    def kinds(self, pool: int) -> list[str]:
        """Return the names of the kinds of GPUs of a pool."""
        allocated = zip(self.placement.gpus[pool], self.problem.kinds, strict=True)
        return [kind.name for n, kind in allocated if n]

    def active_gpus(
        self, stage: int, used: Sequence[int] | Array | None = None
    ) -> dict[int, Array]:
        """Return the GPUs that a stage uses, by pool as bool ``[gpus]``, in the order of kinds.

        Args:
            used: GPUs of each kind, if not those of the stage's speed.
        """
        left = np.array(self.speeds[stage].used if used is None else used)
        masks = {}
        for pool in self.home[stage]:
            allocated = np.array(self.placement.gpus[pool])
            here = np.minimum(allocated, left)
            left -= here
            parts = [np.arange(n) < u for n, u in zip(allocated, here, strict=True)]
            masks[pool] = np.concatenate(parts)
        return masks

    def _group(self, members: tuple[int, ...], edges: list[Edge]) -> StageGroup:
        stages = self.problem.stages
        crossing = [(a, b) for a, b in edges if not set(self.home[a]) & set(self.home[b])]
        inputs = tuple((a, b) for a, b in crossing if b in members and a not in members)
        outputs = tuple((a, b) for a, b in crossing if a in members and b not in members)
        streamed = any(stages[b].streams for _, b in inputs + outputs)
        pieces = self.placement.num_chunks if streamed else 1
        return StageGroup(
            members,
            tuple(sorted({pool for s in members for pool in self.home[s]})),
            inputs,
            outputs,
            pieces,
            max(stages[s].chunk_s for s in members) if inputs or outputs else 0.0,
            self._shares(members, pieces),
        )

    def _shares(self, members: tuple[int, ...], pieces: int) -> tuple[float, ...]:
        stage, chunks = self.problem.stages[members[0]], self.placement.num_chunks
        # Stages on the whole job run after all parts of stages on some of its pools.
        pools = {pool for s in members for pool in self.home[s]}
        others = {s for pool in pools for s in self.placement.pools[pool]} - set(members)
        if any(len(self.home[s]) == 1 or self.home[s] == self.home[members[0]] for s in others):
            return ((1 + (chunks - 1) * stage.again) / pieces,) * pieces
        allocated = sum(self.placement.gpus_of(members[0]))
        first = (
            float(stage.first_chunk_share(pieces, np.array(allocated)))
            if stage.lead
            else 1 / pieces
        )
        return (first, *((1 - first) / max(1, pieces - 1) for _ in range(pieces - 1)))


def stage_speed(
    problem: PlacementProblem, stage: PlacementStage, gpus: tuple[int, ...]
) -> StageSpeed:
    """Return the speed of a stage on GPUs of each kind: together, or of the fastest kind if only
    one can run it.

    Raises:
        PlanError: the stage cannot run there.
    """
    tables = [problem.rate_table(stage, k) for k in range(len(gpus))]
    rates = np.array([table[n] for table, n in zip(tables, gpus, strict=True)])
    # GPUs without work are idle.
    used = np.array([np.argmax(t == rate) for t, rate in zip(tables, rates, strict=True)])
    if not stage.divisible:
        rates = np.where(np.arange(len(rates)) == rates.argmax(), rates, 0.0)
    elif np.any((rates == 0) & (np.array(gpus) > 0)):
        rates = 0 * rates
    together = rates.sum() * (problem.mixing if (rates > 0).sum() > 1 else 1.0)
    if not together > 0:
        allocated = ", ".join(
            f"{n} {k.name}" for n, k in zip(gpus, problem.kinds, strict=True) if n
        )
        raise PlanError(f"stage {stage.name!r}: cannot run on {allocated or 'a pool without GPUs'}")
    return StageSpeed(float(1 / together), rates / rates.sum(), np.where(rates > 0, used, 0))


def _check(problem: PlacementProblem, placement: Placement) -> None:
    home = pools_of_stages(placement.pools)
    if list(home) != list(range(len(problem.stages))):
        raise PlanError("placement: every stage must be in a pool")
    if any(len(places) > 1 and places not in placement.jobs for places in home.values()):
        raise PlanError("placement: pools that overlap must do so in the same stages")
    if len(placement.gpus) != len(placement.pools):
        raise PlanError(
            f"placement: {len(placement.pools)} pools, but GPUs for {len(placement.gpus)}"
        )
    if placement.num_chunks < 1:
        raise PlanError(f"placement: chunks must be at least 1 (got {placement.num_chunks})")
    for k, kind in enumerate(problem.kinds):
        wanted = [pool[k] if k < len(pool) else -1 for pool in placement.gpus]
        if min(wanted) < 0 or any(len(pool) != len(problem.kinds) for pool in placement.gpus):
            raise PlanError("placement: each pool needs a number of GPUs of each kind, 0 or more")
        if sum(wanted) > kind.gpus:
            raise PlanError(f"placement: {sum(wanted)} {kind.name} are requested, of {kind.gpus}")


Process = Generator[Any, Any, Any]
MAX_REPEATS = 1000
"""Maximum repeats of one iteration that is always interrupted."""


def simulate(
    problem: PlacementProblem,
    placement: Placement,
    scenario: Scenario | None = None,
    iterations: int = 20,
    seed: int = 0,
) -> SimulationTrace:
    """Simulate ``iterations`` of a placement; the same seed gives the same trace.

    Raises:
        PlanError: the placement does not fit the problem, a stage cannot run on its pool, channels
            are so small that pools deadlock, a micro-batch does not fit into a job, or the scenario
            names an unknown stage or kind.
    """
    if iterations < 1:
        raise PlanError(f"iterations: must be at least 1 (got {iterations})")
    scenario = scenario or Scenario()
    check_scenario(
        scenario, [stage.name for stage in problem.stages], [kind.name for kind in problem.kinds]
    )
    work = PlacementWork(problem, placement)
    if scenario.capacity is not None and scenario.losses is not None:
        # A deadlock does not depend on times, and interruptions would never end.
        _Run(work, Scenario(capacity=scenario.capacity), 1, seed).run()
    return _Run(work, scenario, iterations, seed).run()


class _Channel:
    """The micro-batches on their way from one stage to another, in order."""

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
    """The state of one iteration that its pools share."""

    number: int
    channels: dict[Edge, _Channel]
    trained: simpy.Event
    """Set when the new weights exist on their source."""
    left: dict[int, float] = field(default_factory=dict)
    """Time at which each pool was done with its stages."""
    cycles: dict[int, _Cycle] = field(default_factory=dict)


class _Run:
    def __init__(self, work: PlacementWork, scenario: Scenario, count: int, seed: int) -> None:
        self.work, self.scenario, self.count, self.seed = work, scenario, count, seed
        self.problem, self.placement, self.home = work.problem, work.placement, work.home
        self.names = [stage.name for stage in self.problem.stages]
        self.env = simpy.Environment()
        self.trace = SimulationTrace(self.problem, self.placement)
        self.masks = [work.active_gpus(s) for s in range(len(self.names))]
        self.network = _network(self.env, work, scenario.network)
        self.decoding = self._decoding()
        self.redo = self.env.event()
        """Triggered when the iteration must be repeated."""
        self.pools = [
            SimulatedPool(
                self.env, p, self.problem.kinds, gpus, scenario, seed, self.trace, self._lost
            )
            for p, gpus in enumerate(self.placement.gpus)
        ]
        self.tasks: list[simpy.Process] = []
        """Processes of the current iteration."""
        self.full: dict[Edge, int] = {}
        """Number of senders that wait for space, by edge."""

    def run(self) -> SimulationTrace:
        """Run all iterations."""
        main = self.env.process(self._main())
        try:
            self.env.run(until=main)
        except RuntimeError:
            # There is no event left that could end a wait.
            if main.triggered or not any(self.full.values()):
                raise
            raise PlanError(self._stuck()) from None
        for pool in self.pools:
            self.trace.allocations += pool.close()
        return self.trace

    def _main(self) -> Process:
        yield self.env.all_of([self.env.process(pool.start()) for pool in self.pools])
        self.trace.iteration_starts.append(self.env.now)
        for i in range(self.count):
            first = self.trace.repeated_iterations
            while not (yield from self._attempt(i)):
                self.trace.repeated_iterations += 1
                if self.trace.repeated_iterations - first == MAX_REPEATS:
                    raise PlanError(
                        f"losses: iteration {i} was lost {MAX_REPEATS} times in a row and would "
                        "never end; lower losses.per_hour, or set losses.redo: micro-batch"
                    )
            self.trace.iteration_starts.append(self.env.now)

    def _attempt(self, i: int) -> Process:
        """Run one iteration; False if an interruption requires a repeat."""
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
            self.trace.mark_repeated(first)
            return False
        last = max(state.left, key=lambda p: state.left[p])
        slowest = self.names[self.work.groups[self.work.turns[last][-1]].stages[-1]]
        for p, since in state.left.items():
            self.trace.add_wait(p, slowest, state.left[last] - since)
            self.trace.add_wait(p, "weights", self.env.now - state.left[last])
        return True

    def _task(self, work: Process) -> simpy.Process:
        """Start a process that ends quietly when the iteration is repeated."""

        def quiet() -> Process:
            try:
                yield from work
            except simpy.Interrupt:
                return

        task = self.env.process(quiet())
        self.tasks.append(task)
        return task

    def _lost(self) -> None:
        """Handle the interruption of a working pool."""
        losses = self.scenario.losses
        if losses is not None and losses.redo == "iteration" and not self.redo.triggered:
            self.redo.succeed()

    # One pool

    def _serve(self, p: int, state: _Iteration) -> Process:
        """Run a pool's work of one iteration."""
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

    def _alone(self, p: int, group: StageGroup, state: _Iteration) -> Process:
        """Run the stages of a group in turns, all in this pool."""
        pool, i = self.pools[p], state.number
        beside = [self.pools[q] for q in group.pools if q != p]
        yield from self._take_whole(p, group, state)
        decoding = self.decoding.get(group.stages[0])
        if decoding:
            pieces, busy = decoding.iteration(
                random_generator(self.seed, "lengths", i), group.num_chunks
            )
            nominal, elapsed_s = pieces.sum(), 0.0
        for k in range(group.num_chunks):
            yield from self._take(p, group, state)
            for s in group.stages:
                seconds = group.shares[k] * self.work.speeds[s].seconds
                if decoding:
                    seconds = pieces[k]
                if s == group.stages[-1]:
                    seconds += group.overhead_s
                spent = yield from pool.work(seconds, self.names[s], i, k, beside=beside)
                if decoding:
                    elapsed_s += spent
                else:
                    self._count(s, spent)
            yield from self._pass_on(p, group, k, state)
        if decoding:
            worked = busy if len(group.pools) == 1 else busy.mean()
            for q, mask in self.masks[group.stages[0]].items():
                self.trace.gpu_busy[q][mask] += worked * (elapsed_s / nominal)
        self._finish(group, state)

    def _take_whole(self, p: int, group: StageGroup, state: _Iteration) -> Process:
        """Get all inputs that the group cannot start on a part of."""
        for edge in group.inputs:
            if not self.problem.stages[edge[1]].streams:
                for _ in range(self.work.pieces[edge[0]]):
                    yield from self._get(p, edge, state)

    def _take(self, p: int, group: StageGroup, state: _Iteration) -> Process:
        """Get the next micro-batch of the other inputs."""
        for edge in group.inputs:
            if self.problem.stages[edge[1]].streams:
                yield from self._get(p, edge, state)

    def _get(self, p: int, edge: Edge, state: _Iteration) -> Process:
        since, channel = self.env.now, state.channels[edge]
        yield channel.arrived.get(1)
        if channel.room is not None:
            yield channel.room.put(1)
        self.trace.add_wait(p, self.names[edge[0]], self.env.now - since)

    def _pass_on(self, p: int, group: StageGroup, micro_batch: int, state: _Iteration) -> Process:
        for edge in group.outputs:
            since, channel = self.env.now, state.channels[edge]
            if channel.room is not None:
                self.full[edge] = self.full.get(edge, 0) + 1
                yield channel.room.get(1)
                self.full[edge] -= 1
            self.trace.add_wait(p, f"room in {self.names[edge[1]]}", self.env.now - since)
            if self.network is None:
                channel.arrived.put(1)
            else:
                self._task(self._send(edge, micro_batch, state))

    def _finish(self, group: StageGroup, state: _Iteration) -> None:
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
            TraceSpan(
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
        pool.add_span(self.names[source], state.number, 0, "sync", start, self.env.now)

    def _transfer(self, edge: Edge, size: float) -> Process:
        assert self.network is not None
        links = (("out", self.home[edge[0]]), ("in", self.home[edge[1]]), "fabric")
        yield from self.network.send(size, links)

    # A stage on several pools, or a cycle over them

    def _join(self, p: int, g: int, state: _Iteration) -> Process:
        """Work on a group together; the pool that comes last leads."""
        group = self.work.groups[g]
        cycle = state.cycles.setdefault(g, _Cycle(self.env.event(), self.env.event()))
        cycle.joined += 1
        if cycle.joined < len(group.pools):
            since = self.env.now
            yield cycle.begin
            partners = [self.names[s] for s in group.stages if p not in self.home[s]]
            self.trace.add_wait(p, (partners or ["the others"])[0], self.env.now - since)
            yield cycle.end
            return
        cycle.begin.succeed()
        if len({self.home[s] for s in group.stages}) == 1:
            yield from self._alone(p, group, state)
            cycle.end.succeed()
            return
        yield from self._take_whole(p, group, state)
        for k in range(group.num_chunks):
            yield from self._take(p, group, state)
            start = self.env.now
            yield self.env.all_of([self._task(self._half(group, state)) for _ in range(2)])
            if group.overhead_s:
                overheads = [self._hand_over(q, group, state) for q in group.pools]
                yield self.env.all_of([self._task(each) for each in overheads])
            for q in group.pools:
                first = next(s for s in group.stages if q in self.home[s])
                self.pools[q].add_span(
                    self.names[first], state.number, k, "work", start, self.env.now
                )
            yield from self._pass_on(p, group, k, state)
        self._finish(group, state)
        cycle.end.succeed()

    def _half(self, group: StageGroup, state: _Iteration) -> Process:
        """Send half of a micro-batch through all steps."""
        steps = self.problem.cycle_steps
        # It keeps a pool as long as its next stage is in the same pool.
        for home, members in itertools.groupby(group.stages * steps, lambda s: self.home[s]):
            pool, *beside = (self.pools[p] for p in home)
            with pool.turn.request() as turn:
                yield turn
                for s in members:
                    seconds = self.work.speeds[s].seconds / (2 * steps * group.num_chunks)
                    spent = yield from pool.work(
                        seconds, self.names[s], state.number, kind=None, beside=beside
                    )
                    self._count(s, spent)

    def _hand_over(self, p: int, group: StageGroup, state: _Iteration) -> Process:
        name = self.names[group.stages[0]]
        yield from self.pools[p].work(group.overhead_s, name, state.number, kind=None)

    def _stuck(self) -> str:
        edges = [f"{self.names[a]} to {self.names[b]}" for (a, b), n in self.full.items() if n]
        return (
            f"channels of {self.scenario.capacity} micro-batches are too small for this placement: "
            f"pools wait for each other for ever ({', '.join(edges)} is full); allow "
            f"{self.placement.num_chunks}, or do not place a stage with what comes two stages later"
        )

    def _decoding(self) -> dict[int, DecodingStage]:
        """Return the stage whose samples have lengths."""
        lengths = self.scenario.lengths
        if lengths is None:
            return {}
        s = self.names.index(lengths.stage)
        if self.problem.stages[s].cycle is not None:
            raise PlanError(f"lengths.stage: {lengths.stage!r} is part of a cycle, which has steps")
        speed = self.work.speeds[s]
        parts = _parts(lengths, speed, [kind.name for kind in self.problem.kinds])
        # The mask covers complete workers; the remaining GPUs are idle.
        self.masks[s] = self.work.active_gpus(s, [part.workers * part.gpus for part in parts])
        return {s: DecodingStage(lengths, parts, speed.seconds, self.seed)}


def _network(
    env: simpy.Environment, work: PlacementWork, network: NetworkModel | None
) -> SharedNetwork | None:
    """Build the links out of and into each pool, and the fabric."""
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


def _parts(
    lengths: LengthDistribution, speed: StageSpeed, kinds: list[str]
) -> list[DecodingWorkers]:
    """Return the workers of each kind, with samples in proportion to its share of the work."""
    parts, left, weight = [], lengths.samples, 1.0
    for kind, share, used in zip(kinds, speed.shares, speed.used, strict=True):
        replica = lengths.replicas.get(kind, DecodingReplica())
        workers = int(used) // replica.gpus
        if used and not workers:
            raise PlanError(
                f"lengths.replicas.{kind}: a worker has {replica.gpus} GPUs, but the pool {used}"
            )
        samples = round(left * share / weight) if weight > 1e-12 else 0
        left, weight = left - samples, weight - share
        parts.append(
            DecodingWorkers(workers, replica.gpus, replica.slots, replica.fixed_share, samples)
        )
    return parts
