"""``rlinf plan`` and ``rlinf replan``: make a plan, explain it, write it and its page."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.inventory import obtain
from pipeline.launch import ClusterConfig
from pipeline.plan import Grain, Plan, Sources, read_plan
from pipeline.planning.planner.devices import devices_of, local_devices, with_floors
from pipeline.planning.planner.limits import admitted
from pipeline.planning.planner.options import Correction
from pipeline.planning.planner.page import page
from pipeline.planning.planner.proposal import Proposal
from pipeline.planning.planner.propose import assess, propose
from pipeline.planning.planner.request import Request, parse_pins
from pipeline.planning.planner.work import SINGLE_SPREAD
from pipeline.planning.profile.estimate import estimated
from pipeline.planning.profile.identity import Identity
from pipeline.planning.profile.kinds import local_kind
from pipeline.planning.profile.schema import load_profile
from pipeline.pools.actuals import WORK, Comparison, Times, actual, compare
from pipeline.run import Run
from pipeline.terminal import terminal
from rlinf.artifacts import save_text
from rlinf.config import RunConfig, validate
from rlinf.errors import DataError, PlanError
from slurm.site import Site, load_site
from stages.flow import flow_of
from stages.layout import PLAN

UNMEASURED = (
    "nothing was measured: times are from data sheets and may be wrong by a factor of two; measure "
    "with rlinf profile, or run this plan and ask rlinf replan"
)


def request(
    config: RunConfig,
    sources: Sources,
    objective: str = "time",
    grain: Grain = "stage",
    *,
    given: bool = False,
) -> Request:
    """Gather what the planner needs.

    Args:
        given: to assess a plan by hand.

    Raises:
        PlanError: a file is missing or wrong, or the profile is of another run.
        SlurmError: Slurm does not answer.
    """
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    saved = Path(sources.inventory) if sources.inventory else None
    site = Path(sources.site) if sources.site else cluster.site
    notes: tuple[str, ...] = ()
    profile, door = None, None
    if sources.profile:
        profile = load_profile(Path(sources.profile))
        profile.require(Identity.of(config), (), sources.profile)
        profile.check_stages(flow_of(config).table, sources.profile)
    if cluster.launcher == "slurm" or saved is not None:
        known, inventory = load_site(site) if site else Site(), obtain(saved, site)
        if profile is None:
            profile, notes = estimated(config, inventory, known), (UNMEASURED,)
        devices, more = devices_of(inventory, known, profile, sources.partitions, given=given)
        notes += more
        sited = cluster.model_copy(update={"site": site})
        door = partial(admitted, cluster=sited, inventory=inventory)
        if not profile.estimated:
            # Without data sheets, or of another sort of model, measurements alone say what fits.
            with suppress(PlanError, DataError):
                devices = with_floors(devices, estimated(config, inventory, known))
    elif profile is not None:
        devices = local_devices(profile, local_kind())
    else:
        raise PlanError(
            "nothing is measured: there is no profile.json; make one with: rlinf profile, or name "
            "a cluster whose GPUs have data sheets (cluster=slurm, or --from INVENTORY)"
        )
    pins = parse_pins(sources.pins, devices, flow_of(config))
    return Request(
        config, profile, devices, objective, grain, pins, notes, sources=sources, door=door
    )


def write(proposal: Proposal, out: Path, title: str) -> Path:
    """Write the plan, beside it its page, and of pools the problem; returns the page's path.

    Raises:
        InputError: a file cannot be written.
    """
    beside = out.with_suffix(".html")
    header = (
        "# Made by rlinf plan. Resources may be edited; 'predicted' is kept for comparison only.\n"
    )
    save_text(out, header + yaml.safe_dump(proposal.plan.dump(), sort_keys=False))
    save_text(beside, page(proposal, title))
    if proposal.problem:
        save_text(out.with_suffix(".problem.yaml"), proposal.problem)
    return beside


def show(proposal: Proposal) -> None:
    """Print the plan, its alternatives and what-ifs as tables."""
    console = terminal()
    console.print(plan_table(proposal))
    forecast = proposal.forecast
    console.print(
        f"iteration: {seconds(forecast.iteration_s)} "
        f"({seconds(forecast.low_s)} to {seconds(forecast.high_s)} for 80 %), "
        f"{forecast.gpu_hours:.3g} device-hours; {optimality(proposal)}",
        highlight=False,
    )
    if proposal.alternatives:
        console.print(alternatives_table(proposal))
    if proposal.what_ifs:
        console.print(what_if_table(proposal))
    if proposal.forecast.choices:
        console.print(choices_table(proposal))
    for note in proposal.notes:
        console.print(f"note: {note}", style="yellow")


def optimality(proposal: Proposal) -> str:
    """How near the best the plan is, in words."""
    if proposal.exact:
        return "no plan is better under these predictions"
    if proposal.alternatives and proposal.alternatives[0].cost < proposal.forecast.cost:
        return f"the best plan would take {seconds(proposal.alternatives[0].seconds)}"
    gap = proposal.forecast.cost / proposal.bound - 1 if proposal.bound > 0 else math.inf
    return f"no plan costs less than {proposal.bound:.4g} {proposal.unit} (gap {gap:.1%})"


def plan_table(proposal: Proposal) -> Table:
    """A row for each stage; the size is nodes x devices of each."""
    out = Table(
        title=f"plan: {proposal.mode}, for the least {proposal.objective}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    out.add_column("stage", no_wrap=True)
    out.add_column("where")
    out.add_column("size")
    for heading in ("from", "takes", "10 - 90 %"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("bound by", no_wrap=True)
    for row in proposal.rows:
        share = row.parts_s[row.bound_by] / row.seconds if row.seconds else 0.0
        out.add_row(
            row.stage,
            row.place,
            row.size,
            seconds(row.start_s),
            seconds(row.seconds),
            spread(row.low_s, row.high_s),
            f"{row.bound_by} {share:.0%}",
        )
    return out


def alternatives_table(proposal: Proposal) -> Table:
    """The best other plans and why each loses."""
    out = Table(
        title="alternatives",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    out.add_column("what differs")
    out.add_column("iteration", justify="right", no_wrap=True)
    out.add_column("cost", justify="right", no_wrap=True)
    out.add_column("why")
    for other in proposal.alternatives:
        more = other.cost / proposal.forecast.cost - 1 if proposal.forecast.cost else 0.0
        out.add_row(other.what, seconds(other.seconds), f"{more:+.1%}", other.why)
    return out


def choices_table(proposal: Proposal) -> Table:
    """What the plan uses of what it could, and what that brings or would."""
    out = Table(
        title="choices", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    out.add_column("what")
    out.add_column("chosen", no_wrap=True)
    out.add_column("saves", justify="right", no_wrap=True)
    out.add_column("why")
    for choice in proposal.forecast.choices:
        saved = "" if choice.saved_s is None else seconds(choice.saved_s)
        out.add_row(choice.what, "yes" if choice.chosen else "no", saved, choice.why)
    return out


def what_if_table(proposal: Proposal) -> Table:
    """The best plans of clusters that differ."""
    out = Table(
        title="what if", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    out.add_column("cluster", no_wrap=True)
    out.add_column("iteration", justify="right", no_wrap=True)
    out.add_column("change", justify="right", no_wrap=True)
    now = proposal.forecast.iteration_s
    for case in proposal.what_ifs:
        possible = math.isfinite(case.seconds)
        change = f"{case.seconds / now - 1:+.1%}" if possible else ""
        out.add_row(case.what, seconds(case.seconds) if possible else "impossible", change)
    return out


def seconds(value: float) -> str:
    """A duration with three digits."""
    unit, factor = _unit(value)
    return f"{_digits(value * factor)} {unit}"


def spread(low: float, high: float) -> str:
    """Two durations, in the unit of the longer one."""
    unit, factor = _unit(high)
    return f"{_digits(low * factor)} - {_digits(high * factor)} {unit}"


def _unit(value: float) -> tuple[str, float]:
    if value >= 600:
        return "min", 1 / 60
    return ("ms", 1000.0) if 0 < value < 0.1 else ("s", 1.0)


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def make(
    config: RunConfig,
    sources: Sources,
    out: Path,
    objective: str,
    what_ifs: Sequence[str],
    given: Path | None = None,
    grain: Grain = "stage",
) -> None:
    """``rlinf plan``: plan, print, write; or assess a given plan, which is left as it is."""
    asked = request(config, sources, objective, grain, given=given is not None)
    if given is not None:
        show(assess(asked, read_plan(given, flow_of(config)), str(given), what_ifs))
        return
    proposal = propose(asked, what_ifs)
    # The files first: the reader of what is printed may close its end.
    beside = write(proposal, out, config.run.name)
    show(proposal)
    terminal().print(f"plan: {out}\npage: {beside}", soft_wrap=True)


def remake(run: Run, sources: Sources | None, objective: str | None, *, apply: bool) -> None:
    """``rlinf replan``: predicted against actual, then a plan that knows what the run has taught.

    Args:
        sources: instead of those of the run's plan.
        apply: put it in the place of the run's plan, for the next start of a driver.

    Raises:
        PlanError: the plan was not made by ``rlinf plan``, or no iteration counts yet.
    """
    plan = Plan.read(run.folder)
    sources = sources or (plan.predicted.sources if plan.predicted else None)
    if plan.predicted is None or sources is None:
        raise PlanError(
            f"{run.folder / PLAN}: it has no prediction to compare with; "
            "make a first plan with: rlinf plan"
        )
    lines = compare(run)
    if not lines:
        raise PlanError(f"{run.folder}: two iterations must be finished before a new plan")
    asked = request(run.config, sources, objective or plan.predicted.objective, plan.grain)
    same = plan.predicted.sources is None or sources.profile == plan.predicted.sources.profile
    # Corrections are those of one profile; another one has measured anew.
    known = corrections(plan, actual(run), asked) if same else {}
    proposal = propose(replace(asked, corrections=known))
    if proposal.plan.predicted is not None:
        predicted = proposal.plan.predicted.model_copy(update={"since": time.time()})
        made = proposal.plan.model_copy(update={"predicted": predicted})
        proposal = replace(proposal, plan=made)
    out = run.folder / (PLAN if apply else "replan.yaml")
    beside = write(proposal, out, run.folder.name)
    console = terminal()
    console.print(actual_table(lines))
    show(proposal)
    name = run.folder
    hint = f"\nuse it with: rlinf replan {name} --apply, then rlinf resume {name}"
    if apply:
        hint = f"\n{name} goes on with it: rlinf resume {name}"
    console.print(f"plan: {out}\npage: {beside}{hint}", soft_wrap=True)


def corrections(
    plan: Plan, times: Mapping[str, Times], request: Request
) -> dict[tuple[str, str], Correction]:
    """How much longer than the profile says each stage takes, for the kinds it ran on.

    The plan's prediction may already hold what an earlier run taught.
    """
    assert plan.predicted is not None
    learnt = {
        (entry.stage, entry.kind): Correction(entry.starting, entry.working)
        for entry in plan.predicted.learnt
    }
    found = of_pools(plan, times) if plan.pools else of_jobs(plan, times, request)
    for key, new in found.items():
        old = learnt.get(key, Correction())
        learnt[key] = Correction(old.starting * new.starting, old.working * new.working)
    if request.profile.estimated:
        learnt = {key: replace(known, spread=SINGLE_SPREAD) for key, known in learnt.items()}
    return learnt


def of_pools(plan: Plan, times: Mapping[str, Times]) -> dict[tuple[str, str], Correction]:
    """Of stages in pools: what they computed beside what was predicted."""
    assert plan.predicted is not None
    found = {}
    for pool in plan.pools:
        for stage in pool.stages:
            forecast = plan.predicted.stages.get(stage)
            if forecast is None or stage not in times or WORK not in forecast.parts_s:
                continue
            longer = statistics.median(times[stage].busy_s) / max(1e-9, forecast.parts_s[WORK])
            for kind in pool.gpus:
                found[stage, kind] = Correction(working=max(1e-9, longer))
    return found


def of_jobs(
    plan: Plan, times: Mapping[str, Times], request: Request
) -> dict[tuple[str, str], Correction]:
    """Of stages in jobs of their own: start and imports, and all that comes after these."""
    assert plan.predicted is not None
    found = {}
    for stage, forecast in plan.predicted.stages.items():
        if stage not in times or not times[stage].inside_s:
            continue
        inside = statistics.median(times[stage].inside_s)
        before = statistics.median(times[stage].whole_s) - inside
        expected = sum(forecast.parts_s.get(part, 0.0) for part in ("start", "imports"))
        known = Correction(
            starting=max(1e-9, before / expected) if expected > 0 else 1.0,
            working=inside / max(1e-9, forecast.seconds - expected),
        )
        resources = plan.of(stage)
        for name, own in request.devices.items():
            kinds = resources.shares if isinstance(resources.shares, dict) else {}
            named = resources.gpu_type in (None, own.kind.gpu_type) or own.feature in kinds
            if (resources.partition or "") == own.kind.partition and named:
                found[stage, name] = known
    return found


def actual_table(lines: Sequence[Comparison]) -> Table:
    """Predicted against actual."""
    out = Table(
        title="predicted against actual",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    out.add_column("stage", no_wrap=True)
    for heading in ("predicted", "actual (median)", "off by", "n"):
        out.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        out.add_row(
            line.what,
            seconds(line.predicted_s),
            seconds(line.actual.median_s),
            f"{line.error:+.1%}",
            str(len(line.actual.whole_s)),
        )
    return out
