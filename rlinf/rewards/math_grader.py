"""Grade mathematical answers in worker processes with time and memory limits.

math-verify limits its time with an alarm signal, which works only in a main thread and not while
Python computes with large integers. That limit is off here. Instead, the kernel kills a process
whose CPU time exceeds the limit. CPU time does not depend on the load of the machine, so equal
answers get equal grades. A response that could not be graded is distinguished from a wrong one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Literal

from rlinf import process_tuning
from rlinf.errors import MissingPackageError, RlinfError
from rlinf.package_paths import child_python_path
from rlinf.rewards.math_extraction import ReasoningTags

MEMORY_BYTES = 2 << 30
"""Address space of a grading process, which needs about a tenth of it."""
MAX_CONSECUTIVE_TIMEOUTS = 64
"""Number of consecutive timeouts, in the order of the batch, after which the rest of the batch
counts as timed out too. A batch of timeouts thus ends after about ``64 / workers`` time limits. The
number exceeds a usual group size, so that one bad reference does not affect other groups."""
WALL_TIME_FACTOR = 10
"""Limit of wall time of a grading process, as a multiple of its limit of CPU time."""
EXIT_WAIT_S = 5.0
"""Wait for the exit code of a process that closed its pipe."""
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm and terminals send to all processes of a job. The stage handles them."""
START_TIMEOUT_S = 300.0
"""Time limit for the start of a grading process, which imports from a shared file system."""

GraderKind = Literal["rlinf", "math-verify"]
"""The grader whose grades count, and plain math-verify as a cross-check."""
GradeOutcome = Literal["graded", "timeout", "unparsed", "died", "unfinished"]
"""``unparsed``: there is no answer that can be parsed; ``died``: the grading process died;
``unfinished``: the response ends within its reasoning."""
OUTCOME_METRICS: dict[GradeOutcome, str] = {
    "timeout": "timeouts",
    "unparsed": "parse_failures",
    "died": "grader_deaths",
    "unfinished": "unfinished_thoughts",
}
"""Names of the metrics of answers that could not be graded."""
CROSS_CHECKS, CROSS_CHECK_DISAGREEMENTS = "math_verify_opinions", "math_verify_disagreements"
"""Names of the metrics: number of cross-checks, and of cross-checks whose score differs."""
CROSS_CHECK_EVERY = 16
"""Plain math-verify grades every 16th answer too. If it graded all answers, grading would take
several times as long."""


@dataclass(frozen=True)
class Grade:
    """Score 1 or 0, and the outcome of grading."""

    score: float
    outcome: GradeOutcome = "graded"
    math_verify_score: float | None = None
    """Score of plain math-verify; None if it did not grade the answer."""


def count_outcomes(grades: Sequence[Grade]) -> dict[str, int]:
    """Return the number of answers that could not be graded, by :data:`OUTCOME_METRICS`, and of the
    cross-checks with math-verify."""
    counts = {
        name: sum(grade.outcome == outcome for grade in grades)
        for outcome, name in OUTCOME_METRICS.items()
    }
    cross_checks = [grade for grade in grades if grade.math_verify_score is not None]
    differ = sum(grade.math_verify_score != grade.score for grade in cross_checks)
    return {**counts, CROSS_CHECKS: len(cross_checks), CROSS_CHECK_DISAGREEMENTS: differ}


class MathGrader:
    """Processes that compare responses with reference answers.

    Args:
        timeout_s: limit of CPU time for one answer, in seconds; up to one second more is allowed,
            because the kernel's limit is in whole seconds.
        reasoning_tags: tags that mark reasoning, which is removed from responses.

    Raises:
        MissingPackageError: math-verify is not installed.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        max_consecutive_timeouts: int = MAX_CONSECUTIVE_TIMEOUTS,
        reasoning_tags: ReasoningTags | None = None,
    ) -> None:
        # Not imported here, because the import takes a second and the memory of sympy.
        if importlib.util.find_spec("math_verify") is None:
            raise MissingPackageError("math-verify", "math", "grading mathematics")
        self._timeout_s = timeout_s
        self._max_consecutive_timeouts = max_consecutive_timeouts
        self._reasoning_tags = reasoning_tags or ReasoningTags()
        self._lock = threading.Lock()
        # One permanent thread: the kernel ends a child when the thread that started it ends.
        self._starter = ThreadPoolExecutor(1, "grader-starter")
        self._workers = [_Worker(timeout_s, self._starter) for _ in range(workers)]

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Grade]:
        """Return the grades of (response, reference answer) pairs, in order.

        A pair whose process died is retried once. One in :data:`CROSS_CHECK_EVERY` answers is also
        graded by plain math-verify, which changes no grade.

        Raises:
            RlinfError: grading processes do not start.
        """
        with self._lock:
            return self._grade(pairs)

    def _grade(self, pairs: Sequence[tuple[str, str]]) -> list[Grade]:
        grades = [Grade(0.0, "unfinished")] * len(pairs)
        texts = {
            item: (text, answer)
            for item, (response, answer) in enumerate(pairs)
            if (text := self._reasoning_tags.strip_reasoning(response)) is not None
        }
        for item, grade in zip(texts, self._run_grader("rlinf", [*texts.values()]), strict=True):
            grades[item] = grade
        checked = [
            item
            for item in range(0, len(pairs), CROSS_CHECK_EVERY)
            if grades[item].outcome in ("graded", "unparsed")
        ]
        cross_checks = self._run_grader("math-verify", [texts[item] for item in checked])
        for item, cross_check in zip(checked, cross_checks, strict=True):
            if cross_check.outcome == "graded":
                grades[item] = replace(grades[item], math_verify_score=cross_check.score)
        return grades

    def _run_grader(self, kind: GraderKind, pairs: Sequence[tuple[str, str]]) -> list[Grade]:
        """Return the grades of one of the two graders, in order."""
        grades: list[Grade | None] = [None] * len(pairs)
        waiting = list(range(len(pairs)))[::-1]
        retried: set[int] = set()
        for worker in self._workers:
            worker.replace_if_dead()
        while waiting or any(worker.item is not None for worker in self._workers):
            for worker in self._workers:
                if worker.ready and worker.item is None and waiting:
                    item = waiting.pop()
                    worker.send(item, (kind, *pairs[item]))
            # Wait for starting workers as well; the others continue meanwhile.
            busy = {w.pipe: w for w in self._workers if w.item is not None or not w.ready}
            deadline = min(worker.deadline for worker in busy.values())
            for pipe in wait(list(busy), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                worker = busy[pipe]
                graded_item, grade = worker.receive()
                if graded_item is None:
                    continue
                if grade.outcome == "died" and graded_item not in retried:
                    retried.add(graded_item)
                    waiting.append(graded_item)
                else:
                    grades[graded_item] = grade
            for worker in busy.values():
                if time.monotonic() > worker.deadline:
                    if worker.item is None:
                        raise RlinfError(
                            f"a grading process did not start within {START_TIMEOUT_S:.0f} s"
                        )
                    grades[worker.item] = Grade(0.0, "timeout")
                    worker.restart()
            last = self._last_timeout(grades)
            if last is not None:
                waiting = [item for item in waiting if item <= last]
                for worker in self._workers:
                    if worker.item is not None and worker.item > last:
                        worker.restart()
                grades[last + 1 :] = [Grade(0.0, "timeout")] * (len(pairs) - last - 1)
        return [grade for grade in grades if grade is not None]

    def _last_timeout(self, grades: Sequence[Grade | None]) -> int | None:
        """Return the item at which the limit of consecutive timeouts is reached; None if it is not.
        The item does not depend on the speed of the workers."""
        num_timeouts = 0
        for item, grade in enumerate(grades):
            is_timeout = grade is not None and grade.outcome == "timeout"
            num_timeouts = num_timeouts + 1 if is_timeout else 0
            if num_timeouts == self._max_consecutive_timeouts:
                return item
        return None

    def close(self) -> None:
        with self._lock:
            for worker in self._workers:
                worker.stop()
            self._starter.shutdown()


class _Worker:
    """One grading process and its current item, the index of a pair."""

    def __init__(self, timeout_s: float, starter: ThreadPoolExecutor) -> None:
        self.item: int | None = None
        """None: the process is idle or starts."""
        self.ready = self._ended_early = False
        """Whether this process has started; whether the process before it ended while starting."""
        self._process: subprocess.Popen[bytes]
        self._timeout_s, self._starter = timeout_s, starter
        self._start()

    def send(self, item: int, question: tuple[GraderKind, str, str]) -> None:
        """Send the grader's kind, a response and its reference answer. The time limit starts."""
        self.item = item
        self.deadline = time.monotonic() + WALL_TIME_FACTOR * self._timeout_s
        try:
            for text in question:
                self.pipe.send_bytes(text.encode("utf-8", "replace"))
        except OSError:
            pass  # the process is dead, which receive() detects

    def receive(self) -> tuple[int | None, Grade]:
        """Return an item and its grade. The item is None if the process reports that it has
        started, or if it died while it was idle.

        Raises:
            RlinfError: the process ended before it had started, twice in a row.
        """
        try:
            reply = self.pipe.recv_bytes()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                # The pipe closes a moment before the exit code is available.
                self._process.wait(EXIT_WAIT_S)
            item, started, code = self.item, self.ready, self.stop()
            if not started and self._ended_early:
                raise RlinfError(
                    f"a grading process ended with code {code} before it had started; its "
                    "output above says why"
                ) from None
            self._ended_early = not started
            self.restart()
            timed_out = code == -signal.SIGXCPU
            return item, Grade(0.0, "timeout" if timed_out else "died")
        item, self.item = self.item, None
        if item is None:
            self.ready, self.deadline, self._ended_early = True, math.inf, False
            return None, Grade(0.0)
        return item, _GRADES_BY_REPLY[reply]

    def replace_if_dead(self) -> None:
        """Start another process if this one ended while it was idle."""
        if self._process.poll() is not None:
            log.warning("an idle grading process had ended with code %d", self._process.returncode)
            self.restart()

    def restart(self) -> None:
        """Kill the process and start another."""
        self.stop()
        self._start()

    def stop(self) -> int:
        """Kill the process unless it has ended. Return its exit code."""
        self._process.kill()
        self.pipe.close()
        return self._process.wait()

    def _start(self) -> None:
        # A plain child process: multiprocessing would fork threads, or reimport the main module.
        self.pipe, child_pipe = Pipe()
        self.item, self.ready, self.deadline = None, False, time.monotonic() + START_TIMEOUT_S
        command = [sys.executable, "-m", "rlinf.rewards.math_grader"]
        self._process = self._starter.submit(
            subprocess.Popen,
            [*command, str(child_pipe.fileno()), str(self._timeout_s), str(os.getpid())],
            pass_fds=[child_pipe.fileno()],
            env={
                **os.environ,
                **process_tuning.child_environment(),
                "PYTHONPATH": child_python_path(),
            },
            stdin=subprocess.DEVNULL,
        ).result()
        child_pipe.close()


_GRADES_BY_REPLY = {b"1": Grade(1.0), b"0": Grade(0.0), b"u": Grade(0.0, "unparsed")}
log = logging.getLogger("rlinf")


def _serve(pipe: Connection, timeout_s: float) -> None:
    """Run the loop of a grading process: a grader's kind and two texts in, one byte out."""
    from rlinf.rewards.math_equivalence import grade_response, grade_with_math_verify

    graders = {"rlinf": grade_response, "math-verify": grade_with_math_verify}

    # math-verify warns that its own time limit is off, which is intended.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grade_response(r"\sqrt{4}", r"\frac{4}{2}")  # the first call imports the parsers
    pipe.send_bytes(b"ready")
    while True:
        try:
            kind, response, answer = (pipe.recv_bytes().decode() for _ in range(3))
        except EOFError:
            return
        _limit_cpu(timeout_s)
        try:
            reply = b"1" if graders[kind](response, answer) else b"0"
        except MemoryError:
            os._exit(1)  # the state of the libraries may be inconsistent
        except Exception:  # a parser may raise anything on a model's output
            reply = b"u"
        pipe.send_bytes(reply)


def _limit_cpu(timeout_s: float) -> None:
    """Limit further CPU time to ``timeout_s``, rounded up to whole seconds; the kernel then
    sends SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + timeout_s))


def _limit(resource_type: int, soft: int) -> None:
    hard = resource.getrlimit(resource_type)[1]
    soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource_type, (soft, hard))


if __name__ == "__main__":
    process_tuning.die_with_parent(int(sys.argv[3]))
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        _serve(Connection(int(sys.argv[1])), float(sys.argv[2]))
    except BrokenPipeError:
        pass  # the stage has ended
