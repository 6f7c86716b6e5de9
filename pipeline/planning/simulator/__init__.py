"""A discrete-event simulator: any placement on any GPUs, with all that goes wrong in practice.

``simulate`` (``simulation.py``) runs a ``Placement`` of a ``Problem`` under a ``Scenario`` and
gives a ``SimulationTrace``.
"""

from pipeline.planning.simulator.scenario import Scenario
from pipeline.planning.simulator.simulation import simulate
from pipeline.planning.simulator.trace import SimulationTrace

__all__ = ["Scenario", "SimulationTrace", "simulate"]
