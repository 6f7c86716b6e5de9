"""The commands ``rlinf plan`` and ``rlinf replan``: make, explain and write a plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from pipeline.console import create_console
from pipeline.inventory import load_or_survey
from pipeline.plan import Execution, Plan, PlanningSources, read_plan
from pipeline.planning.cost.estimated_profile import estimate_profile
from pipeline.planning.planner.available_devices import (
    check_plan_limits,
    local_devices,
    select_devices,
)
from pipeline.planning.planner.plan_proposal import PlanProposal
from pipeline.planning.planner.plan_tables import comparison_table, print_proposal, render_page
from pipeline.planning.planner.planner import assess_plan, propose_plan
from pipeline.planning.planner.request import PlanRequest, parse_pins
from pipeline.planning.planner.stage_times import SINGLE_MEASUREMENT_SPREAD, Correction
from pipeline.planning.profile.device_kinds import local_kind
from pipeline.planning.profile.schema import ProfileIdentity, load_profile
from pipeline.pools.measured_times import (
    WORK_PART,
    MeasuredTimes,
    compare_with_forecast,
    measure_times,
)
from pipeline.resources import ClusterConfig
from pipeline.run import Run
from rlinf.artifacts import write_user_file
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError
from slurm.site import SiteConfig, load_site
from stages.flow import flow_of
from stages.layout import PLAN_FILE

UNMEASURED_NOTE = (
    "nothing was measured: times are from data sheets and may be wrong by a factor of two; measure "
    "with rlinf profile, or run this plan and then rlinf replan"
)


def build_request(
    config: RunConfig,
    sources: PlanningSources,
    objective: str = "time",
    execution: Execution | None = "jobs",
    *,
    user_plan: Plan | None = None,
) -> PlanRequest:
    """Collect the planner's input.

    Args:
        user_plan: the plan that the request assesses, if the user wrote one.

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
        profile.check_identity(ProfileIdentity.of(config), sources.profile)
        profile.check_stages(flow_of(config).all_stages, sources.profile)
    if cluster.launcher == "slurm" or inventory_file is not None:
        site_config = load_site(site_file) if site_file else SiteConfig()
        inventory = load_or_survey(inventory_file, site_file)
        if profile is None:
            profile = estimate_profile(config, inventory, site_config, user_plan)
            notes = (UNMEASURED_NOTE,)
        is_user_plan = user_plan is not None
        devices, device_notes = select_devices(
            inventory, site_config, profile, sources.partitions, is_user_plan=is_user_plan
        )
        notes += device_notes
        cluster_at_site = cluster.model_copy(update={"site": site_file})
        validator = partial(check_plan_limits, cluster=cluster_at_site, inventory=inventory)
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
        "# Made by rlinf plan. Resources may be edited; 'forecast' is kept for comparison only.\n"
    )
    write_user_file(out, header + yaml.safe_dump(proposal.plan.to_dict(), sort_keys=False))
    write_user_file(page, render_page(proposal, title))
    if proposal.problem:
        write_user_file(out.with_suffix(".problem.yaml"), proposal.problem)
    return page


def run_plan(
    config: RunConfig,
    sources: PlanningSources,
    out: Path,
    objective: str,
    what_ifs: Sequence[str],
    plan_file: Path | None = None,
    execution: Execution | None = None,
) -> None:
    """Run ``rlinf plan``: make, write and print a plan, or forecast and print a user's plan.

    Args:
        plan_file: the file of the user's plan; None: make a plan.
        execution: None: pools, or jobs if these are predicted to be better. A run in one process
            cannot have pools, so its plan has jobs unless an inventory is given.
    """
    if (
        execution is None
        and config.cluster.get("launcher") == "inprocess"
        and not sources.inventory
    ):
        execution = "jobs"
    user_plan = None if plan_file is None else read_plan(plan_file, flow_of(config))
    request = build_request(config, sources, objective, execution, user_plan=user_plan)
    if user_plan is not None:
        print_proposal(assess_plan(request, user_plan, str(plan_file), what_ifs))
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
