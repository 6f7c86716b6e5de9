"""The trajectory: one sample of a rollout, with every column declared.

A :class:`rlinf.data.record.Record` is the form in which a trajectory travels and lies in files. The
tables of this module are the only place that knows the names of the two forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.data.record import IMAGE_PREFIX, VIDEO_PREFIX, Record, RecordId, Scalar


@dataclass(kw_only=True)
class Trajectory:
    """One sample: what the policy was shown, what it did, and what came of it.

    ``T`` is the number of steps: tokens of a response, or decisions in an episode. ``C`` is the
    number of actions in a chunk, ``A`` the size of an action, ``D`` the size of an observation and
    ``K`` the number of truncations or of scored episodes. A column that does not apply is None.
    """

    identity: RecordId

    actions: np.ndarray
    """Choices of the policy. Language: token ids, int64 ``[T]``. Embodied: int64 ``[T]``, float
    ``[T, A]``, or chunks ``[T, C]`` and ``[T, C, A]``."""
    logprobs: np.ndarray | None = None
    """Log-probability of each action under the policy that sampled it, float32 ``[T]``; of each
    choice within a step ``[T, K]``, ``[T, C]`` or ``[T, C, A]``. None: a demonstration."""
    mask: np.ndarray | None = None
    """Loss mask, float32 ``[T]``: 1 where the policy chose the step, 0 for output of a tool or a
    lost episode. None: 1 everywhere."""
    choice_mask: np.ndarray | None = None
    """Loss mask of the choices within a step, uint8 in the shape of ``logprobs``. None: all."""
    versions: np.ndarray | None = None
    """Version of the weights that chose each step, int64 ``[T]``. None: ``policy_version``."""
    rewards: np.ndarray | None = None
    """Rewards of the environment, float32 ``[T]``; the reward stage writes its own."""
    group: int | None = None
    """Number of the prompt or initial state; samples of one group are compared."""
    policy_version: int | None = None
    """Version of the weights that the sample began with. None: a demonstration."""
    stop_reason: str | None = None
    """``stop`` (ended by itself), ``length`` (cut at the horizon), ``unfinished`` or ``failed``."""

    prompt: np.ndarray | None = None
    """Token ids of the prompt, int64 ``[P]``. None: an embodied trajectory."""
    prompt_text: str | None = None
    text: str | None = None
    """The decoded response; in a dialogue with the output of tools in brackets."""
    answer: str | None = None
    """The task's reference answer."""
    pixels: np.ndarray | None = None
    """Images of the prompt one after the other, uint8 ``[N]``, each ``[H, W, 3]`` laid out flat."""
    image_sizes: np.ndarray | None = None
    """Height and width of each image of the prompt, int64 ``[n, 2]``."""

    turns: np.ndarray | None = None
    """Turn of a dialogue that a token belongs to, int32 ``[T]``; a tool's output belongs to the
    turn before it."""
    num_turns: int | None = None
    tool_errors: int | None = None
    tool_retries: int | None = None
    error: str | None = None
    """Traceback of a failure in the environment, empty if there was none."""
    failed_in_user_code: int | None = None
    """1 if code of the user's own raised it."""

    observations: np.ndarray | None = None
    """State before each action, float32 ``[T, D]``."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Images before each action by camera, uint8 ``[T, H, W, 3]``."""
    videos: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Frames that were filmed for people by camera, uint8 ``[T, H, W, 3]``."""
    instruction: np.ndarray | None = None
    """Instruction at each step, UTF-8 padded with zeros, uint8 ``[T, N]``."""
    terminated: np.ndarray | None = None
    """1 where the episode ended in its own way, uint8 ``[T]``."""
    truncated: np.ndarray | None = None
    """1 where the episode was cut off, uint8 ``[T]``."""
    success: np.ndarray | None = None
    """1 where the task is solved after the step, uint8 ``[T]``."""
    truncation_steps: np.ndarray | None = None
    """Steps at which episodes were cut off, int64 ``[K]``."""
    final_observations: np.ndarray | None = None
    """State after each truncation, float32 ``[K, D]``, in the order of ``truncation_steps``."""
    values: np.ndarray | None = None
    """Value estimates of the policy that acted, float32 ``[T]``; of each action ``[T, C]``."""
    bootstrap_values: np.ndarray | None = None
    """Value of the state after a truncation, float32 ``[T]``, 0 at all other steps."""
    action_low: np.ndarray | None = None
    action_high: np.ndarray | None = None
    """Bounds of the environment's actions, float ``[A]``."""
    num_executed: np.ndarray | None = None
    """Actions of each chunk that were carried out, int32 ``[T]``. None: no chunks."""
    action_rewards: np.ndarray | None = None
    """Rewards of the actions in each chunk, float32 ``[T, C]``; they sum to ``rewards``."""
    intervened: np.ndarray | None = None
    """1 where a person acted in the place of the policy, uint8 ``[T]`` or ``[T, C]``."""
    executed_actions: np.ndarray | None = None
    """Actions that were carried out where they differ from ``actions``, in their shape."""
    late: np.ndarray | None = None
    """1 where the control deadline was missed, uint8 ``[T]``."""
    outcome_steps: np.ndarray | None = None
    """Steps at which scored episodes ended, int64 ``[K]``."""
    outcomes: np.ndarray | None = None
    """Measures of those episodes, float64 ``[K]``."""
    episode_return: float | None = None
    """Return of the episode, or the mean over the episodes of the sample."""
    episode_length: float | None = None
    success_once: float | None = None
    success_at_end: float | None = None
    num_episodes: int | None = None
    num_failed_episodes: int | None = None
    is_scored: int | None = None
    """1 if ``success_once`` and ``success_at_end`` mean something for the task."""
    task: str | None = None
    """Name of the task, of several that a run has."""

    policy_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Step columns that a policy returns for itself, ``[T, ...]``: ``tokens`` of a VLA, ``chain``
    of a flow policy."""
    context_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays of the whole sample that a task adds."""
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    """Numbers and texts that a task adds for its reward."""

    def __len__(self) -> int:
        """Return the number of steps ``T``."""
        return len(self.actions)

    @property
    def is_chunked(self) -> bool:
        """True if a step is a chunk of several actions."""
        return self.num_executed is not None

    @property
    def is_demonstration(self) -> bool:
        """True if no policy of this run sampled the actions."""
        return self.logprobs is None

    def step_versions(self) -> np.ndarray:
        """Return the version of the weights that chose each step, int64 ``[T]``."""
        if self.versions is not None:
            return self.versions
        return np.full(len(self), self.policy_version or 0, np.int64)

    @classmethod
    def from_record(cls, record: Record) -> Trajectory:
        """Return the trajectory of a record; arrays are shared, not copied or read from disk.

        Raises:
            ValueError: the record has no column of actions.
        """
        if "actions" not in record.steps:
            raise ValueError(
                f"{record.identity}: no trajectory, for it has no column 'actions'; it has "
                f"{sorted(record.steps)}"
            )
        values: dict[str, Any] = {"identity": record.identity}
        more: dict[str, Any] = {name: {} for name in GROUPED_FIELDS}
        for name, column in record.steps.items():
            group, key = _group_of(name)
            if name in STEP_FIELDS:
                values[STEP_FIELDS[name]] = column
            else:
                more[group][key] = column
        for name, column in record.context.items():
            if name in CONTEXT_FIELDS:
                values[CONTEXT_FIELDS[name]] = column
            else:
                more["context_columns"][name] = column
        for name, value in record.info.items():
            if name in INFO_FIELDS:
                values[INFO_FIELDS[name]] = value
            else:
                more["extra"][name] = value
        return cls(**values, **more)

    def to_record(self) -> Record:
        """Return the record that this trajectory travels as."""
        steps = dict(self._present(STEP_FIELDS)) | dict(self.policy_columns)
        steps |= {IMAGE_PREFIX + name: column for name, column in self.images.items()}
        steps |= {VIDEO_PREFIX + name: column for name, column in self.videos.items()}
        context = dict(self._present(CONTEXT_FIELDS)) | dict(self.context_columns)
        info = dict(self._present(INFO_FIELDS)) | dict(self.extra)
        return Record(self.identity, steps, context, info)

    def slice_steps(self, start: int, stop: int) -> Trajectory:
        """Return the steps from ``start`` up to ``stop`` as views, with all else."""
        return type(self).from_record(self.to_record().slice_steps(start, stop))

    def _present(self, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
        for name, attribute in names.items():
            if (value := getattr(self, attribute)) is not None:
                yield name, value


STEP_FIELDS: Mapping[str, str] = {
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
"""Field of each step column of a record."""
CONTEXT_FIELDS: Mapping[str, str] = {
    "prompt": "prompt",
    "pixels": "pixels",
    "image_sizes": "image_sizes",
    "cut_steps": "truncation_steps",
    "cut_observations": "final_observations",
    "action_low": "action_low",
    "action_high": "action_high",
    "outcome_steps": "outcome_steps",
    "outcomes": "outcomes",
}
"""Field of each array that a record has of the whole sample."""
INFO_FIELDS: Mapping[str, str] = {
    "group": "group",
    "policy_version": "policy_version",
    "stop_reason": "stop_reason",
    "prompt_text": "prompt_text",
    "text": "text",
    "answer": "answer",
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
"""Field of each number and text of a record."""
GROUPED_FIELDS = ("images", "videos", "policy_columns", "context_columns", "extra")
"""Fields that hold several columns by name."""


def _group_of(name: str) -> tuple[str, str]:
    """Return the grouped field of a step column, and the column's key in it."""
    for prefix, group in ((IMAGE_PREFIX, "images"), (VIDEO_PREFIX, "videos")):
        if name.startswith(prefix):
            return group, name.removeprefix(prefix)
    return "policy_columns", name
