"""Every algorithm with every policy: they fit and run, or are refused before they begin."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.combinations import ALGORITHMS, COLUMNS, compose_config, find_refusal
from pipeline.commands.experiment import run_experiment
from pipeline.metrics import read_metrics
from rlinf.algorithms import algorithms


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Transitions of the pendulum."""
    path = tmp_path_factory.mktemp("prior") / "prior.hdf5"
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name, size in (("observations", 3), ("next_observations", 3), ("actions", 1)):
            file[name] = random.uniform(-0.9, 0.9, size=(50, size))
        file["rewards"], file["terminated"] = random.normal(size=50), np.zeros(50)
    return path


def test_all_algorithms_are_tried() -> None:
    assert set(ALGORITHMS) == set(algorithms.names())


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_does_not_fit_is_refused_with_its_need(
    algorithm: str, column: str, prior: Path
) -> None:
    why = find_refusal(algorithm, column, prior)
    assert why is None or "needs" in why


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_fits_runs(algorithm: str, column: str, prior: Path, tmp_path: Path) -> None:
    if find_refusal(algorithm, column, prior) is not None:
        return
    run_experiment(compose_config(algorithm, column, prior, f"run.root={tmp_path}"))
    (row,) = read_metrics(tmp_path / "small")
    assert np.isfinite(row["train/loss"])
    assert row["train/grad_norm"] >= 0
