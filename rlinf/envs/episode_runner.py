"""The loop of simulated episodes: requests to the policy, recorded trajectories, and
demonstrations."""

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
from rlinf.seeding import generator

EpisodeLoop = Generator[Record, Record, list[Trajectory]]
"""The loop of some samples: it yields requests, receives their replies, and returns
trajectories."""


def run_interleaved(
    parts: Sequence[EpisodeLoop], put: Callable[[Record], None], get: Callable[[], Record]
) -> list[Trajectory]:
    """Run the loops to their ends, one stepping while another waits; return their trajectories in
    the order of ``parts``.

    Every loop has at most one open request. ``get`` returns replies in any order; a reply belongs
    to the request that began with the same sample.
    """
    results: dict[int, list[Trajectory]] = {}
    waiting: dict[int, int] = {}

    def advance(number: int, reply: Record | None) -> None:
        try:
            # A generator is begun by sending it None.
            request = parts[number].send(reply)  # type: ignore[arg-type]
        except StopIteration as end:
            results[number] = end.value
            return
        waiting[int(request.steps["sample"][0])] = number
        put(request)

    for number in range(len(parts)):
        advance(number, None)
    while waiting:
        reply = get()
        advance(waiting.pop(int(reply.steps["sample"][0])), reply)
    return [trajectory for number in range(len(parts)) for trajectory in results[number]]


log = logging.getLogger(__name__)
MAX_FAILED_EPISODES = 3
EPISODE_METRICS = ("return", "episode_length", "success_once", "success_at_end")
"""Means over the episodes that a sample completed (of the open one, if none), by their names in
the record of its trajectory."""
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
    first: int,
    film: Collection[str] = (),
    instruction: bool | str = False,
    score: str = EPISODE_METRICS[0],
    box: tuple[np.ndarray, np.ndarray] | None = None,
    raised: list[str] | None = None,
) -> EpisodeLoop:
    """Run the loop of ``samples``, each in an environment of its own, from number ``first`` on.

    In evaluation and in groups of several samples, a sample is one episode, or as much of it as
    fits: the samples of a group are compared, so they must begin in the same state. Otherwise a new
    episode follows one that ended, until the horizon.

    A step is one reply of the policy: an action, or a chunk of actions, which is executed until the
    episode ends. For a chunk, the reward is the sum over its actions, ``action_rewards`` float32
    ``[T, C]`` are those of the actions, and ``num_executed`` int32 ``[T]`` is their number. If the
    policy returns log-probabilities of each action (``[C]`` or ``[C, D]`` of a chunk),
    ``choice_mask`` is 0 at actions that were not executed.

    Args:
        film: cameras that the policy does not see.
        instruction: whether observations include the environment's instruction; or a text in its
            place.
        score: the metric of :data:`EPISODE_METRICS` that is an episode's score.
        box: the bounds of actions, which trajectories keep.
        raised: receives the errors of lost episodes.

    Raises:
        SimulatorError: a simulator has failed too often, or cannot continue an open episode.
        InputError: the policy's actions are not finite.
    """
    trajectories = _Trajectories(request, samples, film, instruction, score, box)
    trajectories.raised = [] if raised is None else raised
    live, version = np.arange(len(samples)), 0
    single = request.split == "test" or request.group_size > 1

    def reset(rows: np.ndarray) -> None:
        if len(rows):
            # What is held out begins in the states that the simulator numbers, if it does.
            begin = trajectories.starts[rows].tolist() if request.split == "test" else None
            turns = request.task_indices(trajectories.starts[rows]).tolist()
            trajectories.reset(
                rows, envs.reset((first + rows).tolist(), trajectories.seeds(rows), begin, turns)
            )

    continues = np.isin(samples, list(request.open_episodes or ()))
    if continues.any():
        begun = live[continues]
        trajectories.resume(begun, *envs.restore((first + begun).tolist(), trajectories.states()))
    reset(live[~continues])
    for time in range(request.horizon):
        if not len(live):
            break
        reply = yield _request(request, samples[live], trajectories.observations_of(live), time)
        version = int(reply.info["version"])
        actions = reply.steps["action"]
        if actions.dtype.kind == "f" and not np.isfinite(actions).all():
            raise InputError(
                f"iteration {request.iteration}, step {time}: the policy's actions are no finite "
                "numbers; its weights have diverged (optimizer.lr, optimizer.clip_grad)"
            )
        columns, errors = envs.step((first + live).tolist(), actions)
        trajectories.step(live, time, reply.steps, columns, errors)
        last = time + 1 == request.horizon
        trajectories.add_truncation(
            live[trajectories.truncated[live] | (last & ~trajectories.terminated[live])], time
        )
        if single:
            live = live[~trajectories.ended(live)]
        elif not last:
            reset(live[trajectories.ended(live)])
    if request.open_episodes is not None:
        live = live[~trajectories.ended(live)]
        trajectories.keep_open(live, *envs.save((first + live).tolist()))
    if "values" in trajectories.columns:
        trajectories.columns["bootstrap"] = np.zeros_like(trajectories.columns["rewards"])
        if trajectories.truncated_observations and request.split == "train":
            who, at, observations = trajectories.all_truncations()
            reply = yield _request(request, samples[who], observations, 0, temperature=0.0)
            # Of a chunk's values the first one follows the state after the truncation.
            values = reply.steps["value"].reshape(len(who), -1)[:, 0]
            trajectories.columns["bootstrap"][who, at] = values
    return trajectories.build(version)


def _request(
    request: RolloutRequest,
    samples: np.ndarray,
    observations: Arrays,
    time: int,
    temperature: float | None = None,
) -> Record:
    """Return a request for actions."""
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


class _Trajectories:
    """The recorded steps of ``n`` samples. Columns are written in place and never copied, because
    images may fill the memory.

    ``observations`` are the current ones; ``terminated`` and ``truncated`` (bool ``[n]``) are those
    of the last steps.
    """

    def __init__(
        self,
        request: RolloutRequest,
        samples: np.ndarray,
        film: Collection[str],
        instruction: bool | str,
        score: str,
        box: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        count = len(samples)
        self._box: dict[str, Any] = (
            {} if box is None else {"action_low": box[0], "action_high": box[1]}
        )
        self._film, self._instruction = film, instruction
        self._score = EPISODE_METRICS.index(score)
        self._rollout, self._samples = request, samples
        self.starts = samples // request.group_size
        self.columns: dict[str, np.ndarray] = {}
        """``[n, horizon, ...]`` each, by their names in a record."""
        self.observations = Arrays()
        self.truncated_observations: list[tuple[np.ndarray, int, Arrays]] = []
        """Samples that were truncated, after which step, and their observations then."""
        self.terminated, self.truncated = np.zeros((2, count), bool)
        self._length, self._num_episodes, self._episode_starts = np.zeros((3, count), np.int64)
        """Steps, episodes begun, the first step of the open one."""
        self._open_metrics = np.zeros((len(EPISODE_METRICS), count))
        """Metrics of the open episodes."""
        self._finished: list[list[tuple[int, np.ndarray]]] = [[] for _ in samples]
        """For each finished episode its last step and its :data:`EPISODE_METRICS`."""
        self._lost_steps: list[list[slice]] = [[] for _ in samples]
        """Steps of the episodes in which the simulator failed."""
        self._errors: list[list[str]] = [[] for _ in samples]
        self.raised: list[str] = []
        """Errors of lost episodes, by row and all together."""
        self._open_states: dict[int, np.ndarray] = {}
        """States of episodes that are open at the end."""
        self._unsaved_rows: frozenset[int] = frozenset()
        """Rows whose open episodes were lost at the end; their steps are complete, and count."""

    def seeds(self, rows: np.ndarray) -> list[int]:
        """Return the seeds of the next episodes."""
        e = self._rollout
        starts = zip(self.starts[rows].tolist(), self._num_episodes[rows].tolist(), strict=True)
        draws = (generator(e.seed, e.iteration, e.split, "reset", *start) for start in starts)
        return [int(random.integers(2**31)) for random in draws]

    def reset(self, rows: np.ndarray, observations: Mapping[str, np.ndarray]) -> None:
        """Begin the next episodes."""
        self._set_observations(rows, observations)
        self._num_episodes[rows] += 1
        self._episode_starts[rows] = self._length[rows]
        self._open_metrics[:, rows] = 0

    def states(self) -> list[np.ndarray]:
        """Return the states of the episodes that continue, in the order of the samples."""
        left = self._rollout.open_episodes or {}
        return [left[s].context[OPEN_STATE] for s in self._samples.tolist() if s in left]

    def resume(
        self, rows: np.ndarray, observations: Mapping[str, np.ndarray], errors: Mapping[int, str]
    ) -> None:
        """Continue episodes of the last iteration from their last observations.

        Args:
            errors: by position in ``rows``, the simulator's errors.

        Raises:
            SimulatorError: there are errors. A new episode instead would change the run.
        """
        for place, error in errors.items():
            sample, before = int(self._samples[rows[place]]), self._rollout.iteration - 1
            raise SimulatorError(
                f"sample {sample}: this simulator cannot continue the open episode of iteration "
                f"{before}: {exception_line(error)}. Restore the versions of "
                "the simulator and its packages with which it began, then resume the run; or "
                "start another run (run.name) from its weights, if the model can load them "
                "(rlinf export, model.path)"
            )
        self._set_observations(rows, observations)
        left = self._rollout.open_episodes or {}
        for row in rows.tolist():
            self._open_metrics[:, row] = left[int(self._samples[row])].context[OPEN_METRICS]

    def keep_open(
        self, rows: np.ndarray, states: Sequence[np.ndarray], errors: Mapping[int, str]
    ) -> None:
        """Keep open episodes with their states.

        Args:
            errors: by position in ``rows``, why an episode was lost, whose state is empty.
        """
        pairs = zip(rows.tolist(), states, strict=True)
        self._open_states = {row: state for row, state in pairs if state.size}
        self._unsaved_rows = frozenset(int(rows[place]) for place in errors)
        for place, error in errors.items():
            start = int(self.starts[rows[place]])
            log.warning("start %d: the simulator failed to save its state: %s", start, error)

    def observations_of(self, rows: np.ndarray) -> Arrays:
        """Return a copy of the samples' current observations."""
        return {name: column[rows] for name, column in self.observations.items()}

    def ended(self, rows: np.ndarray) -> np.ndarray:
        """Return whether the last step ended its episode, ``[len(rows)]``."""
        return self.terminated[rows] | self.truncated[rows]

    def step(
        self,
        rows: np.ndarray,
        time: int,
        replied: Mapping[str, np.ndarray],
        columns: Mapping[str, np.ndarray],
        errors: Mapping[int, str],
    ) -> None:
        """Record observations, replies, and the results of the actions.

        Args:
            errors: by position in ``rows``, the simulator's errors; such an episode does not count.

        Raises:
            SimulatorError: the simulator has failed too often.
        """
        self.terminated[rows] = columns["terminated"]
        self.truncated[rows] = (columns["truncated"] != 0) & ~self.terminated[rows]
        step = {
            **{name: column for name, column in replied.items() if name != "sample"},
            **self.observations_of(rows),
            "rewards": columns["reward"].astype(np.float32),
            "terminated": self.terminated[rows].view(np.uint8),
            "truncated": self.truncated[rows].view(np.uint8),
            "success": columns["success"],
            **{name: columns[name] for name in STEP_INFO_TYPES if name in columns},
        }
        if is_action_chunk(replied["action"][0]):
            step |= _chunk_columns(columns, replied["logprob"])
        for name, entry in step.items():
            self._column(TRAJECTORY_NAMES.get(name, name), entry)[rows, time] = entry
        self._set_observations(rows, unprefix_observations(dict(columns)))
        self._length[rows] += 1
        total, length, ever, now = self._open_metrics
        total[rows] += columns["reward"]
        length[rows] += columns["executed"]
        ever[rows], now[rows] = np.maximum(ever[rows], columns["solved"]), columns["success"]
        for row in rows[self.ended(rows)].tolist():
            self._finished[row].append(
                (int(self._length[row]) - 1, self._open_metrics[:, row].copy())
            )
        for place, error in errors.items():
            self._discard_episode(int(rows[place]), error)

    def _column(self, name: str, entry: np.ndarray) -> np.ndarray:
        if name not in self.columns:
            shape = (len(self._samples), self._rollout.horizon, *entry.shape[1:])
            self.columns[name] = np.empty(shape, entry.dtype)
        return self.columns[name]

    def _set_observations(self, rows: np.ndarray, observations: Mapping[str, np.ndarray]) -> None:
        for name, array in policy_observations(observations, self._instruction, self._film).items():
            if name not in self.observations:
                self.observations[name] = np.zeros(
                    (len(self._samples), *array.shape[1:]), array.dtype
                )
            self.observations[name][rows] = array

    def _discard_episode(self, row: int, error: str) -> None:
        """Discard an episode that ended with an error; the next one has a new simulator."""
        start, lost = int(self.starts[row]), self._lost_steps[row]
        self._finished[row].pop()
        lost.append(slice(int(self._episode_starts[row]), int(self._length[row])))
        # Rewards of steps that do not count are those of the choice before, which here was of
        # another episode.
        for name in ("rewards", "action_rewards"):
            if name in self.columns:
                self.columns[name][row, lost[-1]] = 0
        self._open_metrics[:, row] = 0
        self._errors[row].append(error)
        self.raised.append(error)
        if len(lost) == MAX_FAILED_EPISODES:
            message = f"start {start}: the simulator fails: {error}"
            raise create_simulator_error(message, *self._errors[row])
        log.warning("start %d: the simulator failed: %s", start, error)

    def add_truncation(self, rows: np.ndarray, time: int) -> None:
        """Record episodes that are truncated after a step."""
        if len(rows):
            self.truncated_observations.append((rows, time, self.observations_of(rows)))

    def all_truncations(self) -> tuple[np.ndarray, np.ndarray, Arrays]:
        """Return all truncations: samples ``[K]``, steps ``[K]``, and observations ``[K, ...]``."""
        who = np.concatenate([rows for rows, _, _ in self.truncated_observations])
        at = np.concatenate(
            [np.full(len(rows), time) for rows, time, _ in self.truncated_observations]
        )
        observations = {
            name: np.concatenate([s[name] for _, _, s in self.truncated_observations])
            for name in self.observations
        }
        return who, at, observations

    def build(self, version: int) -> list[Trajectory]:
        """Return the trajectories; they are views of the columns."""
        state = self.observations.get(STATE, np.zeros((0, 0), np.float32))
        who, at, after = np.zeros(0, np.int64), np.zeros(0, np.int64), state[:0]
        if self.truncated_observations:
            who, at, observations = self.all_truncations()
            after = observations[STATE]
        trajectories = []
        for row, sample in enumerate(self._samples.tolist()):
            length, ended, mine = int(self._length[row]), self._finished[row], who == row
            columns = {name: column[row, :length] for name, column in self.columns.items()}
            means = np.mean([m for _, m in ended] or [self._open_metrics[:, row]], axis=0)
            outcomes, is_open = self._outcomes(row), row in self._open_states
            trajectories.append(
                Trajectory(
                    identity=RecordId(self._rollout.iteration, sample),
                    **step_fields({**columns, "mask": self._mask(row)}),
                    truncation_steps=at[mine],
                    final_observations=after[mine],
                    **self._box,
                    outcome_steps=np.array([last for last, _ in outcomes], np.int64),
                    outcomes=np.array([m[self._score] for _, m in outcomes], np.float64),
                    open_state=self._open_states.get(row),
                    open_metrics=self._open_metrics[:, row].copy() if is_open else None,
                    group=int(self.starts[row]),
                    policy_version=version,
                    stop_reason="stop" if ended else "length",
                    **info_fields(dict(zip(EPISODE_METRICS, means.tolist(), strict=True))),
                    num_episodes=len(ended),
                    is_scored=int(self._scored(row)),
                    num_failed_episodes=len(self._lost_steps[row]) + (row in self._unsaved_rows),
                )
            )
        return trajectories

    def _outcomes(self, row: int) -> list[tuple[int, np.ndarray]]:
        """Return last step and metrics of the scored episodes; see :mod:`rlinf.data.episodes`."""
        finished = self._finished[row]
        if not finished and self._rollout.open_episodes is None and self._scored(row):
            return [(int(self._length[row]) - 1, self._open_metrics[:, row])]
        return finished

    def _scored(self, row: int) -> bool:
        """Return whether there is an episode to measure: a finished one, or the open one."""
        lost = self._lost_steps[row]
        return bool(self._finished[row]) or not lost or lost[-1].stop < self._length[row]

    def _mask(self, row: int) -> np.ndarray:
        """Return the loss mask, even if all steps count: another sample may have lost some, and
        records of one channel have the same columns."""
        mask = np.ones(int(self._length[row]), np.float32)
        for steps in self._lost_steps[row]:
            mask[steps] = 0
        return mask


def check_not_all_failed(
    trajectories: Sequence[Trajectory], raised: Sequence[str], *, is_test: bool
) -> None:
    """Check, if a sample is one episode, that not all episodes of several groups were lost.

    A single group may itself be at fault, and all of its samples with it. Evaluation episodes whose
    errors are not the user's are left to the stage, which knows those of other workers.

    Args:
        raised: the simulator's errors.

    Raises:
        SimulatorError: all were lost, in as many groups as a sample may have failed episodes.
    """
    starts, count = {t.group for t in trajectories}, len(trajectories)
    if len(starts) >= MAX_FAILED_EPISODES and all(t.num_failed_episodes for t in trajectories):
        message = f"the simulator fails in each of {count} episodes, of {len(starts)} starts"
        last = raised[-1] if raised else "the warnings before this have its errors"
        error = create_simulator_error(f"{message}; {last}", *raised)
        if isinstance(error, UserCodeError) or not is_test:
            raise error


def is_action_chunk(action: np.ndarray) -> bool:
    """Return whether a sample's action is a chunk: choices have an integer type, vectors a floating
    one."""
    return bool(action.ndim > np.issubdtype(action.dtype, np.floating))


def _chunk_columns(
    step_columns: Mapping[str, np.ndarray], logprob: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns of chunks beside their replies; see :func:`run_episodes`."""
    executed = step_columns["executed"]
    columns = {
        "executed": executed.astype(np.int32),
        "action_rewards": step_columns[ACTION_REWARDS].astype(np.float32),
    }
    if logprob.ndim > 1:
        counts = np.arange(logprob.shape[1]) < executed[:, None]
        counts = counts.reshape(*counts.shape, *[1] * (logprob.ndim - 2))
        columns["submask"] = np.broadcast_to(counts, logprob.shape).astype(np.uint8)
    return columns


def policy_observations(
    observations: Mapping[str, np.ndarray], instruction: bool | str, film: Collection[str] = ()
) -> Arrays:
    """Return observations as a policy reads them: the state as float32; images unchanged, with the
    prefix ``images.`` or :data:`rlinf.data.record.VIDEO_PREFIX`; the instruction if wanted, or the
    given text."""
    arrays = {STATE: np.asarray(observations[STATE], np.float32)}
    for name, array in observations.items():
        if name not in (STATE, INSTRUCTION):
            arrays[(VIDEO_PREFIX if name in film else IMAGE_PREFIX) + name] = array
    if isinstance(instruction, str):
        text = encode_instruction(instruction)
        arrays[INSTRUCTION] = np.broadcast_to(text, (*arrays[STATE].shape[:-1], *text.shape))
    elif instruction:
        arrays[INSTRUCTION] = observations[INSTRUCTION]
    return arrays


MAX_EXPERT_STEPS = 1000
"""Steps of an expert's episode."""


def collect_demonstrations(
    envs: SyncVectorEnv | SubprocessVectorEnv, seed: int, count: int, instruction: bool | str
) -> list[Trajectory]:
    """Return expert episodes from ``count`` seeds, each to its first success; unsolved ones are
    left out.

    Raises:
        ConfigError: the simulator has no expert, or it solves nothing.
    """
    episodes = []
    for number in range(count):
        begin = int(generator(seed, "demonstration", number).integers(2**31))
        try:
            columns = envs.demonstrate(begin, MAX_EXPERT_STEPS)
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
        episodes.append(Trajectory(identity=RecordId(0, number), **step_fields(steps)))
    if not episodes:
        raise ConfigError(
            f"task.demonstrations: the simulator's expert solved none of {count} episodes; ask for "
            "more, or set it to 0"
        )
    return episodes
