"""Live channels between two processes: records in shared memory, small and large ones by socket.

Measurements that are compared alternate.
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
BUFFERS_START, WRITTEN, READ = 4096, 0, 64
IDLE_S = 1e-3


def measure() -> list[BenchmarkRow]:
    """Measure all rows of the live channels."""
    rows: list[BenchmarkRow] = []
    ratios_by_size = {size: _shared(size * MIB) for size in (1, 4, 16, 64)}
    for number, (name, goal) in enumerate((("shm_vs_memcpy", 0.8), ("shm_vs_handover", None))):
        ratios = {size: pair[number] for size, pair in ratios_by_size.items()}
        worst = min(ratios.values(), key=lambda values: float(np.median(values)))
        rows.append(median_row(name, worst, "ratio", goal, "higher"))
        rows += [
            median_row(f"{name}_{size}mib", values, "ratio", None, "higher")
            for size, values in ratios.items()
        ]
    return [*rows, *_socket_rows()]


def _shared(size: int) -> tuple[list[float], list[float]]:
    """Return ratios of bandwidth: of ``put``, whose reader reads each record in place, over that of
    ``copy_``, and over that of a plain copy that is handed over with counters alone."""
    source = np.ones(size, np.uint8)
    record = Record(RecordId(0, 0), context={"x": source})
    tensors = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    count = max(4, 256 * MIB // size)
    over_copy, over_plain = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_process(_read_shared, folder) as pipe,
        _plain_handover(source, count * (ROUNDS + 1)) as hand_over,
    ):
        channel = SharedMemorySink(Path(folder), "c", size=max(8 * size, 64 * MIB))

        def put() -> None:
            channel.put(record)

        def copy() -> None:
            tensors[0].copy_(tensors[1])

        for _ in range(ROUNDS + 1):
            seconds = _seconds(put, count)
            over_copy.append(_seconds(copy, count) / seconds)
            over_plain.append(_seconds(hand_over, count) / seconds)
        pipe.send("over")
        channel.close()
    return over_copy[1:], over_plain[1:]


@contextmanager
def _plain_handover(source: np.ndarray, count: int) -> Iterator[Callable[[], None]]:
    """Yield a function that copies ``source`` alternately to two buffers, each after the reader has
    read its previous content."""
    memory = SharedMemory(create=True, size=BUFFERS_START + 2 * len(source))
    numbers, buffers = _buffers(memory, len(source))
    number = 0

    def hand_over() -> None:
        nonlocal number
        while numbers[READ] < number - 1:
            pass
        buffers[number % 2] = source
        number += 1
        numbers[WRITTEN] = number

    try:
        with open_process(_read_buffers, memory.name, len(source), count):
            yield hand_over
    finally:
        memory.unlink()
        with suppress(BufferError):
            memory.close()


def _read_buffers(name: str, size: int, count: int, pipe: Connection) -> None:
    memory = SharedMemory(name)
    numbers, buffers = _buffers(memory, size)
    pipe.send("ready")
    for number in range(count):
        while numbers[WRITTEN] <= number:
            if number % (count // (ROUNDS + 1)) == 0:
                time.sleep(IDLE_S)  # the other methods are measured meanwhile
        int(buffers[number % 2][::64].sum())
        numbers[READ] = number + 1
    with suppress(BufferError):
        memory.close()


def _buffers(memory: SharedMemory, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the counters of both ends, on separate cache lines, and the two buffers."""
    assert memory.buf is not None
    numbers = np.frombuffer(memory.buf, np.int64, BUFFERS_START // 8)
    return numbers, np.frombuffer(memory.buf, np.uint8, 2 * size, BUFFERS_START).reshape(2, size)


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
            # Read one byte of every cache line, in place.
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
