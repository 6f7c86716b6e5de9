"""A thread that serves others takes its process along when it fails, and says why."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
from rlinf.threads import serve
def work():
    raise {raised}
serve("listener", work)
time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", body], check=False, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code
    assert words in done.stderr
