"""Weights between pools as versions on the shared filesystem, each of which holds what changed.

For partitions that no network joins, or only a slow one: who follows reads one delta a version, far
less than the policy folder that is committed, where steps of the optimizer are small
(:mod:`rlinf.weights.store`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.errors import ArtifactError, TransferError
from rlinf.threads import Queue
from rlinf.weights.store import State, WeightStore
from stages.layout import VERSIONS
from stages.worker.inbox import TRANSFER_FAULTS

FULL_EVERY = 10
KEEP = 4
"""Versions that who is behind can still read, besides those that rollouts may lag behind."""
SEEN_S = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Pauses between looks: a shared filesystem may show a version later than its maker sees it."""
Ready = Callable[[str, int, str, dict[str, Tensor]], None]
"""Told of weights that arrived whole: output, version, attempt, tensors."""
log = logging.getLogger("rlinf")


class Versions:
    """Publishes versions of a run, or follows them.

    Args:
        behind: how many versions rollouts may lag behind.
        dtype: what float32 tensors are published as; None: as they are.
    """

    def __init__(self, run: Path, behind: int = 0, dtype: torch.dtype | None = None) -> None:
        self._store = WeightStore(
            run / VERSIONS, full_every=FULL_EVERY, keep=KEEP + behind, dtype=dtype
        )
        self._held: State | None = None
        self._thread = Queue("versions", TRANSFER_FAULTS)

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do something in the one thread that reads and writes versions; returns at once."""
        self._thread.submit("a version of the weights", work, *arguments)

    def publish(self, number: int, tensors: Mapping[str, Tensor]) -> str | None:
        """Write a version unless it is there; the digest of its content, None if that failed."""
        try:
            return self._store.publish(number, tensors).key
        except (TransferError, ArtifactError, OSError) as error:
            log.warning("no version %d: %s", number, error)
            return None

    def follow(self, out: str, number: int, attempt: str, digest: str, ready: Ready) -> None:
        """Read a version of this digest and pass it to ``ready``; returns at once."""
        self.submit(self._follow, out, number, attempt, digest, ready)

    def close(self) -> None:
        self._thread.close(wait=False)

    def _follow(self, out: str, number: int, attempt: str, digest: str, ready: Ready) -> None:
        for pause in SEEN_S:
            time.sleep(pause)
            try:
                held = self._store.load(number, self._held)
                # Another trainer, cut off and taken for dead, may have published its own.
                if held.digest != digest:
                    raise TransferError(f"version {number} is not the one that was announced")
            except (ArtifactError, TransferError, OSError) as error:
                reason = error
                continue
            self._held = held
            ready(out, number, attempt, held.tensors)
            return
        log.warning("weights of %s: %s; waiting for its commit", out, reason)
