"""What is committed stays: whatever a later start asks for, and whoever works at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import pipeline.run_state
from pipeline.cleanup import temporary_files
from pipeline.commands import workflow
from pipeline.commands.experiment import reopen_run, run_experiment
from pipeline.driver import Driver
from pipeline.executors import Outcome
from pipeline.graph import Graph, StageNode
from pipeline.lock import LOCK_FILE, RunLock
from pipeline.run import Run
from pipeline.run_state import RunState, is_skipped
from rlinf.artifacts import MANIFEST, is_pruned, read_manifest, withdraw_manifest
from rlinf.errors import InputError, RlinfError, RunLockedError
from stages.runner import open_inputs

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
SMALL = [
    "iterations=6",
    "rollout.batch_size=2",
    "rollout.horizon=16",
    "algorithm.epochs=1",
    "algorithm.minibatches=1",
    "evaluate.every=0",
    "evaluate.samples=2",
    "evaluate.horizon=10",
    "run.name=kept",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose early weights retention has removed."""
    from pipeline.commands.experiment import compose

    root = tmp_path_factory.mktemp("kept")
    words = [f"++{word}" for word in [*SMALL, f"run.root={root}", "log.trackers=[]"]]
    run_experiment(compose(["experiment=cartpole_ppo", *words]))
    assert is_pruned(root / "kept" / "it" / "0000" / "sync")
    return root / "kept"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "kept"))


def manifests(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob(f"{MANIFEST}*"))}


def test_evaluations_of_weights_that_are_gone_are_left_out(
    run: Path, compose: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would have iterations made again whose results are there."""
    before = manifests(run)
    words = [*SMALL, "evaluate.every=1"]
    run_experiment(compose(*words, experiment="cartpole_ppo"))
    after = manifests(run)
    assert {name: after[name] for name in before} == before
    made = sorted(set(after) - set(before))
    assert made, "that of weights which are there is made"
    assert all(name.startswith("evaluate/") for name in made)
    assert capsys.readouterr().err.count("that the retention policy has removed") == 1
    graph = Graph(Run.open(run).config)
    assert is_skipped(graph, run, StageNode("evaluate", 1))
    assert not is_skipped(graph, run, StageNode("evaluate", 6))


def test_an_output_that_is_pruned_while_one_looks_is_not_withdrawn(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network filesystem goes on saying that the mark is not there."""
    opened = Run.open(run)
    monkeypatch.setattr(pipeline.run_state, "is_pruned", lambda _: False)
    before = manifests(run)
    committed = RunState(opened, Graph(opened.config))
    committed.scan()
    assert manifests(run) == before
    assert StageNode("sync", 0) in committed.done


class TwoReaders:
    """An executor in which the first reader of damaged weights withdraws them, and the second one
    finds nothing there."""

    supports_streaming, interrupt_note = False, ""

    def __init__(self) -> None:
        self.calls: dict[StageNode, Any] = {}
        self.started = list[str]()

    def start(self, node: StageNode, call: Any) -> None:
        self.calls[node] = call
        self.started.append(node.name)

    def poll(self) -> dict[StageNode, Outcome]:
        stages = {node.stage: node for node in self.calls}
        if self.started.count("sync/5"):
            raise KeyboardInterrupt
        if "rollout" in stages:
            call = self.calls.pop(stages["rollout"])
            withdraw_manifest(call.inputs["weights"] / MANIFEST)
            return {stages["rollout"]: Outcome(66, "damaged")}
        call = self.calls.pop(stages["evaluate"])
        with pytest.raises(InputError, match="is not there") as error:
            open_inputs(call)
        return {stages["evaluate"]: Outcome(error.value.exit_code, str(error.value))}

    def stop(self, *, keep_jobs: bool = False) -> None: ...


def test_damage_that_two_stages_meet_is_mended(run: Path) -> None:
    shutil.rmtree(run / "evaluate" / "0006")
    executor = TwoReaders()
    driver = Driver(reopen_run(run, ["iterations=7", "evaluate.every=6"]), executor)
    with pytest.raises(KeyboardInterrupt):
        driver.drive()
    assert sorted(executor.started[:2]) == ["evaluate/6", "rollout/6"]
    assert executor.started[2:] == ["sync/5"]


@pytest.fixture
def driven(run: Path) -> Iterator[Path]:
    """It has a driver, and its configuration was edited."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["optimizer"]["lr"] = 0.5
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    lock = RunLock(run / LOCK_FILE)
    yield run
    lock.release()


def test_snakemake_sets_nothing_aside_while_another_drives(driven: Path) -> None:
    before = manifests(driven)
    with pytest.raises(RunLockedError):
        workflow.prepare_workflow({"run": str(driven), "redo": 1}).check_resumable()
    assert manifests(driven) == before


def test_a_dry_run_of_snakemake_changes_nothing(run: Path) -> None:
    before, config = manifests(run), (run / "config.yaml").read_bytes()
    settings = {word.split("=")[0].replace(".", "__"): word.split("=")[1] for word in SMALL}
    settings |= {"experiment": "cartpole_ppo", "run__root": str(run.parent), "optimizer__lr": "0.5"}
    found = workflow.prepare_workflow({**settings, "redo": 1, "log__trackers": "[]"}, dry_run=True)
    assert found.folder == run
    assert manifests(run) == before
    assert (run / "config.yaml").read_bytes() == config


def test_a_folder_that_goes_while_one_sweeps_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cleanup.MIN_AGE_S", -1.0)
    (tmp_path / ".one.123.0123abcd").touch()
    (tmp_path / "data-1" / "inner").mkdir(parents=True)
    found = temporary_files(tmp_path)
    assert next(found).name == ".one.123.0123abcd"
    shutil.rmtree(tmp_path / "data-1")
    assert list(found) == []


def test_a_run_of_this_test_is_as_it_should_be(whole: Path) -> None:
    """Its last weights are there."""
    assert read_manifest(whole / "it" / "0005" / "sync") is not None
    assert not is_pruned(whole / "it" / "0005" / "sync")
    with pytest.raises(RlinfError):
        Run.open(whole.parent)
