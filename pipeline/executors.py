"""The end of one attempt at a stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How one attempt at a stage ended."""

    exit_code: int
    reason: str = ""
    error: BaseException | None = None
