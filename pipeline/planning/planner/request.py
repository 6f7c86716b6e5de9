"""What the planner is asked: a run, its measurements, the devices, and what to make small."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.plan import Grain, Learnt, Plan, Sources, parse_plan
from pipeline.planning.planner.devices import Devices
from pipeline.planning.planner.objective import IterationTime, Money, Objective, TimeTo
from pipeline.planning.planner.options import Correction, Option, options
from pipeline.planning.profile.schema import Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError, nearest
from stages.flow import Flow, flow_of

OBJECTIVES = ("time", "gpu-hours", "money", "time-to-end")


@dataclass(frozen=True)
class Request:
    """What is to be planned."""

    config: RunConfig
    profile: Profile
    devices: Mapping[str, Devices]
    objective: str = "time"
    grain: Grain = "stage"
    pins: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By stage: the only kinds it may use."""
    notes: tuple[str, ...] = ()
    corrections: Mapping[tuple[str, str], Correction] = field(default_factory=dict)
    """By stage and kind."""
    sources: Sources | None = None
    door: Callable[[Plan], Plan] | None = None
    """What a plan must pass before it is run, and what is then run; None: nothing."""

    def check(self, plan: Plan) -> Plan:
        """See that a plan may be run; returns it with what the cluster tells.

        Raises:
            PlanError: accounting does not allow its jobs; names the limit.
        """
        if self.door is None:
            return plan
        return self.door(parse_plan(plan.dump(), "plan", flow_of(self.config)))

    def planning(self) -> Request:
        """The same, for the planner's own plans: without what is closed to them."""
        found = {n: own for n, own in self.devices.items() if own.allowance.devices != 0}
        return replace(self, devices=found)

    def judging(self) -> Request:
        """The same, for a plan that is given: limits of accounting count by its own numbers, not by
        what the planner would ask for."""
        found = {
            name: replace(own, allowance=own.allowance.unlimited())
            for name, own in self.devices.items()
        }
        return replace(self, devices=found)

    def goal(self) -> Objective:
        """The objective.

        Raises:
            PlanError: unknown.
        """
        if self.objective == "time":
            return IterationTime()
        if self.objective in ("gpu-hours", "money"):
            return Money()
        if self.objective == "time-to-end":
            return TimeTo(self.config.iterations)
        raise PlanError(
            f"--objective {self.objective}: unknown{nearest(self.objective, OBJECTIVES)}; "
            f"one of {', '.join(OBJECTIVES)}"
        )

    def priced(self) -> dict[str, Devices]:
        """The devices; for GPU-hours all cost the same."""
        if self.objective != "gpu-hours":
            return dict(self.devices)
        return {name: replace(own, price=1.0) for name, own in self.devices.items()}

    def noted(self) -> Request:
        """The same, with a note on devices without a price beside others that have one."""
        lacking = [name for name, own in self.devices.items() if not own.has_price]
        if self.objective != "money" or not lacking or len(lacking) == len(self.devices):
            return self
        note = (
            f"money: the site file has no price for {', '.join(lacking)}: each GPU there, or each "
            "process where there are none, counts 1 an hour; set cost_per_gpu_hour, or leave them "
            "out with --partition"
        )
        return replace(self, notes=(*self.notes, note))

    def after(self) -> dict[str, tuple[str, ...]]:
        """By stage: those of the same iteration that it waits for."""
        stages = flow_of(self.config).stages

        def sources(stage: str) -> tuple[str, ...]:
            found = [
                s.stage for s in stages[stage].inputs.values() if s.stage in stages and not s.back
            ]
            return tuple(dict.fromkeys(found))

        return {stage: sources(stage) for stage in stages}

    def learnt(self) -> tuple[Learnt, ...]:
        """The corrections, for the plan."""
        return tuple(
            Learnt(stage=stage, kind=kind, starting=known.starting, working=known.working)
            for (stage, kind), known in self.corrections.items()
        )

    def options(self) -> dict[str, list[Option]]:
        """All ways to run each stage as a job."""
        priced, found = self.priced(), {}
        for stage in flow_of(self.config).stages:
            every = options(stage, priced, self.profile, self.config, self.pins.get(stage))
            found[stage] = [option.corrected(self.corrections) for option in every]
        return found


def parse_pins(
    pins: Sequence[str], devices: Mapping[str, Devices], flow: Flow
) -> dict[str, frozenset[str]]:
    """``["train=h100"]`` as kinds by stage; a partition stands for all its kinds.

    Raises:
        PlanError: not of this form, or an unknown stage or kind.
    """
    found: dict[str, frozenset[str]] = {}
    for pin in pins:
        stage, sign, names = pin.partition("=")
        if not sign or not names:
            raise PlanError(f"--pin {pin}: expected STAGE=KIND, such as train=h100")
        if stage not in flow.stages:
            raise PlanError(f"--pin {pin}: no stage {stage!r}{nearest(stage, flow.stages)}")
        kinds: set[str] = set()
        for name in names.split(","):
            mine = {n for n, own in devices.items() if name in (n, own.kind.partition)}
            if not mine:
                raise PlanError(
                    f"--pin {pin}: no kind {name!r}{nearest(name, devices)}; "
                    f"there are {', '.join(devices)}"
                )
            kinds |= mine
        if stage in found:
            raise PlanError(f"--pin {pin}: {stage!r} is pinned twice; give its kinds at once")
        found[stage] = frozenset(kinds)
    return found


def parse_counts(values: Sequence[str]) -> dict[str, int]:
    """``["h100=8"]`` as devices by kind.

    Raises:
        PlanError: not of this form.
    """
    found = {}
    for value in values:
        for part in value.split(","):
            name, _, count = part.partition("=")
            if not count.isdecimal():
                raise PlanError(f"--what-if {value}: expected KIND=NUMBER, such as h100=8")
            found[name] = int(count)
    return found
