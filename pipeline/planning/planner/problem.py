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
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlinf.errors import PlanError, nearest

Pools = tuple[tuple[int, ...], ...]
"""Stage numbers of each pool."""


@dataclass(frozen=True)
class Kind:
    """Like GPUs: those of one partition that do not differ."""

    name: str
    gpus: int
    price: float = 1.0
    """Cost of one GPU for one hour, in any currency."""
    wait_s: float = 0.0
    """Expected wait in the queue before a job of this kind starts."""
    losses_per_hour: float = 0.0
    """Expected preemptions and node failures of a pool, per hour."""
    per_node: int = 0
    """GPUs of a node, where jobs have as many on each of their nodes; 0: any number is fine."""
    waits_s: tuple[tuple[int, float], ...] = ()
    """Numbers of nodes and the waits of jobs of so many, where those differ from ``wait_s``."""
    job_gpus: int = 0
    """GPUs of a job, at most; 0: all there are."""

    def waits(self, gpus: np.ndarray) -> np.ndarray:
        """The wait of jobs of so many GPUs, float64 like ``gpus``; 0 of none. What is known of the
        nearest number of nodes counts, and more nodes never wait less."""
        if not self.waits_s:
            return np.where(gpus > 0, self.wait_s, 0.0)
        nodes, waits = np.array(sorted(self.waits_s)).T
        asked = np.maximum(1, -(-np.asarray(gpus) // max(1, self.per_node)))
        near = np.abs(np.log(nodes[:, None] / asked.reshape(1, -1))).argmin(0)
        known = np.maximum.accumulate(waits)[near].reshape(np.shape(gpus))
        return np.where(gpus > 0, known, 0.0)

    def whole(self, gpus: np.ndarray) -> np.ndarray:
        """How many of so many GPUs a job can have."""
        if self.job_gpus:
            gpus = np.minimum(gpus, self.job_gpus)
        if not self.per_node:
            return gpus
        return np.where(gpus <= self.per_node, gpus, gpus // self.per_node * self.per_node)


@dataclass(frozen=True)
class Stage:
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

    def ahead(self, chunks: int | np.ndarray, gpus: np.ndarray) -> np.ndarray:
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
class Problem:
    """Stages in topological order, kinds, and the choices allowed."""

    stages: Sequence[Stage]
    kinds: Sequence[Kind]
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
                    raise PlanError(f"{where}: no such {what} {name!r}{nearest(name, known)}")
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
                    raise PlanError(f"{where}: no such kind of GPU{nearest(kind, names)}")
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

    def is_job(self, gpus: np.ndarray) -> np.ndarray:
        """Whether GPUs of each kind ``[kinds, ...]`` can be those of one job: of one kind, on whole
        nodes, no more than its jobs may have."""
        whole = [kind.whole(n) == n for kind, n in zip(self.kinds, gpus, strict=True)]
        return ((gpus > 0).sum(0) <= 1) & np.all(whole, axis=0)

    def crowded(self, held: np.ndarray) -> np.ndarray:
        """Where GPUs of each kind ``[kinds, ...]`` are more than those that share them have."""
        found = np.zeros(held.shape[1:], dtype=bool)
        for names, most in self.shared:
            own = [k for k, kind in enumerate(self.kinds) if kind.name in names]
            found |= held[own].sum(0) > most
        return found

    def overfull(self, pools: Pools, held: Sequence[np.ndarray]) -> np.ndarray:
        """Where the jobs of pools, which hold GPUs ``[kinds, n]`` each, are more than run at once;
        a pool that is no one job has one for each GPU."""
        found = np.zeros(held[0].shape[1], dtype=bool)
        for names, most in self.most_jobs:
            own, count = [k for k, kind in enumerate(self.kinds) if kind.name in names], found * 0
            for job in jobs(pools):
                gpus = np.sum([held[p] for p in job], axis=0)
                mine = gpus[own].sum(0)
                count = count + np.where(self.is_job(gpus), mine > 0, mine)
            found |= count > most
        return found

    def table(self, stage: Stage, kind: int) -> np.ndarray:
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

    pools: Pools
    """Stage numbers of each pool, ascending; pools in order of their first stage."""
    gpus: tuple[tuple[int, ...], ...]
    """By pool: GPUs of each kind."""
    chunks: int
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
        return jobs(self.pools)

    def stages_of(self, job: Sequence[int]) -> tuple[int, ...]:
        """Stage numbers of a job, ascending."""
        return tuple(sorted({s for p in job for s in self.pools[p]}))

    def gpus_of(self, stage: int) -> tuple[int, ...]:
        """By kind, the GPUs that a stage works on."""
        held = [gpus for pool, gpus in zip(self.pools, self.gpus, strict=True) if stage in pool]
        return tuple(map(sum, zip(*held, strict=True)))


@functools.lru_cache(4096)
def homes(pools: Pools) -> Mapping[int, tuple[int, ...]]:
    """By stage: the numbers of the pools that it works on, together."""
    stages = sorted({s for pool in pools for s in pool})
    return {s: tuple(p for p, pool in enumerate(pools) if s in pool) for s in stages}


@functools.lru_cache(4096)
def jobs(pools: Pools) -> tuple[tuple[int, ...], ...]:
    """Numbers of the pools that are one job each, for they share a stage."""
    found: list[tuple[int, ...]] = []
    for home in sorted(set(homes(pools).values()), key=len, reverse=True):
        if not any(set(home) & set(other) for other in found):
            found.append(home)
    return tuple(sorted(found))
