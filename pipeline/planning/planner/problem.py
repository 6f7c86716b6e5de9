"""The placement problem: stages with measured speeds, kinds of GPUs, objectives, and its YAML file.

A placement divides the GPU stages over *pools*. The stages of a pool take turns on all its GPUs
(collocated); pools run at the same time and pass chunks of the batch to each other (disaggregated).
A placement with one pool is collocated, one with a pool for each stage is disaggregated, and all
others are hybrid. If a pool has GPUs of several kinds, each kind processes a share of the samples
in proportion to its speed.
"""

from __future__ import annotations

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
    waits_s: tuple[tuple[int, float], ...] = ()
    """Pairs of a job's number of nodes and its expected wait in the queue; empty: no waits."""
    interruptions_per_hour: float = 0.0
    """Expected preemptions and node failures of a pool, per hour."""
    per_node: int = 0
    """GPUs per node, all of which a job on several nodes must use; 0: any number is allowed."""
    job_gpus: int = 0
    """Maximum GPUs of a job; 0: no limit."""

    def queue_wait_s(self, gpus: np.ndarray) -> np.ndarray:
        """Return the waits of jobs with ``gpus`` GPUs, float64 like ``gpus``; 0 without GPUs. The
        nearest known number of nodes determines the wait; jobs with more nodes never wait less."""
        if not self.waits_s:
            return np.zeros(np.shape(gpus))
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
    are_jobs: bool = False
    """True if each stage is a job of its own, which has its GPUs only while it runs. False: pools
    keep their GPUs."""
    chunks: Sequence[int] = (1, 2, 4, 8, 16, 32)
    """Allowed numbers of chunks per iteration."""
    sync: tuple[str, str] | None = ("train", "rollout")
    """The stages that produce and that load the weights; None: no weights are sent."""
    sync_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Seconds to transfer new weights, by kinds of the source and of the target pool; 0 within a
    pool."""
    mixing: float = 1.0
    """Speed of different kinds together on one stage, relative to the sum of their speeds."""
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
        for key, referenced, known, noun in (
            *((f"stage {s.name!r}: switch_s", s.switch_s, names, "kind") for s in self.stages),
            *((f"stage {s.name!r}: after", s.after, stages, "stage") for s in self.stages),
            *((f"sync_s.{a}", (a, b), names, "kind") for a, b in self.sync_s),
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
            if stage.after and (stage.lead or stage.again):
                raise PlanError(f"stage {stage.name!r}: lead and again need a stage without inputs")
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

    def may_mix(self, pool: Sequence[int]) -> bool:
        """Return True if a pool with these stages may have several kinds and any number of GPUs."""
        return self.mixes is None or self.mixes >= {self.stages[s].name for s in pool}

    def is_single_job(self, gpus: np.ndarray) -> np.ndarray:
        """Return True where GPUs ``[kinds, ...]`` can form one job: they are of one kind, on whole
        nodes, and within the limit of a job."""
        whole = [kind.round_to_job_size(n) == n for kind, n in zip(self.kinds, gpus, strict=True)]
        return ((gpus > 0).sum(0) <= 1) & np.all(whole, axis=0)

    def is_allowed(self, pools: PoolStages, gpus: Sequence[np.ndarray]) -> np.ndarray:
        """Return True where pools with GPUs ``[kinds, n]`` can be jobs, and respect the GPUs that
        kinds share and the limits of running jobs. A pool that is not one job has a job for each
        GPU. Jobs of single stages wait for each other instead."""
        allowed = np.ones(gpus[0].shape[1], dtype=bool)
        if self.are_jobs:
            return allowed
        for pool, counts in zip(pools, gpus, strict=True):
            if not self.may_mix(pool):
                allowed &= self.is_single_job(counts)
        jobs = [np.where(self.is_single_job(counts), counts > 0, counts) for counts in gpus]
        limited = self._are_within(self.most_jobs, jobs) & self._are_within(self.shared, gpus)
        return allowed & limited

    def fits(self, gpus: Sequence[np.ndarray]) -> np.ndarray:
        """Return True where there are enough GPUs, bool ``[n]``, for several pools or jobs at the
        same time: ``[kinds, n]`` each."""
        own = [((kind.name,), kind.gpus) for kind in self.kinds]
        return self._are_within((*own, *self.shared), gpus)

    def _are_within(
        self, limits: Sequence[tuple[tuple[str, ...], int]], counts: Sequence[np.ndarray]
    ) -> np.ndarray:
        total, within = np.sum(counts, axis=0), np.ones(counts[0].shape[1], dtype=bool)
        for names, limit in limits:
            within &= total[[kind.name in names for kind in self.kinds]].sum(0) <= limit
        return within

    def devices_used(self, stage: int, gpus: np.ndarray) -> np.ndarray:
        """Return the GPUs that a stage's job uses of its ``gpus``: none if it does not compute with
        the model."""
        return gpus if self.stages[stage].divisible else np.zeros_like(gpus)

    def rate_table(self, stage: PlacementStage, kind: int) -> np.ndarray:
        """Return the rates ``[gpus + 1]`` of a stage on a kind.

        Rates may fall or be 0 at larger numbers of GPUs, because a stage works on all GPUs of its
        pool.
        """
        entry = self.kinds[kind]
        return np.asarray(stage.rates.get(entry.name, np.zeros(entry.gpus + 1)), dtype=np.float64)


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

    def gpus_of(self, stage: int) -> tuple[int, ...]:
        """Return the number of GPUs of each kind that a stage works on."""
        return next(n for n, pool in zip(self.gpus, self.pools, strict=True) if stage in pool)


NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class KindSection(Section):
    """A :class:`GpuKind` in a problem file."""

    gpus: PositiveInt
    price: NotNegative = 1.0
    waits_s: dict[PositiveInt, NotNegative] = {}
    """Waits in the queue by number of nodes; none by default."""
    interruptions_per_hour: NotNegative = 0.0
    per_node: int = Field(default=0, ge=0)
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
    lead: dict[PositiveInt, dict[PositiveInt, float]] = {}
    again: NotNegative = 0.0
    switch_s: dict[str, NotNegative] = {}


class ProblemFile(Section):
    """A :class:`PlacementProblem` in a file; ``pools`` and ``num_chunks`` may give a placement."""

    kinds: dict[str, KindSection] = Field(min_length=1)
    stages: dict[str, StageSection] = Field(min_length=1)
    """Stages in topological order."""
    chunks: tuple[PositiveInt, ...] = Field(default=(1, 2, 4, 8, 16, 32), min_length=1)
    """Allowed numbers of chunks per iteration."""
    sync: tuple[str, str] | None = ("train", "rollout")
    sync_s: dict[str, dict[str, NotNegative]] = {}
    """Seconds by kind of the source, then of the target."""
    mixing: float = 1.0
    mixes: frozenset[str] | None = None
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
            chunks=self.chunks,
            sync=self.sync,
            sync_s={(a, b): s for a, row in self.sync_s.items() for b, s in row.items()},
            mixing=self.mixing,
            mixes=self.mixes,
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
            "lead": {chunks: dict(shares) for chunks, shares in stage.lead.items()},
            "again": stage.again,
            "switch_s": dict(stage.switch_s),
        }
    sync_s: dict[str, dict[str, float]] = {}
    for (source, target), value in problem.sync_s.items():
        sync_s.setdefault(source, {})[target] = value
    values = {
        "kinds": {kind.name: _dump_kind(kind) for kind in problem.kinds},
        "stages": stages,
        "chunks": list(problem.chunks),
        "sync": [*problem.sync] if problem.sync and set(problem.sync) <= stages.keys() else None,
        "sync_s": sync_s,
        "mixing": problem.mixing,
        "mixes": None if problem.mixes is None else sorted(problem.mixes),
        "pools": [pool.model_dump(mode="json") for pool in pools],
        "num_chunks": num_chunks,
    }
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
        file = validate(ProblemFile, values, "problem")
        problem = file.to_problem()
        return problem, placement_from_pools(
            problem, file.pools, file.num_chunks
        ) if file.pools else None
    except (ConfigError, PlanError) as error:
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
        PlanError: a stage or kind is unknown, a stage is in no pool or in several, or only some
            processes of a pool compute a stage.
    """
    stages = [stage.name for stage in problem.stages]
    kinds = [kind.name for kind in problem.kinds]
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for i, pool in enumerate(pools):
        names = tuple(name for name in pool.stages if name not in occasional)
        if not names:
            continue
        for known, used, noun in ((stages, names, "stage"), (kinds, pool.devices, "kind")):
            unknown: Any = next((name for name in used if name not in known), None)
            if unknown is not None:
                raise PlanError(f"pools[{i}]: no {noun} {unknown!r}{did_you_mean(unknown, known)}")
        if partial := sorted(pool.stage_ranks.keys() & set(names)):
            raise PlanError(
                f"pools[{i}].stage_ranks.{partial[0]}: the plan can be run, but stages on some of "
                "a pool's processes are not predicted"
            )
        members = tuple(sorted(map(stages.index, names)))
        parts.append((members, tuple(pool.devices.get(kind, 0) for kind in kinds)))
    placed = [s for members, _ in parts for s in members]
    for s, name in enumerate(stages):
        if placed.count(s) != 1:
            raise PlanError(f"pools: stage {name!r} must be in one pool (is in {placed.count(s)})")
    parts.sort()
    return Placement(tuple(part for part, _ in parts), tuple(gpus for _, gpus in parts), num_chunks)


Array = np.ndarray


class Objective(ABC):
    """A cost that grows with the time of an iteration and never falls with the number of GPUs."""

    unit = "s"
    """Unit of the cost: ``s`` or ``price``."""

    @abstractmethod
    def cost(
        self, problem: PlacementProblem, total_s: Array, busy_s: Array, gpus: Sequence[Array]
    ) -> Array:
        """Return the costs ``[n]``.

        Args:
            problem: the kinds with their prices, waits and interruptions.
            total_s: seconds of an iteration ``[n]``.
            busy_s: seconds of work of each stage ``[stages, n]``.
            gpus: allocated GPUs by pool, int ``[kinds, n]``.
        """


@dataclass(frozen=True)
class IterationTime(Objective):
    """The seconds of one iteration."""

    def cost(
        self, problem: PlacementProblem, total_s: Array, busy_s: Array, gpus: Sequence[Array]
    ) -> Array:
        return total_s


@dataclass(frozen=True)
class MonetaryCost(Objective):
    """The cost of one iteration: all GPUs of pools for its whole duration, those of jobs while they
    run. If all prices are 1, the cost is in GPU-hours."""

    unit = "price"

    def cost(
        self, problem: PlacementProblem, total_s: Array, busy_s: Array, gpus: Sequence[Array]
    ) -> Array:
        prices = np.array([kind.price for kind in problem.kinds])
        return np.asarray(sum(prices @ n for n in gpu_hours(problem, total_s, busy_s, gpus)))


@dataclass(frozen=True)
class TimeToFinish(Objective):
    """The seconds until all iterations are done, with queue waits and expected interruptions.

    A run of pools starts when its last pool has started; jobs wait in every iteration. For the cost
    of interruptions see :func:`interruption_s`. Waits depend on the number of nodes of each kind.
    """

    iterations: int
    """Number of iterations of the run."""

    def cost(
        self, problem: PlacementProblem, total_s: Array, busy_s: Array, gpus: Sequence[Array]
    ) -> Array:
        waits_s = np.array([np.max(_queue_waits(problem, pool), axis=0) for pool in gpus])
        iteration_s = total_s + interruption_s(problem, total_s, busy_s, gpus)
        if problem.are_jobs:
            # Jobs that depend on the same stage wait at the same time.
            added_s = _longest_path_s(problem, busy_s + waits_s) - _longest_path_s(problem, busy_s)
            return np.asarray(self.iterations * (added_s + iteration_s))
        return np.asarray(waits_s.max(0) + self.iterations * iteration_s)


def gpu_hours(
    problem: PlacementProblem, total_s: Array, busy_s: Array, gpus: Sequence[Array]
) -> list[Array]:
    """Return the GPU-hours of an iteration on each kind ``[kinds, n]``, by pool. The arguments are
    as in :meth:`Objective.cost`."""
    if problem.are_jobs:
        used = [problem.devices_used(s, pool) for s, pool in enumerate(gpus)]
        return [pool * busy_s[s] / 3600 for s, pool in enumerate(used)]
    return [pool * total_s / 3600 for pool in gpus]


def interruption_s(
    problem: PlacementProblem, total_s: Array, busy_s: Array, gpus: Sequence[Array]
) -> Array:
    """Return the seconds ``[n]`` that preemption and failures are expected to cost an iteration.

    An interrupted pool waits in the queue again, and half an iteration is repeated on average; of a
    stage's own job, half of the stage. The arguments are as in :meth:`Objective.cost`.
    """
    rates = np.array([kind.interruptions_per_hour for kind in problem.kinds])[:, None] / 3600
    lost_s = np.zeros(len(total_s))
    for p, pool in enumerate(gpus):
        run_s = busy_s[p] if problem.are_jobs else total_s
        lost_s += (rates * run_s * (_queue_waits(problem, pool) + run_s / 2) * (pool > 0)).sum(0)
    return lost_s


def _longest_path_s(problem: PlacementProblem, seconds: Array) -> Array:
    """Return the time ``[n]`` of the slowest chain of stages, each of which takes ``seconds``
    ``[stages, n]`` after its inputs."""
    finish_s = dict[str, Array]()
    for stage, stage_s in zip(problem.stages, seconds, strict=True):
        inputs_s = [finish_s[name] for name in stage.after]
        finish_s[stage.name] = stage_s + np.max([np.zeros_like(stage_s), *inputs_s], axis=0)
    return np.max(list(finish_s.values()), axis=0)


def _queue_waits(problem: PlacementProblem, pool: Array) -> Array:
    """Return the queue wait of a pool's job on each kind, ``[kinds, n]`` like ``pool`` (GPUs)."""
    return np.stack([kind.queue_wait_s(n) for kind, n in zip(problem.kinds, pool, strict=True)])
