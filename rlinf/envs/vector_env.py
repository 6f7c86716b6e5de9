"""A simulator process: steps worlds for a stage, under an interpreter of its own.

This file is run by its path (see :func:`main`) where nothing else of the package may be installed,
by any Python from 3.9 on: it imports the standard library, numpy, files beside it that do the same,
and what its maker imports. A message is JSON, and arrays in shared memory; nothing is unpickled.

A *world* has the methods of a Gymnasium environment: ``reset(seed=)``, ``step(action)``,
``close()``, ``observation_space`` and ``action_space`` (:mod:`rlinf.envs.simulators`). What it shows is
an array, called ``state`` here, or arrays by name; :mod:`rlinf.envs.spaces` makes one
state of several.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import socket
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

if not __package__:
    # Run by its path: the files beside it are a package of their own, for ours would bring more.
    __package__ = "rlinf_simulator.envs"
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    for name, path in (("rlinf_simulator", os.path.dirname(folder)), (__package__, folder)):  # noqa: PTH120
        beside: Any = types.ModuleType(name)
        beside.__path__ = [path]
        sys.modules[name] = beside

from .batch import BatchedVectorEnv
from .factory import create_task_env, module_flag, resolve_factory
from .ipc import SimulatorConnection
from .observations import (
    EMPTY_STATE,
    LOST_EPISODE_FLAGS,
    NO_EXPERT_MESSAGE,
    NO_STATE_MESSAGE,
    STEP_FLAGS,
    Arrays,
    InvalidEnvConfig,
    ObservationReader,
    ObservationSelection,
    ProcessRestartRequired,
    check_all_used,
    find_non_finite,
    pack_arrays,
    prefix_observations,
    stack_observations,
    unpack_arrays,
    unprefix_observations,
)
from .simulator_errors import format_error
from .spaces import describe_spaces, to_env_actions

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STEP_INFO_TYPES = {"intervened": np.uint8, "performed": np.float32, "late": np.uint8}
"""What the ``info`` of a world's steps may tell beside ``success``, and of which type it is: see
:mod:`rlinf.envs.simulators`."""
ACTION_REWARDS = "gained"
"""Column of the rewards of each action of a chunk."""


class SyncVectorEnv:
    """Worlds of one kind by number. They are kept: a seeded reset leaves nothing of the past."""

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        once: bool = False,
        endless: bool = False,
        own: Sequence[str] = (),
    ) -> None:
        """
        Args:
            once: a reset that fails is left to a person: a robot's arm that met something on its
                way is not sent there again.
            endless: episodes go on where worlds say that they terminated, until they are cut off.
            own: as of :func:`described`.
        """
        self._make, self._once, self._endless, self._own = make, once, endless, own
        self._worlds: list[Any] = []
        self._looks: dict[int, ObservationReader] = {}
        """Of the open episodes."""
        self._seen: dict[int, Arrays] = {}
        self._unbegun: dict[int, str] = {}
        """Of the episodes that could not begin, the tracebacks."""
        self._like: Arrays = {}
        """Of what the first world showed first: shapes and types."""

    def reset(
        self,
        numbers: Sequence[int],
        seeds: Sequence[int],
        starts: Sequence[int] | None = None,
        turns: Sequence[int] | None = None,
    ) -> Arrays:
        """Begin episodes; observations by name, ``[n, ...]``.

        A world that raises, or shows what is not finite, is made anew and tried once more. Where
        that fails too, zeros stand for what it shows, and the episode is lost at its first step;
        where none of the worlds has shown anything yet and one cannot with another seed either,
        what it raises is raised. Where it is left to a person, Refused is raised in place of all
        that.

        Args:
            starts: where episodes begin in worlds that have numbered states for that, counted
                through again where there are fewer; by default the seeds choose.
            turns: running numbers, by which tasks take turns where there are several.
        """
        if self._once and max(numbers, default=0):
            raise InvalidEnvConfig(
                "task.simulator: its module says SINGLE, and several worlds are asked for; it must be "
                "found by the interpreter of the stage too, which reads that there"
            )
        self._have(numbers)
        failed: dict[int, tuple[Any, ...]] = {}
        for row, (number, seed) in enumerate(zip(numbers, seeds)):  # noqa: B905 - Python 3.9
            start = None if starts is None else starts[row]
            where = (start, None if turns is None else turns[row])
            try:
                self._begin(number, seed, *where)
            except InvalidEnvConfig:
                raise
            except Exception as error:  # a simulator may raise anything
                if self._once:
                    self.close()
                    raise InvalidEnvConfig(
                        f"task.simulator: an episode cannot begin: {error}; look what is wrong, then "
                        "resume the run"
                    ) from error
                self._renew(number)
                if not self._begun_again(number, seed, *where):
                    failed[number] = (seed ^ 1, *where)
        if failed and not self._like:
            # What an episode shows is not known yet; one of another seed says it, or raises.
            number, other = next(iter(failed.items()))
            self._begin(number, *other)
        for number in failed:
            self._seen[number] = {name: np.zeros_like(a) for name, a in self._like.items()}
        return stack_observations([self._seen[number] for number in numbers])

    def save(self, numbers: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        """All that it takes to go on with open episodes in other worlds, uint8 ``[n]`` each.

        A world that raises has lost its episode, and is made anew.

        Returns:
            The states; and, by row, the tracebacks of those that raised, whose state is empty.

        Raises:
            Refused: a world does not say it.
        """
        states, errors = [], dict[int, str]()
        for row, number in enumerate(numbers):
            world = self._worlds[number]
            if not hasattr(world, "save"):
                raise InvalidEnvConfig(NO_STATE_MESSAGE)
            try:
                states.append(
                    pack_arrays({**world.save(), **prefix_observations(self._seen[number])})
                )
            except InvalidEnvConfig:
                raise
            except ValueError as error:
                raise InvalidEnvConfig(
                    f"task.carry_over_episodes: {error}; set it to false"
                ) from None
            except Exception as error:  # a simulator may raise anything
                states.append(EMPTY_STATE)
                errors[row] = format_error(error, self._own)
                self._renew(number)
        return states, errors

    def restore(
        self, numbers: Sequence[int], states: Sequence[np.ndarray]
    ) -> tuple[Arrays, dict[int, str]]:
        """Go on with episodes that :meth:`save` was asked of.

        A world that raises is made anew.

        Returns:
            What they showed last, ``[n, ...]``; and, by row, the tracebacks of those that raise
            then too: where there are some, nothing is shown.
        """
        self._have(numbers)
        errors = dict[int, str]()
        for row, (number, state) in enumerate(zip(numbers, states)):  # noqa: B905 - Python 3.9
            try:
                self._go_on(number, unpack_arrays(state))
            except InvalidEnvConfig:
                raise
            except Exception as error:  # a simulator may raise anything
                errors[row] = format_error(error, self._own)
        return (
            {} if errors else stack_observations([self._seen[number] for number in numbers])
        ), errors

    def step(self, numbers: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        """Act. Vectors are clipped to the space, choices counted from its start.

        A row of ``actions`` may be a chunk, ``[H, ...]``: actions that are carried out one after
        the other, as far as the episode goes. What is between them is not rendered.

        A world that raises, or shows what is not finite, or not of the shape and type of before,
        has ended its episode where it was, and is made anew.

        Returns:
            Observations ``[n, ...]`` under ``seen.`` and their name; ``reward`` float64 ``[n]``, of
            a chunk the sum, and ``gained`` float64 ``[n, H]`` of each of its actions, 0 of those
            that were left out; ``executed`` int32 ``[n]``, how many actions were begun;
            ``terminated``, ``truncated`` and ``success`` (:func:`succeeded`) of the last of them
            and ``solved``, whether any had success, uint8 ``[n]``; what :data:`TOLD` names, where
            the worlds tell it, ``[n, ...]``, of each action of a chunk; and, by row, the tracebacks
            of those that raised.

        Raises:
            Refused: an action that the space has not.
        """
        space = self._worlds[numbers[0]].action_space
        told = step_info_columns(self.tells, actions)
        actions = to_env_actions(space, actions)
        single = np.ndim(actions) == 1 + len(getattr(space, "shape", None) or ())
        came, rows, errors = [], list[Arrays](), dict[int, str]()
        for row, (number, chosen) in enumerate(zip(numbers, actions)):  # noqa: B905 - Python 3.9
            if number in self._unbegun:
                errors[row] = self._unbegun.pop(number)
                came.append((0.0, 1, *LOST_EPISODE_FLAGS))
                rows.append(self._seen[number])
                continue
            world, reward, executed, solved = self._worlds[number], 0.0, 0, False
            try:
                for place, action in enumerate([chosen] if single else chosen):
                    executed += 1
                    observation, gained, terminated, truncated, info = world.step(action)
                    if not math.isfinite(gained):
                        raise ValueError(f"a reward that is not finite: {gained}")
                    reward += gained
                    for name, column in told.items():
                        place_in = row if single else (row, place)
                        column[place_in] = gained if name == ACTION_REWARDS else info[name]
                    success = is_success(info)
                    solved = solved or success
                    terminated = terminated and not self._endless
                    if terminated or truncated:
                        break
                seen = self._look(number, observation)
                came.append((reward, executed, terminated, truncated, success, solved))
            except InvalidEnvConfig:
                raise
            except Exception as error:  # a simulator may raise anything
                errors[row], seen = format_error(error, self._own), self._seen[number]
                came.append((reward, executed, *LOST_EPISODE_FLAGS))
                self._renew(number)
            rows.append(seen)
        shown = stack_observations(rows)
        for row, why in find_non_finite(shown).items():
            errors[row], rows[row] = why, self._seen[numbers[row]]
            came[row] = (*came[row][:2], *LOST_EPISODE_FLAGS)
            self._renew(numbers[row])
            shown = stack_observations(rows)
        self._seen.update(zip(numbers, rows))  # noqa: B905 - Python 3.9
        whole = np.array(came, np.float64).reshape(len(came), 2 + len(STEP_FLAGS)).T
        columns: Arrays = {"reward": whole[0], "executed": whole[1].astype(np.int32), **told}
        columns.update(zip(STEP_FLAGS, whole[2:].astype(np.uint8)))  # noqa: B905 - Python 3.9
        return {**columns, **prefix_observations(shown)}, errors

    @property
    def tells(self) -> Sequence[str]:
        """Which of :data:`TOLD` the worlds tell, once there is one."""
        return tuple(getattr(self._worlds[0], "tells", ())) if self._worlds else ()

    def demonstrate(self, seed: int, most: int) -> Arrays:
        """An episode by the world's own ``expert()``, from a seeded reset to its first success.

        Returns:
            Columns ``[T, ...]``, at most so many steps: observations under ``seen.`` and their
            name, ``action`` (within the space), ``reward`` float64, ``success`` uint8.
        """
        if not self._worlds:
            self._worlds.append(self._make())
        world = self._worlds[0]
        if not hasattr(world, "expert"):
            raise InvalidEnvConfig(NO_EXPERT_MESSAGE)
        observation, rows = world.reset(seed=seed)[0], []
        look = ObservationReader(world)
        for _ in range(most):
            row = prefix_observations(look.read(observation))
            action = np.array(world.expert())
            (does,) = to_env_actions(world.action_space, action[None])
            if hasattr(world.action_space, "low"):
                action = does
            took = world.step(does)
            observation, reward, terminated, truncated, info = took
            solved = is_success(info)
            row.update(action=action, reward=np.asarray(float(reward)))
            rows.append({**row, "success": np.asarray(solved, np.uint8)})
            if solved or terminated or truncated:
                break
        return stack_observations(rows)

    def _have(self, numbers: Sequence[int]) -> None:
        while len(self._worlds) <= max(numbers, default=-1):
            self._worlds.append(self._make())

    def _begin(self, number: int, seed: int, start: int | None, turn: int | None) -> None:
        world = self._worlds[number]
        if hasattr(world, "tasks"):
            where = {"start": start, "turn": turn}
        else:
            there = getattr(world, "starts", 0)
            where = {"start": start % there} if start is not None and there else {}
        observation = world.reset(seed=seed, **where)[0]
        self._looks[number] = ObservationReader(world)
        seen = self._look(number, observation)
        for error in find_non_finite(stack_observations([seen])).values():
            raise ValueError(error)
        self._seen[number] = seen

    def _begun_again(self, number: int, seed: int, start: int | None, turn: int | None) -> bool:
        try:
            self._begin(number, seed, start, turn)
        except InvalidEnvConfig:
            raise
        except Exception as error:  # a simulator may raise anything
            self._unbegun[number] = format_error(error, self._own)
            return False
        return True

    def _go_on(self, number: int, state: Arrays) -> None:
        try:
            self._worlds[number].restore(state)
        except Exception:  # a simulator may raise anything
            self._renew(number)
            self._worlds[number].restore(state)
        self._looks[number], seen = (
            ObservationReader(self._worlds[number]),
            unprefix_observations(state),
        )
        self._like = self._like or {name: np.empty_like(array) for name, array in seen.items()}
        self._seen[number] = seen

    def _look(self, number: int, observation: Any) -> Arrays:
        """What a world shows; raises ValueError where it is not of the shape and type of before."""
        seen = self._looks[number].read(observation)
        if not self._like:
            check_all_used(seen)
            self._like = {name: np.empty_like(array) for name, array in seen.items()}
        for name, array in seen.items():
            first = self._like.get(name)
            if first is None or first.shape != array.shape or first.dtype != array.dtype:
                raise ValueError(f"observation {name!r}, {array.dtype} {array.shape}, is new")
        return seen

    def _renew(self, number: int) -> None:
        """Another world in the place of one that failed."""
        with contextlib.suppress(Exception):
            self._worlds[number].close()
        self._worlds[number] = self._make()

    def spaces(self) -> dict[str, Any]:
        """What a world shows and takes, as plain values."""
        with contextlib.closing(self._make()) as world:
            return describe_spaces(world)

    def close(self) -> None:
        for world in self._worlds:
            world.close()
        self._worlds = []


def step_info_columns(names: Sequence[str], actions: np.ndarray) -> Arrays:
    """What worlds tell of steps that take ``actions`` ``[n, ...]``, zeros: ``performed`` is like
    them, all else a number for each. Of chunks also :data:`ACTION_REWARDS`."""
    each = actions.shape[:-1] if actions.dtype.kind == "f" else actions.shape
    found = {
        name: np.zeros(actions.shape if name == "performed" else each, STEP_INFO_TYPES[name])
        for name in names
    }
    return {**found, ACTION_REWARDS: np.zeros(each)} if len(each) > 1 else found


def is_success(info: Any) -> bool:
    """Whether a step's ``info`` says that the task is solved: ``success``, or ``is_success``."""
    return bool(info.get("success", info.get("is_success", False)))


def serve(link: SimulatorConnection, worlds: SyncVectorEnv | BatchedVectorEnv) -> None:
    """Obey until the stage is gone."""
    while True:
        order, arrays = link.receive()
        if order["do"] == "step":
            came, errors = worlds.step(order["worlds"], arrays["action"])
            link.send({"errors": list(errors.items())}, came)
        elif order["do"] == "reset":
            if isinstance(worlds, BatchedVectorEnv):
                worlds.min_envs = order["least"]
            asked = (order[name] for name in ("worlds", "seeds", "starts", "turns"))
            seen = worlds.reset(*asked)
            link.send({"tells": list(worlds.tells)}, prefix_observations(seen))
        elif order["do"] == "restore":
            states = [arrays[str(row)] for row in range(len(order["worlds"]))]
            seen, errors = worlds.restore(order["worlds"], states)
            told = {"tells": list(worlds.tells), "errors": list(errors.items())}
            link.send(told, prefix_observations(seen))
        elif order["do"] == "save":
            states, errors = worlds.save(order["worlds"])
            arrays = {str(row): state for row, state in enumerate(states) if row not in errors}
            link.send({"errors": list(errors.items())}, arrays)
        elif order["do"] == "demonstrate":
            link.send({}, worlds.demonstrate(order["seed"], order["most"]))
        else:
            link.send(worlds.spaces(), {})


def main(end: int, own: int, other: int, target: str, values: str, options: str) -> None:
    """Serve a stage.

    Args:
        end: the file descriptor of this end of a pair of sockets.
        own, other: those of files in memory; see :class:`Link`.
        target: as for :func:`maker`.
        values: what it is called with (:func:`create_task_env`), as JSON.
        options: ``shown``, the fields of :class:`ObservationSelection`, ``endless`` and ``own`` (of
            :class:`SyncVectorEnv`), as JSON.
    """
    for number in IGNORED_SIGNALS:
        # Sent to a whole job: the stage may still want to finish what it does.
        signal.signal(number, signal.SIG_IGN)
    link = SimulatorConnection(socket.socket(fileno=end), own, other)
    worlds: SyncVectorEnv | BatchedVectorEnv | None = None
    told, how = json.loads(values), json.loads(options)
    users: Sequence[str] = how["own"]
    try:
        found = resolve_factory(target)
        shown = ObservationSelection(**how["shown"])
        if module_flag(found, "BATCHED"):
            worlds = BatchedVectorEnv(functools.partial(found, **told), shown, users)
        else:
            make = functools.partial(create_task_env, found, told, shown)
            worlds = SyncVectorEnv(
                make, once=module_flag(found, "SINGLE"), endless=how["endless"], own=users
            )
        serve(link, worlds)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except InvalidEnvConfig as error:
        said = {"refused": str(error)}
    except ProcessRestartRequired as error:
        said = {"spent": str(error)}
    except Exception as error:
        said = {"failed": format_error(error, users)}
    finally:
        # A robot comes to rest.
        if worlds is not None:
            with contextlib.suppress(Exception):
                worlds.close()
    with contextlib.suppress(OSError):
        link.send({**said, "pid": os.getpid()}, {})


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
