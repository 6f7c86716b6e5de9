"""What simulators show: arrays by name.

Loaded by :mod:`rlinf.envs.vector_env`, also in its process: the standard library and numpy alone.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
Images = dict[str, Sequence[int]]
"""Cameras by name, with the height and width of their pictures."""
STATE, INSTRUCTION, OBSERVATION_PREFIX = "state", "instruction", "seen."
INSTRUCTION_BYTES = 256
STEP_FLAGS = ("terminated", "truncated", "success", "solved")
LOST_EPISODE_FLAGS = (True, False, False, False)
"""Of :data:`ENDS`, where the episode was lost."""
EMPTY_STATE = np.zeros(0, np.uint8)
"""In the place of a state, where the episode was lost."""
FLOAT32_MAX = np.finfo(np.float32).max
NO_EXPERT_MESSAGE = "task.demonstrations: this simulator has no expert of its own; set it to 0"
NO_STATE_MESSAGE = (
    "task.carry_over_episodes: this simulator does not say what state it is in; set it to false"
)


class ObservationSelection(NamedTuple):
    """Which observations of a world are used."""

    images: Images = {}
    """Pictures that the policy, or a film, is made of."""
    ignored: Sequence[str] = ()
    """Observations that the user leaves out."""
    video_only: Sequence[str] = ()
    """Pictures that other worlds of the run film."""


STATE_ONLY = ObservationSelection()
"""The state alone."""


class InvalidEnvConfig(Exception):
    """A configuration that can never work; the text says why."""


class ProcessRestartRequired(Exception):
    """A simulation failed that is made once in a process, which another one is to take the place
    of; the text says how it failed."""


def to_arrays(observation: Any) -> Arrays:
    """An observation as arrays by name, copied: a world may show all in one buffer."""
    if not isinstance(observation, dict):
        return {STATE: np.array(observation)}
    return {name: np.array(array) for name, array in observation.items()}


class ObservationReader:
    """How one looks at a world: found out when an episode begins, used after every step."""

    def __init__(self, world: Any) -> None:
        self._pictures: Any = getattr(world, "pictures", None)
        self._asking = _asking(world)

    def read(self, observation: Any) -> Arrays:
        """What the world shows now, as arrays by name, with its pictures and its instruction."""
        found = to_arrays(observation)
        if self._pictures is not None:
            found.update(self._pictures())
        if self._asking is not None:
            found[INSTRUCTION] = encode_instruction(str(self._asking.instruction))
        return found


def _asking(world: Any) -> Any:
    """The world, or what it wraps, where that has an ``instruction``."""
    wrapped = (world, getattr(world, "unwrapped", None))
    return next((w for w in wrapped if getattr(w, "instruction", None) is not None), None)


def read_observation(world: Any, observation: Any) -> Arrays:
    """What a world shows now; see :class:`ObservationReader`."""
    return ObservationReader(world).read(observation)


def get_instruction(world: Any) -> str | None:
    """What a world asks for in words, where its ``instruction`` says so."""
    asking = _asking(world)
    return None if asking is None else str(asking.instruction)


@functools.lru_cache(1024)
def encode_instruction(text: str) -> np.ndarray:
    """An instruction as :mod:`rlinf.data.episodes` has it, uint8 ``[256]``.

    Raises:
        Refused: it is longer.
    """
    data = text.encode()
    if len(data) > INSTRUCTION_BYTES:
        raise InvalidEnvConfig(
            f"task.instruction: {text[:40]!r}... has {len(data)} bytes of UTF-8, and "
            f"{INSTRUCTION_BYTES} have room; give a shorter one"
        )
    return np.frombuffer(data.ljust(INSTRUCTION_BYTES, b"\0"), np.uint8)


def stack_observations(rows: Sequence[Arrays]) -> Arrays:
    """Observations of several worlds, ``[n, ...]`` each."""
    return {name: np.stack([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def prefix_observations(seen: Arrays) -> Arrays:
    """Observations as columns that stand among others."""
    return {OBSERVATION_PREFIX + name: array for name, array in seen.items()}


def unprefix_observations(columns: Arrays) -> Arrays:
    """The observations that stand among others."""
    return {
        name[len(OBSERVATION_PREFIX) :]: array
        for name, array in columns.items()
        if name.startswith(OBSERVATION_PREFIX)
    }


def find_non_finite(shown: Arrays) -> dict[int, str]:
    """Rows in which a number is not finite in single precision, as policies take them, and what
    it is."""
    found = {}
    for name, column in shown.items():
        if column.dtype.kind == "f":
            largest = abs(column).reshape(len(column), -1).max(1, initial=0)
            for row in np.flatnonzero(~(largest <= FLOAT32_MAX)).tolist():
                found[row] = f"observation {name!r} is not finite"
    return found


def pack_arrays(arrays: Arrays) -> np.ndarray:
    """Arrays by name as one, uint8 ``[n]``; equal ones give equal bytes."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return np.frombuffer(file.getvalue(), np.uint8)


def unpack_arrays(array: np.ndarray) -> Arrays:
    """What :func:`joined` made one of; nothing is unpickled."""
    with np.load(io.BytesIO(array.tobytes()), allow_pickle=False) as found:
        return dict(found)


def check_all_used(seen: Arrays) -> None:
    """Raise Refused for an observation that is no state, instruction or picture: its space does not
    have it, so nothing says how it would become part of the state."""
    for name, array in seen.items():
        picture = array.dtype == np.uint8 and array.ndim >= 3
        if name not in (STATE, INSTRUCTION) and not picture:
            raise InvalidEnvConfig(
                f"task.simulator: the simulator shows {name!r}, {array.dtype} {list(array.shape)}, "
                "which its observation_space does not have; declare it there, or leave it out"
            )


def check_cameras(images: Images, cameras: Collection[str]) -> None:
    """Raise Refused for a picture of a camera that is not there."""
    for name in images:
        if name not in cameras:
            there = ", ".join(cameras) or "none"
            raise InvalidEnvConfig(f"task.images.{name}: no such camera; there are {there}")
