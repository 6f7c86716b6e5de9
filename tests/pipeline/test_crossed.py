"""Pools that wait for each other's records go on whatever is read from disk and whoever dies."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipeline.pools.pool_status import read_pools_status
from tests.conftest import TINY
from tests.pipeline.helpers import start_driver, until
from tests.pipeline.pools.test_executor import assert_like, samples

Compose = Callable[..., dict[str, Any]]
PLAN = {
    "num_chunks": 4,
    "pools": [
        {"stages": ["rollout", "reward", "train"], "devices": {"local": 1}},
        {"stages": ["inference"], "devices": {"local": 1}},
    ],
}
"""Training waits for records of the second pool, which are made from those of the first."""


def words(root: Path, *more: str) -> list[str]:
    small = [word.removeprefix("++") for word in TINY]
    return ["experiment=arithmetic_grpo", f"run.root={root}", "log.trackers=[]", *small, *more]


def start(root: Path, **more: Any) -> subprocess.Popen[bytes]:
    (root / "plan.yaml").write_text(yaml.safe_dump({**PLAN, **more}))
    return start_driver(words(root, "cluster=local", f"plan={root}/plan.yaml"), root / "log")


@pytest.fixture(scope="module")
def reference(tiny_run: Path) -> Path:
    """The same run with each stage whole, one after the other."""
    return tiny_run


def activity(run: Path, node: str) -> str | None:
    """The activity of a node on its worker; None before a worker has it."""
    status = read_pools_status(run)
    workers = [] if status is None else [worker for p in status.pools for worker in p.workers]
    stages = [stage for worker in workers for stage in worker.active_stages]
    return next((stage.activity for stage in stages if stage.node == node), None)


def worker(run: Path, pool: str) -> psutil.Process:
    """The process of a pool's first lease."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(run) in line and pool in line:
            return process
    raise AssertionError(f"{pool} does not run")


def test_an_input_read_from_disk_holds_up_nothing_it_is_made_from(
    reference: Path, tmp_path: Path
) -> None:
    """Training has its turn after the rollout, though its first part would be before the last."""
    driver = start(tmp_path, transports={"inference -> train": "file"})
    assert driver.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    assert_like(tmp_path / "tiny", reference)


def test_a_stage_started_again_gets_the_parts_that_were_made_before(
    reference: Path, tmp_path: Path
) -> None:
    """Rollout waits for its turn behind training, and training for the worker that died."""
    run, log = tmp_path / "tiny", tmp_path / "log"
    driver = start(tmp_path)
    # Not before: one that stands still too long is given up, and SFT takes its time.
    until((run / "sft/manifest.json").exists, driver, log)
    until(lambda: activity(run, "inference/0"), driver, log)
    inference = worker(run, "pool-1-0")
    inference.suspend()
    until(lambda: activity(run, "train/0") == "waiting for logprobs", driver, log)
    inference.kill()
    assert driver.wait(timeout=120) == 0, log.read_text()
    assert_like(run, reference)
    assert samples(run, 0) == list(range(16)), "none lost, none twice"
