"""How a division of GPUs over pools may be changed in one step."""

from __future__ import annotations

import itertools

import numpy as np

Array = np.ndarray


def moves(pools: int, sizes: Array, *, idle: bool) -> Array:
    """Changes of a division ``[moves, pools, kinds]``: GPUs of a kind from pool to pool.

    With idle GPUs allowed also from and to none; and a GPU of one kind for one of another.

    Args:
        sizes: GPUs of each kind.
    """
    kinds = len(sizes)
    places = [*range(pools), *([None] if idle else [])]
    out = []
    for k, most in enumerate(sizes):
        for size in steps(int(most)):
            for a, b in itertools.permutations(places, 2):
                move = np.zeros((pools, kinds), dtype=np.int64)
                if a is not None:
                    move[a, k] = -size
                if b is not None:
                    move[b, k] = size
                out.append(move)
    for a, b in itertools.combinations(range(pools), 2):
        for k, j in itertools.permutations(range(kinds), 2):
            for size in steps(int(min(sizes[k], sizes[j]))):
                move = np.zeros((pools, kinds), dtype=np.int64)
                move[a, k], move[b, k], move[a, j], move[b, j] = -size, size, size, -size
                out.append(move)
    return np.array(out, np.int64).reshape(-1, pools, kinds)


def steps(most: int) -> list[int]:
    """How many GPUs are moved at once: few, and ever larger jumps."""
    sizes = {1, 2, 3, 4, 5, 6, 7, *(2**i for i in range(3, 13)), *(3 * 2**i for i in range(2, 11))}
    return sorted(size for size in sizes if size <= most)


def without_a_kind(state: Array) -> Array:
    """The division without a kind, in one pool or in all: ``[n, pools, kinds]``.

    A queue or losses may be worth avoiding, but only altogether.
    """
    out = []
    for k in np.flatnonzero(state.any(0)):
        for pools in (slice(None), *np.flatnonzero(state[:, k])):
            changed = state.copy()
            changed[pools, k] = 0
            out.append(changed)
    return np.array(out, np.int64).reshape(-1, *state.shape)
