"""Actions as tokens: numbers within their statistics, in bins, as OpenVLA has them.

A number is put into [-1, 1] by the 1 % and 99 % quantiles of a data set and falls into one of 255
bins between 256 edges; the last ids of the vocabulary stand for them, in reverse order (arXiv
2406.09246, section 3.2). Two of the 256 tokens stand for the last bin: what was sampled is a token,
and is never found again from its action.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.checked import read_text
from rlinf.errors import DataError

STATISTICS = "dataset_statistics.json"
EPS = 1e-8
"""What OpenVLA-OFT adds to the width of an interval."""


@dataclass(frozen=True)
class ActionBins:
    """Tokens of action vectors of ``D`` numbers."""

    low: np.ndarray
    """``[D]``, of a number where its bins begin."""
    high: np.ndarray
    """``[D]``, where they end."""
    scaled: np.ndarray
    """bool ``[D]``; others are in [-1, 1] as they are (a gripper, say)."""
    first: int
    """Id of the first of the tokens."""
    count: int = 256
    """How many tokens there are."""

    @classmethod
    def of(cls, statistics: Mapping[str, Any], first: int, count: int) -> ActionBins:
        """Those of one data set's ``action`` in a :data:`STATISTICS` file.

        Raises:
            KeyError, ValueError: it is malformed.
        """
        low, high = (np.asarray(statistics[name], np.float64) for name in ("q01", "q99"))
        scaled = np.asarray(statistics.get("mask", [True] * len(low)), bool)
        if not (low.ndim == 1 and low.shape == high.shape == scaled.shape and (low <= high).all()):
            raise ValueError("q01, q99 and mask are not of one length, or q01 is above q99")
        return cls(low, high, scaled, first, count)

    @property
    def _edges(self) -> np.ndarray:
        return np.linspace(-1, 1, self.count)

    def tokens(self, actions: np.ndarray) -> np.ndarray:
        """Ids int64 ``[..., D]`` of actions ``[..., D]``; those beyond the bins get the outermost
        ones'."""
        width = self.high - self.low + EPS
        within = np.where(self.scaled, 2 * (actions - self.low) / width - 1, actions)
        bins = np.digitize(np.clip(within, -1, 1), self._edges)
        found: np.ndarray = (self.first + self.count - bins).astype(np.int64)
        return found

    def actions(self, tokens: Tensor) -> Tensor:
        """Middles of the bins that ids ``[..., D]`` stand for, float32."""
        edges = self._edges
        centers = torch.tensor((edges[1:] + edges[:-1]) / 2, device=tokens.device)
        last = self.first + self.count - 1
        within = centers[(last - tokens).clamp(0, self.count - 2)]
        low, width, scaled = (
            torch.tensor(column, device=tokens.device)
            for column in (self.low, self.high - self.low + EPS, self.scaled)
        )
        return torch.where(scaled, (within + 1) / 2 * width + low, within).float()


def statistics_of(actions: np.ndarray) -> dict[str, list[Any]]:
    """The ``action`` of a :data:`STATISTICS` file, of the actions ``[N, D]`` of a data set.

    A number that is always the same is not scaled.
    """
    low, high = np.quantile(actions, [0.01, 0.99], axis=0)
    columns = {
        "q01": low,
        "q99": high,
        "min": actions.min(0),
        "max": actions.max(0),
        "mean": actions.mean(0),
        "std": actions.std(0),
        "mask": high > low,
    }
    return {name: column.tolist() for name, column in columns.items()}


def read_statistics(path: Path, dataset: str | None, where: str) -> tuple[str, dict[str, Any]]:
    """The name of a data set in a :data:`STATISTICS` file, and its statistics.

    Args:
        dataset: which one; None: the only one.
        where: the key that errors name.

    Raises:
        DataError: it cannot be read, or has not this one.
    """
    try:
        known = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise _malformed(where, str(path), error) from None
    return choose_statistics(known, dataset, where, str(path))


def choose_statistics(
    known: Any, dataset: str | None, where: str, place: str
) -> tuple[str, dict[str, Any]]:
    """The same of what such a file holds; ``place``: where it stood.

    Raises:
        DataError: it is malformed, or has not this one.
    """
    try:
        names = sorted(known)
        name = names[0] if dataset is None and len(names) == 1 else dataset
        if name not in known:
            raise DataError(
                f"model.dataset: {place} has the data sets {', '.join(names)}; choose one of them"
            )
        ActionBins.of(known[name]["action"], 0, 2)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _malformed(where, place, error) from None
    return str(name), known[name]


def _malformed(where: str, place: str, error: Exception) -> DataError:
    return DataError(
        f"{where}: {place} is no {STATISTICS} ({error}); it has of each data set the quantiles q01 "
        "and q99 of its action, a list each"
    )
