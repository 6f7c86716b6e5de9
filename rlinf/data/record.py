"""The record: what flows through every channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

Scalar = float | int | str
LARGE_ROW_BYTES = 1 << 10
"""Columns of steps whose rows have at least as much (images and the like) are read as they are
used."""


class RecordId(NamedTuple):
    """Who a record is. A retry produces the same iteration and sample with another attempt."""

    iteration: int
    sample: int
    attempt: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """What a consumer compares to drop duplicates."""
        return (self.iteration, self.sample)


@dataclass
class Record:
    """One item of a channel.

    ``steps`` are arrays with one common leading dimension ``T``: tokens of a response, steps of an
    episode, or rows of a request. ``context`` are arrays without it (a prompt, a last observation),
    ``info`` are numbers and strings (stop reason, answer, group): plain ones, whatever they are
    given as, so that a record in memory and the same one read from a file have one digest.
    """

    identity: RecordId
    steps: dict[str, np.ndarray] = field(default_factory=dict)
    context: dict[str, np.ndarray] = field(default_factory=dict)
    info: dict[str, Scalar] = field(default_factory=dict)
    _digest: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = {name: len(array) for name, array in self.steps.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"steps of one record must have one length, got {lengths}")
        if not all(type(value) in (int, float, str) for value in self.info.values()):
            self.info = {name: _plain(value) for name, value in self.info.items()}

    def slice_steps(self, start: int, stop: int) -> Record:
        """Its steps from ``start`` up to ``stop``, as views, with all else."""
        if (start, stop) == (0, len(self)):
            return self
        steps = {name: column[start:stop] for name, column in self.steps.items()}
        return Record(self.identity, steps, self.context, self.info)

    def digest(self) -> int:
        """64 bits of all it holds but the attempt, as it was when this was first asked."""
        if self._digest is None:
            state = xxhash.xxh3_64(repr((self.identity.key, sorted(self.info.items()))).encode())
            for columns in (self.steps, self.context):
                for name in sorted(columns):
                    array = np.ascontiguousarray(columns[name])
                    state.update(f"{name}\0{array.dtype.str}\0{array.shape}\n".encode())
                    state.update(array.view(np.uint8).data if array.size else b"")
            self._digest = state.intdigest()
        return self._digest

    def __len__(self) -> int:
        """Number of steps ``T``; 0 when the record has no step arrays."""
        for column in self.steps.values():
            return len(column)
        return 0


def _plain(value: Any) -> Any:
    """A number or a text as plain Python has it; anything else is refused where it is written."""
    if isinstance(value, bool | np.bool_ | np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    return str(value) if isinstance(value, np.str_) else value


def digest_records(records: Iterable[Record]) -> int:
    """64 bits of some records, in any order; see :func:`combine_digests`."""
    return combine_digests(record.digest() for record in records)


def combine_digests(digests: Iterable[int]) -> int:
    """Of parts the digest of the whole: a sum, in which equal parts do not cancel."""
    return sum(digests) % (1 << 64)
