"""Gymnasium environments, MuJoCo's included, stepped together as one vector.

Every iteration starts fresh episodes, seeded by (seed, iteration, start, episode): nothing is
carried from one job to the next, so any driver collects the same experience. The samples of a group
share their start's episodes and differ in their actions alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
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
from rlinf.envs.base import Environment, Episodes
from rlinf.envs.overlap import Part, overlapped
from rlinf.envs.processes import Processes
from rlinf.errors import ConfigError, MissingPackageError
from rlinf.fit import OBSERVATIONS, STEP_REWARDS
from rlinf.seeding import generator

if TYPE_CHECKING:
    from rlinf.models.base import Spec

log = logging.getLogger(__name__)

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
    halves: Literal[1, 2] = 1
    """2: a process steps one half of its environments while the policy answers the other."""


class GymEnvironment(Environment):
    """A start is an environment, a sample the experience of one of them.

    An episode in which the simulator raises is lost, and that alone: its steps do not count, and
    the next one has a new simulator. One that raises :data:`FAILURES` times in a sample is broken.

    On the training split a sample is ``horizon`` steps in which ended episodes are followed by new
    ones; on the test split it is one episode, or as much of it as fits.

    The action space is not scaled: a Gaussian policy's actions are clipped on their way in, and
    trajectories keep what the policy drew, to which its log-probability belongs.
    """

    Config = GymConfig
    offers = frozenset({OBSERVATIONS, STEP_REWARDS})

    def __init__(self, config: GymConfig, processor: Any) -> None:
        self.config = config
        self._worlds: list[Any] = []
        self._processes = Processes(self, config.processes) if config.processes else None

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
        one = make(config)
        seen, act = one.observation_space, one.action_space
        one.close()
        from gymnasium.spaces import Box, Discrete

        if not isinstance(seen, Box) or len(seen.shape) != 1:
            raise ConfigError(f"task.id: {config.id} has no vector observations ({seen})")
        if isinstance(act, Discrete):
            action = {"kind": "discrete", "size": int(act.n)}
        elif isinstance(act, Box) and len(act.shape) == 1:
            action = {"kind": "box", "size": int(act.shape[0])}
        else:
            raise ConfigError(f"task.id: {config.id} has actions {act}, which no policy here takes")
        return {"observation": int(seen.shape[0]), "action": action}

    def simulate(
        self, episodes: Episodes, observations: Channel, actions: Channel
    ) -> Iterator[Record]:
        """One request per time step, of all environments of a part still running.

        Trajectories have all columns of the replies and ``observations`` ``[T, D]``, ``rewards``,
        ``terminated``, ``truncated``. Where the policy gives ``values``, ``bootstrap`` is the value
        of the state after a step at which an episode was cut off, 0 at all others.
        """
        if self._processes is not None:
            yield from self._processes.collect(episodes, observations, actions)
            return

        def put(request: Record) -> None:
            observations.put(request, weight=len(request))

        records = overlapped(self.parts(episodes, episodes.samples()), put, actions.get)
        observations.close()
        yield from records

    def parts(self, episodes: Episodes, samples: np.ndarray) -> list[Part]:
        """The time loops of ``samples``, one or two."""
        self._first(len(samples))
        each = -(-len(samples) // self.config.halves) or 1
        return [
            _play(episodes, samples[first : first + each], self._worlds, first, self.config)
            for first in range(0, len(samples), each)
        ]

    def score(self, trajectories: Sequence[Record], counts: Counter[str]) -> list[float]:
        """Mean return of the episodes a trajectory completed (of the open one, if none)."""
        counts["failed_episodes"] += sum(
            int(trajectory.info["failed"]) for trajectory in trajectories
        )
        return [float(trajectory.info["return"]) for trajectory in trajectories]

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
        for world in self._worlds:
            world.close()
        self._worlds = []

    def _first(self, count: int) -> None:
        """Have that many simulators; they stay, for a seeded reset leaves nothing of the past."""
        while len(self._worlds) < count:
            self._worlds.append(make(self.config))


def _play(
    episodes: Episodes, samples: np.ndarray, worlds: list[Any], first: int, config: GymConfig
) -> Part:
    """The time loop of ``samples``, each in a world of its own: those from ``first`` on."""
    starts = samples // episodes.group_size
    rows = [
        _Sample(worlds, first + at, config, episodes, int(start)) for at, start in enumerate(starts)
    ]
    live = list(range(len(rows)))
    cut: list[tuple[int, int, np.ndarray]] = []
    version = 0
    for time in range(episodes.horizon):
        if not live:
            break
        reply = yield _request(episodes, samples[live], [rows[i].seen for i in live], time)
        version = int(reply.info["version"])
        for k, i in enumerate(live):
            row, last = rows[i], time + 1 == episodes.horizon
            row.step({name: column[k] for name, column in reply.steps.items() if name != "sample"})
            if row.truncated or (last and not row.terminated):
                cut.append((i, time, row.seen))
            if row.ended and not last and episodes.split == "train":
                row.reset()
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
            info={
                "group": int(start),
                "policy_version": version,
                "stop_reason": "stop" if row.returns else "length",
                "return": float(np.mean(row.returns or [row.running])),
                "episodes": len(row.returns),
                "failed": len(row.lost),
            },
        )
        for sample, start, row in zip(samples, starts, rows, strict=True)
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

    def __init__(
        self, worlds: list[Any], at: int, config: GymConfig, episodes: Episodes, start: int
    ) -> None:
        self._worlds, self._at, self._config = worlds, at, config
        self._episodes, self._start = episodes, start
        space = worlds[at].action_space
        self._bounds = (space.low, space.high) if hasattr(space, "low") else None
        self._first_action = int(getattr(space, "start", 0))
        self.columns: dict[str, list[Any]] = {}
        self.returns: list[float] = []
        self.lost: list[slice] = []
        """The steps of the episodes in which the simulator raised."""
        self._begun, self._first = 0, 0
        self.reset()

    def reset(self) -> None:
        """Begin the next episode."""
        episodes, number = self._episodes, self._begun
        random = generator(
            episodes.seed, episodes.iteration, episodes.split, "reset", self._start, number
        )
        seen, _ = self._worlds[self._at].reset(seed=int(random.integers(2**31)))
        self._begun, self._first = number + 1, len(self.columns.get("rewards", ()))
        self.seen = np.asarray(seen, np.float32)
        self.terminated = self.truncated = False
        self.running = 0.0

    def step(self, reply: Mapping[str, Any]) -> None:
        """Act and record: all that was replied, and what comes of the action."""
        before, action = self.seen, reply["action"]
        if self._bounds is None:
            performed = int(action) + self._first_action
        else:
            performed = np.clip(action, *self._bounds)
        try:
            seen, reward, terminated, truncated, _ = self._worlds[self._at].step(performed)
        except Exception:  # a simulator may raise anything
            self._lose()
            seen, reward, terminated, truncated = before, 0.0, True, False
        else:
            if terminated or truncated:
                self.returns.append(self.running + float(reward))
        self.seen = np.asarray(seen, np.float32)
        self.terminated, self.truncated = bool(terminated), bool(truncated and not terminated)
        self.running += float(reward)
        step = {
            **{COLUMN_OF.get(name, name): entry for name, entry in reply.items()},
            "observations": before,
            "rewards": np.float32(reward),
            "terminated": np.uint8(self.terminated),
            "truncated": np.uint8(self.truncated),
        }
        for name, entry in step.items():
            self.columns.setdefault(name, []).append(entry)

    def _lose(self) -> None:
        """The episode does not count; the next one has another simulator.

        Raises whatever the simulator did where that is not the first time.
        """
        self.lost.append(slice(self._first, len(self.columns.get("rewards", ())) + 1))
        if len(self.lost) == FAILURES:
            raise  # noqa: PLE0704 - called where it was caught
        log.warning("start %d: the simulator failed", self._start, exc_info=True)
        with contextlib.suppress(Exception):
            self._worlds[self._at].close()
        self._worlds[self._at] = make(self._config)

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
    try:
        import gymnasium
    except ImportError:
        raise MissingPackageError("gymnasium", "sims", "task.name: gym") from None
    _quiet_mujoco()
    try:
        # The checker repeats assertions at every step; measured() has looked at the spaces.
        return gymnasium.make(config.id, disable_env_checker=True, **config.kwargs)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(f"task.id: cannot make {config.id!r}: {error}") from None


@functools.cache
def _quiet_mujoco() -> None:
    """Have MuJoCo's warnings logged, each once: it prints them and appends to a MUJOCO_LOG.TXT in
    the working directory, for every environment made."""
    try:
        mujoco = importlib.import_module("mujoco")
    except ImportError:
        return
    mujoco.set_mju_user_warning(functools.cache(functools.partial(log.warning, "MuJoCo: %s")))


if __name__ == "__main__":
    for name, value in GymEnvironment.measured(GymConfig(id=sys.argv[1])).items():
        sys.stdout.write(f"task.{name}: {json.dumps(value)}\n")
