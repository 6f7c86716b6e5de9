"""From measurements to a plan, of either grain."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.planning.planner.jobs import propose_jobs
from pipeline.planning.planner.pools import propose_pools
from pipeline.planning.planner.proposal import Proposal
from pipeline.planning.planner.request import Request


def propose(request: Request, what_ifs: Sequence[str] = ()) -> Proposal:
    """The best plan for a request.

    Args:
        what_ifs: clusters to compare with, such as ``h100=8``.

    Raises:
        PlanError: a stage fits nowhere, or what was asked makes no sense.
    """
    make = propose_jobs if request.grain == "stage" else propose_pools
    return make(request, what_ifs)
