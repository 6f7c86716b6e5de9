"""The training batch: the samples of an iteration, with the outputs of all stages, padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinf.data.load_balancing import StepSpan
from rlinf.data.trajectory import (
    ChannelItem,
    PolicyOutputs,
    StepRewards,
    Trajectory,
    action_mask,
    loss_mask,
    place_on_last_action,
)
from rlinf.errors import InputError


def pad_right(arrays: Sequence[np.ndarray], length: int, value: float = 0) -> Tensor:
    """Stack arrays ``[n_i, ...]`` into ``[B, length, ...]``, filled with ``value`` on the right."""
    first = arrays[0]
    out = np.full((len(arrays), length, *first.shape[1:]), value, first.dtype)
    filled = np.arange(length) < np.array([len(array) for array in arrays])[:, None]
    # One vectorized assignment: a loop over 1000 arrays takes longer than some forward passes.
    out[filled] = np.concatenate(arrays)
    return torch.from_numpy(out)


class TrainingSample(NamedTuple):
    """A trajectory with the outputs of the reward and inference stages, where the flow has them."""

    trajectory: Trajectory
    reward: StepRewards | None = None
    inference: PolicyOutputs | None = None

    @property
    def is_included(self) -> bool:
        """True if the sample takes part in the update."""
        return self.reward is None or self.reward.is_included


@dataclass(frozen=True)
class StepBatch:
    """Step columns of ``N`` samples, padded on the right to ``T``; float32 unless stated."""

    mask: Tensor
    """``[N, T]`` 1 at steps that the policy chose and that the loss includes."""
    rewards: Tensor
    """``[N, T]``, 0 where ``mask`` is 0."""
    groups: Tensor
    """``[N]`` int64, index of each sample's group (its prompt or initial state)."""
    old_logprobs: Tensor
    """``[N, T]`` under the policy before the update. If steps have several parts (tokens or
    dimensions of an action), they have more axes: :mod:`rlinf.algorithms.importance_sampling`."""
    terminated: Tensor
    """``[N, T]`` 1 where no value is bootstrapped: after the last step of an episode that
    terminated, or that got one reward for the whole episode."""
    truncated: Tensor
    """``[N, T]`` 1 where the episode was truncated."""
    bootstrap_values: Tensor
    """``[N, T]`` value of the state after a truncation, 0 elsewhere."""
    rollout_logprobs: Tensor | None = None
    """``[N, T]`` under the policy that generated the steps."""
    values: Tensor | None = None
    """``[N, T]``, or ``[N, T, C]`` for each action of a chunk, from the same version of the critic
    as ``bootstrap_values``."""
    action_rewards: Tensor | None = None
    """``[N, T, C]`` for each action of a chunk, where ``values`` are per action."""
    reference_logprobs: Tensor | None = None
    """``[N, T]`` under the reference policy."""
    advantages: Tensor | None = None
    """``[N, T]``, or ``[N, T, C]`` for each action of a chunk."""
    returns: Tensor | None = None
    """Shaped like ``advantages``."""
    turns: Tensor | None = None
    """``[N, T]`` index of the dialogue turn, from 0, to which a step belongs."""
    choice_mask: Tensor | None = None
    """``[N, T, ...]`` 1 at the parts of a step that the loss includes. None: 1 everywhere."""
    loss_mask: Tensor | None = None
    """``[N, T]`` or ``[N, T, K]`` 1 at the units over which the loss sums, each of which has its
    own probability ratio (:mod:`rlinf.algorithms.importance_sampling`)."""
    old_logprob_interpolation: Tensor | None = None
    """``[N, T]`` position of ``old_logprobs`` between the policy that generated the step (0) and
    the policy in training (1), if they are interpolated."""
    on_policy_mask: Tensor | None = None
    """``[N, T]`` 1 where ``mask`` is 1 and the step was chosen with the weights before the update.
    Set only for the first optimizer step of an iteration."""
    loss_weights: Tensor | None = None
    """``[N, T]`` weight of each step in the mean of the loss, before importance weights."""

    def __len__(self) -> int:
        return len(self.mask)

    def require(self, column: str) -> Tensor:
        """Return a column that the algorithm needs.

        Raises:
            ValueError: the batch does not have it.
        """
        value: Tensor | None = getattr(self, column)
        if value is None:
            raise ValueError(f"no column {column!r}: the inference stage did not compute it")
        return value

    def select_spans(
        self, spans: Sequence[StepSpan], length: int, device: torch.device
    ) -> StepBatch:
        """Return the steps of these spans, padded on the right to ``length``, on ``device``."""
        columns = {
            field.name: gather_steps(value, spans, length).to(device)
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        return replace(self, **columns)


def gather_steps(column: Tensor, spans: Sequence[StepSpan], length: int) -> Tensor:
    """Return the steps of spans, from ``[N, T, ...]`` to ``[B, length, ...]``, padded with 0.

    From a column ``[N]``, it returns the value of each span's sample, ``[B]``.
    """
    if column.ndim == 1 or all(s.start == 0 and s.stop == length for s in spans):
        selected = column[[span.row for span in spans]]
        return selected if column.ndim == 1 else selected[:, :length]
    rows, start, stop = torch.tensor(spans).T
    positions = start[:, None] + torch.arange(length)
    is_inside = positions < stop[:, None]
    values = column[rows[:, None], positions.clamp(max=column.shape[1] - 1)]
    return torch.where(is_inside.view(*is_inside.shape, *[1] * (values.ndim - 2)), values, 0)


def join_by_identity(
    trajectories: Iterable[ChannelItem], *others: Iterable[ChannelItem]
) -> list[tuple[Any, ...]]:
    """Match the items of several channels by iteration and sample, in the order of
    ``trajectories``.

    Raises:
        ValueError: another channel has no item, or two items, for a trajectory.
    """
    tables = []
    for channel in others:
        table: dict[tuple[int, int], ChannelItem] = {}
        for item in channel:
            if item.identity.key in table:
                raise ValueError(f"two records for {item.identity}")
            table[item.identity.key] = item
        tables.append(table)
    rows = []
    for trajectory in trajectories:
        key = trajectory.identity.key
        missing = [i for i, table in enumerate(tables) if key not in table]
        if missing:
            raise ValueError(f"no record for {trajectory.identity} in input {missing[0] + 1}")
        rows.append((trajectory, *(table[key] for table in tables)))
    return rows


def build_step_batch(samples: Sequence[TrainingSample]) -> StepBatch:
    """Return the step columns of samples as one padded batch.

    Raises:
        InputError: a person acted in a trajectory, a reward is on a masked step, or a step that is
            no chunk of actions has several value estimates.
    """
    trajectories = [sample.trajectory for sample in samples]
    step_rewards = [sample.reward for sample in samples if sample.reward is not None]
    inferred = [sample.inference for sample in samples if sample.inference is not None]
    length = max(map(len, trajectories))

    def column(arrays: Sequence[np.ndarray | None]) -> Tensor | None:
        if not arrays or arrays[0] is None:
            return None
        return pad_right([np.asarray(array, np.float32) for array in arrays], length)

    def column_or_zeros(values: Tensor | None) -> Tensor:
        return torch.zeros(len(samples), length) if values is None else values

    for trajectory in trajectories:
        if trajectory.intervened is not None and np.asarray(trajectory.intervened).any():
            raise InputError(
                f"{trajectory.identity}: a person acted in it, but this algorithm learns only "
                "from actions of the policy; use one that learns from transitions (sac, rlpd, ...)"
            )
    # One trajectory at a time: a trajectory without masked steps may have no mask.
    mask = pad_right(
        [loss_mask(trajectory).astype(np.float32) for trajectory in trajectories], length
    )
    rewards = column_or_zeros(column([reward.rewards for reward in step_rewards]))
    if bool((masked_rewards := (rewards != 0) & (mask == 0)).any()):
        row, step = (int(index) for index in masked_rewards.nonzero()[0])
        raise InputError(
            f"{trajectories[row].identity}: a reward of {float(rewards[row, step]):g} lies on step "
            f"{step}, which is masked, so nothing would be learned from it; put it on the last "
            "step that is not masked, as rlinf.rewards.base.Reward does"
        )
    rollout_logprobs = column([t.logprobs for t in trajectories])
    inferred_logprobs = column([outputs.logprobs for outputs in inferred])
    # Prefer the values of the rollout, which are from the same critic as the bootstrap values.
    # The inference stage may use a newer critic: TD errors would mix two value functions.
    values = column([t.values for t in trajectories])
    values = column([outputs.values for outputs in inferred]) if values is None else values
    has_action_values = values is not None and values.ndim > 2
    return StepBatch(
        mask=mask,
        rewards=rewards,
        groups=torch.tensor([t.require("group") for t in trajectories]),
        old_logprobs=(
            column_or_zeros(rollout_logprobs) if inferred_logprobs is None else inferred_logprobs
        ),
        rollout_logprobs=rollout_logprobs,
        turns=column([t.turns for t in trajectories]),
        choice_mask=column([t.choice_mask for t in trajectories]),
        terminated=torch.maximum(
            column_or_zeros(column([t.terminated for t in trajectories])),
            column_or_zeros(column([reward.episode_ends for reward in step_rewards])),
        ),
        truncated=column_or_zeros(column([t.truncated for t in trajectories])),
        bootstrap_values=column_or_zeros(column([t.bootstrap_values for t in trajectories])),
        values=values,
        action_rewards=_action_rewards(samples, length) if has_action_values else None,
        reference_logprobs=column([outputs.reference_logprobs for outputs in inferred]),
    )


def _action_rewards(samples: Sequence[TrainingSample], length: int) -> Tensor:
    """Return the reward of each action of the chunks, ``[N, T, C]``.

    If the reward stage gave one reward per chunk, the chunk's last executed action gets it.
    """
    columns = []
    for sample in samples:
        executed = action_mask(sample.trajectory)
        if executed is None:
            raise InputError(
                f"{sample.trajectory.identity}: the policy returned several values for a step that "
                "is not a chunk of actions; return one value per step"
            )
        reward = sample.reward
        step_rewards = np.zeros(len(executed)) if reward is None else np.asarray(reward.rewards)
        action_rewards = None if reward is None else reward.action_rewards
        if action_rewards is None:
            action_rewards = place_on_last_action(step_rewards, executed)
        elif not _sums_match(np.asarray(action_rewards) * executed, step_rewards):
            raise InputError(
                f"{sample.trajectory.identity}: 'action_rewards' of the executed actions do not "
                "add up to 'rewards'; a stage that changes one must change both, or omit "
                "'action_rewards'"
            )
        columns.append(np.asarray(action_rewards, np.float32))
    return pad_right(columns, length)


def _sums_match(action_rewards: np.ndarray, rewards: np.ndarray) -> bool:
    """Return whether the rewards of actions ``[T, C]`` add up to those of chunks ``[T]``."""
    sums, atol = action_rewards.sum(1, dtype=np.float64), 1e-5 * np.abs(rewards).max(initial=1.0)
    return bool(np.allclose(sums, rewards, rtol=1e-4, atol=atol))
