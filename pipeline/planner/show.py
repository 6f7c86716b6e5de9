"""``rlinf plan``: make a plan, explain it, write ``plan.yaml`` and ``plan.html``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.launch import ClusterConfig
from pipeline.planner.devices import devices_of, local_devices
from pipeline.planner.page import page
from pipeline.planner.propose import Proposal, Request, parse_pins, propose
from pipeline.profile.identity import Identity
from pipeline.profile.kinds import local_kind
from pipeline.profile.schema import load_profile
from rlinf.artifacts import write_atomic
from rlinf.config import RunConfig, validate
from rlinf.errors import InputError
from slurm.site import Site, load_site


@dataclass(frozen=True)
class Sources:
    """Where the planner's facts come from."""

    profile: Path
    inventory: Path | None = None
    """A saved inventory; None: Slurm is asked."""
    site: Path | None = None
    """The cluster section's own by default."""
    partitions: tuple[str, ...] = ()


def request(
    config: RunConfig, sources: Sources, objective: str = "time", pins: Sequence[str] = ()
) -> Request:
    """Gather what the planner needs.

    Raises:
        PlanError: a file is missing or wrong, or the profile is of another run.
        SlurmError: Slurm does not answer.
    """
    profile = load_profile(sources.profile)
    profile.require(Identity.of(config), (), str(sources.profile))
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    notes: tuple[str, ...] = ()
    if cluster.launcher != "slurm" and sources.inventory is None:
        devices = local_devices(profile, local_kind())
    else:
        from pipeline.inventory import obtain

        site = sources.site or cluster.site
        inventory = obtain(sources.inventory, site)
        known = load_site(site) if site else Site()
        devices, notes = devices_of(inventory, known, profile, sources.partitions)
    return Request(config, profile, devices, objective, parse_pins(pins, devices), notes)


def write(proposal: Proposal, out: Path, title: str) -> Path:
    """Write the plan, and its page beside it; returns the path of the page.

    Raises:
        InputError: a file cannot be written.
    """
    beside = out.with_suffix(".html")
    header = (
        "# Made by rlinf plan. Resources may be edited; 'predicted' is kept for comparison only.\n"
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, header + yaml.safe_dump(proposal.plan.dump(), sort_keys=False))
        write_atomic(beside, page(proposal, title))
    except OSError as error:
        raise InputError(f"{out}: {error.strerror}; choose another file") from None
    return beside


def show(proposal: Proposal) -> None:
    """Print the plan, its alternatives and what-ifs as tables."""
    console = Console()
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
    for note in proposal.notes:
        console.print(f"note: {note}", highlight=False, style="yellow")


def optimality(proposal: Proposal) -> str:
    """How near the best the plan is, in words."""
    if proposal.exact:
        return "no plan is better under these predictions"
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
    out.add_column("where", no_wrap=True)
    out.add_column("size", no_wrap=True)
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
            f"{row.low_s:.3g} - {seconds(row.high_s)}",
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
    out.add_column("why it loses")
    for other in proposal.alternatives:
        more = other.cost / proposal.forecast.cost - 1 if proposal.forecast.cost else 0.0
        out.add_row(other.what, seconds(other.seconds), f"+{more:.1%}", other.why)
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
    if value >= 600:
        return f"{value / 60:.1f} min"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def make(
    config: RunConfig,
    sources: Sources,
    out: Path,
    objective: str,
    pins: Sequence[str],
    what_ifs: Sequence[str],
) -> None:
    """Plan, print, write."""
    proposal = propose(request(config, sources, objective, pins), what_ifs)
    show(proposal)
    beside = write(proposal, out, config.run.name)
    Console().print(f"plan: {out}\npage: {beside}", highlight=False, soft_wrap=True)
