"""A simulator process: steps worlds for a stage, under an interpreter of its own.

This file is run by its path (``python -c ... simulator.py FD MAKER JSON``) where nothing else of
the package may be installed, by any Python from 3.9 on: it imports the standard library, numpy, and
what its maker imports. A message is a JSON header and raw arrays; nothing is unpickled.

A *world* has the methods of a Gymnasium environment: ``reset(seed=)``, ``step(action)``,
``close()``, ``observation_space`` and ``action_space`` (:mod:`rlinf.envs.worlds`). What it shows is
an array, or arrays by name, the first of which is called ``state`` where it is alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import math
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LEFT_TO_THE_STAGE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
Arrays = dict[str, np.ndarray]
STATE, SEEN = "state", "seen."
ENDS = ("terminated", "truncated", "success")
log = logging.getLogger("rlinf.envs.simulator")


class Refused(Exception):
    """A configuration that can never work; the text says why."""


class Link:
    """One end of a pair of connected sockets: a dictionary and arrays, each way."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def put(self, message: dict[str, Any], arrays: Arrays) -> None:
        """Raises OSError when the other side is gone."""
        ready = [(name, np.ascontiguousarray(array)) for name, array in arrays.items()]
        described = [[name, array.dtype.str, array.shape] for name, array in ready]
        header = json.dumps([message, described]).encode()
        self._socket.sendall(struct.pack("<Q", len(header)) + header)
        for _, array in ready:
            if array.size:
                self._socket.sendall(array.reshape(-1).view(np.uint8).data)

    def get(self) -> tuple[dict[str, Any], Arrays]:
        """Raises EOFError or OSError when the other side is gone."""
        (size,) = struct.unpack("<Q", self._read(8))
        message, described = json.loads(bytes(self._read(size)))
        arrays = {}
        for name, kind, shape in described:
            dtype = np.dtype(kind)
            block = self._read(math.prod(shape) * dtype.itemsize)
            arrays[name] = np.frombuffer(block, np.uint8).view(dtype).reshape(shape)
        return message, arrays

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        block = bytearray(size)
        view, done = memoryview(block), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise EOFError("the other side is gone")
            done += count
        return block


class Worlds:
    """Worlds of one kind by number. They are kept: a seeded reset leaves nothing of the past."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._worlds: list[Any] = []
        self._seen: dict[int, Arrays] = {}

    def reset(self, numbers: Sequence[int], seeds: Sequence[int]) -> Arrays:
        """Begin episodes; observations by name, ``[n, ...]``."""
        while len(self._worlds) <= max(numbers, default=-1):
            self._worlds.append(made(self._make))
        for number, seed in zip(numbers, seeds):  # noqa: B905 - Python 3.9
            self._seen[number] = shown(self._worlds[number].reset(seed=seed)[0])
        return stacked([self._seen[number] for number in numbers])

    def step(self, numbers: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        """Act. Vectors are clipped to the space, choices counted from its start.

        A world that raises has ended its episode where it was, and is made anew.

        Returns:
            Observations ``[n, ...]`` under ``seen.`` and their name, ``reward`` float64 ``[n]``,
            ``terminated``, ``truncated`` and ``success`` (:func:`succeeded`) uint8 ``[n]``; and, by
            row, the tracebacks of those that raised.
        """
        reward = np.zeros(len(numbers))
        ends = np.zeros((3, len(numbers)), np.uint8)
        errors = {}
        for row, (number, action) in enumerate(zip(numbers, actions)):  # noqa: B905
            world = self._worlds[number]
            try:
                came = world.step(performed(world.action_space, action))
            except Exception:  # a simulator may raise anything
                # The end of a traceback says most.
                errors[row], ends[0, row] = traceback.format_exc()[-100_000:], True
                with contextlib.suppress(Exception):
                    world.close()
                self._worlds[number] = made(self._make)
                continue
            self._seen[number] = shown(came[0])
            reward[row] = float(came[1])
            ends[:, row] = bool(came[2]), bool(came[3]), succeeded(came[4])
        columns: Arrays = {"reward": reward, **dict(zip(ENDS, ends))}  # noqa: B905 - Python 3.9
        return {**columns, **among(stacked([self._seen[number] for number in numbers]))}, errors

    def spaces(self) -> dict[str, Any]:
        """What a world shows and takes, as plain values; see :func:`described`."""
        world = made(self._make)
        try:
            return {
                "observation": described(world.observation_space),
                "action": described(world.action_space),
            }
        finally:
            world.close()

    def close(self) -> None:
        for world in self._worlds:
            world.close()
        self._worlds = []


def shown(observation: Any) -> Arrays:
    """An observation as arrays by name."""
    if not isinstance(observation, dict):
        return {STATE: np.asarray(observation)}
    return {name: np.asarray(array) for name, array in observation.items()}


def stacked(rows: Sequence[Arrays]) -> Arrays:
    """Observations of several worlds, ``[n, ...]`` each."""
    return {name: np.stack([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def among(seen: Arrays) -> Arrays:
    """Observations as columns that stand among others."""
    return {SEEN + name: array for name, array in seen.items()}


def seen_in(columns: Arrays) -> Arrays:
    """The observations that stand among others."""
    return {name[len(SEEN) :]: array for name, array in columns.items() if name.startswith(SEEN)}


def succeeded(info: Any) -> bool:
    """Whether a step's ``info`` says that the task is solved: ``success``, or ``is_success``."""
    return bool(info.get("success", info.get("is_success", False)))


def performed(space: Any, action: Any) -> Any:
    """An action as a world takes it."""
    if hasattr(space, "low"):
        return np.clip(action, space.low, space.high)
    return int(action) + int(getattr(space, "start", 0))


def described(space: Any) -> dict[str, Any]:
    """A space: ``kind`` (box, discrete, dict of others, or its class), its size, and as text."""
    if isinstance(getattr(space, "spaces", None), dict):
        parts = {name: described(part) for name, part in space.spaces.items()}
        return {"kind": "dict", "parts": parts, "text": str(space)}
    if hasattr(space, "low"):
        kind = np.dtype(space.dtype).name
        return {"kind": "box", "shape": list(space.shape), "dtype": kind, "text": str(space)}
    if hasattr(space, "n") and not getattr(space, "shape", ()):
        return {"kind": "discrete", "size": int(space.n), "text": str(space)}
    return {"kind": type(space).__name__, "text": str(space)}


def maker(target: str) -> Callable[..., Any]:
    """What ``FILE:attribute`` or ``module:attribute`` names."""
    module, _, name = target.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("world", module)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return getattr(found, name)


def made(make: Callable[[], Any]) -> Any:
    """A world; raises Refused where its maker says that it can never be."""
    quiet_mujoco()
    try:
        return make()
    except (ImportError, ValueError) as error:
        raise Refused(f"task.id: {error} ({sys.executable})") from None


@functools.lru_cache(None)
def quiet_mujoco() -> None:
    """Have MuJoCo's warnings logged, each once: it prints them and appends to a MUJOCO_LOG.TXT in
    the working directory, for every environment made."""
    try:
        mujoco = importlib.import_module("mujoco")
    except ImportError:
        return
    warn = functools.partial(log.warning, "MuJoCo: %s")
    mujoco.set_mju_user_warning(functools.lru_cache(None)(warn))


def work(link: Link, worlds: Worlds) -> None:
    """Obey until the stage is gone."""
    while True:
        order, arrays = link.get()
        if order["do"] == "step":
            came, errors = worlds.step(order["worlds"], arrays["action"])
            link.put({"errors": list(errors.items())}, came)
        elif order["do"] == "reset":
            link.put({}, among(worlds.reset(order["worlds"], order["seeds"])))
        else:
            link.put(worlds.spaces(), {})


def main(end: int, target: str, values: str) -> None:
    """``MAKER`` is as for :func:`maker`."""
    for number in LEFT_TO_THE_STAGE:
        # Sent to a whole job: the stage may still want to finish what it does.
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=end))
    try:
        work(link, Worlds(functools.partial(maker(target), **json.loads(values))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Refused as error:
        said = {"refused": str(error)}
    except Exception:
        # The end of a traceback says most.
        said = {"failed": traceback.format_exc()[-100_000:]}
    try:
        link.put({**said, "pid": os.getpid()}, {})
    except OSError:
        pass


if __name__ == "__main__":
    main(int(sys.argv[2]), *sys.argv[3:])
