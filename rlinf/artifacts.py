"""Commits of stage outputs: a hard link creates the manifest after all files are on disk.

An output folder holds ``manifest.json`` and one data folder per attempt::

    it/0003/rollout/manifest.json        the commit: names the data folder, sizes, checksums
    it/0003/rollout/data-<attempt>/...   immutable files

Without a manifest there is no output: data folders that no manifest names are partial work, which
the next attempt removes. ``link`` creates the manifest and fails if another attempt was first, so
only one attempt wins, on NFS too. A manifest ends with its own checksum, which reveals any altered
byte.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlinf.errors import ArtifactError, ConflictingOutputError, InputError

SCHEMA, SCHEMA_WITHOUT_CHECKSUM = 2, 1
"""Schema of new manifests, and of older manifests without a checksum."""
MANIFEST = "manifest.json"
PRUNED_MARKER = "pruned"
"""File beside the manifest of an output whose data the retention policy removed."""
DATA_PREFIX = "data-"
"""Prefix of the names of data folders."""
DERIVED_PREFIX = "derived/"
"""Prefix of files that are derived from other files of the output. :attr:`Manifest.content` leaves
them out, and an output without them is complete. Readers verify them like other files."""
_BLOCK_BYTES = 1 << 22
_SEAL = re.compile(rb',\n "seal": "([0-9a-f]{32})"\n}\Z')
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
log = logging.getLogger("rlinf")


def checksum(path: Path) -> str:
    """Return the xxh3-128 of a file, hex."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def sync_file(path: Path) -> None:
    """Force the content of a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str, *, private: bool = False) -> None:
    """Write ``text`` to ``path`` atomically: a reader sees either the old or the new content.

    Args:
        private: whether only the owner may read the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.touch(0o600 if private else 0o666)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_file(path.parent)


def write_user_file(path: Path, text: str) -> None:
    """Write a file that a user named, atomically; create its folder if necessary.

    Raises:
        InputError: the file cannot be written.
    """
    target = path.expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, text)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; choose another file") from None


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact."""

    __pydantic_config__ = _STRICT
    size: int
    """Bytes."""
    checksum: str
    """See :func:`checksum`."""


@dataclass(frozen=True)
class Manifest:
    """The commit of a stage's output, with its origin.

    ``key`` is the identity of the work (configuration, inputs, code); ``content`` is the digest of
    files and metrics. Both are equal in equal runs. Other fields, such as ``data``, may differ.
    """

    __pydantic_config__ = _STRICT
    stage: str
    iteration: int
    key: str
    content: str
    data: str
    """Name of the data folder."""
    files: dict[str, FileEntry]
    """Files by their path below the data folder."""
    inputs: dict[str, str]
    """The ``content`` of each input, by the input's name."""
    metrics: dict[str, float]
    timing: dict[str, Any]
    """``began`` (process), ``start``, ``end`` (stage): Unix times, s; ``spans`` and ``usage``."""
    host: str
    """Name of the node on which the stage ran."""
    job: str
    """Slurm's job id; "" outside of jobs."""
    world: int = 1
    """Number of processes of the stage."""
    schema: int = SCHEMA
    extra: dict[str, Any] = field(default_factory=dict)
    """Further values of a stage."""

    def to_json(self) -> str:
        """Return JSON whose last field, ``seal``, is the xxh3-128 of everything before it."""
        body = json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False)
        body = body.removesuffix("\n}")
        return f'{body},\n "seal": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}'

    @classmethod
    def parse(cls, raw: bytes) -> Manifest:
        """Parse the output of :meth:`to_json`.

        Raises:
            ValueError: a byte was altered, a field is missing or has the wrong type, or ``content``
                is not the digest of files and metrics.
        """
        seal = _SEAL.search(raw)
        if seal is not None:
            if xxhash.xxh3_128_hexdigest(raw[: seal.start()]).encode() != seal[1]:
                raise ValueError("its own checksum differs")
            raw = raw[: seal.start()] + b"\n}"
        try:
            manifest = _ADAPTER.validate_json(raw)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise ValueError(f"{key}: {problem['msg']}" if key else problem["msg"]) from None
        if manifest.schema > SCHEMA:
            raise ValueError(f"schema {manifest.schema} is of a newer program")
        if seal is None and manifest.schema != SCHEMA_WITHOUT_CHECKSUM:
            raise ValueError("its own checksum is missing")
        if content_digest(manifest.files, manifest.metrics) != manifest.content:
            raise ValueError("content: not the digest of its files and metrics")
        return manifest


_ADAPTER = TypeAdapter(Manifest)
_REQUIRED_FIELDS = {f.name for f in fields(Manifest) if f.default is f.default_factory is MISSING}
"""Fields that every manifest has."""
_FIRST_BYTES = '{\n "content": "'
"""First bytes of every manifest."""


def content_digest(files: Mapping[str, FileEntry], metrics: Mapping[str, float]) -> str:
    """Return a digest of the part of an output that is equal between equal runs."""
    hasher = xxhash.xxh3_128()
    for name in sorted(_primary_files(files)):
        hasher.update(f"{name}\0{files[name].size}\0{files[name].checksum}\n".encode())
    values = {name: float(value) for name, value in metrics.items()}
    hasher.update(json.dumps(values, sort_keys=True).encode())
    return hasher.hexdigest()


def _primary_files(files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Return the files that are not derived from other files."""
    return {name: entry for name, entry in files.items() if not name.startswith(DERIVED_PREFIX)}


def describe_file(path: Path) -> FileEntry:
    """Sync and checksum a file."""
    sync_file(path)
    return FileEntry(path.stat().st_size, checksum(path))


def describe_files(
    folder: Path, known: Mapping[str, FileEntry] = MappingProxyType({})
) -> dict[str, FileEntry]:
    """Sync and checksum every file below ``folder``.

    Args:
        known: entries of files that their writer has already described.
    """
    entries = dict(known)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in known:
            entries[name] = describe_file(path)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_file(path)
    return entries


def read_manifest(out: Path) -> Manifest | None:
    """Return the manifest of an output folder. None: nothing was committed.

    The file is opened without a test of its existence, because shared filesystems cache absence.

    Raises:
        ArtifactError: the manifest is damaged.
    """
    path = out / MANIFEST
    try:
        return Manifest.parse(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, IsADirectoryError) as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(f"{path}: damaged manifest ({reason})", path) from None


@dataclass(frozen=True)
class CommittedFile:
    """The entry of one file in a manifest."""

    manifest: Path
    data: str
    """Name of the data folder."""
    entry: FileEntry


def committed_file(path: Path) -> CommittedFile | None:
    """Return the committed entry of ``path``. None: no manifest of rlinf covers it.

    Raises:
        ArtifactError: the output was withdrawn, or the file is not part of it.
    """
    path = path.absolute()
    for folder in path.parents:
        if folder.name.startswith(DATA_PREFIX):
            files = _files_of(folder.parent, folder.name)
            if files is None:
                continue
            name = path.relative_to(folder).as_posix()
            manifest = folder.parent / MANIFEST
            if name not in files:
                raise ArtifactError(
                    f"{path}: not part of what was committed", manifest, folder.name
                )
            return CommittedFile(manifest, folder.name, files[name])
    return None


_files_cache: OrderedDict[tuple[Path, str], dict[str, FileEntry]] = OrderedDict()
"""Entries by output folder and name of the data folder; they never change."""
_MAX_CACHED_FOLDERS = 64


def _files_of(out: Path, data: str) -> dict[str, FileEntry] | None:
    """Return the entries of a data folder; None: no manifest of rlinf names it.

    Raises:
        ArtifactError: the output was withdrawn, or its manifest is damaged.
    """
    if (files := _files_cache.get((out, data))) is not None:
        return files
    try:
        manifest = read_manifest(out)
    except ArtifactError:
        if _is_own_manifest(out / MANIFEST):
            raise
        manifest = None
    if manifest is None or manifest.data != data:
        for withdrawn in out.glob(f"{MANIFEST}.bad-*"):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if Manifest.parse(withdrawn.read_bytes()).data == data:
                    raise ArtifactError(f"{out / data}: withdrawn as damaged", out / MANIFEST, data)
        return None
    _files_cache[out, data] = manifest.files
    while len(_files_cache) > _MAX_CACHED_FOLDERS:
        with contextlib.suppress(KeyError):  # another thread was first
            _files_cache.popitem(last=False)
    return manifest.files


def _is_own_manifest(manifest: Path) -> bool:
    """Return whether an unreadable manifest is a damaged one of rlinf.

    Other programs also use this file name, possibly beside a user's folders whose names begin with
    ``data-``. Their files must never be withdrawn.
    """
    try:
        text = manifest.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return True
    try:
        content = json.loads(text)
        found_fields = _REQUIRED_FIELDS.intersection(content if isinstance(content, dict) else ())
    except (ValueError, RecursionError):
        if not text.strip("\0 \n") or _FIRST_BYTES.startswith(text[: len(_FIRST_BYTES)]):
            return True  # never written to disk, or truncated
        found_fields = {name for name in _REQUIRED_FIELDS if f'\n "{name}": ' in text}
    return len(found_fields) > len(_REQUIRED_FIELDS) / 2


def verify_output(out: Path, manifest: Manifest, *, checksums: bool) -> None:
    """Check that the files of a manifest are complete and (optionally) unaltered.

    Derived files may be missing. Callers that then read the files through
    :mod:`rlinf.verified_io` need no checksums here.

    Raises:
        ArtifactError: a file is missing, has another size, or another checksum.
    """
    folder = out / manifest.data
    try:
        check_files(folder, _primary_files(manifest.files), checksums=checksums)
    except FileNotFoundError as error:
        reason = "missing"
        if is_pruned(out):
            reason = "not kept by the retention policy (checkpoint.save_every, keep_last)"
        raise ArtifactError(f"{error.filename}: {reason}", out / MANIFEST, manifest.data) from None
    except ValueError as error:
        raise ArtifactError(str(error), out / MANIFEST, manifest.data) from None


def check_files(folder: Path, files: Mapping[str, FileEntry], *, checksums: bool) -> None:
    """Check files below ``folder`` against the entries of :func:`describe_files`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file has another size or checksum.
    """
    for name, entry in files.items():
        path = folder / name
        size = path.stat().st_size
        if size != entry.size:
            raise ValueError(f"{path}: truncated or altered ({size} bytes, committed {entry.size})")
        if checksums and checksum(path) != entry.checksum:
            raise ValueError(f"{path}: altered (checksum differs)")


def is_pruned(out: Path) -> bool:
    """Return whether the retention policy removed the data of a committed output."""
    return (out / PRUNED_MARKER).exists()


def prune_output(out: Path) -> None:
    """Remove the data of a committed output and keep its manifest."""
    if is_pruned(out) or (manifest := read_manifest(out)) is None:
        return
    (out / PRUNED_MARKER).touch()
    shutil.rmtree(out / manifest.data, ignore_errors=True)


def withdraw_manifest(manifest: Path, data: str | None = None) -> Path | None:
    """Rename a damaged manifest so that its stage runs again.

    Args:
        data: data folder of the damaged attempt; the commit of another attempt is kept.

    Returns:
        The new path; None: another attempt has committed, or there is no manifest.
    """
    if data is not None:
        with contextlib.suppress(ArtifactError):
            committed = read_manifest(manifest.parent)
            if committed is None or committed.data != data:
                return None
    target = manifest.with_name(f"{MANIFEST}.bad-{secrets.token_hex(4)}")
    try:
        manifest.rename(target)
    except FileNotFoundError:
        return None
    return target


def remove_uncommitted(out: Path, keep: set[str]) -> None:
    """Remove data folders of attempts that never committed.

    Args:
        keep: names of data folders that stay.
    """
    for folder in out.glob(f"{DATA_PREFIX}*"):
        if folder.name not in keep:
            shutil.rmtree(folder, ignore_errors=True)


def commit_output(out: Path, manifest: Manifest, *, is_pruned: bool = False) -> Manifest:
    """Commit ``manifest`` unless another attempt was first; return the committed manifest.

    Args:
        is_pruned: whether the files of the manifest are not on disk.

    Raises:
        ConflictingOutputError: a manifest with another key is committed; it is kept.
    """
    temporary = out / f".{MANIFEST}.{secrets.token_hex(4)}"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        if is_pruned:
            # Before the commit, because a reader would take missing files for damage.
            (out / PRUNED_MARKER).touch()
        while True:
            try:
                os.link(temporary, out / MANIFEST)
                break
            except FileExistsError:
                winner = _read_winner(out)
            if winner is not None and winner.key != manifest.key:
                raise ConflictingOutputError(
                    f"{out}: has a result of another configuration or of other code, which is "
                    "kept; start the run again to see what differs"
                )
            if winner is not None:
                if winner.data != manifest.data:
                    shutil.rmtree(out / manifest.data, ignore_errors=True)
                return winner
    finally:
        temporary.unlink(missing_ok=True)
    if not is_pruned:
        (out / PRUNED_MARKER).unlink(missing_ok=True)
    sync_file(out)
    return manifest


def _read_winner(out: Path) -> Manifest | None:
    """Return the manifest that was committed first; a damaged one is withdrawn and ignored."""
    try:
        return read_manifest(out)
    except ArtifactError as error:
        log.warning("%s; it is replaced", error)
        withdraw_manifest(error.manifest)
        return None
