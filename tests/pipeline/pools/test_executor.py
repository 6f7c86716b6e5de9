"""Resident pools end where one process ends, whatever happens to them on the way."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pipeline.commands.experiment import drive, prepare_run, run_experiment
from pipeline.lock import LOCK_FILE
from pipeline.run import Run
from rlinf.artifacts import read_manifest
from rlinf.channels.control_link import CONTROL_POINTER
from rlinf.data.record import Record
from rlinf.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, InputError, RunLockedError, StageError
from stages.layout import CHANNELS_FOLDER, POOLS_FOLDER, STATUS_FILE
from tests.conftest import TINY
from tests.pipeline.helpers import budget_gib, contents, moves, start_driver, until
from tests.pipeline.test_driver import weights

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
ALL = ["rollout", "reward", "inference", "train"]
ONE = {"pools": [{"stages": ALL, "devices": {"local": 1}}]}
TWO = {
    "num_chunks": 4,
    "pools": [
        {"stages": ALL[:1], "devices": {"local": 1}},
        {"stages": ALL[1:], "devices": {"local": 1}},
    ],
}
RANKS = {
    **TWO,
    "stages": {stage: {"processes": 2} for stage in ("inference", "train")},
    "pools": [
        {"stages": ALL[:1], "devices": {"local": 1}},
        {"stages": ALL[1:], "devices": {"local": 2}},
    ],
}
APART = {
    "num_chunks": 4,
    "pools": [{"stages": [stage], "devices": {"local": 1}} for stage in ALL],
}
WHOLE = [{"stages": ALL, "devices": {"local": 2}}]
PLANS = {"collocated": ONE, "disaggregated": TWO, "hetjob": TWO | {"hetjob": True}}


@pytest.fixture(scope="module")
def reference(tiny_run: Path) -> Path:
    """An undisturbed run in one process, whose weights move."""
    assert rows(tiny_run)[1]["train/grad_norm"] > 0
    return tiny_run


@pytest.fixture
def pooled(compose: Compose, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(plan: dict[str, Any], *overrides: str) -> dict[str, Any]:
        return {**compose("cluster=local", *overrides), "plan": plan}

    return make


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_like(run: Path, reference: Path) -> None:
    """Equal but for the order of sums."""
    assert [row["iteration"] for row in rows(run)] == [row["iteration"] for row in rows(reference)]
    for row, other in zip(rows(run), rows(reference), strict=True):
        for name, value in row.items():
            if "/" in name and not name.startswith(("time", "wait")) and name in other:
                assert value == pytest.approx(other[name], abs=1e-5, rel=1e-4), name
        assert row["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-3)
    for iteration in range(len(rows(reference))):
        other = weights(reference, iteration)
        for name, tensor in weights(run, iteration).items():
            torch.testing.assert_close(tensor, other[name], atol=1e-5, rtol=1e-4)


def samples(run: Path, iteration: int) -> list[int]:
    """Sample numbers in the committed rollout files, one for each record."""
    from rlinf.channels.record_files import read_records

    folder = run / f"it/{iteration:04d}/rollout"
    manifest = read_manifest(folder)
    assert manifest is not None
    records: list[Record] = []
    for path in (folder / manifest.data).glob("*.h5"):
        records += read_records(path)
    return sorted(record.identity.sample for record in records)


def workers(run: Path) -> list[psutil.Process]:
    """Living worker processes of a run."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if (
            "stages.worker.main" in words
            and str(run) in words
            and process.info["status"] != "zombie"
        ):
            found.append(process)
    return found


def test_stages_that_take_turns_give_the_same_bytes_as_one_process(
    reference: Path, pooled: Compose, tmp_path: Path
) -> None:
    run_experiment(pooled(ONE))
    run = tmp_path / "tiny"
    assert contents(run) == contents(reference)
    assert (run / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    assert not workers(run)


def test_a_device_too_small_for_all_stages_gives_the_same_bytes(
    reference: Path, pooled: Compose, tmp_path: Path
) -> None:
    run_experiment(pooled(ONE, f"device_memory_gib={budget_gib(reference, 4.1)}"))
    assert contents(tmp_path / "tiny") == contents(reference)
    assert min(moves(tmp_path / "tiny").values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{**ONE, "num_chunks": 2}, {**RANKS, "pools": WHOLE}])
def test_gradients_of_parts_add_up_while_all_else_comes_and_goes(
    pooled: Compose, tmp_path: Path, plan: dict[str, Any]
) -> None:
    reference = ["algorithm.kl_loss_coef=0.1", "algorithm.old_logprobs=recompute"]
    run_experiment(pooled(plan, "run.name=large", *reference))
    ranks = 2 if "stages" in plan else 1
    budget = budget_gib(tmp_path / "large", max(1.1, 4.1 / ranks))
    run_experiment(pooled(plan, "run.name=small", f"device_memory_gib={budget}", *reference))
    assert contents(tmp_path / "small") == contents(tmp_path / "large")
    assert min(moves(tmp_path / "small").values()) > 2


def test_parts_of_a_batch_make_the_same_update_as_the_whole(
    reference: Path, pooled: Compose, tmp_path: Path
) -> None:
    run_experiment(pooled(TWO))
    assert_like(tmp_path / "tiny", reference)
    assert all(samples(tmp_path / "tiny", i) == list(range(16)) for i in range(2))


def test_every_stage_in_a_pool_of_its_own_makes_the_same_update(
    reference: Path, pooled: Compose, tmp_path: Path
) -> None:
    run_experiment(pooled(APART))
    assert_like(tmp_path / "tiny", reference)


@pytest.mark.usefixtures("undrawn")
def test_episodes_of_a_simulator_go_from_pool_to_pool(compose: Compose, tmp_path: Path) -> None:
    """Means of observations are published beside the weights; one half steps beside the other."""
    words = ["iterations=3", "rollout.batch_size=4", "rollout.horizon=16", "evaluate.samples=2"]
    words += [
        "model.normalize_observations=true",
        "task.num_processes=1",
        "task.double_buffer=true",
    ]
    run_experiment(compose("run.name=one", *words, experiment="cartpole_ppo"))
    two = compose("cluster=local", "run.name=two", *words, experiment="cartpole_ppo")
    run_experiment(two | {"plan": {key: value for key, value in TWO.items() if key != "chunks"}})
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


@pytest.mark.slow
def test_the_same_plan_gives_the_same_bytes_twice(pooled: Compose, tmp_path: Path) -> None:
    run_experiment(pooled(TWO, "run.name=one"))
    run_experiment(pooled(TWO, "run.name=two"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_two_ranks_in_a_pool_make_the_same_update(
    reference: Path, pooled: Compose, tmp_path: Path
) -> None:
    run_experiment(pooled(RANKS))
    assert_like(tmp_path / "tiny", reference)


@pytest.mark.parametrize(
    "plan", [pytest.param("collocated", marks=pytest.mark.slow), "disaggregated"]
)
def test_killing_workers_anywhere_changes_nothing(
    reference: Path, tmp_path: Path, plan: str
) -> None:
    # None of the three need have finished anything, where processes start slowly.
    words = [*_words(tmp_path, plan), "cluster.max_retries=3"]
    driver = start_driver(words, tmp_path / "log")
    run, chance, killed = tmp_path / "tiny", random.Random(plan), 0
    while driver.poll() is None and killed < 3:
        time.sleep(chance.uniform(1.0, 4.0))
        alive = workers(run)
        if alive:
            chance.choice(alive).kill()
            killed += 1
    assert driver.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    assert killed
    assert_like(run, reference)
    assert all(samples(run, i) == list(range(16)) for i in range(2)), "none lost, none twice"


SLOW_COMMIT = """
import sys, time
from pathlib import Path

if "stages.worker.main" in sys.orig_argv:
    import stages.runner as runner

    commit, note = runner.commit_output, Path({note!r})

    def slow(out, manifest, **options):
        if manifest.stage == "train" and not note.exists():
            note.write_text(manifest.data)
            time.sleep(4)
        return commit(out, manifest, **options)

    runner.commit_output = slow
"""


def test_a_trainer_ends_its_checkpoint_when_a_pool_it_started_with_is_lost(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, log, run = tmp_path / "note", tmp_path / "log", tmp_path / "tiny"
    (tmp_path / "sitecustomize.py").write_text(SLOW_COMMIT.format(note=str(note)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    driver = start_driver([*_words(tmp_path, "hetjob"), "cluster.poll_interval_s=0.2"], log)
    until(note.exists, driver, log)
    (generator,) = [one for one in workers(run) if "pool-0-0" in one.cmdline()]
    generator.kill()
    assert driver.wait(timeout=120) == 0, log.read_text()
    assert read_manifest(run / "it/0000/train").data == note.read_text(), log.read_text()
    assert "started together with pool 0" in log.read_text()
    assert_like(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["collocated", "disaggregated"])
def test_killing_the_driver_anywhere_changes_nothing(
    reference: Path, tmp_path: Path, plan: str
) -> None:
    run, chance = tmp_path / "tiny", random.Random(plan)
    for attempt in range(8):
        driver = start_driver(_words(tmp_path, plan), tmp_path / "log")
        deadline = time.monotonic() + chance.uniform(4.0, 7.0) * 1.5**attempt
        while driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if driver.poll() is not None:
            break
        driver.kill()
        driver.wait()
    assert driver.wait(timeout=60) == 0, (tmp_path / "log").read_text()
    assert attempt > 0, "the driver was killed at least once"
    assert_like(run, reference)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_driver_that_is_asked_to_stop_leaves_no_worker_and_can_go_on(
    reference: Path, tmp_path: Path, number: signal.Signals
) -> None:
    driver = start_driver(_words(tmp_path, "collocated"), tmp_path / "log")
    run = tmp_path / "tiny"
    deadline = time.monotonic() + 60
    # Not later: all else takes less than a second.
    while not workers(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.send_signal(number)
    expected = EXIT_REQUEUE if number != signal.SIGINT else EXIT_INTERRUPTED
    assert driver.wait(timeout=30) == expected, (tmp_path / "log").read_text()
    assert not workers(run)
    assert not (run / LOCK_FILE).exists()
    drive(Run.open(run))
    assert contents(run) == contents(reference)


@pytest.mark.parametrize("plan", [TWO, pytest.param(RANKS, marks=pytest.mark.slow)])
def test_a_stage_that_always_fails_stops_the_run_with_its_own_reason(
    pooled: Compose, tmp_path: Path, plan: dict[str, Any]
) -> None:
    with pytest.raises(StageError, match=r"(?s)train/0 failed.*not finite"):
        run_experiment(pooled(plan, "algorithm.entropy_coeff=1e39", "cluster.max_retries=1"))
    run = tmp_path / "tiny"
    assert read_manifest(run / "it/0000/rollout") is not None, "the iteration can be inspected"
    assert read_manifest(run / "it/0000/train") is None
    assert not workers(run)


def test_a_damaged_input_is_made_again(reference: Path, pooled: Compose) -> None:
    run = prepare_run(pooled(ONE)).folder
    for made in ("sft", "it", "evaluate"):
        shutil.copytree(reference / made, run / made)
    for later in ("it/0001/train", "it/0001/sync", "evaluate/0002"):
        shutil.rmtree(run / later)
    folder = run / "it/0001/rollout"
    manifest = read_manifest(folder)
    assert manifest is not None
    path = next((folder / manifest.data).glob("*.h5"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    drive(Run.open(run))
    assert contents(run) == contents(reference)
    assert list(folder.glob("manifest.json.bad-*")), "the damaged commit is kept for inspection"


def test_workers_that_cannot_use_what_they_were_given_are_not_tried_again(
    pooled: Compose, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"pool 0: .*RLINF_SHARES"):
        run_experiment(pooled(ONE, "cluster.env={RLINF_SHARES: fast}"))
    assert [path.name for path in (tmp_path / "tiny/pools/0").iterdir()] == ["0"]


def test_a_driver_that_was_replaced_leaves_the_run_to_the_other(
    pooled: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that stood still for more than a minute, on another host than the next one's."""
    monkeypatch.setattr("pipeline.lock.HEARTBEAT_S", 0.1)
    run = prepare_run(pooled(ONE, "iterations=500"))
    lock = run.folder / LOCK_FILE
    first = run.folder / "it/0000/sync/manifest.json"

    def take_over() -> None:
        while not first.exists():
            time.sleep(0.05)
        lock.write_text(json.dumps({**json.loads(lock.read_text()), "token": "of another"}))

    threading.Thread(target=take_over).start()
    with pytest.raises(RunLockedError, match="another driver took over"):
        drive(run)
    assert json.loads(lock.read_text())["token"] == "of another"
    assert (run.folder / POOLS_FOLDER / STATUS_FILE).exists(), "the pools were not sent away"


def test_a_second_driver_takes_no_workers_from_the_first(pooled: Compose, tmp_path: Path) -> None:
    run = prepare_run(pooled(ONE))
    with run.lock(), pytest.raises(RunLockedError):
        drive(run)
    assert not (run.folder / CHANNELS_FOLDER / CONTROL_POINTER).exists()
    assert not (run.folder / "pools").exists(), "no pool was submitted"


def _words(root: Path, plan: str) -> list[str]:
    words = ["experiment=arithmetic_grpo", f"run.root={root}", "log.trackers=[]", "cluster=local"]
    words += [word.removeprefix("++") for word in TINY]
    return [*words, f"plan={_hydra(PLANS[plan])}"]


def _hydra(value: Any) -> str:
    """A nested value as Hydra's command line takes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return str(value)
