"""Proposals of grain ``stage``: a job for each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from pipeline.plan import Forecast, Plan, StagePlan
from pipeline.planning.planner import stagewise
from pipeline.planning.planner.asked import of_option
from pipeline.planning.planner.given import option_of
from pipeline.planning.planner.options import Option
from pipeline.planning.planner.proposal import Alternative, Proposal, Row, forecasts, what_if_bars
from pipeline.planning.planner.request import Request
from pipeline.planning.planner.work import interval
from rlinf.errors import PlanError
from stages.flow import Flow, flow_of


def propose_jobs(request: Request, what_ifs: Sequence[str] = ()) -> Proposal:
    """The best plan of grain ``stage``.

    Raises:
        PlanError: a stage fits nowhere, or what was asked makes no sense.
    """
    goal = request.goal()
    best, *others = stagewise.choose(request.options(), request.after(), goal)
    plan = plan_of(best.options, flow_of(request.config))
    request.check(plan)
    return _proposal(request, plan, best, others, what_ifs)


def assess(request: Request, plan: Plan, where: str, what_ifs: Sequence[str] = ()) -> Proposal:
    """What a given plan would take, with the best one among its alternatives.

    Args:
        where: what to call the plan in errors.

    Raises:
        PlanError: it cannot be; names the key and the limit.
    """
    plan = request.check(plan)
    goal, after, priced = request.goal(), request.after(), request.judging().priced()
    chosen = [
        option_of(stage, plan, priced, request.profile, request.config, where).corrected(
            request.corrections
        )
        for stage in after
    ]
    own = stagewise.choose({o.stage: [o] for o in chosen}, after, goal, 0)[0]
    request = request.planning()
    better: list[stagewise.Choice] = []
    with suppress(PlanError):  # as the planner would ask for them no jobs may run
        better = stagewise.choose(request.options(), after, goal, 0)
    others = [other for other in better if other.cost < own.cost / stagewise.NOTABLE]
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


def _forecast(request: Request, best: stagewise.Choice, rows: Sequence[Row]) -> Forecast:
    low, high = interval(best.seconds, best.spread_s)
    return Forecast(
        objective=request.objective,
        cost=best.cost,
        iteration_s=best.seconds,
        low_s=low,
        high_s=high,
        gpu_hours=best.gpu_hours,
        stages=forecasts(rows),
        sources=request.sources,
        learnt=request.learnt(),
    )


def plan_of(options: Sequence[Option], flow: Flow) -> Plan:
    """The plan that runs each stage as its option says; seldom ones are like others."""
    return Plan(stages=with_seldom({o.stage: of_option(o) for o in options}, flow))


def with_seldom(stages: Mapping[str, StagePlan], flow: Flow) -> dict[str, StagePlan]:
    """Resources of all stages: those that are no part of an iteration get what others have."""
    seldom = {name: stage.like for name, stage in flow.table.items() if name not in flow.stages}
    return {**stages, **{name: stages[like] for name, like in seldom.items() if like}}


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
        return f"{its.stage} holds {sum(its.held)} devices instead of {sum(own.held)}"
    if its.wait_s > own.wait_s:
        return f"{its.stage} waits {its.wait_s:.0f} s in the queue instead of {own.wait_s:.0f} s"
    return f"better: {its.stage} takes {its.seconds:.2f} s instead of {own.seconds:.2f} s"


def _part(option: Option, name: str) -> float:
    return option.parts[name].mean if name in option.parts else 0.0
