"""Episode loops of simulators: they send requests to the policy and record trajectories. Also
collects demonstrations of experts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.data.episodes import OPEN_METRICS, OPEN_STATE
from rlinf.data.record import IMAGE_PREFIX, VIDEO_PREFIX, Record, RecordId
from rlinf.data.trajectory import Trajectory, info_fields, step_fields
from rlinf.envs.base import RolloutRequest
from rlinf.envs.observations import (
    INSTRUCTION,
    STATE,
    Arrays,
    InvalidEnvConfig,
    encode_instruction,
    unprefix_observations,
)
from rlinf.envs.subprocess_env import (
    MultiProcessVectorEnv,
    SimulatorError,
    SubprocessVectorEnv,
    create_simulator_error,
)
from rlinf.envs.vector_env import ACTION_REWARDS, STEP_INFO_TYPES, SyncVectorEnv
from rlinf.errors import ConfigError, InputError, UserCodeError, exception_line
from rlinf.progress import PROGRESS
from rlinf.seeding import generator

EpisodeLoop = Generator[Record, Record, list[Trajectory]]
"""The loop of several samples: it yields requests, receives their replies, and returns
trajectories."""


def run_interleaved(
    loops: Sequence[EpisodeLoop], put: Callable[[Record], None], get: Callable[[], Record]
) -> list[Trajectory]:
    """Run several loops to their ends; one steps while another waits for its reply. Return their
    trajectories in the order of ``loops``.

    Every loop has at most one open request. ``get`` returns replies in any order; a reply belongs
    to the request with the same first sample.
    """
    results: dict[int, list[Trajectory]] = {}
    waiting: dict[int, int] = {}

    def advance(index: int, reply: Record | None) -> None:
        try:
            # Sending None starts a generator.
            request = loops[index].send(reply)  # type: ignore[arg-type]
        except StopIteration as end:
            results[index] = end.value
            return
        waiting[int(request.steps["sample"][0])] = index
        put(request)

    for index in range(len(loops)):
        advance(index, None)
    while waiting:
        reply = get()
        advance(waiting.pop(int(reply.steps["sample"][0])), reply)
    return [trajectory for index in range(len(loops)) for trajectory in results[index]]


log = logging.getLogger(__name__)
MAX_FAILED_EPISODES = 3
"""The stage fails at this number of failed episodes in one sample. If a sample is one episode, the
stage fails if there are at least this many groups, and all of their episodes failed."""
EPISODE_METRICS = ("return", "episode_length", "success_once", "success_at_end")
"""Names of the episode metrics. A trajectory has their means over its completed episodes; if none
is completed, the metrics of its open episode."""
REQUEST_NAMES = {STATE: "observation"}
"""Names of observations in requests; others keep their names."""
TRAJECTORY_NAMES = {
    STATE: "observations",
    "action": "actions",
    "logprob": "logprobs",
    "value": "values",
    "version": "versions",
}
"""Names of observations and reply columns in the record of a trajectory; others keep their
names."""


def run_episodes(
    request: RolloutRequest,
    samples: np.ndarray,
    envs: SyncVectorEnv | MultiProcessVectorEnv,
    first_env: int,
    video_cameras: Collection[str] = (),
    instruction: bool | str = False,
    score_metric: str = EPISODE_METRICS[0],
    action_bounds: tuple[np.ndarray, np.ndarray] | None = None,
    tracebacks: list[str] | None = None,
) -> EpisodeLoop:
    """Run the loop of ``samples``; the first one uses environment ``first_env``, the next ones the
    environments after it.

    In evaluation and in groups of several samples, a sample is one episode, truncated at the
    horizon: the samples of a group are compared, so they must begin in the same state. Otherwise,
    when an episode ends, a new one begins, until the horizon.

    A step is one reply of the policy: an action, or a chunk of actions, which is executed until the
    episode ends. For a chunk, the reward is the sum over its actions, ``action_rewards`` float32
    ``[T, C]`` has the reward of each action, and ``num_executed`` int32 ``[T]`` is the number of
    executed actions. If the policy returns log-probabilities of each action (``[C]`` or ``[C, D]``
    of a chunk), ``choice_mask`` is 0 at actions that were not executed.

    Args:
        video_cameras: cameras that the policy does not see.
        instruction: whether observations include the environment's instruction, or a text to use
            instead.
        score_metric: the metric of :data:`EPISODE_METRICS` that is an episode's score.
        action_bounds: lower and upper bounds of actions, recorded in trajectories.
        tracebacks: receives the errors of lost episodes.

    Raises:
        SimulatorError: a simulator has failed too often, or cannot continue an open episode.
        InputError: the policy's actions are not finite.
    """
    recorder = _TrajectoryRecorder(
        request, samples, video_cameras, instruction, score_metric, action_bounds
    )
    recorder.tracebacks = [] if tracebacks is None else tracebacks
    live, version = np.arange(len(samples)), 0
    has_one_episode = request.split == "test" or request.group_size > 1

    def reset(rows: np.ndarray, *, starts_samples: bool = False) -> None:
        if len(rows):
            groups = recorder.groups[rows]
            # Test episodes use the simulator's list of initial states, if it has one.
            initial_states = groups.tolist() if request.split == "test" else None
            ordinals = request.group_ordinals(groups).tolist()
            env_ids, seeds = (first_env + rows).tolist(), recorder.seeds(rows)
            options = {"starts_samples": starts_samples}
            recorder.reset(rows, envs.reset(env_ids, seeds, initial_states, ordinals, **options))

    is_open = np.isin(samples, list(request.open_episodes or ()))
    if is_open.any():
        rows = live[is_open]
        recorder.resume(rows, *envs.restore((first_env + rows).tolist(), recorder.saved_states()))
    reset(live[~is_open], starts_samples=True)
    for time in range(request.horizon):
        if not len(live):
            break
        reply = yield _action_request(request, samples[live], recorder.observations_of(live), time)
        version = int(reply.info["version"])
        actions = reply.steps["action"]
        if actions.dtype.kind == "f" and not np.isfinite(actions).all():
            raise InputError(
                f"iteration {request.iteration}, step {time}: the policy's actions are not "
                "finite; its weights have diverged (optimizer.lr, optimizer.clip_grad)"
            )
        columns, errors = envs.step((first_env + live).tolist(), actions)
        PROGRESS.mark()
        recorder.step(live, time, reply.steps, columns, errors)
        is_last = time + 1 == request.horizon
        recorder.add_truncation(
            live[recorder.truncated[live] | (is_last & ~recorder.terminated[live])], time
        )
        if has_one_episode:
            live = live[~recorder.has_ended(live)]
        elif not is_last:
            reset(live[recorder.has_ended(live)])
    if request.open_episodes is not None:
        live = live[~recorder.has_ended(live)]
        recorder.keep_open(live, *envs.save((first_env + live).tolist()))
    if "values" in recorder.columns:
        recorder.columns["bootstrap"] = np.zeros_like(recorder.columns["rewards"])
        if recorder.truncated_observations and request.split == "train":
            rows, times, observations = recorder.all_truncations()
            reply = yield _action_request(request, samples[rows], observations, 0, temperature=0.0)
            # A chunk has a value for each action; the first is the value of the observed state.
            values = reply.steps["value"].reshape(len(rows), -1)[:, 0]
            recorder.columns["bootstrap"][rows, times] = values
    return recorder.build(version)


def _action_request(
    request: RolloutRequest,
    samples: np.ndarray,
    observations: Arrays,
    time: int,
    temperature: float | None = None,
) -> Record:
    return Record(
        RecordId(request.iteration, int(samples[0])),
        steps={
            "sample": samples,
            **{
                REQUEST_NAMES.get(n, n): column
                for n, column in observations.items()
                if not n.startswith(VIDEO_PREFIX)
            },
        },
        info={
            "time": time,
            "horizon": request.horizon,
            "temperature": request.temperature if temperature is None else temperature,
        },
    )


class _TrajectoryRecorder:
    """Records the steps of ``n`` samples. Columns are written in place and never copied, because
    images may fill the memory.

    ``observations`` are the current ones; ``terminated`` and ``truncated`` (bool ``[n]``) are the
    flags of the last step of each sample.
    """

    def __init__(
        self,
        request: RolloutRequest,
        samples: np.ndarray,
        video_cameras: Collection[str],
        instruction: bool | str,
        score_metric: str,
        action_bounds: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        count = len(samples)
        low, high = (None, None) if action_bounds is None else action_bounds
        self._action_bounds: dict[str, Any] = {"action_low": low, "action_high": high}
        self._video_cameras, self._instruction = video_cameras, instruction
        self._score_index = EPISODE_METRICS.index(score_metric)
        self._request, self._samples = request, samples
        self.groups = samples // request.group_size
        self.columns: dict[str, np.ndarray] = {}
        """Columns ``[n, horizon, ...]`` by their names in the record of a trajectory."""
        self.observations = Arrays()
        self.truncated_observations: list[tuple[np.ndarray, int, Arrays]] = []
        """Rows that were truncated, the time step, and the observations after that step."""
        self.terminated, self.truncated = np.zeros((2, count), bool)
        self._length, self._num_episodes, self._episode_first_steps = np.zeros((3, count), np.int64)
        """By row: number of steps, number of begun episodes, and first step of the open episode."""
        self._open_metrics = np.zeros((len(EPISODE_METRICS), count))
        """:data:`EPISODE_METRICS` of the open episodes, ``[4, n]``."""
        self._finished: list[list[tuple[int, np.ndarray]]] = [[] for _ in samples]
        """By row: last step and :data:`EPISODE_METRICS` of each finished episode."""
        self._lost_steps: list[list[slice]] = [[] for _ in samples]
        """By row: steps of the episodes in which the simulator failed."""
        self._row_tracebacks: list[list[str]] = [[] for _ in samples]
        """By row: errors of lost episodes."""
        self.tracebacks: list[str] = []
        """Errors of lost episodes of all rows."""
        self._open_states: dict[int, np.ndarray] = {}
        """States of episodes that are open at the end."""
        self._unsaved_rows: frozenset[int] = frozenset()
        """Rows whose open episode could not be saved; its steps are complete and not masked."""

    def seeds(self, rows: np.ndarray) -> list[int]:
        r = self._request
        episodes = zip(self.groups[rows].tolist(), self._num_episodes[rows].tolist(), strict=True)
        draws = (generator(r.seed, r.iteration, r.split, "reset", *episode) for episode in episodes)
        return [int(random.integers(2**31)) for random in draws]

    def reset(self, rows: np.ndarray, observations: Mapping[str, np.ndarray]) -> None:
        """Begin the next episodes."""
        self._set_observations(rows, observations)
        self._num_episodes[rows] += 1
        self._episode_first_steps[rows] = self._length[rows]
        self._open_metrics[:, rows] = 0

    def saved_states(self) -> list[np.ndarray]:
        """Return the states of the episodes that continue, in the order of the samples."""
        episodes = self._request.open_episodes or {}
        return [episodes[s].context[OPEN_STATE] for s in self._samples.tolist() if s in episodes]

    def resume(
        self, rows: np.ndarray, observations: Mapping[str, np.ndarray], errors: Mapping[int, str]
    ) -> None:
        """Continue episodes of the last iteration from their last observations.

        Args:
            errors: by position in ``rows``, the simulator's errors.

        Raises:
            SimulatorError: there are errors. Starting a new episode would change the run's results.
        """
        for index, error in errors.items():
            sample, iteration = int(self._samples[rows[index]]), self._request.iteration - 1
            raise SimulatorError(
                f"sample {sample}: this simulator cannot continue the open episode of iteration "
                f"{iteration}: {exception_line(error)}. Restore the versions of "
                "the simulator and its packages with which it began, then resume the run; or "
                "start another run (run.name) from its weights, if the model can load them "
                "(rlinf export, model.path)"
            )
        self._set_observations(rows, observations)
        episodes = self._request.open_episodes or {}
        for row in rows.tolist():
            self._open_metrics[:, row] = episodes[int(self._samples[row])].context[OPEN_METRICS]

    def keep_open(
        self, rows: np.ndarray, states: Sequence[np.ndarray], errors: Mapping[int, str]
    ) -> None:
        """Keep open episodes with their states.

        Args:
            errors: by position in ``rows``, the errors of episodes that could not be saved; their
                states are empty.
        """
        pairs = zip(rows.tolist(), states, strict=True)
        self._open_states = {row: state for row, state in pairs if state.size}
        self._unsaved_rows = frozenset(int(rows[index]) for index in errors)
        for index, error in errors.items():
            group = int(self.groups[rows[index]])
            log.warning("group %d: the simulator failed to save its state: %s", group, error)

    def observations_of(self, rows: np.ndarray) -> Arrays:
        """Return a copy of the samples' current observations."""
        return {name: column[rows] for name, column in self.observations.items()}

    def has_ended(self, rows: np.ndarray) -> np.ndarray:
        """Return whether the last step ended its episode, ``[len(rows)]``."""
        return self.terminated[rows] | self.truncated[rows]

    def step(
        self,
        rows: np.ndarray,
        time: int,
        reply: Mapping[str, np.ndarray],
        columns: Mapping[str, np.ndarray],
        errors: Mapping[int, str],
    ) -> None:
        """Record observations, the policy's reply, and the ``columns`` that environments returned.

        Args:
            errors: by position in ``rows``, the simulator's errors; their episodes are discarded.

        Raises:
            SimulatorError: the simulator has failed too often.
        """
        self.terminated[rows] = columns["terminated"]
        self.truncated[rows] = (columns["truncated"] != 0) & ~self.terminated[rows]
        step = {
            **{name: column for name, column in reply.items() if name != "sample"},
            **self.observations_of(rows),
            "rewards": columns["reward"].astype(np.float32),
            "terminated": self.terminated[rows].view(np.uint8),
            "truncated": self.truncated[rows].view(np.uint8),
            "success": columns["success"],
            **{name: columns[name] for name in STEP_INFO_TYPES if name in columns},
        }
        if is_action_chunk(reply["action"][0]):
            step |= _chunk_columns(columns, reply["logprob"])
        for name, values in step.items():
            self._column(TRAJECTORY_NAMES.get(name, name), values)[rows, time] = values
        self._set_observations(rows, unprefix_observations(dict(columns)))
        self._length[rows] += 1
        episode_return, episode_length, success_once, success_at_end = self._open_metrics
        episode_return[rows] += columns["reward"]
        episode_length[rows] += columns["executed"]
        success_once[rows] = np.maximum(success_once[rows], columns["solved"])
        success_at_end[rows] = columns["success"]
        for row in rows[self.has_ended(rows)].tolist():
            self._finished[row].append(
                (int(self._length[row]) - 1, self._open_metrics[:, row].copy())
            )
        for index, error in errors.items():
            self._discard_episode(int(rows[index]), error)

    def _column(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return a column, which is created with the shape and type of ``values`` of one step."""
        if name not in self.columns:
            shape = (len(self._samples), self._request.horizon, *values.shape[1:])
            self.columns[name] = np.empty(shape, values.dtype)
        return self.columns[name]

    def _set_observations(self, rows: np.ndarray, observations: Mapping[str, np.ndarray]) -> None:
        for name, array in policy_observations(
            observations, self._instruction, self._video_cameras
        ).items():
            if name not in self.observations:
                self.observations[name] = np.zeros(
                    (len(self._samples), *array.shape[1:]), array.dtype
                )
            self.observations[name][rows] = array

    def _discard_episode(self, row: int, error: str) -> None:
        """Discard an episode that ended with an error; the next one has a new simulator."""
        group, lost_steps = int(self.groups[row]), self._lost_steps[row]
        self._finished[row].pop()
        lost_steps.append(slice(int(self._episode_first_steps[row]), int(self._length[row])))
        # The reward of a masked step is added to the unmasked step before it, which belongs to
        # another episode here.
        for name in ("rewards", "action_rewards"):
            if name in self.columns:
                self.columns[name][row, lost_steps[-1]] = 0
        self._open_metrics[:, row] = 0
        self._row_tracebacks[row].append(error)
        self.tracebacks.append(error)
        if len(lost_steps) == MAX_FAILED_EPISODES:
            message = f"group {group}: the simulator fails: {error}"
            raise create_simulator_error(message, *self._row_tracebacks[row])
        log.warning("group %d: the simulator failed: %s", group, error)

    def add_truncation(self, rows: np.ndarray, time: int) -> None:
        """Record that episodes are truncated after a step."""
        if len(rows):
            self.truncated_observations.append((rows, time, self.observations_of(rows)))

    def all_truncations(self) -> tuple[np.ndarray, np.ndarray, Arrays]:
        """Return all truncations: rows ``[K]``, steps ``[K]``, and observations ``[K, ...]``."""
        all_rows = np.concatenate([rows for rows, _, _ in self.truncated_observations])
        times = np.concatenate(
            [np.full(len(rows), time) for rows, time, _ in self.truncated_observations]
        )
        observations = {
            name: np.concatenate([columns[name] for _, _, columns in self.truncated_observations])
            for name in self.observations
        }
        return all_rows, times, observations

    def build(self, version: int) -> list[Trajectory]:
        """Return the trajectories; they are views of the columns."""
        state = self.observations.get(STATE, np.zeros((0, 0), np.float32))
        truncated_rows, times = np.zeros((2, 0), np.int64)
        final_states = state[:0]
        if self.truncated_observations:
            truncated_rows, times, observations = self.all_truncations()
            final_states = observations[STATE]
        trajectories = []
        for row, sample in enumerate(self._samples.tolist()):
            length, finished = int(self._length[row]), self._finished[row]
            columns = {name: column[row, :length] for name, column in self.columns.items()}
            means = np.mean([m for _, m in finished] or [self._open_metrics[:, row]], axis=0)
            outcomes, is_open = self._outcomes(row), row in self._open_states
            trajectories.append(
                Trajectory(
                    identity=RecordId(self._request.iteration, sample),
                    **step_fields({**columns, "mask": self._mask(row)}),
                    truncation_steps=times[truncated_rows == row],
                    final_observations=final_states[truncated_rows == row],
                    **self._action_bounds,
                    outcome_steps=np.array([last_step for last_step, _ in outcomes], np.int64),
                    outcomes=np.array([m[self._score_index] for _, m in outcomes], np.float64),
                    open_state=self._open_states.get(row),
                    open_metrics=self._open_metrics[:, row].copy() if is_open else None,
                    group=int(self.groups[row]),
                    policy_version=version,
                    stop_reason="stop" if finished else "length",
                    **info_fields(dict(zip(EPISODE_METRICS, means.tolist(), strict=True))),
                    num_episodes=len(finished),
                    is_scored=int(self._is_scored(row)),
                    num_failed_episodes=len(self._lost_steps[row]) + (row in self._unsaved_rows),
                )
            )
        return trajectories

    def _outcomes(self, row: int) -> list[tuple[int, np.ndarray]]:
        """Return last step and metrics of the scored episodes; see :mod:`rlinf.data.episodes`."""
        finished = self._finished[row]
        if not finished and self._request.open_episodes is None and self._is_scored(row):
            return [(int(self._length[row]) - 1, self._open_metrics[:, row])]
        return finished

    def _is_scored(self, row: int) -> bool:
        """Return whether there is an episode to score: a finished one, or the open one."""
        lost_steps = self._lost_steps[row]
        if self._finished[row] or not lost_steps:
            return True
        return bool(lost_steps[-1].stop < self._length[row])

    def _mask(self, row: int) -> np.ndarray:
        """Return the loss mask. It is returned even if no step is masked, because all records of a
        channel must have the same columns."""
        mask = np.ones(int(self._length[row]), np.float32)
        for steps in self._lost_steps[row]:
            mask[steps] = 0
        return mask


def check_not_all_failed(
    trajectories: Sequence[Trajectory], tracebacks: Sequence[str], *, is_test: bool
) -> None:
    """Check that not all episodes were lost; each trajectory is one episode.

    Fewer than :data:`MAX_FAILED_EPISODES` groups are not checked, because the initial state of a
    group may make all of its samples fail. In evaluation only errors of the user's code are raised;
    the stage checks the others, because it also knows the results of other workers.

    Args:
        tracebacks: the simulator's errors.
        is_test: whether this is an evaluation.

    Raises:
        SimulatorError: all episodes were lost, in at least :data:`MAX_FAILED_EPISODES` groups.
    """
    groups, count = {t.group for t in trajectories}, len(trajectories)
    if len(groups) >= MAX_FAILED_EPISODES and all(t.num_failed_episodes for t in trajectories):
        message = f"the simulator fails in each of {count} episodes, of {len(groups)} groups"
        last = tracebacks[-1] if tracebacks else "the warnings before this have its errors"
        error = create_simulator_error(f"{message}; {last}", *tracebacks)
        if isinstance(error, UserCodeError) or not is_test:
            raise error


def is_action_chunk(action: np.ndarray) -> bool:
    """Return whether a sample's action is a chunk: it has one dimension more than a discrete action
    (an integer) or a vector (floating point)."""
    return bool(action.ndim > np.issubdtype(action.dtype, np.floating))


def _chunk_columns(
    step_columns: Mapping[str, np.ndarray], logprob: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the additional columns of chunks (:func:`run_episodes`). A trajectory has ``executed``
    as ``num_executed``, and ``submask`` as ``choice_mask``."""
    executed = step_columns["executed"]
    columns = {
        "executed": executed.astype(np.int32),
        "action_rewards": step_columns[ACTION_REWARDS].astype(np.float32),
    }
    if logprob.ndim > 1:
        is_executed = np.arange(logprob.shape[1]) < executed[:, None]
        is_executed = is_executed.reshape(*is_executed.shape, *[1] * (logprob.ndim - 2))
        columns["submask"] = np.broadcast_to(is_executed, logprob.shape).astype(np.uint8)
    return columns


def policy_observations(
    observations: Mapping[str, np.ndarray],
    instruction: bool | str,
    video_cameras: Collection[str] = (),
) -> Arrays:
    """Return observations as a policy reads them: the state as float32; images unchanged, with the
    prefix ``images.`` or :data:`rlinf.data.record.VIDEO_PREFIX`; and the instruction: the
    environment's if ``instruction`` is true, or the given text."""
    arrays = {STATE: np.asarray(observations[STATE], np.float32)}
    for name, array in observations.items():
        if name not in (STATE, INSTRUCTION):
            arrays[(VIDEO_PREFIX if name in video_cameras else IMAGE_PREFIX) + name] = array
    if isinstance(instruction, str):
        text = encode_instruction(instruction)
        arrays[INSTRUCTION] = np.broadcast_to(text, (*arrays[STATE].shape[:-1], *text.shape))
    elif instruction:
        arrays[INSTRUCTION] = observations[INSTRUCTION]
    return arrays


MAX_EXPERT_STEPS = 1000
"""Maximum steps of an expert's episode."""


def collect_demonstrations(
    envs: SyncVectorEnv | SubprocessVectorEnv, seed: int, count: int, instruction: bool | str
) -> list[Trajectory]:
    """Return expert episodes from ``count`` seeds, each until its first success. Episodes without
    success are left out.

    Raises:
        ConfigError: the simulator has no expert, or the expert solves no episode.
    """
    episodes = []
    for index in range(count):
        reset_seed = int(generator(seed, "demonstration", index).integers(2**31))
        try:
            columns = envs.demonstrate(reset_seed, MAX_EXPERT_STEPS)
        except InvalidEnvConfig as error:
            raise ConfigError(str(error)) from None
        if not columns["success"][-1]:
            continue
        rows = [
            policy_observations(
                {name: column[t] for name, column in unprefix_observations(columns).items()},
                instruction,
            )
            for t in range(len(columns["success"]))
        ]
        steps = {
            TRAJECTORY_NAMES.get(name, name): np.stack([row[name] for row in rows])
            for name in rows[0]
        }
        actions = columns["action"]
        if actions.dtype.kind == "f":
            actions = actions.astype(np.float32)
        steps |= {"actions": actions, "rewards": columns["reward"].astype(np.float32)}
        episodes.append(Trajectory(identity=RecordId(0, index), **step_fields(steps)))
    if not episodes:
        raise ConfigError(
            f"task.demonstrations: the simulator's expert solved none of {count} episodes; ask for "
            "more, or set it to 0"
        )
    return episodes
