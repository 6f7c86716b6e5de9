"""Runs whose observations are read by those that compute with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.commands.experiment import drive, prepare_run, run_experiment
from rlinf.artifacts import read_manifest
from rlinf.errors import RlinfError
from stages.runner import DISK_FALLBACKS
from tests.pipeline.helpers import contents, run_here
from tests.pipeline.test_driver import weights

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
SMALL = (
    "task.id=tests.pipeline.wide:Wide-v0",
    "task.observation=400",
    "rollout.batch_size=4",
    "rollout.horizon=64",
    "algorithm.minibatches=2",
    "algorithm.epochs=1",
    "evaluate.samples=1",
    "evaluate.horizon=4",
    "iterations=2",
)
RANKS = {"processes": 2}
STAGES = ["rollout", "reward", "inference", "train"]
POOL = {
    "num_chunks": 2,
    "stages": dict.fromkeys(("rollout", "inference", "train"), RANKS),
    "pools": [{"stages": STAGES, "devices": {"local": 2}}],
}
APART = {
    **POOL,
    "pools": [
        {"stages": STAGES[:2], "devices": {"local": 1}},
        {"stages": STAGES[2:], "devices": {"local": 2}},
    ],
    "stages": dict.fromkeys(STAGES[2:], RANKS),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wide")
    words = [*SMALL, "run.name=one", f"run.root={root}", "log.trackers=[]"]
    run_here(["experiment=cartpole_ppo", *words])
    return root / "one"


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(
            {"stages": dict.fromkeys(STAGES[2:], RANKS)}, id="jobs", marks=pytest.mark.slow
        ),
        pytest.param(POOL, id="one"),
        pytest.param(APART, id="two"),
    ],
)
def test_ranks_that_read_their_own_rows_make_the_update_of_one(
    plan: dict[str, Any], one: Path, compose: Compose, tmp_path: Path
) -> None:
    values = compose(*SMALL, "run.name=two", "cluster=local", experiment="cartpole_ppo")
    values["plan"] = plan
    run_experiment(values)
    for iteration in range(2):
        expected, found = weights(one, iteration), weights(tmp_path / "two", iteration)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4)
    manifest = read_manifest(tmp_path / "two/it/0001/rollout")
    assert manifest is not None
    assert any(name.endswith(".rows.hdf5") for name in manifest.files)
    for stage in STAGES[2:]:
        chosen = read_manifest(tmp_path / f"two/it/0001/{stage}")
        assert chosen is not None
        assert DISK_FALLBACKS not in chosen.extra, "that they are read from files is no loss"


def test_damage_to_large_rows_is_mended(one: Path, compose: Compose, tmp_path: Path) -> None:
    values = compose(*SMALL, "run.name=hurt", "iterations=1", experiment="cartpole_ppo")
    values["cluster"] = {**values["cluster"], "max_retries": 0}
    run = prepare_run(values)
    struck: list[Path] = []

    def strike(*_: Any) -> None:
        for path in (tmp_path / "hurt/it/0000/rollout").glob("data-*/*.rows.hdf5"):
            data = bytearray(path.read_bytes())
            if not struck:
                data[len(data) - 4000] ^= 1
                path.write_bytes(data)
                struck.append(path)

    from pipeline import executors

    real = executors.run_stage

    def stage(call: Any, **options: Any) -> Any:
        if call.stage == "inference":
            strike()
        return real(call, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "run_stage", stage)
        try:
            drive(run)
        except RlinfError:
            drive(run)
    assert struck
    found, whole = contents(tmp_path / "hurt"), contents(one)
    assert {name: digest for name, digest in whole.items() if "0001" not in name}.items() <= {
        **found,
        **{name: digest for name, digest in whole.items() if "0002" in name},
    }.items()
