"""Environments that one world steps together (``BATCHED`` in :mod:`rlinf.envs.simulators`).

Loaded by :mod:`rlinf.envs.vector_env`, also in its process: the standard library and numpy alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .factory import create_env
from .observations import (
    INSTRUCTION,
    LOST_EPISODE_FLAGS,
    NO_EXPERT_MESSAGE,
    NO_STATE_MESSAGE,
    STATE,
    STATE_ONLY,
    STEP_FLAGS,
    Arrays,
    InvalidEnvConfig,
    ObservationSelection,
    ProcessRestartRequired,
    check_all_used,
    check_cameras,
    encode_instruction,
    find_non_finite,
    get_instruction,
    prefix_observations,
    to_arrays,
)
from .simulator_errors import format_error
from .spaces import describe_spaces, to_env_actions


class BatchedVectorEnv:
    """Environments that one world steps together, with the methods of :class:`SyncVectorEnv`.

    It is made for as many as the first episodes are, anew where later ones are more. Those that are
    not asked for get an action of zeros. One that raises is not made again in this process, which
    may have room for one simulation alone: the next reset raises Spent.
    """

    tells: Sequence[str] = ()

    def __init__(
        self,
        make: Callable[..., Any],
        shown: ObservationSelection = STATE_ONLY,
        own: Sequence[str] = (),
    ) -> None:
        self._make = functools.partial(make, images=shown.images)
        self._images, self._used, self._own = shown.images, shown, own
        self._world: Any = None
        self._count, self._seen = 0, Arrays()
        self.min_envs = 0
        """Environments that it is made for at least: as many as one before it had."""
        self._failed = ""
        self._unbegun: dict[int, str] = {}
        """Why episodes could not begin, by the numbers of their environments."""

    def reset(
        self,
        numbers: Sequence[int],
        seeds: Sequence[int],
        starts: Sequence[int] | None = None,
        turns: Sequence[int] | None = None,
    ) -> Arrays:
        """As of :class:`SyncVectorEnv`, less ``starts`` and ``turns``: an environment that shows what is
        not finite is reset once more, and its episode lost where it then does too.

        Raises:
            Spent: the world has raised, now or before.
        """
        if self._failed:
            raise ProcessRestartRequired(self._failed)
        wanted = max(*numbers, self.min_envs - 1, -1) + 1
        if self._count and wanted > self._count and min(numbers):
            raise InvalidEnvConfig(
                "task.double_buffer: this simulator steps all environments together; set 1"
            )
        if self._world is None or wanted > self._count:
            self.close()
            wanted = max(wanted, self._count)
            self._world = self._world_of(wanted)
            self._count = self._world.count
        seen = self._begun(numbers, seeds)
        if bad := list(find_non_finite(seen)):
            again = self._begun([numbers[row] for row in bad], [seeds[row] for row in bad])
            for name, column in again.items():
                seen[name][bad] = column
        for row, error in find_non_finite(seen).items():
            self._unbegun[numbers[row]] = f"{error} after two resets"
            for column in seen.values():
                column[row] = 0
        check_all_used(seen)
        check_cameras(self._images, sorted(seen.keys() - {STATE, INSTRUCTION}))
        for name, size in self._images.items():
            if seen[name].shape[1:] != (*size, 3):
                raise InvalidEnvConfig(
                    f"task.images.{name}: its pictures are {list(seen[name].shape[1:3])}"
                )
        for name, column in seen.items():
            if name not in self._seen or len(self._seen[name]) < self._count:
                self._seen[name] = np.zeros((self._count, *column.shape[1:]), column.dtype)
            self._seen[name][list(numbers)] = column
        return seen

    def step(self, numbers: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        """As of :class:`SyncVectorEnv`; where the world raises, the episodes of all have ended, and where
        it shows of one what is not finite, or that one could not begin, that one's."""
        rows, space = list(numbers), self._world.action_space
        if actions.ndim > 1 + len(getattr(space, "shape", None) or ()):
            raise InvalidEnvConfig(
                "task.simulator: this simulator steps all environments together, and so takes no "
                "chunks of actions; choose a policy of single ones"
            )
        whole = np.zeros((self._count, *actions.shape[1:]), actions.dtype)
        whole[rows] = to_env_actions(space, actions)
        reward, ends = np.zeros(len(rows)), np.zeros((len(STEP_FLAGS), len(rows)), np.uint8)
        errors = dict[int, str]()
        try:
            seen, gained, *ended = self._world.step(whole)
        except Exception as error:  # a simulator may raise anything
            self._failed = format_error(error, self._own)
            errors = dict.fromkeys(range(len(rows)), self._failed)
            ends[0] = True
        else:
            shown = {name: column[rows] for name, column in self._shown(seen).items()}
            reward[:] = np.asarray(gained, np.float64)[rows]
            ends[:3] = [np.asarray(column, np.uint8)[rows] for column in ended]
            ends[3] = ends[2]
            errors = find_non_finite(shown)
            for row, number in enumerate(rows):
                if number in self._unbegun:
                    errors[row] = self._unbegun.pop(number)
            for row in np.flatnonzero(~np.isfinite(reward)).tolist():
                errors.setdefault(row, f"a reward that is not finite: {reward[row]}")
            fit = [row for row in range(len(rows)) if row not in errors]
            for name, column in shown.items():
                self._seen[name][[rows[row] for row in fit]] = column[fit]
            reward[list(errors)], ends[:, list(errors)] = (
                0,
                np.array(LOST_EPISODE_FLAGS, np.uint8)[:, None],
            )
        columns: Arrays = {"reward": reward, "executed": np.ones(len(rows), np.int32)}
        columns.update(zip(STEP_FLAGS, ends))  # noqa: B905 - Python 3.9
        return {
            **columns,
            **prefix_observations({n: c[rows] for n, c in self._seen.items()}),
        }, errors

    def _begun(self, numbers: Sequence[int], seeds: Sequence[int]) -> Arrays:
        try:
            return self._shown(self._world.reset(list(numbers), list(seeds)))
        except InvalidEnvConfig:
            raise
        except Exception as error:  # a simulator may raise anything
            raise ProcessRestartRequired(format_error(error, self._own)) from None

    def spaces(self) -> dict[str, Any]:
        """As of :class:`SyncVectorEnv`."""
        with contextlib.closing(self._world_of(1)) as world:
            return describe_spaces(world)

    def _world_of(self, count: int) -> Any:
        return create_env(functools.partial(self._make, count=count), self._used, batched=True)

    def demonstrate(self, seed: int, most: int) -> Arrays:
        """Raises Refused."""
        raise InvalidEnvConfig(NO_EXPERT_MESSAGE)

    def save(self, numbers: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        """Raises Refused."""
        raise InvalidEnvConfig(NO_STATE_MESSAGE)

    def restore(
        self, numbers: Sequence[int], states: Sequence[np.ndarray]
    ) -> tuple[Arrays, dict[int, str]]:
        """Raises Refused."""
        raise InvalidEnvConfig(NO_STATE_MESSAGE)

    def _shown(self, observation: Any) -> Arrays:
        found, text = to_arrays(observation), get_instruction(self._world)
        if text is not None:
            found[INSTRUCTION] = np.repeat(
                encode_instruction(text)[None], len(found[STATE]), axis=0
            )
        return found

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
        self._world = None
