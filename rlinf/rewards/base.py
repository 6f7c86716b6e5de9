"""The reward interface: :class:`Reward` and its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import Section
from rlinf.data.episodes import spans_several_episodes
from rlinf.data.trajectory import (
    Trajectory,
    action_mask,
    loss_mask,
    move_rewards_to_unmasked,
    place_on_last_action,
)
from rlinf.errors import ConfigError, InputError, RlinfError
from rlinf.registry import (
    ACTION_VALUES,
    EPISODE_REWARDS,
    OBSERVATIONS,
    TRANSITION_REPLAY,
    VALUE_ESTIMATES,
    Component,
    RunComponents,
)

if TYPE_CHECKING:
    from rlinf.device_memory import DeviceMemoryManager


@dataclass(frozen=True)
class RewardResources:
    """Resources that the stage offers to a reward. A reward without a model can ignore them.

    The stage may run as several processes, each of which scores whole groups. A model that these
    processes share is the reward's own responsibility.
    """

    world: ProcessGroupInfo = field(default_factory=ProcessGroupInfo)
    """Rank and world size of the stage's processes."""
    device: str = "cpu"
    """Device of this process, on which a reward model computes."""
    residency: DeviceMemoryManager | None = None
    """Memory manager of a device that several stages share. A reward that keeps tensors there
    between calls is an :class:`rlinf.device_memory.Offloadable` and calls
    ``residency.acquire(self)`` before it computes. None: the reward owns the device."""
    folder: Path | None = None
    """Folder of the run. Files in it persist when a stage is repeated. It may not exist yet. None:
    nothing persists."""


RewardValue = float | np.ndarray
"""Reward of a trajectory: one number, or one per step ``[T]``; for chunks of actions also
one per action, ``[T, C]``."""


@dataclass(frozen=True)
class RewardResult:
    """Reward of one trajectory, with the reason if it could not be scored."""

    reward: RewardValue
    valid: bool = True
    """Whether the trajectory is used. If false, the update and the group's mean exclude it."""
    failure: str = ""
    """Reason why it could not be scored, one of :attr:`Reward.failure_kinds`; empty: it was scored.
    A trajectory with a failure is still valid if the configuration sets a reward for this case."""
    raw_reward: float | None = None
    """Total reward before shaping terms such as a length penalty. Groups of equal raw rewards have
    zero variance and carry no signal. None: the sum of ``reward``."""
    episode_ends: np.ndarray | None = None
    """Bool ``[T]``, true at the last step of each episode that is scored as a whole. No value is
    bootstrapped there, even if the episode was truncated, because the critic's value would count
    the same outcome twice. None: episodes end where the simulator reports it."""


def rewards_per_step(reward: np.ndarray) -> np.ndarray:
    """Return the reward per step, float32 ``[T]``, from rewards per step ``[T]`` or per action
    ``[T, C]``."""
    return reward if reward.ndim == 1 else reward.sum(1, dtype=np.float64).astype(np.float32)


def _to_float64(value: Any, source: str) -> np.ndarray:
    """Convert a reward of any shape to float64. An error message begins with ``source``.

    Raises:
        InputError: the value is text, None or anything else that is not a number.
    """
    try:
        array = np.asarray(value)
        if array.dtype.kind in "biuf" or all(isinstance(n, Real | Decimal) for n in array.flat):
            return array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):  # from ragged lists or torch tensors
        pass
    raise InputError(
        f"{source} got {_describe(value)}, which is no number; give one number, or an array with "
        "one number per step"
    )


def _is_list(value: Any) -> bool:
    """Return whether a value is a list, a tuple or an array with at least one axis. Text is not a
    list."""
    if isinstance(value, str | bytes):
        return False
    return isinstance(value, Sequence) or bool(getattr(value, "shape", ()))


def _describe(value: Any) -> str:
    """Return the type and the shortened representation of a value, for error messages."""
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


class Reward(Component, ABC):
    """Base class of rewards: turn trajectories and the task's scores into rewards.

    The algorithm maximises these rewards. A subclass implements :meth:`compute`.
    """

    Config: ClassVar[type[Section]] = Section
    needs_score: ClassVar[bool] = True
    """Whether the task must score the trajectories first. If false, :meth:`compute` gets no scores
    and the stage creates no environment."""
    failure_kinds: ClassVar[tuple[str, ...]] = ()
    """Reasons why a trajectory may not be scored. The stage logs a metric for each and writes the
    reason into the record."""

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        config, algorithm = run.config, run.classes["algorithm"]
        has_values = algorithm.requires & {VALUE_ESTIMATES, ACTION_VALUES, TRANSITION_REPLAY}
        has_long_samples = OBSERVATIONS in run.provided and config.rollout.group_size == 1
        if EPISODE_REWARDS in cls.provides and has_long_samples and not has_values:
            raise ConfigError(
                f"reward.name: {config.reward.name!r} scores an episode when it ends, and "
                f"algorithm={config.algorithm.name} has no value estimates for truncated episodes: "
                "their steps would get reward 0; set reward=environment, rollout.group_size above "
                "1 (a sample is one episode then), or algorithm=ppo"
            )

    def __init__(self, config: Any, resources: RewardResources) -> None:
        """Create the reward, once per process. A model is loaded here or with the first call."""
        self.config = config
        self.resources = resources

    @abstractmethod
    def compute(
        self, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> Sequence[RewardValue | RewardResult]:
        """Return the reward of each trajectory.

        Args:
            trajectories: whole groups. ``extra`` holds the task's own data of each, such as the
                fields of the user's data file that ``task.info_fields`` names.
            scores: the task's score of each; empty unless :attr:`needs_score`.

        Returns:
            For each trajectory one number, which is placed on its last unmasked step, or one number
            per step. The reward of a masked step moves to the last unmasked step before it. A
            simulator's trajectory of several episodes (:mod:`rlinf.data.episodes`) needs one number
            per step. Where a step is a chunk of actions, there may be one number per action; a
            number per step is placed on the last action that was executed. For a trajectory that
            could not be scored, a :class:`RewardResult`.
        """

    @final
    def compute_step_rewards(
        self, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> list[np.ndarray]:
        """Return rewards per step, float32 ``[T]`` for each trajectory.

        Raises the same errors as :meth:`compute_results`.
        """
        results = self.compute_results(trajectories, scores)
        return [rewards_per_step(np.asarray(result.reward, np.float32)) for result in results]

    @final
    def compute_results(
        self, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> list[RewardResult]:
        """Return the results of :meth:`compute`, with rewards placed on unmasked steps.

        Rewards are float32 ``[T]``; where steps are chunks of actions, ``[T, C]``, on unmasked
        actions. The rewards of a trajectory without any unmasked step are zeros.

        Raises:
            InputError: :meth:`compute` returned no sequence, a wrong number of rewards, a reward
                that is not finite or has a wrong shape, or one number for several episodes; names
                the sample.
        """
        try:
            computed = self.compute(trajectories, scores)
        except Exception as error:
            if trajectories and not isinstance(error, RlinfError):
                error.add_note(f"a trajectory has the fields {trajectories[0].describe()}")
            raise
        name = f"reward {type(self).__name__}"
        if not _is_list(computed):
            raise InputError(
                f"{name}: compute returned {_describe(computed)}; it must return a list with one "
                "number for each trajectory"
            )
        if len(computed) != len(trajectories):
            raise InputError(
                f"{name}: {len(computed)} rewards for {len(trajectories)} trajectories; give one "
                "for each"
            )
        results = []
        for trajectory, value in zip(trajectories, computed, strict=True):
            result = value if isinstance(value, RewardResult) else RewardResult(value)
            results.append(replace(result, reward=self._place_on_steps(trajectory, result.reward)))
        return results

    def _place_on_steps(self, trajectory: Trajectory, value: RewardValue) -> np.ndarray:
        source = f"reward {type(self).__name__}: sample {trajectory.identity.sample}"
        reward, length = _to_float64(value, source), len(trajectory)
        chunk_mask = action_mask(trajectory)  # None: steps are no chunks
        if reward.shape not in ((), (length,), () if chunk_mask is None else chunk_mask.shape):
            actions_hint = (
                ""
                if chunk_mask is None
                else f", or for each of their {chunk_mask.shape[1]} actions"
            )
            raise InputError(
                f"{source} got rewards of shape {list(reward.shape)}; give one number, or one for "
                f"each of its {length} steps{actions_hint}"
            )
        if not np.isfinite(reward).all():
            raise InputError(
                f"{source} got {reward[~np.isfinite(reward)].flat[0]}; a reward that is not "
                "finite would make all weights NaN"
            )
        mask = loss_mask(trajectory) if chunk_mask is None else chunk_mask
        if not mask.any():
            return np.zeros(mask.shape, np.float32)
        if not reward.ndim:
            if spans_several_episodes(trajectory):
                raise InputError(
                    f"{source} holds several episodes and got one number for all of them; "
                    "give one for each step (rlinf.data.episodes has the ends of episodes), "
                    "or set rollout.group_size above 1: a sample is one episode then"
                )
            reward = np.append(np.zeros(length - 1), reward)
        if reward.shape != mask.shape:
            reward = place_on_last_action(reward, mask)
        return move_rewards_to_unmasked(reward.ravel(), mask.ravel()).reshape(mask.shape)

    def close(self) -> None:
        """Free the device memory of the reward and end its processes."""
