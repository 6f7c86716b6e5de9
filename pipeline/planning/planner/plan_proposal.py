"""The planner's output: a plan with its forecast, alternatives and notes."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan import Forecast, Plan, StageForecast


@dataclass(frozen=True)
class PlanRow:
    """The forecast of one stage of the plan, as a row of a table."""

    stage: str
    place: str
    """Kinds of device on which the stage runs: ``a100+h100``."""
    size: str
    """Nodes x devices per node; or the pool and its number of devices: ``pool 1: 4``."""
    forecast: StageForecast


@dataclass(frozen=True)
class AlternativePlan:
    """Another plan, which is worse by the objective (or better, beside a user's plan)."""

    difference: str
    """The stages that this plan places differently, and where; for pools, all of its pools."""
    seconds: float
    """Seconds of an iteration."""
    cost: float
    """Value of the objective, in its unit."""
    reason: str
    """Why this plan is worse, or better."""


@dataclass(frozen=True)
class WhatIf:
    """The best plan of a different cluster."""

    case: str
    """How the cluster differs: ``h100=16``, ``without a100``."""
    seconds: float | None
    """Seconds of an iteration; None if there is no plan."""


@dataclass(frozen=True)
class PlanProposal:
    """A plan with its forecast, alternatives and notes."""

    plan: Plan
    mode: str
    """How the stages are placed: ``collocated``, ``a job for each stage``."""
    rows: tuple[PlanRow, ...]
    is_optimal: bool
    """True if no other plan costs less under these predictions: all of them were compared."""
    alternatives: tuple[AlternativePlan, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    """For pools: the placement problem as YAML text, for ``rlinf simulate``; empty for jobs."""

    @property
    def forecast(self) -> Forecast:
        """The forecast of the plan."""
        assert self.plan.forecast is not None
        return self.plan.forecast
