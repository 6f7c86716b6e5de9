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
from rlinf.channels.world import World
from rlinf.config import RunConfig, validate
from rlinf.errors import StageError
from stages.board import Output
from stages.context import Context, Input, Live
from stages.ranks import merged
from stages.runner import Attempt, StageCall
from stages.turns import Aside


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


def attempt(config: RunConfig, run: Path, **inputs: Input) -> Attempt:
    """Of a stage in a pool."""
    folders = {name: entry.folder for name, entry in inputs.items()}
    now = time.time()
    return Attempt(
        StageCall("train", run / "config.yaml", run / "train", 0, folders),
        config,
        World(),
        inputs,
        {},
        lambda: False,
        began=now,
        start=now,
        live=Live(Output(), Aside(), lambda _: pytest.fail("it has no channels"), 1),
    )


@pytest.mark.parametrize("name", ["weights", "too much", "never written"])
@pytest.mark.usefixtures("without_collector")
def test_what_is_written_late_is_freed_at_once(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each iteration leaves a copy of weights and optimizer; collections are many of them apart."""
    held: list[weakref.ref[Weights]] = []

    def run(ctx: Context) -> None:
        weights = Weights()
        held.append(weakref.ref(weights))
        ctx.later(lambda: weights.save(ctx.data / name))
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
        assert merged(means)[0] == pytest.approx(values.mean())
        assert merged(deviations, means) == pytest.approx((values.std(), 12))
        assert merged([[float(part.max()), 1.0, "max"] for part in parts])[0] == values.max()
        assert merged([[float(len(part)), 0.0, "mean"] for part in parts])[0] == 12
