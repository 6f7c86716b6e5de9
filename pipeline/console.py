"""Output to the terminal."""

from __future__ import annotations

from rich.console import Console


def create_console(*, stderr: bool = False) -> Console:
    """Return a console without markup: names, reasons and model output may contain brackets, which
    rich would interpret."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def format_duration(seconds: float) -> str:
    """Return a duration as text: ``45 s``, ``4 min 34 s``, ``25 min``, ``3 h 5 min``."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    total_s = round(seconds)
    if total_s < 600:
        return f"{total_s // 60} min {total_s % 60} s"
    minutes = round(total_s / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def format_number(value: float) -> str:
    """Return a number as text: four significant digits, or from 10,000 on all integer digits."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def format_rate(rate: float) -> str:
    """Return an amount per second as text: ``1,234``, ``12``, ``1.2``."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
