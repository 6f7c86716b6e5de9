"""Observations of simulators, as arrays by name.

The simulator process (:mod:`rlinf.envs.vector_env`) loads this module too, so it imports only the
standard library and numpy.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
ImageSizes = dict[str, Sequence[int]]
"""Cameras by name, with the height and width of their images."""
STATE, INSTRUCTION, OBSERVATION_PREFIX = "state", "instruction", "seen."
"""Names of two observations, and the prefix of observations among the columns of a step."""
INSTRUCTION_BYTES = 256
"""Maximum size of an instruction in UTF-8."""
STEP_FLAGS = ("terminated", "truncated", "success", "solved")
"""Columns of flags; see :meth:`rlinf.envs.vector_env.SyncVectorEnv.step`."""
LOST_EPISODE_FLAGS = (True, False, False, False)
"""Values of :data:`STEP_FLAGS` for the last step of a lost episode."""
EMPTY_STATE = np.zeros(0, np.uint8)
"""The saved state of a lost episode."""
FLOAT32_MAX = np.finfo(np.float32).max
NO_EXPERT_MESSAGE = "task.demonstrations: this simulator has no expert of its own; set it to 0"
NO_STATE_MESSAGE = "task.carry_over_episodes: this simulator cannot save its state; set it to false"


class ObservationSelection(NamedTuple):
    """The observations of a simulator that are used."""

    images: ImageSizes = {}
    """Images for the policy or for a video."""
    ignored: Sequence[str] = ()
    """Observations that the user leaves out."""
    video_only: Sequence[str] = ()
    """Images that are left out here, because other environments record them for videos."""


STATE_ONLY = ObservationSelection()
"""Selects only the state."""


class InvalidEnvConfig(Exception):
    """A configuration is invalid; the message says why."""


class ProcessRestartRequired(Exception):
    """A simulation failed that a process can create only once, so a new process must replace this
    one. The message has the simulation's error."""


def to_arrays(observation: Any) -> Arrays:
    """Return an observation as arrays by name. They are copies, because a simulator may reuse its
    buffers."""
    if not isinstance(observation, dict):
        return {STATE: np.array(observation)}
    return {name: np.array(array) for name, array in observation.items()}


class ObservationReader:
    """Reads the observations of one environment; created when an episode begins, used after every
    step."""

    def __init__(self, env: Any) -> None:
        self._render_cameras: Any = getattr(env, "render_cameras", None)
        self._instruction_env = _instruction_env(env)

    def read(self, observation: Any) -> Arrays:
        """Return the current observation as arrays by name, with images and the instruction."""
        arrays = to_arrays(observation)
        if self._render_cameras is not None:
            arrays.update(self._render_cameras())
        if self._instruction_env is not None:
            arrays[INSTRUCTION] = encode_instruction(str(self._instruction_env.instruction))
        return arrays


def _instruction_env(env: Any) -> Any:
    """Return the environment, or the one it wraps, that has an ``instruction``."""
    wrapped = (env, getattr(env, "unwrapped", None))
    return next((w for w in wrapped if getattr(w, "instruction", None) is not None), None)


def read_observation(env: Any, observation: Any) -> Arrays:
    """Return the current observation of an environment; see :class:`ObservationReader`."""
    return ObservationReader(env).read(observation)


def get_instruction(env: Any) -> str | None:
    """Return the environment's instruction in words; None: it has none."""
    instruction_env = _instruction_env(env)
    return None if instruction_env is None else str(instruction_env.instruction)


@functools.lru_cache(1024)
def encode_instruction(text: str) -> np.ndarray:
    """Return an instruction in UTF-8, padded with zeros, uint8 ``[256]``.

    Raises:
        InvalidEnvConfig: the instruction is too long.
    """
    data = text.encode()
    if len(data) > INSTRUCTION_BYTES:
        raise InvalidEnvConfig(
            f"task.instruction: {text[:40]!r}... has {len(data)} bytes of UTF-8, of "
            f"at most {INSTRUCTION_BYTES}; use a shorter one"
        )
    return np.frombuffer(data.ljust(INSTRUCTION_BYTES, b"\0"), np.uint8)


def stack_observations(rows: Sequence[Arrays]) -> Arrays:
    """Stack the observations of several environments, ``[n, ...]`` each."""
    return {name: np.stack([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def prefix_observations(observations: Arrays) -> Arrays:
    """Return observations with the prefix that distinguishes them from other columns."""
    return {OBSERVATION_PREFIX + name: array for name, array in observations.items()}


def unprefix_observations(columns: Arrays) -> Arrays:
    """Return the observation columns without their prefix."""
    return {
        name[len(OBSERVATION_PREFIX) :]: array
        for name, array in columns.items()
        if name.startswith(OBSERVATION_PREFIX)
    }


def find_non_finite(observations: Arrays) -> dict[int, str]:
    """Return a message for each row with a value that is not finite in float32, the type that
    policies read."""
    errors = {}
    for name, column in observations.items():
        if column.dtype.kind == "f":
            largest = abs(column).reshape(len(column), -1).max(1, initial=0)
            for row in np.flatnonzero(~(largest <= FLOAT32_MAX)).tolist():
                errors[row] = f"observation {name!r} is not finite"
    return errors


def pack_arrays(arrays: Arrays) -> np.ndarray:
    """Pack arrays by name into one array, uint8 ``[n]``; equal arrays give equal bytes."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return np.frombuffer(file.getvalue(), np.uint8)


def unpack_arrays(array: np.ndarray) -> Arrays:
    """Return the arrays that :func:`pack_arrays` packed; nothing is unpickled."""
    with np.load(io.BytesIO(array.tobytes()), allow_pickle=False) as archive:
        return dict(archive)


def check_all_used(observations: Arrays) -> None:
    """Raise InvalidEnvConfig for an observation that is no state, instruction or image. The
    observation space does not declare it, so it has no defined position in the state."""
    for name, array in observations.items():
        is_image = array.dtype == np.uint8 and array.ndim >= 3
        if name not in (STATE, INSTRUCTION) and not is_image:
            raise InvalidEnvConfig(
                f"task.simulator: the simulator returns {name!r}, {array.dtype} "
                f"{list(array.shape)}, which its observation_space does not have; declare it "
                "there, or leave it out"
            )


def check_cameras(images: ImageSizes, cameras: Collection[str]) -> None:
    """Raise InvalidEnvConfig if images are configured for a camera that does not exist."""
    for name in images:
        if name not in cameras:
            names = ", ".join(cameras) or "none"
            raise InvalidEnvConfig(f"task.images.{name}: no such camera; there are {names}")
