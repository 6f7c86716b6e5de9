"""Whatever strikes a run, it ends with the bytes of an undisturbed one.

The short form is part of the suite; ``make chaos`` lets hundreds of faults strike, so many of each
kind (``RLINF_CHAOS_FAULTS``, ``RLINF_CHAOS_SEED``).
"""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf.artifacts import read_manifest, verify_output
from rlinf.errors import ArtifactError
from tests.cluster.chaos import FAULTS, Storm, restart_nodes
from tests.cluster.test_runs import PLAN, words
from tests.pipeline.helpers import contents, run_here, same_samples

pytestmark = pytest.mark.cluster
ITERATIONS = {"segment": 40, "elastic": 40, "ranks": 40, "stage": 5}
SHORT = ["kill_stage", "kill_driver", "cancel_job", "preempt_job", "corrupt_file"]
REFUSED = {"segment": {"requeue_job"}, "elastic": {"requeue_job"}, "ranks": {"requeue_job"}}
"""Kinds of faults that jobs of a shape refuse: those of pools are not started again by Slurm."""
SEED = int(os.environ.get("RLINF_CHAOS_SEED", "0"))
POOLS: dict[str, Any] = {
    "defaults": {"partition": "cpu", "mem_mb": 2000, "time_limit_min": 30},
    "pools": [
        {"stages": ["rollout"], "devices": {"spot:a100": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"h100": 1}},
    ],
    "stages": {
        "rollout": {"partition": "spot", "gpus": 1, "gpu_type": "a100"},
        "train": {"partition": "h100", "gpus": 1, "gpu_type": "h100"},
    },
}
ELASTIC = POOLS | {
    "pools": [
        {"stages": ["rollout"], "workers": 2, "devices": {"spot:a100": 1, "h100": 1}},
        {
            "stages": ["reward", "inference", "train"],
            "devices": {"h100": 1},
            "also_generates": True,
        },
    ]
}
"""Generators of two kinds, and a trainer that leaves them the tail."""
RANKS = POOLS | {
    "num_chunks": 2,
    "pools": [
        {"stages": ["rollout"], "devices": {"spot:a100": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"h100": 2}},
    ],
    "stages": {
        "rollout": {"partition": "spot", "gpus": 1, "gpu_type": "a100"},
        **{
            stage: {"partition": "h100", "processes": 2, "gpus": 2, "gpu_type": "h100"}
            for stage in ("inference", "train")
        },
    },
    "transports": {
        "rollout -> reward": "shared_memory",
        "rollout -> inference": "shared_memory",
        "rollout -> train": "shared_memory",
        "sync -> rollout": "gloo",
    },
}
"""One model on two processes, records through memory, weights by a process group."""
PLANS = {"segment": POOLS, "elastic": ELASTIC, "ranks": RANKS}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("stage", marks=pytest.mark.slow),
        "segment",
        pytest.param("elastic", marks=pytest.mark.slow),
        pytest.param("ranks", marks=pytest.mark.slow),
    ],
)
def shape(request: pytest.FixtureRequest) -> str:
    """Of the plan: a job per stage, pools, pools with generators, pools of several ranks."""
    return str(request.param)


@pytest.fixture(scope="module")
def reference(shape: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    root = tmp_path_factory.mktemp("reference")
    call = words(root, f"iterations={ITERATIONS[shape]}")
    if shape == "ranks":
        # Two processes sum in another order than one.
        call += ["cluster=local", f"plan={plan_of(shape, root)}"]
    run_here(call)
    return root / "tiny"


def same(shape: str, run: Path, reference: Path, struck: list[str]) -> None:
    """The run is the undisturbed one: byte for byte, or of generators sample for sample."""
    if shape == "elastic":
        count = ITERATIONS[shape]
        kept = [0, *range(count - 5, count)]
        # What was altered once nothing reads it any more is noticed by whoever reads it next: here.
        whole = [iteration for iteration in kept if unaltered(run, iteration)]
        assert len(kept) - len(whole) <= min(struck.count("corrupt_file"), 3), struck
        same_samples(run, reference, whole)
    else:
        assert contents(run) == contents(reference), struck


def unaltered(run: Path, iteration: int) -> bool:
    folder = run / "it" / f"{iteration:04d}" / "rollout"
    manifest = read_manifest(folder)
    assert manifest is not None
    try:
        verify_output(folder, manifest, checksums=True)
    except ArtifactError:
        return False
    return True


@pytest.fixture
def disk(cluster: Path, tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own, which the nodes have too."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
        restart_nodes(cluster)  # each has the mounts that there were when it began
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def storm(root: Path, state: Path, shape: str, seed: int, logs: Path) -> Storm:
    call = words(
        root, f"iterations={ITERATIONS[shape]}", "cluster=slurm", "cluster.poll_interval_s=0.2"
    )
    call += ["cluster.max_retries=30", f"plan={plan_of(shape, root)}"]
    return Storm(call, root, state, random.Random(seed), logs)


def plan_of(shape: str, folder: Path) -> Path:
    if shape == "stage":
        return PLAN
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(PLANS[shape]))
    return path


def test_a_run_survives_what_strikes_it(
    cluster: Path, reference: Path, tmp_path: Path, shape: str
) -> None:
    run = storm(tmp_path, cluster, shape, SEED, tmp_path)
    run.strike(Counter(SHORT))
    run.settle()
    assert run.struck, "the run was struck at least once"
    same(shape, tmp_path / "tiny", reference, run.struck)


@pytest.mark.chaos
@pytest.mark.timeout(0)
def test_runs_survive_hundreds_of_faults(
    cluster: Path, reference: Path, disk: Path, tmp_path: Path, shape: str
) -> None:
    owed, number = faults_of(shape), 0
    struck, missed = Counter[str](), Counter[str]()
    while (+owed).total():
        root = disk / str(number)
        root.mkdir()
        run = storm(root, cluster, shape, SEED + number, tmp_path)
        run.strike(owed)
        run.settle()
        struck += Counter(run.struck)
        missed += run.missed
        same(shape, root / "tiny", reference, run.struck)
        print(f"{shape}, run {number}: {run.struck}, {run.restarts} restarts", flush=True)
        never = [kind for kind in +owed if missed[kind] >= 20 and not struck[kind]]
        assert not never, f"{shape}: nothing to strike for {never}"
        shutil.rmtree(root)
        number += 1
    print(f"{shape}: {struck.total()} faults in {number} runs")
    for kind in sorted(struck):
        print(f"{shape}: {kind}: struck {struck[kind]} times, missed {missed[kind]} times")


def faults_of(shape: str) -> Counter[str]:
    """How many faults of each kind are to strike runs of a shape: the shapes that do not refuse it
    share those of a kind, any remainder is rounded up."""
    wanted, owed = int(os.environ.get("RLINF_CHAOS_FAULTS", "40")), Counter[str]()
    for kind in FAULTS:
        shares = [other for other in ITERATIONS if kind not in REFUSED.get(other, ())]
        if shape in shares:
            owed[kind] = math.ceil(wanted / len(shares))
    return owed
