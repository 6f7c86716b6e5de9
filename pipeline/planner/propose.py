"""From a profile and an inventory to a plan, with what else was possible and why it loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.flow import FLOWS
from pipeline.plan import Forecast, Plan, Sources, StageForecast, StagePlan
from pipeline.planner import stagewise
from pipeline.planner.devices import Devices, with_counts
from pipeline.planner.given import option_of
from pipeline.planner.objective import IterationTime, Money, Objective, TimeTo
from pipeline.planner.options import Correction, Option, options
from pipeline.planner.work import NO_GPU
from pipeline.profile.schema import Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError, nearest
from stages.layout import PER_ITERATION

Grain = Literal["stage", "segment"]
OBJECTIVES = ("time", "gpu-hours", "money", "time-to-end")
LIKE: Mapping[str, str] = {"warm_start": "train", "evaluate": "rollout"}
"""Stages that run seldom, and the stage whose resources they get."""
QUANTILE = 1.2816
"""Standard deviations to the 10 % and 90 % quantiles of a normal distribution."""
TIME_FACTOR = 10
"""Wall time asked for, in predicted times: a limit is for jobs that hang."""
LEAST_MINUTES = 10
MEMORY_FACTOR = 1.5
MEMORY_STEP_MB = 256
MOST_CPUS = 16


@dataclass(frozen=True)
class Row:
    """One stage of the plan."""

    stage: str
    place: str
    size: str
    """Nodes by devices of each."""
    devices: int
    start_s: float
    seconds: float
    low_s: float
    high_s: float
    parts_s: Mapping[str, float]
    bound_by: str


@dataclass(frozen=True)
class Alternative:
    """Another plan, worse by the objective."""

    what: str
    seconds: float
    cost: float
    why: str


@dataclass(frozen=True)
class WhatIf:
    """The best plan if something were different."""

    what: str
    seconds: float
    cost: float


@dataclass(frozen=True)
class Proposal:
    """A plan and its reasons."""

    plan: Plan
    mode: str
    rows: tuple[Row, ...]
    objective: str
    unit: str
    bound: float
    """No plan costs less, in the unit of the objective."""
    exact: bool
    alternatives: tuple[Alternative, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def forecast(self) -> Forecast:
        """What is predicted of the plan."""
        assert self.plan.predicted is not None
        return self.plan.predicted


@dataclass(frozen=True)
class Request:
    """What is to be planned."""

    config: RunConfig
    profile: Profile
    devices: Mapping[str, Devices]
    objective: str = "time"
    pins: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By stage: the only kinds it may use."""
    notes: tuple[str, ...] = ()
    corrections: Mapping[tuple[str, str], Correction] = field(default_factory=dict)
    """By stage and kind."""
    sources: Sources | None = None

    def goal(self) -> Objective:
        """The objective.

        Raises:
            PlanError: unknown.
        """
        if self.objective == "time":
            return IterationTime()
        if self.objective in ("gpu-hours", "money"):
            return Money()
        if self.objective == "time-to-end":
            return TimeTo(self.config.iterations)
        raise PlanError(
            f"--objective {self.objective}: unknown{nearest(self.objective, OBJECTIVES)}; "
            f"one of {', '.join(OBJECTIVES)}"
        )

    def priced(self) -> dict[str, Devices]:
        """The devices; for GPU-hours all cost the same."""
        if self.objective != "gpu-hours":
            return dict(self.devices)
        return {name: replace(own, price=1.0) for name, own in self.devices.items()}

    def after(self) -> dict[str, tuple[str, ...]]:
        """By stage: those of the same iteration that it waits for."""
        stages = FLOWS[self.config.flow].stages

        def sources(stage: str) -> tuple[str, ...]:
            found = [s.stage for s in stages[stage].values() if s.stage in stages and not s.back]
            return tuple(dict.fromkeys(found))

        return {stage: sources(stage) for stage in stages}

    def options(self) -> dict[str, list[Option]]:
        """All ways to run each stage as a job."""
        priced, found = self.priced(), {}
        for stage in FLOWS[self.config.flow].stages:
            every = options(stage, priced, self.profile, self.config, self.pins.get(stage))
            found[stage] = [option.corrected(self.corrections) for option in every]
        return found


def parse_pins(pins: Sequence[str], devices: Mapping[str, Devices]) -> dict[str, frozenset[str]]:
    """``["train=h100"]`` as kinds by stage; a partition stands for all its kinds.

    Raises:
        PlanError: not of this form, or an unknown stage or kind.
    """
    found: dict[str, frozenset[str]] = {}
    for pin in pins:
        stage, sign, names = pin.partition("=")
        if not sign or not names:
            raise PlanError(f"--pin {pin}: expected STAGE=KIND, such as train=h100")
        if stage not in PER_ITERATION:
            raise PlanError(f"--pin {pin}: no stage {stage!r}{nearest(stage, PER_ITERATION)}")
        kinds: set[str] = set()
        for name in names.split(","):
            mine = {n for n, own in devices.items() if name in (n, own.kind.partition)}
            if not mine:
                raise PlanError(
                    f"--pin {pin}: no kind {name!r}{nearest(name, devices)}; "
                    f"there are {', '.join(devices)}"
                )
            kinds |= mine
        found[stage] = frozenset(kinds)
    return found


def parse_counts(values: Sequence[str]) -> dict[str, int]:
    """``["h100=8"]`` as devices by kind.

    Raises:
        PlanError: not of this form.
    """
    found = {}
    for value in values:
        for part in value.split(","):
            name, _, count = part.partition("=")
            if not count.isdigit():
                raise PlanError(f"--what-if {value}: expected KIND=NUMBER, such as h100=8")
            found[name] = int(count)
    return found


def propose(request: Request, what_ifs: Sequence[str] = ()) -> Proposal:
    """The best plan of grain ``stage``.

    Raises:
        PlanError: a stage fits nowhere, or what was asked makes no sense.
    """
    goal = request.goal()
    best, *others = stagewise.choose(request.options(), request.after(), goal)
    plan = Plan(stages={stage: _resources(option) for stage, option in _named(best)})
    return _proposal(request, plan, best, others, what_ifs)


def assess(request: Request, plan: Plan, where: str, what_ifs: Sequence[str] = ()) -> Proposal:
    """What a given plan would take, with the best one among its alternatives.

    Args:
        where: what to call the plan in errors.

    Raises:
        PlanError: it cannot be; names the key and the limit.
    """
    goal, after = request.goal(), request.after()
    chosen = [
        option_of(stage, plan, request.priced(), request.profile, request.config, where).corrected(
            request.corrections
        )
        for stage in after
    ]
    own = stagewise.choose({o.stage: [o] for o in chosen}, after, goal, 0)[0]
    better = stagewise.choose(request.options(), after, goal, 0)[0]
    others = [better] if better.cost < own.cost / stagewise.NOTABLE else []
    return _proposal(request, plan, own, others, what_ifs)


def _proposal(
    request: Request,
    plan: Plan,
    best: stagewise.Choice,
    others: Sequence[stagewise.Choice],
    what_ifs: Sequence[str],
) -> Proposal:
    goal, rows = request.goal(), _rows(best)
    beyond = [option.stage for option in best.options if option.extrapolated]
    notes = list(request.notes)
    if beyond:
        notes.append(
            f"{', '.join(beyond)}: more processes than were measured; the interval is wider. "
            "Measure there with: rlinf profile"
        )
    least = min([best.cost, *(other.cost for other in others)])
    return Proposal(
        plan=plan.model_copy(update={"predicted": _forecast(request, best, rows)}),
        mode="a job for each stage",
        rows=rows,
        objective=request.objective,
        unit=goal.unit,
        bound=least,
        exact=best.cost <= least,
        alternatives=tuple(_alternative(best, other) for other in others),
        what_ifs=tuple(what_if_bars(request, what_ifs, _best_stagewise)),
        notes=tuple(notes),
    )


def _best_stagewise(request: Request) -> tuple[float, float]:
    best = stagewise.choose(request.options(), request.after(), request.goal(), 0)[0]
    return best.seconds, best.cost


def what_if_bars(
    request: Request,
    asked: Sequence[str],
    best: Callable[[Request], tuple[float, float]],
) -> list[WhatIf]:
    """The best plans of clusters that differ: as asked, and each kind twice, or without.

    Args:
        best: seconds and cost of the best plan of a request.
    """
    cases = [(text, parse_counts([text])) for text in asked]
    own_nodes = {name: own for name, own in request.devices.items() if own.same_as is None}
    for name, own in own_nodes.items():
        if len(own_nodes) > 1:
            cases.append((f"without {name}", {name: 0}))
        cases.append((f"{name}={2 * own.count}", {name: 2 * own.count}))
    found: dict[str, WhatIf] = {}
    for text, counts in cases:
        try:
            changed = replace(request, devices=with_counts(request.devices, counts))
            found.setdefault(text, WhatIf(text, *best(changed)))
        except PlanError:
            if text in asked:
                raise
            found.setdefault(text, WhatIf(text, math.inf, math.inf))
    return list(found.values())


def _rows(choice: stagewise.Choice) -> tuple[Row, ...]:
    rows, starts = [], choice.starts
    for option in choice.options:
        low, high = interval(option.seconds, option.spread_s)
        parts = {name: part.mean for name, part in option.parts.items()}
        rows.append(
            Row(
                option.stage,
                option.place,
                option.size,
                option.count,
                starts[option.stage],
                option.seconds,
                low,
                high,
                parts,
                option.bound_by,
            )
        )
    return tuple(rows)


def interval(seconds: float, spread: float) -> tuple[float, float]:
    """The 10 % and 90 % quantiles of a normal distribution."""
    return max(0.0, seconds - QUANTILE * spread), seconds + QUANTILE * spread


def _forecast(request: Request, best: stagewise.Choice, rows: Sequence[Row]) -> Forecast:
    low, high = interval(best.seconds, best.spread_s)
    return Forecast(
        objective=request.objective,
        cost=best.cost,
        iteration_s=best.seconds,
        low_s=low,
        high_s=high,
        gpu_hours=best.gpu_hours,
        stages={
            row.stage: StageForecast(
                seconds=row.seconds,
                low_s=row.low_s,
                high_s=row.high_s,
                parts_s=dict(row.parts_s),
                bound_by=row.bound_by,
                start_s=row.start_s,
            )
            for row in rows
        },
        sources=request.sources,
    )


def _named(choice: stagewise.Choice) -> list[tuple[str, Option]]:
    by_stage = {option.stage: option for option in choice.options}
    seldom = [(stage, by_stage[like]) for stage, like in LIKE.items()]
    return [*seldom[:1], *by_stage.items(), *seldom[1:]]


def _resources(option: Option) -> StagePlan:
    first = option.devices[0].kind
    values: dict[str, object] = {
        "partition": first.partition or None,
        "nodes": sum(option.nodes),
        "processes": option.processes,
        "time_min": _minutes(option),
    }
    if first.gpus_per_node:
        values |= {
            "gpus": 0 if option.stage in NO_GPU else option.processes,
            "cpus": min(MOST_CPUS, max(1, first.cpus_per_node // first.gpus_per_node)),
        }
    if values.get("gpus") and first.gpu_type and len(option.devices) == 1:
        values["gpu_type"] = first.gpu_type
    if len(option.devices) > 1:
        features = [str(own.feature) for own in option.devices]
        nodes = zip(features, option.nodes, strict=True)
        values["shares"] = dict(zip(features, option.speeds, strict=True))
        values["constraint"] = f"[{'&'.join(f'{name}*{n}' for name, n in nodes)}]"
    if option.peak_memory_bytes and not (first.gpus_per_node and first.gpu_model):
        need = MEMORY_FACTOR * option.processes * option.peak_memory_bytes / 2**20
        rounded = math.ceil(need / MEMORY_STEP_MB) * MEMORY_STEP_MB
        values["mem_mb"] = min(rounded, first.mem_mb_per_node) if first.partition else rounded
    return StagePlan.model_validate({k: v for k, v in values.items() if v is not None})


def _minutes(option: Option) -> int:
    asked = max(LEAST_MINUTES, math.ceil(TIME_FACTOR * option.seconds / 60))
    limits = [own.time_limit_min for own in option.devices if own.time_limit_min]
    return min([asked, *limits])


def _alternative(best: stagewise.Choice, other: stagewise.Choice) -> Alternative:
    pairs = [
        (own, its)
        for own, its in zip(best.options, other.options, strict=True)
        if (own.place, own.size) != (its.place, its.size)
    ]
    what = ", ".join(f"{its.stage} on {its.place} {its.size}" for _, its in pairs)
    own, its = max(pairs, key=lambda pair: pair[1].seconds - pair[0].seconds)
    return Alternative(what, other.seconds, other.cost, _why(own, its))


def _why(own: Option, its: Option) -> str:
    """What the other option spends more on, time, money or waiting; or what it saves."""
    if its.seconds > own.seconds:
        part = max(its.parts, key=lambda name: its.parts[name].mean - _part(own, name))
        theirs, ours = _part(its, part), _part(own, part)
        return f"{its.stage}: {part} takes {theirs:.2f} s instead of {ours:.2f} s"
    if its.price_per_hour > own.price_per_hour:
        return f"{its.stage} holds {its.count} devices instead of {own.count}"
    if its.wait_s > own.wait_s:
        return f"{its.stage} waits {its.wait_s:.0f} s in the queue instead of {own.wait_s:.0f} s"
    return f"better: {its.stage} takes {its.seconds:.2f} s instead of {own.seconds:.2f} s"


def _part(option: Option, name: str) -> float:
    return option.parts[name].mean if name in option.parts else 0.0
