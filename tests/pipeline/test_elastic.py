"""Generators come, go and die; the run is the one that a single process would have made."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.pools.autoscaler import request_scale
from pipeline.pools.work_log import WORK_LOG
from pipeline.report.data import read_report_data
from pipeline.run import Run
from stages.layout import POOLS_FOLDER
from tests.conftest import TINY
from tests.pipeline.helpers import run_here, same_samples, start_driver, until
from tests.pipeline.test_live_weights import arrived

BATCH, GROUP, ITERATIONS = 24, 4, 4


def words(root: Path, *more: str) -> list[str]:
    small = [word.removeprefix("++") for word in TINY]
    own = [f"rollout.batch_size={BATCH}", f"iterations={ITERATIONS}", "evaluate.every=0"]
    return [
        "experiment=arithmetic_grpo",
        f"run.root={root}",
        "log.trackers=[]",
        *small,
        *own,
        *more,
    ]


def pools(workers: int) -> str:
    train = "{stages: [reward, inference, train], devices: {local: 1}}"
    generators = f"{{stages: [rollout], workers: {workers}, devices: {{local: 1}}}}"
    return f"plan={{num_chunks: 2, pools: [{generators}, {train}]}}"


def finish(driver: subprocess.Popen[bytes], log: Path) -> None:
    assert driver.wait(timeout=180) == 0, log.read_text()


def rows(run: Path) -> list[dict[str, Any]]:
    try:
        return [
            json.loads(line) for line in (run / POOLS_FOLDER / WORK_LOG).read_text().splitlines()
        ]
    except FileNotFoundError:
        return []


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    root = tmp_path_factory.mktemp("reference")
    run_here(words(root))
    return root / "tiny"


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_generators_make_the_run_of_one_process(
    reference: Path, tmp_path: Path, workers: int
) -> None:
    log = tmp_path / "log"
    finish(start_driver(words(tmp_path, "cluster=local", pools(workers)), log), log)
    same_samples(tmp_path / "tiny", reference, range(ITERATIONS))
    for iteration in range(ITERATIONS):
        done = [
            s
            for r in rows(tmp_path / "tiny")
            if r["node"] == f"rollout/{iteration}"
            for s in r["starts"]
        ]
        assert sorted(done) == list(range(BATCH)), "nothing is generated twice without need"
    shown = read_report_data(tmp_path / "tiny")
    for worker in range(workers):
        # One that starts late may find nothing left.
        did = any(r["starts"] and f"-0w{worker}-" in r["worker"] for r in rows(tmp_path / "tiny"))
        mine = [p for p in shown.segments if p.lane.startswith(f"pool 0 · worker {worker} · ")]
        assert {p.stage for p in mine if p.is_computing} - {"evaluate"} == (
            {"rollout"} if did else set()
        )
    came = arrived(tmp_path / "tiny")
    most = workers * (ITERATIONS - 1)
    assert ITERATIONS - 1 <= came <= most, "who is there gets all weights a rollout is made with"
    gathers = [p for p in shown.segments if p.lane.startswith("pool 1") and p.stage == "rollout"]
    assert gathers, "the rollout is seen where it is ordered"
    assert sum(p.seconds for p in gathers if p.is_computing) < 0.1 * sum(p.seconds for p in gathers)


def reads(row: dict[str, Any]) -> bool:
    """Whether the weights of a work item were read from the disk."""
    return "verify" in [name for name, *_ in row["spans"]]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shared_memory", "gloo", "delta", "file"])
def test_weights_go_to_generators_as_the_plan_says(
    reference: Path, tmp_path: Path, way: str
) -> None:
    log, run = tmp_path / "log", tmp_path / "tiny"
    plan = yaml.safe_load(pools(2).partition("=")[2])
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({**plan, "transports": {"sync -> rollout": way}}))
    finish(start_driver(words(tmp_path, "cluster=local", f"plan={path}"), log), log)
    same_samples(run, reference, range(ITERATIONS))
    assert arrived(run) == (0 if way in ("file", "delta") else 2 * (ITERATIONS - 1))
    names = [row for row in rows(run) if "delta" in [name for name, *_ in row["spans"]]]
    assert bool(names) == (way == "delta")


@pytest.mark.slow
def test_generators_go_on_after_whoever_sends_weights_is_killed(
    reference: Path, tmp_path: Path
) -> None:
    """Those that come of weights which were never committed are made again."""
    log, run = tmp_path / "log", tmp_path / "tiny"
    driver = start_driver(words(tmp_path, "cluster=local", pools(2)), log)
    until((run / "it/0001/sync").is_dir, driver, log)
    os.kill(pid(run, "pool-1-0-r0"), signal.SIGKILL)
    finish(driver, log)
    same_samples(run, reference, range(ITERATIONS))


def test_weights_that_a_generator_finds_damaged_are_made_again(
    reference: Path, tmp_path: Path
) -> None:
    """No stage fails for it: work items are requeued, and everybody waits for the weights."""
    log, run = tmp_path / "log", tmp_path / "tiny"
    started = words(tmp_path, "cluster=local", pools(1), "checkpoint.keep_last=9")
    finish(start_driver(started, log), log)
    for later in ("it/0002", "it/0003", "evaluate/0004"):
        shutil.rmtree(run / later)
    (weights,) = (run / "it" / "0001" / "sync").glob("data-*/weights/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(bytes(data))
    finish(start_driver(started, log), log)
    assert "is damaged; rebuilding it" in log.read_text()
    same_samples(run, reference, range(ITERATIONS))


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_trainers_generate_too_and_hand_the_tail_over(tmp_path: Path, staleness: int) -> None:
    # Samples end by chance, so that some are much longer than others; and there is time
    # for the generator to come.
    many = 8
    long = ["rollout.horizon=128", "engine.max_num_seqs=4", f"iterations={many}"]
    long += [f"checkpoint.keep_trajectories={many}", f"rollout.staleness={staleness}"]
    run_here(words(tmp_path / "one", *long))
    plan = pools(1).replace("train]", "train], also_generates: true")
    handed: list[dict[str, Any]] = []
    # On a busy machine the generator may come late, or be idle at no tail: what is right is so in
    # every run, that a tail is handed over in one of a few.
    for attempt in range(4):
        root, log = tmp_path / str(attempt), tmp_path / f"log-{attempt}"
        root.mkdir()
        run = root / "tiny"
        finish(start_driver(words(root, "cluster=local", plan, *long), log), log)
        same_samples(run, tmp_path / "one" / "tiny", range(many))
        done = [(row["node"], start) for row in rows(run) for start in row["starts"]]
        assert len(done) == len(set(done)) == BATCH * many, "nothing is generated twice"
        helped = [row for row in rows(run) if row["worker"] == "pool-1-0-r0"]
        assert helped, "the trainer generates"
        assert not any(reads(row) for row in helped if row["node"] != "rollout/0"), "it has them"
        handed = [row for row in rows(run) if row["unfinished_starts"]]
        assert {row["worker"] for row in handed} <= {"pool-1-0-r0"}
        for row in handed:
            (later,) = [
                r
                for r in rows(run)
                if (r["node"], r["continues"]) == (row["node"], row["work_item"])
            ]
            assert later["worker"] == "pool-0w0-0-r0"
            assert later["starts"] == row["unfinished_starts"]
        if handed:
            break
    assert handed, "it leaves the tail to the generator"


def test_a_generator_killed_in_the_middle_costs_nothing_but_its_claims(
    reference: Path, tmp_path: Path
) -> None:
    log, run = tmp_path / "log", tmp_path / "tiny"
    driver = start_driver(words(tmp_path, "cluster=local", pools(2)), log)
    row = until(lambda: rows(run), driver, log)[0]
    os.kill(pid(run, row["worker"]), signal.SIGKILL)
    finish(driver, log)
    same_samples(run, reference, range(ITERATIONS))
    assert "killed by SIGKILL" in log.read_text()


def pid(run: Path, worker: str) -> int:
    """The process that serves as a worker."""
    name = worker.rpartition("-r")[0]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            argv = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "stages.worker.main" in argv and str(run) in argv and name in argv:
            return int(entry.name)
    raise AssertionError(f"{worker} is not there")


def test_a_worker_that_is_added_takes_part_and_one_taken_away_leaves(
    reference: Path, tmp_path: Path
) -> None:
    log, run = tmp_path / "log", tmp_path / "tiny"
    # So many iterations that the second one has the time to start.
    long = words(tmp_path, "cluster=local", pools(1), "iterations=400")
    driver = start_driver(long, log)
    try:
        until(lambda: rows(run), driver, log)
        assert {row["worker"] for row in rows(run)} == {"pool-0w0-0-r0"}
        request_scale(Run.open(run), "rollout+1")
        until(lambda: {row["worker"] for row in rows(run)} >= {"pool-0w1-0-r0"}, driver, log)
        second = pid(run, "pool-0w1-0-r0")
        request_scale(Run.open(run), "rollout-1")
        until(lambda: not Path(f"/proc/{second}").exists(), driver, log)
        count = len(rows(run))
        until(lambda: len(rows(run)) > count + 2, driver, log)
        assert {row["worker"] for row in rows(run)[count + 1 :]} == {"pool-0w0-0-r0"}
    finally:
        driver.terminate()
        driver.wait(60)


def test_the_pool_grows_by_itself_where_that_pays(tmp_path: Path) -> None:
    log, run = tmp_path / "log", tmp_path / "tiny"
    generates = ["rollout.horizon=48", "engine.ignore_eos=true", "engine.max_num_seqs=8"]
    plan = pools(1).replace("workers: 1", "workers: 1, max_workers: 2")
    driver = start_driver(words(tmp_path, "cluster=local", plan, "iterations=400", *generates), log)
    try:
        until(lambda: {row["worker"] for row in rows(run)} >= {"pool-0w1-0-r0"}, driver, log)
        assert "2 workers instead of 1" in log.read_text()
    finally:
        driver.terminate()
        driver.wait(60)
