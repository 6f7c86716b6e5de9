"""The components of a run, as a trainer's checks see them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlinf.config import OptimizerSection
from rlinf.models.causal_lm import CausalLM
from rlinf.registry import RunComponents


def run_components(model: Any, optimizer: OptimizerSection | None = None) -> RunComponents:
    """Return the components of a run that trains a language model with the options ``model``."""
    config: Any = SimpleNamespace(optimizer=optimizer or OptimizerSection())
    return RunComponents(config, {"model": CausalLM}, {"model": model}, frozenset())
