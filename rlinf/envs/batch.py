"""Environments that one world steps together (``BATCHED`` in :mod:`rlinf.envs.worlds`).

Loaded by :mod:`rlinf.envs.simulator`, also in its process: the standard library and numpy alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .faults import described
from .making import made
from .seen import (
    ENDS,
    INSTRUCTION,
    LOST,
    NO_EXPERT,
    NO_STATE,
    NOTHING_MORE,
    STATE,
    Arrays,
    Refused,
    Shown,
    Spent,
    among,
    encoded,
    instruction,
    named,
    refuse_others,
    refuse_unused,
    unfit,
)
from .spaces import performed, spaces_of


class Batch:
    """Environments that one world steps together, with the methods of :class:`Worlds`.

    It is made for as many as the first episodes are, anew where later ones are more. Those that are
    not asked for get an action of zeros. One that raises is not made again in this process, which
    may have room for one simulation alone: the next reset raises Spent.
    """

    tells: Sequence[str] = ()

    def __init__(
        self, make: Callable[..., Any], shown: Shown = NOTHING_MORE, own: Sequence[str] = ()
    ) -> None:
        self._make = functools.partial(make, images=shown.images)
        self._images, self._used, self._own = shown.images, shown, own
        self._world: Any = None
        self._count, self._seen = 0, Arrays()
        self.least = 0
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
        """As of :class:`Worlds`, less ``starts`` and ``turns``: an environment that shows what is
        not finite is reset once more, and its episode lost where it then does too.

        Raises:
            Spent: the world has raised, now or before.
        """
        if self._failed:
            raise Spent(self._failed)
        wanted = max(*numbers, self.least - 1, -1) + 1
        if self._count and wanted > self._count and min(numbers):
            raise Refused("task.halves: this simulator steps all environments together; set 1")
        if self._world is None or wanted > self._count:
            self.close()
            wanted = max(wanted, self._count)
            self._world = self._world_of(wanted)
            self._count = self._world.count
        seen = self._begun(numbers, seeds)
        if bad := list(unfit(seen)):
            again = self._begun([numbers[row] for row in bad], [seeds[row] for row in bad])
            for name, column in again.items():
                seen[name][bad] = column
        for row, error in unfit(seen).items():
            self._unbegun[numbers[row]] = f"{error} after two resets"
            for column in seen.values():
                column[row] = 0
        refuse_unused(seen)
        refuse_others(self._images, sorted(seen.keys() - {STATE, INSTRUCTION}))
        for name, size in self._images.items():
            if seen[name].shape[1:] != (*size, 3):
                raise Refused(f"task.images.{name}: its pictures are {list(seen[name].shape[1:3])}")
        for name, column in seen.items():
            if name not in self._seen or len(self._seen[name]) < self._count:
                self._seen[name] = np.zeros((self._count, *column.shape[1:]), column.dtype)
            self._seen[name][list(numbers)] = column
        return seen

    def step(self, numbers: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        """As of :class:`Worlds`; where the world raises, the episodes of all have ended, and where
        it shows of one what is not finite, or that one could not begin, that one's."""
        rows, space = list(numbers), self._world.action_space
        if actions.ndim > 1 + len(getattr(space, "shape", None) or ()):
            raise Refused(
                "task.world: this simulator steps all environments together, and so takes no "
                "chunks of actions; choose a policy of single ones"
            )
        whole = np.zeros((self._count, *actions.shape[1:]), actions.dtype)
        whole[rows] = performed(space, actions)
        reward, ends = np.zeros(len(rows)), np.zeros((len(ENDS), len(rows)), np.uint8)
        errors = dict[int, str]()
        try:
            seen, gained, *ended = self._world.step(whole)
        except Exception as error:  # a simulator may raise anything
            self._failed = described(error, self._own)
            errors = dict.fromkeys(range(len(rows)), self._failed)
            ends[0] = True
        else:
            shown = {name: column[rows] for name, column in self._shown(seen).items()}
            reward[:] = np.asarray(gained, np.float64)[rows]
            ends[:3] = [np.asarray(column, np.uint8)[rows] for column in ended]
            ends[3] = ends[2]
            errors = unfit(shown)
            for row, number in enumerate(rows):
                if number in self._unbegun:
                    errors[row] = self._unbegun.pop(number)
            for row in np.flatnonzero(~np.isfinite(reward)).tolist():
                errors.setdefault(row, f"a reward that is not finite: {reward[row]}")
            fit = [row for row in range(len(rows)) if row not in errors]
            for name, column in shown.items():
                self._seen[name][[rows[row] for row in fit]] = column[fit]
            reward[list(errors)], ends[:, list(errors)] = 0, np.array(LOST, np.uint8)[:, None]
        columns: Arrays = {"reward": reward, "executed": np.ones(len(rows), np.int32)}
        columns.update(zip(ENDS, ends))  # noqa: B905 - Python 3.9
        return {**columns, **among({n: c[rows] for n, c in self._seen.items()})}, errors

    def _begun(self, numbers: Sequence[int], seeds: Sequence[int]) -> Arrays:
        try:
            return self._shown(self._world.reset(list(numbers), list(seeds)))
        except Refused:
            raise
        except Exception as error:  # a simulator may raise anything
            raise Spent(described(error, self._own)) from None

    def spaces(self) -> dict[str, Any]:
        """As of :class:`Worlds`."""
        with contextlib.closing(self._world_of(1)) as world:
            return spaces_of(world)

    def _world_of(self, count: int) -> Any:
        return made(functools.partial(self._make, count=count), self._used, batched=True)

    def demonstrate(self, seed: int, most: int) -> Arrays:
        """Raises Refused."""
        raise Refused(NO_EXPERT)

    def save(self, numbers: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        """Raises Refused."""
        raise Refused(NO_STATE)

    def restore(
        self, numbers: Sequence[int], states: Sequence[np.ndarray]
    ) -> tuple[Arrays, dict[int, str]]:
        """Raises Refused."""
        raise Refused(NO_STATE)

    def _shown(self, observation: Any) -> Arrays:
        found, text = named(observation), instruction(self._world)
        if text is not None:
            found[INSTRUCTION] = np.repeat(encoded(text)[None], len(found[STATE]), axis=0)
        return found

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
        self._world = None
