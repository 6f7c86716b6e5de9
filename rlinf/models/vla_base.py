"""What policies that act by chunks on pictures and an instruction share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rlinf.data.episodes import decode_instruction
from rlinf.models.base import Batch


class InstructionTokenizer:
    """Token ids of instructions, each read once."""

    def __init__(self, tokenize: Callable[[str], list[int]], *, pad_start: bool) -> None:
        """
        Args:
            read: the ids of a text.
            left: fill rows up on the left, else on the right.
        """
        self._left = pad_start
        self._of = functools.lru_cache(4096)(
            lambda row: tokenize(decode_instruction(np.frombuffer(row, np.uint8)))
        )

    def __call__(self, instructions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids int64 ``[B, T, L]``, and where they are, bool, of instructions uint8 ``[B, T, N]``
        (:mod:`rlinf.data.episodes`)."""
        flat = instructions.reshape(-1, instructions.shape[-1])
        rows = [self._of(row.tobytes()) for row in flat]
        length = max(1, *map(len, rows))
        ids, there = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), bool)
        for place, row in enumerate(rows):
            begin = length - len(row) if self._left else 0
            ids[place, begin : begin + len(row)] = row
            there[place, begin : begin + len(row)] = True
        shape = (*instructions.shape[:2], length)
        return torch.from_numpy(ids).reshape(shape), torch.from_numpy(there).reshape(shape)


def instructions_or_empty(column: np.ndarray | None, count: int) -> np.ndarray:
    """Of steps, uint8 ``[count, N]``; empty ones where a task has none."""
    return np.zeros((count, 1), np.uint8) if column is None else column


class FlatSteps:
    """The steps of a batch side by side, without its padding, which would cost as much."""

    def __init__(self, batch: Batch) -> None:
        self._mask = batch["mask"]
        self._rows = self._mask.flatten().nonzero()[:, 0]
        self.columns = {name: c.flatten(0, 1)[self._rows] for name, c in batch.items()}
        """``[n, ...]``."""

    def scatter(self, column: Tensor) -> Tensor:
        """``[n, ...]`` as ``[B, T, ...]``, with zeros in the padding."""
        out = column.new_zeros(self._mask.numel(), *column.shape[1:])
        out = out.index_copy(0, self._rows, column)
        return out.reshape(*self._mask.shape, *column.shape[1:])
