"""Publishing weights: bytes of a delta in a run of the main task, and shared memory on one node."""

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
from rlinf.weights.buckets import BucketLayout
from rlinf.weights.delta import WeightSnapshot, compute_delta
from rlinf.weights.shared_weights import SharedWeightsReader, SharedWeightsWriter
from stages.factory import WEIGHTS
from stages.layout import offline_folder, stage_folder
from stages.live_store import LiveStore
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET, RecordReceiver, RecordSender
from stages.worker.weight_transfer import WeightPublisher, WeightReceiver

SFT_STEPS = 200
DEMO_ITERATIONS, SMALL_ITERATIONS = 12, 6
STATE_BYTES, REPEATS = 1 << 30, 15


def measure() -> list[BenchmarkRow]:
    """Rows of this module."""
    with tempfile.TemporaryDirectory() as root:
        demo = run(Path(root), "demo", DEMO_ITERATIONS, f"sft.max_steps={SFT_STEPS}")
        weights = weights_of(offline_folder(demo, "sft"))
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
        at_demo = delta_ratios(demo, DEMO_ITERATIONS)
        at_small = delta_ratios(small, SMALL_ITERATIONS)
    return [
        median_row("delta_bytes_ratio", at_demo, "ratio", 0.05, "lower"),
        median_row("delta_bytes_ratio_lr1e-6", at_small, "ratio", 0.05, "lower"),
        median_row("weight_sync_vs_memcpy", sync_ratios(), "ratio", 0.5, "higher"),
    ]


def run(root: Path, name: str, iterations: int, *overrides: str) -> Path:
    """A short run of the main task that keeps all its weights (float32); its folder."""
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
    """Size of each update's delta over that of the full state, both as files in bfloat16."""
    folders = [offline_folder(run, "sft")]
    folders += [stage_folder(run, "sync", iteration) for iteration in range(iterations)]
    out = []
    with tempfile.TemporaryDirectory() as root:
        delta, full = Path(root) / "delta", Path(root) / "full"
        before: WeightSnapshot | None = None
        for folder in folders:
            tensors = load_file(weights_of(folder) / "model.safetensors")
            now = WeightSnapshot.from_tensors(tensors, torch.bfloat16)
            if before is not None:
                compute_delta(before, now).save(delta)
                save_file(now.distinct, full)
                out.append(delta.stat().st_size / full.stat().st_size)
            before = now
    return out


def weights_of(folder: Path) -> Path:
    """The policy folder in a committed output."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return folder / manifest.data / "weights"


def sync_ratios() -> list[float]:
    """Bandwidth from publishing 1 GB to a checked view in another process, over memcpy's.

    Both in turns, over memory that was used before, on one thread each.
    """
    torch.set_num_threads(1)
    state = {f"layer{i}": torch.randn(STATE_BYTES // 64).to(torch.bfloat16) for i in range(32)}
    source, target = (torch.ones(STATE_BYTES, dtype=torch.uint8) for _ in range(2))
    name = f"rlinf-bench-{secrets.token_hex(4)}"
    writer = SharedWeightsWriter(name, BucketLayout.from_tensors(state))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    warm = 2
    reader = context.Process(target=follow, args=(name, warm + REPEATS, theirs))
    reader.start()
    ratios = []
    try:
        for version in range(warm + REPEATS):
            start = time.perf_counter()
            writer.publish(version, state)
            assert ours.recv() == version
            synced = time.perf_counter() - start
            start = time.perf_counter()
            target.copy_(source)
            copied = time.perf_counter() - start
            if version >= warm:
                ratios.append(copied / synced)
        reader.join()
    finally:
        reader.kill()
        gc.collect()
        writer.close()
    return ratios


def follow(name: str, count: int, done: Connection) -> None:
    """Take ``count`` versions and tell of each once it is checked and mapped."""
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
WAYS = (SOCKET, "gloo", SHARED_MEMORY)


class WeightWorker:
    """A worker_state worker's publisher and receiver of weights."""

    def __init__(self, folder: Path, name: str) -> None:
        torch.set_num_threads(1)
        self.store = LiveStore()
        self._sender = RecordSender(folder, name=name)
        self.publisher = WeightPublisher(self._sender)
        takers = {WEIGHTS: WeightReceiver(self.store, self.publisher).handle_record}
        self._receiver = RecordReceiver(folder, name, self.store, takers)

    def close(self) -> None:
        self.publisher.close()
        self._sender.close()
        self._receiver.close()


def measure_transfers() -> list[BenchmarkRow]:
    """Rows of this module."""
    context = multiprocessing.get_context("spawn")
    generator = torch.Generator().manual_seed(0)
    state = {f"{i}": torch.randn(ELEMENTS, generator=generator) for i in range(TENSORS)}
    size = sum(tensor.nbytes for tensor in state.values())
    elapsed: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as root:
        ours, theirs = context.Pipe()
        count = (ROUNDS + WARM) * len(WAYS)
        taker = context.Process(target=take, args=(Path(root), count, theirs), daemon=True)
        source = WeightWorker(Path(root), "source")
        taker.start()
        try:
            assert ours.recv() == "ready"
            for number in range(count):
                way, out = WAYS[number % len(WAYS)], f"sync/{number}"
                source.publisher.subscribe(out, {"taker": way})
                start = time.perf_counter()
                source.publisher.publish(out, "data", number, {WEIGHTS: state})
                assert ours.recv() == number
                if number >= WARM * len(WAYS):
                    elapsed[way].append(time.perf_counter() - start)
        finally:
            source.close()
            taker.join(30)
            taker.kill()
    ratios = [a / b for a, b in zip(elapsed[SOCKET], elapsed["gloo"], strict=True)]
    rates = {way: [size / 1e9 / seconds for seconds in elapsed[way]] for way in WAYS}
    return [
        median_row("weights_gloo_vs_socket", ratios, "x", None, "higher"),
        *(median_row(f"weights_{way}_gb_s", rates[way], "GB/s", None, "higher") for way in WAYS),
    ]


def take(folder: Path, count: int, done: Connection) -> None:
    """Tell of each version once it is here."""
    worker = WeightWorker(folder, "taker")
    done.send("ready")
    for number in range(count):
        worker.store.output(f"sync/{number}").wait_for_attempt(lambda: False)
        done.send(number)
    worker.close()
