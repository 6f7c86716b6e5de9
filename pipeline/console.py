"""The terminal that tables and notes are printed on."""

from __future__ import annotations

from rich.console import Console


def create_console(*, stderr: bool = False) -> Console:
    """A console that prints texts as they are: names, reasons and model output may hold brackets,
    which rich would take for markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def format_duration(seconds: float) -> str:
    """``45 s``, ``4 min 34 s``, ``25 min``, ``3 h 5 min``: no more figures than matter."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
