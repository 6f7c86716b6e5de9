"""The trajectory: one sample of a rollout, with every column declared.

Environments create trajectories; policies, rewards, algorithms and stages read them. A
:class:`rlinf.data.record.Record` is the form in which a trajectory is sent and stored: channels,
files and live transfer contain records. A stage converts its inputs when it reads them and its
outputs when it writes them. The tables ``STEPS``, ``CONTEXT`` and ``INFO`` map the names in a
record to the fields of a trajectory, because some differ.

The loss mask is 1 at the steps that the policy chose and on which it is trained. Other steps, such
as the output of a tool or steps after the end of an episode, have 0 in the column ``mask``; without
that column the mask is 1 everywhere. If a step has several parts (tokens of an action, actions of a
chunk), ``choice_mask`` is the mask of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np

from rlinf.data.record import IMAGE_PREFIX, VIDEO_PREFIX, Record, RecordId, Scalar
from rlinf.errors import InputError

STOP_REASON_ERROR = "error"
"""``stop_reason`` of a dialogue that ended by an error of a tool or of the user's code."""
ANSWER_SEPARATOR = "\n<or>\n"
"""Separates several reference answers, each of which is right, in the text of an answer."""


def accepted_answers(answer: str) -> list[str]:
    """Return the reference answers in the ``answer`` of a problem or a trajectory; each is
    right."""
    return answer.split(ANSWER_SEPARATOR)


@dataclass(kw_only=True)
class ChannelItem:
    """A typed item of a channel.

    :attr:`STEPS` maps the names of a record's step columns to fields of this class; :attr:`INFO`
    maps the names of its numbers and texts. A field that is None is not in the record.
    """

    STEPS: ClassVar[Mapping[str, str]] = {}
    INFO: ClassVar[Mapping[str, str]] = {}

    identity: RecordId

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """Return the item of a record; arrays are shared, not copied or read from disk."""
        values: dict[str, Any] = {cls.STEPS[name]: c for name, c in record.steps.items()}
        values |= {cls.INFO[name]: value for name, value in record.info.items()}
        return cls(identity=record.identity, **values)

    def to_record(self) -> Record:
        """Return the item as a record."""
        info = dict(self._present(self.INFO))
        return Record(self.identity, dict(self._present(self.STEPS)), info=info)

    def _present(self, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
        """Yield the fields in ``names`` that are not None, with their names in a record."""
        for name, attribute in names.items():
            if (value := getattr(self, attribute)) is not None:
                yield name, value


@dataclass(kw_only=True)
class StepRewards(ChannelItem):
    """The rewards of one trajectory, as the reward stage writes them."""

    STEPS = {"rewards": "rewards", "action_rewards": "action_rewards", "ends": "episode_ends"}
    INFO = {"score": "score", "keep": "is_included", "group": "group", "trouble": "failure"}

    rewards: np.ndarray
    """Reward of each step, float32 ``[T]``."""
    action_rewards: np.ndarray | None = None
    """Rewards of the actions in each chunk, float32 ``[T, C]``. None: no chunks."""
    episode_ends: np.ndarray | None = None
    """1 at the last step of an episode that got one reward for the whole episode, uint8 ``[T]``. No
    value is bootstrapped there, even after a truncation. None: 0 everywhere."""
    score: float = 0.0
    """The task's score, or the sum of ``rewards`` if the reward needs no score."""
    is_included: bool = True
    """False: the update excludes the trajectory."""
    group: int = 0
    failure: str | None = None
    """Kind of failure because of which the trajectory has no reward; empty if there was no failure.
    None: the reward cannot fail."""


@dataclass(kw_only=True)
class PolicyOutputs(ChannelItem):
    """Outputs of policies for the steps of one trajectory, as the inference stage writes them.

    A column that the algorithm does not need is None.
    """

    STEPS = {name: name for name in ("logprobs", "values", "reference_logprobs")}

    logprobs: np.ndarray | None = None
    """Log-probabilities under the policy before the update, shaped as ``Trajectory.logprobs``."""
    values: np.ndarray | None = None
    """Value estimates, float32 ``[T]``, or ``[T, C]`` per action of a chunk."""
    reference_logprobs: np.ndarray | None = None
    """Log-probabilities under the reference policy."""


@dataclass(kw_only=True)
class Trajectory(ChannelItem):
    """One sample: observations or prompt, actions and outcomes.

    ``T`` is the number of steps: tokens of a response, or decisions in an episode. ``C`` is the
    number of actions in a chunk, ``A`` the size of an action, ``K`` its number of tokens, ``D`` the
    size of an observation, and ``E`` a number of episodes. A column that does not apply is None.
    """

    actions: np.ndarray
    """Actions that the policy sampled with ``logprobs``. Language: token ids, int64 ``[T]``.
    Embodied: int64 ``[T]``, float ``[T, A]``, or chunks ``[T, C]`` and ``[T, C, A]``. Float actions
    may be out of bounds; the simulator clips them."""
    logprobs: np.ndarray | None = None
    """Log-probability of each action under the policy that sampled it, float32 ``[T]``; of the
    parts of a step ``[T, K]``, ``[T, C]`` or ``[T, C, A]``. None: a demonstration."""
    mask: np.ndarray | None = None
    """Loss mask, float32 ``[T]``: 1 where the policy chose the step, 0 for output of a tool or a
    lost episode. None: 1 everywhere."""
    choice_mask: np.ndarray | None = None
    """Loss mask of the parts of a step, uint8 in the shape of ``logprobs``. None: 1 everywhere."""
    versions: np.ndarray | None = None
    """Version of the weights that chose each step, int64 ``[T]``. None: ``policy_version``."""
    rewards: np.ndarray | None = None
    """Rewards of the environment, float32 ``[T]``; the reward stage writes its own."""
    group: int | None = None
    """Index of the prompt or initial state; samples of one group are compared."""
    policy_version: int | None = None
    """Version of the weights with which the sample began. None: a demonstration."""
    stop_reason: str | None = None
    """``stop`` (ended by itself), ``length`` (reached the horizon), ``unfinished`` or ``error``."""

    prompt: np.ndarray | None = None
    """Token ids of the prompt, int64 ``[P]``. None: an embodied trajectory."""
    prompt_text: str | None = None
    text: str | None = None
    """The decoded response; in a dialogue with the output of tools in brackets."""
    answer: str | None = None
    """The task's reference answer, or several; see :func:`accepted_answers`."""
    score: float | None = None
    """The task's score, in an evaluation; NaN: it could not be scored. None: not scored yet."""
    pixels: np.ndarray | None = None
    """Images of the prompt one after the other, uint8 ``[N]``, each ``[H, W, 3]`` flattened."""
    image_sizes: np.ndarray | None = None
    """Height and width of each image of the prompt, int64 ``[n, 2]``."""

    turns: np.ndarray | None = None
    """Index of the dialogue turn to which a token belongs, int32 ``[T]``; a tool's output belongs
    to the turn before it."""
    num_turns: int | None = None
    tool_errors: int | None = None
    """Number of rejected tool calls."""
    tool_retries: int | None = None
    """Number of retries of tool calls after an outage."""
    error: str | None = None
    """Traceback of a failure in the environment, empty if there was none."""
    failed_in_user_code: int | None = None
    """1 if the user's code raised the error."""

    observations: np.ndarray | None = None
    """State before each action, float32 ``[T, D]``."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Images before each action by camera, uint8 ``[T, H, W, 3]``."""
    videos: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Frames that were recorded for videos, by camera, uint8 ``[T, H, W, 3]``."""
    instruction: np.ndarray | None = None
    """Instruction at each step, UTF-8 padded with zeros, uint8 ``[T, N]``."""
    terminated: np.ndarray | None = None
    """1 where the episode ended by itself, uint8 ``[T]``."""
    truncated: np.ndarray | None = None
    """1 where the episode was truncated, uint8 ``[T]``."""
    success: np.ndarray | None = None
    """1 where the task is solved after the step, uint8 ``[T]``."""
    truncation_steps: np.ndarray | None = None
    """Steps at which episodes were truncated, int64 ``[E]``."""
    final_observations: np.ndarray | None = None
    """State after each truncation, float32 ``[E, D]``, in the order of ``truncation_steps``."""
    values: np.ndarray | None = None
    """Value estimates of the policy that acted, float32 ``[T]``, or ``[T, C]`` per action."""
    bootstrap_values: np.ndarray | None = None
    """Value of the state after a truncation, float32 ``[T]``, 0 at all other steps."""
    action_low: np.ndarray | None = None
    action_high: np.ndarray | None = None
    """Bounds of the environment's actions ``[A]``; infinite: no bound. If their data type is an
    integer type, actions are rounded."""
    num_executed: np.ndarray | None = None
    """Number of executed actions of each chunk, int32 ``[T]``. None: no chunks."""
    action_rewards: np.ndarray | None = None
    """Rewards of the actions in each chunk, float32 ``[T, C]``; they sum to ``rewards``."""
    intervened: np.ndarray | None = None
    """1 where a person acted instead of the policy, uint8 ``[T]`` or ``[T, C]``."""
    executed_actions: np.ndarray | None = None
    """Executed actions, where they differ from ``actions``; of the same shape."""
    late: np.ndarray | None = None
    """1 where the control deadline was missed, uint8 ``[T]``."""
    outcome_steps: np.ndarray | None = None
    """Steps at which scored episodes ended, int64 ``[E]``."""
    outcomes: np.ndarray | None = None
    """Score of each episode in ``outcome_steps``, float64 ``[E]``."""
    episode_return: float | None = None
    """Return of the episode, or the mean over the episodes of the sample."""
    episode_length: float | None = None
    success_once: float | None = None
    success_at_end: float | None = None
    """1 if solved at the last step (``success_once``: at any step); the mean over episodes."""
    num_episodes: int | None = None
    num_failed_episodes: int | None = None
    """Number of episodes ended by a failure of the simulator; unsolved ones do not count."""
    is_scored: int | None = None
    """1 if ``success_once`` and ``success_at_end`` are meaningful for the task."""
    task: str | None = None
    """Name of the task, if a run has several."""
    open_state: np.ndarray | None = None
    """State of the simulator in an episode that the next iteration continues, uint8 ``[n]``."""
    open_metrics: np.ndarray | None = None
    """Metrics of the episode of ``open_state`` so far, float64 ``[m]``."""

    policy_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Step columns that only the policy uses, ``[T, ...]``: ``tokens`` of a VLA, ``chain``
    of a flow policy."""
    context_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays of the whole sample that a task adds."""
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    """Numbers and texts that a task adds for its reward."""

    STEPS = {
        "actions": "actions",
        "logprobs": "logprobs",
        "mask": "mask",
        "submask": "choice_mask",
        "versions": "versions",
        "rewards": "rewards",
        "turns": "turns",
        "observations": "observations",
        "instruction": "instruction",
        "terminated": "terminated",
        "truncated": "truncated",
        "success": "success",
        "values": "values",
        "bootstrap": "bootstrap_values",
        "executed": "num_executed",
        "action_rewards": "action_rewards",
        "intervened": "intervened",
        "performed": "executed_actions",
        "late": "late",
    }
    CONTEXT: ClassVar[Mapping[str, str]] = {
        "prompt": "prompt",
        "pixels": "pixels",
        "image_sizes": "image_sizes",
        "cut_steps": "truncation_steps",
        "cut_observations": "final_observations",
        "action_low": "action_low",
        "action_high": "action_high",
        "outcome_steps": "outcome_steps",
        "outcomes": "outcomes",
        "open_state": "open_state",
        "open_measured": "open_metrics",
    }
    """Maps the names of a record's context arrays, of the whole sample, to fields."""
    INFO = {
        "group": "group",
        "policy_version": "policy_version",
        "stop_reason": "stop_reason",
        "prompt_text": "prompt_text",
        "text": "text",
        "answer": "answer",
        "score": "score",
        "turns": "num_turns",
        "tool_errors": "tool_errors",
        "tool_retries": "tool_retries",
        "error": "error",
        "bug": "failed_in_user_code",
        "return": "episode_return",
        "episode_length": "episode_length",
        "success_once": "success_once",
        "success_at_end": "success_at_end",
        "episodes": "num_episodes",
        "failed": "num_failed_episodes",
        "scored": "is_scored",
        "task": "task",
    }

    def __len__(self) -> int:
        """Return the number of steps ``T``."""
        return len(self.actions)

    @property
    def is_chunked(self) -> bool:
        """True if a step is a chunk of several actions."""
        return self.num_executed is not None

    def step_versions(self) -> np.ndarray:
        """Return the version of the weights that chose each step, int64 ``[T]``."""
        if self.versions is not None:
            return self.versions
        return np.full(len(self), self.policy_version or 0, np.int64)

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """Return the trajectory of a record; arrays are shared, not copied or read from disk.

        Raises:
            ValueError: the record has no column of actions.
        """
        if "actions" not in record.steps:
            raise ValueError(
                f"{record.identity}: no trajectory, because it has no column 'actions'; it has "
                f"{sorted(record.steps)}"
            )
        return cls(
            identity=record.identity,
            **step_fields(record.steps),
            **context_fields(record.context),
            **info_fields(record.info),
        )

    def to_record(self) -> Record:
        """Return the trajectory as a record."""
        steps = dict(self._present(self.STEPS)) | dict(self.policy_columns)
        steps |= {IMAGE_PREFIX + name: column for name, column in self.images.items()}
        steps |= {VIDEO_PREFIX + name: column for name, column in self.videos.items()}
        context = dict(self._present(self.CONTEXT)) | dict(self.context_columns)
        return Record(self.identity, steps, context, self.scalars())

    def scalars(self) -> dict[str, Scalar]:
        """Return all numbers and texts by their names in a record, including ``extra``."""
        return dict(self._present(self.INFO)) | dict(self.extra)

    @property
    def is_failed(self) -> bool:
        """Whether the dialogue ended by an error of a tool or of the user's code."""
        return self.stop_reason == STOP_REASON_ERROR

    def require(self, name: str) -> Any:
        """Return a field that must not be None.

        Raises:
            InputError: it is None.
        """
        if (value := getattr(self, name)) is None:
            raise InputError(f"{self.identity}: no {name!r}; the trajectory has {self.describe()}")
        return value

    def describe(self) -> str:
        """Return the names of the fields that this trajectory has, for error messages."""
        names = [
            field.name
            for field in fields(self)
            if field.name not in GROUPED_FIELDS and getattr(self, field.name) is not None
        ]
        grouped = [
            f"{name}: {', '.join(sorted(members))}"
            for name in GROUPED_FIELDS
            if (members := getattr(self, name))
        ]
        return "; ".join([", ".join(names), *grouped])

    def slice_steps(self, start: int, stop: int) -> Trajectory:
        """Return the trajectory with its steps from ``start`` up to ``stop``, as views."""
        if (start, stop) == (0, len(self)):
            return self
        columns: dict[str, Any] = {
            name: column[start:stop]
            for name in self.STEPS.values()
            if (column := getattr(self, name)) is not None
        }
        for group in GROUPED_STEP_FIELDS:
            members = getattr(self, group)
            columns[group] = {name: column[start:stop] for name, column in members.items()}
        return replace(self, **columns)


def step_fields(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return step columns, by their names in a record, as arguments of :class:`Trajectory`."""
    values: dict[str, Any] = {name: {} for name in GROUPED_STEP_FIELDS}
    for name, column in columns.items():
        if name in Trajectory.STEPS:
            values[Trajectory.STEPS[name]] = column
        elif name.startswith(IMAGE_PREFIX):
            values["images"][name.removeprefix(IMAGE_PREFIX)] = column
        elif name.startswith(VIDEO_PREFIX):
            values["videos"][name.removeprefix(VIDEO_PREFIX)] = column
        else:
            values["policy_columns"][name] = column
    return values


def context_fields(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return arrays of a whole sample, by their names in a record, as arguments of
    :class:`Trajectory`."""
    return _by_field(columns, Trajectory.CONTEXT, "context_columns")


def info_fields(info: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return numbers and texts, by their names in a record, as arguments of
    :class:`Trajectory`."""
    return _by_field(info, Trajectory.INFO, "extra")


def _by_field(values: Mapping[str, Any], names: Mapping[str, str], rest: str) -> dict[str, Any]:
    """Return values by their fields in ``names``; values without one are in the field ``rest``."""
    arguments = {names[name]: value for name, value in values.items() if name in names}
    return {**arguments, rest: {name: value for name, value in values.items() if name not in names}}


GROUPED_STEP_FIELDS = ("images", "videos", "policy_columns")
GROUPED_FIELDS = (*GROUPED_STEP_FIELDS, "context_columns", "extra")
"""Fields that contain several columns by name; ``GROUPED_STEP_FIELDS`` have only step columns."""


def loss_mask(trajectory: Trajectory) -> np.ndarray:
    """Return the loss mask of the steps, bool ``[T]``."""
    mask = np.ones(len(trajectory), dtype=bool)
    if trajectory.mask is not None:
        mask &= np.asarray(trajectory.mask) != 0
    if trajectory.choice_mask is not None:
        mask &= np.asarray(trajectory.choice_mask).reshape(len(trajectory), -1).any(1)
    return mask


def masked_logprobs(trajectory: Trajectory, column: np.ndarray) -> np.ndarray:
    """Return the unmasked log-probabilities of a column ``[T]`` or ``[T, ...]``, flattened."""
    values: np.ndarray = column[loss_mask(trajectory)]
    if trajectory.choice_mask is not None:
        values = values[np.asarray(trajectory.choice_mask)[loss_mask(trajectory)] != 0]
    return values.ravel()


def action_mask(trajectory: Trajectory) -> np.ndarray | None:
    """Return the loss mask of the actions in chunks, bool ``[T, C]``. None: there are no chunks."""
    if trajectory.num_executed is None:
        return None
    positions = np.arange(trajectory.actions.shape[1])
    is_executed: np.ndarray = positions < np.asarray(trajectory.num_executed)[:, None]
    return is_executed & loss_mask(trajectory)[:, None]


def place_on_last_action(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Place the reward of each chunk, which results from all of its actions, on the last unmasked
    one.

    Args:
        rewards: ``[T]``.
        mask: result of :func:`action_mask`, ``[T, C]``. If a chunk has no unmasked action, its
            first action gets the reward.

    Returns:
        ``[T, C]``.
    """
    last = np.maximum(mask.sum(1) - 1, 0)
    placed: np.ndarray = rewards[:, None] * (np.arange(mask.shape[1]) == last[:, None])
    return placed


def move_rewards_to_unmasked(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Move rewards to unmasked steps; their sum stays the same.

    The reward of a masked step is added to the last unmasked step before it, which led there.
    Rewards before the first unmasked step are added to that step.

    Args:
        rewards: ``[T]``.
        mask: bool ``[T]``, true at unmasked steps; there must be at least one.

    Returns:
        float32 ``[T]``.
    """
    unmasked = np.flatnonzero(mask)
    # For each step, the index of the last unmasked step up to it.
    target = np.maximum(np.cumsum(mask) - 1, 0)
    moved = np.zeros(len(rewards))
    np.add.at(moved, unmasked[target], np.asarray(rewards, np.float64))
    return moved.astype(np.float32)
