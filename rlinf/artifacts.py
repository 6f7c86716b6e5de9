"""Committing a stage's output: write, sync, one atomic link; the manifest is the commit.

An output folder holds ``manifest.json`` and one data folder per attempt that reached the end::

    it/0003/rollout/manifest.json        the commit: names the data folder, sizes, checksums
    it/0003/rollout/data-<attempt>/...   immutable files

No manifest, no output: data folders that no manifest names are partial work and are swept by the
next attempt. The manifest is created by ``link``, which fails if another attempt committed first,
so there is never more than one winner, on NFS too. A manifest ends with a checksum of itself, so
that any altered byte of it is noticed.
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
"""Schema of manifests as they are written, and of older ones without a checksum."""
MANIFEST = "manifest.json"
PRUNED_MARKER = "pruned"
DATA_PREFIX = "data-"
"""Prefix of the names of data folders."""
DERIVED_PREFIX = "derived/"
"""Prefix of files that only restate what other files of the output contain. Outputs with and
without them are equal (``content``), and an output that lost them is complete. A reader of one
verifies it like any other file."""
_BLOCK = 1 << 22
_SEAL = re.compile(rb',\n "seal": "([0-9a-f]{32})"\n}\Z')
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
log = logging.getLogger("rlinf")


def checksum(path: Path) -> str:
    """Return the xxh3-128 of a file, hex."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return state.hexdigest()


def sync_file(path: Path) -> None:
    """Force the content of a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str, *, private: bool = False) -> None:
    """Replace ``path`` by ``text``: a reader sees the old or the new content, never a part.

    Args:
        private: only the owner can read it.
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
    """Write a file that a user named, completely or not at all; its folder is created.

    Raises:
        InputError: it cannot be written.
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
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The commit of a stage's output, with its origin.

    ``key`` is the identity of the work (configuration, inputs, code); ``content`` is the digest of
    the result. ``timing``, ``host`` and ``job`` may differ between equal runs, the other fields
    not.
    """

    __pydantic_config__ = _STRICT
    stage: str
    iteration: int
    key: str
    content: str
    data: str
    files: dict[str, FileEntry]
    inputs: dict[str, str]
    metrics: dict[str, float]
    timing: dict[str, Any]
    host: str
    job: str
    world: int = 1
    schema: int = SCHEMA
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return JSON whose last field, ``seal``, is the xxh3-128 of everything before it."""
        body = json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False)
        body = body.removesuffix("\n}")
        return f'{body},\n "seal": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}'

    @classmethod
    def parse(cls, raw: bytes) -> Manifest:
        """Parse the output of :meth:`to_json`.

        Raises:
            ValueError: a byte was altered, a field is missing or of another type, or ``content``
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
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
        if manifest.schema > SCHEMA:
            raise ValueError(f"schema {manifest.schema} is of a newer program")
        if seal is None and manifest.schema != SCHEMA_WITHOUT_CHECKSUM:
            raise ValueError("its own checksum is missing")
        if content_digest(manifest.files, manifest.metrics) != manifest.content:
            raise ValueError("content: not the digest of its files and metrics")
        return manifest


_ADAPTER = TypeAdapter(Manifest)
_ALWAYS = {f.name for f in fields(Manifest) if f.default is f.default_factory is MISSING}
"""Fields of every manifest."""
_OPENING = '{\n "content": "'
"""First bytes of every manifest."""


def content_digest(files: Mapping[str, FileEntry], metrics: Mapping[str, float]) -> str:
    """Return a digest of everything in an output that is equal between equal runs."""
    state = xxhash.xxh3_128()
    for name in sorted(_own(files)):
        state.update(f"{name}\0{files[name].size}\0{files[name].checksum}\n".encode())
    numbers = {name: float(value) for name, value in metrics.items()}
    state.update(json.dumps(numbers, sort_keys=True).encode())
    return state.hexdigest()


def _own(files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Return the files that are not derived from others."""
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

    The file is opened, not tested for, because a shared filesystem may cache a negative look-up.

    Raises:
        ArtifactError: it is damaged.
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
    entry: FileEntry


def committed_file(path: Path) -> CommittedFile | None:
    """Return the committed entry of ``path``. None: no manifest of this program covers it.

    Raises:
        ArtifactError: its output was withdrawn, or the file was not part of it.
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


_known: OrderedDict[tuple[Path, str], dict[str, FileEntry]] = OrderedDict()
"""Files of data folders, which never change."""
_KNOWN = 64


def _files_of(out: Path, data: str) -> dict[str, FileEntry] | None:
    if (files := _known.get((out, data))) is not None:
        return files
    try:
        manifest = read_manifest(out)
    except ArtifactError:
        if _is_ours(out / MANIFEST):
            raise
        manifest = None
    if manifest is None or manifest.data != data:
        for bad in out.glob(f"{MANIFEST}.bad-*"):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if Manifest.parse(bad.read_bytes()).data == data:
                    raise ArtifactError(f"{out / data}: withdrawn as damaged", out / MANIFEST, data)
        return None
    _known[out, data] = manifest.files
    while len(_known) > _KNOWN:
        with contextlib.suppress(KeyError):  # another thread was first
            _known.popitem(last=False)
    return manifest.files


def _is_ours(manifest: Path) -> bool:
    """Return whether an unreadable manifest is a damaged one of this program.

    Other programs have files of this name too, beside a user's own folders with the prefix of data
    folders. They do not describe what is there, and are never withdrawn.
    """
    try:
        text = manifest.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return True
    try:
        content = json.loads(text)
        names = _ALWAYS.intersection(content if isinstance(content, dict) else ())
    except (ValueError, RecursionError):
        if not text.strip("\0 \n") or _OPENING.startswith(text[: len(_OPENING)]):
            return True  # lost on its way to the disk, or cut off
        names = {name for name in _ALWAYS if f'\n "{name}": ' in text}
    return len(names) > len(_ALWAYS) / 2


def verify_output(out: Path, manifest: Manifest, *, checksums: bool) -> None:
    """Check that the files of a manifest are complete and (optionally) unaltered.

    Derived files may be missing. Code that goes on to use the bytes reads them through
    :mod:`rlinf.verified_io`, which needs no checksums here.

    Raises:
        ArtifactError: a file is missing, has another size, or another checksum.
    """
    folder = out / manifest.data
    try:
        check_files(folder, _own(manifest.files), checksums=checksums)
    except FileNotFoundError as error:
        reason = "removed by the retention policy" if is_pruned(out) else "missing"
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
    """Rename a damaged manifest so that its stage runs again; returns the new path.

    Args:
        data: data folder of the damaged attempt; a commit of another attempt stays.
    """
    if data is not None:
        with contextlib.suppress(ArtifactError):
            there = read_manifest(manifest.parent)
            if there is None or there.data != data:
                return None
    target = manifest.with_name(f"{MANIFEST}.bad-{secrets.token_hex(4)}")
    try:
        manifest.rename(target)
    except FileNotFoundError:
        return None
    return target


def remove_uncommitted(out: Path, keep: set[str]) -> None:
    """Remove data folders of attempts that never committed."""
    for folder in out.glob(f"{DATA_PREFIX}*"):
        if folder.name not in keep:
            shutil.rmtree(folder, ignore_errors=True)


def commit_output(out: Path, manifest: Manifest) -> Manifest:
    """Publish ``manifest``. The first attempt to do so wins, and the winner is returned.

    Raises:
        ConflictingOutputError: a manifest with another key is there; it stays.
    """
    temporary = out / f".{MANIFEST}.{secrets.token_hex(4)}"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        while True:
            try:
                os.link(temporary, out / MANIFEST)
                break
            except FileExistsError:
                winner = _winner(out)
            if winner is not None and winner.key != manifest.key:
                raise ConflictingOutputError(
                    f"{out}: holds a result of another configuration or of other code, which "
                    "stays; start the run again to be told what differs"
                )
            if winner is not None:
                if winner.data != manifest.data:
                    shutil.rmtree(out / manifest.data, ignore_errors=True)
                return winner
    finally:
        temporary.unlink(missing_ok=True)
    (out / PRUNED_MARKER).unlink(missing_ok=True)
    sync_file(out)
    return manifest


def _winner(out: Path) -> Manifest | None:
    """Return the manifest that was committed first; a damaged one is withdrawn and ignored."""
    try:
        return read_manifest(out)
    except ArtifactError as error:
        log.warning("%s; it is replaced", error)
        withdraw_manifest(error.manifest)
        return None
