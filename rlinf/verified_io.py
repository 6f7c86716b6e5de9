"""Reading files so that what is used is what was checked.

A file is read once, from front to back, into memory of this process, and its checksum is computed
from these bytes: what changes on disk after that, or between two looks, is not used. Nothing is
mapped. Which checksum it must have is found by its path: a file in ``OUT/data-ATTEMPT/`` belongs to
the manifest in ``OUT`` (:mod:`rlinf.artifacts`). Files that no manifest speaks of (a user's model,
an attempt's own work) are read the same way and not compared.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import xxhash

from rlinf.artifacts import CommittedFile, FileEntry, committed_file
from rlinf.errors import ArtifactError

BLOCK_BYTES = 1 << 22
"""Bytes that are hashed while they are still in the processor's cache."""


class VerifiedReader:
    """One file, read from front to back; :meth:`finish` says whether it was what was committed.

    Raises:
        ArtifactError: it is committed and missing, or of another size.
        FileNotFoundError: it is not there, and no manifest says that it should be.
    """

    def __init__(self, path: Path) -> None:
        self._commit: CommittedFile | None = committed_file(path)
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            if self._commit is None:
                raise
            raise self._damage("missing") from None
        self.size = path.stat().st_size if self._commit is None else self._expected.size
        self._state = xxhash.xxh3_128()
        self._left = self.size

    @property
    def remaining(self) -> int:
        """Bytes not yet read."""
        return self._left

    def read_into(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes; what is in it counts only after :meth:`finish`.

        Raises:
            ArtifactError, EOFError: the file ends before.
        """
        at = 0
        while at < len(buffer):
            count = self._file.readinto(buffer[at : at + BLOCK_BYTES])
            if not count:
                raise self._damage("truncated")
            if self._commit is not None:
                self._state.update(buffer[at : at + count])
            at += count
        self._left -= len(buffer)

    def skip(self, count: int) -> None:
        """Pass over bytes; they are checked all the same."""
        if self._commit is None:
            self._file.seek(count, 1)
            self._left -= count
            return
        scratch = memoryview(bytearray(min(count, BLOCK_BYTES)))
        while count:
            part = scratch[: min(count, BLOCK_BYTES)]
            self.read_into(part)
            count -= len(part)

    def finish(self) -> None:
        """Read the rest and compare.

        Raises:
            ArtifactError: the bytes are not those that were committed.
        """
        self.skip(self._left)
        if self._commit is None:
            return
        if self._file.read(1) or self._state.hexdigest() != self._expected.checksum:
            raise self._damage("altered (checksum differs)")

    @property
    def _expected(self) -> FileEntry:
        assert self._commit is not None
        return self._commit.entry

    def _damage(self, problem: str) -> Exception:
        if self._commit is None:
            return EOFError(f"{self._path}: {problem}")
        return ArtifactError(f"{self._path}: {problem}", self._commit.manifest, self._commit.data)

    def __enter__(self) -> VerifiedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_bytes(path: Path) -> bytearray:
    """All of a file.

    Raises:
        ArtifactError: it is committed and not what was committed.
        OSError: it cannot be read.
    """
    with VerifiedReader(path) as reader:
        data = bytearray(reader.size)
        reader.read_into(memoryview(data))
        reader.finish()
        return data


def verify_file(path: Path) -> None:
    """Read a file and keep nothing; raises as :func:`read_bytes`."""
    with VerifiedReader(path) as reader:
        reader.finish()


def read_text(path: Path) -> str:
    """All of a UTF-8 file; raises as :func:`read_bytes`, and ``UnicodeDecodeError``."""
    return read_bytes(path).decode()


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; raises as :func:`read_bytes`, and leaves nothing then."""
    try:
        with VerifiedReader(source) as reader, target.open("wb") as out:
            scratch = memoryview(bytearray(min(reader.size, BLOCK_BYTES)))
            while reader.remaining:
                part = scratch[: min(reader.remaining, BLOCK_BYTES)]
                reader.read_into(part)
                out.write(part)
            reader.finish()
    except BaseException:
        target.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def verified_temporary_copy(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """A folder with checked copies of small files, for libraries that read them by themselves.

    It has the name of the original, and goes with the context. Files that no manifest speaks of are
    used where they are.
    """
    if not any(committed_file(folder / name) for name in names):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rlinf-") as root:
        copy = Path(root) / folder.name
        copy.mkdir()
        for name in names:
            copy_file(folder / name, copy / name)
        yield copy


def is_owner_only(file: int) -> bool:
    """Whether an open file is a regular one of this user that nobody else may read or write."""
    info = os.fstat(file)
    own = info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077
    return own and stat.S_ISREG(info.st_mode)


def allowed_link_targets(folder: Path) -> list[Path]:
    """Where links in a folder may lead: into it, and in a cache of Hugging Face
    (``models--*/snapshots/REVISION``) into ``blobs`` beside it."""
    home = folder.resolve()
    return [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
