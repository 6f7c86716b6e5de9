"""Gymnasium environments, MuJoCo's included, stepped together as one vector.

Every iteration starts fresh episodes, seeded by (seed, iteration, environment, episode): nothing is
carried from one job to the next, so any driver collects the same experience.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlinf.channels.base import Channel
from rlinf.config import Section
from rlinf.data.record import Identity, Record
from rlinf.envs.base import Environment, Episodes
from rlinf.errors import ConfigError, MissingPackageError
from rlinf.models.base import Spec
from rlinf.seeding import generator


class GymConfig(Section):
    """A registered Gymnasium environment with vector observations."""

    id: str
    kwargs: dict[str, Any] = {}
    """Arguments of ``gymnasium.make``."""


class GymEnvironment(Environment):
    """See the module. Starts are environments; a sample is the experience of one of them."""

    Config = GymConfig

    def __init__(self, config: GymConfig, processor: Any) -> None:
        self.config = config
        self._environments: list[Any] = []

    @classmethod
    def describe(cls, config: GymConfig) -> Spec:
        import_gymnasium()
        from gymnasium.spaces import Box, Discrete

        one = make(config)
        try:
            seen, act = one.observation_space, one.action_space
        finally:
            one.close()
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
        samples = episodes.samples()
        whole = episodes.split == "test"
        worlds = self._worlds(len(samples))
        counts = np.zeros(len(samples), dtype=np.int64)
        current = [
            _reset(world, episodes, int(sample), 0)
            for world, sample in zip(worlds, samples, strict=True)
        ]
        columns: list[dict[str, list[Any]]] = [
            {name: [] for name in COLUMNS} for _ in range(len(samples))
        ]
        finals: list[tuple[int, int, np.ndarray]] = []
        returns: list[list[float]] = [[] for _ in samples]
        running = np.zeros(len(samples))
        live = np.arange(len(samples))
        version = 0
        for time in range(episodes.horizon):
            if not len(live):
                break
            batch = np.stack([current[i] for i in live]).astype(np.float32)
            reply = _ask(observations, actions, episodes, samples[live], batch, time)
            version = int(reply.info["version"])
            still = []
            for k, i in enumerate(live):
                action = reply.steps["action"][k]
                seen, reward, terminated, truncated, _ = worlds[i].step(
                    _clipped(worlds[i], action)
                )
                running[i] += reward
                row = columns[i]
                row["observations"].append(batch[k])
                row["actions"].append(action)
                row["logprobs"].append(reply.steps["logprob"][k])
                row["values"].append(reply.steps["value"][k])
                row["rewards"].append(np.float32(reward))
                row["terminated"].append(np.uint8(terminated))
                row["truncated"].append(np.uint8(truncated and not terminated))
                row["bootstrap"].append(np.float32(0))
                last = time + 1 == episodes.horizon
                if not terminated and (truncated or last):
                    finals.append((i, len(row["rewards"]) - 1, np.asarray(seen, np.float32)))
                if terminated or truncated:
                    returns[i].append(float(running[i]))
                    running[i] = 0.0
                    counts[i] += 1
                    if whole:
                        continue
                    seen = _reset(worlds[i], episodes, int(samples[i]), int(counts[i]))
                current[i] = seen
                still.append(i)
            live = np.array(still, dtype=np.int64)
        self._bootstrap(observations, actions, episodes, samples, columns, finals)
        observations.close()
        for i, sample in enumerate(samples):
            ended = returns[i] or [float(running[i])]
            yield Record(
                Identity(episodes.iteration, int(sample)),
                steps={name: np.stack(values) for name, values in columns[i].items()},
                info={
                    "group": int(sample) // episodes.group_size,
                    "policy_version": version,
                    "stop_reason": "stop" if returns[i] else "length",
                    "return": float(np.mean(ended)),
                    "episodes": int(counts[i]),
                },
            )

    def score(self, trajectories: Sequence[Record]) -> list[float]:
        """Mean return of the episodes a trajectory completed (of the open one, if none)."""
        return [float(trajectory.info["return"]) for trajectory in trajectories]

    def close(self) -> None:
        for world in self._environments:
            world.close()
        self._environments = []

    def _worlds(self, count: int) -> list[Any]:
        while len(self._environments) < count:
            self._environments.append(make(self.config))
        return self._environments[:count]

    def _bootstrap(
        self,
        observations: Channel,
        actions: Channel,
        episodes: Episodes,
        samples: np.ndarray,
        columns: list[dict[str, list[Any]]],
        finals: list[tuple[int, int, np.ndarray]],
    ) -> None:
        """Fill in the values of the states in which episodes were cut off."""
        if not finals or episodes.split == "test":
            return
        batch = np.stack([seen for _, _, seen in finals])
        who = samples[[i for i, _, _ in finals]]
        reply = _ask(observations, actions, episodes, who, batch, 0, temperature=0.0)
        for (i, at, _), value in zip(finals, reply.steps["value"], strict=True):
            columns[i]["bootstrap"][at] = np.float32(value)


COLUMNS = (
    "observations",
    "actions",
    "logprobs",
    "values",
    "rewards",
    "terminated",
    "truncated",
    "bootstrap",
)


def import_gymnasium() -> Any:
    """The gymnasium package.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import gymnasium
    except ImportError:
        raise MissingPackageError("gymnasium", "sims", "task.name: gym") from None
    return gymnasium


def make(config: GymConfig) -> Any:
    """One environment.

    Raises:
        ConfigError: Gymnasium does not know it, or cannot make it with these arguments.
    """
    gymnasium = import_gymnasium()
    try:
        return gymnasium.make(config.id, **config.kwargs)
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigError(f"task.id: cannot make {config.id!r}: {error}") from None


def _ask(
    observations: Channel,
    actions: Channel,
    episodes: Episodes,
    samples: np.ndarray,
    batch: np.ndarray,
    time: int,
    temperature: float | None = None,
) -> Record:
    """One exchange with the engine: observations out, actions back."""
    observations.put(
        Record(
            Identity(episodes.iteration, int(samples[0])),
            steps={"sample": samples, "observation": batch},
            info={
                "time": time,
                "horizon": episodes.horizon,
                "temperature": episodes.temperature if temperature is None else temperature,
            },
        ),
        weight=len(samples),
    )
    return actions.get()


def _reset(world: Any, episodes: Episodes, sample: int, episode: int) -> np.ndarray:
    random = generator(episodes.seed, episodes.iteration, episodes.split, "reset", sample, episode)
    seen, _ = world.reset(seed=int(random.integers(2**31)))
    return np.asarray(seen)


def _clipped(world: Any, action: Any) -> Any:
    space = world.action_space
    if hasattr(space, "low"):
        return np.clip(action, space.low, space.high)
    return int(action)
