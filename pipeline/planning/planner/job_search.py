"""Search for the best plan of the execution ``stage``: every stage of an iteration is a job.

The place of one stage makes no other stage slower or more expensive, and a slower stage never makes
an iteration faster. So the best option of each stage makes the best plan, as long as stages that
run at the same time fit together. Otherwise one waits for the other, and that plan is compared with
plans that move a stage or use less.
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
        return {stage: place.start for stage, place in self._schedule.items()}

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, along its longest chain of stages."""
        return max(place.end for place in self._schedule.values())

    @property
    def critical_path(self) -> tuple[str, ...]:
        """The stages of the longest chain, in order."""
        places = self._schedule
        chain = [max(places, key=lambda stage: places[stage].end)]
        while (before := places[chain[-1]].before) is not None:
            chain.append(before)
        return tuple(reversed(chain))

    @property
    def waits_for_devices_of(self) -> dict[str, str]:
        """Stages that wait only for the devices of another stage, with that stage."""
        return {
            stage: place.before
            for stage, place in self._schedule.items()
            if place.before is not None and place.before not in self.after[stage]
        }

    @property
    def spread_s(self) -> float:
        """Standard deviation of the longest chain; stages count as independent."""
        chain = self.critical_path
        return math.sqrt(sum(o.spread_s**2 for o in self.options if o.stage in chain))

    @property
    def gpu_hours(self) -> float:
        """Device-hours of an iteration."""
        return sum(option.seconds * sum(option.num_devices) for option in self.options) / 3600


def option_cost(option: StageOption, objective: Objective, seconds: float | None = None) -> float:
    """Return what a stage adds to the objective, by default with its expected ``seconds``."""
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
    """Return the best assignment, then the best others that change the place of at least one stage.

    Args:
        options: options by stage, in an order in which stages can run.
        after: stages of the same iteration that each stage waits for, by stage.

    Raises:
        PlanError: a stage has no option.
    """
    for stage, found in options.items():
        if not found:
            raise PlanError(f"stage {stage!r}: no way to run it")
    best = [min(found, key=_sort_key(objective)) for found in options.values()]
    first = _assignment(best, after, objective)
    others = [_assignment(other, after, objective) for other in _variants(options, best, objective)]
    if first.waits_for_devices_of:
        # The best options of single stages are not the best combination.
        every = [first, *others]
        first = min(every, key=lambda choice: choice.cost)
        others = [choice for choice in every if choice is not first]
    chosen = [first]
    seen = {_place_names(chosen[0])}
    for other in sorted(others, key=lambda choice: choice.cost):
        if (
            other.cost > chosen[0].cost * NOTABLE_COST_FACTOR
            and _place_names(other) not in seen
            and len(chosen) <= alternatives
        ):
            seen.add(_place_names(other))
            chosen.append(other)
    return chosen


class _StageSlot(NamedTuple):
    """The start and end of a stage, and the stage whose end it waited for."""

    start: float
    end: float
    before: str | None


def _schedule_stages(
    options: Sequence[StageOption], after: Mapping[str, tuple[str, ...]], lengths: Sequence[float]
) -> dict[str, _StageSlot]:
    """Schedule each stage, in order, as soon as its inputs exist and its devices are free."""
    shared = shared_capacities({own.name: own for option in options for own in option.devices})
    used: dict[str, Counter[str]] = {}
    places: dict[str, _StageSlot] = {}
    for option, length in zip(options, lengths, strict=True):
        mine, room = _device_counts(option), {own.name: own.count for own in option.devices}
        of_several = [(names, most) for names, most in shared if mine.keys() & set(names)]
        ready = max((places[source].end for source in after[option.stage]), default=0.0)
        ends = {place.end for place in places.values() if place.end > ready}
        for start in sorted({ready, *ends}):
            # All overlapping stages count at once, even two that follow each other.
            beside = [s for s, p in places.items() if p.start < start + length and p.end > start]
            together = sum((used[other] for other in beside), mine)
            if all(together[name] <= room[name] for name in mine) and all(
                sum(together[name] for name in names) <= most for names, most in of_several
            ):
                break
        used[option.stage] = mine
        before = [s for s in after[option.stage] if places[s].end == start] or [
            s for s, place in places.items() if place.end == start and start > 0
        ]
        places[option.stage] = _StageSlot(start, start + length, before[0] if before else None)
    return places


def _device_counts(option: StageOption) -> Counter[str]:
    """Return the number of devices of each kind that an option uses."""
    names = [own.name for own in option.devices]
    return +Counter(dict(zip(names, option.num_devices, strict=True)))


def _assignment(
    options: Sequence[StageOption], after: Mapping[str, tuple[str, ...]], objective: Objective
) -> StageAssignment:
    costs = [option_cost(option, objective) for option in options]
    # Jobs at the same time each cost money, but only the longer one costs time.
    in_time = _schedule_stages(options, after, costs).values() if objective.unit == "s" else ()
    whole = max(place.end for place in in_time) if in_time else sum(costs)
    return StageAssignment(tuple(options), after, whole)


def _variants(
    options: Mapping[str, Sequence[StageOption]], best: Sequence[StageOption], objective: Objective
) -> Iterator[list[StageOption]]:
    """Yield assignments with one stage in another place or of another size, or all in one place."""
    places = dict.fromkeys(option.place for found in options.values() for option in found)
    for place in places:
        there = [
            min((o for o in found if o.place == place), key=_sort_key(objective), default=None)
            for found in options.values()
        ]
        yield [other or own for other, own in zip(there, best, strict=True)]
        for i, other in enumerate(there):
            if other is not None:
                yield [*best[:i], other, *best[i + 1 :]]
    for i, found in enumerate(options.values()):
        resized = [o for o in found if o.place == best[i].place and o.count != best[i].count]
        if resized:
            yield [*best[:i], min(resized, key=_sort_key(objective)), *best[i + 1 :]]


def _sort_key(objective: Objective) -> Callable[[StageOption], tuple[float, ...]]:
    """Return the sort key: lowest cost; among equals not preemptible and fewer devices; among free
    ones the cheaper nodes, then the faster option."""

    def key(option: StageOption) -> tuple[float, ...]:
        preemptible = any(own.is_preemptible for own in option.devices)
        # Costs that differ by rounding alone are equal.
        rounded = float(f"{option_cost(option, objective, option.conservative_s):.9g}")
        equal = rounded, preemptible, option.price_per_hour, len(option.devices)
        return equal if rounded else (*equal, option.devices[0].price, option.seconds)

    return key


def _place_names(choice: StageAssignment) -> tuple[tuple[str, str], ...]:
    return tuple((option.place, option.size) for option in choice.options)
