"""Transitions that were there before a run: demonstrations, or a data set.

Either trajectories as rollouts write them (a ``trajectories-*.h5`` file, or a folder of them), a
folder of LeRobot's format (:mod:`rlinf.data.lerobot`), or one HDF5 file with a data set per column:
``observations`` ``[N, D]``, ``actions`` ``[N, A]``, ``rewards`` ``[N]``, ``terminated`` ``[N]`` (or
``terminals``), and optionally ``truncated`` (or ``timeouts``) and ``next_observations``.

Rewards are those that the simulator gave, as in the trajectories of rollouts: what a run makes of
the ones it collects, it makes of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import h5py
import numpy as np

from rlinf.channels.file import FileReader
from rlinf.data import lerobot
from rlinf.data.record import Identity, Record
from rlinf.data.transitions import Held, concatenated, row_type, transitions_of
from rlinf.errors import DataError, InputError

ALSO = {"terminated": "terminals", "truncated": "timeouts"}
"""Other names of columns (those of D4RL)."""
WANTED = ("observations", "actions", "rewards", "terminated")
VECTORS = ("observations", "actions", "next_observations")
OURS = "trajectories-*.h5"
Judge = Callable[[Record], np.ndarray]
"""The rewards of a record's steps, ``[T]``, of those that the simulator gave."""


def check(path: Path) -> None:
    """See that there are transitions, without reading them.

    Raises:
        DataError: there are none; names the column that is missing.
    """
    if path.is_dir():
        if lerobot.is_dataset(path):
            lerobot.Dataset(path)
        else:
            _files(path)
        return
    with _open(path) as file:
        if "identity" in file:
            return
        _columns(path, file)


def as_given(record: Record) -> np.ndarray:
    """The rewards that the simulator gave, ``[T]``."""
    return np.asarray(record.steps["rewards"])


def load(path: Path, judge: Judge = as_given) -> Held:
    """All transitions of a file or folder.

    Where a column file does not say what came next, that is the row after; a row whose next one
    begins another episode without an end of its own (``truncated``), or is missing, is left out.

    Args:
        judge: of a column file it gets one record of all rows, in which episodes have no ends.

    Raises:
        DataError: it holds no transitions.
    """
    if path.is_dir():
        if lerobot.is_dataset(path):
            return _transitions(path, lerobot.Dataset(path).records(images=False), judge)
        return _records(path, _files(path), judge)
    with _open(path) as file:
        if "identity" not in file:
            return Held(_rows(path, file, judge))
    return _records(path, [path], judge)


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob(OURS))
    if not found:
        raise DataError(f"algorithm.prior: {folder} has no file {OURS}")
    return found


def _open(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise DataError(f"algorithm.prior: {path}: no readable HDF5 file ({error})") from None


def _records(path: Path, files: list[Path], judge: Judge) -> Held:
    try:
        return _transitions(path, FileReader(files), judge)
    except ValueError as error:
        raise DataError(f"algorithm.prior: {path}: {error}") from None


def _transitions(path: Path, records: Iterable[Record], judge: Judge) -> Held:
    try:
        return Held(concatenated(transitions_of(r, judge(r)) for r in records))
    except (ValueError, KeyError, InputError) as error:
        raise DataError(f"algorithm.prior: {path}: {error}") from None


def _columns(path: Path, file: h5py.File) -> dict[str, h5py.Dataset]:
    """The data sets by our names, of one length."""
    found: dict[str, h5py.Dataset] = {}
    for name in (*WANTED, "truncated", "next_observations"):
        for own in (name, ALSO.get(name, name)):
            if own in file and isinstance(file[own], h5py.Dataset):
                found[name] = file[own]
    lacking = [name for name in WANTED if name not in found]
    if lacking:
        also = f" (or {ALSO[lacking[0]]})" if lacking[0] in ALSO else ""
        raise DataError(
            f"algorithm.prior: {path} has no data set {lacking[0]!r}{also}; it has "
            f"{', '.join(sorted(file)) or 'none'}"
        )
    count = len(found["observations"])
    for name, column in found.items():
        if len(column) != count or column.ndim != 1 + (name in VECTORS):
            raise DataError(
                f"algorithm.prior: {path}: {name} is {column.shape}, with {count} observations"
            )
    return found


def _rows(path: Path, file: h5py.File, judge: Judge) -> np.ndarray:
    columns = _columns(path, file)
    seen, actions = columns["observations"], columns["actions"]
    rows = np.zeros(len(seen), row_type(seen.shape[1], actions.shape[1]))
    for name, column in columns.items():
        rows[name] = column[:]
    given = {name: rows[name] for name in ("observations", "actions", "rewards")}
    rows["rewards"] = judge(Record(Identity(0, 0), given))
    kept = np.ones(len(rows), bool)
    if "next_observations" not in columns and len(rows):
        rows["next_observations"][:-1] = rows["observations"][1:]
        ended = rows["terminated"] == 1
        rows["next_observations"][ended] = rows["observations"][ended]
        # What was seen after a cut is not in the file; nor is what followed its last row.
        kept = ended | (rows["truncated"] == 0)
        kept[-1] &= ended[-1]
    if not kept.any():
        raise DataError(f"algorithm.prior: {path} holds no transition")
    return rows[kept]
