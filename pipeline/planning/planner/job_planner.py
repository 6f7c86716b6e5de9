"""Planner for the execution ``stage``: every stage is a job; also the assessment of a user's
plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from pipeline.plan import Forecast, Plan, StagePlan
from pipeline.planning.planner import job_search
from pipeline.planning.planner.available_devices import PartitionDevices
from pipeline.planning.planner.proposal import (
    AlternativePlan,
    PlanProposal,
    PlanRow,
    evaluate_what_ifs,
    stage_forecasts,
)
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.stage_options import (
    StageOption,
    StageTimes,
    can_share_job,
    mixed_kind_option,
    num_work_items,
    q10_q90_interval,
    request_for_option,
    single_kind_option,
)
from pipeline.planning.profile.schema import Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError, did_you_mean
from stages.flow import Flow, flow_of


def evaluate_stage_plan(
    stage: str,
    plan: Plan,
    devices: Mapping[str, PartitionDevices],
    profile: Profile,
    config: RunConfig,
    where: str,
) -> StageOption:
    """Return the option that a plan describes for a stage, with its expected time.

    Raises:
        PlanError: the option is impossible; names the key and the limit.
    """
    wanted, at = plan.stage_plan(stage), f"{where}: stages.{stage}"
    chosen = _devices(wanted, devices, at)
    nodes = _nodes(wanted, chosen, at)
    for own, mine in zip(chosen, nodes, strict=True):
        if mine > own.kind.nodes:
            raise PlanError(
                f"{at}.nodes: {mine} requested of {own.name}, which has {own.kind.nodes}"
            )
        if own.max_nodes_per_job is not None and sum(nodes) > own.max_nodes_per_job:
            raise PlanError(
                f"{at}.nodes: {sum(nodes)} requested of {own.name}, where a job has at most "
                f"{own.max_nodes_per_job} (MaxNodes of the partition)"
            )
        if wanted.processes > own.per_node:
            raise PlanError(
                f"{at}.processes: {wanted.processes} a node, nodes of {own.name} have "
                f"{own.per_node} devices"
            )
    count = sum(nodes) * wanted.processes
    chosen = tuple(replace(o, allowance=o.allowance.for_job(wanted, count)) for o in chosen)
    works = [StageTimes(own, stage, flow_of(config).all_stages[stage], profile) for own in chosen]
    for work in works:
        _check_memory(work, wanted, at)
    most = num_work_items(stage, config)
    if count > most:
        raise PlanError(f"{at}.processes: {count} in all, there is work for {most}")
    if len(works) == 1:
        option = single_kind_option(works[0], nodes[0], wanted.processes)
    else:
        option = mixed_kind_option((works[0], works[1]), nodes, wanted.processes)
    if not math.isfinite(option.seconds):
        raise PlanError(
            f"{at}.processes: nothing is known of {option.count} processes on {option.place}; "
            f"measure with: rlinf profile --processes {option.count}"
        )
    _check_time(option, wanted, at)
    return option


def _devices(
    wanted: StagePlan, devices: Mapping[str, PartitionDevices], at: str
) -> tuple[PartitionDevices, ...]:
    partition = wanted.partition or ""
    mine = [own for own in devices.values() if own.kind.partition == partition]
    if wanted.partition is None and not mine:
        raise PlanError(f"{at}.partition: not given; one of {', '.join(devices)}")
    if not mine:
        partitions = dict.fromkeys(own.kind.partition for own in devices.values())
        raise PlanError(
            f"{at}.partition: {partition!r} is not here, or was not measured"
            f"{did_you_mean(partition, partitions)}; there are {', '.join(partitions)}"
        )
    if isinstance(wanted.speed_weights, dict):
        named = [
            own for own in mine if {own.feature, own.kind.gpu_type} & set(wanted.speed_weights)
        ]
        if len(named) == 2 and can_share_job(*named):
            return tuple(named)
        raise PlanError(
            f"{at}.speed_weights: {', '.join(wanted.speed_weights)} are not two kinds of nodes of "
            f"{partition}"
        )
    typed = [own for own in mine if wanted.gpu_type in (None, own.kind.gpu_type)]
    if not typed:
        kinds = ", ".join(own.kind.gpu_type or "none" for own in mine)
        raise PlanError(f"{at}.gpu_type: {partition} has no {wanted.gpu_type!r} (it has {kinds})")
    if len(typed) > 1:
        kinds = ", ".join(own.kind.gpu_type for own in typed)
        raise PlanError(
            f"{at}.gpu_type: {partition} has {kinds}, and how long it takes depends on it; name "
            "one, or give speed_weights and a constraint"
        )
    return (typed[0],)


def _nodes(wanted: StagePlan, chosen: tuple[PartitionDevices, ...], at: str) -> tuple[int, ...]:
    if len(chosen) == 1:
        return (wanted.nodes,)
    text = (wanted.constraint or "").strip("[]")
    counts = dict(part.split("*") for part in text.split("&") if part.count("*") == 1)
    found = tuple(int(counts.get(str(own.feature), 0)) for own in chosen)
    if sum(found) != wanted.nodes or not all(found):
        features = "&".join(f"{own.feature}*N" for own in chosen)
        raise PlanError(
            f"{at}.constraint: {wanted.constraint!r} does not say how many of the {wanted.nodes} "
            f"nodes are of which kind; write [{features}]"
        )
    return found


def _check_memory(work: StageTimes, wanted: StagePlan, at: str) -> None:
    most, name = work.max_per_node(), work.devices.name
    need = work.peak_memory_bytes >> 20
    if wanted.processes > most:
        raise PlanError(
            f"{at}.processes: {wanted.processes} a node need {wanted.processes * need} MiB "
            f"(measured), nodes of {name} have {work.devices.kind.mem_mb_per_node}; at most {most}"
        )
    on_host = not work.devices.has_memory
    if on_host and wanted.mem_mb is not None and wanted.mem_mb < wanted.processes * need:
        raise PlanError(
            f"{at}.mem_mb: {wanted.mem_mb}, but {wanted.processes} processes needed "
            f"{wanted.processes * need} MiB when measured on {name}"
        )
    if why := work.refusal_for(wanted.nodes * wanted.processes):
        raise PlanError(f"{at}.processes: {why}")


def _check_time(option: StageOption, wanted: StagePlan, at: str) -> None:
    tight = min(option.devices, key=lambda own: own.limit_s)
    most = tight.limit_s / 60
    if wanted.time_limit_min and wanted.time_limit_min > most:
        raise PlanError(
            f"{at}.time_limit_min: {wanted.time_limit_min} requested, {tight.time_limit_of} allows "
            f"{most:g}"
        )
    minutes = min(wanted.time_limit_min or math.inf, most)
    if option.seconds > 60 * minutes:
        raise PlanError(
            f"{at}.time_limit_min: {minutes:g} minutes, but {option.seconds / 60:.1f} are expected "
            f"on {option.place} {option.size}; it would be requeued for ever"
        )


def propose_jobs(request: PlanRequest, what_ifs: Sequence[str] = ()) -> PlanProposal:
    """Return the best plan in which every stage is a job.

    Raises:
        PlanError: a stage fits nowhere, or the request is inconsistent.
    """
    goal = request.get_objective()
    best, *others = job_search.choose_assignments(
        request.stage_options(), request.stage_dependencies(), goal
    )
    plan = build_plan(best.options, flow_of(request.config))
    request.validate_plan(plan)
    return _proposal(request, plan, best, others, what_ifs)


def assess_jobs(
    request: PlanRequest, plan: Plan, where: str, what_ifs: Sequence[str] = ()
) -> PlanProposal:
    """Forecast a user's plan, with the best plan among its alternatives.

    Args:
        where: the plan's name in errors.

    Raises:
        PlanError: the plan is impossible; names the key and the limit.
    """
    plan = request.validate_plan(plan)
    goal, after, priced = (
        request.get_objective(),
        request.stage_dependencies(),
        request.for_user_plan().priced_devices(),
    )
    chosen = [
        evaluate_stage_plan(
            stage, plan, priced, request.profile, request.config, where
        ).with_corrections(request.corrections)
        for stage in after
    ]
    own = job_search.choose_assignments({o.stage: [o] for o in chosen}, after, goal, 0)[0]
    request = request.for_planner()
    better: list[job_search.StageAssignment] = []
    with suppress(PlanError):  # as the planner would ask for them no jobs may run
        better = job_search.choose_assignments(request.stage_options(), after, goal, 0)
    others = [other for other in better if other.cost < own.cost / job_search.NOTABLE_COST_FACTOR]
    return _proposal(request, plan, own, others, what_ifs)


def _proposal(
    request: PlanRequest,
    plan: Plan,
    best: job_search.StageAssignment,
    others: Sequence[job_search.StageAssignment],
    what_ifs: Sequence[str],
) -> PlanProposal:
    goal, rows = request.get_objective(), _rows(best)
    beyond = [option.stage for option in best.options if option.extrapolated]
    notes = list(request.notes)
    if beyond:
        notes.append(
            f"{', '.join(beyond)}: more processes than were measured; the interval is wider. "
            "Measure there with: rlinf profile"
        )
    least = min([best.cost, *(other.cost for other in others)])
    return PlanProposal(
        plan=plan.model_copy(update={"forecast": _forecast(request, best, rows)}),
        mode="a job for each stage",
        rows=rows,
        objective=request.objective,
        unit=goal.unit,
        bound=least,
        exact=best.cost <= least,
        alternatives=tuple(_alternative(best, other) for other in others),
        what_ifs=tuple(evaluate_what_ifs(request, what_ifs, _best_stagewise)),
        notes=tuple(notes),
    )


def _best_stagewise(request: PlanRequest) -> tuple[float, float]:
    best = job_search.choose_assignments(
        request.stage_options(), request.stage_dependencies(), request.get_objective(), 0
    )[0]
    return best.seconds, best.cost


def _rows(choice: job_search.StageAssignment) -> tuple[PlanRow, ...]:
    rows, starts = [], choice.starts
    for option in choice.options:
        low, high = q10_q90_interval(option.seconds, option.spread_s)
        parts = {name: part.mean for name, part in option.parts.items()}
        rows.append(
            PlanRow(
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


def _forecast(
    request: PlanRequest, best: job_search.StageAssignment, rows: Sequence[PlanRow]
) -> Forecast:
    low, high = q10_q90_interval(best.seconds, best.spread_s)
    return Forecast(
        objective=request.objective,
        cost=best.cost,
        iteration_s=best.seconds,
        low_s=low,
        high_s=high,
        gpu_hours=best.gpu_hours,
        stages=stage_forecasts(rows),
        sources=request.sources,
        corrections=request.learned_corrections(),
    )


def build_plan(options: Sequence[StageOption], flow: Flow) -> Plan:
    """Return the plan that runs each stage as its option; offline stages use resources of
    others."""
    return Plan(stages=with_offline_stages({o.stage: request_for_option(o) for o in options}, flow))


def with_offline_stages(stages: Mapping[str, StagePlan], flow: Flow) -> dict[str, StagePlan]:
    """Return the resources of all stages; a stage outside of iterations uses those of another
    stage."""
    seldom = {
        name: stage.colocate_with
        for name, stage in flow.all_stages.items()
        if name not in flow.stages
    }
    return {**stages, **{name: stages[like] for name, like in seldom.items() if like}}


def _alternative(
    best: job_search.StageAssignment, other: job_search.StageAssignment
) -> AlternativePlan:
    pairs = [
        (own, its)
        for own, its in zip(best.options, other.options, strict=True)
        if (own.place, own.size) != (its.place, its.size)
    ]
    what = ", ".join(f"{its.stage} on {its.place} {its.size}" for _, its in pairs)
    own, its = max(pairs, key=lambda pair: pair[1].seconds - pair[0].seconds)
    return AlternativePlan(what, other.seconds, other.cost, _why(own, its))


def _why(own: StageOption, its: StageOption) -> str:
    """Describe where the other option spends more time, money or waiting, or what it saves."""
    if its.seconds > own.seconds:
        part = max(its.parts, key=lambda name: its.parts[name].mean - _part_seconds(own, name))
        theirs, ours = _part_seconds(its, part), _part_seconds(own, part)
        return f"{its.stage}: {part} takes {theirs:.2f} s instead of {ours:.2f} s"
    if its.price_per_hour > own.price_per_hour:
        return f"{its.stage} holds {sum(its.num_devices)} devices instead of {sum(own.num_devices)}"
    if its.wait_s > own.wait_s:
        return f"{its.stage} waits {its.wait_s:.0f} s in the queue instead of {own.wait_s:.0f} s"
    return f"better: {its.stage} takes {its.seconds:.2f} s instead of {own.seconds:.2f} s"


def _part_seconds(option: StageOption, name: str) -> float:
    return option.parts[name].mean if name in option.parts else 0.0
