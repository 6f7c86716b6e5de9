"""The disk space of a run is known before it starts, and compared with what is free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import disk_space
from pipeline.commands.experiment import prepare_run, run_experiment
from pipeline.disk_space import estimate_disk_space
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError

Compose = Callable[..., dict[str, Any]]


def config_of(compose: Compose, *words: str) -> RunConfig:
    return validate(RunConfig, compose(*words))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_estimate_is_what_a_run_keeps(compose: Compose, tmp_path: Path, optimizer: str) -> None:
    wide = ["model.hidden=128", "model.intermediate=256"]  # names take little beside numbers
    values = compose("iterations=4", *wide, f"optimizer.name={optimizer}", "evaluate.every=0")
    run_experiment(values)
    estimate = estimate_disk_space(validate(RunConfig, values))
    assert estimate is not None
    run = tmp_path / "tiny"
    weights = [path.stat().st_size for path in run.rglob("model.safetensors")]
    checkpoints = [path.stat().st_size for path in run.rglob("rank-0-of-1.safetensors")]
    # At the end nothing is being written any more.
    assert len(weights) == estimate.num_weights - 1
    assert len(checkpoints) == estimate.num_checkpoints - 1
    assert weights[0] == pytest.approx(estimate.weights, rel=0.03)
    assert checkpoints[0] == pytest.approx(estimate.checkpoint, rel=0.03)


def test_retention_changes_the_estimate(compose: Compose) -> None:
    def counts(*words: str) -> tuple[int, int]:
        estimate = estimate_disk_space(config_of(compose, "iterations=100", *words))
        assert estimate is not None
        return estimate.num_weights, estimate.num_checkpoints

    assert counts("evaluate.every=0") == (4, 3)
    assert counts("evaluate.every=10", "checkpoint.keep_best=3") == (7, 3)
    assert counts("evaluate.every=0", "checkpoint.keep_every=20") == (9, 8)
    assert counts("evaluate.every=0", "checkpoint.keep_last=5") == (7, 6)
    assert counts("iterations=1", "evaluate.every=0") == (2, 1)


def test_a_run_that_does_not_fit_is_refused_before_anything_is_written(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = compose("iterations=4")
    estimate = estimate_disk_space(validate(RunConfig, values))
    assert estimate is not None
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: estimate.total - 1)
    with pytest.raises(ConfigError, match=r"run.root: the run will keep 5 versions .* GiB free"):
        prepare_run(values)
    assert not (tmp_path / "tiny").exists()
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: estimate.total)
    prepare_run(values)


def test_a_policy_of_unknown_size_is_not_estimated(compose: Compose) -> None:
    values = compose(experiment="cartpole_ppo")
    assert estimate_disk_space(validate(RunConfig, values)) is None
