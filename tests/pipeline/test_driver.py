"""Runs end, end alike however they are driven, and survive whatever happens to them."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.commands.experiment import drive, prepare_run, run_experiment
from pipeline.lock import LOCK_FILE, LockOwner
from pipeline.run import Run
from rlinf.artifacts import read_manifest
from rlinf.errors import InputError, RunLockedError, StageError
from rlinf.trainers.fsdp import FSDPTrainer
from tests.conftest import TINY
from tests.pipeline.helpers import contents, killed_until_it_ends

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def reference(tiny_run: Path) -> Path:
    """An undisturbed run in one process."""
    return tiny_run


def test_a_run_leaves_everything_a_user_looks_for(reference: Path) -> None:
    rows = [json.loads(line) for line in (reference / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1]
    assert {"reward/mean", "train/loss", "train/approx_kl", "rollout/steps"} <= rows[0].keys()
    assert rows[0]["train/approx_kl"] == pytest.approx(0, abs=1e-6), "the first step is on policy"
    assert rows[0]["train/rollout_logprob_diff"] < 1e-4
    assert (reference / "report" / "report.html").stat().st_size > 10_000
    assert reference.stat().st_mode & 0o077 == 0, "strangers must not read a run"
    assert not (reference / LOCK_FILE).exists()


def test_the_result_is_an_ordinary_model_folder(reference: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipeline.commands.export import export_weights

    assert export_weights(reference, tmp_path / "out", None) == 2
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("1+2=", return_tensors="pt")
    assert module(**ids).logits.shape[-1] == module.config.vocab_size
    with pytest.raises(InputError, match="not empty"):
        export_weights(reference, tmp_path / "out", None)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        export_weights(reference, tmp_path / "file", None)
    with pytest.raises(InputError, match="not on disk"):
        export_weights(reference, tmp_path / "other", 77)


def test_processes_give_the_same_bytes_as_one_process(reference: Path, compose: Compose) -> None:
    values = compose("cluster=local")
    run_experiment(values)
    run = Path(values["run"]["root"]) / "tiny"
    assert contents(run) == contents(reference)
    assert (run / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("shares", [pytest.param(None, marks=pytest.mark.slow), [2, 1]])
def test_two_ranks_make_the_same_update_as_one(
    reference: Path, compose: Compose, shares: list[float] | None
) -> None:
    values = compose("cluster=local", "iterations=1")
    resources = {"processes": 2, "speed_weights": shares}
    values["plan"] = {"stages": dict.fromkeys(("rollout", "inference", "train"), resources)}
    run_experiment(values)
    run = Path(values["run"]["root"]) / "tiny"
    one, two = (weights(folder, 0) for folder in (reference, run))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], atol=1e-5, rtol=1e-4)
    manifest = read_manifest(run / "it/0000/train")
    assert manifest is not None
    assert manifest.world == 2


@pytest.mark.parametrize("experiment", ["halfcheetah_ppo", "inverted_pendulum_flow"])
def test_two_ranks_make_the_same_update_of_a_policy_with_continuous_actions(
    compose: Compose, tmp_path: Path, experiment: str
) -> None:
    """Its spread is a parameter of the outermost module, which is freed after the forward pass;
    networks that a flow has beside its velocity are reached through that module alone."""
    small = (
        "rollout.batch_size=4",
        "rollout.horizon=16",
        "algorithm.minibatches=2",
        "algorithm.epochs=1",
        "evaluate.samples=1",
        "evaluate.horizon=4",
        "iterations=1",
    )
    runs = []
    for name, cluster in (("one", "inprocess"), ("two", "local")):
        words = (*small, f"run.name={name}", f"cluster={cluster}")
        values = compose(*words, experiment=experiment)
        if name == "two":
            ranks = {"processes": 2}
            values["plan"] = {"stages": dict.fromkeys(("inference", "train"), ranks)}
        run_experiment(values)
        runs.append(weights(tmp_path / name, 0))
    for name, tensor in runs[0].items():
        torch.testing.assert_close(tensor, runs[1][name], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_ranks_beyond_the_batch_have_nothing_to_do(compose: Compose) -> None:
    values = compose("cluster=local", "iterations=1", "rollout.batch_size=1", "evaluate.samples=1")
    values["plan"] = {"stages": {stage: {"processes": 2} for stage in ("rollout", "evaluate")}}
    run_experiment(values)
    manifest = read_manifest(Path(values["run"]["root"]) / "tiny/it/0000/rollout")
    assert manifest is not None
    assert manifest.metrics["samples"] == 4


def weights(run: Path, iteration: int) -> dict[str, torch.Tensor]:
    folder = run / "it" / f"{iteration:04d}" / "sync"
    manifest = read_manifest(folder)
    assert manifest is not None
    return load_file(folder / manifest.data / "weights" / "model.safetensors")


def test_more_iterations_go_on_from_where_the_run_is(reference: Path, compose: Compose) -> None:
    values = compose("iterations=1", "optimizer.lr_scheduler_type=constant")
    run_experiment(values)
    run = Path(values["run"]["root"]) / "tiny"
    before = (run / "it/0000/train/manifest.json").stat().st_mtime_ns
    run_experiment(compose("iterations=2", "optimizer.lr_scheduler_type=constant"))
    assert (run / "it/0000/train/manifest.json").stat().st_mtime_ns == before, "nothing is redone"
    assert contents(run).keys() == contents(reference).keys()


def test_a_second_driver_is_refused(compose: Compose) -> None:
    run = prepare_run(compose())
    with run.lock(), pytest.raises(RunLockedError, match="driven by process"):
        drive(run)


def test_the_lock_of_a_dead_driver_does_not_hold(compose: Compose) -> None:
    run = prepare_run(compose())
    gone = asdict(LockOwner.current()) | {"start_ticks": 1, "token": "of a dead one"}
    (run.folder / LOCK_FILE).write_text(json.dumps(gone))
    with run.lock():
        assert LockOwner.read(run.folder / LOCK_FILE).pid == os.getpid()


@pytest.mark.parametrize("damage", ["flip", "truncate", "manifest"])
@pytest.mark.parametrize("victim", ["it/0001/rollout", "it/0000/train"])
def test_damage_is_noticed_and_mended(
    reference: Path, tmp_path: Path, damage: str, victim: str
) -> None:
    run = tmp_path / "tiny"
    shutil.copytree(reference, run)
    for later in ("it/0001/train", "it/0001/sync", "evaluate/0002"):
        shutil.rmtree(run / later)
    folder = run / victim
    manifest = read_manifest(folder)
    assert manifest is not None
    path = max((folder / manifest.data).rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-7])
    else:
        (folder / "manifest.json").write_text("{")
    drive(Run.open(run))
    assert contents(run) == contents(reference)
    assert list(folder.glob("manifest.json.bad-*")), "the damaged commit is kept for inspection"


def test_an_attempt_that_fails_after_its_update_is_not_built_upon(
    reference: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer stays loaded between stages; half an update in it must not count."""
    save, failures = FSDPTrainer.save, [OSError("stale handle"), RuntimeError("no memory")]

    def unlucky(self: FSDPTrainer, folder: Path, state: Any = None) -> None:
        if "it" in folder.parts and failures:
            raise failures.pop()
        save(self, folder, state)

    monkeypatch.setattr(FSDPTrainer, "save", unlucky)
    values = compose()
    run_experiment(values)
    assert not failures
    assert contents(Path(values["run"]["root"]) / "tiny") == contents(reference)


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_weights(compose: Compose) -> None:
    values = compose("algorithm.entropy_coeff=1e39")
    with pytest.raises(StageError, match="not finite"):
        run_experiment(values)
    run = Path(values["run"]["root"]) / "tiny"
    assert read_manifest(run / "it/0000/rollout") is not None, "the iteration can be inspected"
    assert read_manifest(run / "it/0000/train") is None
    assert not list((run / "it/0000/train").glob("data-*"))


@pytest.mark.parametrize("cluster", ["inprocess", "local"])
def test_killing_the_driver_anywhere_changes_nothing(
    reference: Path, tmp_path: Path, cluster: str
) -> None:
    words = ["experiment=arithmetic_grpo", f"run.root={tmp_path}", "log.trackers=[]"]
    words += [f"cluster={cluster}", *(word.removeprefix("++") for word in TINY)]
    chance = random.Random(cluster)
    killed_until_it_ends(
        words, tmp_path / "log", chance, seconds=(3.0, 6.0), attempts=12, last_s=60
    )
    assert contents(tmp_path / "tiny") == contents(reference)
    same = (tmp_path / "tiny/metrics.jsonl").read_bytes() == (
        reference / "metrics.jsonl"
    ).read_bytes()
    assert same
