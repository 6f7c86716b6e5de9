"""Simulators in processes of their own, so that they are stepped beside the policy.

Each process runs the time loops of a share of the samples and has a pair of connected sockets with
the stage: requests and trajectories one way, replies the other, each a block of
:mod:`rlinf.channels.wire` and one byte that says what it is. A socket wakes the one who waits at
once, and ends when either side dies: the stage then raises, a simulator process then exits.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlinf import machine
from rlinf.channels.base import Channel, ChannelClosed
from rlinf.channels.wire import decode, encode
from rlinf.data.record import Identity, Record
from rlinf.envs.base import Episodes
from rlinf.envs.overlap import Part, overlapped
from rlinf.errors import EXIT_BAD_INPUT, InputError, RlinfError

ORDER, REQUEST, REPLY, TRAJECTORY, DONE, FAILURE = range(6)
LEFT_TO_THE_STAGE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PATIENCE_S = 2.0


class Simulator(Protocol):
    """An environment whose work can be divided."""

    config: Any

    def parts(self, episodes: Episodes, samples: np.ndarray) -> list[Part]:
        """Time loops that together collect ``samples``."""


class SimulatorError(RlinfError):
    """A simulator failed in its process, or the process died; the next attempt starts new ones."""


class Processes:
    """Resident simulator processes; they start with the first episodes."""

    def __init__(self, simulator: Simulator, count: int) -> None:
        kind = type(simulator)
        self._command = [
            f"{kind.__module__}:{kind.__qualname__}",
            simulator.config.model_dump_json(),
        ]
        self._count = count
        self._workers: list[_Worker] = []

    def collect(self, episodes: Episodes, observations: Channel, actions: Channel) -> list[Record]:
        """All trajectories, in the order of their samples; closes ``observations``.

        Raises:
            SimulatorError: a process died, or its simulator raised; it holds the traceback.
            InputError: a simulator refused its configuration.
            ChannelClosed: the policy answers no more.
        """
        samples = episodes.samples()
        shares = np.array_split(samples, min(self._count, len(samples)) or 1)
        try:
            while len(self._workers) < len(shares):
                self._workers.append(_Worker(self._command))
            pairs = zip(self._workers, shares, strict=False)
            return _Run(episodes, list(pairs), observations, actions)()
        except BaseException:
            # What they were about to say belongs to this attempt, not to the next one.
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [worker.pid for worker in self._workers]


class _Run:
    """One collection: a thread for each process hands on its requests, the caller the replies."""

    def __init__(
        self,
        episodes: Episodes,
        shares: Sequence[tuple[_Worker, np.ndarray]],
        observations: Channel,
        actions: Channel,
    ) -> None:
        self._episodes, self._shares = episodes, shares
        self._observations, self._actions = observations, actions
        self._owner = {int(n): worker for worker, share in shares for n in share}
        self._found: list[list[Record]] = [[] for _ in shares]
        self._failures: list[BaseException] = []
        self._open = len(shares)
        self._lock = threading.Lock()

    def __call__(self) -> list[Record]:
        relays = [
            threading.Thread(target=self._relay, args=(number,), name="simulate", daemon=True)
            for number in range(len(self._shares))
        ]
        for relay in relays:
            relay.start()
        try:
            with suppress(ChannelClosed):
                while True:
                    reply = self._actions.get()
                    # The relay of a process that is gone says so.
                    with suppress(OSError):
                        self._owner[int(reply.steps["sample"][0])].link.put(REPLY, reply)
            if self._open and not self._failures:
                raise ChannelClosed("the policy answers no more")
        finally:
            if self._open:
                for worker, _ in self._shares:
                    worker.end()
            for relay in relays:
                relay.join()
        if self._failures:
            raise self._failures[0]
        return [record for records in self._found for record in records]

    def _relay(self, number: int) -> None:
        worker, samples = self._shares[number]
        values = json.dumps(asdict(replace(self._episodes, starts=())))
        try:
            order = Record(
                Identity(self._episodes.iteration, number),
                context={"samples": samples},
                info={"episodes": values},
            )
            worker.link.put(ORDER, order)
            while (told := worker.link.get())[0] != DONE:
                kind, record = told
                if kind == FAILURE:
                    known = record.info["exit_code"] == EXIT_BAD_INPUT
                    raise (InputError if known else SimulatorError)(str(record.info["error"]))
                if kind == REQUEST:
                    self._observations.put(record, weight=len(record))
                else:
                    self._found[number].append(record)
            with self._lock:
                self._open -= 1
                last = not self._open
            if last:
                self._observations.close()
        except BaseException as error:
            gone = isinstance(error, EOFError | OSError)
            self._failures.append(worker.death() if gone else error)
            # The policy ends, its replies end, and the caller of this run looks here.
            self._observations.close()


class _Link:
    """One end: records with the byte that says what they are."""

    def __init__(self, end: int) -> None:
        self._connection = Connection(end)

    def put(self, kind: int, record: Record) -> None:
        block = encode(record).to_bytes()
        block.append(kind)
        self._connection.send_bytes(block)

    def get(self) -> tuple[int, Record]:
        """Raises EOFError or OSError when the other side is gone."""
        block = memoryview(self._connection.recv_bytes())
        return block[-1], decode(block[:-1])


class _Worker:
    """A process, seen from the stage."""

    def __init__(self, command: Sequence[str]) -> None:
        mine, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno()), *command],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **machine.environment(),
                    # A task may come from a module that only this process's path finds.
                    "PYTHONPATH": os.pathsep.join(part or str(Path.cwd()) for part in sys.path),
                },
            )
        self.link = _Link(mine.detach())
        self.pid = self._process.pid
        # Also when nobody closes the environment: at the end of the stage's process.
        self.end = weakref.finalize(self, _end, self._process)

    def death(self) -> SimulatorError:
        """Why nothing comes any more."""
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return SimulatorError(f"simulator process {self.pid} closed its connection")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return SimulatorError(f"simulator process {self.pid} {how} while it was needed")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It has nothing to save."""
    process.kill()
    process.wait()


def work(link: _Link, simulator: Simulator) -> None:
    """Obey orders until the stage is gone."""

    def reply() -> Record:
        return link.get()[1]

    def request(record: Record) -> None:
        link.put(REQUEST, record)

    while True:
        _, order = link.get()
        episodes = Episodes(**json.loads(str(order.info["episodes"])))
        parts = simulator.parts(episodes, order.context["samples"])
        for record in overlapped(parts, request, reply):
            link.put(TRAJECTORY, record)
        link.put(DONE, Record(order.identity))


def main(end: int, target: str, values: str) -> None:
    """``python -m rlinf.envs.processes FD MODULE:CLASS JSON``."""
    for number in LEFT_TO_THE_STAGE:
        # Sent to a whole job: the stage may still want to finish what it does.
        signal.signal(number, signal.SIG_IGN)
    link = _Link(end)
    try:
        module, _, name = target.partition(":")
        kind: Callable[..., Any] = getattr(importlib.import_module(module), name)
        work(link, kind(kind.Config.model_validate_json(values), None))  # type: ignore[attr-defined]
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        code = error.exit_code if isinstance(error, RlinfError) else 1
        # The end of a traceback says most, and a header holds so much text.
        text = str(error) if code == EXIT_BAD_INPUT else traceback.format_exc()[-100_000:]
        said = f"simulator process {os.getpid()}: {text}"
        with suppress(OSError):
            link.put(FAILURE, Record(Identity(0, 0), info={"error": said, "exit_code": code}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
