"""The time loop of simulated episodes: what is asked of the policy, and what is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence

import numpy as np

from rlinf.data import episodes
from rlinf.data.episodes import OUTCOME_STEPS, OUTCOMES
from rlinf.data.record import Record, RecordId
from rlinf.data.transitions import ACTION_HIGH, ACTION_LOW, FINAL_OBSERVATIONS, TRUNCATION_STEPS
from rlinf.envs.base import VIDEO_PREFIX, RolloutRequest
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

EpisodeLoop = Generator[Record, Record, list[Record]]
"""The time loop of some samples: yields requests, is sent their replies, returns trajectories."""


def run_interleaved(
    parts: Sequence[EpisodeLoop], put: Callable[[Record], None], get: Callable[[], Record]
) -> list[Record]:
    """Run the loops to their ends; their trajectories in the order of ``parts``.

    Every loop has at most one request under way. ``get`` gives replies in any order; one belongs to
    the request that began with the same sample.
    """
    found: dict[int, list[Record]] = {}
    waiting: dict[int, int] = {}

    def advance(number: int, reply: Record | None) -> None:
        try:
            # A generator is begun by sending it None.
            request = parts[number].send(reply)  # type: ignore[arg-type]
        except StopIteration as end:
            found[number] = end.value
            return
        waiting[int(request.steps["sample"][0])] = number
        put(request)

    for number in range(len(parts)):
        advance(number, None)
    while waiting:
        reply = get()
        advance(waiting.pop(int(reply.steps["sample"][0])), reply)
    return [record for number in range(len(parts)) for record in found[number]]


log = logging.getLogger(__name__)
MAX_FAILED_EPISODES = 3
EPISODE_METRICS = ("return", "episode_length", "success_once", "success_at_end")
"""Means over the episodes that a sample completed, of the open one if none, in the ``info`` of its
trajectory."""
REQUEST_NAMES = {STATE: "observation"}
"""What a request calls an observation; any other has the same name there."""
TRAJECTORY_NAMES = {
    STATE: "observations",
    "action": "actions",
    "logprob": "logprobs",
    "value": "values",
    "version": "versions",
}
"""What a trajectory calls a column of replies; any other has the same name there."""


def run_episodes(
    episodes: RolloutRequest,
    samples: np.ndarray,
    worlds: SyncVectorEnv | MultiProcessVectorEnv,
    first: int,
    film: Collection[str] = (),
    instruction: bool | str = False,
    score: str = EPISODE_METRICS[0],
    box: tuple[np.ndarray, np.ndarray] | None = None,
    raised: list[str] | None = None,
) -> EpisodeLoop:
    """The time loop of ``samples``, each in a world of its own, from number ``first`` on.

    A sample is one episode, or as much of it as fits, where it is held out, or one of a group: its
    others are what it is compared with, and they differ in what came of the same start. Elsewhere
    an episode that ended is followed by another until the horizon.

    A step is what the policy answers at once: an action, or a chunk of them, which is carried out
    as far as the episode goes. Its reward is the sum over its actions then, ``action_rewards``
    float32 ``[T, C]`` are theirs, ``executed`` int32 ``[T]`` says how many they were, and where the
    policy gives log-probabilities of each action (``[C]`` or ``[C, D]`` of a chunk), ``submask`` is
    0 at those that were left out.

    Args:
        film: cameras that the policy does not see.
        instruction: whether observations have the world's; or a text in its place.
        score: which of :data:`MEASURES` is an episode's score.
        box: the bounds of actions, which trajectories keep.
        raised: gets what the simulator raised in episodes that were lost.

    Raises:
        SimulatorError: a simulator has failed too often, or does not go on with an open episode.
        InputError: the policy's actions are no numbers.
    """
    made = _Trajectories(episodes, samples, film, instruction, score, box)
    made.raised = [] if raised is None else raised
    live, version = np.arange(len(samples)), 0
    single = episodes.split == "test" or episodes.group_size > 1

    def reset(rows: np.ndarray) -> None:
        if len(rows):
            # What is held out begins in the states that the simulator numbers, if it does.
            begin = made.starts[rows].tolist() if episodes.split == "test" else None
            turns = episodes.task_indices(made.starts[rows]).tolist()
            made.reset(rows, worlds.reset((first + rows).tolist(), made.seeds(rows), begin, turns))

    goes_on = np.isin(samples, list(episodes.open_episodes or ()))
    if goes_on.any():
        begun = live[goes_on]
        made.go_on(begun, *worlds.restore((first + begun).tolist(), made.states()))
    reset(live[~goes_on])
    for time in range(episodes.horizon):
        if not len(live):
            break
        reply = yield _request(episodes, samples[live], made.seen_of(live), time)
        version = int(reply.info["version"])
        actions = reply.steps["action"]
        if actions.dtype.kind == "f" and not np.isfinite(actions).all():
            raise InputError(
                f"iteration {episodes.iteration}, step {time}: the policy's actions are no finite "
                "numbers; its weights have diverged (optimizer.lr, optimizer.clip_grad)"
            )
        came, errors = worlds.step((first + live).tolist(), actions)
        made.step(live, time, reply.steps, came, errors)
        last = time + 1 == episodes.horizon
        made.cut(live[made.truncated[live] | (last & ~made.terminated[live])], time)
        if single:
            live = live[~made.ended(live)]
        elif not last:
            reset(live[made.ended(live)])
    if episodes.open_episodes is not None:
        live = live[~made.ended(live)]
        made.leave(live, *worlds.save((first + live).tolist()))
    if "values" in made.columns:
        made.columns["bootstrap"] = np.zeros_like(made.columns["rewards"])
        if made.cuts and episodes.split == "train":
            who, at, seen = made.where_cut()
            reply = yield _request(episodes, samples[who], seen, 0, temperature=0.0)
            # Of values of each action of a chunk the first: what follows the state after the cut.
            made.columns["bootstrap"][who, at] = reply.steps["value"].reshape(len(who), -1)[:, 0]
    return made.records(version)


def _request(
    episodes: RolloutRequest,
    samples: np.ndarray,
    seen: Arrays,
    time: int,
    temperature: float | None = None,
) -> Record:
    """Observations for the policy to answer."""
    return Record(
        RecordId(episodes.iteration, int(samples[0])),
        steps={
            "sample": samples,
            **{
                REQUEST_NAMES.get(n, n): column
                for n, column in seen.items()
                if not n.startswith(VIDEO_PREFIX)
            },
        },
        info={
            "time": time,
            "horizon": episodes.horizon,
            "temperature": episodes.temperature if temperature is None else temperature,
        },
    )


class _Trajectories:
    """What is recorded of ``n`` samples, each row of the columns where it stays: there is no other
    copy of it, for pictures may fill the memory.

    ``seen`` is what each shows now; ``terminated`` and ``truncated`` (bool ``[n]``) are those of
    the last steps.
    """

    def __init__(
        self,
        episodes: RolloutRequest,
        samples: np.ndarray,
        film: Collection[str],
        instruction: bool | str,
        score: str,
        box: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        count = len(samples)
        self._box = {} if box is None else dict(zip((ACTION_LOW, ACTION_HIGH), box, strict=True))
        self._film, self._instruction = film, instruction
        self._score = EPISODE_METRICS.index(score)
        self._episodes, self._samples = episodes, samples
        self.starts = samples // episodes.group_size
        self.columns: dict[str, np.ndarray] = {}
        """``[n, horizon, ...]`` each."""
        self.seen = Arrays()
        self.cuts: list[tuple[np.ndarray, int, Arrays]] = []
        """The samples that were cut off, after which step, and what they showed then."""
        self.terminated, self.truncated = np.zeros((2, count), bool)
        self._length, self._begun, self._first = np.zeros((3, count), np.int64)
        """Steps, episodes begun, the first step of the open one."""
        self._measured = np.zeros((len(EPISODE_METRICS), count))
        """Of the open episodes."""
        self._ended: list[list[tuple[int, np.ndarray]]] = [[] for _ in samples]
        """Of each episode that ended, its last step and what :data:`MEASURES` names."""
        self._lost: list[list[slice]] = [[] for _ in samples]
        """The steps of the episodes in which the simulator failed."""
        self._why: list[list[str]] = [[] for _ in samples]
        self.raised: list[str] = []
        """What it raised in them, by row and of all."""
        self._left: dict[int, np.ndarray] = {}
        """The states of episodes that are open at the end."""
        self._unsaved: frozenset[int] = frozenset()
        """The rows whose open episodes were lost at the end; their steps were done, and count."""

    def seeds(self, rows: np.ndarray) -> list[int]:
        """Of the next episodes."""
        e = self._episodes
        starts = zip(self.starts[rows].tolist(), self._begun[rows].tolist(), strict=True)
        draws = (generator(e.seed, e.iteration, e.split, "reset", *start) for start in starts)
        return [int(random.integers(2**31)) for random in draws]

    def reset(self, rows: np.ndarray, seen: Mapping[str, np.ndarray]) -> None:
        """The next episodes begin."""
        self._show(rows, seen)
        self._begun[rows] += 1
        self._first[rows] = self._length[rows]
        self._measured[:, rows] = 0

    def states(self) -> list[np.ndarray]:
        """Of the episodes that go on, in the order of the samples."""
        left = self._episodes.open_episodes or {}
        return [left[s].context[episodes.OPEN_STATE] for s in self._samples.tolist() if s in left]

    def go_on(
        self, rows: np.ndarray, seen: Mapping[str, np.ndarray], errors: Mapping[int, str]
    ) -> None:
        """Episodes of the iteration before go on, where they showed ``seen``.

        Args:
            errors: by position in ``rows``, what the simulator raised.

        Raises:
            SimulatorError: it has: to begin another episode instead would be another run.
        """
        for place, error in errors.items():
            sample, before = int(self._samples[rows[place]]), self._episodes.iteration - 1
            raise SimulatorError(
                f"sample {sample}: this simulator cannot go on with the episode that iteration "
                f"{before} left open: {exception_line(error)}. Restore the versions of "
                "the simulator and its packages that it was begun with, then resume the run; or "
                "begin another one (run.name), by the weights of this one where the model takes "
                "them (rlinf export, model.path)"
            )
        self._show(rows, seen)
        left = self._episodes.open_episodes or {}
        for row in rows.tolist():
            self._measured[:, row] = left[int(self._samples[row])].context[episodes.OPEN_METRICS]

    def leave(
        self, rows: np.ndarray, states: Sequence[np.ndarray], errors: Mapping[int, str]
    ) -> None:
        """Episodes stay open, in these states.

        Args:
            errors: by position in ``rows``, why an episode was lost, whose state is empty.
        """
        pairs = zip(rows.tolist(), states, strict=True)
        self._left = {row: state for row, state in pairs if state.size}
        self._unsaved = frozenset(int(rows[place]) for place in errors)
        for place, error in errors.items():
            start = int(self.starts[rows[place]])
            log.warning("start %d: the simulator failed to save its state: %s", start, error)

    def _open(self, row: int) -> dict[str, np.ndarray]:
        if row not in self._left:
            return {}
        measured = self._measured[:, row].copy()
        return {episodes.OPEN_STATE: self._left[row], episodes.OPEN_METRICS: measured}

    def seen_of(self, rows: np.ndarray) -> Arrays:
        """What samples show now, copied."""
        return {name: column[rows] for name, column in self.seen.items()}

    def ended(self, rows: np.ndarray) -> np.ndarray:
        """Whether the last step was the last of its episode, ``[len(rows)]``."""
        return self.terminated[rows] | self.truncated[rows]

    def step(
        self,
        rows: np.ndarray,
        time: int,
        replied: Mapping[str, np.ndarray],
        came: Mapping[str, np.ndarray],
        errors: Mapping[int, str],
    ) -> None:
        """Record what was seen, all that was replied, and what came of the actions.

        Args:
            errors: by position in ``rows``, what the simulator raised; the episode does not count
                then.

        Raises:
            SimulatorError: it has raised too often.
        """
        self.terminated[rows] = came["terminated"]
        self.truncated[rows] = (came["truncated"] != 0) & ~self.terminated[rows]
        step = {
            **{name: column for name, column in replied.items() if name != "sample"},
            **self.seen_of(rows),
            "rewards": came["reward"].astype(np.float32),
            "terminated": self.terminated[rows].view(np.uint8),
            "truncated": self.truncated[rows].view(np.uint8),
            "success": came["success"],
            **{name: came[name] for name in STEP_INFO_TYPES if name in came},
        }
        if is_action_chunk(replied["action"][0]):
            step |= _of_chunk(came, replied["logprob"])
        for name, entry in step.items():
            self._column(TRAJECTORY_NAMES.get(name, name), entry)[rows, time] = entry
        self._show(rows, unprefix_observations(dict(came)))
        self._length[rows] += 1
        total, length, ever, now = self._measured
        total[rows] += came["reward"]
        length[rows] += came["executed"]
        ever[rows], now[rows] = np.maximum(ever[rows], came["solved"]), came["success"]
        for row in rows[self.ended(rows)].tolist():
            self._ended[row].append((int(self._length[row]) - 1, self._measured[:, row].copy()))
        for place, error in errors.items():
            self._lose(int(rows[place]), error)

    def _column(self, name: str, entry: np.ndarray) -> np.ndarray:
        if name not in self.columns:
            shape = (len(self._samples), self._episodes.horizon, *entry.shape[1:])
            self.columns[name] = np.empty(shape, entry.dtype)
        return self.columns[name]

    def _show(self, rows: np.ndarray, seen: Mapping[str, np.ndarray]) -> None:
        for name, array in policy_observations(seen, self._instruction, self._film).items():
            if name not in self.seen:
                self.seen[name] = np.zeros((len(self._samples), *array.shape[1:]), array.dtype)
            self.seen[name][rows] = array

    def _lose(self, row: int, error: str) -> None:
        """The episode, which ended, does not count; the next one has another simulator."""
        start, lost = int(self.starts[row]), self._lost[row]
        self._ended[row].pop()
        lost.append(slice(int(self._first[row]), int(self._length[row])))
        # Rewards of steps that do not count are those of the choice before, which here was of
        # another episode.
        for name in ("rewards", "action_rewards"):
            if name in self.columns:
                self.columns[name][row, lost[-1]] = 0
        self._measured[:, row] = 0
        self._why[row].append(error)
        self.raised.append(error)
        if len(lost) == MAX_FAILED_EPISODES:
            message = f"start {start}: the simulator fails: {error}"
            raise create_simulator_error(message, *self._why[row])
        log.warning("start %d: the simulator failed: %s", start, error)

    def cut(self, rows: np.ndarray, time: int) -> None:
        """Episodes that are cut off after a step."""
        if len(rows):
            self.cuts.append((rows, time, self.seen_of(rows)))

    def where_cut(self) -> tuple[np.ndarray, np.ndarray, Arrays]:
        """All cuts: samples ``[K]``, steps ``[K]``, and what was seen then ``[K, ...]``."""
        who = np.concatenate([rows for rows, _, _ in self.cuts])
        at = np.concatenate([np.full(len(rows), time) for rows, time, _ in self.cuts])
        seen = {name: np.concatenate([s[name] for _, _, s in self.cuts]) for name in self.seen}
        return who, at, seen

    def records(self, version: int) -> list[Record]:
        """The trajectories; views of the columns."""
        state = self.seen.get(STATE, np.zeros((0, 0), np.float32))
        who, at, after = np.zeros(0, np.int64), np.zeros(0, np.int64), state[:0]
        if self.cuts:
            who, at, seen = self.where_cut()
            after = seen[STATE]
        found = []
        for row, sample in enumerate(self._samples.tolist()):
            length, ended, mine = int(self._length[row]), self._ended[row], who == row
            means = np.mean([m for _, m in ended] or [self._measured[:, row]], axis=0)
            found.append(
                Record(
                    RecordId(self._episodes.iteration, sample),
                    steps={
                        **{name: column[row, :length] for name, column in self.columns.items()},
                        "mask": self._mask(row),
                    },
                    context={
                        **{
                            TRUNCATION_STEPS: at[mine],
                            FINAL_OBSERVATIONS: after[mine],
                            **self._box,
                        },
                        **self._outcomes(row),
                        **self._open(row),
                    },
                    info={
                        "group": int(self.starts[row]),
                        "policy_version": version,
                        "stop_reason": "stop" if ended else "length",
                        **dict(zip(EPISODE_METRICS, means.tolist(), strict=True)),
                        "episodes": len(ended),
                        "scored": int(self._scored(row)),
                        "failed": len(self._lost[row]) + (row in self._unsaved),
                    },
                )
            )
        return found

    def _outcomes(self, row: int) -> dict[str, np.ndarray]:
        """See :mod:`rlinf.data.episodes`."""
        judged = self._ended[row]
        if not judged and self._episodes.open_episodes is None and self._scored(row):
            judged = [(int(self._length[row]) - 1, self._measured[:, row])]
        return {
            OUTCOME_STEPS: np.array([last for last, _ in judged], np.int64),
            OUTCOMES: np.array([measured[self._score] for _, measured in judged], np.float64),
        }

    def _scored(self, row: int) -> bool:
        """Whether there is an episode to measure: one that ended, or the open one."""
        lost = self._lost[row]
        return bool(self._ended[row]) or not lost or lost[-1].stop < self._length[row]

    def _mask(self, row: int) -> np.ndarray:
        """The step column ``mask``, also where all steps count: another sample may have lost some,
        and records of one channel have the same columns."""
        mask = np.ones(int(self._length[row]), np.float32)
        for steps in self._lost[row]:
            mask[steps] = 0
        return mask


def check_not_all_failed(
    records: Sequence[Record], raised: Sequence[str], *, held_out: bool
) -> None:
    """Where samples are of one episode each, see that not all of several starts were lost.

    One start may be at fault itself, and all samples of its group with it. Held-out episodes that
    something else than the user's code took are left to the stage, which knows of those elsewhere.

    Args:
        raised: what the simulator raised in them.

    Raises:
        SimulatorError: they were, of as many starts as a sample may have episodes that fail.
    """
    starts = {int(record.info["group"]) for record in records}
    if len(starts) >= MAX_FAILED_EPISODES and all(record.info["failed"] for record in records):
        message = f"the simulator fails in each of {len(records)} episodes, of {len(starts)} starts"
        last = raised[-1] if raised else "the warnings before this say what it raised"
        error = create_simulator_error(f"{message}; {last}", *raised)
        if isinstance(error, UserCodeError) or not held_out:
            raise error


def is_action_chunk(action: np.ndarray) -> bool:
    """Whether a sample's action is several: numbers are of an integer type, vectors of a floating
    one."""
    return bool(action.ndim > np.issubdtype(action.dtype, np.floating))


def _of_chunk(came: Mapping[str, np.ndarray], logprob: np.ndarray) -> dict[str, np.ndarray]:
    """What is recorded of chunks beside their replies; see :func:`play`."""
    executed = came["executed"]
    found = {
        "executed": executed.astype(np.int32),
        "action_rewards": came[ACTION_REWARDS].astype(np.float32),
    }
    if logprob.ndim > 1:
        counts = np.arange(logprob.shape[1]) < executed[:, None]
        counts = counts.reshape(*counts.shape, *[1] * (logprob.ndim - 2))
        found["submask"] = np.broadcast_to(counts, logprob.shape).astype(np.uint8)
    return found


def policy_observations(
    seen: Mapping[str, np.ndarray], instruction: bool | str, film: Collection[str] = ()
) -> Arrays:
    """The state as a policy takes it, float32; pictures as they are, under ``images.`` and their
    name, or :data:`VIDEO` and it; the instruction, where it is wanted, or the text in its place.
    """
    found = {STATE: np.asarray(seen[STATE], np.float32)}
    for name, array in seen.items():
        if name not in (STATE, INSTRUCTION):
            found[(VIDEO_PREFIX if name in film else "images.") + name] = array
    if isinstance(instruction, str):
        text = encode_instruction(instruction)
        found[INSTRUCTION] = np.broadcast_to(text, (*found[STATE].shape[:-1], *text.shape))
    elif instruction:
        found[INSTRUCTION] = seen[INSTRUCTION]
    return found


MAX_EXPERT_STEPS = 1000
"""Steps of an episode."""


def collect_demonstrations(
    worlds: SyncVectorEnv | SubprocessVectorEnv, seed: int, count: int, instruction: bool | str
) -> list[Record]:
    """Episodes from ``count`` starts, each to its first success; unsolved ones are left out.

    Raises:
        ConfigError: the simulator has no expert, or it solves nothing.
    """
    episodes = []
    for number in range(count):
        begin = int(generator(seed, "demonstration", number).integers(2**31))
        try:
            came = worlds.demonstrate(begin, MAX_EXPERT_STEPS)
        except InvalidEnvConfig as error:
            raise ConfigError(str(error)) from None
        if not came["success"][-1]:
            continue
        rows = [
            policy_observations(
                {name: column[t] for name, column in unprefix_observations(came).items()},
                instruction,
            )
            for t in range(len(came["success"]))
        ]
        steps = {
            TRAJECTORY_NAMES.get(name, name): np.stack([row[name] for row in rows])
            for name in rows[0]
        }
        actions = came["action"]
        if actions.dtype.kind == "f":
            actions = actions.astype(np.float32)
        steps |= {"actions": actions, "rewards": came["reward"].astype(np.float32)}
        episodes.append(Record(RecordId(0, number), steps))
    if not episodes:
        raise ConfigError(
            f"task.demonstrations: the simulator's expert solved none of {count} episodes; ask for "
            "more, or set it to 0"
        )
    return episodes
