"""The order in which training problems are drawn, from one set or from several with weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlinf.seeding import generator

BLOCK = 1000
"""Number of successive draws whose shares of the sets are exact, up to rounding."""


class ProblemMixture:
    """Sets of problems that are drawn by their weights.

    The problem of a draw depends only on seed and number of the draw. Of :data:`BLOCK` successive
    draws, each set has the share that its weight says, in random order. Each set is drawn without
    replacement, in a new order for each of its epochs.
    """

    def __init__(self, sizes: Mapping[str, int], weights: Mapping[str, float]) -> None:
        """
        Args:
            sizes: number of problems of each set, at least 1, by name; at least one set.
            weights: relative frequency of each set, above 0.
        """
        self._sizes = dict(sizes)
        self._names = list(sizes)
        self._quotas = _quotas(np.array([weights[name] for name in self._names], np.float64))
        self._block: tuple[tuple[int, int], np.ndarray] | None = None
        """The current block, as (seed, number), and the set of each of its draws."""
        self._orders: dict[str, tuple[tuple[int, int], np.ndarray]] = {}
        """The current epoch of each set, as (seed, epoch), and its order of problems."""

    def shares(self) -> dict[str, float]:
        """Return the share of each set in the draws."""
        return dict(zip(self._names, (self._quotas / BLOCK).tolist(), strict=True))

    def locate(self, seed: int, draw: int) -> tuple[str, int]:
        """Return the set of a draw, and the index of the problem in it.

        Args:
            draw: number of the draw in the run, from 0.
        """
        block, position = divmod(draw, BLOCK)
        sets = self._sets_of_block(seed, block)
        chosen = int(sets[position])
        rank = int((sets[:position] == chosen).sum())
        name = self._names[chosen]
        epoch, place = divmod(block * int(self._quotas[chosen]) + rank, self._sizes[name])
        return name, int(self._epoch_order(seed, epoch, name)[place])

    def _sets_of_block(self, seed: int, block: int) -> np.ndarray:
        if self._block is None or self._block[0] != (seed, block):
            sets = np.repeat(np.arange(len(self._names)), self._quotas)
            if len(self._names) > 1:
                sets = generator(seed, "mixture", block).permutation(sets)
            self._block = ((seed, block), sets)
        return self._block[1]

    def _epoch_order(self, seed: int, epoch: int, name: str) -> np.ndarray:
        key, order = self._orders.get(name, (None, None))
        if key != (seed, epoch) or order is None:
            # The address is "jsonl" for all tasks, so that older runs give the same results.
            address = [name] if name else []
            order = generator(seed, "jsonl", "epoch", epoch, *address).permutation(
                self._sizes[name]
            )
            self._orders[name] = ((seed, epoch), order)
        return order


def _quotas(weights: np.ndarray) -> np.ndarray:
    """Return the number of draws of each set in a block, int64, at least 1; the largest remainders
    are rounded up."""
    shares = weights / weights.sum() * BLOCK
    quotas = np.floor(shares).astype(np.int64)
    largest = np.argsort(quotas - shares, kind="stable")
    quotas[largest[: BLOCK - int(quotas.sum())]] += 1
    for index in np.flatnonzero(quotas == 0):
        quotas[np.argmax(quotas)] -= 1
        quotas[index] = 1
    return quotas
