"""Chunks of actions: what is valued of them, and what is imitated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

log = logging.getLogger(__name__)
ValueLevel = Literal["chunk", "action"]
"""What a policy values of a chunk: the state that it begins in, or what is still to come at each of
its actions, all of which see that state."""
VALUES = "value_head.fc2."
"""The last layer of a head that says them."""


def with_values(
    stored: Mapping[str, Tensor], own: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Tensors that a folder stores, with a network's own :data:`VALUES` where those stored are of
    the other level, or of chunks of another length: that layer begins anew, and a warning says so.
    """
    unlike = [n for n, t in stored.items() if n.startswith(VALUES) and t.shape != own[n].shape]
    if unlike:
        count, there = len(own[unlike[0]]), len(stored[unlike[0]])
        log.warning(
            "model.path: %s values %d at each step, and %d are to be valued (model.value_level, "
            "model.chunk): the last layer of its value head begins anew",
            folder,
            there,
            count,
        )
    return {**stored, **{name: own[name] for name in unlike}}


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
