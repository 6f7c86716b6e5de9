"""Simulators in processes of their own, so that they are stepped beside the policy.

The time loops stay here, a thread each; a process steps the worlds of some of them
(:mod:`rlinf.envs.simulator`), under its own interpreter where one is named. A socket wakes the one
who waits at once, and ends when either side dies: the stage then raises, the process then exits.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from rlinf import machine
from rlinf.channels.base import Channel, ChannelClosed
from rlinf.data.record import Record
from rlinf.envs import simulator
from rlinf.envs.overlap import Part
from rlinf.envs.simulator import Arrays, Link
from rlinf.errors import InputError, RlinfError

PATIENCE_S = 2.0
PACKAGES = ("site-packages", "dist-packages")
START = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""A file that is run directly has its folder on the module search path, with all that is in it."""


class SimulatorError(RlinfError):
    """A simulator failed in its process, or the process died; the next attempt starts new ones."""


class Process:
    """Worlds in a process, for several threads that take turns; see :class:`simulator.Worlds`.

    All methods raise SimulatorError where the process died or its simulator raised (with its
    traceback), and InputError where it refused its configuration.
    """

    def __init__(self, maker: str, values: Mapping[str, Any], python: str | None = None) -> None:
        """
        Args:
            maker: what makes a world: ``module:attribute``, or ``:attribute`` of that file.
            values: its arguments, plain.
            python: the interpreter; None: this one.
        """
        mine, its = socket.socketpair()
        file = str(Path(simulator.__file__).resolve())
        with its:
            self._process = subprocess.Popen(
                [
                    *(python or sys.executable, "-c", START),
                    *(file, str(its.fileno()), maker, json.dumps(dict(values))),
                ],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **machine.environment(), "PYTHONPATH": _path(python)},
            )
        self._link, self._lock = Link(mine), threading.Lock()
        self.pid = self._process.pid
        # Also when nobody closes the environment: at the end of the stage's process.
        self.end = weakref.finalize(self, _end, self._process)

    def reset(self, numbers: Sequence[int], seeds: Sequence[int]) -> np.ndarray:
        order = {"do": "reset", "worlds": list(numbers), "seeds": list(seeds)}
        return self._ask(order, {})[1]["seen"]

    def step(self, numbers: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        order = {"do": "step", "worlds": list(numbers)}
        answer, came = self._ask(order, {"action": actions})
        return came, dict(answer["errors"])

    def spaces(self) -> dict[str, Any]:
        return self._ask({"do": "spaces"}, {})[0]

    def close(self) -> None:
        """End it; it has nothing to save."""
        self.end()

    def _ask(self, order: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        try:
            with self._lock:
                self._link.put(order, arrays)
                answer, columns = self._link.get()
        except (EOFError, OSError):
            raise self._death() from None
        if "refused" in answer:
            raise InputError(str(answer["refused"]))
        if "failed" in answer:
            raise SimulatorError(f"simulator process {self.pid}: {answer['failed']}")
        return answer, columns

    def _death(self) -> SimulatorError:
        """Why nothing comes any more."""
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return SimulatorError(f"simulator process {self.pid} closed its connection")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return SimulatorError(f"simulator process {self.pid} {how} while it was needed")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _path(python: str | None) -> str:
    """The module search path of a process: a task may come from a module that only ours finds.

    Another interpreter gets none of the packages that belong to this one.
    """
    parts = [part or str(Path.cwd()) for part in sys.path]
    if python is not None:
        own = {Path(sys.prefix), Path(sys.base_prefix)}
        parts = [part for part in parts if not own & {Path(part), *Path(part).parents}]
        parts = [part for part in parts if Path(part).name not in PACKAGES]
    return os.pathsep.join(parts)


def side_by_side(
    parts: Sequence[Part], observations: Channel, actions: Channel, stop: Callable[[], None]
) -> list[Record]:
    """Run time loops to their ends, each in a thread; their trajectories in the order of parts.

    Closes ``observations``.

    Args:
        stop: ends what the loops may wait for; called where they do not all come to their ends.

    Raises:
        ChannelClosed: the policy answers no more.
        Exception: what the first part that failed raised.
    """
    return _Run(parts, observations, actions, stop)()


class _Run:
    """One collection: the threads send requests, the caller hands replies to them."""

    def __init__(
        self,
        parts: Sequence[Part],
        observations: Channel,
        actions: Channel,
        stop: Callable[[], None],
    ) -> None:
        self._stop = stop
        self._parts, self._observations, self._actions = parts, observations, actions
        self._found: list[list[Record]] = [[] for _ in parts]
        self._replies: list[SimpleQueue[Record | None]] = [SimpleQueue() for _ in parts]
        self._asked: dict[int, int] = {}
        """The part that waits for the reply which begins with a sample."""
        self._failures: list[BaseException] = []
        self._left, self._lock = len(parts), threading.Lock()

    def __call__(self) -> list[Record]:
        threads = [
            threading.Thread(target=self._play, args=(number,), name="simulate", daemon=True)
            for number in range(len(self._parts))
        ]
        for thread in threads:
            thread.start()
        if not threads:
            self._observations.close()
        try:
            with suppress(ChannelClosed):
                while True:
                    reply = self._actions.get()
                    self._replies[self._asked.pop(int(reply.steps["sample"][0]))].put(reply)
            if self._left and not self._failures:
                raise ChannelClosed("the policy answers no more")
        finally:
            if self._left:
                self._stop()
            for replies in self._replies:
                replies.put(None)
            for thread in threads:
                thread.join()
        if self._failures:
            raise self._failures[0]
        return [record for records in self._found for record in records]

    def _play(self, number: int) -> None:
        part, replies = self._parts[number], self._replies[number]
        try:
            request = next(part)
            while not self._failures:
                self._asked[int(request.steps["sample"][0])] = number
                self._observations.put(request)
                reply = replies.get()
                if reply is None:
                    return
                request = part.send(reply)
        except StopIteration as end:
            self._found[number] = end.value
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._observations.close()
        except BaseException as error:
            self._failures.append(error)
            # The policy ends, its replies end, and the caller of this run looks here.
            self._observations.close()
