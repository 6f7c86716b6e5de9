"""Weights between the pools of a run: the same results by whatever way they go."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pipeline.commands.experiment import run_experiment
from pipeline.plan import WEIGHT_TRANSPORTS
from rlinf.artifacts import Manifest, read_manifest
from stages.layout import stage_folder
from stages.runner import DISK_FALLBACKS
from stages.weight_deltas import DELTA_FILE
from tests.conftest import QUIET, TINY
from tests.pipeline.helpers import contents, run_here
from tests.pipeline.pools.test_executor import assert_like, rows

Compose = Callable[..., dict[str, Any]]
POOLS = [
    {"stages": ["rollout"], "devices": {"local": 1}},
    {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
]
EDGES = ("sync -> rollout", "sync -> evaluate")
pytestmark = pytest.mark.usefixtures("undrawn")
RECORDS = ("rollout -> reward", "rollout -> inference", "rollout -> train")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process."""
    root = tmp_path_factory.mktemp("reference")
    run_here(["experiment=arithmetic_grpo", f"run.root={root}", *QUIET, *TINY, "iterations=3"])
    return root / "tiny"


def pooled(compose: Compose, name: str, way: str, iterations: int = 3) -> dict[str, Any]:
    """A tiny run of two pools whose weights and records go one way."""
    values = compose(f"run.name={name}", f"iterations={iterations}", "cluster=local")
    transports = {} if way == "socket" else dict.fromkeys(EDGES, way)
    if way not in WEIGHT_TRANSPORTS:
        transports |= dict.fromkeys(RECORDS, way)
    values["plan"] = {"pools": POOLS, "transports": transports}
    return values


def arrived(run: Path, pool: int = 0) -> int:
    """How many versions came to the memory of a pool's workers."""
    logs = (run / "logs" / "pools").glob(f"*pool-{pool}[-w]*.log")
    return sum(log.read_text().count("arrived") for log in logs)


@pytest.mark.parametrize(
    "way", ["shared_memory", "gloo", pytest.param("socket", marks=pytest.mark.slow)]
)
def test_weights_sent_to_memory_give_the_results_of_those_read_from_files(
    reference: Path, compose: Compose, tmp_path: Path, way: str
) -> None:
    run_experiment(pooled(compose, "sent", way))
    assert contents(tmp_path / "sent") == contents(reference)
    assert arrived(tmp_path / "sent") == 3
    logs = (tmp_path / "sent" / "logs" / "pools").glob("*.log")
    message = "".join(log.read_text() for log in logs)
    for other in ("no gloo", "waiting for its commit", "shared memory '"):
        assert other not in message, "they went another way"


HALF = "engine.dtype=bfloat16"
RECOMPUTED = "algorithm.old_logprobs=recompute"


def types(path: Path) -> set[str]:
    """Of the tensors in a file."""
    with safe_open(path, framework="pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def test_engines_of_another_type_are_sent_it_and_give_the_results_of_one_process(
    compose: Compose, tmp_path: Path
) -> None:
    """The trainer keeps float32, and so does what is committed."""
    run_experiment(compose("run.name=one", HALF))
    values = compose("run.name=sent", HALF, "cluster=local")
    run_experiment({**values, "plan": {"pools": POOLS}})
    assert contents(tmp_path / "sent") == contents(tmp_path / "one")
    assert arrived(tmp_path / "sent") == 2
    for path in (tmp_path / "sent" / "it").glob("*/sync/data-*/weights/model.safetensors"):
        assert types(path) == {"F32"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_changed_is_read_in_place_of_the_whole_and_gives_the_same_results(
    reference: Path, compose: Compose, tmp_path: Path, dtype: str
) -> None:
    """By the worker that has the version before: from the second on that the trainer publishes."""
    settings = ("iterations=3", f"engine.dtype={dtype}")
    one = reference
    if dtype != "float32":
        run_experiment(compose("run.name=one", *settings))
        one = tmp_path / "one"
    values = compose("run.name=deltas", *settings, "cluster=local")
    transports = dict.fromkeys(EDGES, "delta")
    run_experiment({**values, "plan": {"pools": POOLS, "transports": transports}})
    run = tmp_path / "deltas"
    assert contents(run) == contents(one)
    assert not arrived(run), "nothing is sent"
    names = [f"{stage}/{i}" for stage in ("rollout", "evaluate") for i in range(4)]
    found = {node: manifest_of(run, node) for node in names}
    spans = {
        node: [span["name"] for span in manifest.timing["spans"]]
        for node, manifest in found.items()
        if manifest
    }
    by_delta = sorted(node.partition("/")[2] for node in spans if "delta" in spans[node])
    assert by_delta == ["2", "3"], "once each, by the first of the worker's stages to need them"
    assert not [
        node for node, manifest in found.items() if manifest and DISK_FALLBACKS in manifest.extra
    ]
    for iteration in range(3):
        manifest = manifest_of(run, f"sync/{iteration}")
        assert (DELTA_FILE in manifest.files) == (iteration > 0)


def manifest_of(run: Path, node: str) -> Manifest | None:
    stage, _, iteration = node.partition("/")
    return read_manifest(stage_folder(run, stage, int(iteration)))


@pytest.mark.slow
@pytest.mark.parametrize("way", [None, "delta"])
def test_inference_elsewhere_evaluates_what_is_trained_whatever_engines_take(
    compose: Compose, tmp_path: Path, way: str | None
) -> None:
    apart = [{**POOLS[1], "stages": ["reward", "train"]}, {**POOLS[0], "stages": ["inference"]}]
    settings = ("iterations=3", "checkpoint.keep_last=3", HALF, RECOMPUTED, "algorithm.epochs=2")
    values = compose("run.name=apart", *settings, "cluster=local")
    values["plan"] = {
        "pools": [POOLS[0], *apart],
        **({"transports": {"sync -> inference": way}} if way else {}),
    }
    run_experiment(values)
    run_experiment(compose(*settings))
    assert_like(tmp_path / "apart", tmp_path / "tiny")
    assert arrived(tmp_path / "apart", pool=0) == 3
    assert arrived(tmp_path / "apart", pool=2) == (0 if way else 2)
    last = manifest_of(tmp_path / "apart", "inference/2")
    assert last is not None
    assert ("delta" in [span["name"] for span in last.timing["spans"]]) == (way == "delta")
    gaps = [row["inference/logprob_diff_mean"] for row in rows(tmp_path / "apart")]
    assert min(gaps) > 1e-5, "what was generated in bfloat16 is evaluated in float32"


@pytest.mark.parametrize("way", [None, pytest.param("shared_memory", marks=pytest.mark.slow)])
def test_model_parallel_ranks_read_rows_from_files_unless_the_plan_sets_a_transport(
    compose: Compose, tmp_path: Path, way: str | None
) -> None:
    """Two ranks that keep no optimizer and read no checkpoint."""
    settings = ("iterations=3", "checkpoint.keep_last=3", "algorithm.old_logprobs=recompute")
    values = compose("run.name=apart", "cluster=local", *settings)
    values["plan"] = {
        "stages": {"inference": {"processes": 2}},
        "pools": [
            {"stages": ["rollout", "reward", "train"], "devices": {"local": 1}},
            {"stages": ["inference"], "devices": {"local": 2}},
        ],
        **({"transports": {"sync -> inference": way}} if way else {}),
    }
    run_experiment(values)
    run_experiment(compose(*settings))
    assert_like(tmp_path / "apart", tmp_path / "tiny")
    assert arrived(tmp_path / "apart", pool=1) == (2 * 2 if way else 0)


@pytest.mark.slow
def test_all_workers_of_a_pool_get_weights(compose: Compose, tmp_path: Path) -> None:
    wide = {"rollout": {"processes": 3}, "evaluate": {"processes": 3}}
    for way in ("file", "delta", "shared_memory", "gloo"):
        values = pooled(compose, way, way)
        pools = [{**POOLS[0], "devices": {"local": 3}}, *POOLS[1:]]
        run_experiment({**values, "plan": {**values["plan"], "stages": wide, "pools": pools}})
    assert not arrived(tmp_path / "file")
    assert not arrived(tmp_path / "delta")
    assert contents(tmp_path / "delta") == contents(tmp_path / "file")
    for way in ("shared_memory", "gloo"):
        assert contents(tmp_path / way) == contents(tmp_path / "file")
        assert arrived(tmp_path / way) == 3 * 3


@pytest.mark.slow
def test_weights_that_are_to_go_by_file_are_not_sent(compose: Compose, tmp_path: Path) -> None:
    run_experiment(pooled(compose, "file", "file", iterations=1))
    assert not arrived(tmp_path / "file")


def test_who_waits_for_weights_goes_on_after_their_sender_is_killed(
    reference: Path, compose: Compose, tmp_path: Path
) -> None:
    run = tmp_path / "killed"
    killer = threading.Thread(target=kill_sender, args=(run,), daemon=True)
    killer.start()
    run_experiment(pooled(compose, "killed", "shared_memory"))
    killer.join(1)
    assert not killer.is_alive()
    assert contents(run) == contents(reference)


def kill_sender(run: Path) -> None:
    """Kill the first worker of the train pool while the second update is made."""
    while not (run / "it/0001/train").is_dir():
        time.sleep(0.005)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run).encode() in words and b"pool-1-0" in words:
            os.kill(int(process.name), signal.SIGKILL)
