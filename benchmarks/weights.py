"""Publishing of weights: size of deltas in training runs, and bandwidth of transports on a node."""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.demo import THREADS
from benchmarks.row import BenchmarkRow, median_row
from rlinf import package_paths
from rlinf.artifacts import read_manifest
from rlinf.channels.requests import RequestServer
from rlinf.weights.buckets import BucketLayout
from rlinf.weights.delta import WeightSnapshot, compute_delta
from rlinf.weights.shared_weights import SharedWeightsReader, SharedWeightsWriter
from stages.factory import WEIGHTS
from stages.layout import setup_stage_folder, stage_folder, worker_pointer
from stages.live_store import LiveStore
from stages.worker.messages import FetchWeights
from stages.worker.record_transfer import SHARED_MEMORY, Fetcher
from stages.worker.weight_transfer import WeightPublisher, WeightReceiver

SFT_STEPS = 200
DEMO_ITERATIONS, SMALL_ITERATIONS = 12, 6
STATE_BYTES, REPEATS = 1 << 30, 15


def measure() -> list[BenchmarkRow]:
    """Measure the rows of deltas and of shared memory."""
    with tempfile.TemporaryDirectory() as root:
        demo = run(Path(root), "demo", DEMO_ITERATIONS, f"sft.max_steps={SFT_STEPS}")
        weights = weights_of(setup_stage_folder(demo, "sft"))
        small = run(
            Path(root),
            "small",
            SMALL_ITERATIONS,
            "model=checkpoint",
            f"model.path={weights}",
            "sft.max_steps=0",
            "optimizer.lr=1e-6",
            "optimizer.lr_warmup_iterations=0",
            "optimizer.lr_scheduler_type=constant",
        )
        demo_ratios = delta_ratios(demo, DEMO_ITERATIONS)
        small_ratios = delta_ratios(small, SMALL_ITERATIONS)
    return [
        median_row("delta_bytes_ratio", demo_ratios, "ratio", 0.05, "lower"),
        median_row("delta_bytes_ratio_lr1e-6", small_ratios, "ratio", 0.05, "lower"),
        median_row("weight_sync_vs_memcpy", sync_ratios(), "ratio", 0.5, "higher"),
    ]


def run(root: Path, name: str, iterations: int, *overrides: str) -> Path:
    """Make a short run of the text demo that keeps all weights (float32); returns its folder."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "rlinf.launch",
            "experiment=arithmetic_grpo",
            f"run.root={root}",
            f"run.name={name}",
            f"iterations={iterations}",
            f"checkpoint.keep_last={iterations + 2}",
            "evaluate.every=0",
            *overrides,
        ],
        cwd=package_paths.ROOT,
        check=True,
        capture_output=True,
        env={**os.environ, **THREADS},
    )
    return root / name


def delta_ratios(run: Path, iterations: int) -> list[float]:
    """Return the size of each update's delta over that of the full state, as bfloat16 files."""
    folders = [setup_stage_folder(run, "sft")]
    folders += [stage_folder(run, "sync", iteration) for iteration in range(iterations)]
    ratios = []
    with tempfile.TemporaryDirectory() as root:
        delta, full = Path(root) / "delta", Path(root) / "full"
        previous: WeightSnapshot | None = None
        for folder in folders:
            tensors = load_file(weights_of(folder) / "model.safetensors")
            current = WeightSnapshot.from_tensors(tensors, torch.bfloat16)
            if previous is not None:
                compute_delta(previous, current).save(delta)
                save_file(current.distinct, full)
                ratios.append(delta.stat().st_size / full.stat().st_size)
            previous = current
    return ratios


def weights_of(folder: Path) -> Path:
    """Return the policy folder of a committed output."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return folder / manifest.data / "weights"


def sync_ratios() -> list[float]:
    """Return bandwidth of publishing 1 GB to a verified view in another process, over memcpy's.

    Both alternate, on memory that was used before, with one thread each.
    """
    torch.set_num_threads(1)
    state = {f"layer{i}": torch.randn(STATE_BYTES // 64).to(torch.bfloat16) for i in range(32)}
    source, target = (torch.ones(STATE_BYTES, dtype=torch.uint8) for _ in range(2))
    name = f"rlinf-bench-{secrets.token_hex(4)}"
    writer = SharedWeightsWriter(name, BucketLayout.from_tensors(state))
    context = multiprocessing.get_context("spawn")
    parent_pipe, child_pipe = context.Pipe()
    warm = 2
    reader = context.Process(target=follow, args=(name, warm + REPEATS, child_pipe))
    reader.start()
    ratios = []
    try:
        for version in range(warm + REPEATS):
            start = time.perf_counter()
            writer.publish(version, state)
            assert parent_pipe.recv() == version
            sync_s = time.perf_counter() - start
            start = time.perf_counter()
            target.copy_(source)
            copy_s = time.perf_counter() - start
            if version >= warm:
                ratios.append(copy_s / sync_s)
        reader.join()
    finally:
        reader.kill()
        gc.collect()
        writer.close()
    return ratios


def follow(name: str, count: int, done: Connection) -> None:
    """Receive ``count`` versions; send the number of each after it was verified and mapped."""
    torch.set_num_threads(1)
    reader, version = SharedWeightsReader(name), -1
    while version + 1 < count:
        view = reader.newest(after=version)
        if view is None:
            time.sleep(0.0005)
            continue
        with view:
            version = view.version
            done.send(version)


TENSORS, ELEMENTS, ROUNDS, WARM = 64, 1 << 20, 9, 2
"""256 MiB of float32."""
TRANSPORTS = ("gloo", SHARED_MEMORY)


class WeightWorker:
    """Publisher and receiver of weights, as in a worker of a pool."""

    def __init__(self, folder: Path, name: str) -> None:
        torch.set_num_threads(1)
        self.store = LiveStore()
        self.publisher = WeightPublisher(folder, name)
        self.receiver = WeightReceiver(folder, name, self.store)
        self.fetcher = Fetcher(folder)
        self._server = RequestServer(worker_pointer(folder, name), self.publisher.handle)

    def close(self) -> None:
        self.fetcher.close()
        self.publisher.close()
        self.receiver.close()
        self._server.close()


def measure_transfers() -> list[BenchmarkRow]:
    """Measure the rows of the transports."""
    context = multiprocessing.get_context("spawn")
    generator = torch.Generator().manual_seed(0)
    state = {f"{i}": torch.randn(ELEMENTS, generator=generator) for i in range(TENSORS)}
    size = sum(tensor.nbytes for tensor in state.values())
    elapsed: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
    with tempfile.TemporaryDirectory() as root:
        parent_pipe, child_pipe = context.Pipe()
        count = (ROUNDS + WARM) * len(TRANSPORTS)
        receiver = context.Process(target=take, args=(Path(root), count, child_pipe), daemon=True)
        source = WeightWorker(Path(root), "source")
        receiver.start()
        try:
            assert parent_pipe.recv() == "ready"
            for number in range(count):
                transport = TRANSPORTS[number % len(TRANSPORTS)]
                start = time.perf_counter()
                source.publisher.publish(f"sync/{number}", "data", number, {WEIGHTS: state})
                assert parent_pipe.recv() == number
                if number >= WARM * len(TRANSPORTS):
                    elapsed[transport].append(time.perf_counter() - start)
        finally:
            source.close()
            receiver.join(30)
            receiver.kill()
    rates = {
        transport: [size / 1e9 / seconds for seconds in elapsed[transport]]
        for transport in TRANSPORTS
    }
    return [
        median_row(f"weights_{transport}_gb_s", rates[transport], "GB/s", None, "higher")
        for transport in TRANSPORTS
    ]


def take(folder: Path, count: int, done: Connection) -> None:
    """Receive ``count`` versions; send the number of each after it has arrived."""
    worker = WeightWorker(folder, "taker")
    for number in range(count):
        order = FetchWeights(
            output=f"sync/{number}",
            producer="source",
            transport=TRANSPORTS[number % len(TRANSPORTS)],
            members=("source", "taker"),
        )
        worker.fetcher.add("source", worker.receiver.create_fetch(order))
    done.send("ready")
    for number in range(count):
        worker.store.output(f"sync/{number}").wait_for_attempt(lambda: False)
        done.send(number)
    worker.close()
