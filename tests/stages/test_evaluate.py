"""Held-out scores of the share of one process of several."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import stages.evaluate
from pipeline.commands.experiment import compose
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import RunConfig, validate
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from stages.context import StageContext


@pytest.mark.parametrize(("scores", "weight"), [([np.nan, np.nan], 0), ([np.nan, 0.5], 1)])
def test_lost_episodes_have_no_weight_in_the_score(
    scores: list[float], weight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions = np.zeros(3, np.int64)
    records = [Trajectory(identity=RecordId(0, sample), actions=actions) for sample in range(2)]
    environment: Any = SimpleNamespace(
        video_columns=lambda config: (),
        episode_metrics=lambda records: {},
        score=lambda trajectories, counts: scores,
        num_eval_samples=lambda requested: requested,
        sample_weights=lambda trajectories: [1.0] * len(trajectories),
        evaluation_info=lambda trajectory: {},
    )
    monkeypatch.setattr(stages.evaluate, "eval_environment", lambda ctx: environment)
    monkeypatch.setattr(stages.evaluate, "get_engine", lambda *_: None)
    monkeypatch.setattr(stages.evaluate, "generate_eval_episodes", lambda *_, **__: records)
    config = validate(RunConfig, compose(["experiment=arithmetic_grpo"]))
    ctx = StageContext(
        config, "evaluate", 0, tmp_path, tmp_path, tmp_path, ProcessGroupInfo(1, 2), {}
    )
    stages.evaluate.run(ctx)
    value, values, how = ctx.metrics["score"]
    assert (values, how) == (weight, "mean")
    assert np.isnan(value) if not weight else value == 0.5
