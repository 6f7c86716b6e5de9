"""Held-out scores of the share of one process of several."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import stages.evaluate
from pipeline.commands.experiment import compose
from rlinf.channels.world import World
from rlinf.config import RunConfig, validate
from rlinf.data.record import Identity, Record
from stages.context import Context


@pytest.mark.parametrize(("scores", "weight"), [([np.nan, np.nan], 0), ([np.nan, 0.5], 1)])
def test_lost_episodes_have_no_weight_in_the_score(
    scores: list[float], weight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"actions": np.zeros(3, np.int64)}
    records = [Record(Identity(0, sample), steps) for sample in range(2)]
    environment: Any = SimpleNamespace(films=lambda config: (), measures=lambda records: {})
    monkeypatch.setattr(stages.evaluate, "speaking_environment", lambda ctx: environment)
    monkeypatch.setattr(stages.evaluate, "held_engine", lambda *_: None)
    monkeypatch.setattr(stages.evaluate, "held_out", lambda *_, **__: (records, scores))
    config = validate(RunConfig, compose(["experiment=arithmetic_grpo"]))
    ctx = Context(config, "evaluate", 0, tmp_path, tmp_path, tmp_path, World(1, 2), {})
    stages.evaluate.run(ctx)
    value, told, how = ctx.metrics["score"]
    assert (told, how) == (weight, "mean")
    assert np.isnan(value) if not weight else value == 0.5
