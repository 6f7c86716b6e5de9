"""Records between two processes: in shared memory, and small and large ones by socket.

Measurements that are compared alternate.
"""

from __future__ import annotations

import multiprocessing
import operator
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from benchmarks.row import BenchmarkRow, median_row
from rlinf import process_tuning
from rlinf.channels.requests import RequestServer
from rlinf.data.record import Record, RecordId
from stages.layout import worker_pointer
from stages.live_store import LiveStore, StreamEnd
from stages.worker.messages import FetchOutput
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET, Fetcher, RecordFetch, RecordServer

MIB = 1 << 20
ROUNDS = 9
SMALL = 20_000
LARGE_BYTES = 16 * MIB
LARGE = 16


def measure() -> list[BenchmarkRow]:
    """Measure all rows of the transfer of records, in a process that is tuned as a worker is."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, process_tuning.retain_freed_memory) as process:
        return process.submit(_rows).result()


def _rows() -> list[BenchmarkRow]:
    ratios = {size: _shared(size * MIB) for size in (1, 4, 16, 64)}
    worst = min(ratios.values(), key=lambda values: float(np.median(values)))
    return [
        median_row("shm_vs_memcpy", worst, "ratio", 0.8, "higher"),
        *(
            median_row(f"shm_vs_memcpy_{size}mib", values, "ratio", None, "higher")
            for size, values in ratios.items()
        ),
        *_socket_rows(),
    ]


class RecordChannel:
    """The transfer of records from another process to this one.

    Args:
        transport: ``socket`` or ``shared_memory``.
    """

    def __init__(self, folder: Path, transport: str) -> None:
        self._store, self._transport = LiveStore(), transport
        self._fetcher = Fetcher(folder)
        self._number = 0

    def read(self, count: int, pipe: Connection) -> Iterator[Record]:
        """Let the process at the other end of the pipe produce records; yield them."""
        self._number += 1
        output = f"it/{self._number:04d}"
        order = FetchOutput(
            output=output, channel="x", producers=("producer",), transport=self._transport
        )
        self._fetcher.add("producer", RecordFetch(order, "producer", self._store))
        pipe.send(count)
        yield from self._store.output(output).iter_records("x", count, lambda: False)
        self._store.release_committed(lambda _: True)

    def close(self) -> None:
        self._fetcher.close()


def produce(folder: str, get_record: Callable[[int], Record], pipe: Connection) -> None:
    """Produce as many records as the other end of the pipe asks for; the next output each time."""
    process_tuning.retain_freed_memory()
    store = LiveStore()
    served = RecordServer(store)
    server = RequestServer(worker_pointer(Path(folder), "producer"), served.handle)
    pipe.send("ready")
    number = 0
    while (count := pipe.recv()) is not None:
        number += 1
        output = f"it/{number:04d}"
        # The consumer may have asked for this output already, so only earlier ones are dropped.
        store.release_committed(partial(operator.gt, output))
        stream = store.output(output).stream("x")
        for sample in range(count):
            stream.put(get_record(sample))
        stream.finish(StreamEnd(count))
    server.close()


class Repeated:
    """Returns records with the same array of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self._data = np.ones(size, np.uint8)

    def __call__(self, sample: int) -> Record:
        return Record(RecordId(0, sample), {"tokens": self._data}, info={"group": sample})


def _shared(size: int) -> list[float]:
    """Return the bandwidth of records that come in shared memory, over that of ``copy_``.

    The time is that of the whole transfer: from the request of an output until the consumer has
    read all its records, which it keeps until then, as the live store of a worker does. Until
    commit 67860e3 only the producer's copy was timed, while the consumer read each record in place
    and dropped it, so older values are not comparable.
    """
    tensors = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    count, ratios = max(4, 256 * MIB // size), []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_process(produce, folder, Repeated(size)) as pipe,
    ):
        channel = RecordChannel(Path(folder), SHARED_MEMORY)
        for _ in range(ROUNDS + 1):
            start, records = time.perf_counter(), list[Record]()
            for record in channel.read(count, pipe):
                # Read one byte of every cache line.
                int(record.steps["tokens"][::64].sum())
                records.append(record)
            seconds = time.perf_counter() - start
            records.clear()
            start = time.perf_counter()
            for _ in range(count):
                tensors[0].copy_(tensors[1])
            ratios.append((time.perf_counter() - start) / seconds)
        pipe.send(None)
        channel.close()
    return ratios[1:]


def _socket_rows() -> list[BenchmarkRow]:
    small, ciphered, plain = [], [], []
    for _ in range(5):
        seconds = _through_channel(SMALL, 256)
        small.append(SMALL / seconds)
        # Alternate, because the speed of the machine may change.
        curve_s = _through_curve()
        channel_s, plain_s = _through_channel(LARGE, LARGE_BYTES), _through_raw()
        ciphered.append(curve_s / channel_s)
        plain.append(plain_s / channel_s)
    return [
        median_row("records_per_s", small, "records/s", 20_000.0, "higher"),
        median_row("socket_vs_raw", ciphered, "ratio", 0.7, "higher"),
        median_row("socket_vs_plain", plain, "ratio", None, "higher"),
    ]


def _through_channel(count: int, size: int) -> float:
    """Return the seconds from the first to the last record at the consumer."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_process(produce, folder, Repeated(size)) as pipe,
    ):
        channel = RecordChannel(Path(folder), SOCKET)
        records = channel.read(count + 1, pipe)
        next(records)
        start = time.perf_counter()
        for _ in records:
            pass
        seconds = time.perf_counter() - start
        pipe.send(None)
        channel.close()
    return seconds


def _through_curve() -> float:
    """Return the seconds for ``LARGE`` messages over a loopback connection of ZeroMQ with the same
    cipher."""
    public, secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.PULL) as listener:
        listener.curve_server, listener.curve_secretkey = True, secret
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        with open_process(_write_curve, port, public, client_public, client_secret):
            listener.recv()
            start = time.perf_counter()
            for _ in range(LARGE):
                listener.recv(copy=False)
            return time.perf_counter() - start


def _write_curve(port: int, server: bytes, public: bytes, secret: bytes, pipe: Connection) -> None:
    data = np.ones(LARGE_BYTES, np.uint8)
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.curve_serverkey, sender.curve_publickey, sender.curve_secretkey = (
            server,
            public,
            secret,
        )
        sender.connect(f"tcp://127.0.0.1:{port}")
        pipe.send("ready")
        sender.send(b"x")
        for _ in range(LARGE):
            sender.send(data.data, copy=False)


def _through_raw() -> float:
    """Return the seconds for the bytes of ``LARGE`` records over one plain loopback connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        open_process(_write_raw, listener.getsockname()[1]),
    ):
        connection, _ = listener.accept()
        buffer = bytearray(MIB)
        connection.recv_into(buffer, 1)
        start = time.perf_counter()
        while connection.recv_into(buffer):
            pass
        seconds = time.perf_counter() - start
        connection.close()
    return seconds


def _write_raw(port: int, pipe: Connection) -> None:
    data = np.ones(LARGE_BYTES, np.uint8)
    pipe.send("ready")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"x")
        for _ in range(LARGE):
            connection.sendall(data.data)


@contextmanager
def open_process(function: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Start a process that sends a message when it is ready; yields the pipe to it."""
    context = multiprocessing.get_context("spawn")
    parent_pipe, child_pipe = context.Pipe()
    process = context.Process(target=function, args=(*arguments, child_pipe), daemon=True)
    process.start()
    parent_pipe.recv()
    try:
        yield parent_pipe
    finally:
        process.join(60)
