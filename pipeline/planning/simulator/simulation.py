"""The simulation: processes of pools that work, wait, transfer and are interrupted.

In every iteration a pool runs its stages in the order of the problem, one after the other. Loading
the next stage takes ``switch_s``. A stage is divided into chunks if it streams to or from another
pool. A stage starts with its first input, and each chunk costs ``chunk_s``. The stages of a cycle
(such as simulation and generation) run in lockstep: over several pools they send one chunk after
the other through all steps, in two halves that alternate. A stage in several pools begins when the
last of the pools reaches the stage. New weights are sent as soon as they are trained. The next
iteration begins when all stages are done and the weights have arrived.

The predictor evaluates a placement by formulas. The simulation uses none of these formulas, only
``lockstep_groups``, so that predictor and simulation can verify each other.

Transfers share the network at max-min fair rates, computed by progressive filling (Bertsekas and
Gallager, Data Networks, section 6.5.2): all rates grow until a link is full, the transfers on this
link keep their rates, and the others grow further. Rates change when a transfer starts or ends.
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
from pipeline.planning.simulator.scenario import (
    DecodingReplica,
    LengthDistribution,
    NetworkModel,
    Scenario,
    check_scenario,
    random_generator,
)
from pipeline.planning.simulator.simulated_pool import DecodingStage, DecodingWorkers, SimulatedPool
from pipeline.planning.simulator.trace import SimulationTrace, TraceSpan
from rlinf.errors import PlanError


class _Transfer:
    """A transfer of ``size`` bytes over some links; ``done`` is triggered at its end."""

    def __init__(self, size: float, links: frozenset[Hashable], done: simpy.Event) -> None:
        self.bytes_left, self.links, self.done, self.rate = size, links, done, 0.0


class SharedNetwork:
    """Links with capacities in bytes/s, and the transfers on them."""

    def __init__(
        self, env: simpy.Environment, capacities: Mapping[Hashable, float], latency_s: float = 0.0
    ) -> None:
        self._env, self._capacities, self._latency = env, capacities, latency_s
        self._transfers: list[_Transfer] = []
        self._last_update = env.now
        self._revision = 0
        """Number of changes of the rates; every change makes expected ends of transfers invalid."""

    def send(self, size: float, links: Iterable[Hashable]) -> Generator[Any, Any, None]:
        """Wait for the latency, and then until ``size`` bytes have crossed all ``links``.

        Links without a known capacity are unlimited.
        """
        yield self._env.timeout(self._latency)
        limited_links = frozenset(link for link in links if link in self._capacities)
        if size <= 0 or not limited_links:
            return
        transfer = _Transfer(size, limited_links, self._env.event())
        self._advance()
        self._transfers.append(transfer)
        self._update_rates()
        yield transfer.done

    def _advance(self) -> None:
        elapsed = self._env.now - self._last_update
        for transfer in self._transfers:
            transfer.bytes_left -= transfer.rate * elapsed
        self._last_update = self._env.now

    def _update_rates(self) -> None:
        rates = fair_rates([t.links for t in self._transfers], self._capacities)
        for transfer, rate in zip(self._transfers, rates, strict=True):
            transfer.rate = rate
        self._revision += 1
        if self._transfers:
            self._env.process(self._end_first_transfer(self._revision))

    def _end_first_transfer(self, revision: int) -> Generator[Any, Any, None]:
        first = min(self._transfers, key=lambda transfer: transfer.bytes_left / transfer.rate)
        yield self._env.timeout(max(0.0, first.bytes_left / first.rate))
        if revision != self._revision:
            return
        self._advance()
        # Equal transfers end at the same time; rounding errors must not cause another event.
        ended = [t for t in self._transfers if t is first or t.bytes_left <= 1e-9 * t.rate]
        self._transfers = [t for t in self._transfers if t not in ended]
        for transfer in ended:
            transfer.done.succeed()
        self._update_rates()


def fair_rates(
    transfers: list[frozenset[Hashable]], capacities: Mapping[Hashable, float]
) -> list[float]:
    """Return max-min fair rates of transfers, each of which is the set of links that it crosses."""
    rates = [0.0] * len(transfers)
    free = dict(capacities)
    growing = set(range(len(transfers)))
    while growing:
        users: dict[Hashable, int] = {}
        for i in growing:
            for link in transfers[i]:
                users[link] = users.get(link, 0) + 1
        step = min((free[link] / count for link, count in users.items()), default=math.inf)
        if math.isinf(step):
            raise ValueError("a transfer crosses no link with a capacity")
        full = {link for link, count in users.items() if free[link] <= step * count * (1 + 1e-12)}
        for i in growing:
            rates[i] += step
        for link, count in users.items():
            free[link] -= step * count
        growing = {i for i in growing if not transfers[i] & full}
    return rates


Array = np.ndarray
Edge = tuple[int, int]
"""Indices of two stages in different pools; the second consumes the output of the first."""


@dataclass(frozen=True)
class StageSpeed:
    """The speed of a stage on its pool."""

    seconds: float
    """Duration of the stage in one iteration."""
    shares: Array
    """Share of the work that each kind does, ``[kinds]``."""
    used: Array
    """Number of working GPUs, int ``[kinds]``."""


@dataclass(frozen=True)
class StageGroup:
    """A single stage, or the stages of a cycle, which run in lockstep."""

    stages: tuple[int, ...]
    pools: tuple[int, ...]
    """Pool numbers, ascending; several if a cycle is in several pools, or if pools overlap."""
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    """Edges from other pools (``inputs``) and to other pools (``outputs``)."""
    num_chunks: int
    """Number of chunks: 1 unless the group streams to or from other pools."""
    overhead_s: float
    """Seconds of overhead per chunk; 0 without exchange with other pools."""
    shares: tuple[float, ...]
    """Duration of each chunk relative to the whole batch. The sum is 1, or more if every chunk
    repeats a part of the work."""


class PlacementWork:
    """The work of each pool of a placement in an iteration, from measured rates.

    Raises:
        PlanError: the placement does not fit the problem, or a stage cannot run on its pool.
    """

    def __init__(self, problem: PlacementProblem, placement: Placement) -> None:
        _check(problem, placement)
        self.problem, self.placement = problem, placement
        stages = problem.stages
        index = {stage.name: s for s, stage in enumerate(stages)}
        self.stage_pools = pools_of_stages(placement.pools)
        """Indices of the pools of each stage."""
        self.speeds = [
            stage_speed(problem, stage, placement.gpus_of(s)) for s, stage in enumerate(stages)
        ]
        edges = [(index[name], s) for s, stage in enumerate(stages) for name in stage.after]
        self.groups = [self._group(members, edges) for members in lockstep_groups(problem)]
        self.stage_chunks = {s: group.num_chunks for group in self.groups for s in group.stages}
        """Number of chunks of each stage."""
        self.pool_groups = [
            [g for g, group in enumerate(self.groups) if p in group.pools]
            for p in range(len(placement.pools))
        ]
        """Indices in ``groups`` of each pool's groups, in the order in which they run."""
        self.sync: Edge | None = None
        """Source and target stage of the weights; None if both are in the same pool."""
        if problem.sync is not None and all(name in index for name in problem.sync):
            source, target = (index[name] for name in problem.sync)
            if not set(self.stage_pools[source]) & set(self.stage_pools[target]):
                self.sync = (source, target)

    def switch_s(self, pool: int, group: int) -> float:
        """Return the seconds in which a pool loads a group's stages; 0 if the pool has no others.

        A kind of GPU loads one stage after the other; all kinds load at the same time.
        """
        if len(self.pool_groups[pool]) == 1:
            return 0.0
        stages = [s for s in self.groups[group].stages if pool in self.stage_pools[s]]
        return max(
            sum(self.problem.stages[s].switch_s.get(kind, 0.0) for s in stages)
            for kind in self.kinds(pool)
        )

    def sync_s(self) -> float:
        """Return the seconds of the weight transfer; 0 within a pool."""
        if self.sync is None:
            return 0.0
        source, target = (
            {kind for pool in self.stage_pools[s] for kind in self.kinds(pool)} for s in self.sync
        )
        return max(self.problem.sync_s.get((a, b), 0.0) for a in source for b in target)

    def kinds(self, pool: int) -> list[str]:
        """Return the names of the kinds of GPUs of a pool."""
        counts = zip(self.placement.gpus[pool], self.problem.kinds, strict=True)
        return [kind.name for n, kind in counts if n]

    def active_gpus(
        self, stage: int, used: Sequence[int] | Array | None = None
    ) -> dict[int, Array]:
        """Return masks of the GPUs that a stage uses, bool ``[gpus]`` by pool, ordered by kind.

        Args:
            used: number of GPUs of each kind; None: as many as the stage's speed assumes.
        """
        remaining = np.array(self.speeds[stage].used if used is None else used)
        masks = {}
        for pool in self.stage_pools[stage]:
            counts = np.array(self.placement.gpus[pool])
            active = np.minimum(counts, remaining)
            remaining -= active
            parts = [np.arange(n) < m for n, m in zip(counts, active, strict=True)]
            masks[pool] = np.concatenate(parts)
        return masks

    def _group(self, members: tuple[int, ...], edges: list[Edge]) -> StageGroup:
        stages, pools = self.problem.stages, self.stage_pools
        crossing = [(a, b) for a, b in edges if not set(pools[a]) & set(pools[b])]
        inputs = tuple((a, b) for a, b in crossing if b in members and a not in members)
        outputs = tuple((a, b) for a, b in crossing if a in members and b not in members)
        streamed = any(stages[b].streams for _, b in inputs + outputs)
        num_chunks = self.placement.num_chunks if streamed else 1
        return StageGroup(
            members,
            tuple(sorted({pool for s in members for pool in pools[s]})),
            inputs,
            outputs,
            num_chunks,
            max(stages[s].chunk_s for s in members) if inputs or outputs else 0.0,
            self._shares(members, num_chunks),
        )

    def _shares(self, members: tuple[int, ...], num_chunks: int) -> tuple[float, ...]:
        stage, plan_chunks = self.problem.stages[members[0]], self.placement.num_chunks
        # Stages on all pools of a job run after all chunks, so chunks do not alternate with these.
        pools = self.stage_pools
        used_pools = {pool for s in members for pool in pools[s]}
        other_stages = {s for p in used_pools for s in self.placement.pools[p]} - set(members)
        if any(len(pools[s]) == 1 or pools[s] == pools[members[0]] for s in other_stages):
            return ((1 + (plan_chunks - 1) * stage.again) / num_chunks,) * num_chunks
        num_gpus = sum(self.placement.gpus_of(members[0]))
        first = 1 / num_chunks
        if stage.lead:
            first = float(stage.first_chunk_share(num_chunks, np.array(num_gpus)))
        return (first, *((1 - first) / max(1, num_chunks - 1) for _ in range(num_chunks - 1)))


def stage_speed(
    problem: PlacementProblem, stage: PlacementStage, gpus: tuple[int, ...]
) -> StageSpeed:
    """Return the speed of a stage on all kinds together, or on the fastest kind if it cannot be
    divided between kinds.

    Raises:
        PlanError: the stage cannot run on these GPUs.
    """
    tables = [problem.rate_table(stage, k) for k in range(len(gpus))]
    rates = np.array([table[n] for table, n in zip(tables, gpus, strict=True)])
    # Only the smallest number of GPUs with this rate works; further GPUs are idle.
    used = np.array([np.argmax(t == rate) for t, rate in zip(tables, rates, strict=True)])
    if not stage.divisible:
        rates = np.where(np.arange(len(rates)) == rates.argmax(), rates, 0.0)
    elif np.any((rates == 0) & (np.array(gpus) > 0)):
        rates = 0 * rates
    speed = rates.sum() * (problem.mixing if (rates > 0).sum() > 1 else 1.0)
    if not speed > 0:
        gpu_list = ", ".join(f"{n} {k.name}" for n, k in zip(gpus, problem.kinds, strict=True) if n)
        raise PlanError(f"stage {stage.name!r}: cannot run on {gpu_list or 'a pool without GPUs'}")
    return StageSpeed(float(1 / speed), rates / rates.sum(), np.where(rates > 0, used, 0))


def _check(problem: PlacementProblem, placement: Placement) -> None:
    stage_pools = pools_of_stages(placement.pools)
    if list(stage_pools) != list(range(len(problem.stages))):
        raise PlanError("placement: every stage must be in a pool")
    if any(len(pools) > 1 and pools not in placement.jobs for pools in stage_pools.values()):
        raise PlanError("placement: pools that overlap must do so in the same stages")
    if len(placement.gpus) != len(placement.pools):
        raise PlanError(
            f"placement: {len(placement.pools)} pools, but GPUs for {len(placement.gpus)}"
        )
    if placement.num_chunks < 1:
        raise PlanError(f"placement: chunks must be at least 1 (got {placement.num_chunks})")
    for k, kind in enumerate(problem.kinds):
        counts = [pool[k] if k < len(pool) else -1 for pool in placement.gpus]
        if min(counts) < 0 or any(len(pool) != len(problem.kinds) for pool in placement.gpus):
            raise PlanError("placement: each pool needs a number of GPUs of each kind, 0 or more")
        if sum(counts) > kind.gpus:
            raise PlanError(f"placement: {sum(counts)} {kind.name} are requested, of {kind.gpus}")


Process = Generator[Any, Any, Any]
MAX_REPEATS = 1000
"""Maximum number of consecutive repeats of an iteration."""


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
            are so small that pools deadlock, a chunk takes longer than a job, or the scenario names
            an unknown stage or kind.
    """
    if iterations < 1:
        raise PlanError(f"iterations: must be at least 1 (got {iterations})")
    scenario = scenario or Scenario()
    check_scenario(
        scenario, [stage.name for stage in problem.stages], [kind.name for kind in problem.kinds]
    )
    work = PlacementWork(problem, placement)
    if scenario.capacity is not None and scenario.losses is not None:
        # Interruptions go on during a deadlock and would hide it, so search for one without them.
        _Simulation(work, Scenario(capacity=scenario.capacity), 1, seed).run()
    return _Simulation(work, scenario, iterations, seed).run()


class _Channel:
    """The queue of chunks between stages: arrived chunks, and room for more (None: unlimited)."""

    def __init__(self, env: simpy.Environment, capacity: int | None) -> None:
        self.arrived = simpy.Container(env)
        self.room = None if capacity is None else simpy.Container(env, init=capacity)


@dataclass
class _Rendezvous:
    """The meeting of the pools that run a group together; triggers its begin and its end."""

    begin: simpy.Event
    end: simpy.Event
    joined: int = 0
    """Number of pools that have arrived."""


@dataclass
class _Iteration:
    """The state of an iteration, which all pools share."""

    number: int
    channels: dict[Edge, _Channel]
    trained: simpy.Event
    """Triggered when the new weights exist in the pool that produces them."""
    finish_times: dict[int, float] = field(default_factory=dict)
    """Time at which each pool finished its stages."""
    rendezvous: dict[int, _Rendezvous] = field(default_factory=dict)
    """Rendezvous of each group that runs on several pools."""


class _Simulation:
    """One simulation. Indices: ``p`` of a pool, ``g`` of a group, ``s`` of a stage."""

    def __init__(self, work: PlacementWork, scenario: Scenario, iterations: int, seed: int) -> None:
        self.work, self.scenario, self.iterations, self.seed = work, scenario, iterations, seed
        self.problem, self.placement = work.problem, work.placement
        self.stage_pools = work.stage_pools
        self.names = [stage.name for stage in self.problem.stages]
        self.env = simpy.Environment()
        self.trace = SimulationTrace(self.problem, self.placement)
        self.masks = [work.active_gpus(s) for s in range(len(self.names))]
        """For each stage: masks of the GPUs that it uses, by pool."""
        self.network = _network(self.env, work, scenario.network)
        self.decoding = self._decoding()
        self.repeat = self.env.event()
        """Triggered when the iteration must be repeated."""
        self.pools = [
            SimulatedPool(
                self.env, p, self.problem.kinds, gpus, scenario, seed, self.trace, self._end_attempt
            )
            for p, gpus in enumerate(self.placement.gpus)
        ]
        self.processes: list[simpy.Process] = []
        """Processes of the current iteration."""
        self.blocked_senders: dict[Edge, int] = {}
        """Number of senders that wait for room in the channel, by edge."""

    def run(self) -> SimulationTrace:
        main = self.env.process(self._main())
        try:
            self.env.run(until=main)
        except RuntimeError:
            # simpy: no event is left that could end the wait.
            if main.triggered or not any(self.blocked_senders.values()):
                raise
            raise PlanError(self._deadlock_message()) from None
        for pool in self.pools:
            self.trace.allocations += pool.close()
        return self.trace

    def _main(self) -> Process:
        yield self.env.all_of([self.env.process(pool.start()) for pool in self.pools])
        self.trace.iteration_starts.append(self.env.now)
        for i in range(self.iterations):
            repeats_before = self.trace.repeated_iterations
            while not (yield from self._attempt(i)):
                self.trace.repeated_iterations += 1
                if self.trace.repeated_iterations - repeats_before == MAX_REPEATS:
                    raise PlanError(
                        f"losses: iteration {i} was lost {MAX_REPEATS} times in a row and would "
                        "never end; lower losses.per_hour, or set losses.redo: micro-batch"
                    )
            self.trace.iteration_starts.append(self.env.now)

    def _attempt(self, i: int) -> Process:
        """Run one iteration; return False if it must be repeated after an interruption."""
        busy_before = [busy.copy() for busy in self.trace.gpu_busy]
        first_span = len(self.trace.spans)
        self.repeat, self.processes, self.blocked_senders = self.env.event(), [], {}
        state = _Iteration(
            i,
            {edge: self._channel(edge) for group in self.work.groups for edge in group.outputs},
            self.env.event(),
        )
        branches = [self._start_process(self._run_pool(p, state)) for p in range(len(self.pools))]
        if self.work.sync:
            branches.append(self._start_process(self._send_weights(state)))
        yield self.env.all_of(branches) | self.repeat
        if self.repeat.triggered:
            for process in self.processes:
                if process.is_alive:
                    process.interrupt()
            self.trace.gpu_busy = busy_before
            self.trace.mark_repeated(first_span)
            return False
        last = max(state.finish_times, key=lambda p: state.finish_times[p])
        last_stage = self.names[self.work.groups[self.work.pool_groups[last][-1]].stages[-1]]
        for p, finish_s in state.finish_times.items():
            self.trace.add_wait(p, last_stage, state.finish_times[last] - finish_s)
            self.trace.add_wait(p, "weights", self.env.now - state.finish_times[last])
        return True

    def _start_process(self, work: Process) -> simpy.Process:
        """Start a process that ends without an error when the iteration is repeated."""

        def run_until_repeat() -> Process:
            try:
                yield from work
            except simpy.Interrupt:
                return

        process = self.env.process(run_until_repeat())
        self.processes.append(process)
        return process

    def _end_attempt(self) -> None:
        """End the iteration after an interruption if the whole iteration must be repeated."""
        losses = self.scenario.losses
        if losses is not None and losses.redo == "iteration" and not self.repeat.triggered:
            self.repeat.succeed()

    def _run_pool(self, p: int, state: _Iteration) -> Process:
        for g in self.work.pool_groups[p]:
            group = self.work.groups[g]
            switch_s, name = self.work.switch_s(p, g), self.names[group.stages[0]]
            yield from self.pools[p].work(switch_s, name, state.number, activity="switch")
            if len(group.pools) == 1:
                yield from self._run_group(p, group, state)
            else:
                yield from self._run_together(p, g, state)
        state.finish_times[p] = self.env.now

    def _run_group(self, p: int, group: StageGroup, state: _Iteration) -> Process:
        """Run the stages of a group one after the other, chunk by chunk, in the same pools."""
        pool, i = self.pools[p], state.number
        partners = [self.pools[q] for q in group.pools if q != p]
        yield from self._get_whole_inputs(p, group, state)
        decoding = self.decoding.get(group.stages[0])
        if decoding:
            chunk_seconds, gpu_seconds = decoding.draw_iteration(
                random_generator(self.seed, "lengths", i), group.num_chunks
            )
            nominal_s, elapsed_s = chunk_seconds.sum(), 0.0
        for k in range(group.num_chunks):
            yield from self._get_next_chunk(p, group, state)
            for s in group.stages:
                seconds = group.shares[k] * self.work.speeds[s].seconds
                if decoding:
                    seconds = chunk_seconds[k]
                if s == group.stages[-1]:
                    seconds += group.overhead_s
                spent_s = yield from pool.work(seconds, self.names[s], i, k, other_pools=partners)
                if decoding:
                    elapsed_s += spent_s
                else:
                    self._add_busy(s, spent_s)
            yield from self._send_outputs(p, group, k, state)
        if decoding:
            busy_s = gpu_seconds if len(group.pools) == 1 else gpu_seconds.mean()
            for q, mask in self.masks[group.stages[0]].items():
                self.trace.gpu_busy[q][mask] += busy_s * (elapsed_s / nominal_s)
        self._trigger_sync(group, state)

    def _get_whole_inputs(self, p: int, group: StageGroup, state: _Iteration) -> Process:
        """Wait for all chunks of the inputs that the group needs as a whole."""
        for edge in group.inputs:
            if not self.problem.stages[edge[1]].streams:
                for _ in range(self.work.stage_chunks[edge[0]]):
                    yield from self._receive(p, edge, state)

    def _get_next_chunk(self, p: int, group: StageGroup, state: _Iteration) -> Process:
        """Wait for the next chunk of the inputs that the group streams."""
        for edge in group.inputs:
            if self.problem.stages[edge[1]].streams:
                yield from self._receive(p, edge, state)

    def _receive(self, p: int, edge: Edge, state: _Iteration) -> Process:
        """Wait for the next chunk of an edge, and make room in the channel."""
        start, channel = self.env.now, state.channels[edge]
        yield channel.arrived.get(1)
        if channel.room is not None:
            yield channel.room.put(1)
        self.trace.add_wait(p, self.names[edge[0]], self.env.now - start)

    def _send_outputs(self, p: int, group: StageGroup, chunk: int, state: _Iteration) -> Process:
        """Send a chunk to other pools, as soon as their channels have room."""
        for edge in group.outputs:
            start, channel = self.env.now, state.channels[edge]
            if channel.room is not None:
                self.blocked_senders[edge] = self.blocked_senders.get(edge, 0) + 1
                yield channel.room.get(1)
                self.blocked_senders[edge] -= 1
            self.trace.add_wait(p, f"room in {self.names[edge[1]]}", self.env.now - start)
            if self.network is None:
                channel.arrived.put(1)
            else:
                self._start_process(self._send(edge, chunk, state))

    def _trigger_sync(self, group: StageGroup, state: _Iteration) -> None:
        """Trigger the transfer of the weights if the group has trained them."""
        if self.work.sync and self.work.sync[0] in group.stages:
            state.trained.succeed()

    def _add_busy(self, s: int, seconds: float) -> None:
        for pool, mask in self.masks[s].items():
            self.trace.gpu_busy[pool][mask] += seconds

    def _channel(self, edge: Edge) -> _Channel:
        streams = self.problem.stages[edge[1]].streams
        return _Channel(self.env, self.scenario.capacity if streams else None)

    def _send(self, edge: Edge, chunk: int, state: _Iteration) -> Process:
        assert self.network is not None
        assert self.scenario.network is not None
        source, target = (self.names[s] for s in edge)
        payload = self.scenario.network.payload.get(source, {}).get(target, 0.0)
        start = self.env.now
        yield from self._transfer(edge, payload / self.work.stage_chunks[edge[0]])
        self.trace.spans.append(
            TraceSpan(
                self.stage_pools[edge[1]][0],
                source,
                state.number,
                chunk,
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
        pool = self.pools[self.stage_pools[source][0]]
        pool.add_span(self.names[source], state.number, 0, "sync", start, self.env.now)

    def _transfer(self, edge: Edge, size: float) -> Process:
        assert self.network is not None
        links = (("out", self.stage_pools[edge[0]]), ("in", self.stage_pools[edge[1]]), "fabric")
        yield from self.network.send(size, links)

    def _run_together(self, p: int, g: int, state: _Iteration) -> Process:
        """Run a group on several pools: the pool that arrives last runs the group, the others wait
        until its end."""
        group = self.work.groups[g]
        rendezvous = state.rendezvous.setdefault(g, _Rendezvous(self.env.event(), self.env.event()))
        rendezvous.joined += 1
        if rendezvous.joined < len(group.pools):
            wait_start = self.env.now
            yield rendezvous.begin
            partners = [self.names[s] for s in group.stages if p not in self.stage_pools[s]]
            self.trace.add_wait(p, (partners or ["the others"])[0], self.env.now - wait_start)
            yield rendezvous.end
            return
        rendezvous.begin.succeed()
        if len({self.stage_pools[s] for s in group.stages}) == 1:
            yield from self._run_group(p, group, state)
            rendezvous.end.succeed()
            return
        yield from self._get_whole_inputs(p, group, state)
        for k in range(group.num_chunks):
            yield from self._get_next_chunk(p, group, state)
            start = self.env.now
            halves = [self._run_half(group, state) for _ in range(2)]
            yield self.env.all_of([self._start_process(half) for half in halves])
            if group.overhead_s:
                overheads = [self._pay_overhead(q, group, state) for q in group.pools]
                yield self.env.all_of([self._start_process(overhead) for overhead in overheads])
            for q in group.pools:
                stage = next(s for s in group.stages if q in self.stage_pools[s])
                self.pools[q].add_span(
                    self.names[stage], state.number, k, "work", start, self.env.now
                )
            yield from self._send_outputs(p, group, k, state)
        self._trigger_sync(group, state)
        rendezvous.end.succeed()

    def _run_half(self, group: StageGroup, state: _Iteration) -> Process:
        """Run half of a chunk through all steps."""
        steps = self.problem.cycle_steps
        # Keep the lock of a pool as long as the next stage is in the same pool.
        by_pools = itertools.groupby(group.stages * steps, lambda s: self.stage_pools[s])
        for pools, members in by_pools:
            pool, *partners = (self.pools[p] for p in pools)
            with pool.lock.request() as request:
                yield request
                for s in members:
                    seconds = self.work.speeds[s].seconds / (2 * steps * group.num_chunks)
                    duration_s = yield from pool.work(
                        seconds, self.names[s], state.number, activity=None, other_pools=partners
                    )
                    self._add_busy(s, duration_s)

    def _pay_overhead(self, p: int, group: StageGroup, state: _Iteration) -> Process:
        name = self.names[group.stages[0]]
        yield from self.pools[p].work(group.overhead_s, name, state.number, activity=None)

    def _deadlock_message(self) -> str:
        full = [edge for edge, senders in self.blocked_senders.items() if senders]
        edges = ", ".join(f"{self.names[a]} to {self.names[b]}" for a, b in full)
        return (
            f"channels of {self.scenario.capacity} chunks are too small for this placement: "
            f"pools wait for each other for ever ({edges} is full); allow "
            f"{self.placement.num_chunks}, or separate a stage from the stage after the next"
        )

    def _decoding(self) -> dict[int, DecodingStage]:
        """Return the stage whose samples differ in length, by its index; {} if there is none."""
        lengths = self.scenario.lengths
        if lengths is None:
            return {}
        s = self.names.index(lengths.stage)
        if self.problem.stages[s].cycle is not None:
            raise PlanError(f"lengths.stage: {lengths.stage!r} is part of a cycle, which has steps")
        speed = self.work.speeds[s]
        workers = _decoding_workers(lengths, speed, [kind.name for kind in self.problem.kinds])
        # Only complete workers work; the remaining GPUs are idle.
        self.masks[s] = self.work.active_gpus(s, [w.workers * w.gpus for w in workers])
        return {s: DecodingStage(lengths, workers, speed.seconds, self.seed)}


def _network(
    env: simpy.Environment, work: PlacementWork, network: NetworkModel | None
) -> SharedNetwork | None:
    """Return a network whose links are out of each pool, into each pool, and the fabric."""
    if network is None:
        return None
    bandwidths = network.gpu_bytes_per_s
    capacities: dict[Any, float] = {}
    for s, pools in work.stage_pools.items():
        bandwidth = 0.0
        for n, kind in zip(work.placement.gpus_of(s), work.problem.kinds, strict=True):
            if n and kind.name not in bandwidths:
                raise PlanError(f"network.gpu_bytes_per_s: missing kind {kind.name!r}")
            bandwidth += n * bandwidths.get(kind.name, 0.0)
        capacities["out", pools] = capacities["in", pools] = bandwidth
    if network.fabric_bytes_per_s is not None:
        capacities["fabric"] = network.fabric_bytes_per_s
    return SharedNetwork(env, capacities, network.latency_s)


def _decoding_workers(
    lengths: LengthDistribution, speed: StageSpeed, kinds: list[str]
) -> list[DecodingWorkers]:
    """Return the workers of each kind. Samples are in proportion to the kind's share of work."""
    all_workers, remaining_samples, remaining_share = [], lengths.samples, 1.0
    for kind, share, used in zip(kinds, speed.shares, speed.used, strict=True):
        replica = lengths.replicas.get(kind, DecodingReplica())
        num_workers = int(used) // replica.gpus
        if used and not num_workers:
            raise PlanError(
                f"lengths.replicas.{kind}: a worker has {replica.gpus} GPUs, but the pool {used}"
            )
        samples = (
            round(remaining_samples * share / remaining_share) if remaining_share > 1e-12 else 0
        )
        remaining_samples, remaining_share = remaining_samples - samples, remaining_share - share
        all_workers.append(
            DecodingWorkers(num_workers, replica.gpus, replica.slots, replica.fixed_share, samples)
        )
    return all_workers
