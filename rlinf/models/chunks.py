"""Chunks of actions to imitate: at each step of an expert's episode the actions that follow."""

from __future__ import annotations

import numpy as np


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
