"""Live channels: the copy into shared memory, small records and large ones through a socket.

Two processes; the figures that compare take turns with what they are compared with.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from benchmarks.row import Row, median_row
from rlinf.channels.shared_memory import SharedMemorySink
from rlinf.channels.socket import SocketSink, SocketSource
from rlinf.data.record import Identity, Record

MIB = 1 << 20
ROUNDS = 9
SMALL = 20_000
LARGE_BYTES = 16 * MIB
LARGE = 16


def measure() -> list[Row]:
    """All rows of the live transports."""
    ratios = {size: _shm_vs_memcpy(size * MIB) for size in (1, 4, 16, 64)}
    rows = [
        median_row(f"shm_vs_memcpy_{size}mib", values, "ratio", None, "higher")
        for size, values in ratios.items()
    ]
    worst = min(ratios.values(), key=lambda values: float(np.median(values)))
    return [
        median_row("shm_vs_memcpy", worst, "ratio", 0.8, "higher"),
        *rows,
        *_socket_rows(),
    ]


def _shm_vs_memcpy(size: int) -> list[float]:
    """Bandwidth of ``put`` over that of ``copy_``; the reader reads each record in place."""
    source = np.ones(size, np.uint8)
    record = Record(Identity(0, 0), context={"x": source})
    tensors = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    count = max(4, 256 * MIB // size)
    ratios = []
    with (
        tempfile.TemporaryDirectory() as folder,
        other_process(_read_shared, folder) as pipe,
    ):
        channel = SharedMemorySink(Path(folder), "c", size=max(8 * size, 64 * MIB))

        def put() -> None:
            channel.put(record)

        def copy() -> None:
            tensors[0].copy_(tensors[1])

        for _ in range(ROUNDS + 1):
            ratios.append(_seconds(copy, count) / _seconds(put, count))
        pipe.send("over")
        channel.close()
    return ratios[1:]


def _seconds(function: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function()
    return time.perf_counter() - start


def _read_shared(folder: str, pipe: Connection) -> None:
    channel = SocketSource(Path(folder), "c", interface="127.0.0.1")
    pipe.send("ready")

    def read() -> None:
        for record in channel:
            # In place, every line of the cache.
            int(record.context["x"][::64].sum())
            del record

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    pipe.recv()
    channel.close()
    reader.join()


def _socket_rows() -> list[Row]:
    small, ciphered, plain = [], [], []
    for _ in range(5):
        seconds = _through_channel(SMALL, 256)
        small.append(SMALL / seconds)
        # In turns: the machine may be slower now than before.
        first, own, second = _through_curve(), _through_channel(LARGE, LARGE_BYTES), _through_raw()
        ciphered.append(first / own)
        plain.append(second / own)
    return [
        median_row("records_per_s", small, "records/s", 20_000.0, "higher"),
        median_row("socket_vs_raw", ciphered, "ratio", 0.7, "higher"),
        median_row("socket_vs_plain", plain, "ratio", None, "higher"),
    ]


def _through_channel(count: int, size: int) -> float:
    """Seconds from the first to the last record at the consumer."""
    with tempfile.TemporaryDirectory() as folder:
        channel = SocketSource(Path(folder), "c", interface="127.0.0.1")
        with other_process(_write_socket, folder, count, size):
            channel.get()
            start = time.perf_counter()
            for _ in range(count):
                channel.get()
            seconds = time.perf_counter() - start
        channel.close()
    return seconds


def _write_socket(folder: str, count: int, size: int, pipe: Connection) -> None:
    channel = SocketSink(Path(folder), "c")
    data = np.ones(size, np.uint8)
    pipe.send("ready")
    for i in range(count + 1):
        channel.put(Record(Identity(0, i), {"tokens": data}, info={"group": i}))
    channel.close()


def _through_curve() -> float:
    """Seconds of as many messages over one loopback connection with the same cipher, and no more:
    what a socket of ZeroMQ gives."""
    public, secret = zmq.curve_keypair()
    own_public, own_secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.PULL) as listener:
        listener.curve_server, listener.curve_secretkey = True, secret
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        with other_process(_write_curve, port, public, own_public, own_secret):
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
    """Seconds of as many bytes as ``LARGE`` records over one plain loopback connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        other_process(_write_raw, listener.getsockname()[1]),
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
def other_process(function: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """The other process, which says when it is ready; yields the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(*arguments, theirs), daemon=True)
    process.start()
    ours.recv()
    try:
        yield ours
    finally:
        process.join(60)
