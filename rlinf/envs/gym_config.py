"""The keys of ``task=gym``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from rlinf.config import Section
from rlinf.envs.observations import InvalidEnvConfig, encode_instruction

TaskId = Annotated[str, Field(min_length=1)]
NUMERIC_KINDS = "iuf"
"""Kinds of numpy's types of which actions may be."""


ActionBounds = float | Annotated[tuple[float | None, ...], Field(min_length=1)]
"""Of all components of an action, or of each; null in a list: that one has none."""


class ActionConfig(Section):
    """What a policy chooses: one of ``size`` numbers, or a vector of that length."""

    kind: Literal["discrete", "box"]
    size: int = Field(gt=0)
    low: ActionBounds | None = None
    """Least value of each component of a vector; null: read from the simulator."""
    high: ActionBounds | None = None
    """Largest value of each component."""
    dtype: str | None = None
    """Type of a vector's components; actions are rounded where it is of integers. Null: read from
    the simulator with the bounds, else of floating-point numbers."""

    @field_validator("dtype")
    @classmethod
    def _dtype_is_of_numbers(cls, value: str | None) -> str | None:
        """Return the name of the type as numpy has it: ``float32`` for ``f4``."""
        if value is None:
            return None
        try:
            dtype = np.dtype(value)
        except (TypeError, ValueError, SyntaxError):
            dtype = np.dtype(object)
        if dtype.kind not in NUMERIC_KINDS or dtype.shape:
            raise ValueError("it is no type of numbers; set it to float32, float64 or int64, say")
        return dtype.name

    @model_validator(mode="after")
    def _bounds_fit(self) -> ActionConfig:
        if self.kind == "discrete" and self.dtype is not None:
            raise ValueError("dtype: it is of a vector's components; leave it out of a choice")
        if self.low is None and self.high is None:
            return self
        if self.kind == "discrete":
            raise ValueError("low: a choice has no bounds; leave low and high out")
        for name in ("low", "high"):
            value = getattr(self, name)
            if value is None:
                raise ValueError(f"{name}: give both low and high, or none of them")
            if isinstance(value, tuple) and len(value) != self.size:
                raise ValueError(f"{name}: {len(value)} bounds, and size is {self.size}")
        low, high = self.bounds or (np.zeros(0), np.zeros(0))
        if (low > high).any():
            raise ValueError("low: a bound is above that of high")
        return self

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Bounds ``[size]`` of a vector, infinite where there are none, of an integer type where
        actions are rounded; None: they are not known."""
        if self.low is None or self.high is None:
            return None
        sides = zip((self.low, self.high), (-np.inf, np.inf), strict=True)
        low, high = (_column(side, self.size, none) for side, none in sides)
        if self.dtype is not None and np.dtype(self.dtype).kind in "iu":
            low, high = (np.clip(side, -(2.0**62), 2.0**62) for side in (low, high))
            return low.astype(np.int64), high.astype(np.int64)
        return low, high

    @property
    def spec(self) -> dict[str, Any]:
        """What policies are told: bounds are lists, with None where there is no bound."""
        found = self.model_dump(exclude_none=True)
        for name in ("low", "high"):
            side = getattr(self, name)
            if side is not None:
                found[name] = list(side) if isinstance(side, tuple) else [side] * self.size
        return found


def _column(side: ActionBounds, size: int, none: float) -> np.ndarray:
    every = side if isinstance(side, tuple) else (side,) * size
    return np.array([none if bound is None else bound for bound in every], np.float64)


class GymConfig(Section):
    """A simulator with vector observations."""

    simulator: str = "gymnasium"
    """Which simulator: a name of :mod:`rlinf.envs.simulators`, or ``module:function`` of your own."""
    id: TaskId | Annotated[list[TaskId], Field(min_length=1)]
    """Which of its environments. Of Gymnasium ``CartPole-v1``, or ``module:Name-v0`` to import the
    module that registers it. Several tasks of a simulator, with the same spaces: a list, or a name
    that it has for one (``MT10``); starts are shared out among them in turns."""
    append_task_one_hot: bool = False
    """Whether observations end with which of several tasks it is: as many numbers as there are
    tasks, one of them 1, all others 0."""
    observation: int | None = Field(default=None, gt=0)
    """Length of an observation vector, of the state beside images; null: read from the simulator
    when a run is made. What is composed of several parts is flattened into one vector."""
    ignore_observations: tuple[str, ...] = ()
    """Parts of a composed observation that are left out, by their names. Any other part is used, or
    refused."""
    images: dict[str, tuple[PositiveInt, PositiveInt]] = {}
    """Cameras that are rendered at each step, by name, and the height and width of their pictures;
    what a simulator calls them is in docs/howto/simulators.md. They need a process, one at least. A
    picture that is part of the observation itself is named here too."""
    video: dict[str, tuple[PositiveInt, PositiveInt]] = {}
    """Cameras that film the first ``evaluate.videos`` held-out episodes, with height and width of
    their pictures, which the policy does not see; those of ``images`` film in any case."""
    renderer: Literal["egl", "osmesa"] = "egl"
    """How MuJoCo renders: on a GPU (or by Mesa's library in software), or in software."""
    action: ActionConfig | None = None
    """With ``observation`` what a policy is made for. What is not given of the two is read from the
    simulator when a run is made, and frozen with it; where the machine that makes runs cannot build
    the simulator, all of it must be given. The first stage sees that they are right."""
    kwargs: dict[str, Any] = {}
    """Further arguments of what makes it."""
    instruction: bool | str = False
    """Whether observations have what the simulator asks for in words, for policies that read; or a
    text of yours in its place, of up to 256 bytes."""
    demonstrations: int = Field(default=0, ge=0)
    """Episodes by an expert that the simulator has itself, from which a warm start learns; those
    that it does not solve are left out."""
    score_by_success: bool = False
    """The score of an episode is whether the task was solved in it, at any step, as the simulator's
    ``info`` says; else its return."""
    num_processes: int = Field(default=0, ge=0)
    """Processes that step the environments beside the policy; 0: the stage's own does, which is
    faster for small simulators from their state, and dies or hangs with one that does."""
    max_parallel_envs: int | None = Field(default=None, gt=0)
    """Most environments of a stage's process at once, for simulators that fill the memory: the
    others wait for them, and nothing else changes; null: all that a stage has."""
    python: str | None = None
    """The interpreter of those processes, one at least then: a path, or the name of an environment
    that ``make env`` has made or the site file knows. It needs numpy and Gymnasium alone."""
    timeout_s: float = Field(default=300.0, gt=0)
    """For one answer of such a process, its start included: after it the process counts as hung and
    is replaced. Nothing watches what the stage's own process steps."""
    carry_over_episodes: bool = False
    """A sample of training begins where the same one of the iteration before ended: an episode that
    its horizon cut off goes on, with its return and length so far; if there is none, another one
    begins. So episodes may be longer than ``rollout.horizon``. False: every iteration begins all
    anew. Of worlds that say what state they are in (docs/howto/simulators.md)."""
    ignore_terminations: bool = False
    """An episode goes on where the task says that it terminated, until the simulator's limit of
    time or ``rollout.horizon`` cuts it off; whether it was solved is still counted."""
    double_buffer: Literal[1, 2] = 1
    """2: one half of the environments is stepped while the policy answers the other."""

    @field_validator("instruction")
    @classmethod
    def _instruction_has_room(cls, value: bool | str) -> bool | str:
        if isinstance(value, str):
            try:
                encode_instruction(value)
            except InvalidEnvConfig as error:
                raise ValueError(str(error).partition(": ")[2]) from None
        return value

    @model_validator(mode="after")
    def _films_once(self) -> GymConfig:
        for name in self.video.keys() & self.images.keys():
            raise ValueError(
                f"video.{name}: it is in images too, and films in any case; leave it out"
            )
        return self
