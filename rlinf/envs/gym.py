"""Gymnasium environments, MuJoCo's included, stepped together as one vector.

Every iteration starts fresh episodes, seeded by (seed, iteration, start, episode): nothing is
carried from one job to the next, so any driver collects the same experience. The samples of a group
share their start's episodes and differ in their actions alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from rlinf.channels.base import Channel
from rlinf.config import Section
from rlinf.data.record import Identity, Record
from rlinf.data.transitions import CUT_OBSERVATIONS, CUT_STEPS
from rlinf.envs.base import Environment, Episodes
from rlinf.envs.overlap import Part, overlapped
from rlinf.envs.processes import Process, SimulatorError, side_by_side
from rlinf.envs.simulator import Refused, Worlds, gymnasium_world
from rlinf.errors import ConfigError, MissingPackageError
from rlinf.fit import OBSERVATIONS, STEP_REWARDS
from rlinf.interpreters import interpreter
from rlinf.seeding import generator

if TYPE_CHECKING:
    from rlinf.models.base import Spec

log = logging.getLogger(__name__)
MAKER = ":gymnasium_world"

FAILURES = 3


class ActionConfig(Section):
    """What a policy chooses: one of ``size`` numbers, or a vector of that length."""

    kind: Literal["discrete", "box"]
    size: int = Field(gt=0)


class GymConfig(Section):
    """A registered Gymnasium environment with vector observations."""

    id: str = Field(min_length=1)
    """``CartPole-v1``, or ``module:Name-v0`` to import the module that registers it."""
    observation: int | None = Field(default=None, gt=0)
    """Length of an observation vector."""
    action: ActionConfig | None = None
    """With ``observation`` what a policy is made for: no simulator is built to find it out, which
    may need a device that the machine that starts runs has not. ``python -m rlinf.envs.gym ID``
    prints both; the first stage sees that they are right."""
    kwargs: dict[str, Any] = {}
    """Arguments of ``gymnasium.make``."""
    processes: int = Field(default=0, ge=0)
    """Processes that step the environments beside the policy; 0: the stage's own does."""
    python: str | None = None
    """The interpreter of those processes, one at least then: a path, or the name of an environment
    that ``make env`` has made or the site file knows. It needs numpy and Gymnasium alone."""
    timeout_s: float = Field(default=300.0, gt=0)
    """For one answer of such a process, its start included: after it the process counts as hung and
    is replaced."""
    halves: Literal[1, 2] = 1
    """2: a process steps one half of its environments while the policy answers the other."""


class GymEnvironment(Environment):
    """A start is an environment, a sample the experience of one of them.

    An episode in which the simulator raises is lost, and that alone: its steps do not count, and
    the next one has a new simulator; so are those of a process that dies or hangs. A simulator that
    fails :data:`FAILURES` times in a sample is broken.

    On the training split a sample is ``horizon`` steps in which ended episodes are followed by new
    ones; on the test split it is one episode, or as much of it as fits.

    The action space is not scaled: a Gaussian policy's actions are clipped on their way in, and
    trajectories keep what the policy drew, to which its log-probability belongs.
    """

    Config = GymConfig
    modules = ("numpy", "gymnasium")
    offers = frozenset({OBSERVATIONS, STEP_REWARDS})

    def __init__(self, config: GymConfig, processor: Any) -> None:
        self.config = config
        self._worlds = Worlds(functools.partial(make, config))
        self._processes: list[Process] = []

    @classmethod
    def describe(cls, config: GymConfig) -> Spec:
        """``observation``: length of a vector; ``action``: ``kind`` discrete or box, and ``size``.

        Raises:
            ConfigError: the configuration does not say them.
        """
        if config.observation is None or config.action is None:
            key = "observation" if config.observation is None else "action"
            raise ConfigError(
                f"task.{key}: is not set; a policy is made for task.observation (a length) and "
                "task.action (kind and size), which, where the simulator is installed, "
                f"`python -m rlinf.envs.gym {config.id}` prints"
            )
        return {"observation": config.observation, "action": config.action.model_dump()}

    @classmethod
    def row_bytes(cls, config: GymConfig) -> int:
        return np.dtype(np.float32).itemsize * (config.observation or 0)

    @classmethod
    def verify(cls, config: GymConfig) -> None:
        found, given = cls.measured(config), cls.describe(config)
        for name, value in found.items():
            if given[name] != value:
                raise ConfigError(
                    f"task.{name}: {given[name]} is not what {config.id} has; set it to {value}"
                )

    @classmethod
    def measured(cls, config: GymConfig) -> Spec:
        """What :meth:`describe` should say, by building a simulator.

        Raises:
            ConfigError: the environment is unknown, or its spaces are of another kind.
        """
        worlds = _process(config) if config.python else Worlds(functools.partial(make, config))
        with contextlib.closing(worlds):
            spaces = worlds.spaces()
        seen, act = spaces["observation"], spaces["action"]
        if seen["kind"] != "box" or len(seen["shape"]) != 1:
            raise ConfigError(f"task.id: {config.id} has no vector observations ({seen['text']})")
        if act["kind"] == "discrete":
            action = {"kind": "discrete", "size": act["size"]}
        elif act["kind"] == "box" and len(act["shape"]) == 1:
            action = {"kind": "box", "size": act["shape"][0]}
        else:
            raise ConfigError(
                f"task.id: {config.id} has actions {act['text']}, which no policy here takes"
            )
        return {"observation": seen["shape"][0], "action": action}

    def simulate(
        self, episodes: Episodes, observations: Channel, actions: Channel
    ) -> Iterator[Record]:
        """One request per time step, of all environments of a part still running.

        Trajectories have all columns of the replies and ``observations`` ``[T, D]``, ``rewards``,
        ``terminated``, ``truncated``, and what was seen after each cut as context
        (:mod:`rlinf.data.transitions`). Where the policy gives ``values``, ``bootstrap`` is the
        value of the state after a step at which an episode was cut off, 0 at all others.
        """
        samples = episodes.samples()
        if self._count:
            yield from self._beside(episodes, samples, observations, actions)
            return

        def put(request: Record) -> None:
            observations.put(request)

        records = overlapped(self._parts(episodes, samples, self._worlds), put, actions.get)
        observations.close()
        yield from records

    @property
    def _count(self) -> int:
        """Processes beside the stage's own."""
        return self.config.processes or int(self.config.python is not None)

    @property
    def pids(self) -> list[int]:
        """Of the simulator processes that run."""
        return [process.pid for process in self._processes]

    def _beside(
        self, episodes: Episodes, samples: np.ndarray, observations: Channel, actions: Channel
    ) -> list[Record]:
        """Collect with simulators in processes, which start with the first episodes."""
        shares = np.array_split(samples, min(self._count, len(samples)) or 1)
        shares = [share for share in shares if len(share)]
        try:
            while len(self._processes) < len(shares):
                self._processes.append(_process(self.config))
            pairs = zip(shares, self._processes, strict=False)
            parts = [p for share, process in pairs for p in self._parts(episodes, share, process)]
            return side_by_side(parts, observations, actions, self._end)
        except BaseException:
            # What they were about to say belongs to this attempt, not to the next one.
            self._end()
            raise

    def _parts(
        self, episodes: Episodes, samples: np.ndarray, worlds: Worlds | Process
    ) -> list[Part]:
        """The time loops of ``samples``, one or two."""
        each = -(-len(samples) // self.config.halves) or 1
        return [
            _play(episodes, samples[first : first + each], worlds, first)
            for first in range(0, len(samples), each)
        ]

    def score(self, trajectories: Sequence[Record], counts: Counter[str]) -> list[float]:
        """Mean return of the episodes a trajectory completed (of the open one, if none)."""
        counts["failed_episodes"] += sum(
            int(trajectory.info["failed"]) for trajectory in trajectories
        )
        return [float(trajectory.info["return"]) for trajectory in trajectories]

    def close(self) -> None:
        self._end()
        self._worlds.close()

    def _end(self) -> None:
        for process in self._processes:
            process.close()
        self._processes = []


def _process(config: GymConfig) -> Process:
    python = None if config.python is None else interpreter(config.python, "task.python")
    values = {"id": config.id, "kwargs": config.kwargs}
    return Process(MAKER, values, python, config.timeout_s)


def _play(episodes: Episodes, samples: np.ndarray, worlds: Worlds | Process, first: int) -> Part:
    """The time loop of ``samples``, each in a world of its own, from number ``first`` on."""
    starts = samples // episodes.group_size
    rows = [_Sample(episodes, int(start)) for start in starts]

    def reset(numbers: Sequence[int]) -> None:
        if numbers:
            found = worlds.reset([first + i for i in numbers], [rows[i].seed() for i in numbers])
            for i, seen in zip(numbers, found, strict=True):
                rows[i].reset(seen)

    reset(range(len(rows)))
    live = list(range(len(rows)))
    cut: list[tuple[int, int, np.ndarray]] = []
    version = 0
    for time in range(episodes.horizon):
        if not live:
            break
        reply = yield _request(episodes, samples[live], [rows[i].seen for i in live], time)
        version = int(reply.info["version"])
        came, errors = worlds.step([first + i for i in live], reply.steps["action"])
        ended, last = list[int](), time + 1 == episodes.horizon
        for k, i in enumerate(live):
            row = rows[i]
            row.step(
                {name: column[k] for name, column in reply.steps.items() if name != "sample"},
                {name: column[k] for name, column in came.items()},
                errors.get(k),
            )
            if row.truncated or (last and not row.terminated):
                cut.append((i, time, row.seen))
            if row.ended and not last and episodes.split == "train":
                ended.append(i)
        reset(ended)
        if episodes.split == "test":
            live = [i for i in live if not rows[i].ended]
    valued = bool(rows) and "values" in rows[0].columns
    if valued:
        for row in rows:
            row.columns["bootstrap"] = [np.float32(0)] * len(row.columns["rewards"])
    if cut and valued and episodes.split == "train":
        who = samples[[i for i, _, _ in cut]]
        reply = yield _request(episodes, who, [seen for _, _, seen in cut], 0, temperature=0.0)
        for (i, at, _), value in zip(cut, reply.steps["value"], strict=True):
            rows[i].columns["bootstrap"][at] = value
    return [
        Record(
            Identity(episodes.iteration, int(sample)),
            steps={
                **{name: np.stack(column) for name, column in row.columns.items()},
                **row.mask(),
            },
            context={
                CUT_STEPS: np.array([at for i, at, _ in cut if i == number], np.int64),
                CUT_OBSERVATIONS: np.array(
                    [seen for i, _, seen in cut if i == number], np.float32
                ).reshape(-1, *row.seen.shape),
            },
            info={
                "group": int(start),
                "policy_version": version,
                "stop_reason": "stop" if row.returns else "length",
                "return": float(np.mean(row.returns or [row.running])),
                "episodes": len(row.returns),
                "failed": len(row.lost),
            },
        )
        for number, (sample, start, row) in enumerate(zip(samples, starts, rows, strict=True))
    ]


def _request(
    episodes: Episodes,
    samples: np.ndarray,
    seen: Sequence[np.ndarray],
    time: int,
    temperature: float | None = None,
) -> Record:
    """Observations for the policy to answer."""
    return Record(
        Identity(episodes.iteration, int(samples[0])),
        steps={"sample": samples, "observation": np.stack(seen)},
        info={
            "time": time,
            "horizon": episodes.horizon,
            "temperature": episodes.temperature if temperature is None else temperature,
        },
    )


class _Sample:
    """One environment and what was recorded of it.

    ``seen`` is the last observation; ``terminated`` and ``truncated`` are those of the last step.
    """

    def __init__(self, episodes: Episodes, start: int) -> None:
        self._episodes, self._start = episodes, start
        self.columns: dict[str, list[Any]] = {}
        self.returns: list[float] = []
        self.lost: list[slice] = []
        """The steps of the episodes in which the simulator raised."""
        self._begun, self._first = 0, 0

    def seed(self) -> int:
        """Of the next episode."""
        episodes, number = self._episodes, self._begun
        random = generator(
            episodes.seed, episodes.iteration, episodes.split, "reset", self._start, number
        )
        return int(random.integers(2**31))

    def reset(self, seen: np.ndarray) -> None:
        """The next episode begins."""
        self._begun, self._first = self._begun + 1, len(self.columns.get("rewards", ()))
        self.seen = np.asarray(seen, np.float32)
        self.terminated = self.truncated = False
        self.running = 0.0

    def step(self, reply: Mapping[str, Any], came: Mapping[str, Any], error: str | None) -> None:
        """Record all that was replied, and what came of the action.

        Args:
            error: what the simulator raised; the episode does not count then.

        Raises:
            SimulatorError: it has raised too often.
        """
        before, reward = self.seen, float(came["reward"])
        self.seen = np.asarray(came["seen"], np.float32)
        self.terminated = bool(came["terminated"])
        self.truncated = bool(came["truncated"]) and not self.terminated
        self.running += reward
        if error is not None:
            self._lose(error)
        elif self.ended:
            self.returns.append(self.running)
        step = {
            **{COLUMN_OF.get(name, name): entry for name, entry in reply.items()},
            "observations": before,
            "rewards": np.float32(reward),
            "terminated": np.uint8(self.terminated),
            "truncated": np.uint8(self.truncated),
        }
        for name, entry in step.items():
            self.columns.setdefault(name, []).append(entry)

    def _lose(self, error: str) -> None:
        """The episode does not count; the next one has another simulator."""
        self.lost.append(slice(self._first, len(self.columns.get("rewards", ())) + 1))
        if len(self.lost) == FAILURES:
            raise SimulatorError(f"start {self._start}: the simulator fails: {error}")
        log.warning("start %d: the simulator failed: %s", self._start, error)

    def mask(self) -> dict[str, np.ndarray]:
        """The step column ``mask``, where there are steps that do not count."""
        if not self.lost:
            return {}
        mask = np.ones(len(self.columns["rewards"]), np.float32)
        for steps in self.lost:
            mask[steps] = 0
        return {"mask": mask}

    @property
    def ended(self) -> bool:
        """Whether the last step was the last of its episode."""
        return self.terminated or self.truncated


COLUMN_OF = {
    "action": "actions",
    "logprob": "logprobs",
    "value": "values",
    "version": "versions",
}
"""What a trajectory calls a column of replies; any other has the same name there."""


def make(config: GymConfig) -> Any:
    """One environment.

    Raises:
        MissingPackageError: Gymnasium is not installed.
        ConfigError: Gymnasium does not know it, or cannot make it with these arguments.
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise MissingPackageError("gymnasium", "sims", "task.name: gym")
    try:
        return gymnasium_world(config.id, config.kwargs)
    except Refused as error:
        raise ConfigError(str(error)) from None


if __name__ == "__main__":
    for name, value in GymEnvironment.measured(GymConfig(id=sys.argv[1])).items():
        sys.stdout.write(f"task.{name}: {json.dumps(value)}\n")
