"""Measures links between two processes and through the shared filesystem."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from pipeline.planning.profile.schema import CONFIDENCE, ConfidenceInterval, MeasuredLink

SIZES_BYTES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
REPEATS = 4
"""Repeats per size; the first one is discarded."""
MAX_BANDWIDTH_FACTOR = 100.0
"""Maximum ratio of the bandwidth's upper confidence limit to its estimate."""


def fit_link(
    seconds: Sequence[Sequence[float]], sizes: Sequence[int], **fields: Any
) -> MeasuredLink:
    """Fit ``latency + n / bandwidth`` by least squares on relative errors, with 95 % intervals.

    Args:
        seconds: repeats of each size.

    Dividing ``t = a + b n`` by ``t`` gives ordinary least squares with equal errors (Seber and Lee
    2003, section 3.10). The intervals of both coefficients use Student's t.
    """
    rows = [(n, max(t, 1e-9)) for n, times in zip(sizes, seconds, strict=True) for t in times]
    size, time_s = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    design = np.stack([1 / time_s, size / time_s], axis=1)
    # Scale the columns to the same magnitude, because sizes are large numbers.
    scale = np.linalg.norm(design, axis=0)
    coefficients, *_ = np.linalg.lstsq(design / scale, np.ones(len(rows)), rcond=None)
    coefficients = coefficients / scale
    if coefficients[0] < 0:
        coefficients = np.array([0.0, 1 / np.mean(size / time_s)])
    residuals = 1 - design @ coefficients
    variance = residuals @ residuals / max(1, len(rows) - 2)
    inverse = np.linalg.pinv((design / scale).T @ (design / scale)) / np.outer(scale, scale)
    half_widths = float(student.ppf((1 + CONFIDENCE) / 2, max(1, len(rows) - 2))) * np.sqrt(
        variance * np.diag(inverse)
    )
    latency, slope = (float(coefficient) for coefficient in coefficients)
    slope = max(slope, 1e-15)
    return MeasuredLink(
        sizes_bytes=tuple(sizes),
        median_s=tuple(float(np.median(times)) for times in seconds),
        repeats=len(rows),
        latency_s=ConfidenceInterval(
            value=latency, low=max(0.0, latency - half_widths[0]), high=latency + half_widths[0]
        ),
        bandwidth_bytes_per_s=ConfidenceInterval(
            value=1 / slope,
            low=1 / (slope + half_widths[1]),
            high=1 / max(slope - half_widths[1], slope / MAX_BANDWIDTH_FACTOR),
        ),
        **fields,
    )


def measure_peer_link(
    path: str, between: tuple[str, ...], rank: int, other: int, device: Any
) -> MeasuredLink | None:
    """Measure a link of the default process group by messages between ranks 0 and ``other``.

    Both ranks call this; rank 0 gets the link, the other None.
    """
    import torch
    import torch.distributed as dist

    seconds: list[list[float]] = []
    for size in SIZES_BYTES:
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        times = []
        for _ in range(REPEATS):
            _synchronize(device)
            start = time.perf_counter()
            if rank == 0:
                dist.send(buffer, other)
                dist.recv(buffer, other)
            else:
                dist.recv(buffer, 0)
                dist.send(buffer, 0)
            _synchronize(device)
            times.append((time.perf_counter() - start) / 2)
        seconds.append(times[1:])
    if rank:
        return None
    backend = "nccl" if device.type == "cuda" else "gloo"
    return fit_link(seconds, SIZES_BYTES, path=path, backend=backend, between=between)


def measure_storage_links(folder: Path, kind: str) -> list[MeasuredLink]:
    """Measure writing (synced) and reading (without page cache) in the filesystem of ``folder``."""
    path = folder / "bandwidth"

    def write(data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def read(data: bytes) -> None:
        with path.open("rb") as file:
            assert len(file.read()) == len(data)

    def drop_page_cache() -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    writes, reads = [], []
    for size in SIZES_BYTES:
        data = os.urandom(size)
        writes.append([_seconds(write, data) for _ in range(REPEATS)][1:])
        times = []
        for _ in range(REPEATS):
            drop_page_cache()
            times.append(_seconds(read, data))
        reads.append(times[1:])
    path.unlink()
    fields: dict[str, Any] = {"backend": "file", "between": (kind,)}
    return [
        fit_link(writes, SIZES_BYTES, path="write", **fields),
        fit_link(reads, SIZES_BYTES, path="read", **fields),
    ]


def _seconds(action: Callable[[bytes], None], data: bytes) -> float:
    start = time.perf_counter()
    action(data)
    return time.perf_counter() - start


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
