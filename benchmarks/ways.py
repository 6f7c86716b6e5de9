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

from benchmarks.row import Row, median_row
from stages.board import Board
from stages.parts import WEIGHTS
from stages.worker.inbox import SHARED_MEMORY, SOCKET, Inbox, Outbox
from stages.worker.weights import Arrivals, Publisher

TENSORS, ELEMENTS, ROUNDS, WARM = 64, 1 << 20, 9, 2
"""256 MiB of float32."""
WAYS = (SOCKET, "gloo", SHARED_MEMORY)


class Worker:
    """What a resident worker has to send and take weights."""

    def __init__(self, folder: Path, name: str) -> None:
        torch.set_num_threads(1)
        self.board = Board()
        self._outbox = Outbox(folder, name=name)
        self.publisher = Publisher(self._outbox)
        takers = {WEIGHTS: Arrivals(self.board, self.publisher).take}
        self._inbox = Inbox(folder, name, self.board, takers)

    def close(self) -> None:
        self.publisher.close()
        self._outbox.close()
        self._inbox.close()


def measure() -> list[Row]:
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
        source = Worker(Path(root), "source")
        taker.start()
        try:
            assert ours.recv() == "ready"
            for number in range(count):
                way, out = WAYS[number % len(WAYS)], f"sync/{number}"
                source.publisher.want(out, {"taker": way})
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
    worker = Worker(folder, "taker")
    done.send("ready")
    for number in range(count):
        worker.board.output(f"sync/{number}").attempt(lambda: False)
        done.send(number)
    worker.close()
