"""The reward interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from rlinf.channels.world import World
from rlinf.config import Section
from rlinf.data.counted import counted, credited
from rlinf.data.record import Record
from rlinf.errors import InputError
from rlinf.fit import Part

if TYPE_CHECKING:
    from rlinf.residency import Residency


@dataclass(frozen=True)
class Resources:
    """What the stage lends a reward; one that needs no device leaves it alone.

    The stage may run as several processes, each of which judges whole groups; a model that they
    share is the reward's own affair.
    """

    world: World = field(default_factory=World)
    """Which process of how many this is."""
    device: str = "cpu"
    """Of this process: a model computes there."""
    residency: Residency | None = None
    """Stages take turns on the device: a reward that holds tensors on it between two calls is a
    :class:`rlinf.residency.Holder` and asks ``residency.need(self)`` before it computes. None: the
    device is its own."""


Judgement = float | np.ndarray
"""One number for a whole trajectory, or ``[T]`` one for each of its steps."""


class Reward(Part, ABC):
    """Turns the task's scores into the rewards the algorithm maximises."""

    Config: ClassVar[type[Section]] = Section
    needs_score: ClassVar[bool] = True
    """Whether the task is to score the trajectories first; if not, :meth:`judge` gets no scores and
    the stage makes no environment."""

    def __init__(self, config: Any, resources: Resources) -> None:
        """It is made once in a process and kept: a model is loaded here, or with the first call."""
        self.config = config
        self.resources = resources

    @abstractmethod
    def judge(self, trajectories: Sequence[Record], scores: Sequence[float]) -> Sequence[Judgement]:
        """What each trajectory is worth.

        Args:
            trajectories: whole groups. What the task knows of each, data columns of the user's
                file among it, is in ``info``.
            scores: the task's own measure of each; empty unless :attr:`needs_score`.

        Returns:
            For each one number, which goes on its last step that counts, or one for each step; of a
            step that does not count it goes on the last one before it that does.
        """

    @final
    def rewards(self, trajectories: Sequence[Record], scores: Sequence[float]) -> list[np.ndarray]:
        """Rewards per step, float32 ``[T]`` for each trajectory, on steps that count alone.

        A trajectory without any such step has none to be rewarded for: zeros.

        Raises:
            InputError: :meth:`judge` gave another number of rewards, one of another shape, or one
                that is not finite; names the sample.
        """
        judged = self.judge(trajectories, scores)
        name = type(self).__name__
        if len(judged) != len(trajectories):
            raise InputError(
                f"reward {name}: {len(judged)} rewards for {len(trajectories)} trajectories; give "
                "one for each"
            )
        out = []
        for trajectory, judgement in zip(trajectories, judged, strict=True):
            worth, length = np.asarray(judgement, np.float64), len(trajectory)
            sample = f"sample {trajectory.identity.sample}"
            if worth.shape not in ((), (length,)):
                raise InputError(
                    f"reward {name}: {sample} got rewards of shape {list(worth.shape)}; give one "
                    f"number, or one for each of its {length} steps"
                )
            if not np.isfinite(worth).all():
                raise InputError(
                    f"reward {name}: {sample} got {worth[~np.isfinite(worth)].flat[0]}; a reward "
                    "must be finite, or it makes every weight so"
                )
            counts = counted(trajectory)
            if not counts.any():
                out.append(np.zeros(length, np.float32))
                continue
            if not worth.ndim:
                worth = np.append(np.zeros(length - 1), worth)
            out.append(credited(worth, counts))
        return out

    def close(self) -> None:
        """Free devices and end processes of its own."""
