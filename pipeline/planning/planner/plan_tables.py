"""The tables that show a plan on the terminal, and its page with a chart."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.console import create_console
from pipeline.planning.planner.plan_proposal import PlanProposal
from pipeline.pools.measured_times import WORK_PART, ForecastComparison
from pipeline.report.chart_style import TEXT_COLOUR, finish_chart, inline_svg
from pipeline.report.theme import render_template, stage_colours


def render_page(proposal: PlanProposal, title: str) -> str:
    """Render the plan's page as HTML."""
    forecast = proposal.forecast
    return render_template(
        "plan.html.jinja",
        name=f"{title}: plan",
        tiles=[
            ("predicted iteration", f"{forecast.iteration_s:.3g} s"),
            ("80 % of iterations", f"{forecast.low_s:.3g} - {forecast.high_s:.3g} s"),
            ("device-hours an iteration", f"{forecast.gpu_hours:.3g}"),
            ("mode", proposal.mode),
            ("objective", forecast.objective),
        ],
        gantt=inline_svg(gantt_chart(proposal), "gantt"),
        what_ifs=[
            (what_if.case, what_if.seconds, what_if.seconds / forecast.iteration_s - 1)
            for what_if in proposal.what_ifs
            if what_if.seconds is not None
        ],
        rows=proposal.rows,
        alternatives=[
            {"other": other, "more": other.cost / forecast.cost - 1 if forecast.cost else 0.0}
            for other in proposal.alternatives
        ],
        notes=proposal.notes,
    )


def gantt_chart(proposal: PlanProposal) -> Figure:
    """Draw each stage as a bar, pale where it starts, loads or waits; whiskers show the 10 % to
    90 % interval of its end."""
    rows, colours = proposal.rows, stage_colours(row.stage for row in proposal.rows)
    figure, axis = plt.subplots(figsize=(10, 0.55 * len(rows) + 1.0))
    for index, row in enumerate(rows):
        forecast, colour = row.forecast, colours[row.stage]
        work_s = forecast.breakdown_s.get(WORK_PART, forecast.seconds)
        end_s = forecast.start_s + forecast.seconds
        axis.barh(index, forecast.seconds, 0.6, forecast.start_s, color=colour, alpha=0.4)
        axis.barh(index, work_s, 0.6, end_s - work_s, color=colour)
        interval = [[forecast.seconds - forecast.low_s], [forecast.high_s - forecast.seconds]]
        axis.errorbar(end_s, index, xerr=interval, color=TEXT_COLOUR, lw=1, capsize=3)
    labels = [f"{row.stage}\n{row.place}  {row.size}" for row in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.set(xlabel="seconds", xlim=(0, None), ylim=(len(rows) - 0.4, -0.6))
    axis.grid(axis="y", visible=False)
    return finish_chart(figure)


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
    for note in proposal.notes:
        console.print(f"note: {note}", style="yellow")


def describe_optimality(proposal: PlanProposal) -> str:
    """Describe how close the plan is to the optimum."""
    if proposal.is_optimal:
        return "no plan is better under these predictions"
    if proposal.alternatives and proposal.alternatives[0].cost < proposal.forecast.cost:
        return f"the best plan would take {format_seconds(proposal.alternatives[0].seconds)}"
    return "no better plan was found"


def create_table(title: str, *columns: str) -> Table:
    """Return a table; the text of columns whose heading begins with ``>`` is aligned right."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if is_number else "left",
            no_wrap=is_number or column in ("stage", "cluster", "bound by", "chosen"),
        )
    return table


def plan_table(proposal: PlanProposal) -> Table:
    """Return the table of stages; the size is nodes x devices per node."""
    title = f"plan: {proposal.mode}, for the least {proposal.forecast.objective}"
    headings = ("stage", "where", "size", ">start", ">duration", ">10 - 90 %", "bound by")
    table = create_table(title, *headings)
    for row in proposal.rows:
        forecast = row.forecast
        share = (
            forecast.breakdown_s[forecast.bound_by] / forecast.seconds if forecast.seconds else 0
        )
        table.add_row(
            row.stage,
            row.place,
            row.size,
            format_seconds(forecast.start_s),
            format_seconds(forecast.seconds),
            format_interval(forecast.low_s, forecast.high_s),
            f"{forecast.bound_by} {share:.0%}",
        )
    return table


def alternatives_table(proposal: PlanProposal) -> Table:
    """Return the table of the best other plans, with the reason why each is worse."""
    table = create_table("alternatives", "difference", ">iteration", ">cost", "reason")
    for other in proposal.alternatives:
        added = other.cost / proposal.forecast.cost - 1 if proposal.forecast.cost else 0.0
        seconds = format_seconds(other.seconds)
        table.add_row(other.difference, seconds, f"{added:+.1%}", other.reason)
    return table


def what_if_table(proposal: PlanProposal) -> Table:
    """Return the table of the best plans for different clusters."""
    table = create_table("what if", "cluster", ">iteration", ">change")
    planned_s = proposal.forecast.iteration_s
    for what_if in proposal.what_ifs:
        if what_if.seconds is None:
            table.add_row(what_if.case, "impossible", "")
        else:
            change = what_if.seconds / planned_s - 1
            table.add_row(what_if.case, format_seconds(what_if.seconds), f"{change:+.1%}")
    return table


def comparison_table(comparisons: Sequence[ForecastComparison]) -> Table:
    """Return the table that compares forecast and measurements."""
    headings = ("stage", ">predicted", ">actual (median)", ">off by", ">n")
    table = create_table("predicted against actual", *headings)
    for comparison in comparisons:
        table.add_row(
            comparison.name,
            format_seconds(comparison.predicted_s),
            format_seconds(comparison.actual.median_s),
            f"{comparison.error:+.1%}",
            str(len(comparison.actual.total_s)),
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
