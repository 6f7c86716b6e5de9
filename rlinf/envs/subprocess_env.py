"""Vector environments in processes of their own, stepped while the policy computes.

The episode loops stay in the stage. The processes step environments (:mod:`rlinf.envs.vector_env`),
under their own interpreter if one is named. A socket wakes the waiting side at once. If a process
dies, the stage starts another; if the stage dies, the process exits. Observations come in shared
memory without a name, which disappears with the last of the two processes.
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
MAX_START_ATTEMPTS = 3
"""Processes that may die in a row before episodes begin."""
SITE_PACKAGE_DIRS = ("site-packages", "dist-packages")
BOOTSTRAP_CODE = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Runs a file as ``__main__`` without its folder on the module search path."""
log = logging.getLogger(__name__)
T = TypeVar("T")
AsyncCall = Generator[None, None, T]
"""A request to a process: sent at the first ``next``; its result is awaited after that."""
VectorStep = tuple[Arrays, dict[int, str]]


class SimulatorError(RlinfError):
    """A simulator failed in its process, or the process died repeatedly; the next attempt starts
    new ones."""


class SimulatorCodeError(UserCodeError, SimulatorError):
    """A simulator error from the user's own code, which a retry would meet again."""


def create_simulator_error(message: str, *raised: str) -> SimulatorError:
    """Return the error for tracebacks of simulators, as
    :func:`rlinf.envs.simulator_errors.format_error` writes them."""
    ours = bool(raised) and all(USER_CODE_PREFIX in text for text in raised)
    return (SimulatorCodeError if ours else SimulatorError)(message)


class SubprocessVectorEnv:
    """Environments in a process; see :class:`rlinf.envs.vector_env.SyncVectorEnv`.

    A process that dies, or does not answer for ``timeout_s``, is replaced; only the episodes that
    it stepped are lost. Methods raise SimulatorError if the simulator raised outside an episode
    (with its traceback) or no process can begin one, and InputError if it refused its
    configuration.
    """

    def __init__(
        self,
        maker: str,
        values: Mapping[str, Any],
        python: str | None,
        timeout_s: float,
        shown: ObservationSelection = STATE_ONLY,
        renderer: str = "egl",
        closes_s: float = 0.0,
        endless: bool = False,
        own: Sequence[str] = (),
    ) -> None:
        """
        Args:
            maker: the factory: ``module:attribute`` or ``FILE.py:attribute``.
            values: its arguments, plain; see :func:`rlinf.envs.factory.create_task_env`.
            python: the interpreter; None: this one.
            timeout_s: for one answer, the first of which waits for the simulator's imports.
            shown: the observations that are used, images with height and width.
            renderer: of MuJoCo, ``egl`` or ``osmesa``.
            closes_s: time to close its environments at the end.
            endless, own: as for :class:`rlinf.envs.vector_env.SyncVectorEnv`.
        """
        options = {"shown": shown._asdict(), "endless": endless, "own": list(own)}
        self._command = (maker, json.dumps(dict(values)), json.dumps(options))
        self._renderer = {"MUJOCO_GL": renderer, "PYOPENGL_PLATFORM": renderer}
        self._python, self._timeout_s, self._closes_s = python, timeout_s, closes_s
        self._episode_pids: dict[int, int] = {}
        """The process in which each environment's episode began."""
        self._empty_columns: Arrays = {"reward": np.zeros(0), "executed": np.zeros(0, np.int32)}
        self._empty_columns |= {name: np.zeros(0, np.uint8) for name in STEP_FLAGS}
        self._min_envs = 0
        """The largest number of environments so far."""
        self._step_info_keys: tuple[str, ...] = ()
        """Keys of the step info that the environments have."""
        self._start()

    def _start(self) -> None:
        mine, its = socket.socketpair()
        mine.settimeout(self._timeout_s)
        file = str(Path(vector_env.__file__).resolve())
        memory = [os.memfd_create("rlinf-envs", os.MFD_CLOEXEC) for _ in range(2)]
        with its:
            self._process = subprocess.Popen(
                [
                    *(self._python or sys.executable, "-c", BOOTSTRAP_CODE),
                    *(file, str(its.fileno()), *map(str, memory), *self._command),
                ],
                pass_fds=[its.fileno(), *memory],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **process_tuning.child_environment(),
                    **self._renderer,
                    "PYTHONPATH": _path(self._python),
                },
            )
        self._link, self.pid = SimulatorConnection(mine, *memory[::-1]), self._process.pid
        # Also when nobody closes the environment: at the end of the stage's process.
        self._end = weakref.finalize(self, _end, self._process, memory, mine, self._closes_s)

    def reset(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
        turns: Sequence[int] | None = None,
    ) -> Arrays:
        return wait_for_result(self.reset_async(env_ids, seeds, initial_states, turns))

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> VectorStep:
        return wait_for_result(self.step_async(env_ids, actions))

    def save(self, env_ids: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        return wait_for_result(self.save_async(env_ids))

    def restore(self, env_ids: Sequence[int], states: Sequence[np.ndarray]) -> VectorStep:
        return wait_for_result(self.restore_async(env_ids, states))

    def demonstrate(self, seed: int, most: int) -> Arrays:
        order = {"method": "demonstrate", "seed": seed, "max_steps": most}
        try:
            return wait_for_result(self._call(order))[1]
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
        turns: Sequence[int] | None = None,
    ) -> AsyncCall[Arrays]:
        """:meth:`reset` in two parts, between which other processes can be called."""
        self._min_envs = max(*env_ids, self._min_envs - 1, -1) + 1
        order: dict[str, Any] = {"method": "reset", "envs": list(env_ids), "seeds": list(seeds)}
        order |= {"initial_states": initial_states, "turns": turns, "min_envs": self._min_envs}
        _, observations = yield from self._begin_episodes(env_ids, order)
        return observations

    def restore_async(
        self, env_ids: Sequence[int], states: Sequence[np.ndarray]
    ) -> AsyncCall[VectorStep]:
        """:meth:`restore` in two parts."""
        arrays = {str(row): state for row, state in enumerate(states)}
        order = {"method": "restore", "envs": list(env_ids)}
        answer, observations = yield from self._begin_episodes(env_ids, order, arrays)
        return observations, dict(answer["errors"])

    def _begin_episodes(
        self, env_ids: Sequence[int], order: dict[str, Any], arrays: Arrays | None = None
    ) -> AsyncCall[tuple[dict[str, Any], Arrays]]:
        """Return the answer, and the first observations; start new processes if they die."""
        deaths = 0
        while True:
            try:
                answer = yield from self._call(order, arrays)
            except _ProcessDied as death:
                deaths += 1
                if deaths == MAX_START_ATTEMPTS:
                    message = f"{death}; so did {deaths - 1} before it"
                    raise create_simulator_error(message, str(death)) from None
                self._replace(death)
            else:
                self._episode_pids.update(dict.fromkeys(env_ids, self.pid))
                self._empty_columns |= {name: column[:0] for name, column in answer[1].items()}
                self._step_info_keys = tuple(answer[0]["step_info_keys"])
                return answer[0], unprefix_observations(answer[1])

    def save_async(
        self, env_ids: Sequence[int]
    ) -> AsyncCall[tuple[list[np.ndarray], dict[int, str]]]:
        """:meth:`save` in two parts; episodes of a process that died are lost."""
        there = [k for k, n in enumerate(env_ids) if self._episode_pids[n] == self.pid]
        states, errors = [EMPTY_STATE] * len(env_ids), dict[int, str]()
        if there:
            order = {"method": "save", "envs": [env_ids[k] for k in there]}
            try:
                answer, results = yield from self._call(order)
                errors = {there[row]: error for row, error in answer["errors"]}
                for row, state in results.items():
                    states[there[int(row)]] = state
            except _ProcessDied as death:
                self._replace(death)
                there = []
        lost = {k: self._death_reason for k in range(len(env_ids)) if k not in there}
        return states, {**errors, **lost}

    def step_async(self, env_ids: Sequence[int], actions: np.ndarray) -> AsyncCall[VectorStep]:
        """:meth:`step` in two parts."""
        step_info = step_info_columns(self._step_info_keys, actions[:0])
        there = [k for k, n in enumerate(env_ids) if self._episode_pids[n] == self.pid]
        results, errors = {**self._empty_columns, **step_info}, dict[int, str]()
        if there:
            order = {"method": "step", "envs": [env_ids[k] for k in there]}
            try:
                answer, results = yield from self._call(order, {"action": actions[there]})
                errors = {there[row]: error for row, error in answer["errors"]}
            except _ProcessDied as death:
                self._replace(death)
                there = []
        if len(there) == len(env_ids):
            return results, errors
        # The episodes of the others ended with their process.
        lost = {k: self._death_reason for k in range(len(env_ids)) if k not in there}
        columns = {n: np.zeros((len(env_ids), *c.shape[1:]), c.dtype) for n, c in results.items()}
        for name, column in results.items() if there else ():
            columns[name][there] = column
        columns["terminated"][list(lost)] = columns["executed"][list(lost)] = 1
        return columns, {**errors, **lost}

    def close(self) -> None:
        """End the process. It has nothing to save, and at most a robot to stop."""
        self._end()

    def _replace(self, death: _ProcessDied) -> None:
        """Start a new process in place of a dead one."""
        self._death_reason = str(death)
        log.warning("%s: its episodes are lost; a new process replaces it", self._death_reason)
        self._link.close()
        self._end()
        self._start()

    def _call(
        self, order: dict[str, Any], arrays: Arrays | None = None
    ) -> AsyncCall[tuple[dict[str, Any], Arrays]]:
        try:
            self._link.send(order, arrays or {})
            yield
            answer, columns = self._link.receive()
        except TimeoutError:
            raise _ProcessDied(
                f"simulator process {self.pid} did not answer for {self._timeout_s:g} s "
                "(task.timeout_s; more task.num_processes have fewer environments to begin each)"
            ) from None
        except (EOFError, OSError):
            raise self._death() from None
        if "refused" in answer:
            raise InputError(str(answer["refused"]))
        if "restart_required" in answer:
            raise _ProcessDied(f"simulator process {self.pid}: {answer['restart_required']}")
        if "failed" in answer:
            text = str(answer["failed"])
            raise create_simulator_error(f"simulator process {self.pid}: {text}", text)
        return answer, columns

    def _death(self) -> _ProcessDied:
        """Return why the process no longer answers."""
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return _ProcessDied(f"simulator process {self.pid} closed its connection")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return _ProcessDied(f"simulator process {self.pid} {how} while it was needed")


ProcessShare = tuple[SubprocessVectorEnv, list[int], list[int]]
"""A process, its rows of a request, and its own numbers of these environments."""


class MultiProcessVectorEnv:
    """Environments in ``count`` processes, which step theirs at the same time.

    Environment ``n`` is in process ``n % count``; processes start when they are needed. See
    :class:`SubprocessVectorEnv`.
    """

    def __init__(self, make: Callable[[], SubprocessVectorEnv], count: int) -> None:
        self._make, self._count = make, count
        self._processes: dict[int, SubprocessVectorEnv] = {}

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [process.pid for _, process in sorted(self._processes.items())]

    def reset(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        initial_states: Sequence[int] | None = None,
        turns: Sequence[int] | None = None,
    ) -> Arrays:
        shares = self._shares(env_ids)
        calls = [
            p.reset_async(
                own, [seeds[k] for k in rows], _select(initial_states, rows), _select(turns, rows)
            )
            for p, rows, own in shares
        ]
        return _merge_columns(len(env_ids), shares, _gather(calls))

    def step(self, env_ids: Sequence[int], actions: np.ndarray) -> VectorStep:
        shares = self._shares(env_ids)
        results = _gather([p.step_async(own, actions[rows]) for p, rows, own in shares])
        errors = _by_row(shares, [each for _, each in results])
        return _merge_columns(len(env_ids), shares, [columns for columns, _ in results]), errors

    def save(self, env_ids: Sequence[int]) -> tuple[list[np.ndarray], dict[int, str]]:
        shares = self._shares(env_ids)
        results = _gather([p.save_async(own) for p, _, own in shares])
        states = _by_row(shares, [dict(enumerate(some)) for some, _ in results])
        errors = _by_row(shares, [each for _, each in results])
        return [states[row] for row in range(len(env_ids))], errors

    def restore(self, env_ids: Sequence[int], states: Sequence[np.ndarray]) -> VectorStep:
        shares = self._shares(env_ids)
        calls = [p.restore_async(own, [states[k] for k in rows]) for p, rows, own in shares]
        results = _gather(calls)
        if errors := _by_row(shares, [each for _, each in results]):
            return {}, errors
        return _merge_columns(
            len(env_ids), shares, [observations for observations, _ in results]
        ), {}

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        for process in self._processes.values():
            process.close()
        self._processes = {}

    def _shares(self, env_ids: Sequence[int]) -> list[ProcessShare]:
        shares = []
        for place in range(self._count):
            rows = [row for row, number in enumerate(env_ids) if number % self._count == place]
            if rows:
                if place not in self._processes:
                    self._processes[place] = self._make()
                own = [env_ids[row] // self._count for row in rows]
                shares.append((self._processes[place], rows, own))
        return shares


def _select(values: Sequence[int] | None, rows: Sequence[int]) -> list[int] | None:
    return None if values is None else [values[row] for row in rows]


def wait_for_result(order: AsyncCall[T]) -> T:
    """Return the result of an asynchronous call."""
    while True:
        try:
            next(order)
        except StopIteration as end:
            result: T = end.value
            return result


def _gather(orders: Sequence[AsyncCall[T]]) -> list[T]:
    """Return the results of calls to several processes; all are sent before the first is awaited.

    A call without a request has its result at once.
    """
    results: dict[int, T] = {}
    for number, order in enumerate(orders):
        try:
            next(order)
        except StopIteration as end:
            results[number] = end.value
    for number, order in enumerate(orders):
        if number not in results:
            results[number] = wait_for_result(order)
    return [results[number] for number in range(len(orders))]


def _by_row(shares: Sequence[ProcessShare], parts: Sequence[Mapping[int, T]]) -> dict[int, T]:
    """Return what shares report for some of their rows, by the rows of all."""
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


def _end(
    process: subprocess.Popen[bytes], memory: Sequence[int], link: socket.socket, closes_s: float
) -> None:
    link.close()  # which it takes for its end
    if closes_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(closes_s)
    process.kill()
    process.wait()
    for file in memory:
        os.close(file)


def _path(python: str | None) -> str:
    """Return the module search path of a process: a task may come from a module that only ours
    contains.

    Another interpreter gets none of the packages that belong to this one.
    """
    parts = [part or str(Path.cwd()) for part in sys.path]
    if python is not None:
        own = {Path(sys.prefix), Path(sys.base_prefix)}
        parts = [part for part in parts if not own & {Path(part), *Path(part).parents}]
        parts = [part for part in parts if Path(part).name not in SITE_PACKAGE_DIRS]
    return os.pathsep.join(parts)
