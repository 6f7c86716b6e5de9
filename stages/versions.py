"""Weights between pools as versions on the shared filesystem, each of which holds what changed.

For partitions that no network joins, or only a slow one: who follows reads one delta a version, far
less than the policy folder that is committed, where steps of the optimizer are small
(:mod:`rlinf.weights.store`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from rlinf.errors import ArtifactError, TransferError
from rlinf.weights.store import State, WeightStore
from stages.layout import VERSIONS

FULL_EVERY = 10
KEEP = 4
"""Versions that who is behind can still read, besides those that rollouts may lag behind."""
SEEN_S = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Pauses between looks: a shared filesystem may show a version later than its maker sees it."""
Ready = Callable[[str, int, str, dict[str, Tensor]], None]
log = logging.getLogger("rlinf")


class Versions:
    """Publishes versions of a run, or follows them.

    Args:
        behind: how many versions rollouts may lag behind.
    """

    def __init__(self, run: Path, behind: int = 0) -> None:
        self._store = WeightStore(run / VERSIONS, full_every=FULL_EVERY, keep=KEEP + behind)
        self._held: State | None = None
        self._thread = ThreadPoolExecutor(1, "versions")

    def publish(self, number: int, tensors: Mapping[str, Tensor]) -> bool:
        """Write a version unless it is there; False if that failed."""
        try:
            self._store.publish(number, tensors)
        except (TransferError, ArtifactError, OSError) as error:
            log.warning("no version %d: %s", number, error)
            return False
        return True

    def follow(self, out: str, number: int, attempt: str, ready: Ready) -> None:
        """Read a version and pass it to ``ready``, in a thread of its own; returns at once."""
        self._thread.submit(self._follow, out, number, attempt, ready)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _follow(self, out: str, number: int, attempt: str, ready: Ready) -> None:
        for pause in SEEN_S:
            time.sleep(pause)
            try:
                self._held = self._store.load(number, self._held)
            except (ArtifactError, OSError) as error:
                reason = error
                continue
            ready(out, number, attempt, self._held.tensors)
            return
        log.warning("weights of %s: %s; waiting for its commit", out, reason)
