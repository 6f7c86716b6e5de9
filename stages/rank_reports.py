"""Heartbeats and reports between the ranks of one attempt.

They share the attempt's data folder. Beside it, in ``data-<attempt>.ranks``, each has a file that
it touches every few seconds from its order to its end, and at last its report. A process that waits
for another one gives it up only when that file has not changed for long, by the clock of the
process that waits: the clocks of two nodes are not compared.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rlinf.artifacts import FileEntry, Manifest, describe_file, read_manifest
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.errors import StageError
from stages.context import MetricReduction

T = TypeVar("T")
MetricValue = Sequence[Any]
"""Value, weight and :data:`MetricReduction`, as a list once it was a file."""
RANK_TIMEOUT_S = 600.0
"""Without a sign of life a rank is given up after so long. An NFS client may show a sign that is a
minute old."""
HEARTBEAT_S = 5.0
POLL_S = 0.02
_OWNER = re.compile(r"(?:.+-r|rank-)(\d+)-(?:p|of-)\d+\..+")
"""Names of the files that every rank writes for itself: channels and checkpoints."""


class AttemptRanks:
    """The heartbeats and reports of one attempt; a single process writes none.

    Args:
        data: folder of the attempt.
    """

    def __init__(self, data: Path, world: ProcessGroupInfo) -> None:
        self.data, self._world = data, world
        self.folder = data.with_name(f"{data.name}.ranks")

    @contextlib.contextmanager
    def attempt_scope(self) -> Iterator[None]:
        """Send heartbeats inside this scope; a failed attempt removes its files.

        Rank 0 commits, so it alone knows that the files are nobody's; while another rank lives that
        may still write some, they are left to the next attempt, which removes them.
        """
        try:
            with self._living() if self._world.size > 1 else contextlib.nullcontext():
                yield
        except BaseException:
            if self._world.rank == 0 and all(
                self._changed(rank) is None for rank in range(self._world.size)
            ):
                shutil.rmtree(self.data, ignore_errors=True)
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        if self._world.rank == 0 and self._world.size > 1:
            # All have reported: nobody waits for another one than this.
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _living(self) -> Iterator[None]:
        sign, over = self._sign(self._world.rank), threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        sign.touch()

        def touch() -> None:
            while not over.wait(HEARTBEAT_S):
                # A filesystem that fails now may work the next time; what was removed stays so.
                with contextlib.suppress(OSError):
                    os.utime(sign)

        thread = threading.Thread(target=touch, name=f"sign of {self.data.name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            with contextlib.suppress(OSError):
                sign.unlink()

    def write_report(self, **content: Any) -> None:
        """Report to rank 0 that this rank has written all its files; values must be JSON."""
        rank = self._world.rank
        files = {}
        for path in self.data.rglob("*") if rank else ():
            owner = _OWNER.fullmatch(path.name)
            if owner is not None and int(owner[1]) == rank:
                files[path.relative_to(self.data).as_posix()] = asdict(describe_file(path))
        text = json.dumps({**content, "files": files})
        report = self.folder / f"{rank}.json"
        unread = report.with_name(f".{report.name}")
        unread.write_text(text)
        # Not synced: nobody reads it after a crash, and from now on rank 0 may remove the folder.
        unread.replace(report)

    def wait_for_reports(self) -> list[dict[str, Any]]:
        """Wait for the reports of all ranks; return them in rank order.

        ``files`` of each is what it says of files of its own, by their names below the data folder.

        Raises:
            StageError: a rank sends no heartbeat.
        """
        result = [
            self._wait(rank, lambda rank=rank: self._read_report(rank))  # type: ignore[misc]
            for rank in range(self._world.size)
        ]
        for report in result:
            report["files"] = {name: FileEntry(**entry) for name, entry in report["files"].items()}
        return result

    def wait_for_commit(self, out: Path, key: str) -> Manifest:
        """Wait for the commit of rank 0; return its manifest.

        Raises:
            StageError: rank 0 sends no heartbeat.
        """

        def there() -> Manifest | None:
            manifest = read_manifest(out)
            return manifest if manifest is not None and manifest.key == key else None

        return self._wait(0, there)

    def _read_report(self, rank: int) -> dict[str, Any] | None:
        try:
            report: dict[str, Any] = json.loads((self.folder / f"{rank}.json").read_text())
        except FileNotFoundError:
            return None
        return report

    def _sign(self, rank: int) -> Path:
        return self.folder / str(rank)

    def _changed(self, rank: int) -> int | None:
        """Return the time of a rank's last heartbeat by the filesystem's clock; None: none."""
        try:
            return self._sign(rank).stat().st_mtime_ns
        except OSError:
            return None

    def _wait(self, rank: int, poll: Callable[[], T | None]) -> T:
        last, silent_s, before = self._changed(rank), 0.0, time.monotonic()
        while (result := poll()) is None:
            if silent_s > RANK_TIMEOUT_S:
                raise StageError(
                    f"{self.data}: rank {rank} gave no sign of life for {RANK_TIMEOUT_S:.0f} s: "
                    "its process or node is lost, or the filesystem does not show what it writes"
                )
            time.sleep(POLL_S)
            now, sign = time.monotonic(), self._changed(rank)
            # Where this process was suspended for long, so was the other one, maybe.
            silent_s = silent_s + min(now - before, HEARTBEAT_S) if sign == last else 0.0
            last, before = sign, now
        return result


def reduce_metric(
    values: Sequence[MetricValue], means: Sequence[MetricValue] = ()
) -> tuple[float, float]:
    """Reduce a metric of several ranks; see :meth:`StageContext.log_metric`.

    Args:
        means: what the same ranks recorded as ``mean``.
    """
    weight, how = sum(part[1] for part in values), values[0][2]
    if how == "max":
        return max(part[0] for part in values), weight
    if not weight:
        return sum(part[0] for part in values), 0.0
    if how == "std":
        # Within each rank's part and between the parts.
        mean, _ = reduce_metric(means)
        squares = (
            w * (v**2 + (m[0] - mean) ** 2) for (v, w, _), m in zip(values, means, strict=True)
        )
        return math.sqrt(sum(squares) / weight), weight
    return sum(part[0] * part[1] for part in values if part[1]) / weight, weight


def reduce_metrics(
    rank_metrics: Sequence[Mapping[str, MetricValue]],
) -> dict[str, tuple[float, float, MetricReduction]]:
    """Reduce the metrics of all ranks by name."""
    names = sorted({name for metrics in rank_metrics for name in metrics})
    parts = {name: [m[name] for m in rank_metrics if name in m] for name in names}
    return {name: (*reduce_metric(parts[name], parts.get("mean", ())), "mean") for name in names}
