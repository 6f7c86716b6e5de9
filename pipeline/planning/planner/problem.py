"""What the planner is asked: stages with measured speeds, kinds of GPUs, and what links them.

A placement divides the GPU stages over *pools*. The stages of a pool take turns on all its GPUs
(collocated); pools run side by side and pass on micro-batches as they are done (disaggregated).
One pool is the purely collocated plan, a pool for each stage the purely disaggregated one, all
else hybrid. A pool may hold GPUs of several kinds; each then takes a share of the samples in
proportion to its speed.

Pools may overlap: a stage that is in several works on the GPUs of all of them together. Such pools
are one job (``pools[].ranks`` of a plan), whose other stages run side by side before.
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
    """Like GPUs: those of one partition that do not differ."""

    name: str
    gpus: int
    price: float = 1.0
    """Cost of one GPU for one hour, in any currency."""
    wait_s: float = 0.0
    """Expected wait in the queue before a job of this kind starts."""
    interruptions_per_hour: float = 0.0
    """Expected preemptions and node failures of a pool, per hour."""
    per_node: int = 0
    """GPUs of a node, where jobs have as many on each of their nodes; 0: any number is fine."""
    waits_s: tuple[tuple[int, float], ...] = ()
    """Numbers of nodes and the waits of jobs of so many, where those differ from ``wait_s``."""
    job_gpus: int = 0
    """GPUs of a job, at most; 0: all there are."""

    def queue_wait_s(self, gpus: np.ndarray) -> np.ndarray:
        """The wait of jobs of so many GPUs, float64 like ``gpus``; 0 of none. What is known of the
        nearest number of nodes counts, and more nodes never wait less."""
        if not self.waits_s:
            return np.where(gpus > 0, self.wait_s, 0.0)
        nodes, waits = np.array(sorted(self.waits_s)).T
        wanted_nodes = np.maximum(1, -(-np.asarray(gpus) // max(1, self.per_node)))
        near = np.abs(np.log(nodes[:, None] / wanted_nodes.reshape(1, -1))).argmin(0)
        known = np.maximum.accumulate(waits)[near].reshape(np.shape(gpus))
        return np.where(gpus > 0, known, 0.0)

    def round_to_job_size(self, gpus: np.ndarray) -> np.ndarray:
        """How many of so many GPUs a job can have."""
        if self.job_gpus:
            gpus = np.minimum(gpus, self.job_gpus)
        if not self.per_node:
            return gpus
        return np.where(gpus <= self.per_node, gpus, gpus // self.per_node * self.per_node)


@dataclass(frozen=True)
class PlacementStage:
    """One stage and its measured speed."""

    name: str
    rates: Mapping[str, np.ndarray]
    """By kind: iterations per second on 0, 1, ... GPUs, float64 ``[gpus + 1]``; 0 where that many
    cannot run it (memory, divisibility). A kind that is left out cannot run it at all."""
    after: tuple[str, ...] = ()
    """Stages whose output it takes."""
    streams: bool = True
    """Whether it can begin on a part of its input."""
    divisible: bool = True
    """Whether unlike GPUs add up, all of its pool; otherwise the quickest kind does all."""
    chunk_s: float = 0.0
    """Overhead of each micro-batch passed between pools, seconds."""
    lead: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Of one that takes nothing and has its pool to itself, by number of micro-batches and then of
    GPUs: after what share of its time the first is ready; ``1 / m`` where nothing is said. Numbers
    of GPUs in between are as the next lower one. The others follow evenly."""
    again: float = 0.0
    """Of one that takes nothing and shares its pool: it makes micro-batches one after another, and
    each after the first takes so much of its time once more."""
    switch_s: Mapping[str, float] = field(default_factory=dict)
    """By kind: seconds to bring it in and out where it shares a pool; 0 when all fits at once."""
    cycle: str | None = None
    """Stages of one cycle (simulate, generate) work in lockstep; they stand next to each other."""
    beside: bool = False
    """Whether it may have some GPUs of its job while other stages have the rest."""

    def first_chunk_share(self, chunks: int | np.ndarray, gpus: np.ndarray) -> np.ndarray:
        """After what share of its time the first of ``chunks`` micro-batches is ready, where it has
        its pool of ``gpus`` GPUs to itself; float64 like ``gpus``."""
        found = np.broadcast_to(1.0 / np.asarray(chunks), np.shape(gpus))
        for parts, shares in self.lead.items():
            numbers = sorted(shares)
            first = np.searchsorted(numbers, gpus, side="right") - 1
            known = np.array([shares[n] for n in numbers])[np.maximum(first, 0)]
            found = np.where(np.equal(chunks, parts) & (first >= 0), known, found)
        return found


@dataclass(frozen=True)
class PlacementProblem:
    """Stages in topological order, kinds, and the choices allowed."""

    stages: Sequence[PlacementStage]
    kinds: Sequence[GpuKind]
    chunks: Sequence[int] = (1, 2, 4, 8, 16, 32)
    """Micro-batches an iteration may be passed on in."""
    sync: tuple[str, str] | None = ("train", "rollout")
    """Source and target of the weights."""
    sync_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Seconds to bring new weights from one kind's pool to another pool; 0 within a pool."""
    mixing: float = 1.0
    """Share of the summed speed that unlike GPUs keep when they work on one stage."""
    cycle_steps: int = 1
    """Steps of a cycle per iteration."""
    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By stage: the only kinds it may use (pins)."""
    mixes: frozenset[str] | None = None
    """Stages whose pools need not be one job, if they hold no other stage: such a pool may have
    several kinds, and any number of GPUs. None: all may share any pool."""
    shared: Sequence[tuple[tuple[str, ...], int]] = ()
    """Kinds that are partly the same GPUs, or that a limit counts together, and how many they have
    together."""
    most_jobs: Sequence[tuple[tuple[str, ...], int]] = ()
    """Kinds whose jobs a limit counts together, and how many run at once."""

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
        """See that every number is one that can be.

        Raises:
            PlanError: a negative one, or one that is not finite; names it.
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
        """Whether a pool of these stages may hold several kinds, and any number of GPUs."""
        return self.mixes is None or self.mixes >= {self.stages[s].name for s in pool}

    def is_single_job(self, gpus: np.ndarray) -> np.ndarray:
        """Whether GPUs of each kind ``[kinds, ...]`` can be those of one job: of one kind, on whole
        nodes, no more than its jobs may have."""
        whole = [kind.round_to_job_size(n) == n for kind, n in zip(self.kinds, gpus, strict=True)]
        return ((gpus > 0).sum(0) <= 1) & np.all(whole, axis=0)

    def exceeds_shared_gpus(self, held: np.ndarray) -> np.ndarray:
        """Where GPUs of each kind ``[kinds, ...]`` are more than those that share them have."""
        found = np.zeros(held.shape[1:], dtype=bool)
        for names, most in self.shared:
            own = [k for k, kind in enumerate(self.kinds) if kind.name in names]
            found |= held[own].sum(0) > most
        return found

    def exceeds_job_limits(self, pools: PoolStages, held: Sequence[np.ndarray]) -> np.ndarray:
        """Where the jobs of pools, which hold GPUs ``[kinds, n]`` each, are more than run at once;
        a pool that is no one job has one for each GPU."""
        found = np.zeros(held[0].shape[1], dtype=bool)
        for names, most in self.most_jobs:
            own, count = [k for k, kind in enumerate(self.kinds) if kind.name in names], found * 0
            for job in pools_of_jobs(pools):
                gpus = np.sum([held[p] for p in job], axis=0)
                mine = gpus[own].sum(0)
                count = count + np.where(self.is_single_job(gpus), mine > 0, mine)
            found |= count > most
        return found

    def rate_table(self, stage: PlacementStage, kind: int) -> np.ndarray:
        """Rates ``[gpus + 1]`` of a stage on a kind; pins are applied here.

        A stage works on all GPUs of its pool, so a number on which it cannot run, or is slower than
        on fewer, counts as such.
        """
        entry = self.kinds[kind]
        allowed = self.allowed.get(stage.name)
        rates = stage.rates.get(entry.name)
        if rates is None or (allowed is not None and entry.name not in allowed):
            return np.zeros(entry.gpus + 1)
        return np.asarray(rates, dtype=np.float64)


@dataclass(frozen=True)
class Placement:
    """A choice: which pools each stage belongs to, the GPUs of each pool, the grain."""

    pools: PoolStages
    """Stage numbers of each pool, ascending; pools in order of their first stage."""
    gpus: tuple[tuple[int, ...], ...]
    """By pool: GPUs of each kind."""
    num_chunks: int
    """Micro-batches an iteration is passed on in."""

    @property
    def mode(self) -> str:
        """``collocated``, ``disaggregated`` or ``hybrid``."""
        if len(self.pools) == 1:
            return "collocated"
        alone = all(len(pool) == 1 for pool in self.pools)
        return "disaggregated" if alone else "hybrid"

    @property
    def jobs(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the pools that are one job each."""
        return pools_of_jobs(self.pools)

    def stages_of(self, job: Sequence[int]) -> tuple[int, ...]:
        """Stage numbers of a job, ascending."""
        return tuple(sorted({s for p in job for s in self.pools[p]}))

    def gpus_of(self, stage: int) -> tuple[int, ...]:
        """By kind, the GPUs that a stage works on."""
        held = [gpus for pool, gpus in zip(self.pools, self.gpus, strict=True) if stage in pool]
        return tuple(map(sum, zip(*held, strict=True)))


@functools.lru_cache(4096)
def pools_of_stages(pools: PoolStages) -> Mapping[int, tuple[int, ...]]:
    """By stage: the numbers of the pools that it works on, together."""
    stages = sorted({s for pool in pools for s in pool})
    return {s: tuple(p for p, pool in enumerate(pools) if s in pool) for s in stages}


@functools.lru_cache(4096)
def pools_of_jobs(pools: PoolStages) -> tuple[tuple[int, ...], ...]:
    """Numbers of the pools that are one job each, for they share a stage."""
    found: list[tuple[int, ...]] = []
    for home in sorted(set(pools_of_stages(pools).values()), key=len, reverse=True):
        if not any(set(home) & set(other) for other in found):
            found.append(home)
    return tuple(sorted(found))


class KindSection(Section):
    """GPUs of a kind, as in :class:`~pipeline.planning.planner.problem.GpuKind`."""

    gpus: PositiveInt
    price: float = Field(default=1.0, ge=0)
    wait_s: float = Field(default=0.0, ge=0)
    interruptions_per_hour: float = Field(default=0.0, ge=0)
    per_node: int = Field(default=0, ge=0)
    waits_s: dict[PositiveInt, Annotated[float, Field(ge=0)]] = {}
    """By number of nodes; ``wait_s`` where nothing is said."""
    job_gpus: int = Field(default=0, ge=0)

    def to_kind(self, name: str) -> GpuKind:
        """As the planner has it."""
        values = dict(self)
        return GpuKind(name, **values | {"waits_s": tuple(self.waits_s.items())})


class StageSection(Section):
    """A :class:`PlacementStage` with durations instead of rates."""

    seconds: dict[str, dict[PositiveInt, PositiveFloat | None]]
    """By kind and number of GPUs: seconds of one iteration; null: it cannot run on so many. Numbers
    in between are as the next lower one that is given; below the lowest it cannot run."""
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
    """Kinds that are partly the same GPUs, or that a limit counts together."""

    kinds: tuple[str, ...] = Field(min_length=2)
    gpus: PositiveInt
    """That they have together."""


class JobLimitSection(Section):
    """Kinds whose jobs a limit counts together."""

    kinds: tuple[str, ...] = Field(min_length=1)
    jobs: PositiveInt
    """That run at once."""


class ProblemFile(Section):
    """A whole file; ``pools`` is a placement, where one is given."""

    kinds: dict[str, KindSection] = Field(min_length=1)
    stages: dict[str, StageSection] = Field(min_length=1)
    """In topological order."""
    micro_batches: tuple[PositiveInt, ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1)
    """What a placement may choose from."""
    sync: tuple[str, str] | None = ("train", "rollout")
    sync_s: dict[str, dict[str, float]] = {}
    """By kind of the source, then of the target."""
    mixing: float = 1.0
    cycle_steps: PositiveInt = 1
    allowed: dict[str, frozenset[str]] = {}
    mixes: frozenset[str] | None = None
    shared: tuple[SharedGpusSection, ...] = ()
    most_jobs: tuple[JobLimitSection, ...] = ()
    pools: tuple[PoolPlan, ...] = ()
    chunks: PositiveInt = 1

    def to_problem(self) -> PlacementProblem:
        """What the planner is asked.

        Raises:
            PlanError: parts do not go together.
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


def dump_problem(problem: PlacementProblem, pools: Sequence[PoolPlan] = (), chunks: int = 1) -> str:
    """A problem as text that :func:`read_problem` reads, with a placement where pools are given."""
    stages = {}
    for s, stage in enumerate(problem.stages):
        seconds = {}
        for k, kind in enumerate(problem.kinds):
            # Pins are in the table; in between the next lower number stands.
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
        "chunks": chunks,
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
    """A problem and, where the file gives pools, a placement.

    Raises:
        PlanError: missing, not YAML, or invalid; names the key.
    """
    values = read_yaml(path, "problem", PlanError)
    if not isinstance(values, Mapping):
        raise PlanError(f"{path}: expected a mapping with 'kinds' and 'stages'")
    try:
        file = validate(ProblemFile, values, str(path))
        problem = file.to_problem()
        return problem, placement_from_pools(
            problem, file.pools, file.chunks
        ) if file.pools else None
    except ConfigError as error:
        raise PlanError(str(error)) from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def placement_from_pools(
    problem: PlacementProblem, pools: Sequence[PoolPlan], chunks: int, seldom: Collection[str] = ()
) -> Placement:
    """The placement that the pools of a plan describe.

    Args:
        seldom: stages that are no part of every iteration, such as evaluations, and are left out;
            so is a pool of these alone.

    Raises:
        PlanError: an unknown stage or kind, a stage that is in no pool or in two, or processes of a
            pool that stages share out as is not predicted.
    """
    stages = [stage.name for stage in problem.stages]
    kinds = [kind.name for kind in problem.kinds]
    placed = [stages.index(name) for pool in pools for name in pool.stages if name in stages]
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for i, pool in enumerate(pools):
        own = tuple(name for name in pool.stages if name not in seldom)
        if not own:
            continue
        for known, names, what in ((stages, own, "stage"), (kinds, pool.gpus, "kind")):
            wrong: Any = next((name for name in names if name not in known), None)
            if wrong is not None:
                raise PlanError(f"pools[{i}]: no {what} {wrong!r}{did_you_mean(wrong, known)}")
        found += _parts(problem, pool, f"pools[{i}]")
    for s, name in enumerate(stages):
        if placed.count(s) != 1:
            raise PlanError(f"pools: stage {name!r} must be in one pool (is in {placed.count(s)})")
    found.sort()
    return Placement(tuple(own for own, _ in found), tuple(gpus for _, gpus in found), chunks)


def _parts(
    problem: PlacementProblem, pool: PoolPlan, where: str
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Stages and GPUs of a pool, or of each of its parts where stages have some of the processes.

    Raises:
        PlanError: parts overlap, or stages have all processes before others have some.
    """
    numbers = {stage.name: s for s, stage in enumerate(problem.stages) if stage.name in pool.stages}
    kinds = [kind.name for kind in problem.kinds]
    # The processes count on from one kind to the next.
    kind_of = [kinds.index(kind) for kind, count in pool.gpus.items() for _ in range(count)]
    every = tuple(range(len(kind_of)))
    ranks = {s: pool.stage_ranks.get(name, every) for name, s in numbers.items()}
    whole = [s for s, own in ranks.items() if own == every]
    sides = sorted({own for own in ranks.values() if own != every})
    for a, b in itertools.combinations(sides, 2):
        if set(a) & set(b):
            raise PlanError(
                f"{where}.ranks: {list(a)} and {list(b)} have some processes in common; what this "
                "brings is not predicted, give stages the same ones or others"
            )
    for name, s in numbers.items():
        if ranks[s] != every and whole and s > min(whole):
            raise PlanError(
                f"{where}.ranks.{name}: {problem.stages[min(whole)].name} has all processes before "
                "it; what this brings is not predicted"
            )
    if not sides:
        return [(tuple(sorted(numbers.values())), tuple(pool.gpus.get(kind, 0) for kind in kinds))]
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
    """A cost that grows with the time of an iteration and never falls with the GPUs held."""

    unit = "s"

    @abstractmethod
    def cost(self, problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]) -> Array:
        """Costs ``[n]``.

        Args:
            problem: the kinds and their prices, waits and losses.
            total_s: seconds of an iteration ``[n]``.
            gpus: by pool int ``[kinds, n]``, the GPUs held.
        """

    @abstractmethod
    def job_cost(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        """What a stage that is a job of its own adds to the cost."""

    @abstractmethod
    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        """What no placement whose iteration takes at least ``total_s`` seconds goes below."""


@dataclass(frozen=True)
class IterationTime(Objective):
    """Seconds of one iteration."""

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
    """Price of one iteration: all GPUs held, for its whole duration.

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
        """Each stage at its cheapest: an hour of a kind does at most its best rate per GPU."""
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
    """Seconds until some iterations are done, the queue and expected losses included.

    The run starts when the slowest of its pools has started. A pool that is lost comes back after
    the wait of its kind, and half an iteration is done again on average. Waits are those of as many
    nodes as the pool takes of the kind.
    """

    iterations: int

    def cost(self, problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]) -> Array:
        start = np.max([np.max(_waits(problem, pool), axis=0) for pool in gpus], axis=0)
        lost = interruption_overhead(problem, total_s, gpus)
        return np.asarray(start + self.iterations * total_s * (1 + lost))

    def job_cost(
        self, seconds: float, price_per_hour: float, wait_s: float, losses_per_hour: float
    ) -> float:
        """Every job waits; one that is lost waits again, and half of it was in vain on average."""
        lost = losses_per_hour / 3600 * seconds * (wait_s + seconds / 2)
        return self.iterations * (wait_s + seconds + lost)

    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        return self.iterations * total_s


def interruption_overhead(
    problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]
) -> Array:
    """Seconds expected to be lost by preemption and failures per second of work ``[n]``.

    A pool that is lost comes back after the wait of its kind, and half an iteration is done again
    on average. Arguments as of :meth:`Objective.cost`.
    """
    losses = np.array([kind.interruptions_per_hour for kind in problem.kinds])[:, None] / 3600
    each = [losses * (_waits(problem, pool) + total_s / 2) * (pool > 0) for pool in gpus]
    return np.asarray(sum(pool.sum(0) for pool in each))


def _waits(problem: PlacementProblem, pool: Array) -> Array:
    """Of each kind ``[kinds, n]``: the wait for so many GPUs of it."""
    return np.stack([kind.queue_wait_s(n) for kind, n in zip(problem.kinds, pool, strict=True)])
