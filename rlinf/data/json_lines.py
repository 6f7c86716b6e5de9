"""Rows of a JSON-lines file or of a table, each parsed when it is used.

Opening a file only finds where its lines begin: 20 bytes of memory for each row. Rows are checked
before a run, when held-out rows are searched in them (:func:`count_overlap`). A malformed row is an
error with its line number.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import xxhash

from rlinf.data.tables import convert_table, is_table, saved_splits
from rlinf.errors import DataError, name_key_in_memory_errors
from rlinf.yaml_file import check_is_file, not_utf8_error

log = logging.getLogger("rlinf")
T = TypeVar("T")
BOM = b"\xef\xbb\xbf"
"""Byte-order mark with which some editors begin a UTF-8 file; it is skipped."""
MAX_ROW_BYTES = 64 << 20
"""Maximum bytes of one row."""
BLOCK_BYTES = 1 << 20
"""Bytes that are read at once to find the lines."""
IS_SPACE = np.isin(np.arange(256), list(b" \t\r\n\v\f"))
"""Whether each byte is white space, bool ``[256]``."""
LARGE_FILE_ROWS = 100_000
"""From this many rows on, a line announces the check of all rows."""
MAX_OPEN_FILES = 16
"""Maximum number of files that stay open, each with its index, for the next reader."""


class JsonLinesFile(Sequence[T], Generic[T]):
    """A sequence of all or some rows of a JSON-lines file, a Parquet file or a saved Hugging Face
    data set, parsed on access.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or, on access, a row is malformed; the
            message names the line.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        parse: Callable[[str, dict[str, Any]], T],
        *,
        settings: str = "",
        row_text: Callable[[T], str] = repr,
    ) -> None:
        """
        Args:
            key: configuration key that names the file.
            parse: makes a row from its location (for messages) and its JSON object.
            settings: everything else on which ``parse`` and ``row_text`` depend, as a text.
            row_text: text of a row; rows with equal texts are equal.
        """
        self.path, self.key = path.expanduser(), key
        self._parse, self._settings, self._row_text = parse, settings, row_text
        if is_table(self.path):
            self._line_name, file = "row", convert_table(self.path, key)
        else:
            if splits := saved_splits(self.path):
                raise DataError(
                    f"{key}: {path} holds the splits {', '.join(splits)}; name the folder of one, "
                    f"such as {path / splits[0]}"
                )
            check_is_file(path, key, DataError)
            self._line_name, file = "line", self.path
        with name_key_in_memory_errors(key):
            self._file = _open_file(file, key, _read_stamp(file.stat()))
        self._rows = np.arange(len(self._file.starts))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> JsonLinesFile[T]: ...

    def __getitem__(self, index: int | slice) -> T | JsonLinesFile[T]:
        """Return a row, or a view of several rows; a view reads nothing."""
        if isinstance(index, slice):
            view: JsonLinesFile[T] = object.__new__(JsonLinesFile)
            vars(view).update(vars(self), _rows=self._rows[index])
            return view
        row, file = self._rows[index], self._file
        line = os.pread(file.fd, file.sizes[row], file.starts[row])
        self._reject_change()
        return self._parse_line(line, int(file.lines[row]))

    def check_rows(self) -> None:
        """Parse all rows of the file, once in a process.

        Raises:
            DataError: a row is malformed, or the file changed.
        """
        _ = self.digests

    @property
    def digests(self) -> np.ndarray:
        """``[N]`` uint64: digest of each row's text; equal rows have equal digests.

        All rows of the file are parsed, once in a process.

        Raises:
            DataError: a row is malformed, or the file changed.
        """
        digests = self._file.row_digests
        if self._settings not in digests:
            num_rows = len(self._file.starts)
            if num_rows >= LARGE_FILE_ROWS:
                log.info("%s: checking the %d rows of %s", self.key, num_rows, self.path)
            lines = enumerate(self._file.read_lines(), 1)
            rows = (self._parse_line(line, n) for n, line in lines if not line.isspace())
            with name_key_in_memory_errors(self.key):
                values = np.fromiter(map(_digest_of, map(self._row_text, rows)), np.uint64)
            self._reject_change()
            digests[self._settings] = values
        return digests[self._settings][self._rows]

    def _parse_line(self, line: bytes, number: int) -> T:
        location = f"{self.key}: {self.path}, {self._line_name} {number}"
        try:
            item = DECODER.decode(line.decode())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location}: not JSON ({str(error)[:100]})") from None
        if not isinstance(item, dict):
            raise DataError(f'{location}: expected an object, such as {{"question": ...}}')
        return self._parse(location, item)

    def _reject_change(self) -> None:
        """Raise an error if the file's bytes changed since it was opened."""
        if self._file.is_changed():
            raise DataError(f"{self.key}: {self.path} changed while it was in use; start again")


class _OpenFile:
    """A file that is open as long as this object exists, the positions of its rows, and whether it
    changed."""

    starts: np.ndarray
    """``[N]`` int64: offset of the first byte of each row."""
    sizes: np.ndarray
    """``[N]`` int64: size of each row in bytes."""
    lines: np.ndarray
    """``[N]`` int64: line number of each row, from 1."""

    def __init__(self, path: Path, key: str) -> None:
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(f"{key}: cannot read {path}: {reason}") from None
        self.row_digests: dict[str, np.ndarray] = {}
        """Digests of all rows, by the settings with which they were parsed."""
        self._stamp = _read_stamp(os.fstat(self.fd))
        self._digest = self._read_digest()
        self._first_byte = len(BOM) if os.pread(self.fd, len(BOM), 0) == BOM else 0
        self._find_rows(path, key)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)

    def read_lines(self) -> Iterator[bytes]:
        """Yield all lines, blank ones included."""
        with os.fdopen(os.dup(self.fd), "rb", buffering=BLOCK_BYTES) as file:
            file.seek(self._first_byte)
            yield from file

    def is_changed(self) -> bool:
        """Return whether the bytes changed since the file was opened.

        If only the modification time is new, the bytes are compared: ``touch``, a copy of the same
        bytes or the clock of a file server may set it.
        """
        stamp = _read_stamp(os.fstat(self.fd))
        if stamp == self._stamp:
            return False
        if stamp[0] != self._stamp[0] or self._read_digest() != self._digest:
            return True
        self._stamp = stamp
        return False

    def _find_rows(self, path: Path, key: str) -> None:
        """Find the lines that are not blank.

        Raises:
            DataError: there are none, a line is too long, or the file is not UTF-8.
        """
        decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
        begin = np.array([self._first_byte])
        starts, may_be_blank = list[np.ndarray](), list[np.ndarray]()
        for block in itertools.chain(self._blocks(), [b""]):
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, not block)
            except UnicodeDecodeError as error:
                place = position - pending + error.start
                raise not_utf8_error(path, key, DataError, place) from None
            data = np.frombuffer(block, np.uint8)
            begin = np.concatenate([begin, position + 1 + np.flatnonzero(data == ord("\n"))])
            is_inside = begin < position + len(block)
            starts.append(begin[is_inside])
            may_be_blank.append(IS_SPACE[data[starts[-1] - position]])
            begin, position = begin[~is_inside], position + len(block)
        self.starts = np.concatenate(starts)
        self.sizes = np.diff(self.starts, append=position)
        self.lines = np.arange(1, len(self.starts) + 1)
        if len(too_long := np.flatnonzero(self.sizes > MAX_ROW_BYTES)):
            raise DataError(
                f"{key}: {path}, line {too_long[0] + 1}: longer than {MAX_ROW_BYTES >> 20} MiB; "
                "expected one object on each line"
            )
        is_row = np.ones(len(self.starts), bool)
        for line in np.flatnonzero(np.concatenate(may_be_blank)):
            is_row[line] = bool(os.pread(self.fd, self.sizes[line], self.starts[line]).strip())
        if not is_row.any():
            raise DataError(f"{key}: {path} is empty")
        if not is_row.all():
            self.starts, self.sizes, self.lines = (
                column[is_row] for column in (self.starts, self.sizes, self.lines)
            )

    def _read_digest(self) -> str:
        digest = xxhash.xxh3_128()
        for block in self._blocks():
            digest.update(block)
        return digest.hexdigest()

    def _blocks(self) -> Iterator[bytes]:
        start = 0
        while block := os.pread(self.fd, BLOCK_BYTES, start):
            yield block
            start += len(block)


@lru_cache(maxsize=MAX_OPEN_FILES)
def _open_file(path: Path, key: str, stamp: tuple[int, int, int]) -> _OpenFile:
    """Open a file; the result is remembered until the file's stamp changes."""
    return _OpenFile(path, key)


def _read_stamp(stat: os.stat_result) -> tuple[int, int, int]:
    """Return size, modification time and inode; a change of the file changes one of them."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def count_overlap(
    training_sets: Sequence[Sequence[T]], test: Sequence[T], row_text: Callable[[T], str] = repr
) -> tuple[int, int]:
    """Return how many rows of ``test`` are also in a training set, and the length of ``test``. All
    rows are checked.

    Args:
        row_text: text of a row, if the rows are not a :class:`JsonLinesFile`.
    """
    training_digests = [_digests_of(rows, row_text) for rows in training_sets]
    test_digests = _digests_of(test, row_text)
    is_known = np.zeros(len(test), bool)
    for digests in training_digests:
        is_known |= np.isin(test_digests, digests)
    return int(is_known.sum()), len(test)


def _digests_of(rows: Sequence[T], row_text: Callable[[T], str]) -> np.ndarray:
    if isinstance(rows, JsonLinesFile):
        return rows.digests
    return np.array([_digest_of(row_text(row)) for row in rows], "u8")


def _digest_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


DECODER = json.JSONDecoder(parse_constant=_reject_constant)
