"""Durations as a person says them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``45 s``, ``4 min 34 s``, ``25 min``, ``3 h 5 min``: no more figures than matter."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
