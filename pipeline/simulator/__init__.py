"""A discrete-event simulator: any placement on any GPUs, with all that goes wrong in practice.

``simulate`` (``simulation.py``) runs a ``Placement`` of a ``Problem`` under a ``Scenario`` and
gives a ``Trace``.
"""

from pipeline.simulator.scenario import Scenario
from pipeline.simulator.simulation import simulate
from pipeline.simulator.trace import Trace

__all__ = ["Scenario", "Trace", "simulate"]
