"""Weights from one resident worker to the board of another on the same node, by each way.

The two are processes with the inboxes, outboxes and boards of a run, one thread each for tensors;
ways take turns, and what is timed ends when the weights are on the board, checked.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.row import BenchmarkRow, median_row
from stages.factory import WEIGHTS
from stages.live_store import LiveStore
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET, RecordReceiver, RecordSender
from stages.worker.weight_transfer import WeightPublisher, WeightReceiver

TENSORS, ELEMENTS, ROUNDS, WARM = 64, 1 << 20, 9, 2
"""256 MiB of float32."""
WAYS = (SOCKET, "gloo", SHARED_MEMORY)


class WeightWorker:
    """What a resident worker has to send and take weights."""

    def __init__(self, folder: Path, name: str) -> None:
        torch.set_num_threads(1)
        self.board = LiveStore()
        self._outbox = RecordSender(folder, name=name)
        self.publisher = WeightPublisher(self._outbox)
        takers = {WEIGHTS: WeightReceiver(self.board, self.publisher).handle_record}
        self._inbox = RecordReceiver(folder, name, self.board, takers)

    def close(self) -> None:
        self.publisher.close()
        self._outbox.close()
        self._inbox.close()


def measure() -> list[BenchmarkRow]:
    """Rows of this module."""
    context = multiprocessing.get_context("spawn")
    generator = torch.Generator().manual_seed(0)
    state = {f"{i}": torch.randn(ELEMENTS, generator=generator) for i in range(TENSORS)}
    size = sum(tensor.nbytes for tensor in state.values())
    took: dict[str, list[float]] = {way: [] for way in WAYS}
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
                    took[way].append(time.perf_counter() - start)
        finally:
            source.close()
            taker.join(30)
            taker.kill()
    ratios = [a / b for a, b in zip(took[SOCKET], took["gloo"], strict=True)]
    rates = {way: [size / 1e9 / seconds for seconds in took[way]] for way in WAYS}
    return [
        median_row("weights_gloo_vs_socket", ratios, "x", None, "higher"),
        *(median_row(f"weights_{way}_gb_s", rates[way], "GB/s", None, "higher") for way in WAYS),
    ]


def take(folder: Path, count: int, done: Connection) -> None:
    """Tell of each version once it is here."""
    worker = WeightWorker(folder, "taker")
    done.send("ready")
    for number in range(count):
        worker.board.output(f"sync/{number}").wait_for_attempt(lambda: False)
        done.send(number)
    worker.close()
