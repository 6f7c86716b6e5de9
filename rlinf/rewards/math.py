"""Grading mathematical answers with math-verify in worker processes under a time limit.

math-verify guards itself with an alarm signal, which works in a main thread only; here its own
limit is off and a worker that takes too long is killed and replaced. A response that could not be
graded is told apart from a wrong one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Literal

from rlinf.errors import MissingPackageError
from rlinf.tree import python_path

FINAL = "####"
"""GSM8K marks the final answer of a worked solution so."""


@dataclass(frozen=True)
class Grade:
    """1 or 0, and how it came about."""

    score: float
    outcome: Literal["graded", "timeout", "error"] = "graded"


class MathGrader:
    """A few processes that compare responses with reference answers.

    Raises:
        MissingPackageError: math-verify is not installed.
    """

    def __init__(self, workers: int, timeout_s: float) -> None:
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise MissingPackageError("math-verify", "math", "grading mathematics") from None
        self._timeout_s = timeout_s
        self._workers = [_Worker() for _ in range(workers)]

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Grade]:
        """Grades of (response, reference answer) pairs, in order."""
        grades: list[Grade | None] = [None] * len(pairs)
        waiting = list(enumerate(pairs))[::-1]
        while waiting or any(worker.item is not None for worker in self._workers):
            for worker in self._workers:
                if worker.item is None and waiting:
                    worker.give(*waiting.pop())
            busy = {w.pipe: w for w in self._workers if w.item is not None}
            now = time.monotonic()
            first = min(w.since for w in busy.values()) + self._timeout_s
            for pipe in wait(list(busy), timeout=max(0.0, first - now)):
                assert isinstance(pipe, Connection)
                worker = busy[pipe]
                item, worker.item = worker.item, None
                assert item is not None
                try:
                    # One byte: whether it is right, wrong, or could not be graded.
                    grades[item] = _GRADES[pipe.recv_bytes()]
                except (EOFError, KeyError, OSError):
                    grades[item] = Grade(0.0, "error")
                    worker.restart()
            for worker in busy.values():
                late = worker.item is not None and time.monotonic() - worker.since > self._timeout_s
                if late and worker.item is not None:
                    grades[worker.item] = Grade(0.0, "timeout")
                    worker.restart()
        return [grade for grade in grades if grade is not None]

    def close(self) -> None:
        """End the worker processes."""
        for worker in self._workers:
            worker.stop()


class _Worker:
    """One grading process and what it is working on."""

    def __init__(self) -> None:
        self.item: int | None = None
        self.since = 0.0
        self.ready = False
        self._start()

    def give(self, item: int, pair: tuple[str, str]) -> None:
        """Hand over a pair; the clock starts."""
        self.item, self.since = item, time.monotonic()
        if not self.ready:
            # A new process imports for seconds; that is not the response's fault.
            self.pipe.recv_bytes()
            self.ready, self.since = True, time.monotonic()
        for text in pair:
            self.pipe.send_bytes(text.encode())

    def restart(self) -> None:
        """Kill the process and start another."""
        self.stop()
        self.item = None
        self._start()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self.pipe.close()

    def _start(self) -> None:
        # A plain child: multiprocessing would fork threads, or import the main module again.
        self.pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlinf.rewards.math", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.ready = False


_GRADES = {b"1": Grade(1.0), b"0": Grade(0.0), b"e": Grade(0.0, "error")}


def _serve(pipe: Connection) -> None:
    """Loop of a grading process: two texts in, one byte out."""
    grade_one("0", "0")
    pipe.send_bytes(b"ready")
    while True:
        try:
            response, answer = pipe.recv_bytes().decode(), pipe.recv_bytes().decode()
        except EOFError:
            return
        try:
            right = grade_one(response, answer)
        except Exception:  # a parser may raise anything on what a model writes
            pipe.send_bytes(b"e")
        else:
            pipe.send_bytes(b"1" if right else b"0")


def grade_one(response: str, answer: str) -> bool:
    """Whether a response ends in the reference answer, as mathematics."""
    from math_verify import parse, verify

    reference, given = final_answer(answer), final_answer(response)
    if given == reference and given:
        return True
    return bool(
        verify(
            parse(_as_latex(reference), parsing_timeout=None),
            parse(_as_latex(given), parsing_timeout=None),
            timeout_seconds=None,
        )
    )


def final_answer(text: str) -> str:
    """What stands behind the last ``####``, or the whole text."""
    final = text.rsplit(FINAL, 1)[-1].strip()
    return re.sub(r"(?<=\d),(?=\d{3})", "", final)


def _as_latex(text: str) -> str:
    plain = "$" not in text and "\\" not in text and len(text) < 64
    return f"${text}$" if plain else text


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
