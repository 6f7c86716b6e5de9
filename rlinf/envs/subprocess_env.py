"""Vector environments in separate processes, stepped while the policy computes.

The stage runs the episode loops. The processes only step environments
(:mod:`rlinf.envs.vector_env`), under another interpreter if one is configured. Requests and answers
go through a socket, so neither side polls. If a process dies, the stage starts another; if the
stage dies, the process exits. Observations are in anonymous shared memory, which is freed when both
have ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlinf import process_tuning
from rlinf.envs import vector_env
from rlinf.envs.ipc import SimulatorConnection
from rlinf.envs.observations import (
    EMPTY_STATE,
    STATE_ONLY,
    STEP_FLAGS,
    Arrays,
    ObservationSelection,
    unprefix_observations,
)
from rlinf.envs.simulator_errors import USER_CODE_PREFIX
from rlinf.envs.vector_env import step_info_columns
from rlinf.errors import InputError, RlinfError, UserCodeError

EXIT_TIMEOUT_S = 2.0
"""Wait for the exit code of a process that closed its connection."""
MAX_START_ATTEMPTS = 3
"""Number of processes that are tried, one after another, to begin episodes."""
SITE_PACKAGE_DIRS = ("site-packages", "dist-packages")
BOOTSTRAP_CODE = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Runs a file as ``__main__`` without its folder on the module search path."""
log = logging.getLogger(__name__)
T = TypeVar("T")
AsyncCall = Generator[None, None, T]
"""A request to a process: the first ``next`` sends it, the second waits for its result."""
VectorStep = tuple[Arrays, dict[int, str]]
"""Arrays by name, and errors by row."""


class SimulatorError(RlinfError):
    """A simulator failed in its process, or the process died repeatedly; a retry of the stage
    starts new processes."""


class SimulatorCodeError(UserCodeError, SimulatorError):
    """A simulator error from the user's own code that a retry would raise again."""


def create_simulator_error(message: str, *tracebacks: str) -> SimulatorError:
    """Return the error for tracebacks of simulators, as
    :func:`rlinf.envs.simulator_errors.format_error` writes them."""
    is_user_error = bool(tracebacks) and all(USER_CODE_PREFIX in text for text in tracebacks)
    return (SimulatorCodeError if is_user_error else SimulatorError)(message)


class SubprocessVectorEnv:
    """Environments in a process; see :class:`rlinf.envs.vector_env.SyncVectorEnv`.

    A process that dies, or does not answer for ``timeout_s``, is replaced; only the episodes that
    it stepped are lost. Methods raise SimulatorError if the simulator fails outside an episode (the
    message has its traceback) or if no process can begin an episode, and InputError if the
    simulator rejects its configuration.
    """

    def __init__(
        self,
        factory: str,
        factory_kwargs: Mapping[str, Any],
        python: str | None,
        timeout_s: float,
        observations: ObservationSelection = STATE_ONLY,
        renderer: str = "egl",
        close_timeout_s: float = 0.0,
        ignore_terminations: bool = False,
        user_modules: Sequence[str] = (),
    ) -> None:
        """
        Args:
            factory: ``module:attribute`` or ``FILE.py:attribute``.
            factory_kwargs: the factory's arguments, as JSON values; see
                :func:`rlinf.envs.factory.create_task_env`.
            python: the interpreter; None: this one.
            timeout_s: time limit of an answer; the first one includes the simulator's imports.
            observations: the observations that are used, images with height and width.
            renderer: MuJoCo's renderer, ``egl`` or ``osmesa``.
            close_timeout_s: seconds that the process has to close its environments before it is
                killed.
            ignore_terminations, user_modules: as for
                :class:`rlinf.envs.vector_env.SyncVectorEnv`.
        """
        options: dict[str, Any] = {"ignore_terminations": ignore_terminations}
        options |= {"observations": observations._asdict(), "user_modules": list(user_modules)}
        self._arguments = (factory, json.dumps(dict(factory_kwargs)), json.dumps(options))
        self._renderer = {"MUJOCO_GL": renderer, "PYOPENGL_PLATFORM": renderer}
        self._python, self._timeout_s, self._close_timeout_s = python, timeout_s, close_timeout_s
        self._episode_pids: dict[int, int] = {}
        """The process in which each environment's episode began."""
        self._empty_columns: Arrays = {"reward": np.zeros(0), "executed": np.zeros(0, np.int32)}
        self._empty_columns |= {name: np.zeros(0, np.uint8) for name in STEP_FLAGS}
        """Columns of a step without rows, for steps after the process died."""
        self._num_envs = 0
        """The largest number of environments so far, which a new process creates again."""
        self._step_info_keys: tuple[str, ...] = ()
        """Keys of the step info that the environments have."""
        self._start()

    def _start(self) -> None:
        parent_socket, child_socket = socket.socketpair()
        parent_socket.settimeout(self._timeout_s)
        script = str(Path(vector_env.__file__).resolve())
        memory_files = [os.memfd_create("rlinf-envs", os.MFD_CLOEXEC) for _ in range(2)]
        with child_socket:
            self._process = subprocess.Popen(
                [
                    *(self._python or sys.executable, "-c", BOOTSTRAP_CODE, script),
                    *(str(child_socket.fileno()), *map(str, memory_files), *self._arguments),
                ],
                pass_fds=[child_socket.fileno(), *memory_files],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **process_tuning.child_environment(),
                    **self._renderer,
                    "PYTHONPATH": _python_path(self._python),
                },
            )
        self._connection = SimulatorConnection(parent_socket, *memory_files[::-1])  # ends swapped
        self.pid = self._process.pid
        # Runs at the exit of the stage's process too, if nobody closed the environment.
        stop_args = (self._process, memory_files, parent_socket, self._close_timeout_s)
        self._finalizer = weakref.finalize(self, _stop_process, *stop_args)

    def reset(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
        ordinals: Sequence[int] | None = None,
        *,
        starts_samples: bool = False,
    ) -> Arrays:
        options = {"starts_samples": starts_samples}
        return wait_for_result(
            self.reset_async(env_ids, seeds, initial_states, ordinals, **options)
        )

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> VectorStep:
        return wait_for_result(self.step_async(env_ids, actions))

    def save(self, env_ids: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        return wait_for_result(self.save_async(env_ids))

    def restore(self, env_ids: Sequence[int], states: Sequence[np.ndarray]) -> VectorStep:
        return wait_for_result(self.restore_async(env_ids, states))

    def demonstrate(self, seed: int, max_steps: int) -> Arrays:
        request = {"method": "demonstrate", "seed": seed, "max_steps": max_steps}
        try:
            return wait_for_result(self._call(request))[1]
        except _ProcessDied as death:
            raise SimulatorError(str(death)) from None

    def spaces(self) -> dict[str, Any]:
        try:
            return wait_for_result(self._call({"method": "spaces"}))[0]
        except _ProcessDied as death:
            raise SimulatorError(str(death)) from None

    def reset_async(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
        ordinals: Sequence[int] | None = None,
        *,
        starts_samples: bool = False,
    ) -> AsyncCall[Arrays]:
        """:meth:`reset` in two parts, between which other processes can be called."""
        self._num_envs = max(*env_ids, self._num_envs - 1, -1) + 1
        request: dict[str, Any] = {"method": "reset", "envs": list(env_ids), "seeds": list(seeds)}
        request |= {"initial_states": initial_states, "ordinals": ordinals}
        request |= {"min_envs": self._num_envs, "starts_samples": starts_samples}
        _, observations = yield from self._begin_episodes(env_ids, request)
        return observations

    def restore_async(
        self, env_ids: Sequence[int], states: Sequence[np.ndarray]
    ) -> AsyncCall[VectorStep]:
        """:meth:`restore` in two parts."""
        arrays = {str(row): state for row, state in enumerate(states)}
        request = {"method": "restore", "envs": list(env_ids)}
        answer, observations = yield from self._begin_episodes(env_ids, request, arrays)
        return observations, dict(answer["errors"])

    def _begin_episodes(
        self, env_ids: Sequence[int], request: dict[str, Any], arrays: Arrays | None = None
    ) -> AsyncCall[tuple[dict[str, Any], Arrays]]:
        """Return the answer and the first observations; replace a process that dies."""
        deaths = 0
        while True:
            try:
                answer, columns = yield from self._call(request, arrays)
            except _ProcessDied as death:
                deaths += 1
                if deaths == MAX_START_ATTEMPTS:
                    message = f"{death}; {deaths - 1} processes before it failed too"
                    raise create_simulator_error(message, str(death)) from None
                self._replace(death)
            else:
                self._episode_pids.update(dict.fromkeys(env_ids, self.pid))
                self._empty_columns |= {name: column[:0] for name, column in columns.items()}
                self._step_info_keys = tuple(answer["step_info_keys"])
                return answer, unprefix_observations(columns)

    def save_async(
        self, env_ids: Sequence[int]
    ) -> AsyncCall[tuple[list[np.ndarray], dict[int, str]]]:
        """:meth:`save` in two parts; episodes of a process that died are lost."""
        live_rows = self._live_rows(env_ids)
        states, errors = [EMPTY_STATE] * len(env_ids), dict[int, str]()
        if live_rows:
            request = {"method": "save", "envs": [env_ids[row] for row in live_rows]}
            try:
                answer, results = yield from self._call(request)
                errors = {live_rows[index]: error for index, error in answer["errors"]}
                for index, state in results.items():
                    states[live_rows[int(index)]] = state
            except _ProcessDied as death:
                self._replace(death)
                live_rows = []
        lost = {row: self._death_reason for row in range(len(env_ids)) if row not in live_rows}
        return states, {**errors, **lost}

    def step_async(self, env_ids: Sequence[int], actions: np.ndarray) -> AsyncCall[VectorStep]:
        """:meth:`step` in two parts."""
        step_info = step_info_columns(self._step_info_keys, actions[:0])
        live_rows = self._live_rows(env_ids)
        results, errors = {**self._empty_columns, **step_info}, dict[int, str]()
        if live_rows:
            request = {"method": "step", "envs": [env_ids[row] for row in live_rows]}
            try:
                answer, results = yield from self._call(request, {"action": actions[live_rows]})
                errors = {live_rows[index]: error for index, error in answer["errors"]}
            except _ProcessDied as death:
                self._replace(death)
                live_rows = []
        if len(live_rows) == len(env_ids):
            return results, errors
        # The other episodes ended with their process.
        lost = {row: self._death_reason for row in range(len(env_ids)) if row not in live_rows}
        columns = {n: np.zeros((len(env_ids), *c.shape[1:]), c.dtype) for n, c in results.items()}
        for name, column in results.items() if live_rows else ():
            columns[name][live_rows] = column
        columns["terminated"][list(lost)] = columns["executed"][list(lost)] = 1
        return columns, {**errors, **lost}

    def close(self) -> None:
        """Stop the process. It has nothing to save, but a robot may have to come to rest."""
        self._finalizer()

    def _live_rows(self, env_ids: Sequence[int]) -> list[int]:
        """Return the rows whose episodes began in the current process."""
        return [row for row, n in enumerate(env_ids) if self._episode_pids[n] == self.pid]

    def _replace(self, death: _ProcessDied) -> None:
        """Start a new process in place of a dead one."""
        self._death_reason = str(death)
        log.warning("%s: its episodes are lost; a new process replaces it", self._death_reason)
        self._connection.close()
        self._finalizer()
        self._start()

    def _call(
        self, request: dict[str, Any], arrays: Arrays | None = None
    ) -> AsyncCall[tuple[dict[str, Any], Arrays]]:
        try:
            self._connection.send(request, arrays or {})
            yield
            answer, columns = self._connection.receive()
        except TimeoutError:
            raise _ProcessDied(
                f"simulator process {self.pid} did not answer for {self._timeout_s:g} s "
                "(raise task.timeout_s, or task.num_processes so that each process has fewer "
                "environments to begin)"
            ) from None
        except (EOFError, OSError):
            raise self._death() from None
        if "invalid_config" in answer:
            raise InputError(str(answer["invalid_config"]))
        if "restart_required" in answer:
            raise _ProcessDied(f"simulator process {self.pid}: {answer['restart_required']}")
        if "failed" in answer:
            text = str(answer["failed"])
            raise create_simulator_error(f"simulator process {self.pid}: {text}", text)
        return answer, columns

    def _death(self) -> _ProcessDied:
        """Return the error for a process that closed its connection."""
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return _ProcessDied(f"simulator process {self.pid} closed its connection")
        end = f"exited with code {code}"
        if code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        return _ProcessDied(f"simulator process {self.pid} {end} before it answered")


ProcessShare = tuple[SubprocessVectorEnv, list[int], list[int]]
"""A process, its rows of a request, and the ids of these environments within the process."""


class MultiProcessVectorEnv:
    """Environments in ``count`` processes, which step at the same time.

    Environment ``n`` is in process ``n % count``; a process starts at the first request to it. See
    :class:`SubprocessVectorEnv`.
    """

    def __init__(self, make: Callable[[], SubprocessVectorEnv], count: int) -> None:
        self._make, self._count = make, count
        self._processes: dict[int, SubprocessVectorEnv] = {}

    @property
    def pids(self) -> list[int]:
        return [process.pid for _, process in sorted(self._processes.items())]

    def reset(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
        ordinals: Sequence[int] | None = None,
        *,
        starts_samples: bool = False,
    ) -> Arrays:
        shares = self._shares(env_ids)
        calls = [
            p.reset_async(
                ids,
                [seeds[k] for k in rows],
                _pick(initial_states, rows),
                _pick(ordinals, rows),
                starts_samples=starts_samples,
            )
            for p, rows, ids in shares
        ]
        return _merge_columns(len(env_ids), shares, _gather(calls))

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> VectorStep:
        shares = self._shares(env_ids)
        results = _gather([p.step_async(local, actions[rows]) for p, rows, local in shares])
        errors = _merge_by_row(shares, [share_errors for _, share_errors in results])
        return _merge_columns(len(env_ids), shares, [columns for columns, _ in results]), errors

    def save(self, env_ids: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        shares = self._shares(env_ids)
        results = _gather([process.save_async(local_ids) for process, _, local_ids in shares])
        states = _merge_by_row(shares, [dict(enumerate(values)) for values, _ in results])
        errors = _merge_by_row(shares, [share_errors for _, share_errors in results])
        return [states[row] for row in range(len(env_ids))], errors

    def restore(self, env_ids: Sequence[int], states: Sequence[np.ndarray]) -> VectorStep:
        shares = self._shares(env_ids)
        results = _gather(
            [p.restore_async(local, [states[row] for row in rows]) for p, rows, local in shares]
        )
        if errors := _merge_by_row(shares, [share_errors for _, share_errors in results]):
            return {}, errors
        return _merge_columns(
            len(env_ids), shares, [observations for observations, _ in results]
        ), {}

    def close(self) -> None:
        """Stop the processes; they start again at the next request."""
        for process in self._processes.values():
            process.close()
        self._processes = {}

    def _shares(self, env_ids: Sequence[int]) -> list[ProcessShare]:
        shares = []
        for index in range(self._count):
            rows = [row for row, env_id in enumerate(env_ids) if env_id % self._count == index]
            if rows:
                if index not in self._processes:
                    self._processes[index] = self._make()
                local_ids = [env_ids[row] // self._count for row in rows]
                shares.append((self._processes[index], rows, local_ids))
        return shares


def _pick(values: Sequence[int] | None, rows: Sequence[int]) -> list[int] | None:
    return None if values is None else [values[row] for row in rows]


def wait_for_result(call: AsyncCall[T]) -> T:
    while True:
        try:
            next(call)
        except StopIteration as end:
            result: T = end.value
            return result


def _gather(calls: Sequence[AsyncCall[T]]) -> list[T]:
    """Return the results of calls to several processes; all are sent before the first is awaited.

    A call without a request has its result at once.
    """
    results: dict[int, T] = {}
    for index, call in enumerate(calls):
        try:
            next(call)
        except StopIteration as end:
            results[index] = end.value
    for index, call in enumerate(calls):
        if index not in results:
            results[index] = wait_for_result(call)
    return [results[index] for index in range(len(calls))]


def _merge_by_row(shares: Sequence[ProcessShare], parts: Sequence[Mapping[int, T]]) -> dict[int, T]:
    """Merge values by row of each share into values by row of the whole request."""
    return {
        rows[row]: value
        for (_, rows, _), part in zip(shares, parts, strict=True)
        for row, value in part.items()
    }


def _merge_columns(count: int, shares: Sequence[ProcessShare], parts: Sequence[Arrays]) -> Arrays:
    """Return columns ``[count, ...]`` assembled from the rows of the shares."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: np.empty((count, *c.shape[1:]), c.dtype) for name, c in parts[0].items()}
    for (_, rows, _), part in zip(shares, parts, strict=True):
        for name, column in part.items():
            columns[name][rows] = column
    return columns


class _ProcessDied(Exception):
    """A process no longer answers; the message says why."""


def _stop_process(
    process: subprocess.Popen[bytes], fds: Sequence[int], sock: socket.socket, timeout_s: float
) -> None:
    sock.close()  # the process exits when its connection closes
    if timeout_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    process.kill()
    process.wait()
    for fd in fds:
        os.close(fd)


def _python_path(python: str | None) -> str:
    """Return PYTHONPATH for a process, so that it finds task modules that this process finds.

    For another interpreter it leaves out the packages of this interpreter.
    """
    folders = [folder or str(Path.cwd()) for folder in sys.path]
    if python is not None:
        prefixes = {Path(sys.prefix), Path(sys.base_prefix)}
        folders = [f for f in folders if not prefixes & {Path(f), *Path(f).parents}]
        folders = [folder for folder in folders if Path(folder).name not in SITE_PACKAGE_DIRS]
    return os.pathsep.join(folders)
