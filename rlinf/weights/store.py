"""Versions of the weights as immutable folders on a filesystem that trainer and engines share.

::

    weights/000000/manifest.json, data-<attempt>/full.safetensors
    weights/000001/manifest.json, data-<attempt>/delta.safetensors
    weights/000010/manifest.json, data-<attempt>/{delta,full}.safetensors

Every version has the delta from the one before, if there is one; every so many have the full state
too, in the same folder, so that who follows reads deltas alone and who joins late starts at a full
one. The files and the state they lead to have checksums in the manifest, whose creation is the
commit (:mod:`rlinf.artifacts`).
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlinf.artifacts import (
    MANIFEST,
    Manifest,
    attempt_folder,
    commit,
    content_digest,
    describe_files,
    read_manifest,
    sweep,
    verify,
)
from rlinf.errors import ArtifactError, OtherWorkError, TransferError
from rlinf.tensors import load_tensors
from rlinf.weights.buckets import distinct, sent_dtype
from rlinf.weights.delta import Delta, diff, patch

FULL, DELTA = "full.safetensors", "delta.safetensors"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """One version of the weights, on the CPU; not to be written to."""

    version: int
    kept: dict[str, Tensor]
    """The distinct tensors."""
    ties: dict[str, str]
    """Names that share one of them, and which."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return self.kept | {name: self.kept[other] for name, other in self.ties.items()}

    @cached_property
    def digest(self) -> str:
        """xxh3-128, hex, of names, types, shapes and bits."""
        total = xxhash.xxh3_128(repr(sorted(self.ties.items())).encode())
        for name, tensor in sorted(self.kept.items()):
            total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode())
            if tensor.numel():
                total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()


class WeightStore:
    """The versions below one folder: one process publishes, any number read.

    Args:
        root: the folder; made on the first publication.
        full_every: versions from one full state to the next.
        keep: versions that stay readable, the newest included; more stay where a full state that
            others build on is older. Enough for the slowest reader's look at one. None: all.
        dtype: what float32 tensors are published as; None: as they are.
    """

    def __init__(
        self,
        root: Path,
        *,
        full_every: int = 10,
        keep: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if full_every < 1 or (keep is not None and keep < 1):
            raise ValueError(f"full_every {full_every}, keep {keep}: must be at least 1")
        self._root, self._full_every, self._keep, self._dtype = root, full_every, keep, dtype
        self._published: State | None = None

    def versions(self) -> list[int]:
        """Committed versions, oldest first."""
        if not self._root.is_dir():
            return []
        found = [int(path.name) for path in self._root.iterdir() if path.name.isdigit()]
        return sorted(v for v in found if (self._folder(v) / MANIFEST).exists())

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Commit a version; publishing the same weights again changes nothing.

        One that does not follow the newest is a full one.

        Raises:
            TransferError: older than the newest, or there with other weights.
        """
        start = time.time()
        kept, ties = distinct(tensors)
        copies = {
            name: tensor.detach()
            .to("cpu", sent_dtype(tensor.dtype, self._dtype), copy=True)
            .contiguous()
            for name, tensor in kept.items()
        }
        state = State(version, copies, ties)
        newest = max(self.versions(), default=None)
        if newest is not None and version <= newest:
            there = read_manifest(self._folder(version))
            if there is not None and there.key == state.digest:
                self._published = state
                return there
            raise TransferError(
                f"{self._folder(version)}: version {newest} is published already and versions do "
                f"not change; publish {newest + 1} next"
            )
        follows = newest is not None and version == newest + 1
        manifest = self._write(state, self._base(newest) if follows else None, start)
        # The next delta starts from what is there, should another process have been first.
        self._published = state if manifest.key == state.digest else None
        if self._keep is not None:
            self.prune(self._keep)
        return manifest

    def load(self, version: int, held: State | None = None) -> State:
        """One version, rebuilt from ``held`` or a full state, whichever needs fewer bytes.

        Every file is checked as it is read, and so is the result; where one is damaged,
        another way is tried.

        Raises:
            ArtifactError: no way is left; its ``manifest`` is that of the first damaged version.
        """
        # Walks back from the version, and tries a way as soon as none further back can be shorter.
        ways: list[tuple[int, int, bool, State | None]] = []
        chain: dict[int, Manifest] = {}
        damage: ArtifactError | None = None
        size, at, more = 0, version, True
        while more or ways:
            settled = held is None or at < held.version or (ways and ways[0][0] <= size)
            if ways and (settled or not more):
                _, first, _, state = heappop(ways)
                try:
                    return self._replay(chain, first, version, state)
                except ArtifactError as error:
                    log.warning("%s; looking for another way", error)
                    damage = damage or error
                    continue
            try:
                manifest = read_manifest(self._folder(at))
            except ArtifactError as error:
                manifest, damage = None, damage or error
            if manifest is None:
                more = False
                continue
            chain[at] = manifest
            if held is not None and held.version == at and held.digest == manifest.key:
                heappush(ways, (size, at, False, held))
            if FULL in manifest.files:
                heappush(ways, (size + manifest.files[FULL].size, at, True, None))
            more = DELTA in manifest.files
            size += manifest.files[DELTA].size if more else 0
            at -= 1
        if version not in chain and damage is None:
            there = self.versions()
            known = f"there are {there[0]} to {there[-1]}" if there else "there are none"
            raise self._error(version, f"no such version; {known}")
        raise damage or self._error(version, "no full version to start from is left")

    def prune(self, keep: int) -> None:
        """Remove versions that neither are among the newest ``keep`` nor lead to them.

        A damaged full version is not relied on: what leads to it another way stays.
        """
        versions = self.versions()
        for first in reversed(versions[: max(0, len(versions) - keep + 1)]):
            folder = self._folder(first)
            manifest = read_manifest(folder)
            if manifest is None or FULL not in manifest.files:
                continue
            if first == versions[0]:
                return
            try:
                verify(folder, _only(manifest, FULL), checksums=True)
            except ArtifactError as error:
                log.warning("%s; older versions stay", error)
                continue
            for old in versions[: versions.index(first)]:
                # Without its manifest a version is no more; then its files may go.
                (self._folder(old) / MANIFEST).unlink()
                shutil.rmtree(self._folder(old), ignore_errors=True)
            return

    def _base(self, newest: int | None) -> State | None:
        """What the next delta starts from; after a restart it is read again."""
        if newest is None or (self._published and self._published.version == newest):
            return self._published
        try:
            return self.load(newest)
        except ArtifactError as error:
            log.warning("%s; the next version is a full one", error)
            return None

    def _write(self, state: State, base: State | None, start: float) -> Manifest:
        folder = self._folder(state.version)
        # Only what never became a version is here: this process alone publishes.
        sweep(folder, set())
        with attempt_folder(folder, secrets.token_hex(6)) as data:
            full = base is None or state.version % self._full_every == 0
            changed = -1
            if base is not None:
                delta = diff(base.kept, state.kept)
                delta.save(data / DELTA)
                changed = sum(delta.changed.values())
            if full:
                save_file(state.kept, data / FULL, metadata={"format": "pt"})
            files = describe_files(data)
            metrics = {"changed": float(changed)} if changed >= 0 else {}
            manifest = Manifest(
                stage="weights",
                iteration=state.version,
                key=state.digest,
                content=content_digest(files, metrics),
                data=data.name,
                files=files,
                inputs={} if base is None else {f"{base.version}": base.digest},
                metrics=metrics,
                timing={"start": start, "end": time.time(), "spans": []},
                host=socket.gethostname(),
                job=os.environ.get("SLURM_JOB_ID", ""),
                extra={"ties": state.ties},
            )
            try:
                return commit(folder, manifest)
            except OtherWorkError as error:
                raise TransferError(str(error)) from None

    def _replay(
        self, chain: Mapping[int, Manifest], first: int, last: int, state: State | None
    ) -> State:
        """From ``state``, or the full state of ``first``, delta by delta to ``last``."""
        version = first
        try:
            if state is None:
                kept = load_tensors(self._whole(chain[first], FULL))
                state = self._confirmed(chain[first], kept)
            for version in range(first + 1, last + 1):
                if chain[version].inputs != {f"{state.version}": state.digest}:
                    raise self._error(
                        version, f"its delta does not start from version {state.version} as found"
                    )
                delta = Delta.load(self._whole(chain[version], DELTA))
                state = self._confirmed(chain[version], patch(state.kept, delta))
        except (SafetensorError, TransferError) as error:
            raise self._error(version, str(error)) from None
        except FileNotFoundError as error:
            if (self._folder(version) / MANIFEST).exists():
                raise
            raise self._error(version, "removed by the retention policy") from error
        return state

    def _whole(self, manifest: Manifest, name: str) -> Path:
        folder = self._folder(manifest.iteration)
        verify(folder, _only(manifest, name), checksums=False)
        return folder / manifest.data / name

    def _confirmed(self, manifest: Manifest, kept: dict[str, Tensor]) -> State:
        state = State(manifest.iteration, kept, manifest.extra["ties"])
        if state.digest != manifest.key:
            raise self._error(state.version, "other weights than published")
        return state

    def _error(self, version: int, problem: str) -> ArtifactError:
        folder = self._folder(version)
        return ArtifactError(f"{folder}: {problem}", folder / MANIFEST)

    def _folder(self, version: int) -> Path:
        return self._root / f"{version:06d}"


def _only(manifest: Manifest, name: str) -> Manifest:
    return replace(manifest, files={name: manifest.files[name]})
