"""Chunks of actions: what is valued of them, and what is imitated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from torch import Tensor

ValueLevel = Literal["chunk", "action"]
"""What a policy values of a chunk: the state that it begins in, or what is still to come at each of
its actions, all of which see that state."""
VALUES = "value_head.fc2."
"""The last layer of a head that says them."""


def with_values(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stored tensors, with a network's own :data:`VALUES` where those stored are of the other
    level, or of chunks of another length: that layer begins anew."""
    return {
        name: own[name] if name.startswith(VALUES) and own[name].shape != tensor.shape else tensor
        for name, tensor in stored.items()
    }


def chunks_of(actions: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each step of actions ``[T]`` or ``[T, D]`` the chunk that begins there, ``[T, C, ...]``,
    and which of its choices count (``submask`` of a trajectory), uint8 ``[T, C, 1]`` or
    ``[T, C, D]``: places behind the end have the last action again, which does not."""
    follows = np.arange(len(actions))[:, None] + np.arange(length)
    inside = follows < len(actions)
    chunks = actions[np.minimum(follows, len(actions) - 1)]
    choices = actions.shape[1] if actions.ndim > 1 else 1
    counts = np.broadcast_to(inside[..., None], (*inside.shape, choices))
    return chunks, counts.astype(np.uint8)
