"""Resource usage of a process and its children: CPU time, memory and GPU.

A thread takes a sample every few seconds while a stage computes. The manifest has the summary in
``timing``, which is no part of the content digest, because it differs between equal runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SAMPLE_INTERVAL_S = 2.0
"""Seconds between two samples."""
REUSE_SAMPLE_S = 0.02
"""Maximum age (s) of a sample that a new window reuses; a sample takes 1 ms with many threads."""
_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class UsageSample(NamedTuple):
    """One sample. ``gpu_*`` are None unless this process already uses a GPU."""

    cpu_s: float
    """CPU seconds of this process and its descendants, running and ended, since their start."""
    memory_bytes: int
    """Resident memory of all these processes; shared pages count once for each process."""
    gpu_share: float | None = None
    """Share of the last 1/6 s to 1 s (NVML) in which a kernel was running."""
    gpu_bytes: int | None = None
    """Memory of the device that is in use, by any process."""
    gpu_total_bytes: int | None = None


def sample_usage() -> UsageSample:
    """Take a sample now. Without ``/proc`` it excludes children, and memory is 0."""
    usage = [
        resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    cpu_s, memory = sum(used.ru_utime + used.ru_stime for used in usage), 0
    for pid in _process_tree(os.getpid()):
        try:
            # See proc_pid_stat(5). The process name, in parentheses, may contain any character.
            # After it, index 21 has the resident pages, and 11 to 14 have the CPU ticks.
            fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        memory += int(fields[21]) * _PAGE_BYTES
        if pid != os.getpid():
            cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S
    return UsageSample(cpu_s, memory, *_gpu_usage())


def _process_tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_bytes().split():
                    yield from _process_tree(int(child))


class _NvmlUtilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@cache
def _nvml() -> ctypes.CDLL | None:
    """Return the library NVML, which NVIDIA's driver installs; None if it is missing."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


@cache
def _nvml_device(uuid: str) -> ctypes.c_void_p | None:
    library, handle = _nvml(), ctypes.c_void_p()
    if library is None:
        return None
    status = library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
    return handle if status == 0 else None


def _gpu_usage() -> tuple[float | None, int | None, int | None]:
    """Return the usage of torch's current device, without initializing CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None, None, None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    handle, library = _nvml_device(f"GPU-{uuid}"), _nvml()
    if handle is None or library is None:
        free, total = torch.cuda.mem_get_info()
        return None, total - free, total
    used, memory = _NvmlUtilization(), _NvmlMemory()
    share = None
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == 0:
        share = used.gpu / 100
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return share, None, None
    return share, int(memory.used), int(memory.total)


@dataclass
class UsageWindow:
    """The samples of one time interval."""

    start: float = field(default_factory=time.monotonic)
    """Start of the interval (monotonic, s)."""
    samples: list[UsageSample] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return ``seconds``, ``cpu_s``, ``memory_mean_bytes`` and ``memory_peak_bytes``; with a
        GPU also ``gpu_share``, ``gpu_peak_bytes`` and ``gpu_total_bytes``."""
        memory = [sample.memory_bytes for sample in self.samples]
        summary_values: dict[str, float] = {
            "seconds": round(time.monotonic() - self.start, 3),
            "cpu_s": round(max(0.0, self.samples[-1].cpu_s - self.samples[0].cpu_s), 3),
            "memory_mean_bytes": round(sum(memory) / len(memory)),
            "memory_peak_bytes": max(memory),
        }
        shares = [s.gpu_share for s in self.samples if s.gpu_share is not None]
        used = [s.gpu_bytes for s in self.samples if s.gpu_bytes is not None]
        totals = [s.gpu_total_bytes for s in self.samples if s.gpu_total_bytes is not None]
        if shares:
            summary_values["gpu_share"] = round(sum(shares) / len(shares), 3)
        if used:
            summary_values |= {"gpu_peak_bytes": max(used), "gpu_total_bytes": max(totals)}
        return summary_values


class UsageMeter:
    """Samples the usage of this process for all open :class:`UsageWindow` objects."""

    def __init__(self, interval_s: float = SAMPLE_INTERVAL_S) -> None:
        self._interval_s, self._lock = interval_s, threading.Lock()
        self._windows: list[UsageWindow] = []
        self._last_sample: tuple[float, UsageSample | None] = (0.0, None)
        """Time (monotonic, s) and sample of the window that ended last."""
        self._has_windows = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def measure(self, results: list[dict[str, Any]], **labels: Any) -> Iterator[None]:
        """Measure the time inside this context; append labels and summary to ``results``."""
        last_time, sample = self._last_sample
        if sample is None or time.monotonic() - last_time > REUSE_SAMPLE_S:
            sample = sample_usage()
        window = UsageWindow(samples=[sample])
        with self._lock:
            self._windows.append(window)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
                self._thread.start()
        self._has_windows.set()
        try:
            yield
        finally:
            with self._lock:
                self._windows.remove(window)
                if not self._windows:
                    self._has_windows.clear()
            window.samples.append(sample_usage())
            self._last_sample = time.monotonic(), window.samples[-1]
            results.append({**labels, **window.summary()})

    def _run(self) -> None:
        while self._has_windows.wait():
            time.sleep(self._interval_s)
            with self._lock:
                windows = list(self._windows)
            if windows:
                sample = sample_usage()
                for window in windows:
                    window.samples.append(sample)


USAGE_METER = UsageMeter()
"""The meter of this process."""
