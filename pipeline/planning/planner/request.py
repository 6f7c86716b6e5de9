"""The planner's input: a run, its profile, devices, objective, and pins (allowed kinds)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.plan import Execution, Plan, PlanningSources, TimingCorrection, parse_plan
from pipeline.planning.planner.available_devices import PartitionDevices
from pipeline.planning.planner.problem import IterationTime, MonetaryCost, Objective, TimeToFinish
from pipeline.planning.planner.stage_times import Correction
from pipeline.planning.profile.schema import Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError, did_you_mean
from stages.flow import Flow, flow_of

OBJECTIVES = ("time", "gpu-hours", "money", "time-to-end")


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan: the run, its measurements, the devices and the objective."""

    config: RunConfig
    profile: Profile
    devices: Mapping[str, PartitionDevices]
    objective: str = "time"
    execution: Execution | None = "jobs"
    """None: pools, or jobs if these are predicted to be better."""
    pins: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The only kinds that a stage may use, by stage."""
    notes: tuple[str, ...] = ()
    """Notes for the user, which are copied to the proposal."""
    corrections: Mapping[tuple[str, str], Correction] = field(default_factory=dict)
    """Corrections from the measured times of earlier runs, by stage and kind."""
    sources: PlanningSources | None = None
    """Files and options of the request; ``rlinf replan`` uses them again. None: unknown."""
    plan_validator: Callable[[Plan], Plan] | None = None
    """Checks a plan and returns it with the cluster's settings; None: no check."""
    is_user_plan: bool = False
    """True if a user's plan is assessed, whose jobs may have any shape."""

    def validate_plan(self, plan: Plan) -> Plan:
        """Check that a plan may be run, and return it with the cluster's settings.

        Raises:
            PlanError: accounting does not allow its jobs; the message names the limit.
        """
        if self.plan_validator is None:
            return plan
        return self.plan_validator(parse_plan(plan.to_dict(), "plan", flow_of(self.config)))

    def for_planner(self) -> PlanRequest:
        """Return the request with only the devices on which the planner's jobs can run."""
        devices = {n: e for n, e in self.devices.items() if e.allowance.max_devices != 0}
        return replace(self, devices=devices)

    def for_user_plan(self) -> PlanRequest:
        """Return the request for a user's plan, without pins and the limits of jobs as the planner
        would request them; the job requests in the plan are checked instead."""
        devices = {
            name: replace(entry, allowance=entry.allowance.without_job_limits())
            for name, entry in self.devices.items()
        }
        return replace(self, devices=devices, pins={}, is_user_plan=True)

    def get_objective(self) -> Objective:
        """Return the objective.

        Raises:
            PlanError: the objective is unknown.
        """
        if self.objective == "time":
            return IterationTime()
        if self.objective in ("gpu-hours", "money"):
            return MonetaryCost()
        if self.objective == "time-to-end":
            return TimeToFinish(self.config.iterations)
        raise PlanError(
            f"--objective {self.objective}: unknown{did_you_mean(self.objective, OBJECTIVES)}; "
            f"one of {', '.join(OBJECTIVES)}"
        )

    def priced_devices(self) -> dict[str, PartitionDevices]:
        """Return the devices with the prices of the objective: for GPU-hours, all prices are 1."""
        if self.objective != "gpu-hours":
            return dict(self.devices)
        return {name: replace(entry, price=1.0) for name, entry in self.devices.items()}

    def with_price_note(self) -> PlanRequest:
        """For the objective ``money``, add a note if only some of the devices have a price."""
        unpriced = [name for name, entry in self.devices.items() if not entry.has_price]
        if self.objective != "money" or not unpriced or len(unpriced) == len(self.devices):
            return self
        note = (
            f"money: the site file has no price for {', '.join(unpriced)}: each GPU there, or each "
            "process where there are none, counts 1 an hour; set cost_per_gpu_hour, or leave them "
            "out with --partition"
        )
        return replace(self, notes=(*self.notes, note))

    def stage_dependencies(self) -> dict[str, tuple[str, ...]]:
        """Return the stages of the same iteration that each stage waits for."""
        stages = flow_of(self.config).stages

        def producers(stage: str) -> tuple[str, ...]:
            names = [
                s.stage for s in stages[stage].inputs.values() if s.stage in stages and not s.lag
            ]
            return tuple(dict.fromkeys(names))

        return {stage: producers(stage) for stage in stages}

    def learned_corrections(self) -> tuple[TimingCorrection, ...]:
        """Return the corrections in the form in which the plan's file stores them."""
        return tuple(
            TimingCorrection(
                stage=stage,
                kind=kind,
                startup_factor=correction.startup_factor,
                work_factor=correction.work_factor,
            )
            for (stage, kind), correction in self.corrections.items()
        )


def parse_pins(
    pins: Sequence[str], devices: Mapping[str, PartitionDevices], flow: Flow
) -> dict[str, frozenset[str]]:
    """Parse ``["train=h100"]`` into kinds by stage; a partition means all its kinds.

    Raises:
        PlanError: a pin is malformed, or has an unknown stage or kind.
    """
    result: dict[str, frozenset[str]] = {}
    for pin in pins:
        stage, sign, names = pin.partition("=")
        if not sign or not names:
            raise PlanError(f"--pin {pin}: expected STAGE=KIND, such as train=h100")
        if stage not in flow.stages:
            raise PlanError(f"--pin {pin}: no stage {stage!r}{did_you_mean(stage, flow.stages)}")
        kinds: set[str] = set()
        for name in names.split(","):
            matching = {n for n, entry in devices.items() if name in (n, entry.kind.partition)}
            if not matching:
                raise PlanError(
                    f"--pin {pin}: no kind {name!r}{did_you_mean(name, devices)}; "
                    f"there are {', '.join(devices)}"
                )
            kinds |= matching
        if stage in result:
            raise PlanError(f"--pin {pin}: {stage!r} is pinned twice; give its kinds at once")
        result[stage] = frozenset(kinds)
    return result


def parse_counts(values: Sequence[str]) -> dict[str, int]:
    """Parse ``["h100=8"]`` into numbers of devices by kind.

    Raises:
        PlanError: a value is malformed.
    """
    counts = {}
    for value in values:
        for part in value.split(","):
            name, _, count = part.partition("=")
            if not count.isdecimal():
                raise PlanError(f"--what-if {value}: expected KIND=NUMBER, such as h100=8")
            counts[name] = int(count)
    return counts
