"""The terminal that tables and notes are printed on."""

from __future__ import annotations

from rich.console import Console


def terminal(*, stderr: bool = False) -> Console:
    """A console that prints texts as they are: names, reasons and model output may hold brackets,
    which rich would take for markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)
