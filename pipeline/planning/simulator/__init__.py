"""A simulator of placements on any GPUs, with queues, failures, slow GPUs and unequal lengths.

``simulate`` (``simulation.py``) runs a ``Placement`` of a ``PlacementProblem`` under a ``Scenario``
and returns a ``SimulationTrace``.
"""

from pipeline.planning.simulator.scenario import Scenario
from pipeline.planning.simulator.simulation import SimulationTrace, simulate

__all__ = ["Scenario", "SimulationTrace", "simulate"]
