"""The benchmark of record transfer reads what its producer has."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.channels import RecordChannel, Repeated, produce
from rlinf.data.record import Record
from stages.worker.record_transfer import SHARED_MEMORY, SOCKET


class LatePipe:
    """A pipe that lets the producer begin long after the consumer has asked for records."""

    def __init__(self, pipe: multiprocessing.connection.Connection) -> None:
        self._pipe = pipe

    def send(self, message: object) -> None:
        time.sleep(0.5)
        self._pipe.send(message)


@pytest.mark.parametrize("transport", [SOCKET, SHARED_MEMORY])
def test_a_consumer_that_asks_before_the_producer_begins_gets_all_records(
    tmp_path: Path, transport: str
) -> None:
    here, there = multiprocessing.Pipe()
    arguments = (str(tmp_path), Repeated(1 << 20), there)
    producer = threading.Thread(target=produce, args=arguments, daemon=True)
    producer.start()
    assert here.recv() == "ready"
    channel, records = RecordChannel(tmp_path, transport), list[Record]()

    def read_twice() -> None:
        for _ in range(2):
            records.extend(channel.read(3, LatePipe(here)))  # type: ignore[arg-type]

    reader = threading.Thread(target=read_twice, daemon=True)
    reader.start()
    reader.join(20)
    assert [record.identity.sample for record in records] == [0, 1, 2, 0, 1, 2]
    assert all(np.all(record.steps["tokens"] == 1) for record in records)
    here.send(None)
    producer.join(20)
    channel.close()
