"""A process that does not do what a server does."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from rlinf.engines.server_process import ServerError, ServerProcess

MUTE = """
import socket, sys, time

with socket.socket(socket.AF_UNIX) as here:
    here.bind(sys.argv[1])
    here.listen(8)
    time.sleep(600)
"""


def test_one_that_listens_and_stays_mute_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text(MUTE)
    socket = tmp_path / "socket"
    process = ServerProcess(
        sys.executable,
        "mute",
        [str(socket)],
        {"PYTHONPATH": str(tmp_path)},
        socket,
        tmp_path / "log",
        timeout_s=3600.0,
    )
    try:
        began = time.monotonic()
        while not socket.exists():
            assert time.monotonic() - began < 60
            time.sleep(0.05)
        began = time.monotonic()
        with pytest.raises(ServerError, match="did not answer within 2 s"):
            process.wait_ready("/health", 2.0)
        assert 2 <= time.monotonic() - began < 30
        assert not process.is_alive
    finally:
        process.close()
