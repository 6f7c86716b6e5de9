"""Rows of unequal length as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def pad(arrays: Sequence[np.ndarray], length: int, value: float = 0) -> Tensor:
    """Stack arrays ``[n_i, ...]`` into ``[B, length, ...]``, filled with ``value`` on the right."""
    first = arrays[0]
    out = np.full((len(arrays), length, *first.shape[1:]), value, first.dtype)
    filled = np.arange(length) < np.array([len(array) for array in arrays])[:, None]
    # All at once: a thousand assignments, one for each array, take longer than some forward passes.
    out[filled] = np.concatenate(arrays)
    return torch.from_numpy(out)
