"""Heartbeats and reports between the ranks of one attempt.

The ranks share the attempt's data folder. In the folder ``data-<attempt>.ranks`` beside it, each
rank touches a heartbeat file every few seconds and writes its report at the end. While it makes
progress, it also touches a progress file (:mod:`stages.progress_watchdog`). A rank counts as lost
if its heartbeat file has not changed for :data:`RANK_TIMEOUT_S`. The waiting process measures this
time by its own clock, because clocks of two nodes may differ.
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
from stages.progress_watchdog import write_stacks

T = TypeVar("T")
MetricValue = Sequence[Any]
"""Value, weight and :data:`MetricReduction`; a list if read from a file."""
RANK_TIMEOUT_S = 600.0
"""A rank without a heartbeat for this time is lost. NFS may show heartbeats a minute late."""
HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of a rank."""
POLL_S = 0.02
"""Seconds between two checks of a waiting rank for a report or the commit."""
STALLED_FILE = "stalled"
"""File in the folder of the ranks: the attempt makes no progress and must end."""
_RANK_FILE = re.compile(r"(?:.+-r|rank-)(\d+)-(?:p|of-)\d+\..+")
"""Names of files that only one rank writes, in channels and checkpoints; group 1 is the rank."""


class AttemptRanks:
    """The heartbeats and reports of one attempt; an attempt with one process has none.

    Args:
        data_folder: folder of the attempt.
    """

    def __init__(self, data_folder: Path, world: ProcessGroupInfo) -> None:
        self.data_folder, self._world = data_folder, world
        self.ranks_folder = data_folder.with_name(f"{data_folder.name}.ranks")

    @contextlib.contextmanager
    def attempt_scope(self) -> Iterator[None]:
        """Send heartbeats inside this scope; remove the files of a failed attempt.

        Only rank 0 removes them, because it knows that they were not committed. If another rank is
        alive and may still write files, the next attempt removes them instead.
        """
        try:
            with self._send_heartbeats() if self._world.size > 1 else contextlib.nullcontext():
                yield
        except BaseException:
            if self._world.rank == 0 and all(
                self._last_heartbeat(rank) is None for rank in range(self._world.size)
            ):
                shutil.rmtree(self.data_folder, ignore_errors=True)
                shutil.rmtree(self.ranks_folder, ignore_errors=True)
            raise
        if self._world.rank == 0 and self._world.size > 1:
            # All ranks have reported, and other ranks wait only for the manifest of rank 0.
            shutil.rmtree(self.ranks_folder, ignore_errors=True)

    @contextlib.contextmanager
    def _send_heartbeats(self) -> Iterator[None]:
        heartbeat_file, stopped = self._heartbeat_file(self._world.rank), threading.Event()
        self.ranks_folder.mkdir(parents=True, exist_ok=True)
        heartbeat_file.touch()

        def touch() -> None:
            has_written_stacks = False
            while not stopped.wait(HEARTBEAT_S):
                if not has_written_stacks and self.is_stalled():
                    has_written_stacks = True
                    write_stacks()
                # Ignore a temporary filesystem error; utime does not create a removed file again.
                with contextlib.suppress(OSError):
                    os.utime(heartbeat_file)

        thread = threading.Thread(
            target=touch, name=f"heartbeat of {self.data_folder.name}", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
            with contextlib.suppress(OSError):
                heartbeat_file.unlink()

    def report_progress(self) -> None:
        """Show the other ranks that this one completed a step, or waits for an input."""
        with contextlib.suppress(OSError):
            self._progress_file(self._world.rank).touch()

    def has_progressed(self, timeout_s: float) -> bool:
        """Return whether any rank has progressed within a time, by the filesystem's clock.

        A rank that sends heartbeats but has not reported any progress does not compute yet.
        """
        with contextlib.suppress(OSError):
            os.utime(self._heartbeat_file(self._world.rank))
        now = self._last_heartbeat(self._world.rank)
        if now is None:
            return False
        # Ranks report their progress at most one heartbeat late.
        oldest = now - int((timeout_s + 2 * HEARTBEAT_S) * 1e9)
        for rank in range(self._world.size):
            try:
                if self._progress_file(rank).stat().st_mtime_ns > oldest:
                    return True
            except OSError:
                if self._last_heartbeat(rank) is not None:
                    return True
        return False

    def mark_stalled(self) -> None:
        """Let all ranks write their stacks, and their watchdogs end this attempt."""
        with contextlib.suppress(OSError):
            (self.ranks_folder / STALLED_FILE).touch()

    def is_stalled(self) -> bool:
        """Return whether a rank has ended this attempt because no rank made progress."""
        return (self.ranks_folder / STALLED_FILE).exists()

    def write_report(
        self, discarded_files: Mapping[str, FileEntry] | None = None, **content: Any
    ) -> None:
        """Report to rank 0 that this rank has written all its files.

        Args:
            discarded_files: further files of this rank, which it has not kept.
            content: values for the report, which must be valid in JSON.
        """
        rank = self._world.rank
        files = {name: asdict(entry) for name, entry in (discarded_files or {}).items()}
        for path in self.data_folder.rglob("*") if rank else ():
            match = _RANK_FILE.fullmatch(path.name)
            if match is not None and int(match[1]) == rank:
                files[path.relative_to(self.data_folder).as_posix()] = asdict(describe_file(path))
        text = json.dumps({**content, "files": files})
        report = self.ranks_folder / f"{rank}.json"
        temporary = report.with_name(f".{report.name}")
        temporary.write_text(text)
        # No fsync: the report is not read after a crash. Rank 0 may remove the folder from now on.
        temporary.replace(report)

    def wait_for_reports(self) -> list[dict[str, Any]]:
        """Wait for the reports of all ranks; return them in rank order.

        ``files`` of a report describes the files of the rank, by path below the data folder.

        Raises:
            StageError: a rank sends no heartbeat.
        """
        reports = [
            self._wait(rank, lambda rank=rank: self._read_report(rank))  # type: ignore[misc]
            for rank in range(self._world.size)
        ]
        for report in reports:
            report["files"] = {name: FileEntry(**entry) for name, entry in report["files"].items()}
        return reports

    def wait_for_commit(self, out: Path, key: str) -> Manifest:
        """Wait for the commit of rank 0; return its manifest.

        Raises:
            StageError: rank 0 sends no heartbeat.
        """

        def find_commit() -> Manifest | None:
            manifest = read_manifest(out)
            return manifest if manifest is not None and manifest.key == key else None

        return self._wait(0, find_commit)

    def _read_report(self, rank: int) -> dict[str, Any] | None:
        try:
            report: dict[str, Any] = json.loads((self.ranks_folder / f"{rank}.json").read_text())
        except FileNotFoundError:
            return None
        return report

    def _heartbeat_file(self, rank: int) -> Path:
        return self.ranks_folder / str(rank)

    def _progress_file(self, rank: int) -> Path:
        return self.ranks_folder / f"{rank}.progress"

    def _last_heartbeat(self, rank: int) -> int | None:
        """Return the time of a rank's last heartbeat by the filesystem's clock, or None."""
        try:
            return self._heartbeat_file(rank).stat().st_mtime_ns
        except OSError:
            return None

    def _wait(self, rank: int, poll: Callable[[], T | None]) -> T:
        """Wait until ``poll`` returns a result; raise if ``rank`` is lost meanwhile."""
        last_heartbeat, silent_s, last_poll = self._last_heartbeat(rank), 0.0, time.monotonic()
        while (result := poll()) is None:
            if silent_s > RANK_TIMEOUT_S:
                raise StageError(
                    f"{self.data_folder}: rank {rank} sent no heartbeat for "
                    f"{RANK_TIMEOUT_S:.0f} s: its process or node is lost, or the filesystem does "
                    "not show what it writes"
                )
            time.sleep(POLL_S)
            now, heartbeat = time.monotonic(), self._last_heartbeat(rank)
            # Count at most HEARTBEAT_S: if this process was suspended, the other may have been too.
            is_silent = heartbeat == last_heartbeat
            silent_s = silent_s + min(now - last_poll, HEARTBEAT_S) if is_silent else 0.0
            last_heartbeat, last_poll = heartbeat, now
        return result


def reduce_metric(
    values: Sequence[MetricValue], means: Sequence[MetricValue] = ()
) -> tuple[float, float]:
    """Reduce a metric of several ranks; return its value and the sum of the weights.

    Weights and reductions are explained in :meth:`StageContext.log_metric`.

    Args:
        means: the metric ``mean`` of the same ranks; needed for ``std``.
    """
    weight, reduction = sum(metric[1] for metric in values), values[0][2]
    if reduction == "max":
        return max(metric[0] for metric in values), weight
    if not weight:
        return sum(metric[0] for metric in values), 0.0
    if reduction == "std":
        # Variance within the ranks and between them.
        mean, _ = reduce_metric(means)
        squares = (
            w * (v**2 + (m[0] - mean) ** 2) for (v, w, _), m in zip(values, means, strict=True)
        )
        return math.sqrt(sum(squares) / weight), weight
    return sum(metric[0] * metric[1] for metric in values if metric[1]) / weight, weight


def reduce_metrics(
    rank_metrics: Sequence[Mapping[str, MetricValue]],
) -> dict[str, tuple[float, float, MetricReduction]]:
    """Reduce the metrics of all ranks, by name of the metric."""
    names = sorted({name for metrics in rank_metrics for name in metrics})
    values = {name: [m[name] for m in rank_metrics if name in m] for name in names}
    means = values.get("mean", ())
    return {name: (*reduce_metric(values[name], means), "mean") for name in names}
