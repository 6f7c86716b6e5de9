"""Joining the channels of one iteration into a batch of steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from rlinf.data.counted import counted
from rlinf.data.padding import pad
from rlinf.data.record import Record
from rlinf.errors import InputError


@dataclass(frozen=True)
class StepBatch:
    """Step columns of ``N`` samples, padded on the right to ``T``; float32 unless said."""

    mask: Tensor
    """``[N, T]`` 1 where there is a step that counts."""
    rewards: Tensor
    """``[N, T]``, 0 where ``mask`` is."""
    groups: Tensor
    """``[N]`` int64."""
    old_logprobs: Tensor
    """``[N, T]`` of the policy before the update."""
    terminated: Tensor
    """``[N, T]`` 1 where the episode ended by itself."""
    truncated: Tensor
    """``[N, T]`` 1 where it was cut off."""
    bootstrap: Tensor
    """``[N, T]`` value of the state after a cut, 0 elsewhere."""
    rollout_logprobs: Tensor | None = None
    """``[N, T]`` of the policy that collected the steps."""
    values: Tensor | None = None
    """``[N, T]`` of the version that ``bootstrap`` is of."""
    reference_logprobs: Tensor | None = None
    """``[N, T]``."""
    advantages: Tensor | None = None
    """``[N, T]``."""
    returns: Tensor | None = None
    """``[N, T]``."""

    def __len__(self) -> int:
        return len(self.mask)

    def require(self, column: str) -> Tensor:
        """A column that the algorithm cannot do without.

        Raises:
            ValueError: it is not there.
        """
        value: Tensor | None = getattr(self, column)
        if value is None:
            raise ValueError(f"the batch has no {column}; did the inference stage provide them?")
        return value

    def rows(self, index: Sequence[int], length: int, device: torch.device) -> StepBatch:
        """The given samples, cut to ``length`` steps, on a device."""
        where = torch.as_tensor(index, dtype=torch.int64)
        cut = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                value = value[where]
                cut[field.name] = (value[:, :length] if value.ndim > 1 else value).to(device)
        return replace(self, **cut)


def join(trajectories: Iterable[Record], *columns: Iterable[Record]) -> list[tuple[Record, ...]]:
    """Match the records of several channels by identity, in the order of the first.

    Raises:
        ValueError: a record has no partner, or two.
    """
    tables = []
    for column in columns:
        table: dict[tuple[int, int], Record] = {}
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


def assemble(rows: Sequence[tuple[Record, Record, Record]]) -> StepBatch:
    """Step columns of joined (trajectory, reward, inference) records.

    Raises:
        InputError: a reward lies on a step that does not count.
    """
    length = max(len(trajectory) for trajectory, _, _ in rows)

    def column(source: int, name: str) -> Tensor | None:
        if name not in rows[0][source].steps:
            return None
        return pad([np.asarray(row[source].steps[name], np.float32) for row in rows], length)

    def optional(source: int, name: str) -> Tensor:
        found = column(source, name)
        return torch.zeros(len(rows), length) if found is None else found

    # Row by row: one trajectory may have a mask where another, all of whose steps count, has none.
    mask = pad([counted(trajectory).astype(np.float32) for trajectory, _, _ in rows], length)
    rewards = optional(1, "rewards")
    if bool((lost := (rewards != 0) & (mask == 0)).any()):
        row, step = (int(place) for place in lost.nonzero()[0])
        raise InputError(
            f"{rows[row][0].identity}: a reward of {float(rewards[row, step]):g} lies on step "
            f"{step}, which does not count (its mask is 0), so nothing would be learned from it; "
            "place it on the last step that counts, as rlinf.rewards.base.Reward does"
        )
    old = column(2, "logprobs")
    # Of the version whose values the rewards are continued with after a cut: where those of the
    # inference stage are of a later one, temporal differences would mix two value functions.
    values = column(0, "values")
    return StepBatch(
        mask=mask,
        rewards=rewards,
        groups=torch.tensor([int(trajectory.info["group"]) for trajectory, _, _ in rows]),
        old_logprobs=optional(0, "logprobs") if old is None else old,
        rollout_logprobs=column(0, "logprobs"),
        terminated=optional(0, "terminated"),
        truncated=optional(0, "truncated"),
        bootstrap=optional(0, "bootstrap"),
        values=column(2, "values") if values is None else values,
        reference_logprobs=column(2, "reference_logprobs"),
    )
