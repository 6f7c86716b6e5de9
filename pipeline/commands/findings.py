"""What ``rlinf doctor`` finds, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from pipeline.terminal import terminal


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    level: Literal["ok", "warn", "fail"]
    what: str
    detail: str


def show(found: Iterable[Finding]) -> int:
    """Print findings; 0 when none is a failure."""
    table = Table(title="rlinf doctor", title_justify="left", show_header=False)
    failed = False
    for finding in found:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
        table.add_row(Text(finding.level, style=colour), finding.what, Text(finding.detail))
        failed |= finding.level == "fail"
    terminal().print(table)
    return int(failed)
