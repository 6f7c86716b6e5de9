"""A simulator process: steps worlds for a stage, under an interpreter of its own.

This file is run by its path (see :func:`main`) where nothing else of the package may be installed,
by any Python from 3.9 on: it imports the standard library, numpy, and what its maker imports. A
message is a JSON header and raw arrays; nothing is unpickled.

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
Images = dict[str, Sequence[int]]
"""Cameras by name, with the height and width of their pictures."""
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

    def __init__(self, make: Callable[[], Any], images: Images | None = None) -> None:
        """``images``: what is rendered beside what the worlds show."""
        self._make = functools.partial(made, make, images or {})
        self._worlds: list[Any] = []
        self._seen: dict[int, Arrays] = {}

    def reset(self, numbers: Sequence[int], seeds: Sequence[int]) -> Arrays:
        """Begin episodes; observations by name, ``[n, ...]``."""
        while len(self._worlds) <= max(numbers, default=-1):
            self._worlds.append(self._make())
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
                self._worlds[number] = self._make()
                continue
            self._seen[number] = shown(came[0])
            reward[row] = float(came[1])
            ends[:, row] = bool(came[2]), bool(came[3]), succeeded(came[4])
        columns: Arrays = {"reward": reward, **dict(zip(ENDS, ends))}  # noqa: B905 - Python 3.9
        return {**columns, **among(stacked([self._seen[number] for number in numbers]))}, errors

    def spaces(self) -> dict[str, Any]:
        """What a world shows and takes, as plain values; see :func:`described`."""
        world = self._make()
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


def made(make: Callable[[], Any], images: Images) -> Any:
    """A world; raises Refused where its maker says that it can never be."""
    quiet_mujoco()
    try:
        world = make()
    except (ImportError, ValueError) as error:
        raise Refused(f"task.id: {error} ({sys.executable})") from None
    return Pictured(world, images) if images else world


class Pictured:
    """A world with pictures beside its state.

    They are what its ``picture(camera, height, width)`` gives, where it has that, and of MuJoCo's
    worlds what :class:`Cameras` do.
    """

    def __init__(self, world: Any, images: Images) -> None:
        self._world, self._images = world, images
        self._picture: Any = getattr(world, "picture", None)
        bare = getattr(world, "unwrapped", world)
        if self._picture is None:
            if not (hasattr(bare, "model") and hasattr(bare, "data")):
                raise Refused("task.images: this simulator shows no pictures; leave them out")
            self._picture = Cameras(bare.model, bare.data, images)
        self.action_space = world.action_space
        self.observation_space = world.observation_space

    def reset(self, seed: int) -> Any:
        seen, info = self._world.reset(seed=seed)
        return self._with(seen), info

    def step(self, action: Any) -> Any:
        seen, *came = self._world.step(action)
        return (self._with(seen), *came)

    def close(self) -> None:
        if isinstance(self._picture, Cameras):
            self._picture.close()
        self._world.close()

    def _with(self, seen: Any) -> Arrays:
        pictures = {name: self._picture(name, *size) for name, size in self._images.items()}
        return {**shown(seen), **pictures}


class Cameras:
    """Pictures of a MuJoCo model, uint8 ``[H, W, 3]``; ``free`` is the camera of no name.

    Shadows, reflections and multisampling are off: in software they take most of the time.
    """

    def __init__(self, model: Any, data: Any, images: Images) -> None:
        mujoco = importlib.import_module("mujoco")
        known = [model.camera(number).name for number in range(model.ncam)]
        for name in images:
            if name != "free" and name not in known:
                cameras = ", ".join([*known, "free"])
                raise Refused(f"task.images.{name}: no such camera; there are {cameras}")
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        self._data, self._renderers = data, {}
        for size in {tuple(size) for size in images.values()}:
            # A model says how large a picture may be.
            model.vis.global_.offheight = max(model.vis.global_.offheight, size[0])
            model.vis.global_.offwidth = max(model.vis.global_.offwidth, size[1])
        try:
            for size in {tuple(size) for size in images.values()}:
                renderer = self._renderers[size] = mujoco.Renderer(model, *size)
                for flag in ("mjRND_SHADOW", "mjRND_REFLECTION"):
                    renderer.scene.flags[getattr(mujoco.mjtRndFlag, flag)] = 0
        except Exception as error:  # whatever a graphics library brings about
            raise Refused(
                f"task.renderer: {os.environ.get('MUJOCO_GL')} does not work here ({error}); "
                "egl needs Debian's libegl1 and libgl1-mesa-dri, osmesa libosmesa6"
            ) from None

    def __call__(self, name: str, height: int, width: int) -> np.ndarray:
        renderer = self._renderers[height, width]
        renderer.update_scene(self._data, camera=-1 if name == "free" else name)
        return renderer.render()

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()


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


def main(end: int, target: str, values: str, images: str) -> None:
    """Serve a stage.

    Args:
        end: the file descriptor of this end of a pair of sockets.
        target: as for :func:`maker`.
        values, images: what it is called with, and what is rendered, as JSON.
    """
    for number in LEFT_TO_THE_STAGE:
        # Sent to a whole job: the stage may still want to finish what it does.
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=end))
    try:
        make = functools.partial(maker(target), **json.loads(values))
        work(link, Worlds(make, json.loads(images)))
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
