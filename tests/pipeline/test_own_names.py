"""A flow may give its stages any names: what reads a run asks the flow for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.commands.experiment import compose
from pipeline.commands.export import export_weights
from pipeline.commands.status import read_status
from pipeline.plan import Plan
from pipeline.planning.profile.profile_pass import clone_run
from pipeline.report.data import read_report_data
from pipeline.run import Run
from rlinf import api
from rlinf.config import RunConfig, validate
from stages.factory import newer_weights_poller
from stages.worker_state import WorkerState
from tests.conftest import QUIET, TINY
from tests.pipeline.helpers import contents, run_here

WORDS = ["experiment=arithmetic_grpo", *QUIET, *TINY, "++flow=tests.pipeline.own_names:renamed"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    run_here([*WORDS, f"++run.root={root}"])
    return root / "tiny"


def test_names_change_no_number(run: Path, tiny_run: Path) -> None:
    """But for the noise of stages that are seeded by their names, which none of these is."""
    ours, theirs = contents(run), contents(tiny_run)
    assert ours["prepare"] == theirs["sft"]
    for iteration in range(2):
        assert ours[f"it/000{iteration}/publish"] == theirs[f"it/000{iteration}/sync"]


def test_the_weights_before_the_first_iteration_are_found(run: Path, tmp_path: Path) -> None:
    results = api.load(run)
    assert results.versions() == [0, 1, 2]
    before, after = results.weights(0), results.weights(2)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert export_weights(run, tmp_path / "out", 0) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_status_and_report_say_what_they_say_of_other_flows(
    run: Path, tiny_run: Path, tmp_path: Path
) -> None:
    result, other = read_status(run), read_status(tiny_run)
    assert (result.iterations_done, result.stage) == (2, "finished")
    assert result.reward == other.reward is not None
    found, known = read_report_data(run), read_report_data(tiny_run)
    assert found.sft == known.sft != []
    assert found.samples == known.samples != {}
    begun = tmp_path / "begun"
    shutil.copytree(run, begun)
    shutil.rmtree(begun / "it")
    shutil.rmtree(begun / "evaluate")
    assert read_status(begun).stage == "act of iteration 1"
    shutil.rmtree(begun / "prepare")
    assert read_status(begun).stage == "prepare"


def test_a_profile_begins_with_what_the_run_made(run: Path, tmp_path: Path) -> None:
    made = clone_run(Run.open(run), Plan(), tmp_path, "alone", 1)
    assert api.load(made.folder).versions() == [0]
    graph_key = (made.folder / "prepare/manifest.json").read_text()
    assert (run / "prepare/manifest.json").read_text() != graph_key, "its own key"


def test_newer_weights_come_in_while_a_rollout_goes_on(run: Path) -> None:
    config = validate(RunConfig, compose(WORDS))
    engine: Any = SimpleNamespace(version=0)
    resident = WorkerState(engine_weights="of version 0")
    ctx: Any = SimpleNamespace(run_folder=run, iteration=2, worker_state=resident, config=config)
    found = newer_weights_poller(ctx, engine)()
    assert found is not None
    folder, version = found
    assert version == 2
    assert folder.parent.parent == run / "it/0001/publish"
    assert (folder / "model.safetensors").exists()
