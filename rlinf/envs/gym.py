"""Gymnasium environments, MuJoCo's included, stepped together as one vector.

Every iteration starts fresh episodes, seeded by (seed, iteration, start, episode): nothing is
carried from one job to the next, so any driver collects the same experience. The samples of a group
share their start's episodes and differ in their actions alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, PositiveInt

from rlinf.channels.base import Channel
from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.envs.base import Environment, Episodes
from rlinf.envs.loop import MEASURES, play
from rlinf.envs.overlap import Part, overlapped
from rlinf.envs.processes import Process, side_by_side
from rlinf.envs.simulator import STATE, Worlds, maker
from rlinf.envs.worlds import worlds
from rlinf.errors import ConfigError, InputError, MissingPackageError
from rlinf.fit import OBSERVATIONS, STEP_REWARDS
from rlinf.interpreters import interpreter

if TYPE_CHECKING:
    from rlinf.models.base import Spec

log = logging.getLogger(__name__)


class ActionConfig(Section):
    """What a policy chooses: one of ``size`` numbers, or a vector of that length."""

    kind: Literal["discrete", "box"]
    size: int = Field(gt=0)


class GymConfig(Section):
    """A simulator with vector observations."""

    world: str = "gymnasium"
    """Which simulator: a name of :mod:`rlinf.envs.worlds`, or ``module:function`` of your own."""
    id: str = Field(min_length=1)
    """Which of its environments. Of Gymnasium ``CartPole-v1``, or ``module:Name-v0`` to import the
    module that registers it."""
    observation: int | None = Field(default=None, gt=0)
    """Length of an observation vector, of the state beside images."""
    images: dict[str, tuple[PositiveInt, PositiveInt]] = {}
    """Cameras that are rendered at each step, by name, and the height and width of their pictures;
    what a simulator calls them is in docs/simulators.md. They need a process, one at least."""
    renderer: Literal["egl", "osmesa"] = "egl"
    """How MuJoCo renders: on a GPU (or by Mesa's library in software), or in software."""
    action: ActionConfig | None = None
    """With ``observation`` what a policy is made for: no simulator is built to find it out, which
    may need a device that the machine that starts runs has not. ``python -m rlinf.envs.gym ID``
    prints both; the first stage sees that they are right."""
    kwargs: dict[str, Any] = {}
    """Further arguments of what makes it."""
    success: bool = False
    """The score of an episode is whether the task was solved in it, at any step, as the simulator's
    ``info`` says; else its return."""
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
        spec = {"observation": config.observation, "action": config.action.model_dump()}
        if config.images:
            spec["images"] = {name: list(size) for name, size in config.images.items()}
        return spec

    @classmethod
    def modules(cls, config: GymConfig) -> tuple[str, ...]:
        if config.world not in worlds.names():
            return ("numpy",)
        module = importlib.import_module(worlds.target(config.world).partition(":")[0])
        return ("numpy", *module.PACKAGES)

    @classmethod
    def row_bytes(cls, config: GymConfig) -> int:
        pixels = sum(height * width for height, width in config.images.values())
        return np.dtype(np.float32).itemsize * (config.observation or 0) + 3 * pixels

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
        apart = config.python is not None or config.images
        found = simulator_process(config) if apart else Worlds(functools.partial(make, config))
        try:
            with contextlib.closing(found):
                spaces = found.spaces()
        except InputError as error:
            if type(error) is not InputError:
                raise
            raise ConfigError(str(error)) from None
        seen, act = spaces["observation"], spaces["action"]
        if seen["kind"] != "dict":
            seen = {"parts": {STATE: seen}, **seen}
        state = seen["parts"].get(STATE)
        if state is None or state["kind"] != "box" or len(state["shape"]) != 1:
            raise ConfigError(f"task.id: {config.id} has no vector observations ({seen['text']})")
        if act["kind"] == "discrete":
            action = {"kind": "discrete", "size": act["size"]}
        elif act["kind"] == "box" and len(act["shape"]) == 1:
            action = {"kind": "box", "size": act["shape"][0]}
        else:
            raise ConfigError(
                f"task.id: {config.id} has actions {act['text']}, which no policy here takes"
            )
        return {"observation": state["shape"][0], "action": action}

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
        apart = self.config.python is not None or bool(self.config.images)
        return self.config.processes or int(apart)

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
                self._processes.append(simulator_process(self.config))
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
            play(episodes, samples[first : first + each], worlds, first)
            for first in range(0, len(samples), each)
        ]

    def score(self, trajectories: Sequence[Record], counts: Counter[str]) -> list[float]:
        """Of the episodes that a trajectory completed (of the open one, if none) the mean return,
        or the share that had success."""
        counts["failed_episodes"] += sum(
            int(trajectory.info["failed"]) for trajectory in trajectories
        )
        measure = "success_once" if self.config.success else "return"
        return [float(trajectory.info[measure]) for trajectory in trajectories]

    def measures(self, trajectories: Sequence[Record]) -> dict[str, float]:
        return {
            name: float(np.mean([trajectory.info[name] for trajectory in trajectories]))
            for name in (*MEASURES[:2], *(MEASURES[2:] if self.config.success else ()))
        }

    def close(self) -> None:
        self._end()
        self._worlds.close()

    def _end(self) -> None:
        for process in self._processes:
            process.close()
        self._processes = []


def simulator_process(config: GymConfig) -> Process:
    """One that steps worlds of a configuration."""
    python = None if config.python is None else interpreter(config.python, "task.python")
    return Process(
        _target(config), _values(config), python, config.timeout_s, config.images, config.renderer
    )


def make(config: GymConfig) -> Any:
    """One world in this process.

    Raises:
        MissingPackageError: Gymnasium is not installed.
        ConfigError: the simulator is not installed, does not know it, or cannot make it so.
    """
    if config.world == "gymnasium" and importlib.util.find_spec("gymnasium") is None:
        raise MissingPackageError("gymnasium", "sims", "task.name: gym")
    try:
        return maker(_target(config))(**_values(config))
    except (ImportError, ValueError) as error:
        raise ConfigError(f"task.id: {error}") from None


def _target(config: GymConfig) -> str:
    """What makes a world, as a process of another interpreter finds it: ours by its file."""
    target = worlds.target(config.world, "task.world")
    module, _, name = target.partition(":")
    if config.world not in worlds.names():
        return target
    spec = importlib.util.find_spec(module)
    assert spec is not None
    return f"{spec.origin}:{name}"


def _values(config: GymConfig) -> dict[str, Any]:
    return {"id": config.id, "kwargs": config.kwargs}


if __name__ == "__main__":
    for name, value in GymEnvironment.measured(GymConfig(id=sys.argv[1])).items():
        sys.stdout.write(f"task.{name}: {json.dumps(value)}\n")
