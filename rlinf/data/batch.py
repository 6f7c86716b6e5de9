"""The training batch: samples of an iteration, joined over their channels and padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinf.data.load_balancing import StepSpan
from rlinf.data.loss_mask import action_mask, loss_mask, place_on_last_action
from rlinf.data.trajectory import ChannelItem, PolicyOutputs, StepRewards, Trajectory
from rlinf.errors import InputError


def pad_right(arrays: Sequence[np.ndarray], length: int, value: float = 0) -> Tensor:
    """Stack arrays ``[n_i, ...]`` into ``[B, length, ...]``, filled with ``value`` on the right."""
    first = arrays[0]
    out = np.full((len(arrays), length, *first.shape[1:]), value, first.dtype)
    filled = np.arange(length) < np.array([len(array) for array in arrays])[:, None]
    # All at once: a thousand assignments, one for each array, take longer than some forward passes.
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
    """``[N, T]`` 1 at steps that the policy chose and that are trained."""
    rewards: Tensor
    """``[N, T]``, 0 where ``mask`` is 0."""
    groups: Tensor
    """``[N]`` int64, number of the group (the start) of each sample."""
    old_logprobs: Tensor
    """``[N, T]`` under the policy before the update. Where a step consists of several choices, this
    and other log-probabilities have more dimensions; see :mod:`rlinf.algorithms.granularity`."""
    terminated: Tensor
    """``[N, T]`` 1 where the episode terminated, or got one reward for all of it."""
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
    """``[N, T]`` number of the dialogue turn, from 0, that a step belongs to."""
    choice_mask: Tensor | None = None
    """``[N, T, ...]`` 1 where a choice of a step counts. None: all choices count."""
    loss_mask: Tensor | None = None
    """``[N, T]`` or ``[N, T, K]`` 1 at the elements that the loss sums over."""
    old_logprob_interpolation: Tensor | None = None
    """``[N, T]`` position of ``old_logprobs`` between the policy that generated the step (0) and
    the policy in training (1), if they are interpolated."""
    on_policy_mask: Tensor | None = None
    """``[N, T]`` 1 where a step counts and was chosen by the weights that are about to be updated.
    Set in the first update of an iteration."""
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
            raise ValueError(f"the batch has no {column}; did the inference stage provide them?")
        return value

    def select_spans(
        self, spans: Sequence[StepSpan], length: int, device: torch.device
    ) -> StepBatch:
        """Return the steps of some spans, padded on the right to ``length``, on a device."""
        columns = {
            field.name: gather_steps(value, spans, length).to(device)
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        return replace(self, **columns)


def gather_steps(column: Tensor, spans: Sequence[StepSpan], length: int) -> Tensor:
    """Return the steps of some spans of ``[N, T, ...]`` as ``[B, length, ...]``, padded with 0.

    A column ``[N]`` gives the samples of the spans: ``[B]``.
    """
    if column.ndim == 1 or all(s.start == 0 and s.stop == length for s in spans):
        chosen = column[[span.row for span in spans]]
        return chosen if column.ndim == 1 else chosen[:, :length]
    rows, start, stop = torch.tensor(spans).T
    places = start[:, None] + torch.arange(length)
    inside = places < stop[:, None]
    values = column[rows[:, None], places.clamp(max=column.shape[1] - 1)]
    return torch.where(inside.view(*inside.shape, *[1] * (values.ndim - 2)), values, 0)


def join_by_identity(
    trajectories: Iterable[ChannelItem], *columns: Iterable[ChannelItem]
) -> list[tuple[Any, ...]]:
    """Match the items of several channels by identity, in the order of the first channel.

    Raises:
        ValueError: an item has no partner, or two.
    """
    tables = []
    for column in columns:
        table: dict[tuple[int, int], ChannelItem] = {}
        for record in column:
            if record.identity.key in table:
                raise ValueError(f"two records for {record.identity}")
            table[record.identity.key] = record
        tables.append(table)
    rows = []
    for trajectory in trajectories:
        key = trajectory.identity.key
        missing = [i for i, table in enumerate(tables) if key not in table]
        if missing:
            raise ValueError(f"no record for {trajectory.identity} in input {missing[0] + 1}")
        rows.append((trajectory, *(table[key] for table in tables)))
    return rows


def build_step_batch(rows: Sequence[TrainingSample]) -> StepBatch:
    """Return the step columns of samples as one padded batch.

    Raises:
        InputError: a reward lies on a masked step, or a step that is no chunk has several values.
    """
    trajectories = [sample.trajectory for sample in rows]
    every_reward = [sample.reward for sample in rows if sample.reward is not None]
    inferred = [sample.inference for sample in rows if sample.inference is not None]
    length = max(map(len, trajectories))

    def column(arrays: Sequence[np.ndarray | None]) -> Tensor | None:
        if not arrays or arrays[0] is None:
            return None
        return pad_right([np.asarray(array, np.float32) for array in arrays], length)

    def or_zeros(found: Tensor | None) -> Tensor:
        return torch.zeros(len(rows), length) if found is None else found

    for trajectory in trajectories:
        if trajectory.intervened is not None and np.asarray(trajectory.intervened).any():
            raise InputError(
                f"{trajectory.identity}: a person acted in it, and this algorithm learns from what "
                "the policy chose itself; choose one that learns from transitions (sac, rlpd, ...)"
            )
    # Row by row: one trajectory may have a mask where another, all of whose steps count, has none.
    mask = pad_right(
        [loss_mask(trajectory).astype(np.float32) for trajectory in trajectories], length
    )
    rewards = or_zeros(column([each.rewards for each in every_reward]))
    if bool((lost := (rewards != 0) & (mask == 0)).any()):
        row, step = (int(place) for place in lost.nonzero()[0])
        raise InputError(
            f"{trajectories[row].identity}: a reward of {float(rewards[row, step]):g} lies on step "
            f"{step}, which does not count (its mask is 0), so nothing would be learned from it; "
            "place it on the last step that counts, as rlinf.rewards.base.Reward does"
        )
    rollout_logprobs = column([t.logprobs for t in trajectories])
    old = column([outputs.logprobs for outputs in inferred])
    # Of the version whose values the rewards are continued with after a cut: where those of the
    # inference stage are of a later one, temporal differences would mix two value functions.
    values = column([t.values for t in trajectories])
    values = column([outputs.values for outputs in inferred]) if values is None else values
    of_actions = values is not None and values.ndim > 2
    return StepBatch(
        mask=mask,
        rewards=rewards,
        groups=torch.tensor([t.require("group") for t in trajectories]),
        old_logprobs=or_zeros(rollout_logprobs) if old is None else old,
        rollout_logprobs=rollout_logprobs,
        turns=column([t.turns for t in trajectories]),
        choice_mask=column([t.choice_mask for t in trajectories]),
        terminated=torch.maximum(
            or_zeros(column([t.terminated for t in trajectories])),
            or_zeros(column([each.episode_ends for each in every_reward])),
        ),
        truncated=or_zeros(column([t.truncated for t in trajectories])),
        bootstrap_values=or_zeros(column([t.bootstrap_values for t in trajectories])),
        values=values,
        action_rewards=_of_actions(rows, length) if of_actions else None,
        reference_logprobs=column([outputs.reference_logprobs for outputs in inferred]),
    )


def _of_actions(rows: Sequence[TrainingSample], length: int) -> Tensor:
    """Return the rewards of each action of chunks, ``[N, T, C]``.

    Where the reward stage gave one reward per chunk, it goes to the last executed action.
    """
    columns = []
    for sample in rows:
        actions = action_mask(sample.trajectory)
        if actions is None:
            raise InputError(
                f"{sample.trajectory.identity}: the policy gave several values for a step, and its "
                "steps are no chunks of actions; one value is for a step"
            )
        given = sample.reward
        step_rewards = np.zeros(len(actions)) if given is None else np.asarray(given.rewards)
        rewards = None if given is None else given.action_rewards
        if rewards is None:
            rewards = place_on_last_action(step_rewards, actions)
        elif not _add_up(np.asarray(rewards) * actions, step_rewards):
            raise InputError(
                f"{sample.trajectory.identity}: 'action_rewards' of actions that were carried out "
                "do not add up to 'rewards'; a stage that changes one changes both, or leaves "
                "'action_rewards' out"
            )
        columns.append(np.asarray(rewards, np.float32))
    return pad_right(columns, length)


def _add_up(of_actions: np.ndarray, rewards: np.ndarray) -> bool:
    sums, bound = of_actions.sum(1, dtype=np.float64), 1e-5 * np.abs(rewards).max(initial=1.0)
    return bool(np.allclose(sums, rewards, rtol=1e-4, atol=bound))
