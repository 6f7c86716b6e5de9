"""Checkpoints on disk only every few iterations: the same run, also if a trainer is lost."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.experiment import compose_words, open_run, prepare_run
from pipeline.commands.workflow import prepare_workflow
from pipeline.driver import Driver
from pipeline.executors import InProcessExecutor
from pipeline.run import Run
from rlinf.artifacts import is_pruned, read_manifest, verify_output
from rlinf.errors import ConfigError
from stages.retention import RetentionPolicy, is_checkpoint_saved
from stages.worker_state import WorkerState
from tests.conftest import TINY
from tests.pipeline.helpers import contents, run_here, start_driver, until

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
    """Loses everything in memory before the first attempt at some nodes."""

    def __init__(self, run: Run, losses: set[str]) -> None:
        super().__init__(run)
        self._losses = losses
        self.started: list[str] = []

    def start(self, node: Any, call: Any) -> None:
        if node.name in self._losses - {*self.started}:
            self.worker_state.close()
            self.worker_state = WorkerState()
        self.started.append(node.name)
        super().start(node, call)


@pytest.mark.parametrize(
    ("losses", "repeated"),
    [
        ({"train/3"}, []),
        ({"train/1"}, [0, 1]),
        ({"rollout/5", "reward/5"}, [3, 4, 5]),
        ({"train/2", "sync/4", "train/6"}, [0, 1, 2, 3, 4]),
    ],
)
def test_updates_since_the_last_checkpoint_are_computed_again_after_a_loss(
    losses: set[str], repeated: list[int], tmp_path: Path, reference: Path
) -> None:
    run = prepare_run(compose_words(words(tmp_path, "++checkpoint.save_every=3")))
    executor = Interrupted(run, losses)
    Driver(run, executor).drive()
    assert contents(run.folder) == contents(reference)
    starts = Counter(executor.started)
    twice = [iteration for iteration in range(ITERATIONS) if starts[f"train/{iteration}"] > 1]
    assert twice == repeated
    assert all(count <= 2 for name, count in starts.items()), "one failure for a whole chain"
    assert all(starts[f"rollout/{iteration}"] == 1 for iteration in range(ITERATIONS))


def test_a_damaged_newest_checkpoint_is_computed_again_from_the_one_before(
    tmp_path: Path, reference: Path
) -> None:
    run = prepare_run(compose_words(words(tmp_path, "++checkpoint.save_every=3")))
    shorter = Run(run.folder, run.config.model_copy(update={"iterations": 6}))
    Driver(shorter, InProcessExecutor(shorter)).drive()
    newest = next((run.folder / "it/0005/train").glob("data-*/checkpoint/*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    Driver(run, InProcessExecutor(run)).drive()
    assert contents(run.folder) == contents(reference)


def test_pools_with_sharded_trainers_survive_kills(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(POOLS))
    more = ["cluster=local", f"plan={plan}"]
    run_here([*words(tmp_path / "reference"), *more])
    command = [*words(tmp_path), *more, "++checkpoint.save_every=3"]
    log = tmp_path / "log"
    driver = start_driver(command, log)
    until((tmp_path / "tiny/it/0004/train/manifest.json").exists, driver, log)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert start_driver(command, log).wait(timeout=240) == 0, log.read_text()
    assert "checkpoint.save_every" in log.read_text(), "updates were computed again"
    assert contents(tmp_path / "tiny") == contents(tmp_path / "reference" / "tiny")
    assert checkpoints_on_disk(tmp_path / "tiny")[-2:] == [6, 7]


def test_the_two_newest_checkpoints_and_what_updates_need_are_kept(tmp_path: Path) -> None:
    run = prepare_run(
        compose_words(
            words(tmp_path, "++checkpoint.save_every=5", "iterations=40", "++evaluate.every=0")
        )
    )
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
