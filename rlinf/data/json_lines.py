"""Rows of a JSON-lines file that are read when they are used.

The file is checked once, row by row, in bounded memory; what stays is an index of where each row
begins. So a file of a million rows takes some 20 MB of a process, and a malformed row is refused by
its line before a run begins. The index of a large file is kept in the user's cache folder
(:mod:`rlinf.data.array_cache`), under the digest of the file's bytes.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import xxhash

from rlinf.data.array_cache import cached_arrays
from rlinf.errors import DataError, name_key_in_memory_errors
from rlinf.yaml_file import check_is_file, not_utf8_error

T = TypeVar("T")
BOM = b"\xef\xbb\xbf"
MAX_ROW_BYTES = 64 << 20
"""Bytes of one row."""
BLOCK_BYTES = 1 << 20
MIN_CACHED_BYTES = 32 << 20
"""Bytes of a file whose index is kept in the cache folder; that of a smaller one is made fast."""


@dataclass(frozen=True)
class JsonLinesIndex:
    """Where the rows of a file are."""

    offsets: np.ndarray
    """``[N]`` uint64: the first byte of each."""
    sizes: np.ndarray
    """``[N]`` uint32: bytes of each."""
    lines: np.ndarray
    """``[N]`` uint32: its line, from 1."""
    digests: np.ndarray
    """``[N]`` uint64 of what makes two rows the same."""
    flags: np.ndarray
    """``[F]`` bool: what a reader notes of all rows together."""


class JsonLinesFile(Sequence[T], Generic[T]):
    """The rows of a JSON-lines file, or some of them, each parsed when it is asked for.

    Raises:
        DataError: missing or empty file, not UTF-8, or a row is malformed; names file and line.
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
        flags: int = 0,
    ) -> None:
        """
        Args:
            key: of the configuration, which names the file.
            parse: makes a row of where it stands (for messages), its object and the flags.
            settings: what ``parse`` and ``same`` depend on beside the row, part of the index's
                address in the cache.
            same: text of a row; rows with equal texts are the same.
            note: sets flags of the whole file by one object.
            flags: how many there are.
        """
        check_is_file(path, key, DataError)
        self.path, self.key, self._parse = path.expanduser(), key, parse
        self._file = _Descriptor(self.path, key)
        self._flags = np.zeros(flags, bool)
        self.digest = self._file.digest

        def index() -> dict[str, np.ndarray]:
            made = vars(self._indexed(row_text, observe))
            self._refuse_change()  # Else the index would be kept under the digest of other bytes.
            return made

        address = f"{self.digest} {settings}"
        with name_key_in_memory_errors(key):
            known = cached_arrays("rows", address, index, large=self._file.size >= MIN_CACHED_BYTES)
        self._index = JsonLinesIndex(**known)
        self._flags = self._index.flags
        self._rows = np.arange(len(self._index.offsets))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> JsonLinesFile[T]: ...

    def __getitem__(self, place: int | slice) -> T | JsonLinesFile[T]:
        """Return a row, or a view of several; a view reads nothing."""
        if isinstance(place, slice):
            view: JsonLinesFile[T] = object.__new__(JsonLinesFile)
            vars(view).update(vars(self), _rows=self._rows[place])
            return view
        row = int(self._rows[place])
        start, size = int(self._index.offsets[row]), int(self._index.sizes[row])
        text = os.pread(self._file.number, size, start)
        self._refuse_change()
        return self._parsed(text, int(self._index.lines[row]))[1]

    @property
    def digests(self) -> np.ndarray:
        """``[N]`` uint64 of what makes two rows the same."""
        return self._index.digests[self._rows]

    def _refuse_change(self) -> None:
        if self._file.is_changed():
            raise DataError(f"{self.key}: {self.path} changed while it was in use; start again")

    def _parsed(self, line: bytes, number: int) -> tuple[dict[str, Any], T]:
        where = f"{self.key}: {self.path}, line {number}"
        try:
            item = json.loads(line.decode(), parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({str(error)[:100]})") from None
        if not isinstance(item, dict):
            raise DataError(f'{where}: expected an object, such as {{"question": ...}}')
        return item, self._parse(where, item, self._flags)

    def _indexed(
        self, same: Callable[[T], str], note: Callable[[dict[str, Any], np.ndarray], None]
    ) -> JsonLinesIndex:
        """Read and check the whole file, a row at a time."""
        if (place := self._file.broken_byte()) is not None:
            raise not_utf8_error(self.path, self.key, DataError, place)
        offsets, sizes, lines, digests = (_Column(kind) for kind in ("u8", "u4", "u4", "u8"))
        for number, start, line in self._lines():
            if not line.decode().strip():
                continue
            item, row = self._parsed(line, number)
            note(item, self._flags)
            for column, value in (
                (offsets, start),
                (sizes, len(line)),
                (lines, number),
                (digests, _digest_of(same(row))),
            ):
                column.add(value)
        if not len(offsets.array()):
            raise DataError(f"{self.key}: {self.path} is empty")
        return JsonLinesIndex(
            offsets.array(), sizes.array(), lines.array(), digests.array(), self._flags
        )

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number, first byte and bytes of each line."""
        # Of the open file: another one may have got the path meanwhile.
        with os.fdopen(os.dup(self._file.number), "rb") as file:
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
    """Numbers that are added one by one, in chunks of arrays."""

    def __init__(self, kind: str) -> None:
        self._kind, self._full, self._open = kind, list[np.ndarray](), list[int]()

    def add(self, value: int) -> None:
        self._open.append(value)
        if len(self._open) == 1 << 16:
            self._full, self._open = [*self._full, np.array(self._open, self._kind)], []

    def array(self) -> np.ndarray:
        return np.concatenate([*self._full, np.array(self._open, self._kind)])


class _Descriptor:
    """A file that is open for reading as long as somebody holds this."""

    def __init__(self, path: Path, key: str) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(f"{key}: cannot read {path}: {reason}") from None
        self._stamp = self._read_stamp()
        self.digest = self._read_digest()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.number)

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self._stamp[0]

    def is_changed(self) -> bool:
        """Whether the bytes are others than when the file was opened.

        A new time alone says nothing: ``touch`` sets it, a copy of the same bytes, and a file
        server with a clock of its own. The bytes are then read again.
        """
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        if stamp[0] != self.size or self._read_digest() != self.digest:
            return True
        self._stamp = stamp
        return False

    def _read_stamp(self) -> tuple[int, int, int]:
        """Return what changes when the file does: size, time, inode."""
        found = os.fstat(self.number)
        return found.st_size, found.st_mtime_ns, found.st_ino

    def _read_digest(self) -> str:
        """Return that of all bytes."""
        digest = xxhash.xxh3_128()
        for block in self._blocks():
            digest.update(block)
        return digest.hexdigest()

    def broken_byte(self) -> int | None:
        """Return the first byte that is part of no character; None: the file is text."""
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
        while block := os.pread(self.number, BLOCK_BYTES, start):
            yield block
            start += len(block)


def count_overlap(
    train: Sequence[T], test: Sequence[T], row_text: Callable[[T], str] = repr
) -> tuple[int, int]:
    """Return how many rows of ``test`` are in ``train`` too, and how many it has.

    Args:
        same: text of a row that is not in a :class:`JsonLinesFile`, as there.
    """
    train_digests, test_digests = (_digests_of(rows, row_text) for rows in (train, test))
    return int(np.isin(test_digests, train_digests).sum()), len(test)


def _digests_of(rows: Sequence[T], same: Callable[[T], str]) -> np.ndarray:
    """Return ``[N]`` uint64 of what makes two rows the same."""
    if isinstance(rows, JsonLinesFile):
        return rows.digests
    return np.array([_digest_of(same(row)) for row in rows], "u8")


def _digest_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
