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
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from benchmarks.row import BenchmarkRow, median_row
from rlinf.channels.record_streams import SharedMemorySink, SocketSink, SocketSource
from rlinf.data.record import Record, RecordId

MIB = 1 << 20
ROUNDS = 9
SMALL = 20_000
LARGE_BYTES = 16 * MIB
LARGE = 16
PLACES_START, WRITTEN, READ = 4096, 0, 64
IDLE_S = 1e-3


def measure() -> list[BenchmarkRow]:
    """All rows of the live transports."""
    rows: list[BenchmarkRow] = []
    found = {size: _shared(size * MIB) for size in (1, 4, 16, 64)}
    for number, (name, wanted) in enumerate((("shm_vs_memcpy", 0.8), ("shm_vs_handover", None))):
        ratios = {size: both[number] for size, both in found.items()}
        worst = min(ratios.values(), key=lambda values: float(np.median(values)))
        rows.append(median_row(name, worst, "ratio", wanted, "higher"))
        rows += [
            median_row(f"{name}_{size}mib", values, "ratio", None, "higher")
            for size, values in ratios.items()
        ]
    return [*rows, *_socket_rows()]


def _shared(size: int) -> tuple[list[float], list[float]]:
    """Bandwidth of ``put``, whose reader reads each record in place, over that of ``copy_``, and
    over that of a copy into memory that another process reads, with a counter and no more."""
    source = np.ones(size, np.uint8)
    record = Record(RecordId(0, 0), context={"x": source})
    tensors = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    count = max(4, 256 * MIB // size)
    over_copy, over_bare = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_process(_read_shared, folder) as pipe,
        _handing_over(source, count * (ROUNDS + 1)) as hand_over,
    ):
        channel = SharedMemorySink(Path(folder), "c", size=max(8 * size, 64 * MIB))

        def put() -> None:
            channel.put(record)

        def copy() -> None:
            tensors[0].copy_(tensors[1])

        for _ in range(ROUNDS + 1):
            seconds = _seconds(put, count)
            over_copy.append(_seconds(copy, count) / seconds)
            over_bare.append(_seconds(hand_over, count) / seconds)
        pipe.send("over")
        channel.close()
    return over_copy[1:], over_bare[1:]


@contextmanager
def _handing_over(source: np.ndarray, count: int) -> Iterator[Callable[[], None]]:
    """Yield a function that copies ``source`` to one of two places in turn, once the reader has
    read it there."""
    memory = SharedMemory(create=True, size=PLACES_START + 2 * len(source))
    numbers, places = _places(memory, len(source))
    number = 0

    def hand_over() -> None:
        nonlocal number
        while numbers[READ] < number - 1:
            pass
        places[number % 2] = source
        number += 1
        numbers[WRITTEN] = number

    try:
        with open_process(_read_places, memory.name, len(source), count):
            yield hand_over
    finally:
        memory.unlink()
        with suppress(BufferError):
            memory.close()


def _read_places(name: str, size: int, count: int, pipe: Connection) -> None:
    memory = SharedMemory(name)
    numbers, places = _places(memory, size)
    pipe.send("ready")
    for number in range(count):
        while numbers[WRITTEN] <= number:
            if number % (count // (ROUNDS + 1)) == 0:
                time.sleep(IDLE_S)  # the other ways are measured meanwhile
        int(places[number % 2][::64].sum())
        numbers[READ] = number + 1
    with suppress(BufferError):
        memory.close()


def _places(memory: SharedMemory, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the counters of both ends, on separate cache lines, and two places."""
    assert memory.buf is not None
    numbers = np.frombuffer(memory.buf, np.int64, PLACES_START // 8)
    return numbers, np.frombuffer(memory.buf, np.uint8, 2 * size, PLACES_START).reshape(2, size)


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


def _socket_rows() -> list[BenchmarkRow]:
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
        with open_process(_write_socket, folder, count, size):
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
        channel.put(Record(RecordId(0, i), {"tokens": data}, info={"group": i}))
    channel.close()


def _through_curve() -> float:
    """Seconds of as many messages over one loopback connection with the same cipher, and no more:
    what a socket of ZeroMQ gives."""
    public, secret = zmq.curve_keypair()
    own_public, own_secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.PULL) as listener:
        listener.curve_server, listener.curve_secretkey = True, secret
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        with open_process(_write_curve, port, public, own_public, own_secret):
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
