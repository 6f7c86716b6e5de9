"""What an attempt holds is freed when it is through, not when Python's collector comes to it."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import stages.train
from pipeline.commands.experiment import compose
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import RunConfig, validate
from rlinf.errors import StageError
from stages.context import LiveContext, StageContext, StageInput
from stages.device_schedule import Unscheduled
from stages.live_store import LiveOutput
from stages.rank_reports import reduce_metric
from stages.runner import StageAttempt, StageCall


class Weights:
    """Stands for a copy of them that waits to be written."""

    def save(self, path: Path) -> None:
        if path.name != "weights":
            raise StageError("the disk is full")
        path.write_text("1")


@pytest.fixture
def config() -> RunConfig:
    return validate(RunConfig, compose(["experiment=arithmetic_grpo"]))


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def attempt(config: RunConfig, run: Path, **inputs: StageInput) -> StageAttempt:
    """Of a stage in a pool."""
    folders = {name: entry.folder for name, entry in inputs.items()}
    now = time.time()
    return StageAttempt(
        StageCall("train", run / "config.yaml", run / "train", 0, folders),
        config,
        ProcessGroupInfo(),
        inputs,
        {},
        lambda: False,
        process_start=now,
        start=now,
        live=LiveContext(LiveOutput(), Unscheduled(), 1),
    )


@pytest.mark.parametrize("name", ["weights", "too much", "never written"])
@pytest.mark.usefixtures("without_collector")
def test_what_is_written_late_is_freed_at_once(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each iteration leaves a copy of weights and optimizer; collections are many of them apart."""
    held: list[weakref.ref[Weights]] = []

    def run(ctx: StageContext) -> None:
        weights = Weights()
        held.append(weakref.ref(weights))
        ctx.defer(lambda: weights.save(ctx.data_folder / name))
        if name == "never written":
            raise StageError("a step failed")

    monkeypatch.setattr(stages.train, "run", run)
    work = attempt(config, tmp_path)
    context = weakref.ref(work.ctx)
    with contextlib.suppress(StageError):
        work.compute()
        work.commit()
    assert held[0]() is None
    assert (tmp_path / "train/manifest.json").exists() == (name == "weights")
    del work
    assert context() is None


def test_metrics_do_not_depend_on_how_samples_are_dealt_to_ranks() -> None:
    values = np.random.default_rng(0).normal(size=12)
    for cuts in ([], [3], [1, 2], [4, 5, 11]):
        parts = np.split(values, cuts)
        means = [[float(part.mean()), len(part), "mean"] for part in parts]
        deviations = [[float(part.std()), len(part), "std"] for part in parts]
        assert reduce_metric(means)[0] == pytest.approx(values.mean())
        assert reduce_metric(deviations, means) == pytest.approx((values.std(), 12))
        assert reduce_metric([[float(part.max()), 1.0, "max"] for part in parts])[0] == values.max()
        assert reduce_metric([[float(len(part)), 0.0, "mean"] for part in parts])[0] == 12
