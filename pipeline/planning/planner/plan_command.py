"""The commands ``rlinf plan`` and ``rlinf replan``: make, explain and write a plan."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import yaml
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.console import create_console
from pipeline.inventory import load_or_survey
from pipeline.plan import Execution, Plan, PlanningSources, read_plan
from pipeline.planning.planner import job_planner, pool_planner
from pipeline.planning.planner.available_devices import (
    check_plan_limits,
    local_devices,
    select_devices,
    with_memory_floors,
)
from pipeline.planning.planner.recommendations import PlanProposal, PlanRow
from pipeline.planning.planner.request import PlanRequest, parse_pins
from pipeline.planning.planner.stage_options import SINGLE_MEASUREMENT_SPREAD, Correction
from pipeline.planning.profile.data_sheet_profile import estimate_profile
from pipeline.planning.profile.device_kinds import local_kind
from pipeline.planning.profile.schema import ProfileIdentity, load_profile
from pipeline.pools.measured_times import (
    WORK_PART,
    ForecastComparison,
    MeasuredTimes,
    compare_with_forecast,
    measure_times,
)
from pipeline.report.chart_style import GRID_COLOUR, finish_chart, inline_svg
from pipeline.report.theme import STAGE_COLOURS, render_template, stage_colours
from pipeline.resources import ClusterConfig
from pipeline.run import Run
from rlinf.artifacts import write_user_file
from rlinf.config import RunConfig, validate
from rlinf.errors import DataError, PlanError
from slurm.site import SiteConfig, load_site
from stages.flow import flow_of
from stages.layout import PLAN_FILE


def propose_plan(request: PlanRequest, what_ifs: Sequence[str] = ()) -> PlanProposal:
    """Return the best plan for a request.

    Args:
        what_ifs: changes of the cluster to compare with, such as ``h100=8``.

    Raises:
        PlanError: a stage cannot run anywhere, or the request is inconsistent.
    """
    planners = {"jobs": job_planner.propose_jobs, "pools": pool_planner.propose_pools}
    return planners[request.execution](request.with_price_note(), what_ifs)


def assess_plan(
    request: PlanRequest, plan: Plan, plan_name: str, what_ifs: Sequence[str] = ()
) -> PlanProposal:
    """Forecast a user's plan, with the best plan of the same execution among its alternatives.

    Args:
        plan_name: name of the plan in errors.

    Raises:
        PlanError: the plan is impossible; the message names the key and the limit.
    """
    assess = job_planner.assess_jobs if plan.execution == "jobs" else pool_planner.assess_pools
    return assess(request.with_price_note(), plan, plan_name, what_ifs)


PART_OPACITIES = (0.3, 0.42, 0.54, 0.66, 1.0)
"""Opacity of the parts of a stage in the chart; the last value is for its work."""


def render_page(proposal: PlanProposal, title: str) -> str:
    """Render the plan's page as HTML."""
    forecast = proposal.forecast
    sections = [("gantt", "Predicted iteration", gantt_chart(proposal))]
    if proposal.what_ifs:
        sections.append(("what-if", "What if", what_if_chart(proposal)))
    return render_template(
        "plan.html.jinja",
        name=f"{title}: plan",
        tiles=[
            ("predicted iteration", f"{forecast.iteration_s:.3g} s"),
            ("80 % of iterations", f"{forecast.low_s:.3g} - {forecast.high_s:.3g} s"),
            ("device-hours an iteration", f"{forecast.gpu_hours:.3g}"),
            ("mode", proposal.mode),
            ("objective", proposal.objective),
        ],
        sections=[
            {"name": name, "title": heading, "svg": inline_svg(figure, name)}
            for name, heading, figure in sections
        ],
        rows=proposal.rows,
        alternatives=[
            {"other": other, "more": other.cost / forecast.cost - 1 if forecast.cost else 0.0}
            for other in proposal.alternatives
        ],
        choices=proposal.forecast.recommendations,
        notes=proposal.notes,
    )


def gantt_chart(proposal: PlanProposal) -> Figure:
    """Draw the stages as bars whose parts differ in opacity; whiskers show the 10 % to 90 %
    interval."""
    lanes, colours = assign_lanes(proposal.rows), stage_colours(row.stage for row in proposal.rows)
    figure, axis = plt.subplots(figsize=(10, 0.55 * len(lanes) + 1.4))
    for index, row in ((index, row) for index, lane in enumerate(lanes) for row in lane):
        start = row.start_s
        opacity = [*PART_OPACITIES[: len(row.breakdown_s) - 1], PART_OPACITIES[-1]]
        for (name, seconds), alpha in zip(row.breakdown_s.items(), opacity, strict=False):
            axis.barh(index, seconds, 0.6, start, color=colours[row.stage], alpha=alpha, label=name)
            start += seconds
        axis.errorbar(
            row.start_s + row.seconds,
            index,
            xerr=[[row.seconds - row.low_s], [row.high_s - row.seconds]],
            color="#24292f",
            lw=1,
            capsize=3,
        )
    axis.set_yticks(range(len(lanes)), [f"{lane[0].place}  {lane[0].size}" for lane in lanes])
    axis.set(xlabel="seconds", xlim=(0, None), ylim=(len(lanes) - 0.4, -0.6))
    axis.grid(axis="y", visible=False)
    stage_handles = [Patch(color=colours[row.stage], label=row.stage) for row in proposal.rows]
    names = max((list(row.breakdown_s) for row in proposal.rows), key=len)
    opacity_handles = [
        Patch(color="#24292f", alpha=alpha, label=name)
        for name, alpha in zip(names, [*PART_OPACITIES[: len(names) - 1], 1.0], strict=True)
    ]
    axis.legend(
        handles=[*stage_handles, *(opacity_handles if len(names) > 1 else [])],
        ncols=len(stage_handles) + len(opacity_handles),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        fontsize=8,
        columnspacing=1.0,
        handlelength=1.2,
    )
    return finish_chart(figure)


def assign_lanes(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Group rows by place and size into lanes of the chart, in which no stages overlap."""
    lanes: list[list[PlanRow]] = []
    for row in rows:
        for lane in lanes:
            last = lane[-1]
            is_free = last.start_s + last.seconds <= row.start_s + 1e-9
            if (last.place, last.size) == (row.place, row.size) and is_free:
                lane.append(row)
                break
        else:
            lanes.append([row])
    return lanes


def what_if_chart(proposal: PlanProposal) -> Figure:
    """Draw the iteration times of the best plans for different clusters."""
    cases = [what_if for what_if in proposal.what_ifs if math.isfinite(what_if.seconds)]
    names = ["as it is", *(what_if.case for what_if in cases)]
    values = np.array([proposal.forecast.iteration_s, *(what_if.seconds for what_if in cases)])
    figure, axis = plt.subplots(figsize=(10, 0.34 * len(names) + 0.9))
    colours = ["#24292f" if i == 0 else STAGE_COLOURS["rollout"] for i in range(len(names))]
    axis.barh(range(len(names)), values, 0.62, color=colours)
    for i, value in enumerate(values):
        change = "" if i == 0 else f"  {value / values[0] - 1:+.0%}"
        axis.annotate(
            f"{value:.3g} s{change}",
            (value, i),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axis.axvline(values[0], color=GRID_COLOUR, zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="seconds of an iteration", xlim=(0, 1.15 * values.max()))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    return finish_chart(figure)


UNMEASURED_NOTE = (
    "nothing was measured: times are from data sheets and may be wrong by a factor of two; measure "
    "with rlinf profile, or run this plan and then rlinf replan"
)


def build_request(
    config: RunConfig,
    sources: PlanningSources,
    objective: str = "time",
    execution: Execution = "jobs",
    *,
    is_user_plan: bool = False,
) -> PlanRequest:
    """Collect the planner's input.

    Args:
        is_user_plan: the request assesses a plan that the user wrote.

    Raises:
        PlanError: a file is missing or wrong, or the profile is of another run.
        SlurmError: Slurm does not answer.
    """
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    inventory_file = Path(sources.inventory) if sources.inventory else None
    site_file = Path(sources.site) if sources.site else cluster.site
    notes: tuple[str, ...] = ()
    profile, validator = None, None
    if sources.profile:
        profile = load_profile(Path(sources.profile))
        profile.check_identity(ProfileIdentity.of(config), (), sources.profile)
        profile.check_stages(flow_of(config).all_stages, sources.profile)
    if cluster.launcher == "slurm" or inventory_file is not None:
        site_config = load_site(site_file) if site_file else SiteConfig()
        inventory = load_or_survey(inventory_file, site_file)
        if profile is None:
            profile, notes = estimate_profile(config, inventory, site_config), (UNMEASURED_NOTE,)
        devices, device_notes = select_devices(
            inventory, site_config, profile, sources.partitions, is_user_plan=is_user_plan
        )
        notes += device_notes
        cluster_at_site = cluster.model_copy(update={"site": site_file})
        validator = partial(check_plan_limits, cluster=cluster_at_site, inventory=inventory)
        if not profile.estimated:
            # If data sheets or the model's formulas are missing, only measurements show what fits.
            with suppress(PlanError, DataError):
                estimated = estimate_profile(config, inventory, site_config)
                devices = with_memory_floors(devices, estimated)
    elif profile is not None:
        devices = local_devices(profile, local_kind())
    else:
        raise PlanError(
            "nothing is measured: there is no profile.json; make one with: rlinf profile, or name "
            "a cluster whose GPUs have data sheets (cluster=slurm, or --from INVENTORY)"
        )
    pins = parse_pins(sources.pins, devices, flow_of(config))
    return PlanRequest(
        config,
        profile,
        devices,
        objective,
        execution,
        pins,
        notes,
        sources=sources,
        plan_validator=validator,
    )


def write_proposal(proposal: PlanProposal, out: Path, title: str) -> Path:
    """Write the plan, its page and, for pools, the placement problem. Returns the page's path.

    Raises:
        InputError: a file cannot be written.
    """
    page = out.with_suffix(".html")
    header = (
        "# Made by rlinf plan. Resources may be edited; 'predicted' is kept for comparison only.\n"
    )
    write_user_file(out, header + yaml.safe_dump(proposal.plan.to_dict(), sort_keys=False))
    write_user_file(page, render_page(proposal, title))
    if proposal.problem:
        write_user_file(out.with_suffix(".problem.yaml"), proposal.problem)
    return page


def print_proposal(proposal: PlanProposal) -> None:
    """Print the plan, its alternatives and what-ifs as tables."""
    console = create_console()
    console.print(plan_table(proposal))
    forecast = proposal.forecast
    console.print(
        f"iteration: {format_seconds(forecast.iteration_s)} "
        f"({format_seconds(forecast.low_s)} to {format_seconds(forecast.high_s)} for 80 %), "
        f"{forecast.gpu_hours:.3g} device-hours; {describe_optimality(proposal)}",
        highlight=False,
    )
    if proposal.alternatives:
        console.print(alternatives_table(proposal))
    if proposal.what_ifs:
        console.print(what_if_table(proposal))
    if proposal.forecast.recommendations:
        console.print(recommendations_table(proposal))
    for note in proposal.notes:
        console.print(f"note: {note}", style="yellow")


def describe_optimality(proposal: PlanProposal) -> str:
    """Describe how close the plan is to the optimum."""
    if proposal.is_optimal:
        return "no plan is better under these predictions"
    if proposal.alternatives and proposal.alternatives[0].cost < proposal.forecast.cost:
        return f"the best plan would take {format_seconds(proposal.alternatives[0].seconds)}"
    bound = proposal.lower_bound
    gap = proposal.forecast.cost / bound - 1 if bound > 0 else math.inf
    return f"no plan costs less than {bound:.4g} {proposal.unit} (gap {gap:.1%})"


def plan_table(proposal: PlanProposal) -> Table:
    """Return the table of stages; the size is nodes x devices per node."""
    table = Table(
        title=f"plan: {proposal.mode}, for the least {proposal.objective}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("stage", no_wrap=True)
    table.add_column("where")
    table.add_column("size")
    for heading in ("start", "duration", "10 - 90 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for row in proposal.rows:
        share = row.breakdown_s[row.bound_by] / row.seconds if row.seconds else 0.0
        table.add_row(
            row.stage,
            row.place,
            row.size,
            format_seconds(row.start_s),
            format_seconds(row.seconds),
            format_interval(row.low_s, row.high_s),
            f"{row.bound_by} {share:.0%}",
        )
    return table


def alternatives_table(proposal: PlanProposal) -> Table:
    """Return the table of the best other plans, with the reason why each is worse."""
    table = Table(
        title="alternatives",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("difference")
    table.add_column("iteration", justify="right", no_wrap=True)
    table.add_column("cost", justify="right", no_wrap=True)
    table.add_column("reason")
    for other in proposal.alternatives:
        added = other.cost / proposal.forecast.cost - 1 if proposal.forecast.cost else 0.0
        seconds = format_seconds(other.seconds)
        table.add_row(other.difference, seconds, f"{added:+.1%}", other.reason)
    return table


def recommendations_table(proposal: PlanProposal) -> Table:
    """Return the table of recommended and rejected features, and the time that they save."""
    table = Table(
        title="choices", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("option")
    table.add_column("chosen", no_wrap=True)
    table.add_column("time saved", justify="right", no_wrap=True)
    table.add_column("reason")
    for choice in proposal.forecast.recommendations:
        saved = "" if choice.saved_s is None else format_seconds(choice.saved_s)
        table.add_row(choice.feature, "yes" if choice.chosen else "no", saved, choice.reason)
    return table


def what_if_table(proposal: PlanProposal) -> Table:
    """Return the table of the best plans for different clusters."""
    table = Table(
        title="what if", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("cluster", no_wrap=True)
    table.add_column("iteration", justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    planned_s = proposal.forecast.iteration_s
    for what_if in proposal.what_ifs:
        possible = math.isfinite(what_if.seconds)
        change = f"{what_if.seconds / planned_s - 1:+.1%}" if possible else ""
        table.add_row(
            what_if.case, format_seconds(what_if.seconds) if possible else "impossible", change
        )
    return table


def format_seconds(value: float) -> str:
    """Format a duration with three significant digits."""
    unit, factor = _unit(value)
    return f"{_digits(value * factor)} {unit}"


def format_interval(low: float, high: float) -> str:
    """Format two durations in the unit of the longer one."""
    unit, factor = _unit(high)
    return f"{_digits(low * factor)} - {_digits(high * factor)} {unit}"


def _unit(value: float) -> tuple[str, float]:
    if value >= 600:
        return "min", 1 / 60
    return ("ms", 1000.0) if 0 < value < 0.1 else ("s", 1.0)


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def run_plan(
    config: RunConfig,
    sources: PlanningSources,
    out: Path,
    objective: str,
    what_ifs: Sequence[str],
    user_plan: Path | None = None,
    execution: Execution = "jobs",
) -> None:
    """Run ``rlinf plan``: make, write and print a plan, or forecast and print a user's plan."""
    request = build_request(
        config, sources, objective, execution, is_user_plan=user_plan is not None
    )
    if user_plan is not None:
        print_proposal(
            assess_plan(request, read_plan(user_plan, flow_of(config)), str(user_plan), what_ifs)
        )
        return
    proposal = propose_plan(request, what_ifs)
    # Write the files first, because printing fails if the reader closes the pipe.
    page = write_proposal(proposal, out, config.run.name)
    print_proposal(proposal)
    create_console().print(f"plan: {out}\npage: {page}", soft_wrap=True)


def run_replan(
    run: Run, sources: PlanningSources | None, objective: str | None, *, apply: bool
) -> None:
    """Run ``rlinf replan``: compare forecast and measurements, then make a corrected plan.

    Args:
        sources: use these instead of the sources of the run's plan.
        apply: replace the run's plan; the driver uses the new plan when it starts again.

    Raises:
        PlanError: the plan has no forecast, or too few iterations are finished.
    """
    plan = Plan.from_run(run.folder)
    sources = sources or (plan.forecast.sources if plan.forecast else None)
    if plan.forecast is None or sources is None:
        raise PlanError(
            f"{run.folder / PLAN_FILE}: it has no prediction to compare with; "
            "make a first plan with: rlinf plan"
        )
    comparisons = compare_with_forecast(run)
    if not comparisons:
        raise PlanError(f"{run.folder}: two iterations must be finished before a new plan")
    request = build_request(
        run.config, sources, objective or plan.forecast.objective, plan.execution
    )
    # Corrections are relative to one profile, so they do not apply to another.
    if plan.forecast.sources is None or sources.profile == plan.forecast.sources.profile:
        corrections = compute_corrections(plan, measure_times(run), request)
        request = replace(request, corrections=corrections)
    proposal = propose_plan(request)
    if proposal.plan.forecast is not None:
        predicted = proposal.plan.forecast.model_copy(update={"applied_at": time.time()})
        new_plan = proposal.plan.model_copy(update={"forecast": predicted})
        proposal = replace(proposal, plan=new_plan)
    out = run.folder / (PLAN_FILE if apply else "replan.yaml")
    page = write_proposal(proposal, out, run.folder.name)
    console = create_console()
    console.print(comparison_table(comparisons))
    print_proposal(proposal)
    name = run.folder
    hint = f"\nuse it with: rlinf replan {name} --apply, then rlinf resume {name}"
    if apply:
        hint = f"\ncontinue the run with it: rlinf resume {name}"
    console.print(f"plan: {out}\npage: {page}{hint}", soft_wrap=True)


def compute_corrections(
    plan: Plan, times: Mapping[str, MeasuredTimes], request: PlanRequest
) -> dict[tuple[str, str], Correction]:
    """Return the factors by which stages took longer than in the profile, by stage and kind.

    The new corrections are multiplied with those of earlier runs, from the plan's forecast.
    """
    assert plan.forecast is not None
    corrections = {
        (entry.stage, entry.kind): Correction(entry.startup_factor, entry.work_factor)
        for entry in plan.forecast.corrections
    }
    measured = (
        pool_corrections(plan, times) if plan.pools else job_corrections(plan, times, request)
    )
    for key, new in measured.items():
        old = corrections.get(key, Correction())
        corrections[key] = Correction(
            old.startup_factor * new.startup_factor, old.work_factor * new.work_factor
        )
    if request.profile.estimated:
        spread = SINGLE_MEASUREMENT_SPREAD
        return {key: replace(value, spread=spread) for key, value in corrections.items()}
    return corrections


def pool_corrections(
    plan: Plan, times: Mapping[str, MeasuredTimes]
) -> dict[tuple[str, str], Correction]:
    """Return the corrections of stages in pools: measured work divided by predicted work."""
    assert plan.forecast is not None
    corrections = {}
    for pool in plan.pools:
        for stage in pool.stages:
            forecast = plan.forecast.stages.get(stage)
            if forecast is None or stage not in times or WORK_PART not in forecast.breakdown_s:
                continue
            factor = statistics.median(times[stage].busy_s) / max(
                1e-9, forecast.breakdown_s[WORK_PART]
            )
            for kind in pool.devices:
                corrections[stage, kind] = Correction(work_factor=max(1e-9, factor))
    return corrections


def job_corrections(
    plan: Plan, times: Mapping[str, MeasuredTimes], request: PlanRequest
) -> dict[tuple[str, str], Correction]:
    """Return the corrections of stages in jobs: of start and imports, and of all later parts."""
    assert plan.forecast is not None
    corrections = {}
    for stage, forecast in plan.forecast.stages.items():
        if stage not in times or not times[stage].running_s:
            continue
        running_s = statistics.median(times[stage].running_s)
        startup_s = statistics.median(times[stage].total_s) - running_s
        expected_s = sum(forecast.breakdown_s.get(part, 0.0) for part in ("start", "imports"))
        correction = Correction(
            startup_factor=max(1e-9, startup_s / expected_s) if expected_s > 0 else 1.0,
            work_factor=running_s / max(1e-9, forecast.seconds - expected_s),
        )
        resources = plan.stage_plan(stage)
        for name, entry in request.devices.items():
            speeds = resources.speed_weights if isinstance(resources.speed_weights, dict) else {}
            same_gpus = resources.gpu_type in (None, entry.kind.gpu_type) or entry.feature in speeds
            if (resources.partition or "") == entry.kind.partition and same_gpus:
                corrections[stage, name] = correction
    return corrections


def comparison_table(comparisons: Sequence[ForecastComparison]) -> Table:
    """Return the table that compares forecast and measurements."""
    table = Table(
        title="predicted against actual",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("stage", no_wrap=True)
    for heading in ("predicted", "actual (median)", "off by", "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    for comparison in comparisons:
        table.add_row(
            comparison.name,
            format_seconds(comparison.predicted_s),
            format_seconds(comparison.actual.median_s),
            f"{comparison.error:+.1%}",
            str(len(comparison.actual.total_s)),
        )
    return table
