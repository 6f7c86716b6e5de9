"""Rows of a JSON-lines file or of a table, each parsed when it is used.

The file is checked once, row by row, and only an index of the row offsets stays in memory: about
20 MB for a million rows. A malformed row is an error before a run begins, with its line number. The
index of a large file is stored in the user's cache folder (:mod:`rlinf.data.array_cache`), under
the digest of the file's bytes.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import xxhash

from rlinf.data.array_cache import cached_arrays
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
"""Bytes that are read at once for the digest and the UTF-8 check."""
MIN_CACHED_BYTES = 32 << 20
"""Minimum size of a file whose index is cached; the index of a smaller file is fast to build."""


@dataclass(frozen=True)
class JsonLinesIndex:
    """Positions of the rows in a file."""

    offsets: np.ndarray
    """``[N]`` uint64: offset of the first byte of each row."""
    sizes: np.ndarray
    """``[N]`` uint32: size of each row in bytes."""
    lines: np.ndarray
    """``[N]`` uint32: line number of each row, from 1."""
    digests: np.ndarray
    """``[N]`` uint64: digest of each row's content; equal rows have equal digests."""
    flags: np.ndarray
    """``[F]`` bool: properties of the whole file; see ``observe`` of :class:`JsonLinesFile`."""


class JsonLinesFile(Sequence[T], Generic[T]):
    """A sequence of all or some rows of a JSON-lines file, a Parquet file or a saved Hugging Face
    data set, parsed on access.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or a row is malformed; the message names
            the line.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        parse: Callable[[str, dict[str, Any], np.ndarray], T],
        *,
        settings: str = "",
        row_text: Callable[[T], str] = repr,
        observe: Callable[[dict[str, Any], np.ndarray], None] = lambda item, flags: None,
        num_flags: int = 0,
    ) -> None:
        """
        Args:
            key: configuration key that names the file.
            parse: makes a row from its location (for messages), its JSON object and the file's
                flags.
            settings: everything else on which ``parse`` and ``row_text`` depend, as a text; part
                of the cache key.
            row_text: text of a row; rows with equal texts are equal.
            observe: sets flags of the file from the JSON object of a row.
        """
        self.path, self.key, self._parse = path.expanduser(), key, parse
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
        self._file = _OpenFile(file, key)
        self._flags = np.zeros(num_flags, bool)
        self.digest = self._file.digest

        def build_columns() -> dict[str, np.ndarray]:
            if is_large:
                log.info("%s: checking all rows of %s; this is done once", key, path)
            columns = vars(self._build_index(row_text, observe))
            self._reject_change()  # Otherwise the cache key would be the digest of other bytes.
            return columns

        address = f"{self.digest} {settings}"
        is_large = self._file.size >= MIN_CACHED_BYTES
        with name_key_in_memory_errors(key):
            columns = cached_arrays("rows", address, build_columns, use_file=is_large)
        self._index = JsonLinesIndex(**columns)
        self._flags = self._index.flags
        self._rows = np.arange(len(self._index.offsets))

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
        return self._read_row(index)[1]

    def read_object(self, index: int) -> dict[str, Any]:
        """Return the JSON object of a row, with all of its fields."""
        return self._read_row(index)[0]

    def _read_row(self, index: int) -> tuple[dict[str, Any], T]:
        row = int(self._rows[index])
        start, size = int(self._index.offsets[row]), int(self._index.sizes[row])
        line = os.pread(self._file.fd, size, start)
        self._reject_change()
        return self._parse_line(line, int(self._index.lines[row]))

    @property
    def digests(self) -> np.ndarray:
        """``[N]`` uint64: digest of each row's content; equal rows have equal digests."""
        return self._index.digests[self._rows]

    def _reject_change(self) -> None:
        """Raise an error if the file's bytes changed since it was opened."""
        if self._file.is_changed():
            raise DataError(f"{self.key}: {self.path} changed while it was in use; start again")

    def _parse_line(self, line: bytes, number: int) -> tuple[dict[str, Any], T]:
        """Return the JSON object of a line, and the row that ``parse`` makes from it."""
        location = f"{self.key}: {self.path}, {self._line_name} {number}"
        try:
            item = json.loads(line.decode(), parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location}: not JSON ({str(error)[:100]})") from None
        if not isinstance(item, dict):
            raise DataError(f'{location}: expected an object, such as {{"question": ...}}')
        return item, self._parse(location, item, self._flags)

    def _build_index(
        self, row_text: Callable[[T], str], observe: Callable[[dict[str, Any], np.ndarray], None]
    ) -> JsonLinesIndex:
        """Read and check the file row by row and return its index."""
        if (position := self._file.find_invalid_byte()) is not None:
            raise not_utf8_error(self.path, self.key, DataError, position)
        offsets, sizes, lines, digests = (_Column(kind) for kind in ("u8", "u4", "u4", "u8"))
        for number, start, line in self._lines():
            if not line.decode().strip():
                continue
            item, row = self._parse_line(line, number)
            observe(item, self._flags)
            for column, value in (
                (offsets, start),
                (sizes, len(line)),
                (lines, number),
                (digests, _digest_of(row_text(row))),
            ):
                column.add(value)
        if not len(offsets.array()):
            raise DataError(f"{self.key}: {self.path} is empty")
        return JsonLinesIndex(
            offsets.array(), sizes.array(), lines.array(), digests.array(), self._flags
        )

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the number, the offset and the bytes of each line."""
        # Read the open file, because another file may have replaced it under this path.
        with os.fdopen(os.dup(self._file.fd), "rb") as file:
            file.seek(0)
            start = len(BOM) if file.read(len(BOM)) == BOM else 0
            file.seek(start)
            number = 0
            while line := file.readline(MAX_ROW_BYTES + 1):
                number += 1
                if len(line) > MAX_ROW_BYTES:
                    raise DataError(
                        f"{self.key}: {self.path}, line {number}: longer than "
                        f"{MAX_ROW_BYTES >> 20} MiB; expected one object on each line"
                    )
                yield number, start, line
                start += len(line)


class _Column:
    """An array that grows by one number at a time; full blocks are NumPy arrays."""

    def __init__(self, dtype: str) -> None:
        self._dtype, self._blocks, self._newest = dtype, list[np.ndarray](), list[int]()

    def add(self, value: int) -> None:
        self._newest.append(value)
        if len(self._newest) == 1 << 16:
            self._blocks, self._newest = [*self._blocks, np.array(self._newest, self._dtype)], []

    def array(self) -> np.ndarray:
        return np.concatenate([*self._blocks, np.array(self._newest, self._dtype)])


class _OpenFile:
    """A file that is open as long as this object exists, and whose changes are noticed."""

    def __init__(self, path: Path, key: str) -> None:
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(f"{key}: cannot read {path}: {reason}") from None
        self._stamp = self._read_stamp()
        self.digest = self._read_digest()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)

    @property
    def size(self) -> int:
        """Size of the file in bytes when it was opened."""
        return self._stamp[0]

    def is_changed(self) -> bool:
        """Return whether the bytes changed since the file was opened.

        If only the modification time is new, the bytes are compared: ``touch``, a copy of the same
        bytes or the clock of a file server may set it.
        """
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        if stamp[0] != self.size or self._read_digest() != self.digest:
            return True
        self._stamp = stamp
        return False

    def _read_stamp(self) -> tuple[int, int, int]:
        """Return size, modification time and inode; a change of the file changes one of them."""
        stat = os.fstat(self.fd)
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def _read_digest(self) -> str:
        digest = xxhash.xxh3_128()
        for block in self._blocks():
            digest.update(block)
        return digest.hexdigest()

    def find_invalid_byte(self) -> int | None:
        """Return the position of the first byte that is not UTF-8. None: the file is UTF-8."""
        decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
        for block in itertools.chain(self._blocks(), [b""]):
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, not block)
            except UnicodeDecodeError as error:
                return start - pending + error.start
            start += len(block)
        return None

    def _blocks(self) -> Iterator[bytes]:
        start = 0
        while block := os.pread(self.fd, BLOCK_BYTES, start):
            yield block
            start += len(block)


def count_overlap(
    training_sets: Sequence[Sequence[T]], test: Sequence[T], row_text: Callable[[T], str] = repr
) -> tuple[int, int]:
    """Return how many rows of ``test`` are also in a training set, and the length of ``test``.

    Args:
        row_text: text of a row, if the rows are not a :class:`JsonLinesFile`.
    """
    test_digests = _digests_of(test, row_text)
    is_known = np.zeros(len(test), bool)
    for rows in training_sets:
        is_known |= np.isin(test_digests, _digests_of(rows, row_text))
    return int(is_known.sum()), len(test)


def _digests_of(rows: Sequence[T], row_text: Callable[[T], str]) -> np.ndarray:
    if isinstance(rows, JsonLinesFile):
        return rows.digests
    return np.array([_digest_of(row_text(row)) for row in rows], "u8")


def _digest_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
