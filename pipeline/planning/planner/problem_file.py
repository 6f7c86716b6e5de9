"""A problem as a YAML file that a person may write: kinds, stages with their seconds, pools."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.plan import Pool
from pipeline.planning.planner.problem import Kind, Placement, Problem, Stage
from rlinf.config import Section, validate
from rlinf.errors import ConfigError, PlanError, nearest
from rlinf.yaml_file import read_yaml


class KindSection(Section):
    """GPUs of a kind, as in :class:`~pipeline.planning.planner.problem.Kind`."""

    gpus: PositiveInt
    price: float = Field(default=1.0, ge=0)
    wait_s: float = Field(default=0.0, ge=0)
    losses_per_hour: float = Field(default=0.0, ge=0)
    per_node: int = Field(default=0, ge=0)
    waits_s: dict[PositiveInt, Annotated[float, Field(ge=0)]] = {}
    """By number of nodes; ``wait_s`` where nothing is said."""
    job_gpus: int = Field(default=0, ge=0)

    def kind(self, name: str) -> Kind:
        """As the planner has it."""
        values = dict(self)
        return Kind(name, **values | {"waits_s": tuple(self.waits_s.items())})


class StageSection(Section):
    """A :class:`~pipeline.planning.planner.problem.Stage`, with durations instead of rates."""

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


class SharedSection(Section):
    """Kinds that are partly the same GPUs, or that a limit counts together."""

    kinds: tuple[str, ...] = Field(min_length=2)
    gpus: PositiveInt
    """That they have together."""


class JobsSection(Section):
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
    shared: tuple[SharedSection, ...] = ()
    most_jobs: tuple[JobsSection, ...] = ()
    pools: tuple[Pool, ...] = ()
    chunks: PositiveInt = 1

    def problem(self) -> Problem:
        """What the planner is asked.

        Raises:
            PlanError: parts do not go together.
        """
        return Problem(
            [self._stage(name, section) for name, section in self.stages.items()],
            [section.kind(name) for name, section in self.kinds.items()],
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
                raise ValueError(f"sync: no stage {end!r}{nearest(end, self.stages)}")
        return self

    def _stage(self, name: str, section: StageSection) -> Stage:
        rates = {}
        for kind, seconds in section.seconds.items():
            if kind not in self.kinds:
                raise PlanError(
                    f"stages.{name}.seconds: no kind {kind!r}{nearest(kind, self.kinds)}"
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
        return Stage(name, rates, **rest)


def dump_problem(problem: Problem, pools: Sequence[Pool] = (), chunks: int = 1) -> str:
    """A problem as text that :func:`read_problem` reads, with a placement where pools are given."""
    stages = {}
    for s, stage in enumerate(problem.stages):
        seconds = {}
        for k, kind in enumerate(problem.kinds):
            # Pins are in the table; in between the next lower number stands.
            rates = problem.table(problem.stages[s], k)
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


def _dumped(kind: Kind) -> dict[str, Any]:
    values = {k: v for k, v in vars(kind).items() if k not in ("name", "waits_s")}
    return values | ({"waits_s": dict(kind.waits_s)} if kind.waits_s else {})


def read_problem(path: Path) -> tuple[Problem, Placement | None]:
    """A problem and, where the file gives pools, a placement.

    Raises:
        PlanError: missing, not YAML, or invalid; names the key.
    """
    values = read_yaml(path, "problem", PlanError)
    if not isinstance(values, Mapping):
        raise PlanError(f"{path}: expected a mapping with 'kinds' and 'stages'")
    try:
        file = validate(ProblemFile, values, str(path))
        problem = file.problem()
        return problem, placement_of(problem, file.pools, file.chunks) if file.pools else None
    except ConfigError as error:
        raise PlanError(str(error)) from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def placement_of(
    problem: Problem, pools: Sequence[Pool], chunks: int, seldom: Collection[str] = ()
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
                raise PlanError(f"pools[{i}]: no {what} {wrong!r}{nearest(wrong, known)}")
        found += _parts(problem, pool, f"pools[{i}]")
    for s, name in enumerate(stages):
        if placed.count(s) != 1:
            raise PlanError(f"pools: stage {name!r} must be in one pool (is in {placed.count(s)})")
    found.sort()
    return Placement(tuple(own for own, _ in found), tuple(gpus for _, gpus in found), chunks)


def _parts(
    problem: Problem, pool: Pool, where: str
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
    ranks = {s: pool.ranks.get(name, every) for name, s in numbers.items()}
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
