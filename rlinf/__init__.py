"""Reinforcement-learning post-training as a Slurm-native batch pipeline.

:func:`run` makes a run and :func:`load` opens one; both give its metrics, trajectories and weights.
All else is loaded when one of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.launch import load, run

__version__ = "0.1.0"
__all__ = ["__version__", "load", "run"]


def __getattr__(name: str) -> Any:
    if name in ("load", "run"):
        from rlinf import launch

        return getattr(launch, name)
    raise AttributeError(f"module 'rlinf' has no attribute {name!r}")
