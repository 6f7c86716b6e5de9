"""The plan of grain ``stage``: each stage of an iteration is a job of its own.

No stage is made slower or dearer by where another one runs, and an iteration never gets quicker by
a slower stage. So the best option of each stage, chosen alone, makes the best plan there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.planning.planner.objective import Objective
from pipeline.planning.planner.options import Option
from rlinf.errors import PlanError

NOTABLE = 1.0005
"""Plans whose costs are nearer than this are the same to a person."""


@dataclass(frozen=True)
class Choice:
    """One option for each stage, in the order in which they run."""

    options: tuple[Option, ...]
    after: Mapping[str, tuple[str, ...]]
    """By stage: those of the same iteration that it waits for."""
    cost: float
    """In the unit of the objective."""

    @property
    def starts(self) -> dict[str, float]:
        """When each stage is submitted, in seconds from the start of the iteration."""
        ends = _ends(self.after, {option.stage: option.seconds for option in self.options})
        return {option.stage: ends[option.stage] - option.seconds for option in self.options}

    @property
    def seconds(self) -> float:
        """Of an iteration: along its longest chain of stages."""
        ends = _ends(self.after, {option.stage: option.seconds for option in self.options})
        return max(ends.values())

    @property
    def critical(self) -> tuple[str, ...]:
        """The stages of the longest chain, in order."""
        ends = _ends(self.after, {option.stage: option.seconds for option in self.options})
        chain = [max(ends, key=lambda stage: ends[stage])]
        while self.after[chain[-1]]:
            chain.append(max(self.after[chain[-1]], key=lambda stage: ends[stage]))
        return tuple(reversed(chain))

    @property
    def spread_s(self) -> float:
        """Standard deviation of the longest chain; stages are taken as independent."""
        chain = self.critical
        return math.sqrt(sum(o.spread_s**2 for o in self.options if o.stage in chain))

    @property
    def gpu_hours(self) -> float:
        """Devices held, of an iteration."""
        return sum(option.seconds * option.count for option in self.options) / 3600


def cost(option: Option, objective: Objective, seconds: float | None = None) -> float:
    """What a stage adds to the objective; if it takes so many ``seconds``."""
    seconds = option.seconds if seconds is None else seconds
    return objective.of_job(seconds, option.price_per_hour, option.wait_s, option.losses_per_hour)


def choose(
    options: Mapping[str, Sequence[Option]],
    after: Mapping[str, tuple[str, ...]],
    objective: Objective,
    alternatives: int = 4,
) -> list[Choice]:
    """The best choice, then the best others that put at least one stage elsewhere.

    Args:
        options: by stage, in an order in which they can run.
        after: by stage, those of the same iteration that it waits for.

    Raises:
        PlanError: a stage has no option.
    """
    for stage, found in options.items():
        if not found:
            raise PlanError(f"stage {stage!r}: no way to run it")
    best = [min(found, key=_key(objective)) for found in options.values()]
    chosen = [_choice(best, after, objective)]
    others = [_choice(other, after, objective) for other in _others(options, best, objective)]
    seen = {_places(chosen[0])}
    for other in sorted(others, key=lambda choice: choice.cost):
        if (
            other.cost > chosen[0].cost * NOTABLE
            and _places(other) not in seen
            and len(chosen) <= alternatives
        ):
            seen.add(_places(other))
            chosen.append(other)
    return chosen


def _ends(after: Mapping[str, tuple[str, ...]], lengths: Mapping[str, float]) -> dict[str, float]:
    """Where each stage ends if it begins with the last of those it waits for."""
    ends: dict[str, float] = {}
    for stage, length in lengths.items():
        ends[stage] = max((ends[source] for source in after[stage]), default=0.0) + length
    return ends


def _choice(
    options: Sequence[Option], after: Mapping[str, tuple[str, ...]], objective: Objective
) -> Choice:
    costs = {option.stage: cost(option, objective) for option in options}
    # Side by side jobs cost their money each, but only the longer one's time.
    whole = max(_ends(after, costs).values()) if objective.unit == "s" else sum(costs.values())
    return Choice(tuple(options), after, whole)


def _others(
    options: Mapping[str, Sequence[Option]], best: Sequence[Option], objective: Objective
) -> Iterator[list[Option]]:
    """One stage in another place or of another size, or all stages in one place."""
    places = dict.fromkeys(option.place for found in options.values() for option in found)
    for place in places:
        there = [
            min((o for o in found if o.place == place), key=_key(objective), default=None)
            for found in options.values()
        ]
        yield [other or own for other, own in zip(there, best, strict=True)]
        for i, other in enumerate(there):
            if other is not None:
                yield [*best[:i], other, *best[i + 1 :]]
    for i, found in enumerate(options.values()):
        resized = [o for o in found if o.place == best[i].place and o.count != best[i].count]
        if resized:
            yield [*best[:i], min(resized, key=_key(objective)), *best[i + 1 :]]


def _key(objective: Objective) -> Callable[[Option], tuple[float, bool, float, int]]:
    """Cheapest by the objective; of equals the one that holds less and is not preempted."""

    def key(option: Option) -> tuple[float, bool, float, int]:
        preemptible = any(own.preemptible for own in option.devices)
        # Costs that differ by rounding alone are equal.
        rounded = float(f"{cost(option, objective, option.prudent_s):.9g}")
        return rounded, preemptible, option.price_per_hour, len(option.devices)

    return key


def _places(choice: Choice) -> tuple[tuple[str, str], ...]:
    return tuple((option.place, option.size) for option in choice.options)
