"""A replay buffer on disk: the newest transitions of a run, in one memory-mapped file.

The file is a ring of rows: transition ``n`` of the run is in slot ``n % slots``. Each iteration
appends its transitions once, and ``replay.json`` beside the ring lists the range and checksum of
each append. Rows are written and synced before ``replay.json`` is replaced, so an interrupted
append is not visible and is repeated. An iteration learns from its view
(:meth:`ReplayBuffer.view`): the newest ``capacity`` transitions after its append. The ring has room
for more, so that an iteration which is repeated after later appends sees the same rows.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rlinf.artifacts import sync_file, write_atomic
from rlinf.data.transitions import Transitions, dtype_fields, dtype_mismatch
from rlinf.errors import DataError

SCHEMA = 1
ROWS_FILE, STATE_FILE = "transitions.bin", "replay.json"
SPARE_APPENDS = 3
"""Appends of maximum size that fit into the ring beyond the capacity: two that follow a view while
it is in use, and one that is in progress."""


@dataclass(frozen=True)
class AppendedRange:
    """Transitions that one iteration added: numbers ``start`` to ``stop - 1`` of the run."""

    iteration: int
    start: int
    stop: int
    checksum: str


class ReplayView(Transitions):
    """The transitions that one iteration learns from, on disk."""

    def __init__(self, rows: np.ndarray, start: int, stop: int, num_new: int) -> None:
        """``rows``: the ring; ``start`` and ``stop``: range of the view in the run's transitions;
        ``num_new``: number of transitions that the iteration itself added."""
        self._rows, self.dtype, self.num_new = rows, rows.dtype, num_new
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(self._rows[(indices + self.start) % len(self._rows)])


class ReplayBuffer:
    """The replay buffer in a folder. One process at a time may append; any number may read."""

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype,
        *,
        capacity: int,
        max_append: int,
        spare: int = SPARE_APPENDS,
    ) -> None:
        """Open the buffer of a folder, or create an empty one.

        Args:
            dtype: type of a row; an existing buffer must have the same type.
            capacity: maximum number of transitions in a view.
            max_append: maximum number of transitions in one append.
            spare: see :data:`SPARE_APPENDS`.

        Raises:
            DataError: the buffer has rows of another type (the message names the field) or other
                sizes, or it is damaged or incomplete.
        """
        self.folder, self.dtype = folder, dtype
        self.capacity, self.max_append = capacity, max_append
        self.slots = capacity + spare * max_append
        """Number of rows of the ring."""
        self.appends: list[AppendedRange] = []
        """The appends of which rows are still in the ring, oldest first."""
        state = self._read_state()
        if state is None:
            if (folder / ROWS_FILE).exists():
                raise DataError(
                    f"{folder / STATE_FILE}: missing, so {ROWS_FILE} beside it cannot be used; "
                    "restore it from a copy, or start the run anew under another run.name"
                )
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Write the state first: a file of rows without a state means that the state was lost.
            self._commit([])
        else:
            self._check_state(state)
            self.appends = [AppendedRange(*entry) for entry in state["appends"]]
        self._open_rows()

    @property
    def total(self) -> int:
        """Number of transitions of the run so far, including overwritten ones."""
        return self.appends[-1].stop if self.appends else 0

    def append(self, iteration: int, rows: np.ndarray) -> AppendedRange:
        """Add the transitions of an iteration. Iterations append in order from 0.

        A repeated append of the same rows changes nothing. If this or a later iteration has
        already appended other rows (before the run was changed), these are dropped first.

        Args:
            rows: ``[n]`` of the buffer's type.

        Raises:
            DataError: wrong row type, too many rows, or the previous iteration has not appended.
        """
        if (wrong := dtype_mismatch(self.dtype, rows.dtype)) is not None:
            raise DataError(f"{self.folder}: rows of another type; {wrong}")
        if len(rows) > self.max_append:
            raise DataError(
                f"{self.folder}: an iteration adds {len(rows)} transitions, room is for "
                f"{self.max_append}"
            )
        checksum = xxhash.xxh3_128_hexdigest(rows.tobytes())
        for previous in self.appends:
            is_same = (previous.iteration, previous.checksum) == (iteration, checksum)
            if is_same and previous.stop - previous.start == len(rows):
                return previous
        earlier = [previous for previous in self.appends if previous.iteration < iteration]
        if len(earlier) < len(self.appends):
            start = earlier[-1].stop if earlier else self.appends[0].start
            if max(0, start - self.capacity) < self._first_intact():
                raise DataError(
                    f"{self.folder}: iteration {iteration} is done again, but its "
                    "transitions were overwritten since; start the run anew under another run.name"
                )
        expected = earlier[-1].iteration + 1 if earlier else 0
        if iteration != expected:
            raise DataError(
                f"{self.folder}: cannot add iteration {iteration}: iteration {expected} has added "
                + ("nothing" if expected else "nothing (the folder is empty)")
                + "; earlier transitions were lost, so start the run anew under another run.name"
            )
        if len(earlier) < len(self.appends):
            # Drop the later appends before any of their rows is overwritten.
            self._commit(earlier)
        start = self.total
        self._write(start, rows)
        added = AppendedRange(iteration, start, start + len(rows), checksum)
        oldest = max(0, added.stop - self.slots)
        self._commit([entry for entry in [*self.appends, added] if entry.stop >= oldest])
        return added

    def view(self, iteration: int) -> ReplayView:
        """Return the verified transitions for the update of ``iteration``, after its append.

        Raises:
            DataError: a row is damaged, the iteration has not appended, or its rows were
                overwritten.
        """
        own_append = next((a for a in self.appends if a.iteration == iteration), None)
        if own_append is None or max(0, own_append.stop - self.capacity) < self._first_intact():
            raise DataError(
                f"{self.folder}: the transitions of iteration {iteration} are not there: "
                + ("none were added" if own_append is None else "they were overwritten since")
                + "; start the run anew under another run.name"
            )
        stop, start = own_append.stop, max(0, own_append.stop - self.capacity)
        rows = np.memmap(self.folder / ROWS_FILE, self.dtype, "r", shape=(self.slots,))
        view = ReplayView(rows, start, stop, own_append.stop - own_append.start)
        for added in self.appends:  # verify those that are intact and overlap the view
            if self._first_intact() <= added.start <= added.stop <= stop and added.stop > start:
                slots = np.arange(added.start, added.stop) % self.slots
                if xxhash.xxh3_128_hexdigest(rows[slots].tobytes()) != added.checksum:
                    raise DataError(
                        f"{self.folder / ROWS_FILE}: transitions of iteration {added.iteration} "
                        "are damaged; start the run anew under another run.name"
                    )
        return view

    def _first_intact(self) -> int:
        """Return the number of the oldest transition that even an interrupted append, of the
        maximum size, cannot have overwritten."""
        return max(0, self.total + self.max_append - self.slots)

    def _write(self, start: int, rows: np.ndarray) -> None:
        """Write rows into the ring as transitions ``start``, ``start + 1``, ..., and sync them."""
        handle = os.open(self.folder / ROWS_FILE, os.O_RDWR)
        try:
            size, first_slot = self.dtype.itemsize, start % self.slots
            until_wrap = self.slots - first_slot
            for part, slot in ((rows[:until_wrap], first_slot), (rows[until_wrap:], 0)):
                unwritten, offset = memoryview(part.tobytes()), slot * size
                while unwritten:
                    written = os.pwrite(handle, unwritten, offset)
                    unwritten, offset = unwritten[written:], offset + written
            os.fsync(handle)
        finally:
            os.close(handle)

    def _commit(self, appends: list[AppendedRange]) -> None:
        state = {
            "schema": SCHEMA,
            "fields": dtype_fields(self.dtype),
            "capacity": self.capacity,
            "slots": self.slots,
            "most": self.max_append,
            "appends": [[a.iteration, a.start, a.stop, a.checksum] for a in appends],
        }
        write_atomic(self.folder / STATE_FILE, json.dumps(state), private=True)
        self.appends = appends

    def _read_state(self) -> dict[str, Any] | None:
        path = self.folder / STATE_FILE
        try:
            state: dict[str, Any] = json.loads(path.read_text())
            keys = {"schema", "fields", "capacity", "slots", "most", "appends"}
            if not isinstance(state, dict) or set(state) != keys:
                raise ValueError("not the state of a replay buffer")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{path}: damaged ({error})") from None
        return state

    def _check_state(self, state: dict[str, Any]) -> None:
        if state["schema"] != SCHEMA:
            raise DataError(f"{self.folder}: schema {state['schema']}; this program reads {SCHEMA}")
        stored = np.dtype([(name, kind, tuple(shape)) for name, kind, shape in state["fields"]])
        if (wrong := dtype_mismatch(self.dtype, stored)) is not None:
            raise DataError(
                f"{self.folder}: a buffer of another schema; {wrong}. Start the run anew under "
                "another run.name"
            )
        sizes = {"capacity": self.capacity, "most": self.max_append, "slots": self.slots}
        for key, size in sizes.items():
            if state[key] != size:
                raise DataError(
                    f"{self.folder}: {key} is {state[key]}, not {size}; it follows "
                    "from algorithm.buffer_size and rollout, which must not change within a run"
                )

    def _open_rows(self) -> None:
        """Check that the file of rows is complete; create it for an empty buffer.

        Raises:
            DataError: the file is damaged.
        """
        path, expected = self.folder / ROWS_FILE, self.slots * self.dtype.itemsize
        size = path.stat().st_size if path.exists() else 0
        if size == expected:
            return
        if self.appends:
            raise DataError(f"{path}: damaged: {size} bytes of {expected}")
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, expected)
            os.fsync(handle)
        finally:
            os.close(handle)
        sync_file(self.folder)
