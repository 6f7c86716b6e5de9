"""Checkpoints on disk only every few iterations: the same run, also if a trainer is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.experiment import open_run, prepare_run
from pipeline.commands.workflow import prepare_workflow
from pipeline.driver import Driver
from pipeline.executors import InProcessExecutor
from pipeline.run import Run
from rlinf.artifacts import is_pruned, read_manifest, verify_output
from rlinf.errors import ConfigError
from stages.retention import RetentionPolicy, is_checkpoint_saved
from stages.worker_state import WorkerState
from tests.conftest import TINY
from tests.pipeline.helpers import contents, killed_until_it_ends, run_here

ITERATIONS = 7
POOLS = {
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 2}},
    ],
    "stages": {stage: {"processes": 2} for stage in ("inference", "train")},
}


def words(root: Path, *more: str) -> list[str]:
    common = [*TINY, f"iterations={ITERATIONS}", "++evaluate.every=3", "++log.trackers=[]"]
    return ["experiment=arithmetic_grpo", f"++run.root={root}", *common, *more]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that writes a checkpoint in each iteration."""
    root = tmp_path_factory.mktemp("reference")
    run_here(words(root))
    return root / "tiny"


def checkpoints_on_disk(run: Path) -> list[int]:
    """Iterations, from 1, with a complete checkpoint; the others must count as pruned."""
    found = []
    for folder in sorted((run / "it").glob("*/train")):
        manifest = read_manifest(folder)
        assert manifest is not None
        if is_pruned(folder):
            assert not any((folder / manifest.data).rglob("*.*"))
        else:
            verify_output(folder, manifest, checksums=True)
            found.append(int(folder.parent.name) + 1)
    return found


def test_the_run_is_the_same_with_fewer_checkpoints(tmp_path: Path, reference: Path) -> None:
    run_here(words(tmp_path, "++checkpoint.save_every=3"))
    assert contents(tmp_path / "tiny") == contents(reference)
    assert checkpoints_on_disk(tmp_path / "tiny") == [6, 7], "and the last"


class Interrupted(InProcessExecutor):
    """Loses everything in memory before the stages with these numbers."""

    def __init__(self, run: Run, losses: set[int]) -> None:
        super().__init__(run)
        self._losses, self._number = losses, 0
        self.started: list[str] = []

    def start(self, node: Any, call: Any) -> None:
        if self._number in self._losses:
            self.worker_state.close()
            self.worker_state = WorkerState()
        self._number += 1
        self.started.append(node.name)
        super().start(node, call)


@pytest.mark.parametrize("losses", [{18}, {13, 30}, {19, 23, 27}])
def test_updates_since_the_last_checkpoint_are_computed_again_after_a_loss(
    losses: set[int], tmp_path: Path, reference: Path, compose: Callable[..., dict[str, Any]]
) -> None:
    run = prepare_run(compose(*words(tmp_path, "++checkpoint.save_every=3")))
    executor = Interrupted(run, losses)
    Driver(run, executor).drive()
    assert contents(run.folder) == contents(reference)
    trained = [name for name in executor.started if name.startswith("train")]
    assert len(trained) > ITERATIONS, "some were lost"
    assert sum(name.startswith("rollout") for name in executor.started) <= ITERATIONS + len(losses)


def test_a_damaged_newest_checkpoint_is_computed_again_from_the_one_before(
    tmp_path: Path, reference: Path
) -> None:
    run_here(words(tmp_path, "++checkpoint.save_every=3", "iterations=6"))
    run = tmp_path / "tiny"
    newest = next((run / "it/0005/train").glob("data-*/checkpoint/*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    run_here([*words(tmp_path, "++checkpoint.save_every=3")])
    assert contents(run) == contents(reference)


def test_pools_with_sharded_trainers_survive_kills(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(POOLS))
    more = ["cluster=local", f"plan={plan}"]
    run_here([*words(tmp_path / "reference"), *more])
    killed_until_it_ends(
        [*words(tmp_path), *more, "++checkpoint.save_every=3"],
        tmp_path / "log",
        random.Random(3),
        seconds=(5, 12),
        attempts=4,
        last_s=200,
    )
    assert contents(tmp_path / "tiny") == contents(tmp_path / "reference" / "tiny")
    assert checkpoints_on_disk(tmp_path / "tiny")[-2:] == [6, 7]


def test_the_two_newest_checkpoints_and_what_updates_need_are_kept(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run = prepare_run(compose(*words(tmp_path, "++checkpoint.save_every=5", "iterations=40")))
    for iteration in range(39):
        policy = RetentionPolicy(run.config, run.folder, iteration)
        saved = [i for i in range(iteration + 1) if is_checkpoint_saved(run.config, i)]
        kept = [i for i in saved if policy.should_keep("train", i)]
        assert kept[-2:] == saved[-2:]
        first_update = kept[0] + 1 if len(saved) > 1 else 0
        for stage in ("rollout", "reward", "inference"):
            assert all(policy.should_keep(stage, i) for i in range(first_update, iteration + 1))
        assert len(kept) <= 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["cluster=local"], "each stage is a job of its own.*plan with pools"),
        (["experiment=pendulum_sac"], "could not be repeated.*replay"),
    ],
)
def test_runs_that_need_each_checkpoint_are_refused(
    more: list[str], message: str, tmp_path: Path
) -> None:
    overrides = ["++checkpoint.save_every=2", f"++run.root={tmp_path}", *more]
    if not more[0].startswith("experiment"):
        overrides = words(tmp_path, *overrides)
    with pytest.raises(ConfigError, match=message):
        open_run(overrides)
    assert not list(tmp_path.glob("*/it"))


def test_snakemake_needs_each_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint\.save_every: with Snakemake"):
        prepare_workflow({"experiment": "arithmetic_short", "checkpoint__save_every": 3})
