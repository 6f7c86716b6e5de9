"""The reward interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from rlinf.capabilities import Component
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import Section
from rlinf.data.episodes import spans_several_episodes
from rlinf.data.loss_mask import (
    action_mask,
    loss_mask,
    move_rewards_to_actions,
    place_on_last_action,
)
from rlinf.data.record import Record
from rlinf.errors import InputError, RlinfError

if TYPE_CHECKING:
    from rlinf.device_memory import DeviceMemoryManager


@dataclass(frozen=True)
class RewardResources:
    """What the stage lends a reward; one that needs no device leaves it alone.

    The stage may run as several processes, each of which judges whole groups; a model that they
    share is the reward's own affair.
    """

    world: ProcessGroupInfo = field(default_factory=ProcessGroupInfo)
    """Which process of how many this is."""
    device: str = "cpu"
    """Of this process: a model computes there."""
    residency: DeviceMemoryManager | None = None
    """Memory manager of a device that several stages share. A reward that keeps tensors there
    between calls is an :class:`rlinf.device_memory.Offloadable` and calls
    ``residency.acquire(self)`` before it computes. None: the reward owns the device."""
    folder: Path | None = None
    """Of the run: what is written there is found again when a stage is repeated. It may not be
    there yet. None: nothing stays."""


RewardValue = float | np.ndarray
"""One number for a whole trajectory, or ``[T]`` one for each of its steps; where those are chunks
of actions, also ``[T, C]`` one for each action."""


@dataclass(frozen=True)
class RewardResult:
    """What is said of one trajectory."""

    reward: RewardValue
    valid: bool = True
    """False: it could not be judged, and takes no part in the update or its group's mean."""
    failure: str = ""
    """Why it was not judged, one of :attr:`Reward.troubles`; empty: it was."""
    raw_reward: float | None = None
    """What it is worth without a penalty or the like that shapes it: groups whose samples are alike
    in this one teach nothing. None: the sum of its worth."""
    episode_ends: np.ndarray | None = None
    """Of a simulator's episodes that are judged as a whole: bool ``[T]``, true at the last step of
    each. Nothing comes after it, also where the episode was cut off: what a critic says of the
    state there would be the same outcome again. None: episodes end where the simulator says."""


def rewards_per_step(worth: np.ndarray) -> np.ndarray:
    """Of each step, float32 ``[T]``, what is given of each, or of each action of each."""
    return worth if worth.ndim == 1 else worth.sum(1, dtype=np.float64).astype(np.float32)


def describe_fields(trajectory: Record) -> str:
    """One line that lists what a reward can read of a trajectory."""
    parts = {
        "info": sorted(trajectory.info),
        "steps": sorted(trajectory.steps),
        "context": sorted(trajectory.context),
    }
    listed = [f"{name}: {', '.join(names)}" for name, names in parts.items() if names]
    return f"a trajectory has the fields {'; '.join(listed)}"


def _numbers(given: Any, where: str) -> np.ndarray:
    """A reward as float64, of whatever shape.

    Raises:
        InputError: it is text, None or anything else that is no number.
    """
    try:
        found = np.asarray(given)
        if found.dtype.kind in "biuf" or all(isinstance(n, Real | Decimal) for n in found.flat):
            return found.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):  # of lists of unlike lengths, of torch tensors
        pass
    raise InputError(
        f"{where} got {_kind(given)}, which is no number; give one number, or an array of one for "
        f"each of its steps"
    )


def _is_list(value: Any) -> bool:
    """Whether a value is a list, a tuple or an array with at least one axis; text is none."""
    if isinstance(value, str | bytes):
        return False
    return isinstance(value, Sequence) or bool(getattr(value, "shape", ()))


def _kind(value: Any) -> str:
    """A value as an error shows it."""
    if value is None:
        return "None"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


class Reward(Component, ABC):
    """Turns the task's scores into the rewards the algorithm maximises."""

    Config: ClassVar[type[Section]] = Section
    needs_score: ClassVar[bool] = True
    """Whether the task is to score the trajectories first; if not, :meth:`judge` gets no scores and
    the stage makes no environment."""
    failure_kinds: ClassVar[tuple[str, ...]] = ()
    """What may keep a trajectory from being judged: each is a metric of the stage, and written with
    the record."""

    @classmethod
    def check(cls, config: Any) -> None:
        """See that what the configuration names is there, before a run begins.

        Raises:
            ConfigError: it is not, or is something else.
            DataError: a file is missing or malformed.
        """

    def __init__(self, config: Any, resources: RewardResources) -> None:
        """It is made once in a process and kept: a model is loaded here, or with the first call."""
        self.config = config
        self.resources = resources

    @abstractmethod
    def compute(
        self, trajectories: Sequence[Record], scores: Sequence[float]
    ) -> Sequence[RewardValue | RewardResult]:
        """What each trajectory is worth.

        Args:
            trajectories: whole groups. What the task knows of each, data columns of the user's
                file among it, is in ``info``.
            scores: the task's own measure of each; empty unless :attr:`needs_score`.

        Returns:
            For each one number, which goes on its last step that counts, or one for each step; of a
            step that does not count it goes on the last one before it that does. Where a
            simulator's trajectory holds several episodes (:mod:`rlinf.data.episodes`), one for each
            step. Where a step is a chunk of actions, one for each step goes on the last of them
            that was carried out, or there is one for each of them. A :class:`RewardResult` for a
            trajectory that could not be scored.
        """

    @final
    def compute_step_rewards(
        self, trajectories: Sequence[Record], scores: Sequence[float]
    ) -> list[np.ndarray]:
        """Rewards per step, float32 ``[T]`` for each trajectory; raises as :meth:`judgements`."""
        found = self.compute_results(trajectories, scores)
        return [rewards_per_step(np.asarray(judgement.reward, np.float32)) for judgement in found]

    @final
    def compute_results(
        self, trajectories: Sequence[Record], scores: Sequence[float]
    ) -> list[RewardResult]:
        """What :meth:`judge` says, worths as float32 ``[T]``, on steps that count alone; where
        steps are chunks of actions ``[T, C]``, on actions that count alone.

        A trajectory without any such step has none to be rewarded for: zeros.

        Raises:
            InputError: :meth:`judge` gave no sequence, another number of rewards, one that is no
                number or of another shape, one that is not finite, or one number for several
                episodes; names the sample.
        """
        try:
            judged = self.compute(trajectories, scores)
        except Exception as error:
            if trajectories and not isinstance(error, RlinfError):
                error.add_note(describe_fields(trajectories[0]))
            raise
        name = f"reward {type(self).__name__}"
        if not _is_list(judged):
            raise InputError(
                f"{name}: judge returned {_kind(judged)}; it must return a list with one number "
                "for each trajectory"
            )
        if len(judged) != len(trajectories):
            raise InputError(
                f"{name}: {len(judged)} rewards for {len(trajectories)} trajectories; give one for "
                "each"
            )
        found = []
        for trajectory, said in zip(trajectories, judged, strict=True):
            judgement = said if isinstance(said, RewardResult) else RewardResult(said)
            found.append(replace(judgement, reward=self._placed(trajectory, judgement.reward)))
        return found

    def _placed(self, trajectory: Record, given: RewardValue) -> np.ndarray:
        where = f"reward {type(self).__name__}: sample {trajectory.identity.sample}"
        worth, length = _numbers(given, where), len(trajectory)
        actions = action_mask(trajectory)
        if worth.shape not in ((), (length,), () if actions is None else actions.shape):
            each = "" if actions is None else f", or for each of their {actions.shape[1]} actions"
            raise InputError(
                f"{where} got rewards of shape {list(worth.shape)}; give one number, or one for "
                f"each of its {length} steps{each}"
            )
        if not np.isfinite(worth).all():
            raise InputError(
                f"{where} got {worth[~np.isfinite(worth)].flat[0]}; a reward must be finite, or it "
                "makes every weight so"
            )
        counts = loss_mask(trajectory) if actions is None else actions
        if not counts.any():
            return np.zeros(counts.shape, np.float32)
        if not worth.ndim:
            if spans_several_episodes(trajectory):
                raise InputError(
                    f"{where} holds several episodes and got one number, which does not say of "
                    "which; give one for each step (rlinf.data.episodes says where episodes end), "
                    "or set rollout.group_size above 1: a sample is one episode then"
                )
            worth = np.append(np.zeros(length - 1), worth)
        if worth.shape != counts.shape:
            worth = place_on_last_action(worth, counts)
        return move_rewards_to_actions(worth.ravel(), counts.ravel()).reshape(counts.shape)

    def close(self) -> None:
        """Free devices and end processes of its own."""
