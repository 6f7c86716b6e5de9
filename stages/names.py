"""What drivers and workers call each other, and what they speak of; a driver loads no more."""

from __future__ import annotations

CLAIM = "claim"
"""A share of the starts of a rollout, in status and reports."""


def worker_name(pool: str, rank: int) -> str:
    """The name of a rank of a pool on the control link."""
    return f"{pool}-r{rank}"


def unfinished(claim: str) -> str:
    """The channel of the part of a claim that a worker hands to its successor."""
    return f"unfinished-{claim}"
