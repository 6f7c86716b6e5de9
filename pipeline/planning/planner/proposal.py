"""The planner's output: a plan, its forecast, and the alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.plan import Forecast, Plan, StageForecast
from pipeline.planning.planner.available_devices import with_counts
from pipeline.planning.planner.request import PlanRequest, parse_counts
from rlinf.errors import PlanError


@dataclass(frozen=True)
class PlanRow:
    """The forecast of one stage of the plan, as a row of a table."""

    stage: str
    place: str
    size: str
    """Nodes x devices per node."""
    devices: int
    start_s: float
    seconds: float
    low_s: float
    high_s: float
    breakdown_s: Mapping[str, float]
    bound_by: str


@dataclass(frozen=True)
class AlternativePlan:
    """Another plan, which is worse by the objective."""

    difference: str
    seconds: float
    cost: float
    reason: str
    """Why this plan is worse."""


@dataclass(frozen=True)
class WhatIf:
    """The best plan of a different cluster."""

    case: str
    seconds: float
    cost: float


@dataclass(frozen=True)
class PlanProposal:
    """A plan with its forecast, alternatives and notes."""

    plan: Plan
    mode: str
    rows: tuple[PlanRow, ...]
    objective: str
    unit: str
    bound: float
    """Lower bound of the cost of all plans, in the unit of the objective."""
    exact: bool
    alternatives: tuple[AlternativePlan, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    """For pools: the placement problem, as a file that ``rlinf simulate`` reads."""

    @property
    def forecast(self) -> Forecast:
        """The forecast of the plan."""
        assert self.plan.forecast is not None
        return self.plan.forecast


def evaluate_what_ifs(
    request: PlanRequest,
    what_ifs: Sequence[str],
    best: Callable[[PlanRequest], tuple[float, float]],
) -> list[WhatIf]:
    """Return the best plans for different clusters: ``what_ifs``, and each kind doubled or removed.

    Args:
        best: returns seconds and cost of the best plan of a request.
    """
    cases = [(text, parse_counts([text])) for text in what_ifs]
    base_kinds = {
        name: entry for name, entry in request.devices.items() if entry.better_kind is None
    }
    for name, entry in base_kinds.items():
        if len(base_kinds) > 1:
            cases.append((f"without {name}", {name: 0}))
        doubled = 2 * entry.kind.nodes * entry.per_node
        cases.append((f"{name}={doubled}", {name: doubled}))
    results: dict[str, WhatIf] = {}
    for text, counts in cases:
        try:
            changed = replace(request, devices=with_counts(request.devices, counts))
            results.setdefault(text, WhatIf(text, *best(changed)))
        except PlanError:
            if text in what_ifs:
                raise
            results.setdefault(text, WhatIf(text, math.inf, math.inf))
    return list(results.values())


def stage_forecasts(rows: Sequence[PlanRow]) -> dict[str, StageForecast]:
    """Return the stage forecasts that a plan's file stores."""
    return {
        row.stage: StageForecast(
            seconds=row.seconds,
            low_s=row.low_s,
            high_s=row.high_s,
            breakdown_s=dict(row.breakdown_s),
            bound_by=row.bound_by,
            start_s=row.start_s,
        )
        for row in rows
    }
