"""Search for the best plan of the execution ``jobs``: every stage of an iteration is a job.

The option of one stage does not affect time or cost of the others, and a slower stage never makes
an iteration faster. So the best option of each stage gives the best plan, as long as stages that
run at the same time fit on the devices together. Otherwise one stage waits for the other, and that
plan is compared with plans that move a stage or use fewer devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.planning.planner.available_devices import shared_capacities
from pipeline.planning.planner.problem import Objective
from pipeline.planning.planner.stage_options import StageOption
from rlinf.errors import PlanError

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
    def starts(self) -> dict[str, float]:
        """Start of each stage, in seconds from the start of the iteration."""
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
        """Stages that wait only for another stage to release its devices, with that stage."""
        return {
            stage: slot.predecessor
            for stage, slot in self._schedule.items()
            if slot.predecessor is not None and slot.predecessor not in self.after[stage]
        }

    @property
    def spread_s(self) -> float:
        """Standard deviation of the critical path, assuming independent stages."""
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
    """Return the best assignment, then the best others with a different place of some stage.

    Args:
        options: options by stage, in an order in which stages can run.
        after: stages of the same iteration that each stage waits for, by stage.

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
    used_places = {_place_names(selected[0])}
    for other in sorted(others, key=lambda assignment: assignment.cost):
        if (
            other.cost > selected[0].cost * NOTABLE_COST_FACTOR
            and _place_names(other) not in used_places
            and len(selected) <= alternatives
        ):
            used_places.add(_place_names(other))
            selected.append(other)
    return selected


class _StageSlot(NamedTuple):
    """The start and end of a stage, and the last stage that it waited for."""

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
            # Add up all overlapping stages, although some of them may run one after the other.
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
    """Return the number of devices of each kind that an option uses."""
    names = [entry.name for entry in option.devices]
    return +Counter(dict(zip(names, option.num_devices, strict=True)))


def _assignment(
    options: Sequence[StageOption], after: Mapping[str, tuple[str, ...]], objective: Objective
) -> StageAssignment:
    costs = [option_cost(option, objective) for option in options]
    # Of jobs that run at the same time, all cost money, but only the longest costs time.
    slots = _schedule_stages(options, after, costs).values() if objective.unit == "s" else ()
    cost = max(slot.end for slot in slots) if slots else sum(costs)
    return StageAssignment(tuple(options), after, cost)


def _variants(
    options: Mapping[str, Sequence[StageOption]], best: Sequence[StageOption], objective: Objective
) -> Iterator[list[StageOption]]:
    """Yield assignments with one stage in another place or of another size, or all in one place."""
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
        resized = [o for o in choices if o.place == best[i].place and o.count != best[i].count]
        if resized:
            yield [*best[:i], min(resized, key=_sort_key(objective)), *best[i + 1 :]]


def _sort_key(objective: Objective) -> Callable[[StageOption], tuple[float, ...]]:
    """Return the sort key: cost, then not preemptible, then price and number of kinds. For options
    that cost nothing, the price of a device and the time follow."""

    def key(option: StageOption) -> tuple[float, ...]:
        is_preemptible = any(entry.is_preemptible for entry in option.devices)
        # Costs that differ only by rounding errors are equal.
        rounded = float(f"{option_cost(option, objective, option.conservative_s):.9g}")
        key_values = rounded, is_preemptible, option.price_per_hour, len(option.devices)
        return key_values if rounded else (*key_values, option.devices[0].price, option.seconds)

    return key


def _place_names(assignment: StageAssignment) -> tuple[tuple[str, str], ...]:
    return tuple((option.place, option.size) for option in assignment.options)
