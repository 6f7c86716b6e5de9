"""Shared code of vision-language-action policies: instruction tokens, and batches of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rlinf.data.episodes import decode_instruction
from rlinf.models.base import Batch


class InstructionTokenizer:
    """Converts instructions to padded token ids, with a cache."""

    def __init__(self, tokenize: Callable[[str], list[int]], *, pad_left: bool) -> None:
        """
        Args:
            tokenize: Returns the token ids of a text.
            pad_left: Whether to pad on the left; otherwise on the right.
        """
        self._pad_left = pad_left
        self._tokenize = functools.lru_cache(4096)(
            lambda row: tokenize(decode_instruction(np.frombuffer(row, np.uint8)))
        )

    def __call__(self, instructions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return token ids int64 ``[B, T, L]`` and their bool mask for instructions as bytes, uint8
        ``[B, T, N]`` (:mod:`rlinf.data.episodes`)."""
        flat = instructions.reshape(-1, instructions.shape[-1])
        rows = [self._tokenize(row.tobytes()) for row in flat]
        length = max(1, *map(len, rows))
        ids, mask = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), bool)
        for index, row in enumerate(rows):
            begin = length - len(row) if self._pad_left else 0
            ids[index, begin : begin + len(row)] = row
            mask[index, begin : begin + len(row)] = True
        shape = (*instructions.shape[:2], length)
        return torch.from_numpy(ids).reshape(shape), torch.from_numpy(mask).reshape(shape)


def instructions_or_empty(column: np.ndarray | None, count: int) -> np.ndarray:
    """Return the instructions of steps, uint8 ``[count, N]``; empty if the task has none."""
    return np.zeros((count, 1), np.uint8) if column is None else column


class FlatSteps:
    """The steps of a batch without its padding, so that the network does not compute padding."""

    def __init__(self, batch: Batch) -> None:
        self._mask = batch["mask"]
        self._rows = self._mask.flatten().nonzero()[:, 0]
        self.columns = {name: c.flatten(0, 1)[self._rows] for name, c in batch.items()}
        """The columns of the batch, ``[n, ...]``."""

    def scatter(self, column: Tensor) -> Tensor:
        """Return a column ``[n, ...]`` as ``[B, T, ...]``, with zeros in the padding."""
        out = column.new_zeros(self._mask.numel(), *column.shape[1:])
        out = out.index_copy(0, self._rows, column)
        return out.reshape(*self._mask.shape, *column.shape[1:])
