"""``rlinf doctor``: is this place fit to run on? Each check says what it found and what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Literal

from pipeline.commands.findings import Finding
from rlinf.errors import RlinfError
from slurm.client import Partition, SlurmClient, command_environment

PACKAGES = {
    "submitit": "slurm",
    "snakemake": "slurm",
    "gymnasium": "sims",
    "mujoco": "sims",
    "math_verify": "math",
    "tensorboard": "core",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "vllm": "vllm",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
}
SLOW_FSYNC_S = 0.2
LATE_S = 5.0
PROBE_S = 60.0


def findings(folder: Path) -> Iterator[Finding]:
    """All checks, in order; those on compute nodes only where Slurm answers."""
    yield Finding("ok", "python", f"{sys.version.split()[0]} ({sys.executable})")
    yield from packages()
    usable = yield from storage(folder)
    client = SlurmClient()
    try:
        version, partitions = client.version(), client.partitions()
    except RlinfError as error:
        yield Finding("warn", "slurm", f"{error}")
        return
    yield Finding("ok", "slurm", version)
    for partition in partitions.values():
        yield describe(partition)
    if usable:
        yield from nodes(folder, partitions)


def packages() -> Iterator[Finding]:
    """Optional packages that are missing, with the extra that brings them."""
    missing: dict[str, list[str]] = {}
    for package, extra in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            missing.setdefault(extra, []).append(package)
    absent = {name for names in missing.values() for name in names}
    found = [name for name in PACKAGES if name not in absent]
    yield Finding("ok", "packages", ", ".join(found))
    for extra, names in missing.items():
        yield Finding("warn", "not installed", f"{', '.join(names)}: rlinf-slurm[{extra}]")


def storage(folder: Path) -> Generator[Finding, None, bool]:
    """Whether the run folder can be written, and how fast a synced write and a rename are."""
    folder = folder.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{secrets.token_hex(4)}"
        times = []
        for _ in range(5):
            start = time.perf_counter()
            with probe.open("wb") as file:
                file.write(b"x" * 65536)
                file.flush()
                os.fsync(file.fileno())
            probe.replace(probe.with_suffix(".moved"))
            times.append(time.perf_counter() - start)
        probe.with_suffix(".moved").unlink()
    except OSError as error:
        yield Finding("fail", "run folder", f"{folder}: {error.strerror}; choose another run.root")
        return False
    middle = sorted(times)[2]
    level: Literal["ok", "warn"] = "ok" if middle < SLOW_FSYNC_S else "warn"
    yield Finding(level, "run folder", f"{folder}: write, sync and rename in {middle * 1e3:.1f} ms")
    return True


def describe(partition: Partition) -> Finding:
    """A partition in one line."""
    gpus = ", ".join(f"{count} x {kind or 'gpu'}" for kind, count in partition.gpus.items())
    limit = "unlimited" if partition.time_limit_min is None else f"{partition.time_limit_min} min"
    text = f"{partition.nodes} nodes, {gpus or 'no GPUs'} a node, {limit}"
    return Finding("ok" if partition.available else "warn", f"partition {partition.name}", text)


def nodes(folder: Path, partitions: dict[str, Partition]) -> Iterator[Finding]:
    """One short job per partition: is the folder shared, how late do renames show, same Python?"""
    for name, partition in partitions.items():
        if not partition.available:
            continue
        probe = folder.expanduser().absolute() / f".doctor-{secrets.token_hex(4)}"
        yield probe_partition(name, probe)


def probe_partition(name: str, probe: Path) -> Finding:
    """Let a node of a partition answer through the run folder."""
    what = f"node of {name}"
    code = (
        "import json,os,socket,sys,time;p=sys.argv[1];"
        "json.dump({'host':socket.gethostname(),'python':sys.version.split()[0],"
        "'time':time.time()},open(p+'.part','w'));os.replace(p+'.part',p)"
    )
    command = ["srun", "-p", name, "-n1", "-c1", "-t", "2", "--mem=500", "--immediate=30", "-Q"]
    try:
        done = subprocess.run(
            [*command, sys.executable, "-c", code, str(probe)],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
            env=command_environment(),
        )
    except subprocess.TimeoutExpired:
        return Finding("warn", what, f"no free node within {PROBE_S:.0f} s; not checked")
    if done.returncode:
        first = (done.stderr.strip().splitlines() or ["unknown error"])[-1]
        busy = "Unable to allocate" in done.stderr or "immediate" in done.stderr.lower()
        return Finding("warn" if busy else "fail", what, first)
    seen = time.time()
    while not probe.exists():
        if time.time() - seen > LATE_S:
            return Finding("fail", what, "its files do not show here: run.root is not shared")
        time.sleep(0.02)
    late = time.time() - seen
    answer = json.loads(probe.read_text())
    probe.unlink()
    if answer["python"] != sys.version.split()[0]:
        return Finding("fail", what, f"{answer['host']} runs Python {answer['python']}")
    return Finding("ok", what, f"{answer['host']}: same Python, a rename shows after {late:.2f} s")
