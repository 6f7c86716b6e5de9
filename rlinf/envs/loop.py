"""The time loop of simulated episodes: what is asked of the policy, and what is recorded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.data.record import Identity, Record
from rlinf.data.transitions import CUT_OBSERVATIONS, CUT_STEPS
from rlinf.envs.base import Episodes
from rlinf.envs.overlap import Part
from rlinf.envs.processes import Process, SimulatorError
from rlinf.envs.simulator import STATE, Arrays, Worlds, seen_in, stacked
from rlinf.seeding import generator

log = logging.getLogger(__name__)
FAILURES = 3
MEASURES = ("return", "episode_length", "success_once", "success_at_end")
"""Means over the episodes that a sample completed, of the open one if none, in the ``info`` of its
trajectory."""
ASKED = {STATE: "observation"}
"""What a request calls an observation; any other has the same name there."""
COLUMN_OF = {
    STATE: "observations",
    "action": "actions",
    "logprob": "logprobs",
    "value": "values",
    "version": "versions",
}
"""What a trajectory calls a column of replies; any other has the same name there."""


def play(episodes: Episodes, samples: np.ndarray, worlds: Worlds | Process, first: int) -> Part:
    """The time loop of ``samples``, each in a world of its own, from number ``first`` on."""
    starts = samples // episodes.group_size
    rows = [_Sample(episodes, int(start)) for start in starts]

    def reset(numbers: Sequence[int]) -> None:
        if numbers:
            found = worlds.reset([first + i for i in numbers], [rows[i].seed() for i in numbers])
            for k, i in enumerate(numbers):
                rows[i].reset({name: column[k] for name, column in found.items()})

    reset(range(len(rows)))
    live = list(range(len(rows)))
    cut: list[tuple[int, int, Arrays]] = []
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
                    [seen[STATE] for i, _, seen in cut if i == number], np.float32
                ).reshape(-1, *row.seen[STATE].shape),
            },
            info={
                "group": int(start),
                "policy_version": version,
                "stop_reason": "stop" if row.episodes else "length",
                **row.measures(),
                "episodes": len(row.episodes),
                "failed": len(row.lost),
            },
        )
        for number, (sample, start, row) in enumerate(zip(samples, starts, rows, strict=True))
    ]


def _request(
    episodes: Episodes,
    samples: np.ndarray,
    seen: Sequence[Arrays],
    time: int,
    temperature: float | None = None,
) -> Record:
    """Observations for the policy to answer."""
    return Record(
        Identity(episodes.iteration, int(samples[0])),
        steps={
            "sample": samples,
            **{ASKED.get(name, name): column for name, column in stacked(seen).items()},
        },
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
        self.episodes: list[tuple[float, ...]] = []
        """Of each that ended, what :data:`MEASURES` names."""
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

    def reset(self, seen: Arrays) -> None:
        """The next episode begins."""
        self._begun, self._first = self._begun + 1, len(self.columns.get("rewards", ()))
        self.seen = _typed(seen)
        self.terminated = self.truncated = False
        self._return, self._length, self._solved, self._solved_now = 0.0, 0, False, False

    def measures(self) -> dict[str, float]:
        """Of the episodes that ended, or of the open one."""
        means = np.mean(self.episodes or [self._measured()], axis=0)
        return dict(zip(MEASURES, means.tolist(), strict=True))

    def _measured(self) -> tuple[float, ...]:
        return self._return, float(self._length), float(self._solved), float(self._solved_now)

    def step(self, reply: Mapping[str, Any], came: Mapping[str, Any], error: str | None) -> None:
        """Record all that was replied, and what came of the action.

        Args:
            error: what the simulator raised; the episode does not count then.

        Raises:
            SimulatorError: it has raised too often.
        """
        before, reward = self.seen, float(came["reward"])
        self.seen = _typed(seen_in(dict(came)))
        self.terminated = bool(came["terminated"])
        self.truncated = bool(came["truncated"]) and not self.terminated
        self._return, self._length = self._return + reward, self._length + 1
        self._solved_now = bool(came["success"])
        self._solved = self._solved or self._solved_now
        if error is not None:
            self._lose(error)
        elif self.ended:
            self.episodes.append(self._measured())
        step = {
            **{COLUMN_OF.get(name, name): entry for name, entry in reply.items()},
            **{COLUMN_OF.get(name, name): array for name, array in before.items()},
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


def _typed(seen: Arrays) -> Arrays:
    """The state as a policy takes it, pictures as they are, under ``images.`` and their name."""
    pictures = {f"images.{name}": array for name, array in seen.items() if name != STATE}
    return {STATE: np.asarray(seen[STATE], np.float32), **pictures}
