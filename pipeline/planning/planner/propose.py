"""From measurements to a plan, of either grain."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.plan import Plan
from pipeline.planning.planner import jobs, pools
from pipeline.planning.planner.proposal import Proposal
from pipeline.planning.planner.request import Request


def propose(request: Request, what_ifs: Sequence[str] = ()) -> Proposal:
    """The best plan for a request.

    Args:
        what_ifs: clusters to compare with, such as ``h100=8``.

    Raises:
        PlanError: a stage fits nowhere, or what was asked makes no sense.
    """
    make = jobs.propose_jobs if request.grain == "stage" else pools.propose_pools
    return make(request.noted(), what_ifs)


def assess(request: Request, plan: Plan, where: str, what_ifs: Sequence[str] = ()) -> Proposal:
    """What a given plan would take, with the best one of its grain among its alternatives.

    Args:
        where: what to call the plan in errors.

    Raises:
        PlanError: it cannot be; names the key and the limit.
    """
    make = jobs.assess if plan.grain == "stage" else pools.assess
    return make(request.noted(), plan, where, what_ifs)
