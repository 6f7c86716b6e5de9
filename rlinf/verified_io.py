"""Verified reads: exactly the bytes that are used enter the checksum.

A file is read once, front to back, into memory of this process, and its checksum is computed from
these bytes. Later changes on disk are not used, and nothing is memory-mapped. The expected checksum
follows from the path: a file in ``OUT/data-ATTEMPT/`` belongs to the manifest in ``OUT``
(:mod:`rlinf.artifacts`). Files without a manifest (a user's model, uncommitted output) are read the
same way and not compared.
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
"""Block size of reads: small enough to be hashed while it is in the processor's cache."""


class VerifiedReader:
    """Reads one file front to back; :meth:`finish` compares it with its manifest.

    Raises:
        ArtifactError: the file is committed, and missing or of another size.
        FileNotFoundError: the file does not exist, and no manifest names it.
    """

    def __init__(self, path: Path) -> None:
        self._commit: CommittedFile | None = committed_file(path)
        """None: no manifest covers the file, so its checksum is not compared."""
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            if self._commit is None:
                raise
            raise self._damage_error("missing") from None
        self.size = path.stat().st_size if self._commit is None else self._expected.size
        self._hasher = xxhash.xxh3_128()
        self._remaining = self.size

    @property
    def remaining(self) -> int:
        """Number of bytes not yet read."""
        return self._remaining

    def read_into(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes; they are verified only after :meth:`finish`.

        Raises:
            ArtifactError, EOFError: the file ends too early.
        """
        position = 0
        while position < len(buffer):
            count = self._file.readinto(buffer[position : position + BLOCK_BYTES])
            if not count:
                raise self._damage_error("truncated")
            if self._commit is not None:
                self._hasher.update(buffer[position : position + count])
            position += count
        self._remaining -= len(buffer)

    def skip(self, count: int) -> None:
        """Skip bytes; they still enter the checksum."""
        if self._commit is None:
            self._file.seek(count, 1)
            self._remaining -= count
            return
        scratch = memoryview(bytearray(min(count, BLOCK_BYTES)))
        while count:
            part = scratch[: min(count, BLOCK_BYTES)]
            self.read_into(part)
            count -= len(part)

    def finish(self) -> None:
        """Read the rest and compare the checksum.

        Raises:
            ArtifactError: the bytes differ from those that were committed.
        """
        self.skip(self._remaining)
        if self._commit is None:
            return
        if self._file.read(1) or self._hasher.hexdigest() != self._expected.checksum:
            raise self._damage_error("altered (checksum differs)")

    @property
    def _expected(self) -> FileEntry:
        assert self._commit is not None
        return self._commit.entry

    def _damage_error(self, problem: str) -> Exception:
        if self._commit is None:
            return EOFError(f"{self._path}: {problem}")
        return ArtifactError(f"{self._path}: {problem}", self._commit.manifest, self._commit.data)

    def __enter__(self) -> VerifiedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_bytes(path: Path) -> bytearray:
    """Return all bytes of a file.

    Raises:
        ArtifactError: the file is committed and its bytes differ.
        OSError: it cannot be read.
    """
    with VerifiedReader(path) as reader:
        data = bytearray(reader.size)
        reader.read_into(memoryview(data))
        reader.finish()
        return data


def verify_file(path: Path) -> None:
    """Read a file only to compare its checksum; raises like :func:`read_bytes`."""
    with VerifiedReader(path) as reader:
        reader.finish()


def read_text(path: Path) -> str:
    """Return a UTF-8 file as text; raises like :func:`read_bytes`, and ``UnicodeDecodeError``."""
    return read_bytes(path).decode()


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; raises like :func:`read_bytes`, and then removes the copy."""
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
    """Provide a folder with verified copies of small files, for libraries that read files
    themselves.

    The folder has the name of the original and is removed with the context. Files without a
    manifest are used in place.
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
    """Return whether an open file is a regular file of this user that no one else can access."""
    info = os.fstat(file)
    is_private = info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077
    return is_private and stat.S_ISREG(info.st_mode)


def allowed_link_targets(folder: Path) -> list[Path]:
    """Return the folders into which links may point: the folder itself, and ``blobs`` for a Hugging
    Face cache (``models--*/snapshots/REVISION``)."""
    home = folder.resolve()
    return [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
