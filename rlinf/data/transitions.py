"""Transitions: single steps with the observation that follows, which off-policy methods learn from.

``terminated`` (the episode ended by itself: nothing follows) and ``truncated`` (it was cut off: the
next observation has a value) are kept apart; a target that treats a cut as an end is biased
(Pardo et al., 2018, arXiv 1712.00378).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from rlinf.data.loss_mask import action_mask, loss_mask
from rlinf.data.record import Record
from rlinf.errors import InputError

TRUNCATION_STEPS, FINAL_OBSERVATIONS = "cut_steps", "cut_observations"
"""Context of a trajectory: the steps ``[K]`` after which it was cut off, in order, and what was
seen then ``[K, D]``."""
INTERVENED, EXECUTED_ACTIONS = "intervened", "performed"
"""Step columns of a trajectory in which a person may have acted in the place of the policy: where
that was so, uint8 ``[T]`` (of chunks ``[T, H]``), and the actions that were carried out.
``actions`` are always the policy's, to which its log-probabilities belong."""
ACTION_LOW, ACTION_HIGH = "action_low", "action_high"
"""Context of a trajectory of vectors: the bounds ``[A]`` of its actions, infinite where there are
none, of an integer type where actions are rounded. ``actions`` may lie beyond them; the simulator
carries them out within."""
EPISODE_ENDS = "ends"
"""Step column of rewards, uint8 ``[T]``: 1 at the end of an episode that was judged as a whole,
also where it was cut off: nothing follows."""
TRANSITION_FIELDS = (
    "observations",
    "actions",
    "rewards",
    "next_observations",
    "terminated",
    "truncated",
)


class Transitions(ABC):
    """Some transitions, by number from 0, oldest first."""

    dtype: np.dtype
    """Of a row: a structure with :data:`TRANSITION_FIELDS`."""
    num_new: int
    """How many of them, the last ones, came since the last update."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Rows ``[n]`` of these numbers ``[n]``, copied."""


class InMemoryTransitions(Transitions):
    """Transitions in memory."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows, self.dtype, self.num_new = rows, rows.dtype, len(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        return self._rows[numbers]


class ConcatenatedTransitions(Transitions):
    """Some transitions, and then others of the same type."""

    def __init__(self, first: Transitions, second: Transitions) -> None:
        self._first, self._second = first, second
        self.dtype, self.num_new = first.dtype, first.num_new + second.num_new

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        rows, later = np.empty(len(numbers), self.dtype), numbers >= len(self._first)
        rows[~later] = self._first.take(numbers[~later])
        rows[later] = self._second.take(numbers[later] - len(self._first))
        return rows


def transition_dtype(observation: int, action: int) -> np.dtype:
    """The type of a row for observations ``[observation]`` and actions ``[action]``."""
    return np.dtype(
        [
            ("observations", "<f4", (observation,)),
            ("actions", "<f4", (action,)),
            ("rewards", "<f4"),
            ("next_observations", "<f4", (observation,)),
            ("terminated", "u1"),
            ("truncated", "u1"),
        ]
    )


def dtype_fields(dtype: np.dtype) -> list[list[object]]:
    """Name, type and shape of each field, as plain values."""
    described: list[list[object]] = []
    for name in dtype.names or ():
        base, shape = dtype[name].base, dtype[name].shape
        described.append([name, base.str, list(shape)])
    return described


def dtype_mismatch(own: np.dtype, other: np.dtype) -> str | None:
    """What the first field is that two types of rows do not have alike; None: all are."""
    mine, theirs = ({str(f[0]): f[1:] for f in dtype_fields(t)} for t in (own, other))
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            shown = [" ".join(map(str, f[name])) if name in f else "none" for f in (mine, theirs)]
            return f"field {name!r}: {shown[0]} is wanted, {shown[1]} is there"
    return None


def clip_actions(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Actions ``[..., A]`` as they are carried out: clipped to the bounds, and rounded to the
    nearest integers (halves to the even one) where the bounds are integers."""
    clipped = np.minimum(np.maximum(actions, low), high)
    if np.issubdtype(low.dtype, np.integer):
        clipped = np.rint(clipped)
    return clipped


def executed_actions(trajectory: Record) -> np.ndarray:
    """The actions of a trajectory as they were carried out, ``[T, ...]``: within the bounds, and a
    person's where a person acted."""
    actions = np.asarray(trajectory.steps["actions"])
    if ACTION_LOW in trajectory.context:
        low, high = (np.asarray(trajectory.context[name]) for name in (ACTION_LOW, ACTION_HIGH))
        actions = clip_actions(actions, low, high).astype(actions.dtype)
    if INTERVENED not in trajectory.steps:
        return actions
    acted = np.asarray(trajectory.steps[INTERVENED]) != 0
    acted = acted.reshape(*acted.shape, *[1] * (actions.ndim - acted.ndim))
    return np.where(acted, trajectory.steps[EXECUTED_ACTIONS], actions).astype(actions.dtype)


def action_clip_ratio(trajectory: Record) -> float | None:
    """The share of the components of a trajectory's actions, of the steps that count, that lay
    beyond their bounds; None: they have no bounds."""
    if ACTION_LOW not in trajectory.context:
        return None
    actions = np.asarray(trajectory.steps["actions"])
    low, high = (np.asarray(trajectory.context[name]) for name in (ACTION_LOW, ACTION_HIGH))
    # Rounding of a policy's own scaling is no clipping.
    low, high = (bound.astype(np.float64) for bound in (low, high))
    slack = 1e-6 * np.minimum(np.maximum(abs(low), abs(high)), 1e18)
    beyond = (actions < low - slack) | (actions > high + slack)
    counts, of_chunks = loss_mask(trajectory), action_mask(trajectory)
    if of_chunks is not None:
        counts = counts[:, None] & of_chunks
    found = beyond[counts]
    return float(found.mean()) if found.size else 0.0


def intervention_mask(trajectory: Record) -> np.ndarray:
    """In which of the rows of :func:`to_transitions` a person acted, bool ``[n]``."""
    counts = loss_mask(trajectory)
    acted = np.asarray(trajectory.steps.get(INTERVENED, np.zeros(len(trajectory)))) != 0
    return acted[counts]


def to_transitions(
    trajectory: Record, rewards: np.ndarray, ends: np.ndarray | None = None
) -> np.ndarray:
    """The steps of a trajectory that count, with what was done and what was seen after each.

    Args:
        trajectory: steps ``observations`` ``[T, D]``, ``actions`` ``[T, A]`` or ``[T]``,
            ``terminated``; context :data:`TRUNCATION_STEPS` and :data:`FINAL_OBSERVATIONS`. Every
            other step that did not end its episode is followed by the observation of the next.
        rewards: ``[T]``.
        ends: ``[T]`` 1 where nothing follows though the episode was cut off; None: nowhere.

    Returns:
        Rows of :func:`transition_dtype`. ``truncated`` is 1 where the trajectory was cut off, by
        the environment or by the end of the rollout.

    Raises:
        InputError: it is no trajectory of vectors, or does not say what was seen at its end.
    """
    steps, context = trajectory.steps, trajectory.context
    lacking = [name for name in ("observations", "actions", "terminated") if name not in steps]
    lacking += [name for name in (TRUNCATION_STEPS, FINAL_OBSERVATIONS) if name not in context]
    if lacking:
        raise InputError(
            f"{trajectory.identity}: the trajectory has no {lacking[0]!r}; transitions are made of "
            "trajectories that a simulator gave (task.name=gym)"
        )
    reject_action_chunks(trajectory)
    observations, length = np.asarray(steps["observations"], np.float32), len(trajectory)
    actions = executed_actions(trajectory).astype(np.float32).reshape(length, -1)
    if observations.ndim != 2:
        raise InputError(
            f"{trajectory.identity}: observations {observations.shape} of a trajectory; expected "
            "vectors"
        )
    rows = np.zeros(length, transition_dtype(observations.shape[1], actions.shape[1]))
    rows["observations"], rows["actions"], rows["rewards"] = observations, actions, rewards
    rows["terminated"] = steps["terminated"]
    if ends is not None:
        rows["terminated"] |= np.asarray(ends, np.uint8)
    rows["next_observations"][:-1] = observations[1:]
    cut = context[TRUNCATION_STEPS]
    rows["next_observations"][cut] = context[FINAL_OBSERVATIONS]
    rows["truncated"][cut] = 1
    ended = rows["terminated"] == 1
    rows["truncated"][ended] = 0
    if length and not (ended[-1] or rows["truncated"][-1]):
        raise InputError(
            f"{trajectory.identity}: it does not say what was seen after its last step"
        )
    # Nothing follows: what stands there must not depend on which episode came next.
    rows["next_observations"][ended] = observations[ended]
    return rows[loss_mask(trajectory)]


def reject_action_chunks(trajectory: Record) -> None:
    """
    Raises:
        InputError: its steps are chunks of actions, of which nothing says what was seen between
            them.
    """
    if "executed" in trajectory.steps:
        raise InputError(
            f"{trajectory.identity}: its policy acts by chunks, and what was seen between their "
            "actions was not kept; collect with model.chunk_size=1"
        )


def concatenate_transitions(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Rows of several trajectories.

    Raises:
        InputError: they are not of one type.
        ValueError: there are none.
    """
    every = list(parts)
    if not every:
        raise ValueError("no trajectories to make transitions of")
    for part in every[1:]:
        if (wrong := dtype_mismatch(every[0].dtype, part.dtype)) is not None:
            raise InputError(f"trajectories of one batch differ in {wrong}")
    return np.concatenate(every)
