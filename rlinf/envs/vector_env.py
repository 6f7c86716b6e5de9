"""Vector environments, and the simulator process that steps them for a stage.

A simulator process runs this file by its path (see :func:`main`), possibly under another
interpreter (Python 3.9 or newer) that does not have rlinf. So it imports only the standard library,
numpy, files of this folder that import nothing else either, and what the factory imports. A message
is JSON with arrays in shared memory; nothing is unpickled.

An environment has the methods of Gymnasium: ``reset(seed=)``, ``step(action)``, ``close()``,
``observation_space`` and ``action_space`` (:mod:`rlinf.envs.simulators`). An observation is an
array, which is named ``state``, or arrays by name; :mod:`rlinf.envs.spaces` flattens it.
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
    # Run by its path: relative imports use a stand-in package, because importing rlinf itself would
    # import modules that this interpreter lacks.
    __package__ = "rlinf_simulator.envs"
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    for name, path in (("rlinf_simulator", os.path.dirname(folder)), (__package__, folder)):  # noqa: PTH120
        package: Any = types.ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package

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
"""Keys of a step's ``info`` other than ``success``, with their types: see
:mod:`rlinf.envs.simulators`."""
ACTION_REWARDS = "action_rewards"
"""Column with the reward of each action of a chunk."""


class SyncVectorEnv:
    """Environments of one kind, stepped one after another and addressed by index. They are reused,
    because a seeded reset does not depend on earlier episodes."""

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        single_instance: bool = False,
        ignore_terminations: bool = False,
        user_modules: Sequence[str] = (),
    ) -> None:
        """
        Args:
            single_instance: there is one environment, and a failed reset is not retried: a person
                must look first, for example at a robot arm that hit something.
            ignore_terminations: continue episodes until they are truncated.
            user_modules: as for :func:`format_error`.
        """
        self._make, self._single_instance = make, single_instance
        self._ignore_terminations, self._user_modules = ignore_terminations, user_modules
        self._envs: list[Any] = []
        self._readers: dict[int, ObservationReader] = {}
        """Readers of the open episodes."""
        self._last_observations: dict[int, Arrays] = {}
        self._failed_resets: dict[int, str] = {}
        """Tracebacks of episodes that could not begin, by environment."""
        self._templates: Arrays = {}
        """Arrays with the shapes and types of the first observation, which all others must have."""

    def reset(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
        ordinals: Sequence[int] | None = None,
        *,
        starts_samples: bool = False,
    ) -> Arrays:
        """Begin episodes; return observations by name, ``[n, ...]``.

        An environment that raises, or returns values that are not finite, is recreated and reset
        once more. If that fails too, its observation is zero, and the episode is lost at its first
        step. If no observation is known yet, another seed is tried; if that fails, its error is
        raised. With ``single_instance``, the first failure raises InvalidEnvConfig.

        Args:
            initial_states: indices of initial states (modulo their number), for environments that
                have a list of them; by default the seeds determine the states.
            ordinals: running numbers of the groups (:meth:`RolloutRequest.group_ordinals`), which
                select tasks in rotation, if there are several.
            starts_samples: the episodes are the first ones of their samples; used by
                :class:`BatchedVectorEnv`.
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
            options = (initial_state, None if ordinals is None else ordinals[row])
            try:
                self._reset_one(env_id, seed, *options)
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
                if not self._retry_reset(env_id, seed, *options):
                    failed[env_id] = (seed ^ 1, *options)  # arguments with another seed
        if failed and not self._templates:
            # No observation is known yet; an episode with another seed provides one, or raises.
            env_id, other_reset = next(iter(failed.items()))
            self._reset_one(env_id, *other_reset)
        for env_id in failed:
            self._last_observations[env_id] = {
                name: np.zeros_like(a) for name, a in self._templates.items()
            }
        return stack_observations([self._last_observations[env_id] for env_id in env_ids])

    def save(self, env_ids: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        """Return the states of open episodes, uint8 ``[n]`` each, from which other environments can
        continue.

        If an environment raises, its episode is lost, and it is recreated.

        Returns:
            The states; and, by row, the tracebacks of environments that raised, whose state is
            empty.

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
                errors[row] = format_error(error, self._user_modules)
                self._recreate(env_id)
        return states, errors

    def restore(
        self, env_ids: Sequence[int], states: Sequence[np.ndarray]
    ) -> tuple[Arrays, dict[int, str]]:
        """Continue episodes from states of :meth:`save`.

        An environment that raises is recreated and restored once more.

        Returns:
            The episodes' last observations, ``[n, ...]``; and, by row, the tracebacks of
            environments that raise again. If there are tracebacks, no observations are returned.
        """
        self._ensure_envs(env_ids)
        errors = dict[int, str]()
        for row, (env_id, state) in enumerate(zip(env_ids, states)):  # noqa: B905 - Python 3.9
            try:
                self._restore_one(env_id, unpack_arrays(state))
            except InvalidEnvConfig:
                raise
            except Exception as error:  # a simulator may raise anything
                errors[row] = format_error(error, self._user_modules)
        return (
            {}
            if errors
            else stack_observations([self._last_observations[env_id] for env_id in env_ids])
        ), errors

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        """Step environments. Vectors are clipped to the action space; discrete actions are counted
        from its ``start``.

        A row of ``actions`` may be a chunk, ``[H, ...]``: actions that are executed one after
        another until the episode ends. Observations within a chunk are not rendered.

        If an environment raises, or returns values that are not finite or have another shape or
        type than before, its episode ends, and it is recreated.

        Returns:
            Observations ``[n, ...]`` with the prefix ``seen.``; ``reward`` float64 ``[n]``, summed
            over a chunk; for chunks also :data:`ACTION_REWARDS` float64 ``[n, H]``, 0 for actions
            that were not executed; ``executed`` int32 ``[n]``, the number of actions begun; uint8
            ``[n]``: ``terminated``, ``truncated`` and ``success`` (:func:`is_success`) of the last
            action, and ``solved``, 1 if any action had success; the keys of
            :data:`STEP_INFO_TYPES` that the environments have, ``[n, ...]``, for each action of a
            chunk; and, by row, the tracebacks of environments that raised.

        Raises:
            InvalidEnvConfig: an action is not in the space.
        """
        space = self._envs[env_ids[0]].action_space
        step_info = step_info_columns(self.step_info_keys, actions)
        actions = to_env_actions(space, actions)
        has_single_actions = np.ndim(actions) == 1 + len(getattr(space, "shape", None) or ())
        step_results, all_observations = [], list[Arrays]()
        errors = dict[int, str]()
        for row, (env_id, row_action) in enumerate(zip(env_ids, actions)):  # noqa: B905 - Python 3.9
            if env_id in self._failed_resets:
                errors[row] = self._failed_resets.pop(env_id)
                step_results.append((0.0, 1, *LOST_EPISODE_FLAGS))
                all_observations.append(self._last_observations[env_id])
                continue
            env, total_reward, executed, solved = self._envs[env_id], 0.0, 0, False
            try:
                for index, action in enumerate([row_action] if has_single_actions else row_action):
                    executed += 1
                    observation, reward, terminated, truncated, info = env.step(action)
                    if not math.isfinite(reward):
                        raise ValueError(f"a reward that is not finite: {reward}")
                    total_reward += reward
                    for name, column in step_info.items():
                        position = row if has_single_actions else (row, index)
                        column[position] = reward if name == ACTION_REWARDS else info[name]
                    success = is_success(info)
                    solved = solved or success
                    terminated = terminated and not self._ignore_terminations
                    if terminated or truncated:
                        break
                observations = self._read(env_id, observation)
                flags = (terminated, truncated, success, solved)
                step_results.append((total_reward, executed, *flags))
            except InvalidEnvConfig:
                raise
            except Exception as error:  # a simulator may raise anything
                errors[row] = format_error(error, self._user_modules)
                observations = self._last_observations[env_id]
                step_results.append((total_reward, executed, *LOST_EPISODE_FLAGS))
                self._recreate(env_id)
            all_observations.append(observations)
        stacked = stack_observations(all_observations)
        for row, message in find_non_finite(stacked).items():
            errors[row], all_observations[row] = message, self._last_observations[env_ids[row]]
            step_results[row] = (*step_results[row][:2], *LOST_EPISODE_FLAGS)
            self._recreate(env_ids[row])
            stacked = stack_observations(all_observations)
        self._last_observations.update(zip(env_ids, all_observations))  # noqa: B905 - Python 3.9
        results = (
            np.array(step_results, np.float64).reshape(len(step_results), 2 + len(STEP_FLAGS)).T
        )
        columns: Arrays = {
            "reward": results[0],
            "executed": results[1].astype(np.int32),
            **step_info,
        }
        columns.update(zip(STEP_FLAGS, results[2:].astype(np.uint8)))  # noqa: B905 - Python 3.9
        return {**columns, **prefix_observations(stacked)}, errors

    @property
    def step_info_keys(self) -> Sequence[str]:
        """The keys of :data:`STEP_INFO_TYPES` that the environments have; empty before the first
        environment is created."""
        return tuple(getattr(self._envs[0], "step_info_keys", ())) if self._envs else ()

    def demonstrate(self, seed: int, max_steps: int) -> Arrays:
        """Run an episode with the environment's own ``expert_action()``, from a seeded reset to
        the first success.

        Returns:
            Columns ``[T, ...]``, ``T <= max_steps``: observations with the prefix ``seen.``,
            ``action`` (within the space), ``reward`` float64, ``success`` uint8.
        """
        if not self._envs:
            self._envs.append(self._make())
        env = self._envs[0]
        if not hasattr(env, "expert_action"):
            raise InvalidEnvConfig(NO_EXPERT_MESSAGE)
        observation, rows = env.reset(seed=seed)[0], []
        reader = ObservationReader(env)
        for _ in range(max_steps):
            row = prefix_observations(reader.read(observation))
            action = np.array(env.expert_action())
            (env_action,) = to_env_actions(env.action_space, action[None])
            if hasattr(env.action_space, "low"):
                action = env_action
            observation, reward, terminated, truncated, info = env.step(env_action)
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
        self, env_id: int, seed: int, initial_state: int | None, ordinal: int | None
    ) -> None:
        env = self._envs[env_id]
        if hasattr(env, "num_tasks"):
            options = {"initial_state": initial_state, "ordinal": ordinal}
        else:
            count = getattr(env, "num_initial_states", 0)
            options = {}
            if initial_state is not None and count:
                options = {"initial_state": initial_state % count}
        observation = env.reset(seed=seed, **options)[0]
        self._readers[env_id] = ObservationReader(env)
        observations = self._read(env_id, observation)
        for error in find_non_finite(stack_observations([observations])).values():
            raise ValueError(error)
        self._last_observations[env_id] = observations

    def _retry_reset(
        self, env_id: int, seed: int, initial_state: int | None, ordinal: int | None
    ) -> bool:
        try:
            self._reset_one(env_id, seed, initial_state, ordinal)
        except InvalidEnvConfig:
            raise
        except Exception as error:  # a simulator may raise anything
            self._failed_resets[env_id] = format_error(error, self._user_modules)
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
        """Return an observation; raise ValueError if its shapes or types are not those of the first
        observation."""
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

    The simulator is created for as many environments as the first episodes need, and recreated if
    later episodes need more. Environments without a request get a zero action. A simulator that has
    raised is not used again: the next reset raises ProcessRestartRequired, because a process may be
    able to create only one simulation.
    """

    step_info_keys: Sequence[str] = ()

    def __init__(
        self,
        make: Callable[..., Any],
        selection: ObservationSelection = STATE_ONLY,
        user_modules: Sequence[str] = (),
    ) -> None:
        self._make = functools.partial(make, images=selection.images)
        self._selection, self._user_modules = selection, user_modules
        self._env: Any = None
        self._num_envs, self._last_observations = 0, Arrays()
        self.min_envs = 0
        """Minimum number of environments: as many as a previous process had."""
        self._failure = ""
        """Traceback of the simulator's error; empty if there was none."""
        self._failed_resets: dict[int, str] = {}
        """Errors of episodes that could not begin, by environment."""

    def reset(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
        ordinals: Sequence[int] | None = None,
        *,
        starts_samples: bool = False,
    ) -> Arrays:
        """Begin episodes as :class:`SyncVectorEnv` does, without initial states and tasks.

        An environment whose observation is not finite is reset once more. If the second observation
        is not finite either, its episode is lost.

        Raises:
            ProcessRestartRequired: the simulator has raised, now or before.
        """
        if self._failure:
            raise ProcessRestartRequired(self._failure)
        count = max(*env_ids, self.min_envs - 1, -1) + 1
        # Only the second half of a double buffer begins at an environment above 0.
        if self._num_envs and count > self._num_envs and min(env_ids):
            raise InvalidEnvConfig(
                "task.double_buffer: this simulator steps all environments together; "
                "set it to false"
            )
        if self._env is None or count > self._num_envs:
            self.close()
            self._env = self._create(max(count, self._num_envs))
            self._num_envs = self._env.count
        observations = self._reset_envs(env_ids, seeds, starts_samples=starts_samples)
        if failed := list(find_non_finite(observations)):
            retried = self._reset_envs(
                [env_ids[row] for row in failed], [seeds[row] for row in failed]
            )
            for name, column in retried.items():
                observations[name][failed] = column
        for row, error in find_non_finite(observations).items():
            self._failed_resets[env_ids[row]] = f"{error} after two resets"
            for column in observations.values():
                column[row] = 0
        check_all_used(observations)
        images = self._selection.images
        check_cameras(images, sorted(observations.keys() - {STATE, INSTRUCTION}))
        for name, size in images.items():
            if observations[name].shape[1:] != (*size, 3):
                raise InvalidEnvConfig(
                    f"task.images.{name}: its images are {list(observations[name].shape[1:3])}"
                )
        for name, column in observations.items():
            if (
                name not in self._last_observations
                or len(self._last_observations[name]) < self._num_envs
            ):
                self._last_observations[name] = np.zeros(
                    (self._num_envs, *column.shape[1:]), column.dtype
                )
            self._last_observations[name][list(env_ids)] = column
        return observations

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> tuple[Arrays, dict[int, str]]:
        """Step as :class:`SyncVectorEnv` does. If the simulator raises, all episodes end. If one
        environment returns values that are not finite, or could not begin, its episode ends."""
        ids, space = list(env_ids), self._env.action_space
        if actions.ndim > 1 + len(getattr(space, "shape", None) or ()):
            raise InvalidEnvConfig(
                "task.simulator: this simulator steps all environments together, so it accepts "
                "no chunks of actions; choose a policy of single actions"
            )
        all_actions = np.zeros((self._num_envs, *actions.shape[1:]), actions.dtype)
        all_actions[ids] = to_env_actions(space, actions)
        # The rows of flags are STEP_FLAGS. Without chunks, solved equals success.
        reward, flags = np.zeros(len(ids)), np.zeros((len(STEP_FLAGS), len(ids)), np.uint8)
        errors = dict[int, str]()
        try:
            observation, all_rewards, *all_flags = self._env.step(all_actions)
        except Exception as error:  # a simulator may raise anything
            self._failure = format_error(error, self._user_modules)
            errors = dict.fromkeys(range(len(ids)), self._failure)
            flags[0] = True
        else:
            observations = {name: column[ids] for name, column in self._read(observation).items()}
            reward[:] = np.asarray(all_rewards, np.float64)[ids]
            flags[:3] = [np.asarray(column, np.uint8)[ids] for column in all_flags]
            flags[3] = flags[2]
            errors = find_non_finite(observations)
            for row, env_id in enumerate(ids):
                if env_id in self._failed_resets:
                    errors[row] = self._failed_resets.pop(env_id)
            for row in np.flatnonzero(~np.isfinite(reward)).tolist():
                errors.setdefault(row, f"a reward that is not finite: {reward[row]}")
            valid = [row for row in range(len(ids)) if row not in errors]
            for name, column in observations.items():
                self._last_observations[name][[ids[row] for row in valid]] = column[valid]
            reward[list(errors)], flags[:, list(errors)] = (
                0,
                np.array(LOST_EPISODE_FLAGS, np.uint8)[:, None],
            )
        columns: Arrays = {"reward": reward, "executed": np.ones(len(ids), np.int32)}
        columns.update(zip(STEP_FLAGS, flags))  # noqa: B905 - Python 3.9
        return {
            **columns,
            **prefix_observations({n: c[ids] for n, c in self._last_observations.items()}),
        }, errors

    def _reset_envs(
        self, env_ids: Sequence[int], seeds: Sequence[int], *, starts_samples: bool = False
    ) -> Arrays:
        try:
            if starts_samples and hasattr(self._env, "start_samples"):
                self._env.start_samples(list(env_ids), list(seeds))
            return self._read(self._env.reset(list(env_ids), list(seeds)))
        except InvalidEnvConfig:
            raise
        except Exception as error:  # a simulator may raise anything
            raise ProcessRestartRequired(format_error(error, self._user_modules)) from None

    def spaces(self) -> dict[str, Any]:
        """Return the spaces of one environment as plain values."""
        with contextlib.closing(self._create(1)) as env:
            return describe_spaces(env)

    def _create(self, count: int) -> Any:
        return create_env(functools.partial(self._make, count=count), self._selection, batched=True)

    def demonstrate(self, seed: int, max_steps: int) -> Arrays:
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

    def _read(self, observation: Any) -> Arrays:
        """Return the observations of all environments by name, with the instruction."""
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
    shape = actions.shape[:-1] if actions.dtype.kind == "f" else actions.shape
    columns = {
        name: np.zeros(actions.shape if name == "performed" else shape, STEP_INFO_TYPES[name])
        for name in names
    }
    return {**columns, ACTION_REWARDS: np.zeros(shape)} if len(shape) > 1 else columns


def is_success(info: Any) -> bool:
    """Return whether a step's ``info`` reports success, as ``success`` or ``is_success``."""
    return bool(info.get("success", info.get("is_success", False)))


def serve(connection: SimulatorConnection, envs: SyncVectorEnv | BatchedVectorEnv) -> None:
    """Answer requests until the stage closes the connection."""
    while True:
        request, arrays = connection.receive()
        if request["method"] == "step":
            results, errors = envs.step(request["envs"], arrays["action"])
            connection.send({"errors": list(errors.items())}, results)
        elif request["method"] == "reset":
            if isinstance(envs, BatchedVectorEnv):
                envs.min_envs = request["min_envs"]
            arguments = (request[name] for name in ("envs", "seeds", "initial_states", "ordinals"))
            observations = envs.reset(*arguments, starts_samples=request["starts_samples"])
            connection.send(
                {"step_info_keys": list(envs.step_info_keys)}, prefix_observations(observations)
            )
        elif request["method"] == "restore":
            states = [arrays[str(row)] for row in range(len(request["envs"]))]
            observations, errors = envs.restore(request["envs"], states)
            reply = {"step_info_keys": list(envs.step_info_keys), "errors": list(errors.items())}
            connection.send(reply, prefix_observations(observations))
        elif request["method"] == "save":
            states, errors = envs.save(request["envs"])
            arrays = {str(row): state for row, state in enumerate(states) if row not in errors}
            connection.send({"errors": list(errors.items())}, arrays)
        elif request["method"] == "demonstrate":
            connection.send({}, envs.demonstrate(request["seed"], request["max_steps"]))
        else:
            connection.send(envs.spaces(), {})


def main(
    socket_fd: int,
    write_fd: int,
    read_fd: int,
    target: str,
    factory_kwargs_json: str,
    options_json: str,
) -> None:
    """Run a simulator process, which serves a stage.

    Args:
        socket_fd: file descriptor of this process's end of the socket pair.
        write_fd, read_fd: file descriptors of memory files; see :class:`SimulatorConnection`.
        target: as for :func:`resolve_factory`.
        factory_kwargs_json: the factory's arguments (:func:`create_task_env`).
        options_json: ``observations`` (the fields of :class:`ObservationSelection`),
            ``ignore_terminations`` and ``user_modules`` (of :class:`SyncVectorEnv`).
    """
    for signal_number in IGNORED_SIGNALS:
        # A signal to the whole job must not interrupt an answer that the stage still waits for.
        signal.signal(signal_number, signal.SIG_IGN)
    connection = SimulatorConnection(socket.socket(fileno=socket_fd), write_fd, read_fd)
    envs: SyncVectorEnv | BatchedVectorEnv | None = None
    factory_kwargs, options = json.loads(factory_kwargs_json), json.loads(options_json)
    user_modules: Sequence[str] = options["user_modules"]
    try:
        factory = resolve_factory(target)
        selection = ObservationSelection(**options["observations"])
        if module_flag(factory, "BATCHED"):
            make = functools.partial(factory, **factory_kwargs)
            envs = BatchedVectorEnv(make, selection, user_modules)
        else:
            envs = SyncVectorEnv(
                functools.partial(create_task_env, factory, factory_kwargs, selection),
                single_instance=module_flag(factory, "SINGLE_INSTANCE"),
                ignore_terminations=options["ignore_terminations"],
                user_modules=user_modules,
            )
        serve(connection, envs)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except InvalidEnvConfig as error:
        failure = {"invalid_config": str(error)}
    except ProcessRestartRequired as error:
        failure = {"restart_required": str(error)}
    except Exception as error:
        failure = {"failed": format_error(error, user_modules)}
    finally:
        # Closing brings a robot to rest.
        if envs is not None:
            with contextlib.suppress(Exception):
                envs.close()
    with contextlib.suppress(OSError):
        connection.send({**failure, "pid": os.getpid()}, {})


if __name__ == "__main__":
    # sys.argv[1] is the path of this file: see BOOTSTRAP_CODE of subprocess_env.py.
    main(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
