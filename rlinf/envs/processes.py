"""Simulators in processes of their own, so that they are stepped beside the policy.

The time loops stay here, a thread each; a process steps the worlds of some of them
(:mod:`rlinf.envs.simulator`), under its own interpreter where one is named. A socket wakes the side
that waits at once, and ends when either side dies: the stage then starts another process, and the
other side exits.
"""

from __future__ import annotations

import json
import logging
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
from rlinf.envs.simulator import ENDS, Arrays, Link, among, seen_in, stacked
from rlinf.errors import InputError, RlinfError

PATIENCE_S = 2.0
ATTEMPTS = 3
"""Processes that may die one after the other before episodes begin."""
PACKAGES = ("site-packages", "dist-packages")
START = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""A file that is run directly has its folder on the module search path, with all that is in it."""
log = logging.getLogger(__name__)


class SimulatorError(RlinfError):
    """A simulator failed in its process, or the process died again and again; the next attempt
    starts new ones."""


class Process:
    """Worlds in a process, for several threads that take turns; see :class:`simulator.Worlds`.

    One that dies, or answers nothing for ``timeout_s``, is replaced: the episodes that it stepped
    are lost, and those alone. Methods raise SimulatorError where the simulator raised outside an
    episode (with its traceback) or no process begins one, and InputError where it refused its
    configuration.
    """

    def __init__(
        self,
        maker: str,
        values: Mapping[str, Any],
        python: str | None,
        timeout_s: float,
        images: Mapping[str, Sequence[int]] | None = None,
        renderer: str = "egl",
    ) -> None:
        """
        Args:
            maker: what makes a world: ``module:attribute`` or ``FILE.py:attribute``.
            values: its arguments, plain.
            python: the interpreter; None: this one.
            timeout_s: for one answer, the first of which waits for the simulator to be imported.
            images: of cameras by name, with height and width.
            renderer: of MuJoCo, ``egl`` or ``osmesa``.
        """
        self._command = (maker, json.dumps(dict(values)), json.dumps(dict(images or {})))
        self._renderer = {"MUJOCO_GL": renderer, "PYOPENGL_PLATFORM": renderer}
        self._python, self._timeout_s = python, timeout_s
        self._lock, self._closed = threading.Lock(), False
        self._seen: dict[int, tuple[int, Arrays]] = {}
        """By world its last observation, and the process that it was made in."""
        self._start()

    def _start(self) -> None:
        mine, its = socket.socketpair()
        mine.settimeout(self._timeout_s)
        file = str(Path(simulator.__file__).resolve())
        with its:
            self._process = subprocess.Popen(
                [
                    *(self._python or sys.executable, "-c", START),
                    *(file, str(its.fileno()), *self._command),
                ],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **machine.environment(),
                    **self._renderer,
                    "PYTHONPATH": _path(self._python),
                },
            )
        self._link, self.pid = Link(mine), self._process.pid
        # Also when nobody closes the environment: at the end of the stage's process.
        self._end = weakref.finalize(self, _end, self._process)

    def reset(self, numbers: Sequence[int], seeds: Sequence[int]) -> Arrays:
        order = {"do": "reset", "worlds": list(numbers), "seeds": list(seeds)}
        deaths = 0
        with self._lock:
            while True:
                try:
                    seen = seen_in(self._ask(order, {})[1])
                except _Died as death:
                    deaths += 1
                    if deaths == ATTEMPTS:
                        raise SimulatorError(f"{death}; so did {deaths - 1} before it") from None
                    self._replace(death)
                else:
                    self._note(numbers, seen)
                    return seen

    def step(self, numbers: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        with self._lock:
            there = [k for k, n in enumerate(numbers) if self._seen[n][0] == self.pid]
            errors, came = dict[int, str](), Arrays()
            if there:
                order = {"do": "step", "worlds": [numbers[k] for k in there]}
                try:
                    answer, came = self._ask(order, {"action": actions[there]})
                    errors = {there[row]: error for row, error in answer["errors"]}
                except _Died as death:
                    self._replace(death)
                    there = []
            if came:
                self._note([numbers[k] for k in there], seen_in(came))
            if len(there) == len(numbers):
                return came, errors
            return self._with_lost(numbers, there, came, errors)

    def spaces(self) -> dict[str, Any]:
        with self._lock:
            try:
                return self._ask({"do": "spaces"}, {})[0]
            except _Died as death:
                raise SimulatorError(str(death)) from None

    def close(self) -> None:
        """End it; it has nothing to save."""
        self._closed = True
        self._end()

    def _with_lost(
        self, numbers: Sequence[int], there: list[int], came: Arrays, errors: dict[int, str]
    ) -> tuple[Arrays, dict[int, str]]:
        """What came of some rows; the episodes of the others ended with their process."""
        reward, ends = np.zeros(len(numbers)), np.zeros((len(ENDS), len(numbers)), np.uint8)
        ends[0] = 1
        if came:
            reward[there] = came["reward"]
            ends[:, there] = [came[name] for name in ENDS]
        lost = {k: self._why for k in range(len(numbers)) if k not in there}
        seen = stacked([self._seen[number][1] for number in numbers])
        columns: Arrays = {"reward": reward, **dict(zip(ENDS, ends, strict=True)), **among(seen)}
        return columns, {**errors, **lost}

    def _note(self, numbers: Sequence[int], seen: Arrays) -> None:
        for row, number in enumerate(numbers):
            self._seen[number] = (self.pid, {name: array[row] for name, array in seen.items()})

    def _replace(self, death: _Died) -> None:
        """Start another process in the place of a dead one."""
        self._why = str(death)
        if self._closed:
            raise SimulatorError(self._why)
        log.warning("%s: its episodes are lost, and another one takes its place", death)
        self._link.close()
        self._end()
        self._start()

    def _ask(self, order: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        try:
            self._link.put(order, arrays)
            answer, columns = self._link.get()
        except TimeoutError:
            raise _Died(
                f"simulator process {self.pid} answered nothing for {self._timeout_s:g} s"
            ) from None
        except (EOFError, OSError):
            raise self._death() from None
        if "refused" in answer:
            raise InputError(str(answer["refused"]))
        if "failed" in answer:
            raise SimulatorError(f"simulator process {self.pid}: {answer['failed']}")
        return answer, columns

    def _death(self) -> _Died:
        """Why nothing comes any more."""
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return _Died(f"simulator process {self.pid} closed its connection")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return _Died(f"simulator process {self.pid} {how} while it was needed")


class _Died(Exception):
    """A process will answer nothing more; the text says why."""


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
