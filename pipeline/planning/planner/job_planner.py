"""Finds the best plan or forecasts a user's plan for the execution ``jobs``: a job per stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeline.plan import Forecast, Plan, StagePlan
from pipeline.planning.planner.available_devices import PartitionDevices, shared_capacities
from pipeline.planning.planner.problem import Objective
from pipeline.planning.planner.recommendations import (
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
    plan_name: str,
) -> StageOption:
    """Return the option that a user's plan describes for a stage, with its expected time.

    Raises:
        PlanError: the option is impossible; the message names the key and the limit.
    """
    request, key = plan.stage_plan(stage), f"{plan_name}: stages.{stage}"
    selected = _select_devices(request, devices, key)
    nodes = _nodes_by_kind(request, selected, key)
    for entry, node_count in zip(selected, nodes, strict=True):
        if node_count > entry.kind.nodes:
            raise PlanError(
                f"{key}.nodes: {node_count} requested of {entry.name}, which has {entry.kind.nodes}"
            )
        if entry.max_nodes_per_job is not None and sum(nodes) > entry.max_nodes_per_job:
            raise PlanError(
                f"{key}.nodes: {sum(nodes)} requested of {entry.name}, where a job has at most "
                f"{entry.max_nodes_per_job} (MaxNodes of the partition)"
            )
        if request.processes > entry.per_node:
            raise PlanError(
                f"{key}.processes: {request.processes} a node, nodes of {entry.name} have "
                f"{entry.per_node} devices"
            )
    count = sum(nodes) * request.processes
    stage_times, spec = [], flow_of(config).all_stages[stage]
    for entry in selected:
        job_entry = replace(entry, allowance=entry.allowance.for_job(request, count))
        stage_times.append(StageTimes(job_entry, stage, spec, profile))
    for times in stage_times:
        _check_memory(times, request, key)
    limit = num_work_items(stage, config)
    if count > limit:
        raise PlanError(f"{key}.processes: {count} in all, but there is work for only {limit}")
    if len(stage_times) == 1:
        option = single_kind_option(stage_times[0], nodes[0], request.processes)
    else:
        option = mixed_kind_option((stage_times[0], stage_times[1]), nodes, request.processes)
    if not math.isfinite(option.seconds):
        raise PlanError(
            f"{key}.processes: {count} processes on {option.place} were not measured; "
            f"measure with: rlinf profile --processes {count}"
        )
    _check_time(option, request, key)
    return option


def _select_devices(
    request: StagePlan, devices: Mapping[str, PartitionDevices], key: str
) -> tuple[PartitionDevices, ...]:
    partition = request.partition or ""
    in_partition = [entry for entry in devices.values() if entry.kind.partition == partition]
    if request.partition is None and not in_partition:
        raise PlanError(f"{key}.partition: not given; one of {', '.join(devices)}")
    if not in_partition:
        partitions = dict.fromkeys(entry.kind.partition for entry in devices.values())
        raise PlanError(
            f"{key}.partition: {partition!r} is not here, or was not measured"
            f"{did_you_mean(partition, partitions)}; there are {', '.join(partitions)}"
        )
    if isinstance(request.speed_weights, dict):
        weights = set(request.speed_weights)
        weighted = [e for e in in_partition if {e.feature, e.kind.gpu_type} & weights]
        if len(weighted) == 2 and can_share_job(*weighted):
            return tuple(weighted)
        raise PlanError(
            f"{key}.speed_weights: {', '.join(request.speed_weights)} are not two kinds of nodes "
            f"of {partition}"
        )
    matching = [entry for entry in in_partition if request.gpu_type in (None, entry.kind.gpu_type)]
    if not matching:
        kinds = ", ".join(entry.kind.gpu_type or "none" for entry in in_partition)
        raise PlanError(f"{key}.gpu_type: {partition} has no {request.gpu_type!r} (it has {kinds})")
    if len(matching) > 1:
        kinds = ", ".join(entry.kind.gpu_type for entry in matching)
        raise PlanError(
            f"{key}.gpu_type: {partition} has {kinds}, which differ in speed; name "
            "one, or give speed_weights and a constraint"
        )
    return (matching[0],)


def _nodes_by_kind(
    request: StagePlan, selected: tuple[PartitionDevices, ...], key: str
) -> tuple[int, ...]:
    if len(selected) == 1:
        return (request.nodes,)
    text = (request.constraint or "").strip("[]")
    counts = dict(part.split("*") for part in text.split("&") if part.count("*") == 1)
    nodes = tuple(int(counts.get(str(entry.feature), 0)) for entry in selected)
    if sum(nodes) != request.nodes or not all(nodes):
        features = "&".join(f"{entry.feature}*N" for entry in selected)
        raise PlanError(
            f"{key}.constraint: {request.constraint!r} does not say how many of the "
            f"{request.nodes} nodes are of which kind; write [{features}]"
        )
    return nodes


def _check_memory(times: StageTimes, request: StagePlan, key: str) -> None:
    limit, name = times.max_per_node(), times.devices.name
    process_mb = times.peak_memory_bytes >> 20
    if request.processes > limit:
        raise PlanError(
            f"{key}.processes: {request.processes} a node need {request.processes * process_mb} "
            f"MiB (measured), nodes of {name} have {times.devices.kind.mem_mb_per_node}; at most "
            f"{limit}"
        )
    memory_mb = request.processes * process_mb
    uses_host_memory = not times.devices.has_device_memory
    if uses_host_memory and request.mem_mb is not None and request.mem_mb < memory_mb:
        raise PlanError(
            f"{key}.mem_mb: {request.mem_mb}, but {request.processes} processes needed "
            f"{memory_mb} MiB when measured on {name}"
        )
    if reason := times.refusal_for(request.nodes * request.processes):
        raise PlanError(f"{key}.processes: {reason}")


def _check_time(option: StageOption, request: StagePlan, key: str) -> None:
    strictest = min(option.devices, key=lambda entry: entry.limit_s)
    limit_min = strictest.limit_s / 60
    if request.time_limit_min and request.time_limit_min > limit_min:
        raise PlanError(
            f"{key}.time_limit_min: {request.time_limit_min} requested, "
            f"{strictest.time_limit_of} allows {limit_min:g}"
        )
    minutes = min(request.time_limit_min or math.inf, limit_min)
    if option.seconds > 60 * minutes:
        raise PlanError(
            f"{key}.time_limit_min: {minutes:g} minutes, but {option.seconds / 60:.1f} are "
            f"expected on {option.place} {option.size}; the job would be requeued forever"
        )


def propose_jobs(request: PlanRequest, what_ifs: Sequence[str] = ()) -> PlanProposal:
    """Return the best plan in which every stage is a job.

    Raises:
        PlanError: a stage cannot run anywhere, or the request is inconsistent.
    """
    objective = request.get_objective()
    best, *others = choose_assignments(
        request.stage_options(), request.stage_dependencies(), objective
    )
    plan = build_plan(best.options, flow_of(request.config))
    request.validate_plan(plan)
    return _proposal(request, plan, best, others, what_ifs)


def assess_jobs(
    request: PlanRequest, plan: Plan, plan_name: str, what_ifs: Sequence[str] = ()
) -> PlanProposal:
    """Forecast a user's plan, with the best plan among its alternatives.

    Args:
        plan_name: name of the plan in errors.

    Raises:
        PlanError: the plan is impossible; the message names the key and the limit.
    """
    plan = request.validate_plan(plan)
    objective, dependencies = request.get_objective(), request.stage_dependencies()
    devices = request.for_user_plan().priced_devices()
    options = [
        evaluate_stage_plan(
            stage, plan, devices, request.profile, request.config, plan_name
        ).with_corrections(request.corrections)
        for stage in dependencies
    ]
    by_stage = {option.stage: [option] for option in options}
    assignment = choose_assignments(by_stage, dependencies, objective, 0)[0]
    request = request.for_planner()
    planned: list[StageAssignment] = []
    with suppress(PlanError):  # jobs as the planner requests them may not be allowed
        planned = choose_assignments(request.stage_options(), dependencies, objective, 0)
    max_cost = assignment.cost / NOTABLE_COST_FACTOR
    others = [other for other in planned if other.cost < max_cost]
    return _proposal(request, plan, assignment, others, what_ifs)


def _proposal(
    request: PlanRequest,
    plan: Plan,
    best: StageAssignment,
    others: Sequence[StageAssignment],
    what_ifs: Sequence[str],
) -> PlanProposal:
    objective, rows = request.get_objective(), _rows(best)
    extrapolated = [option.stage for option in best.options if option.extrapolated]
    notes = list(request.notes)
    if extrapolated:
        notes.append(
            f"{', '.join(extrapolated)}: more processes than were measured; the interval is wider. "
            "Measure there with: rlinf profile"
        )
    lowest_cost = min([best.cost, *(other.cost for other in others)])
    return PlanProposal(
        plan=plan.model_copy(update={"forecast": _forecast(request, best, rows)}),
        mode="a job for each stage",
        rows=rows,
        objective=request.objective,
        unit=objective.unit,
        lower_bound=lowest_cost,
        is_optimal=best.cost <= lowest_cost,
        alternatives=tuple(_alternative(best, other) for other in others),
        what_ifs=tuple(evaluate_what_ifs(request, what_ifs, _best_time_and_cost)),
        notes=tuple(notes),
    )


def _best_time_and_cost(request: PlanRequest) -> tuple[float, float]:
    best = choose_assignments(
        request.stage_options(), request.stage_dependencies(), request.get_objective(), 0
    )[0]
    return best.seconds, best.cost


def _rows(assignment: StageAssignment) -> tuple[PlanRow, ...]:
    rows, start_times = [], assignment.start_times
    for option in assignment.options:
        low, high = q10_q90_interval(option.seconds, option.spread_s)
        parts = {name: part.mean for name, part in option.parts.items()}
        rows.append(
            PlanRow(
                option.stage,
                option.place,
                option.size,
                option.num_processes,
                start_times[option.stage],
                option.seconds,
                low,
                high,
                parts,
                option.bound_by,
            )
        )
    return tuple(rows)


def _forecast(request: PlanRequest, best: StageAssignment, rows: Sequence[PlanRow]) -> Forecast:
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
    """Return the plan with the request of each option."""
    return Plan(stages=with_other_stages({o.stage: request_for_option(o) for o in options}, flow))


def with_other_stages(stages: Mapping[str, StagePlan], flow: Flow) -> dict[str, StagePlan]:
    """Return the requests of all stages. A stage outside of iterations, such as evaluation, gets
    the request of the stage with which it is colocated."""
    colocated = {
        name: stage.colocate_with
        for name, stage in flow.all_stages.items()
        if name not in flow.stages
    }
    return {**stages, **{name: stages[source] for name, source in colocated.items() if source}}


def _alternative(best: StageAssignment, other: StageAssignment) -> AlternativePlan:
    pairs = [
        (a, b)
        for a, b in zip(best.options, other.options, strict=True)
        if (a.place, a.size) != (b.place, b.size)
    ]
    difference = ", ".join(f"{option.stage} on {option.place} {option.size}" for _, option in pairs)
    reason = _explain(*max(pairs, key=lambda pair: pair[1].seconds - pair[0].seconds))
    return AlternativePlan(difference, other.seconds, other.cost, reason)


def _explain(best: StageOption, other: StageOption) -> str:
    """Describe why another option of a stage is worse (time, price or queue), or its saving."""
    if other.seconds > best.seconds:
        part = max(other.parts, key=lambda name: other.parts[name].mean - _part_seconds(best, name))
        other_s, best_s = _part_seconds(other, part), _part_seconds(best, part)
        return f"{other.stage}: {part} takes {other_s:.2f} s instead of {best_s:.2f} s"
    if other.price_per_hour > best.price_per_hour:
        counts = f"{sum(other.num_devices)} devices instead of {sum(best.num_devices)}"
        return f"{other.stage} uses {counts}"
    if other.wait_s > best.wait_s:
        return f"{other.stage} waits for {other.wait_s:.0f} s instead of {best.wait_s:.0f} s"
    return f"better: {other.stage} takes {other.seconds:.2f} s instead of {best.seconds:.2f} s"


def _part_seconds(option: StageOption, name: str) -> float:
    return option.parts[name].mean if name in option.parts else 0.0


NOTABLE_COST_FACTOR = 1.0005
"""Plans whose costs differ by less than this factor count as equal."""


@dataclass(frozen=True)
class StageAssignment:
    """One option for each stage, in the order in which they run."""

    options: tuple[StageOption, ...]
    after: Mapping[str, tuple[str, ...]]
    """Stages of the same iteration that each stage waits for, by stage."""
    cost: float
    """Cost in the unit of the objective."""

    @property
    def _schedule(self) -> dict[str, _StageSlot]:
        return _schedule_stages(self.options, self.after, [o.seconds for o in self.options])

    @property
    def start_times(self) -> dict[str, float]:
        """Start of each stage, in seconds after the start of the iteration."""
        return {stage: slot.start for stage, slot in self._schedule.items()}

    @property
    def seconds(self) -> float:
        """Seconds of an iteration: the end of its last stage."""
        return max(slot.end for slot in self._schedule.values())

    @property
    def critical_path(self) -> tuple[str, ...]:
        """The stages that determine the duration, in order."""
        slots = self._schedule
        chain = [max(slots, key=lambda stage: slots[stage].end)]
        while (predecessor := slots[chain[-1]].predecessor) is not None:
            chain.append(predecessor)
        return tuple(reversed(chain))

    @property
    def waits_for_devices_of(self) -> dict[str, str]:
        """For each stage that waits for devices, not inputs: the stage that uses these devices."""
        return {
            stage: slot.predecessor
            for stage, slot in self._schedule.items()
            if slot.predecessor is not None and slot.predecessor not in self.after[stage]
        }

    @property
    def spread_s(self) -> float:
        """Standard deviation of the critical path's seconds, assuming independent stages."""
        chain = self.critical_path
        return math.sqrt(sum(o.spread_s**2 for o in self.options if o.stage in chain))

    @property
    def gpu_hours(self) -> float:
        """Device-hours of an iteration."""
        return sum(option.seconds * sum(option.num_devices) for option in self.options) / 3600


def option_cost(option: StageOption, objective: Objective, seconds: float | None = None) -> float:
    """Return the cost of a stage that takes ``seconds``; None: its expected time."""
    seconds = option.seconds if seconds is None else seconds
    return objective.job_cost(
        seconds, option.price_per_hour, option.wait_s, option.interruptions_per_hour
    )


def choose_assignments(
    options: Mapping[str, Sequence[StageOption]],
    after: Mapping[str, tuple[str, ...]],
    objective: Objective,
    alternatives: int = 4,
) -> list[StageAssignment]:
    """Return the best assignment, then the best other assignments, which differ in place or size.

    Args:
        options: options by stage, in an order in which stages can run.
        after: stages of the same iteration that each stage waits for, by stage.
        alternatives: maximum number of other assignments.

    Raises:
        PlanError: a stage has no option.
    """
    for stage, stage_options in options.items():
        if not stage_options:
            raise PlanError(f"stage {stage!r}: no way to run it")
    best = [min(stage_options, key=_sort_key(objective)) for stage_options in options.values()]
    best_assignment = _assignment(best, after, objective)
    others = [_assignment(other, after, objective) for other in _variants(options, best, objective)]
    if best_assignment.waits_for_devices_of:
        # The best options of single stages may not be the best combination.
        assignments = [best_assignment, *others]
        best_assignment = min(assignments, key=lambda assignment: assignment.cost)
        others = [assignment for assignment in assignments if assignment is not best_assignment]
    selected = [best_assignment]
    used_places = {_places_and_sizes(selected[0])}
    for other in sorted(others, key=lambda assignment: assignment.cost):
        if (
            other.cost > selected[0].cost * NOTABLE_COST_FACTOR
            and _places_and_sizes(other) not in used_places
            and len(selected) <= alternatives
        ):
            used_places.add(_places_and_sizes(other))
            selected.append(other)
    return selected


class _StageSlot(NamedTuple):
    """The start and end of a stage in seconds, and the last stage that it waited for."""

    start: float
    end: float
    predecessor: str | None


def _schedule_stages(
    options: Sequence[StageOption], after: Mapping[str, tuple[str, ...]], durations: Sequence[float]
) -> dict[str, _StageSlot]:
    """Schedule each stage, in order, as soon as its inputs exist and its devices are free."""
    shared = shared_capacities({e.name: e for option in options for e in option.devices})
    device_counts: dict[str, Counter[str]] = {}
    slots: dict[str, _StageSlot] = {}
    for option, seconds in zip(options, durations, strict=True):
        needed, available = _device_counts(option), {e.name: e.count for e in option.devices}
        limits = [(names, limit) for names, limit in shared if needed.keys() & set(names)]
        ready = max((slots[source].end for source in after[option.stage]), default=0.0)
        ends = {slot.end for slot in slots.values() if slot.end > ready}
        for start in sorted({ready, *ends}):
            # Add up all overlapping stages, although some may run one after the other.
            end = start + seconds
            overlapping = [s for s, slot in slots.items() if slot.start < end and slot.end > start]
            total = sum((device_counts[other] for other in overlapping), needed)
            if all(total[name] <= available[name] for name in needed) and all(
                sum(total[name] for name in names) <= limit for names, limit in limits
            ):
                break
        device_counts[option.stage] = needed
        predecessors = [s for s in after[option.stage] if slots[s].end == start] or [
            s for s, slot in slots.items() if slot.end == start and start > 0
        ]
        slots[option.stage] = _StageSlot(start, end, predecessors[0] if predecessors else None)
    return slots


def _device_counts(option: StageOption) -> Counter[str]:
    names = [entry.name for entry in option.devices]
    return +Counter(dict(zip(names, option.num_devices, strict=True)))


def _assignment(
    options: Sequence[StageOption], after: Mapping[str, tuple[str, ...]], objective: Objective
) -> StageAssignment:
    costs = [option_cost(option, objective) for option in options]
    # Jobs that run at the same time all cost money, but seconds count only once.
    slots = _schedule_stages(options, after, costs).values() if objective.unit == "s" else ()
    cost = max(slot.end for slot in slots) if slots else sum(costs)
    return StageAssignment(tuple(options), after, cost)


def _variants(
    options: Mapping[str, Sequence[StageOption]], best: Sequence[StageOption], objective: Objective
) -> Iterator[list[StageOption]]:
    """Yield assignments with another place or size of one stage, or with one place for all."""
    places = dict.fromkeys(option.place for choices in options.values() for option in choices)
    for place in places:
        moved = [
            min((o for o in choices if o.place == place), key=_sort_key(objective), default=None)
            for choices in options.values()
        ]
        yield [other or best_option for other, best_option in zip(moved, best, strict=True)]
        for i, other in enumerate(moved):
            if other is not None:
                yield [*best[:i], other, *best[i + 1 :]]
    for i, choices in enumerate(options.values()):
        place, processes = best[i].place, best[i].num_processes
        resized = [o for o in choices if o.place == place and o.num_processes != processes]
        if resized:
            yield [*best[:i], min(resized, key=_sort_key(objective)), *best[i + 1 :]]


def _sort_key(objective: Objective) -> Callable[[StageOption], tuple[float, ...]]:
    """Return the sort key of options: cost, preemptible or not, price, number of kinds. Options
    with cost 0 are also sorted by the price of a device and by their time."""

    def key(option: StageOption) -> tuple[float, ...]:
        is_preemptible = any(entry.is_preemptible for entry in option.devices)
        # Costs that differ only by rounding errors are equal.
        rounded = float(f"{option_cost(option, objective, option.conservative_s):.9g}")
        key_values = rounded, is_preemptible, option.price_per_hour, len(option.devices)
        return key_values if rounded else (*key_values, option.devices[0].price, option.seconds)

    return key


def _places_and_sizes(assignment: StageAssignment) -> tuple[tuple[str, str], ...]:
    return tuple((option.place, option.size) for option in assignment.options)
