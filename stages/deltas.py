"""What changed between two versions of the weights, a file beside the policy folder of the newer.

For partitions that no network joins, or only a slow one: a worker that has the version before reads
far less than the policy folder, where steps of the optimizer are small. The folder is always there
for those that have another version or none.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf.artifacts import DERIVED, read_manifest
from rlinf.errors import ArtifactError, TransferError
from rlinf.weights.delta import Delta, Snapshot, diff, patch
from stages.context import Context
from stages.layout import stage_folder
from stages.parts import committed_weights

FILE = f"{DERIVED}delta.safetensors"
log = logging.getLogger("rlinf")


class Deltas:
    """Writes and reads deltas; holds the newest weights that it wrote or read.

    Args:
        dtype: what float32 tensors are compared as, and come as; None: as they are.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._held: Snapshot | None = None

    @property
    def exact(self) -> bool:
        """Whether what is read are the trainer's weights, not rounded to what engines take."""
        return self._dtype is None

    def write(self, ctx: Context, tensors: Mapping[str, Tensor]) -> None:
        """Add to an attempt that publishes weights what changed since those it published before."""
        old, self._held = self._held, None
        new = Snapshot.of(tensors, self._dtype)
        if old is not None:
            path = ctx.data / FILE
            path.parent.mkdir()
            diff(old, new).save(path)
        self._held = new

    def read(self, ctx: Context, name: str) -> dict[str, Tensor]:
        """The weights of a committed input, which share memory with those that are held.

        Raises:
            ArtifactError: they have to be read whole, and are damaged.
        """
        held, new = self._held, None
        if held is not None:
            new = self._patched(ctx, name, held)
            ctx.inputs[name].fell |= new is None
        if new is None:
            new = Snapshot.of(committed_weights(ctx, name), self._dtype)
        self._held = new
        return new.tensors

    def _patched(self, ctx: Context, name: str, held: Snapshot) -> Snapshot | None:
        """Walks back to the version that is held, while this takes fewer bytes than the whole."""
        folder, manifest = ctx.inputs[name].folder, ctx.inputs[name].manifest
        deltas: list[Delta] = []
        left, start = held.nbytes, time.time()
        try:
            while (file := manifest.files.get(FILE)) is not None and file.size <= left:
                left -= file.size
                deltas.append(Delta.load(folder / manifest.data / FILE))
                if deltas[-1].start == held.digest:
                    new = functools.reduce(patch, reversed(deltas), held)
                    ctx.took("delta", start)
                    return new
                folder = stage_folder(ctx.run, manifest.stage, manifest.iteration - 1)
                if (before := read_manifest(folder)) is None:
                    break
                manifest = before
        except (ArtifactError, TransferError, OSError) as error:
            log.warning("%s; %s is read whole", error, name)
        return None
