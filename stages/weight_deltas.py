"""Weight deltas of pool workers: a new version is read as differences to the one in memory."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf.artifacts import DERIVED_PREFIX, read_manifest
from rlinf.errors import ArtifactError, WeightTransferError
from rlinf.weights.delta import WeightDelta, WeightSnapshot, apply_delta, compute_delta
from stages.context import StageContext
from stages.factory import load_committed_weights
from stages.layout import stage_folder

DELTA_FILE = f"{DERIVED_PREFIX}delta.safetensors"
"""File of an output: the difference to the previously published weights."""
log = logging.getLogger("rlinf")


class WeightDeltas:
    """Writes and reads deltas; keeps a snapshot of the weights last written or read.

    Args:
        dtype: dtype to which float32 tensors are cast before they are compared; None: not cast.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._snapshot: WeightSnapshot | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the weights are those of the trainer, not rounded to the engine's dtype."""
        return self._dtype is None

    def write(self, ctx: StageContext, tensors: Mapping[str, Tensor]) -> None:
        """Write the difference to the weights that this worker published before, if any."""
        old, self._snapshot = self._snapshot, None
        new = WeightSnapshot.from_tensors(tensors, self._dtype)
        if old is not None:
            path = ctx.data_folder / DELTA_FILE
            path.parent.mkdir()
            compute_delta(old, new).save(path)
        self._snapshot = new

    def read(self, ctx: StageContext, name: str) -> dict[str, Tensor]:
        """Return the weights of a committed input, whose tensors share memory with the snapshot.

        Raises:
            ArtifactError: the deltas cannot be used, and the policy folder is damaged.
        """
        snapshot, new = self._snapshot, None
        if snapshot is not None:
            new = self._apply_deltas(ctx, name, snapshot)
            ctx.inputs[name].used_disk_fallback |= new is None  # read as a whole
        if new is None:
            new = WeightSnapshot.from_tensors(load_committed_weights(ctx, name), self._dtype)
        self._snapshot = new
        return new.tensors

    def _apply_deltas(
        self, ctx: StageContext, name: str, snapshot: WeightSnapshot
    ) -> WeightSnapshot | None:
        """Apply the deltas of all versions since the snapshot; return the new weights.

        Returns None if a delta is missing, or if the deltas have more bytes than the weights.
        """
        folder, manifest = ctx.inputs[name].folder, ctx.inputs[name].manifest
        deltas: list[WeightDelta] = []
        remaining_bytes, start = snapshot.nbytes, time.time()
        try:
            while (
                file := manifest.files.get(DELTA_FILE)
            ) is not None and file.size <= remaining_bytes:
                remaining_bytes -= file.size
                deltas.append(WeightDelta.load(folder / manifest.data / DELTA_FILE))
                if deltas[-1].base_digest == snapshot.digest:
                    new = functools.reduce(apply_delta, reversed(deltas), snapshot)
                    ctx.add_span("delta", start)
                    return new
                folder = stage_folder(ctx.run_folder, manifest.stage, manifest.iteration - 1)
                if (previous := read_manifest(folder)) is None:
                    break
                manifest = previous
        except (ArtifactError, WeightTransferError, OSError) as error:
            log.warning("%s; reading %s as a whole", error, name)
        return None
