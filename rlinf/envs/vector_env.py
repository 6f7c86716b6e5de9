"""Vector environments, and the simulator process that steps them for a stage.

This file is run by its path (see :func:`main`) under an interpreter of its own, Python 3.9 or
newer, where nothing else of the package may be installed. It imports the standard library, numpy,
files beside it that do the same, and what the factory imports. A message is JSON with arrays in
shared memory; nothing is unpickled.

An environment has the methods of Gymnasium: ``reset(seed=)``, ``step(action)``, ``close()``,
``observation_space`` and ``action_space`` (:mod:`rlinf.envs.simulators`). An observation is an
array, called ``state`` here, or arrays by name; :mod:`rlinf.envs.spaces` flattens it.
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

from .factory import create_env, create_task_env, module_flag, resolve_factory
from .ipc import SimulatorConnection
from .observations import (
    EMPTY_STATE,
    INSTRUCTION,
    LOST_EPISODE_FLAGS,
    NO_EXPERT_MESSAGE,
    NO_STATE_MESSAGE,
    STATE,
    STATE_ONLY,
    STEP_FLAGS,
    Arrays,
    InvalidEnvConfig,
    ObservationReader,
    ObservationSelection,
    ProcessRestartRequired,
    check_all_used,
    check_cameras,
    encode_instruction,
    find_non_finite,
    get_instruction,
    pack_arrays,
    prefix_observations,
    stack_observations,
    to_arrays,
    unpack_arrays,
    unprefix_observations,
)
from .simulator_errors import format_error
from .spaces import describe_spaces, to_env_actions

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STEP_INFO_TYPES = {"intervened": np.uint8, "performed": np.float32, "late": np.uint8}
"""Keys of a step's ``info`` beside ``success``, and their types: see
:mod:`rlinf.envs.simulators`."""
ACTION_REWARDS = "gained"
"""Column of the rewards of each action of a chunk."""


class SyncVectorEnv:
    """Environments of one kind, by number, stepped one after another. They are reused, because a
    seeded reset leaves nothing of earlier episodes."""

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        single_instance: bool = False,
        endless: bool = False,
        own: Sequence[str] = (),
    ) -> None:
        """
        Args:
            single_instance: there is one environment, and a failed reset is not retried, because
                it needs a person: a robot arm that hit something is not sent there again.
            endless: ignore terminations; episodes continue until they are truncated.
            own: as for :func:`format_error`.
        """
        self._make, self._single_instance, self._endless, self._own = (
            make,
            single_instance,
            endless,
            own,
        )
        self._envs: list[Any] = []
        self._readers: dict[int, ObservationReader] = {}
        """Readers of the open episodes."""
        self._last_observations: dict[int, Arrays] = {}
        self._failed_resets: dict[int, str] = {}
        """Tracebacks of episodes that could not begin."""
        self._templates: Arrays = {}
        """The first observation of the first environment: shapes and types."""

    def reset(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
        turns: Sequence[int] | None = None,
    ) -> Arrays:
        """Begin episodes; return observations by name, ``[n, ...]``.

        An environment that raises, or returns values that are not finite, is created anew and tried
        once more. If that fails too, its observation is zero, and the episode is lost at its first
        step. If no environment has returned an observation yet and another seed fails too, its
        error is raised. With ``single_instance``, InvalidEnvConfig is raised instead of all that.

        Args:
            initial_states: numbers of initial states, for environments that have them, modulo their
                count; by default the seeds choose.
            turns: running numbers that select tasks in rotation, if there are several.
        """
        if self._single_instance and max(env_ids, default=0):
            raise InvalidEnvConfig(
                "task.simulator: its module sets SINGLE_INSTANCE, and several environments are "
                "requested; the stage's own interpreter must find the module too, because it reads "
                "the flag"
            )
        self._ensure_envs(env_ids)
        failed: dict[int, tuple[Any, ...]] = {}
        for row, (env_id, seed) in enumerate(zip(env_ids, seeds)):  # noqa: B905 - Python 3.9
            initial_state = None if initial_states is None else initial_states[row]
            where = (initial_state, None if turns is None else turns[row])
            try:
                self._reset_one(env_id, seed, *where)
            except InvalidEnvConfig:
                raise
            except Exception as error:  # a simulator may raise anything
                if self._single_instance:
                    self.close()
                    raise InvalidEnvConfig(
                        f"task.simulator: an episode cannot begin: {error}; find out why, then "
                        "resume the run"
                    ) from error
                self._recreate(env_id)
                if not self._retry_reset(env_id, seed, *where):
                    failed[env_id] = (seed ^ 1, *where)
        if failed and not self._templates:
            # No observation is known yet; an episode with another seed provides one, or raises.
            env_id, other = next(iter(failed.items()))
            self._reset_one(env_id, *other)
        for env_id in failed:
            self._last_observations[env_id] = {
                name: np.zeros_like(a) for name, a in self._templates.items()
            }
        return stack_observations([self._last_observations[env_id] for env_id in env_ids])

    def save(self, env_ids: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        """Return the states of open episodes, from which other environments can continue, uint8
        ``[n]`` each.

        An environment that raises has lost its episode, and is created anew.

        Returns:
            The states; and, by row, the tracebacks of those that raised, whose state is empty.

        Raises:
            InvalidEnvConfig: an environment cannot save its state.
        """
        states, errors = [], dict[int, str]()
        for row, env_id in enumerate(env_ids):
            env = self._envs[env_id]
            if not hasattr(env, "save"):
                raise InvalidEnvConfig(NO_STATE_MESSAGE)
            try:
                states.append(
                    pack_arrays(
                        {**env.save(), **prefix_observations(self._last_observations[env_id])}
                    )
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
                self._recreate(env_id)
        return states, errors

    def restore(
        self, env_ids: Sequence[int], states: Sequence[np.ndarray]
    ) -> tuple[Arrays, dict[int, str]]:
        """Continue episodes from states of :meth:`save`.

        An environment that raises is created anew and tried once more.

        Returns:
            Their last observations, ``[n, ...]``; and, by row, the tracebacks of those that raise
            again. If there are any, no observations are returned.
        """
        self._ensure_envs(env_ids)
        errors = dict[int, str]()
        for row, (env_id, state) in enumerate(zip(env_ids, states)):  # noqa: B905 - Python 3.9
            try:
                self._restore_one(env_id, unpack_arrays(state))
            except InvalidEnvConfig:
                raise
            except Exception as error:  # a simulator may raise anything
                errors[row] = format_error(error, self._own)
        return (
            {}
            if errors
            else stack_observations([self._last_observations[env_id] for env_id in env_ids])
        ), errors

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        """Act in environments. Vectors are clipped to the space; choices are counted from its
        start.

        A row of ``actions`` may be a chunk, ``[H, ...]``: actions that are executed one after
        another until the episode ends. Observations within a chunk are not rendered.

        An environment that raises, or returns values that are not finite, or of another shape or
        type than before, has ended its episode, and is created anew.

        Returns:
            Observations ``[n, ...]`` with the prefix ``seen.``; ``reward`` float64 ``[n]`` (of a
            chunk the sum), and ``gained`` float64 ``[n, H]`` of each action of a chunk, 0 for
            actions that were not executed; ``executed`` int32 ``[n]``, the number of actions begun;
            ``terminated``, ``truncated`` and ``success`` (:func:`is_success`) of the last action
            and ``solved``, whether any had success, uint8 ``[n]``; the keys of
            :data:`STEP_INFO_TYPES` that the environments have, ``[n, ...]``, for each action of a
            chunk; and, by row, the tracebacks of those that raised.

        Raises:
            InvalidEnvConfig: an action is not in the space.
        """
        space = self._envs[env_ids[0]].action_space
        step_info = step_info_columns(self.step_info_keys, actions)
        actions = to_env_actions(space, actions)
        single = np.ndim(actions) == 1 + len(getattr(space, "shape", None) or ())
        step_results, rows, errors = [], list[Arrays](), dict[int, str]()
        for row, (env_id, chosen) in enumerate(zip(env_ids, actions)):  # noqa: B905 - Python 3.9
            if env_id in self._failed_resets:
                errors[row] = self._failed_resets.pop(env_id)
                step_results.append((0.0, 1, *LOST_EPISODE_FLAGS))
                rows.append(self._last_observations[env_id])
                continue
            env, reward, executed, solved = self._envs[env_id], 0.0, 0, False
            try:
                for place, action in enumerate([chosen] if single else chosen):
                    executed += 1
                    observation, gained, terminated, truncated, info = env.step(action)
                    if not math.isfinite(gained):
                        raise ValueError(f"a reward that is not finite: {gained}")
                    reward += gained
                    for name, column in step_info.items():
                        place_in = row if single else (row, place)
                        column[place_in] = gained if name == ACTION_REWARDS else info[name]
                    success = is_success(info)
                    solved = solved or success
                    terminated = terminated and not self._endless
                    if terminated or truncated:
                        break
                observations = self._read(env_id, observation)
                step_results.append((reward, executed, terminated, truncated, success, solved))
            except InvalidEnvConfig:
                raise
            except Exception as error:  # a simulator may raise anything
                errors[row], observations = (
                    format_error(error, self._own),
                    self._last_observations[env_id],
                )
                step_results.append((reward, executed, *LOST_EPISODE_FLAGS))
                self._recreate(env_id)
            rows.append(observations)
        shown = stack_observations(rows)
        for row, why in find_non_finite(shown).items():
            errors[row], rows[row] = why, self._last_observations[env_ids[row]]
            step_results[row] = (*step_results[row][:2], *LOST_EPISODE_FLAGS)
            self._recreate(env_ids[row])
            shown = stack_observations(rows)
        self._last_observations.update(zip(env_ids, rows))  # noqa: B905 - Python 3.9
        results = (
            np.array(step_results, np.float64).reshape(len(step_results), 2 + len(STEP_FLAGS)).T
        )
        columns: Arrays = {
            "reward": results[0],
            "executed": results[1].astype(np.int32),
            **step_info,
        }
        columns.update(zip(STEP_FLAGS, results[2:].astype(np.uint8)))  # noqa: B905 - Python 3.9
        return {**columns, **prefix_observations(shown)}, errors

    @property
    def step_info_keys(self) -> Sequence[str]:
        """The keys of :data:`STEP_INFO_TYPES` that the environments have, once there is one."""
        return tuple(getattr(self._envs[0], "step_info_keys", ())) if self._envs else ()

    def demonstrate(self, seed: int, most: int) -> Arrays:
        """Play an episode by the environment's own ``expert_action()``, from a seeded reset to
        its first success.

        Returns:
            Columns ``[T, ...]``, at most ``most`` steps: observations with the prefix ``seen.``,
            ``action`` (within the space), ``reward`` float64, ``success`` uint8.
        """
        if not self._envs:
            self._envs.append(self._make())
        env = self._envs[0]
        if not hasattr(env, "expert_action"):
            raise InvalidEnvConfig(NO_EXPERT_MESSAGE)
        observation, rows = env.reset(seed=seed)[0], []
        reader = ObservationReader(env)
        for _ in range(most):
            row = prefix_observations(reader.read(observation))
            action = np.array(env.expert_action())
            (does,) = to_env_actions(env.action_space, action[None])
            if hasattr(env.action_space, "low"):
                action = does
            result = env.step(does)
            observation, reward, terminated, truncated, info = result
            solved = is_success(info)
            row.update(action=action, reward=np.asarray(float(reward)))
            rows.append({**row, "success": np.asarray(solved, np.uint8)})
            if solved or terminated or truncated:
                break
        return stack_observations(rows)

    def _ensure_envs(self, env_ids: Sequence[int]) -> None:
        while len(self._envs) <= max(env_ids, default=-1):
            self._envs.append(self._make())

    def _reset_one(
        self, env_id: int, seed: int, initial_state: int | None, turn: int | None
    ) -> None:
        env = self._envs[env_id]
        if hasattr(env, "num_tasks"):
            where = {"initial_state": initial_state, "turn": turn}
        else:
            count = getattr(env, "num_initial_states", 0)
            where = {}
            if initial_state is not None and count:
                where = {"initial_state": initial_state % count}
        observation = env.reset(seed=seed, **where)[0]
        self._readers[env_id] = ObservationReader(env)
        observations = self._read(env_id, observation)
        for error in find_non_finite(stack_observations([observations])).values():
            raise ValueError(error)
        self._last_observations[env_id] = observations

    def _retry_reset(
        self, env_id: int, seed: int, initial_state: int | None, turn: int | None
    ) -> bool:
        try:
            self._reset_one(env_id, seed, initial_state, turn)
        except InvalidEnvConfig:
            raise
        except Exception as error:  # a simulator may raise anything
            self._failed_resets[env_id] = format_error(error, self._own)
            return False
        return True

    def _restore_one(self, env_id: int, state: Arrays) -> None:
        try:
            self._envs[env_id].restore(state)
        except Exception:  # a simulator may raise anything
            self._recreate(env_id)
            self._envs[env_id].restore(state)
        self._readers[env_id], observations = (
            ObservationReader(self._envs[env_id]),
            unprefix_observations(state),
        )
        self._templates = self._templates or {
            name: np.empty_like(array) for name, array in observations.items()
        }
        self._last_observations[env_id] = observations

    def _read(self, env_id: int, observation: Any) -> Arrays:
        """Return an observation; raise ValueError if its shape or type differs from the first
        one."""
        observations = self._readers[env_id].read(observation)
        if not self._templates:
            check_all_used(observations)
            self._templates = {name: np.empty_like(array) for name, array in observations.items()}
        for name, array in observations.items():
            first = self._templates.get(name)
            if first is None or first.shape != array.shape or first.dtype != array.dtype:
                raise ValueError(f"observation {name!r}, {array.dtype} {array.shape}, is new")
        return observations

    def _recreate(self, env_id: int) -> None:
        """Replace an environment that failed."""
        with contextlib.suppress(Exception):
            self._envs[env_id].close()
        self._envs[env_id] = self._make()

    def spaces(self) -> dict[str, Any]:
        """Return the spaces of an environment as plain values."""
        with contextlib.closing(self._make()) as env:
            return describe_spaces(env)

    def close(self) -> None:
        for env in self._envs:
            env.close()
        self._envs = []


class BatchedVectorEnv:
    """Environments that one simulator steps together, with the methods of :class:`SyncVectorEnv`.

    It is created for as many environments as the first episodes need, and again if later ones need
    more. Environments without a request get a zero action. A simulator that raises is not created
    again in this process, which may have room for one simulation alone: the next reset raises
    ProcessRestartRequired.
    """

    step_info_keys: Sequence[str] = ()

    def __init__(
        self,
        make: Callable[..., Any],
        shown: ObservationSelection = STATE_ONLY,
        own: Sequence[str] = (),
    ) -> None:
        self._make = functools.partial(make, images=shown.images)
        self._images, self._used, self._own = shown.images, shown, own
        self._env: Any = None
        self._count, self._last_observations = 0, Arrays()
        self.min_envs = 0
        """The least number of environments: as many as a previous process had."""
        self._failed = ""
        self._failed_resets: dict[int, str] = {}
        """Errors of episodes that could not begin, by environment."""

    def reset(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
        turns: Sequence[int] | None = None,
    ) -> Arrays:
        """Begin episodes as :class:`SyncVectorEnv` does, without ``initial_states`` and ``turns``.

        An environment whose observation is not finite is reset once more. If the second observation
        is not finite either, its episode is lost.

        Raises:
            ProcessRestartRequired: the simulator has raised, now or before.
        """
        if self._failed:
            raise ProcessRestartRequired(self._failed)
        wanted = max(*env_ids, self.min_envs - 1, -1) + 1
        if self._count and wanted > self._count and min(env_ids):
            raise InvalidEnvConfig(
                "task.double_buffer: this simulator steps all environments together; "
                "set it to false"
            )
        if self._env is None or wanted > self._count:
            self.close()
            wanted = max(wanted, self._count)
            self._env = self._create(wanted)
            self._count = self._env.count
        observations = self._reset_envs(env_ids, seeds)
        if bad := list(find_non_finite(observations)):
            again = self._reset_envs([env_ids[row] for row in bad], [seeds[row] for row in bad])
            for name, column in again.items():
                observations[name][bad] = column
        for row, error in find_non_finite(observations).items():
            self._failed_resets[env_ids[row]] = f"{error} after two resets"
            for column in observations.values():
                column[row] = 0
        check_all_used(observations)
        check_cameras(self._images, sorted(observations.keys() - {STATE, INSTRUCTION}))
        for name, size in self._images.items():
            if observations[name].shape[1:] != (*size, 3):
                raise InvalidEnvConfig(
                    f"task.images.{name}: its images are {list(observations[name].shape[1:3])}"
                )
        for name, column in observations.items():
            if (
                name not in self._last_observations
                or len(self._last_observations[name]) < self._count
            ):
                self._last_observations[name] = np.zeros(
                    (self._count, *column.shape[1:]), column.dtype
                )
            self._last_observations[name][list(env_ids)] = column
        return observations

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        """Act as :class:`SyncVectorEnv` does. If the simulator raises, all episodes end. If one
        environment returns values that are not finite, or could not begin, its episode ends."""
        rows, space = list(env_ids), self._env.action_space
        if actions.ndim > 1 + len(getattr(space, "shape", None) or ()):
            raise InvalidEnvConfig(
                "task.simulator: this simulator steps all environments together, so it accepts "
                "no chunks of actions; choose a policy of single actions"
            )
        all_actions = np.zeros((self._count, *actions.shape[1:]), actions.dtype)
        all_actions[rows] = to_env_actions(space, actions)
        reward, ends = np.zeros(len(rows)), np.zeros((len(STEP_FLAGS), len(rows)), np.uint8)
        errors = dict[int, str]()
        try:
            observations, gained, *ended = self._env.step(all_actions)
        except Exception as error:  # a simulator may raise anything
            self._failed = format_error(error, self._own)
            errors = dict.fromkeys(range(len(rows)), self._failed)
            ends[0] = True
        else:
            shown = {name: column[rows] for name, column in self._shown(observations).items()}
            reward[:] = np.asarray(gained, np.float64)[rows]
            ends[:3] = [np.asarray(column, np.uint8)[rows] for column in ended]
            ends[3] = ends[2]
            errors = find_non_finite(shown)
            for row, env_id in enumerate(rows):
                if env_id in self._failed_resets:
                    errors[row] = self._failed_resets.pop(env_id)
            for row in np.flatnonzero(~np.isfinite(reward)).tolist():
                errors.setdefault(row, f"a reward that is not finite: {reward[row]}")
            fit = [row for row in range(len(rows)) if row not in errors]
            for name, column in shown.items():
                self._last_observations[name][[rows[row] for row in fit]] = column[fit]
            reward[list(errors)], ends[:, list(errors)] = (
                0,
                np.array(LOST_EPISODE_FLAGS, np.uint8)[:, None],
            )
        columns: Arrays = {"reward": reward, "executed": np.ones(len(rows), np.int32)}
        columns.update(zip(STEP_FLAGS, ends))  # noqa: B905 - Python 3.9
        return {
            **columns,
            **prefix_observations({n: c[rows] for n, c in self._last_observations.items()}),
        }, errors

    def _reset_envs(self, env_ids: Sequence[int], seeds: Sequence[int]) -> Arrays:
        try:
            return self._shown(self._env.reset(list(env_ids), list(seeds)))
        except InvalidEnvConfig:
            raise
        except Exception as error:  # a simulator may raise anything
            raise ProcessRestartRequired(format_error(error, self._own)) from None

    def spaces(self) -> dict[str, Any]:
        """Return the spaces of one environment as plain values."""
        with contextlib.closing(self._create(1)) as env:
            return describe_spaces(env)

    def _create(self, count: int) -> Any:
        return create_env(functools.partial(self._make, count=count), self._used, batched=True)

    def demonstrate(self, seed: int, most: int) -> Arrays:
        """Raise InvalidEnvConfig: there is no expert."""
        raise InvalidEnvConfig(NO_EXPERT_MESSAGE)

    def save(self, env_ids: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        """Raise InvalidEnvConfig: the state cannot be saved."""
        raise InvalidEnvConfig(NO_STATE_MESSAGE)

    def restore(
        self, env_ids: Sequence[int], states: Sequence[np.ndarray]
    ) -> tuple[Arrays, dict[int, str]]:
        """Raise InvalidEnvConfig: the state cannot be restored."""
        raise InvalidEnvConfig(NO_STATE_MESSAGE)

    def _shown(self, observation: Any) -> Arrays:
        arrays, text = to_arrays(observation), get_instruction(self._env)
        if text is not None:
            arrays[INSTRUCTION] = np.repeat(
                encode_instruction(text)[None], len(arrays[STATE]), axis=0
            )
        return arrays

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None


def step_info_columns(names: Sequence[str], actions: np.ndarray) -> Arrays:
    """Return zero columns for the step info of ``actions`` ``[n, ...]``: ``performed`` has the
    shape of the actions, the others one number per action. Chunks also have
    :data:`ACTION_REWARDS`."""
    each = actions.shape[:-1] if actions.dtype.kind == "f" else actions.shape
    columns = {
        name: np.zeros(actions.shape if name == "performed" else each, STEP_INFO_TYPES[name])
        for name in names
    }
    return {**columns, ACTION_REWARDS: np.zeros(each)} if len(each) > 1 else columns


def is_success(info: Any) -> bool:
    """Return whether a step's ``info`` has ``success`` or ``is_success``."""
    return bool(info.get("success", info.get("is_success", False)))


def serve(link: SimulatorConnection, envs: SyncVectorEnv | BatchedVectorEnv) -> None:
    """Answer requests until the stage closes the connection."""
    while True:
        order, arrays = link.receive()
        if order["method"] == "step":
            results, errors = envs.step(order["envs"], arrays["action"])
            link.send({"errors": list(errors.items())}, results)
        elif order["method"] == "reset":
            if isinstance(envs, BatchedVectorEnv):
                envs.min_envs = order["min_envs"]
            arguments = (order[name] for name in ("envs", "seeds", "initial_states", "turns"))
            observations = envs.reset(*arguments)
            link.send(
                {"step_info_keys": list(envs.step_info_keys)}, prefix_observations(observations)
            )
        elif order["method"] == "restore":
            states = [arrays[str(row)] for row in range(len(order["envs"]))]
            observations, errors = envs.restore(order["envs"], states)
            reply = {"step_info_keys": list(envs.step_info_keys), "errors": list(errors.items())}
            link.send(reply, prefix_observations(observations))
        elif order["method"] == "save":
            states, errors = envs.save(order["envs"])
            arrays = {str(row): state for row, state in enumerate(states) if row not in errors}
            link.send({"errors": list(errors.items())}, arrays)
        elif order["method"] == "demonstrate":
            link.send({}, envs.demonstrate(order["seed"], order["max_steps"]))
        else:
            link.send(envs.spaces(), {})


def main(end: int, own: int, other: int, target: str, values: str, options: str) -> None:
    """Serve a stage.

    Args:
        end: the file descriptor of this end of a pair of sockets.
        own, other: those of memory files; see :class:`SimulatorConnection`.
        target: as for :func:`resolve_factory`.
        values: the factory's arguments (:func:`create_task_env`), as JSON.
        options: ``shown``, the fields of :class:`ObservationSelection`, ``endless`` and ``own`` (of
            :class:`SyncVectorEnv`), as JSON.
    """
    for signal_number in IGNORED_SIGNALS:
        # Sent to a whole job: the stage may still want to finish what it does.
        signal.signal(signal_number, signal.SIG_IGN)
    link = SimulatorConnection(socket.socket(fileno=end), own, other)
    envs: SyncVectorEnv | BatchedVectorEnv | None = None
    factory_arguments, parsed_options = json.loads(values), json.loads(options)
    users: Sequence[str] = parsed_options["own"]
    try:
        factory = resolve_factory(target)
        shown = ObservationSelection(**parsed_options["shown"])
        if module_flag(factory, "BATCHED"):
            envs = BatchedVectorEnv(functools.partial(factory, **factory_arguments), shown, users)
        else:
            make = functools.partial(create_task_env, factory, factory_arguments, shown)
            envs = SyncVectorEnv(
                make,
                single_instance=module_flag(factory, "SINGLE_INSTANCE"),
                endless=parsed_options["endless"],
                own=users,
            )
        serve(link, envs)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except InvalidEnvConfig as error:
        failure = {"refused": str(error)}
    except ProcessRestartRequired as error:
        failure = {"restart_required": str(error)}
    except Exception as error:
        failure = {"failed": format_error(error, users)}
    finally:
        # A robot comes to rest.
        if envs is not None:
            with contextlib.suppress(Exception):
                envs.close()
    with contextlib.suppress(OSError):
        link.send({**failure, "pid": os.getpid()}, {})


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
