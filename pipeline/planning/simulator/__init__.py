"""A discrete-event simulator of placements on any GPUs, with queues, failures and stragglers.

``simulate`` (``simulation.py``) runs a ``Placement`` of a ``PlacementProblem`` under a ``Scenario``
and returns a ``SimulationTrace``.
"""

from pipeline.planning.simulator.scenario import Scenario
from pipeline.planning.simulator.simulation import simulate
from pipeline.planning.simulator.trace import SimulationTrace

__all__ = ["Scenario", "SimulationTrace", "simulate"]
