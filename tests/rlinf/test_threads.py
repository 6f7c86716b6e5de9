"""A thread that serves others takes its process along when it fails, and says why."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from rlinf.threads import BackgroundWorker


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        ("RuntimeError('the cause')", 1, "error: listener: RuntimeError('the cause')"),
        ("OSError(24, 'Too many open files')", 65, "no more files can be opened"),
        ("MemoryError()", 65, "no memory left"),
    ],
)
def test_the_process_ends_with_the_cause(raised: str, code: int, words: str) -> None:
    body = f"""
import time
from rlinf.threads import start_service_thread
def work():
    raise {raised}
start_service_thread("listener", work)
time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", body], check=False, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code
    assert words in done.stderr


def test_work_in_a_queue_goes_on_after_what_may_go_wrong(caplog: pytest.LogCaptureFixture) -> None:
    queue, done = BackgroundWorker("errands", (OSError,)), threading.Event()

    def fails() -> None:
        raise OSError("no such way")

    queue.submit("a record", fails)
    queue.submit("another", done.set)
    assert done.wait(20)
    assert "a record: no such way; it is read from disk instead" in caplog.text
    queue.close()
    queue.submit("too late", fails)


def test_and_ends_its_process_at_a_fault_of_the_program() -> None:
    body = """
import time
from rlinf.threads import BackgroundWorker
BackgroundWorker("errands", (OSError,)).submit("a record", lambda: {}["no such key"])
time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", body], check=False, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    assert "errands: a record" in done.stderr
