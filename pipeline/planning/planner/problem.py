"""The placement problem: stages with measured speeds, kinds of GPUs, objectives, and its YAML file.

A placement divides the GPU stages over *pools*. The stages of a pool take turns on all its GPUs
(collocated); pools run at the same time and pass micro-batches to each other (disaggregated). One
pool is the purely collocated plan, a pool for each stage the purely disaggregated one, all others
are hybrid. A pool may contain GPUs of several kinds; each kind then processes a share of the
samples in proportion to its speed.

Pools may overlap: a stage in several pools works on the GPUs of all of them. Such pools are one job
(``pools[].stage_ranks`` of a plan), whose other stages run at the same time before it.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.plan import PoolPlan
from rlinf.config import Section, validate
from rlinf.errors import ConfigError, PlanError, did_you_mean
from rlinf.yaml_file import read_yaml

PoolStages = tuple[tuple[int, ...], ...]
"""Stage numbers of each pool."""


@dataclass(frozen=True)
class GpuKind:
    """The equal GPUs of one partition."""

    name: str
    gpus: int
    price: float = 1.0
    """Cost of one GPU for one hour, in any currency."""
    wait_s: float = 0.0
    """Expected wait in the queue before a job of this kind starts."""
    interruptions_per_hour: float = 0.0
    """Expected preemptions and node failures of a pool, per hour."""
    per_node: int = 0
    """GPUs of a node, if jobs must use as many on each of their nodes; 0: any number is allowed."""
    waits_s: tuple[tuple[int, float], ...] = ()
    """Numbers of nodes and the waits of such jobs, where they differ from ``wait_s``."""
    job_gpus: int = 0
    """Maximum GPUs of a job; 0: no limit."""

    def queue_wait_s(self, gpus: np.ndarray) -> np.ndarray:
        """Return the wait of jobs of this many GPUs, float64 like ``gpus``; 0 without GPUs. The
        nearest measured number of nodes counts, and more nodes never wait less."""
        if not self.waits_s:
            return np.where(gpus > 0, self.wait_s, 0.0)
        nodes, waits = np.array(sorted(self.waits_s)).T
        wanted_nodes = np.maximum(1, -(-np.asarray(gpus) // max(1, self.per_node)))
        near = np.abs(np.log(nodes[:, None] / wanted_nodes.reshape(1, -1))).argmin(0)
        known = np.maximum.accumulate(waits)[near].reshape(np.shape(gpus))
        return np.where(gpus > 0, known, 0.0)

    def round_to_job_size(self, gpus: np.ndarray) -> np.ndarray:
        """Return how many of these GPUs a job can have."""
        if self.job_gpus:
            gpus = np.minimum(gpus, self.job_gpus)
        if not self.per_node:
            return gpus
        return np.where(gpus <= self.per_node, gpus, gpus // self.per_node * self.per_node)


@dataclass(frozen=True)
class PlacementStage:
    """A stage with its measured speed."""

    name: str
    rates: Mapping[str, np.ndarray]
    """Iterations per second by kind on 0, 1, ... GPUs, float64 ``[gpus + 1]``; 0 if that many
    cannot run the stage (memory, divisibility). A missing kind cannot run it at all."""
    after: tuple[str, ...] = ()
    """Stages whose output this stage consumes."""
    streams: bool = True
    """True if the stage can start on a part of its input."""
    divisible: bool = True
    """True if the speeds of different GPUs in the pool add up; otherwise the fastest kind does
    all."""
    chunk_s: float = 0.0
    """Overhead of each micro-batch passed between pools, seconds."""
    lead: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Share of the stage's time after which its first micro-batch is ready, by number of
    micro-batches and of GPUs, for a stage without inputs that has its pool to itself; ``1 / m`` by
    default. Numbers of GPUs in between use the next lower entry. The other micro-batches follow
    evenly."""
    again: float = 0.0
    """For a stage without inputs that shares its pool: it produces micro-batches one after another,
    and each after the first repeats this share of its time."""
    switch_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds to load and offload the stage by kind, if it shares a pool; 0 if all stages fit at
    once."""
    cycle: str | None = None
    """Name of a cycle (simulate, generate), whose adjacent stages work in lockstep."""
    beside: bool = False
    """True if it may use some GPUs of its job while other stages use the rest."""

    def first_chunk_share(self, chunks: int | np.ndarray, gpus: np.ndarray) -> np.ndarray:
        """Return the share of the stage's time after which the first of ``chunks`` micro-batches is
        ready if it has its pool of ``gpus`` GPUs to itself; float64 like ``gpus``."""
        found = np.broadcast_to(1.0 / np.asarray(chunks), np.shape(gpus))
        for parts, shares in self.lead.items():
            numbers = sorted(shares)
            first = np.searchsorted(numbers, gpus, side="right") - 1
            known = np.array([shares[n] for n in numbers])[np.maximum(first, 0)]
            found = np.where(np.equal(chunks, parts) & (first >= 0), known, found)
        return found


@dataclass(frozen=True)
class PlacementProblem:
    """Stages in topological order, kinds of GPUs, and the allowed choices."""

    stages: Sequence[PlacementStage]
    kinds: Sequence[GpuKind]
    chunks: Sequence[int] = (1, 2, 4, 8, 16, 32)
    """Allowed numbers of micro-batches of an iteration."""
    sync: tuple[str, str] | None = ("train", "rollout")
    """Source and target stage of the weights."""
    sync_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Seconds to transfer new weights from a pool of one kind to a pool of another; 0 within a
    pool."""
    mixing: float = 1.0
    """Share of the summed speed that different GPUs keep when they work on one stage."""
    cycle_steps: int = 1
    """Steps of a cycle per iteration."""
    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The only kinds that a stage may use (pins), by stage."""
    mixes: frozenset[str] | None = None
    """Stages whose pools need not be one job if they contain no other stage: such a pool may have
    several kinds and any number of GPUs. None: all stages may share any pool."""
    shared: Sequence[tuple[tuple[str, ...], int]] = ()
    """Kinds that share GPUs or a limit, and how many GPUs they have together."""
    most_jobs: Sequence[tuple[tuple[str, ...], int]] = ()
    """Kinds whose jobs a limit counts together, and how many jobs may run at once."""

    def __post_init__(self) -> None:
        if not 0 < self.mixing <= 1:
            raise PlanError(f"mixing: {self.mixing} is not above 0 and at most 1")
        names = [kind.name for kind in self.kinds]
        stages = [stage.name for stage in self.stages]
        self._numbers()
        for where, given, known, what in (
            *((f"stage {s.name!r}: switch_s", s.switch_s, names, "kind") for s in self.stages),
            *((f"stage {s.name!r}: after", s.after, stages, "stage") for s in self.stages),
            *((f"sync_s.{a}", (a, b), names, "kind") for a, b in self.sync_s),
            *(
                (f"pin {s}={'+'.join(kinds)}", kinds, names, "kind")
                for s, kinds in self.allowed.items()
            ),
            *(("shared", together, names, "kind") for together, _ in self.shared),
            *(("most_jobs", together, names, "kind") for together, _ in self.most_jobs),
            ("pin", self.allowed, stages, "stage"),
            ("mixes", self.mixes or (), stages, "stage"),
        ):
            for name in given:
                if name not in known:
                    raise PlanError(f"{where}: no such {what} {name!r}{did_you_mean(name, known)}")
        seen: set[str] = set()
        for stage in self.stages:
            unknown = set(stage.after) - seen
            if unknown:
                raise PlanError(
                    f"stage {stage.name!r}: takes the output of {sorted(unknown)[0]!r}, which "
                    "does not come before it"
                )
            seen.add(stage.name)
            if (stage.after or stage.cycle) and (stage.lead or stage.again):
                raise PlanError(
                    f"stage {stage.name!r}: lead and again are of stages that take nothing, and "
                    "are in no cycle"
                )
            for parts, shares in stage.lead.items():
                for gpus, share in shares.items():
                    if not 1 - 1e-9 <= parts * share <= parts:
                        raise PlanError(
                            f"stage {stage.name!r}: lead.{parts}.{gpus}: {share} is not from "
                            f"1/{parts} to 1"
                        )
            for kind, rates in stage.rates.items():
                where = f"stage {stage.name!r} on {kind!r}"
                if kind not in names:
                    raise PlanError(f"{where}: no such kind of GPU{did_you_mean(kind, names)}")
                if not np.all(np.isfinite(rates)) or np.any(rates < 0):
                    raise PlanError(f"{where}: a measured speed is negative or not a number")
                if len(rates) != self.kinds[names.index(kind)].gpus + 1 or rates[0]:
                    raise PlanError(f"{where}: speeds must be given for 0 (none) to all GPUs")

    def _numbers(self) -> None:
        """Check that every number is finite and not too small.

        Raises:
            PlanError: a number is negative or not finite; names it.
        """
        numbers: dict[str, float] = {"cycle_steps": self.cycle_steps}
        numbers |= {f"micro_batches[{i}]": n for i, n in enumerate(self.chunks)}
        least = dict.fromkeys(numbers, 1)
        for kind in self.kinds:
            own = {k: v for k, v in vars(kind).items() if k not in ("name", "waits_s")}
            own |= {f"waits_s.{nodes}": wait for nodes, wait in kind.waits_s}
            numbers |= {f"kinds.{kind.name}.{k}": v for k, v in own.items()}
        for stage in self.stages:
            numbers[f"stages.{stage.name}.chunk_s"] = stage.chunk_s
            numbers[f"stages.{stage.name}.again"] = stage.again
            each = stage.switch_s.items()
            numbers |= {f"stages.{stage.name}.switch_s.{name}": s for name, s in each}
        numbers |= {f"sync_s.{a}.{b}": s for (a, b), s in self.sync_s.items()}
        for key, value in numbers.items():
            if not (math.isfinite(value) and value >= least.get(key, 0)):
                raise PlanError(
                    f"{key}: {value} is not a finite number of at least {least.get(key, 0)}"
                )

    def may_mix(self, pool: Sequence[int]) -> bool:
        """Return True if a pool of these stages may have several kinds and any number of GPUs."""
        return self.mixes is None or self.mixes >= {self.stages[s].name for s in pool}

    def is_single_job(self, gpus: np.ndarray) -> np.ndarray:
        """Return where GPUs of each kind ``[kinds, ...]`` can form one job: of one kind, on whole
        nodes, within the limit of a job."""
        whole = [kind.round_to_job_size(n) == n for kind, n in zip(self.kinds, gpus, strict=True)]
        return ((gpus > 0).sum(0) <= 1) & np.all(whole, axis=0)

    def exceeds_shared_gpus(self, allocated: np.ndarray) -> np.ndarray:
        """Return where GPUs of each kind ``[kinds, ...]`` exceed the GPUs that kinds share."""
        found = np.zeros(allocated.shape[1:], dtype=bool)
        for names, most in self.shared:
            own = [k for k, kind in enumerate(self.kinds) if kind.name in names]
            found |= allocated[own].sum(0) > most
        return found

    def exceeds_job_limits(self, pools: PoolStages, allocated: Sequence[np.ndarray]) -> np.ndarray:
        """Return where the jobs of pools with GPUs ``[kinds, n]`` exceed the number that may run at
        once; a pool that is not one job has a job for each GPU."""
        found = np.zeros(allocated[0].shape[1], dtype=bool)
        for names, most in self.most_jobs:
            own, count = [k for k, kind in enumerate(self.kinds) if kind.name in names], found * 0
            for job in pools_of_jobs(pools):
                gpus = np.sum([allocated[p] for p in job], axis=0)
                mine = gpus[own].sum(0)
                count = count + np.where(self.is_single_job(gpus), mine > 0, mine)
            found |= count > most
        return found

    def rate_table(self, stage: PlacementStage, kind: int) -> np.ndarray:
        """Return the rates ``[gpus + 1]`` of a stage on a kind, with pins applied.

        A stage works on all GPUs of its pool, so a number of GPUs on which it cannot run, or is
        slower than on fewer, is not improved.
        """
        entry = self.kinds[kind]
        allowed = self.allowed.get(stage.name)
        rates = stage.rates.get(entry.name)
        if rates is None or (allowed is not None and entry.name not in allowed):
            return np.zeros(entry.gpus + 1)
        return np.asarray(rates, dtype=np.float64)


@dataclass(frozen=True)
class Placement:
    """A placement: the pools of each stage, the GPUs of each pool, and the number of micro-
    batches."""

    pools: PoolStages
    """Stage numbers of each pool, ascending; pools in order of their first stage."""
    gpus: tuple[tuple[int, ...], ...]
    """GPUs of each kind, by pool."""
    num_chunks: int
    """Number of micro-batches of an iteration."""

    @property
    def mode(self) -> str:
        """``collocated``, ``disaggregated`` or ``hybrid``."""
        if len(self.pools) == 1:
            return "collocated"
        alone = all(len(pool) == 1 for pool in self.pools)
        return "disaggregated" if alone else "hybrid"

    @property
    def jobs(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the pools that form one job each."""
        return pools_of_jobs(self.pools)

    def stages_of(self, job: Sequence[int]) -> tuple[int, ...]:
        """Return the stage numbers of a job, ascending."""
        return tuple(sorted({s for p in job for s in self.pools[p]}))

    def gpus_of(self, stage: int) -> tuple[int, ...]:
        """Return the GPUs of each kind that a stage works on."""
        allocated = [
            gpus for pool, gpus in zip(self.pools, self.gpus, strict=True) if stage in pool
        ]
        return tuple(map(sum, zip(*allocated, strict=True)))


@functools.lru_cache(4096)
def pools_of_stages(pools: PoolStages) -> Mapping[int, tuple[int, ...]]:
    """Return the numbers of the pools that each stage works on, by stage."""
    stages = sorted({s for pool in pools for s in pool})
    return {s: tuple(p for p, pool in enumerate(pools) if s in pool) for s in stages}


@functools.lru_cache(4096)
def pools_of_jobs(pools: PoolStages) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the pools that form one job each, because they share a stage."""
    found: list[tuple[int, ...]] = []
    for home in sorted(set(pools_of_stages(pools).values()), key=len, reverse=True):
        if not any(set(home) & set(other) for other in found):
            found.append(home)
    return tuple(sorted(found))


class KindSection(Section):
    """A :class:`GpuKind` in a problem file."""

    gpus: PositiveInt
    price: float = Field(default=1.0, ge=0)
    wait_s: float = Field(default=0.0, ge=0)
    interruptions_per_hour: float = Field(default=0.0, ge=0)
    per_node: int = Field(default=0, ge=0)
    waits_s: dict[PositiveInt, Annotated[float, Field(ge=0)]] = {}
    """Waits by number of nodes; ``wait_s`` by default."""
    job_gpus: int = Field(default=0, ge=0)

    def to_kind(self, name: str) -> GpuKind:
        """Return the kind as the planner's object."""
        values = dict(self)
        return GpuKind(name, **values | {"waits_s": tuple(self.waits_s.items())})


class StageSection(Section):
    """A :class:`PlacementStage` with durations instead of rates."""

    seconds: dict[str, dict[PositiveInt, PositiveFloat | None]]
    """Seconds of one iteration by kind and number of GPUs; null: that many cannot run it. Missing
    numbers use the next lower entry; below the lowest entry the stage cannot run."""
    after: tuple[str, ...] = ()
    streams: bool = True
    divisible: bool = True
    chunk_s: float = Field(default=0.0, ge=0)
    lead: dict[PositiveInt, dict[PositiveInt, float]] = {}
    again: float = Field(default=0.0, ge=0)
    switch_s: dict[str, float] = {}
    cycle: str | None = None
    beside: bool = False


class SharedGpusSection(Section):
    """Kinds that share GPUs or a limit."""

    kinds: tuple[str, ...] = Field(min_length=2)
    gpus: PositiveInt
    """GPUs of all these kinds together."""


class JobLimitSection(Section):
    """Kinds whose jobs a limit counts together."""

    kinds: tuple[str, ...] = Field(min_length=1)
    jobs: PositiveInt
    """Jobs that may run at once."""


class ProblemFile(Section):
    """A problem file; ``pools`` is an optional placement."""

    kinds: dict[str, KindSection] = Field(min_length=1)
    stages: dict[str, StageSection] = Field(min_length=1)
    """Stages in topological order."""
    micro_batches: tuple[PositiveInt, ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1)
    """Allowed numbers of micro-batches."""
    sync: tuple[str, str] | None = ("train", "rollout")
    sync_s: dict[str, dict[str, float]] = {}
    """Seconds by kind of the source, then of the target."""
    mixing: float = 1.0
    cycle_steps: PositiveInt = 1
    allowed: dict[str, frozenset[str]] = {}
    mixes: frozenset[str] | None = None
    shared: tuple[SharedGpusSection, ...] = ()
    most_jobs: tuple[JobLimitSection, ...] = ()
    pools: tuple[PoolPlan, ...] = ()
    num_chunks: PositiveInt = 1

    def to_problem(self) -> PlacementProblem:
        """Return the problem of the file.

        Raises:
            PlanError: parts of the file contradict each other.
        """
        return PlacementProblem(
            [self._stage(name, section) for name, section in self.stages.items()],
            [section.to_kind(name) for name, section in self.kinds.items()],
            chunks=self.micro_batches,
            sync=self.sync,
            sync_s={(a, b): s for a, row in self.sync_s.items() for b, s in row.items()},
            mixing=self.mixing,
            cycle_steps=self.cycle_steps,
            allowed=self.allowed,
            mixes=self.mixes,
            shared=[(section.kinds, section.gpus) for section in self.shared],
            most_jobs=[(section.kinds, section.jobs) for section in self.most_jobs],
        )

    @model_validator(mode="after")
    def _sync_is_known(self) -> ProblemFile:
        for end in self.sync or ():
            if end not in self.stages and "sync" in self.model_fields_set:
                raise ValueError(f"sync: no stage {end!r}{did_you_mean(end, self.stages)}")
        return self

    def _stage(self, name: str, section: StageSection) -> PlacementStage:
        rates = {}
        for kind, seconds in section.seconds.items():
            if kind not in self.kinds:
                raise PlanError(
                    f"stages.{name}.seconds: no kind {kind!r}{did_you_mean(kind, self.kinds)}"
                )
            most = self.kinds[kind].gpus
            if max(seconds, default=0) > most:
                raise PlanError(
                    f"stages.{name}.seconds.{kind}: {max(seconds)} GPUs, but there are {most}"
                )
            rates[kind] = np.zeros(most + 1)
            for gpus, value in sorted(seconds.items()):
                rates[kind][gpus:] = 1 / value if value else 0.0
        rest = section.model_dump(exclude={"seconds"})
        return PlacementStage(name, rates, **rest)


def dump_problem(
    problem: PlacementProblem, pools: Sequence[PoolPlan] = (), num_chunks: int = 1
) -> str:
    """Return a problem as text that :func:`read_problem` reads, with a placement if pools are
    passed."""
    stages = {}
    for s, stage in enumerate(problem.stages):
        seconds = {}
        for k, kind in enumerate(problem.kinds):
            # The table has pins applied; missing numbers use the next lower entry.
            rates = problem.rate_table(problem.stages[s], k)
            steps = np.flatnonzero(np.diff(rates, prepend=0.0))
            if len(steps):
                seconds[kind.name] = {
                    int(n): float(1 / rates[n]) if rates[n] > 0 else None for n in steps
                }
        stages[stage.name] = {
            "seconds": seconds,
            "after": list(stage.after),
            "streams": stage.streams,
            "divisible": stage.divisible,
            "chunk_s": stage.chunk_s,
            "lead": {parts: dict(shares) for parts, shares in stage.lead.items()},
            "again": stage.again,
            "switch_s": dict(stage.switch_s),
            "cycle": stage.cycle,
            "beside": stage.beside,
        }
    sync_s: dict[str, dict[str, float]] = {}
    for (source, target), value in problem.sync_s.items():
        sync_s.setdefault(source, {})[target] = value
    values = {
        "kinds": {kind.name: _dumped(kind) for kind in problem.kinds},
        "stages": stages,
        "micro_batches": list(problem.chunks),
        "sync": [*problem.sync] if problem.sync and set(problem.sync) <= stages.keys() else None,
        "sync_s": sync_s,
        "mixing": problem.mixing,
        "cycle_steps": problem.cycle_steps,
        "mixes": None if problem.mixes is None else sorted(problem.mixes),
        "pools": [pool.model_dump(mode="json") for pool in pools],
        "num_chunks": num_chunks,
    }
    if problem.shared:
        values["shared"] = [{"kinds": [*names], "gpus": most} for names, most in problem.shared]
    if problem.most_jobs:
        values["most_jobs"] = [{"kinds": [*names], "jobs": n} for names, n in problem.most_jobs]
    return yaml.safe_dump(values, sort_keys=False)


def _dumped(kind: GpuKind) -> dict[str, Any]:
    values = {k: v for k, v in vars(kind).items() if k not in ("name", "waits_s")}
    return values | ({"waits_s": dict(kind.waits_s)} if kind.waits_s else {})


def read_problem(path: Path) -> tuple[PlacementProblem, Placement | None]:
    """Read a problem and, if the file has pools, a placement.

    Raises:
        PlanError: the file is missing, not YAML, or invalid; names the key.
    """
    values = read_yaml(path, "problem", PlanError)
    if not isinstance(values, Mapping):
        raise PlanError(f"{path}: expected a mapping with 'kinds' and 'stages'")
    try:
        file = validate(ProblemFile, values, str(path))
        problem = file.to_problem()
        return problem, placement_from_pools(
            problem, file.pools, file.num_chunks
        ) if file.pools else None
    except ConfigError as error:
        raise PlanError(str(error)) from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def placement_from_pools(
    problem: PlacementProblem,
    pools: Sequence[PoolPlan],
    num_chunks: int,
    seldom: Collection[str] = (),
) -> Placement:
    """Return the placement of a plan's pools.

    Args:
        seldom: stages that are not part of every iteration, such as evaluations; they are ignored,
            as is a pool of only these.

    Raises:
        PlanError: an unknown stage or kind, a stage in no pool or in two, or a division of a pool's
            processes between stages that cannot be predicted.
    """
    stages = [stage.name for stage in problem.stages]
    kinds = [kind.name for kind in problem.kinds]
    placed = [stages.index(name) for pool in pools for name in pool.stages if name in stages]
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for i, pool in enumerate(pools):
        own = tuple(name for name in pool.stages if name not in seldom)
        if not own:
            continue
        for known, names, what in ((stages, own, "stage"), (kinds, pool.devices, "kind")):
            wrong: Any = next((name for name in names if name not in known), None)
            if wrong is not None:
                raise PlanError(f"pools[{i}]: no {what} {wrong!r}{did_you_mean(wrong, known)}")
        found += _parts(problem, pool, f"pools[{i}]")
    for s, name in enumerate(stages):
        if placed.count(s) != 1:
            raise PlanError(f"pools: stage {name!r} must be in one pool (is in {placed.count(s)})")
    found.sort()
    return Placement(tuple(own for own, _ in found), tuple(gpus for _, gpus in found), num_chunks)


def _parts(
    problem: PlacementProblem, pool: PoolPlan, where: str
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return stages and GPUs of a pool, or of each part if stages use only some of its processes.

    Raises:
        PlanError: parts overlap, or a stage on all processes comes before one on some of them.
    """
    numbers = {stage.name: s for s, stage in enumerate(problem.stages) if stage.name in pool.stages}
    kinds = [kind.name for kind in problem.kinds]
    # Process numbers continue from one kind to the next.
    kind_of = [kinds.index(kind) for kind, count in pool.devices.items() for _ in range(count)]
    every = tuple(range(len(kind_of)))
    ranks = {s: pool.stage_ranks.get(name, every) for name, s in numbers.items()}
    whole = [s for s, own in ranks.items() if own == every]
    sides = sorted({own for own in ranks.values() if own != every})
    for a, b in itertools.combinations(sides, 2):
        if set(a) & set(b):
            raise PlanError(
                f"{where}.stage_ranks: {list(a)} and {list(b)} have some processes in common; what "
                "this brings is not predicted, give stages the same ones or others"
            )
    for name, s in numbers.items():
        if ranks[s] != every and whole and s > min(whole):
            raise PlanError(
                f"{where}.stage_ranks.{name}: {problem.stages[min(whole)].name} has all processes "
                "before it; what this brings is not predicted"
            )
    if not sides:
        return [
            (tuple(sorted(numbers.values())), tuple(pool.devices.get(kind, 0) for kind in kinds))
        ]
    idle = tuple(sorted(set(every) - {rank for own in sides for rank in own}))
    return [
        (
            tuple(sorted(s for s, has in ranks.items() if has in (own, every))),
            tuple(sum(kind_of[rank] == k for rank in own) for k in range(len(kinds))),
        )
        for own in (*sides, *([idle] if idle and whole else []))
    ]


Array = np.ndarray


class Objective(ABC):
    """A cost that grows with the time of an iteration and never falls with the number of GPUs."""

    unit = "s"

    @abstractmethod
    def cost(self, problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]) -> Array:
        """Return the costs ``[n]``.

        Args:
            problem: the kinds with their prices, waits and interruptions.
            total_s: seconds of an iteration ``[n]``.
            gpus: allocated GPUs by pool, int ``[kinds, n]``.
        """

    @abstractmethod
    def job_cost(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        """Return the cost that a stage adds which is its own job."""

    @abstractmethod
    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        """Return a lower bound of the cost if an iteration takes at least ``total_s`` seconds."""


@dataclass(frozen=True)
class IterationTime(Objective):
    """The seconds of one iteration."""

    def cost(self, problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]) -> Array:
        return total_s

    def job_cost(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        return seconds

    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        return total_s


@dataclass(frozen=True)
class MonetaryCost(Objective):
    """The price of one iteration: all allocated GPUs for its whole duration.

    With all prices 1 these are GPU-hours.
    """

    unit = "price"

    def cost(self, problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]) -> Array:
        prices = np.array([kind.price for kind in problem.kinds])
        return np.asarray(total_s * sum(prices @ pool for pool in gpus) / 3600)

    def job_cost(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        return seconds * price_per_hour / 3600

    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        """Return the cost with each stage at its cheapest: a kind at its best rate per GPU."""
        whole = 0.0
        for stage in problem.stages:
            each = [np.inf]
            for k, kind in enumerate(problem.kinds):
                rates = problem.rate_table(stage, k)
                best = float(np.max(rates[1:] / np.arange(1, len(rates)), initial=0.0))
                if best > 0:
                    each.append(kind.price / best)
            whole += min(each)
        return whole / 3600


@dataclass(frozen=True)
class TimeToFinish(Objective):
    """The seconds until all iterations are done, with queue waits and expected interruptions.

    The run starts when its slowest pool has started. An interrupted pool returns after the wait of
    its kind, and half an iteration is repeated on average. Waits are those of as many nodes as the
    pool uses of the kind.
    """

    iterations: int

    def cost(self, problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]) -> Array:
        start = np.max([np.max(_waits(problem, pool), axis=0) for pool in gpus], axis=0)
        lost = interruption_overhead(problem, total_s, gpus)
        return np.asarray(start + self.iterations * total_s * (1 + lost))

    def job_cost(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        """Return the cost of a job that waits, and waits again when it is interrupted, with half of
        its work lost on average."""
        lost = losses_per_hour / 3600 * seconds * (wait_s + seconds / 2)
        return self.iterations * (wait_s + seconds + lost)

    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        return self.iterations * total_s


def interruption_overhead(
    problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]
) -> Array:
    """Return the expected seconds lost to preemption and failures per second of work ``[n]``.

    An interrupted pool returns after the wait of its kind, and half an iteration is repeated on
    average. Arguments are those of :meth:`Objective.cost`.
    """
    losses = np.array([kind.interruptions_per_hour for kind in problem.kinds])[:, None] / 3600
    each = [losses * (_waits(problem, pool) + total_s / 2) * (pool > 0) for pool in gpus]
    return np.asarray(sum(pool.sum(0) for pool in each))


def _waits(problem: PlacementProblem, pool: Array) -> Array:
    """Return the wait for this many GPUs of each kind, ``[kinds, n]``."""
    return np.stack([kind.queue_wait_s(n) for kind, n in zip(problem.kinds, pool, strict=True)])
