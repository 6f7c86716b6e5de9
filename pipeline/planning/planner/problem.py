"""The placement problem: stages with measured speeds, kinds of GPUs, objectives, and its YAML file.

A placement divides the GPU stages over *pools*. The stages of a pool take turns on all its GPUs
(collocated); pools run at the same time and pass chunks of the batch to each other (disaggregated).
A placement with one pool is collocated, one with a pool for each stage is disaggregated, and all
others are hybrid. If a pool has GPUs of several kinds, each kind processes a share of the samples
in proportion to its speed.

Pools may overlap: a stage in several pools works on the GPUs of all of them. Such pools are one job
(``pools[].stage_ranks`` of a plan); stages in only one of the pools run first, at the same time.
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
"""Indices of the stages of each pool."""


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one type in one partition."""

    name: str
    gpus: int
    """Number of GPUs that the plan may use."""
    price: float = 1.0
    """Price of one GPU for one hour, in any currency."""
    wait_s: float = 0.0
    """Expected wait in the queue before a job of this kind starts."""
    interruptions_per_hour: float = 0.0
    """Expected preemptions and node failures of a pool, per hour."""
    per_node: int = 0
    """GPUs per node, all of which a job on several nodes must use; 0: any number is allowed."""
    waits_s: tuple[tuple[int, float], ...] = ()
    """Pairs of a job's number of nodes and its expected wait; empty: ``wait_s`` for all jobs."""
    job_gpus: int = 0
    """Maximum GPUs of a job; 0: no limit."""

    def queue_wait_s(self, gpus: np.ndarray) -> np.ndarray:
        """Return the waits of jobs with ``gpus`` GPUs, float64 like ``gpus``; 0 without GPUs. The
        nearest known number of nodes determines the wait; jobs with more nodes never wait less."""
        if not self.waits_s:
            return np.where(gpus > 0, self.wait_s, 0.0)
        nodes, waits = np.array(sorted(self.waits_s)).T
        job_nodes = np.maximum(1, -(-np.asarray(gpus) // max(1, self.per_node)))
        nearest = np.abs(np.log(nodes[:, None] / job_nodes.reshape(1, -1))).argmin(0)
        expected_s = np.maximum.accumulate(waits)[nearest].reshape(np.shape(gpus))
        return np.where(gpus > 0, expected_s, 0.0)

    def round_to_job_size(self, gpus: np.ndarray) -> np.ndarray:
        """Round numbers of GPUs down to numbers that one job can have."""
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
    """Iterations per second by kind on 0, 1, ... GPUs, float64 ``[gpus + 1]``; 0 if the stage
    cannot run on that many (memory, divisibility). The stage cannot run on a missing kind."""
    after: tuple[str, ...] = ()
    """Stages whose output this stage consumes."""
    streams: bool = True
    """True if the stage can start on a part of its input."""
    divisible: bool = True
    """True if the speeds of different kinds in the pool add up; otherwise only the fastest kind
    works."""
    chunk_s: float = 0.0
    """Overhead of each chunk passed between pools, seconds."""
    lead: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Share of the stage's duration after which its first chunk is ready, by number of chunks
    ``m`` and number of GPUs (missing numbers use the next lower entry); ``1 / m`` by default. The
    other chunks follow evenly. Applies to a stage without inputs that is alone in its pool."""
    again: float = 0.0
    """Share of the stage's duration that each chunk after the first repeats (fixed cost). Applies
    to a stage without inputs that shares its pool, and so produces one chunk after another."""
    switch_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds to load and offload the stage by kind, if it shares a pool; 0 if all stages of the
    pool fit in memory together."""
    cycle: str | None = None
    """Name of a cycle whose adjacent stages run in lockstep, such as simulation and generation;
    None: the stage is in no cycle."""
    beside: bool = False
    """True if the stage may use some GPUs of its job while other stages use the rest."""

    def first_chunk_share(self, chunks: int | np.ndarray, gpus: np.ndarray) -> np.ndarray:
        """Return the share of the stage's duration after which the first of ``chunks`` is ready,
        float64 like ``gpus``, if the stage is alone in a pool of ``gpus`` GPUs."""
        result = np.broadcast_to(1.0 / np.asarray(chunks), np.shape(gpus))
        for num_chunks, shares_by_gpus in self.lead.items():
            gpu_counts = sorted(shares_by_gpus)
            entry = np.searchsorted(gpu_counts, gpus, side="right") - 1
            share = np.array([shares_by_gpus[n] for n in gpu_counts])[np.maximum(entry, 0)]
            result = np.where(np.equal(chunks, num_chunks) & (entry >= 0), share, result)
        return result


@dataclass(frozen=True)
class PlacementProblem:
    """Stages in topological order, kinds of GPUs, and the allowed choices."""

    stages: Sequence[PlacementStage]
    kinds: Sequence[GpuKind]
    chunks: Sequence[int] = (1, 2, 4, 8, 16, 32)
    """Allowed numbers of chunks per iteration."""
    sync: tuple[str, str] | None = ("train", "rollout")
    """The stages that produce and that load the weights; None: no weights are sent."""
    sync_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Seconds to transfer new weights, by kinds of the source and of the target pool; 0 within a
    pool."""
    mixing: float = 1.0
    """Speed of different kinds together on one stage, relative to the sum of their speeds."""
    cycle_steps: int = 1
    """Steps of a cycle per iteration."""
    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The only kinds that a stage may use (pins), by stage."""
    mixes: frozenset[str] | None = None
    """Stages that need not run in one job: a pool with only such stages may have several kinds and
    any number of GPUs. None: all stages."""
    shared: Sequence[tuple[tuple[str, ...], int]] = ()
    """Groups of kinds that share GPUs or a limit, each with the total number of its GPUs."""
    most_jobs: Sequence[tuple[tuple[str, ...], int]] = ()
    """Groups of kinds whose jobs a limit counts together, each with its maximum of running jobs."""

    def __post_init__(self) -> None:
        if not 0 < self.mixing <= 1:
            raise PlanError(f"mixing: {self.mixing} is not above 0 and at most 1")
        names = [kind.name for kind in self.kinds]
        stages = [stage.name for stage in self.stages]
        self._check_numbers()
        for key, referenced, known, noun in (
            *((f"stage {s.name!r}: switch_s", s.switch_s, names, "kind") for s in self.stages),
            *((f"stage {s.name!r}: after", s.after, stages, "stage") for s in self.stages),
            *((f"sync_s.{a}", (a, b), names, "kind") for a, b in self.sync_s),
            *(
                (f"pin {s}={'+'.join(kinds)}", kinds, names, "kind")
                for s, kinds in self.allowed.items()
            ),
            *(("shared", group, names, "kind") for group, _ in self.shared),
            *(("most_jobs", group, names, "kind") for group, _ in self.most_jobs),
            ("pin", self.allowed, stages, "stage"),
            ("mixes", self.mixes or (), stages, "stage"),
        ):
            for name in referenced:
                if name not in known:
                    raise PlanError(f"{key}: no such {noun} {name!r}{did_you_mean(name, known)}")
        earlier: set[str] = set()
        for stage in self.stages:
            unknown = set(stage.after) - earlier
            if unknown:
                raise PlanError(
                    f"stage {stage.name!r}: after: {sorted(unknown)[0]!r} must be an earlier stage"
                )
            earlier.add(stage.name)
            if (stage.after or stage.cycle) and (stage.lead or stage.again):
                raise PlanError(
                    f"stage {stage.name!r}: lead and again need a stage without inputs that is in "
                    "no cycle"
                )
            for num_chunks, shares in stage.lead.items():
                for gpus, share in shares.items():
                    if not 1 - 1e-9 <= num_chunks * share <= num_chunks:
                        raise PlanError(
                            f"stage {stage.name!r}: lead.{num_chunks}.{gpus}: {share} is not from "
                            f"1/{num_chunks} to 1"
                        )
            for kind, rates in stage.rates.items():
                key = f"stage {stage.name!r} on {kind!r}"
                if kind not in names:
                    raise PlanError(f"{key}: no such kind of GPU{did_you_mean(kind, names)}")
                if not np.all(np.isfinite(rates)) or np.any(rates < 0):
                    raise PlanError(f"{key}: a measured speed is negative or not a number")
                if len(rates) != self.kinds[names.index(kind)].gpus + 1 or rates[0]:
                    raise PlanError(f"{key}: speeds must be given for 0 (none) to all GPUs")

    def _check_numbers(self) -> None:
        """Check that every number is finite and not too small.

        Raises:
            PlanError: a number is too small or not finite; the message names it.
        """
        numbers: dict[str, float] = {"cycle_steps": self.cycle_steps}
        numbers |= {f"micro_batches[{i}]": n for i, n in enumerate(self.chunks)}
        minimums = dict.fromkeys(numbers, 1)
        for kind in self.kinds:
            fields = {k: v for k, v in vars(kind).items() if k not in ("name", "waits_s")}
            fields |= {f"waits_s.{nodes}": wait for nodes, wait in kind.waits_s}
            numbers |= {f"kinds.{kind.name}.{k}": v for k, v in fields.items()}
        for stage in self.stages:
            numbers[f"stages.{stage.name}.chunk_s"] = stage.chunk_s
            numbers[f"stages.{stage.name}.again"] = stage.again
            for kind_name, seconds in stage.switch_s.items():
                numbers[f"stages.{stage.name}.switch_s.{kind_name}"] = seconds
        numbers |= {f"sync_s.{a}.{b}": s for (a, b), s in self.sync_s.items()}
        for key, value in numbers.items():
            if not (math.isfinite(value) and value >= minimums.get(key, 0)):
                raise PlanError(
                    f"{key}: {value} is not a finite number of at least {minimums.get(key, 0)}"
                )

    def may_mix(self, pool: Sequence[int]) -> bool:
        """Return True if a pool with these stages may have several kinds and any number of GPUs."""
        return self.mixes is None or self.mixes >= {self.stages[s].name for s in pool}

    def is_single_job(self, gpus: np.ndarray) -> np.ndarray:
        """Return True where GPUs ``[kinds, ...]`` can form one job: they are of one kind, on whole
        nodes, and within the limit of a job."""
        whole = [kind.round_to_job_size(n) == n for kind, n in zip(self.kinds, gpus, strict=True)]
        return ((gpus > 0).sum(0) <= 1) & np.all(whole, axis=0)

    def exceeds_shared_gpus(self, gpus: np.ndarray) -> np.ndarray:
        """Return True where GPUs ``[kinds, ...]`` exceed the GPUs that kinds share."""
        exceeded = np.zeros(gpus.shape[1:], dtype=bool)
        for names, limit in self.shared:
            indices = [k for k, kind in enumerate(self.kinds) if kind.name in names]
            exceeded |= gpus[indices].sum(0) > limit
        return exceeded

    def exceeds_job_limits(self, pools: PoolStages, gpus: Sequence[np.ndarray]) -> np.ndarray:
        """Return True where pools with GPUs ``[kinds, n]`` exceed the maximum number of running
        jobs; a pool that is not one job has a job for each GPU."""
        exceeded = np.zeros(gpus[0].shape[1], dtype=bool)
        for names, limit in self.most_jobs:
            indices = [k for k, kind in enumerate(self.kinds) if kind.name in names]
            count = np.zeros(len(exceeded), dtype=np.int64)
            for job in pools_of_jobs(pools):
                job_gpus = np.sum([gpus[p] for p in job], axis=0)
                num_gpus = job_gpus[indices].sum(0)
                count = count + np.where(self.is_single_job(job_gpus), num_gpus > 0, num_gpus)
            exceeded |= count > limit
        return exceeded

    def rate_table(self, stage: PlacementStage, kind: int) -> np.ndarray:
        """Return the rates ``[gpus + 1]`` of a stage on a kind, with pins applied.

        Rates may fall or be 0 at larger numbers of GPUs, because a stage works on all GPUs of its
        pool.
        """
        entry = self.kinds[kind]
        allowed = self.allowed.get(stage.name)
        rates = stage.rates.get(entry.name)
        if rates is None or (allowed is not None and entry.name not in allowed):
            return np.zeros(entry.gpus + 1)
        return np.asarray(rates, dtype=np.float64)


@dataclass(frozen=True)
class Placement:
    """A placement: the stages and GPUs of each pool, and the number of chunks."""

    pools: PoolStages
    """Indices of the stages of each pool, ascending; pools in order of their first stage."""
    gpus: tuple[tuple[int, ...], ...]
    """Number of GPUs of each kind, by pool."""
    num_chunks: int
    """Number of chunks per iteration."""

    @property
    def mode(self) -> str:
        """``collocated``, ``disaggregated`` or ``hybrid``."""
        if len(self.pools) == 1:
            return "collocated"
        is_disaggregated = all(len(pool) == 1 for pool in self.pools)
        return "disaggregated" if is_disaggregated else "hybrid"

    @property
    def jobs(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the pools of each job."""
        return pools_of_jobs(self.pools)

    def stages_of(self, job: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of a job's stages, ascending."""
        return tuple(sorted({s for p in job for s in self.pools[p]}))

    def gpus_of(self, stage: int) -> tuple[int, ...]:
        """Return the number of GPUs of each kind that a stage works on."""
        counts = [gpus for pool, gpus in zip(self.pools, self.gpus, strict=True) if stage in pool]
        return tuple(map(sum, zip(*counts, strict=True)))


@functools.lru_cache(4096)
def pools_of_stages(pools: PoolStages) -> Mapping[int, tuple[int, ...]]:
    """Return the indices of the pools of each stage, by stage."""
    stages = sorted({s for pool in pools for s in pool})
    return {s: tuple(p for p, pool in enumerate(pools) if s in pool) for s in stages}


@functools.lru_cache(4096)
def pools_of_jobs(pools: PoolStages) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the pools of each job; pools that share a stage are one job."""
    jobs: list[tuple[int, ...]] = []
    for job in sorted(set(pools_of_stages(pools).values()), key=len, reverse=True):
        if not any(set(job) & set(other) for other in jobs):
            jobs.append(job)
    return tuple(sorted(jobs))


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
    """A :class:`PlacementStage` in a problem file, with durations instead of rates."""

    seconds: dict[str, dict[PositiveInt, PositiveFloat | None]]
    """Seconds of one iteration by kind and number of GPUs; null: the stage cannot run. Missing
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
    """Number of GPUs of all these kinds together."""


class JobLimitSection(Section):
    """Kinds whose jobs a limit counts together."""

    kinds: tuple[str, ...] = Field(min_length=1)
    jobs: PositiveInt
    """Maximum number of running jobs."""


class ProblemFile(Section):
    """A :class:`PlacementProblem` in a file; ``pools`` and ``num_chunks`` may give a placement."""

    kinds: dict[str, KindSection] = Field(min_length=1)
    stages: dict[str, StageSection] = Field(min_length=1)
    """Stages in topological order."""
    micro_batches: tuple[PositiveInt, ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1)
    """Allowed numbers of chunks per iteration."""
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
    def _check_sync(self) -> ProblemFile:
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
            max_gpus = self.kinds[kind].gpus
            if max(seconds, default=0) > max_gpus:
                raise PlanError(
                    f"stages.{name}.seconds.{kind}: {max(seconds)} GPUs, but there are {max_gpus}"
                )
            rates[kind] = np.zeros(max_gpus + 1)
            for gpus, value in sorted(seconds.items()):
                rates[kind][gpus:] = 1 / value if value else 0.0
        fields = section.model_dump(exclude={"seconds"})
        return PlacementStage(name, rates, **fields)


def dump_problem(
    problem: PlacementProblem, pools: Sequence[PoolPlan] = (), num_chunks: int = 1
) -> str:
    """Return a problem as YAML for :func:`read_problem`, with a placement if pools are passed."""
    stages = {}
    for s, stage in enumerate(problem.stages):
        seconds = {}
        for k, kind in enumerate(problem.kinds):
            # Write only changes of the rate: in the file, missing numbers use the next lower entry.
            rates = problem.rate_table(problem.stages[s], k)
            changes = np.flatnonzero(np.diff(rates, prepend=0.0))
            if len(changes):
                seconds[kind.name] = {
                    int(n): float(1 / rates[n]) if rates[n] > 0 else None for n in changes
                }
        stages[stage.name] = {
            "seconds": seconds,
            "after": list(stage.after),
            "streams": stage.streams,
            "divisible": stage.divisible,
            "chunk_s": stage.chunk_s,
            "lead": {chunks: dict(shares) for chunks, shares in stage.lead.items()},
            "again": stage.again,
            "switch_s": dict(stage.switch_s),
            "cycle": stage.cycle,
            "beside": stage.beside,
        }
    sync_s: dict[str, dict[str, float]] = {}
    for (source, target), value in problem.sync_s.items():
        sync_s.setdefault(source, {})[target] = value
    values = {
        "kinds": {kind.name: _dump_kind(kind) for kind in problem.kinds},
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
        values["shared"] = [{"kinds": [*names], "gpus": limit} for names, limit in problem.shared]
    if problem.most_jobs:
        values["most_jobs"] = [{"kinds": [*names], "jobs": n} for names, n in problem.most_jobs]
    return yaml.safe_dump(values, sort_keys=False)


def _dump_kind(kind: GpuKind) -> dict[str, Any]:
    values = {k: v for k, v in vars(kind).items() if k not in ("name", "waits_s")}
    return values | ({"waits_s": dict(kind.waits_s)} if kind.waits_s else {})


def read_problem(path: Path) -> tuple[PlacementProblem, Placement | None]:
    """Read a problem and, if the file has pools, a placement.

    Raises:
        PlanError: the file is missing, not YAML, or invalid; the message names the key.
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
    occasional: Collection[str] = (),
) -> Placement:
    """Return the placement of a plan's pools.

    Args:
        occasional: stages that are not part of every iteration, such as evaluations. These stages
            and pools without other stages are ignored.

    Raises:
        PlanError: a stage or kind is unknown, a stage is in no pool or in several, or the division
            of a pool's processes between stages cannot be predicted.
    """
    stages = [stage.name for stage in problem.stages]
    kinds = [kind.name for kind in problem.kinds]
    placed = [stages.index(name) for pool in pools for name in pool.stages if name in stages]
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for i, pool in enumerate(pools):
        pool_stages = tuple(name for name in pool.stages if name not in occasional)
        if not pool_stages:
            continue
        for known, names, noun in ((stages, pool_stages, "stage"), (kinds, pool.devices, "kind")):
            unknown: Any = next((name for name in names if name not in known), None)
            if unknown is not None:
                raise PlanError(f"pools[{i}]: no {noun} {unknown!r}{did_you_mean(unknown, known)}")
        parts += _split_pool(problem, pool, f"pools[{i}]")
    for s, name in enumerate(stages):
        if placed.count(s) != 1:
            raise PlanError(f"pools: stage {name!r} must be in one pool (is in {placed.count(s)})")
    parts.sort()
    return Placement(tuple(part for part, _ in parts), tuple(gpus for _, gpus in parts), num_chunks)


def _split_pool(
    problem: PlacementProblem, pool: PoolPlan, key: str
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return pairs of stage indices and GPUs by kind: of a pool, or of each part that stages use.

    Raises:
        PlanError: parts overlap, or a stage on all processes precedes a stage on some of them.
    """
    indices = {stage.name: s for s, stage in enumerate(problem.stages) if stage.name in pool.stages}
    kinds = [kind.name for kind in problem.kinds]
    # Process numbers continue from one kind to the next.
    kind_by_rank = [kinds.index(kind) for kind, count in pool.devices.items() for _ in range(count)]
    all_ranks = tuple(range(len(kind_by_rank)))
    ranks = {s: pool.stage_ranks.get(name, all_ranks) for name, s in indices.items()}
    whole_stages = [s for s, subset in ranks.items() if subset == all_ranks]
    rank_sets = sorted({subset for subset in ranks.values() if subset != all_ranks})
    for a, b in itertools.combinations(rank_sets, 2):
        if set(a) & set(b):
            raise PlanError(
                f"{key}.stage_ranks: {list(a)} and {list(b)} overlap, which the planner "
                "cannot predict; give the stages the same processes or disjoint ones"
            )
    for name, s in indices.items():
        if ranks[s] != all_ranks and whole_stages and s > min(whole_stages):
            raise PlanError(
                f"{key}.stage_ranks.{name}: {problem.stages[min(whole_stages)].name} has all "
                "processes and runs before it, which the planner cannot predict"
            )
    if not rank_sets:
        return [
            (tuple(sorted(indices.values())), tuple(pool.devices.get(kind, 0) for kind in kinds))
        ]
    idle = tuple(sorted(set(all_ranks) - {rank for subset in rank_sets for rank in subset}))
    return [
        (
            tuple(sorted(s for s, used in ranks.items() if used in (subset, all_ranks))),
            tuple(sum(kind_by_rank[rank] == k for rank in subset) for k in range(len(kinds))),
        )
        for subset in (*rank_sets, *([idle] if idle and whole_stages else []))
    ]


Array = np.ndarray


class Objective(ABC):
    """A cost that grows with the time of an iteration and never falls with the number of GPUs."""

    unit = "s"
    """Unit of the cost: ``s`` or ``price``."""

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
        self, seconds: float, price_per_hour: float, wait_s: float, interruptions_per_hour: float
    ) -> float:
        """Return the cost of a stage that runs for ``seconds`` as its own job."""

    @abstractmethod
    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        """Return a lower bound of the cost if an iteration takes at least ``total_s`` seconds."""


@dataclass(frozen=True)
class IterationTime(Objective):
    """The seconds of one iteration."""

    def cost(self, problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]) -> Array:
        return total_s

    def job_cost(
        self, seconds: float, price_per_hour: float, wait_s: float, interruptions_per_hour: float
    ) -> float:
        return seconds

    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        return total_s


@dataclass(frozen=True)
class MonetaryCost(Objective):
    """The cost of one iteration: all allocated GPUs for its whole duration.

    If all prices are 1, the cost is in GPU-hours.
    """

    unit = "price"

    def cost(self, problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]) -> Array:
        prices = np.array([kind.price for kind in problem.kinds])
        return np.asarray(total_s * sum(prices @ pool for pool in gpus) / 3600)

    def job_cost(
        self, seconds: float, price_per_hour: float, wait_s: float, interruptions_per_hour: float
    ) -> float:
        return seconds * price_per_hour / 3600

    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        """Return the cost if each stage had its best rate per GPU, on the cheapest kind for it."""
        total = 0.0
        for stage in problem.stages:
            costs = [np.inf]
            for k, kind in enumerate(problem.kinds):
                rates = problem.rate_table(stage, k)
                best_rate = float(np.max(rates[1:] / np.arange(1, len(rates)), initial=0.0))
                if best_rate > 0:
                    costs.append(kind.price / best_rate)
            total += min(costs)
        return total / 3600


@dataclass(frozen=True)
class TimeToFinish(Objective):
    """The seconds until all iterations are done, with queue waits and expected interruptions.

    The run starts when its last pool has started. For the cost of interruptions see
    :func:`interruption_overhead`. Waits depend on the number of nodes of each kind.
    """

    iterations: int
    """Number of iterations of the run."""

    def cost(self, problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]) -> Array:
        wait_s = np.max([np.max(_queue_waits(problem, pool), axis=0) for pool in gpus], axis=0)
        overhead = interruption_overhead(problem, total_s, gpus)
        return np.asarray(wait_s + self.iterations * total_s * (1 + overhead))

    def job_cost(
        self, seconds: float, price_per_hour: float, wait_s: float, interruptions_per_hour: float
    ) -> float:
        """Return the cost of a job that waits in the queue. An interrupted job waits again, and
        repeats half of its work on average."""
        lost_s = interruptions_per_hour / 3600 * seconds * (wait_s + seconds / 2)
        return self.iterations * (wait_s + seconds + lost_s)

    def lower_bound(self, problem: PlacementProblem, total_s: float) -> float:
        return self.iterations * total_s


def interruption_overhead(
    problem: PlacementProblem, total_s: Array, gpus: Sequence[Array]
) -> Array:
    """Return the expected seconds that preemption and failures cost per second of work ``[n]``.

    An interrupted pool waits in the queue again, and half an iteration is repeated on average. The
    arguments are as in :meth:`Objective.cost`.
    """
    rates = np.array([kind.interruptions_per_hour for kind in problem.kinds])[:, None] / 3600
    lost = [rates * (_queue_waits(problem, pool) + total_s / 2) * (pool > 0) for pool in gpus]
    return np.asarray(sum(pool.sum(0) for pool in lost))


def _queue_waits(problem: PlacementProblem, pool: Array) -> Array:
    """Return the queue wait of a pool's job on each kind, ``[kinds, n]`` like ``pool`` (GPUs)."""
    return np.stack([kind.queue_wait_s(n) for kind, n in zip(problem.kinds, pool, strict=True)])
