"""Transitions: single steps with their next observation, from which off-policy methods learn.

``terminated`` (the episode ended by itself) and ``truncated`` (the episode was cut off, so the next
observation has a value) are separate. A target that treats a truncation as a termination is biased
(Pardo et al., 2018, arXiv 1712.00378).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from rlinf.data.trajectory import Trajectory, action_mask, loss_mask
from rlinf.errors import InputError

TRANSITION_FIELDS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminated",
    "truncated",
)


class Transitions(ABC):
    """An ordered collection of transitions, indexed from 0, oldest first."""

    dtype: np.dtype
    """Structured type of a transition, with :data:`TRANSITION_FIELDS`."""
    num_new: int
    """Number of newest transitions, which were added since the last update."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of transitions."""

    @abstractmethod
    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return copies ``[n]`` of the transitions with indices ``[n]``."""


class InMemoryTransitions(Transitions):
    """Transitions in an array in memory."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows, self.dtype, self.num_new = rows, rows.dtype, len(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: np.ndarray) -> np.ndarray:
        return self._rows[indices]


class ConcatenatedTransitions(Transitions):
    """Two collections of transitions of the same type, one after the other."""

    def __init__(self, first: Transitions, second: Transitions) -> None:
        self._first, self._second = first, second
        self.dtype, self.num_new = first.dtype, first.num_new + second.num_new

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def take(self, indices: np.ndarray) -> np.ndarray:
        rows, is_second = np.empty(len(indices), self.dtype), indices >= len(self._first)
        rows[~is_second] = self._first.take(indices[~is_second])
        rows[is_second] = self._second.take(indices[is_second] - len(self._first))
        return rows


def transition_dtype(observation_size: int, action_size: int) -> np.dtype:
    """Return the structured type of a transition."""
    return np.dtype(
        [
            ("observations", "<f4", (observation_size,)),
            ("actions", "<f4", (action_size,)),
            ("rewards", "<f4"),
            ("next_observations", "<f4", (observation_size,)),
            ("terminated", "u1"),
            ("truncated", "u1"),
        ]
    )


def dtype_fields(dtype: np.dtype) -> list[list[object]]:
    """Return name, type and shape of each field, as values for JSON."""
    described: list[list[object]] = []
    for name in dtype.names or ():
        base, shape = dtype[name].base, dtype[name].shape
        described.append([name, base.str, list(shape)])
    return described


def dtype_mismatch(expected: np.dtype, actual: np.dtype) -> str | None:
    """Describe the first field that differs between two types; None if they are equal."""
    tables = [{str(f[0]): f[1:] for f in dtype_fields(dtype)} for dtype in (expected, actual)]
    for name in [*tables[0], *tables[1]]:
        if tables[0].get(name) != tables[1].get(name):
            texts = [" ".join(map(str, t[name])) if name in t else "none" for t in tables]
            return f"field {name!r}: expected {texts[0]}, got {texts[1]}"
    return None


def clip_actions(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return actions ``[..., A]`` as they are executed: clipped to the bounds, and rounded to the
    nearest integer (halves to even) if the bounds have an integer type."""
    clipped = np.minimum(np.maximum(actions, low), high)
    if np.issubdtype(low.dtype, np.integer):
        clipped = np.rint(clipped)
    return clipped


def executed_actions(trajectory: Trajectory) -> np.ndarray:
    """Return the actions of a trajectory as they were executed, ``[T, ...]``.

    Actions of the policy are clipped to the bounds. Where a person intervened, the result has the
    person's actions.
    """
    actions = np.asarray(trajectory.actions)
    if trajectory.action_low is not None and trajectory.action_high is not None:
        low, high = np.asarray(trajectory.action_low), np.asarray(trajectory.action_high)
        actions = clip_actions(actions, low, high).astype(actions.dtype)
    if trajectory.intervened is None:
        return actions
    by_person = np.asarray(trajectory.intervened) != 0
    by_person = by_person.reshape(*by_person.shape, *[1] * (actions.ndim - by_person.ndim))
    executed = trajectory.require("executed_actions")
    return np.where(by_person, executed, actions).astype(actions.dtype)


def action_clip_ratio(trajectory: Trajectory) -> float | None:
    """Return the fraction of action components outside their bounds, over unmasked steps. None: the
    actions have no bounds."""
    if trajectory.action_low is None or trajectory.action_high is None:
        return None
    actions = np.asarray(trajectory.actions)
    # A policy that scales actions to the bounds may exceed them by a rounding error.
    low = np.asarray(trajectory.action_low, np.float64)
    high = np.asarray(trajectory.action_high, np.float64)
    tolerance = 1e-6 * np.minimum(np.maximum(abs(low), abs(high)), 1e18)
    is_outside = (actions < low - tolerance) | (actions > high + tolerance)
    mask, chunk_mask = loss_mask(trajectory), action_mask(trajectory)
    if chunk_mask is not None:
        mask = mask[:, None] & chunk_mask
    unmasked = is_outside[mask]
    return float(unmasked.mean()) if unmasked.size else 0.0


def intervention_mask(trajectory: Trajectory) -> np.ndarray:
    """Return for each transition of :func:`to_transitions` whether a person intervened, ``[n]``."""
    mask = loss_mask(trajectory)
    if trajectory.intervened is None:
        return np.zeros(int(mask.sum()), bool)
    by_person: np.ndarray = np.asarray(trajectory.intervened) != 0
    return by_person[mask]


def to_transitions(
    trajectory: Trajectory, rewards: np.ndarray, ends: np.ndarray | None = None
) -> np.ndarray:
    """Return the unmasked steps of a trajectory as transitions.

    Args:
        trajectory: must have ``observations``, ``terminated``, ``truncation_steps`` and
            ``final_observations``.
        rewards: ``[T]``.
        ends: ``[T]`` 1 at steps that count as terminated although the episode was truncated
            (:attr:`StepRewards.episode_ends`). None: nowhere.

    Returns:
        Array of :func:`transition_dtype`. ``truncated`` is 1 where the trajectory was truncated, by
        the environment or by the end of the rollout.

    Raises:
        InputError: the trajectory has no vector observations, or no final observation.
    """
    needed = ("observations", "terminated", "truncation_steps", "final_observations")
    if missing := [name for name in needed if getattr(trajectory, name) is None]:
        raise InputError(
            f"{trajectory.identity}: the trajectory has no {missing[0]!r}; transitions need "
            "trajectories of a simulator (task.name=gym)"
        )
    reject_action_chunks(trajectory)
    observations, length = np.asarray(trajectory.observations, np.float32), len(trajectory)
    actions = executed_actions(trajectory).astype(np.float32).reshape(length, -1)
    if observations.ndim != 2:
        raise InputError(
            f"{trajectory.identity}: observations {observations.shape} of a trajectory; expected "
            "vectors"
        )
    rows = np.zeros(length, transition_dtype(observations.shape[1], actions.shape[1]))
    rows["observations"], rows["actions"], rows["rewards"] = observations, actions, rewards
    rows["terminated"] = trajectory.terminated
    if ends is not None:
        rows["terminated"] |= np.asarray(ends, np.uint8)
    rows["next_observations"][:-1] = observations[1:]
    truncation_steps = trajectory.truncation_steps
    rows["next_observations"][truncation_steps] = trajectory.final_observations
    rows["truncated"][truncation_steps] = 1
    ended = rows["terminated"] == 1
    rows["truncated"][ended] = 0
    if length and not (ended[-1] or rows["truncated"][-1]):
        raise InputError(f"{trajectory.identity}: it has no observation after its last step")
    # A terminated episode has no next observation; the one in its place is of the next episode.
    rows["next_observations"][ended] = observations[ended]
    return rows[loss_mask(trajectory)]


def reject_action_chunks(trajectory: Trajectory) -> None:
    """Raise if the steps of a trajectory are chunks of actions.

    Raises:
        InputError: the observations between the actions of a chunk were not recorded.
    """
    if trajectory.is_chunked:
        raise InputError(
            f"{trajectory.identity}: its policy acts by chunks, and the observations between the "
            "actions of a chunk were not recorded; collect with model.chunk_size=1"
        )


def concatenate_transitions(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Return the rows of several trajectories as one array.

    Raises:
        InputError: the arrays differ in type.
        ValueError: there are no arrays.
    """
    rows = list(arrays)
    if not rows:
        raise ValueError("no trajectories to make transitions of")
    for other in rows[1:]:
        if (mismatch := dtype_mismatch(rows[0].dtype, other.dtype)) is not None:
            raise InputError(f"trajectories of one batch differ in {mismatch}")
    return np.concatenate(rows)
