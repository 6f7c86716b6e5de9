"""A cluster of two kinds of GPUs and a profile of it, by formulas that a test can check."""

from __future__ import annotations

from datetime import UTC, datetime

from pipeline.planning.profile.schema import (
    KindProfile,
    Measurement,
    Overhead,
    Profile,
    ProfileIdentity,
    ProfilePoint,
    QueueWait,
)
from rlinf.config import RunConfig
from slurm.inventory import Inventory, NodeGroup, PartitionInventory

TAKEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SPEED = {"a100": 1.0, "h100": 2.0, "cpu": 0.1}
WORK = {"rollout": 40.0, "reward": 1.0, "inference": 8.0, "train": 24.0, "sync": 0.5}
"""Seconds of each stage on one A100; it shrinks with processes and speed, but for FIXED."""
FIXED = 0.5
OVERHEADS = {
    "submission": 1.0,
    "startup": 0.5,
    "imports": 2.0,
    "engine_load": 0.25,
    "trainer_load": 0.75,
}


def work(stage: str, kind: str, processes: int) -> float:
    """Seconds of work."""
    count = 1 if stage in ("reward", "sync") else processes
    return FIXED + WORK[stage] / SPEED[kind] / count


def group(kind: str, nodes: int, *, first: int = 1) -> NodeGroup:
    gpus = kind != "cpu"
    return NodeGroup(
        count=nodes,
        gpu_type=kind if gpus else "",
        gpus_per_node=2 if gpus else 0,
        cpus_per_node=8,
        mem_mb_per_node=8000,
        features=(kind,),
        nodes=tuple(f"{kind}-{i}" for i in range(first, first + nodes)),
        idle_nodes=nodes,
        idle_gpus=2 * nodes if gpus else 0,
    )


def inventory(nodes: int = 2) -> Inventory:
    """Partitions ``a100``, ``h100``, ``cpu``, and ``gpu`` over the nodes of the first two."""
    groups = {
        "a100": (group("a100", nodes),),
        "h100": (group("h100", nodes),),
        "gpu": (group("a100", nodes), group("h100", nodes)),
        "cpu": (group("cpu", 1),),
    }
    return Inventory(
        schema_version=1,
        created_at=TAKEN,
        slurm_version="25.05.1",
        partitions={
            name: PartitionInventory(name=name, groups=own, time_limit_min=60)
            for name, own in groups.items()
        },
    )


def kind_profile(kind: str, wait_s: float = 0.0) -> KindProfile:
    points = [
        ProfilePoint(
            stage=stage,
            nodes=1,
            processes=processes,
            samples=samples,
            time=Measurement.of([seconds * f for f in (0.99, 1.0, 1.01)]),
            peak_memory_bytes=400 << 20,
        )
        for stage in WORK
        for processes in ((1,) if stage in ("reward", "sync") else (1, 2, 4))
        for samples in (16, 32)
        for seconds in [FIXED + (work(stage, kind, processes) - FIXED) * (samples / 32)]
    ]
    overheads = [
        Overhead.of([seconds, seconds], name=name, nodes=1, processes=1)
        for name, seconds in OVERHEADS.items()
    ]
    return KindProfile(
        partition=kind,
        gpu_type="" if kind == "cpu" else kind,
        devices_per_node=8 if kind == "cpu" else 2,
        points=tuple(points),
        overheads=tuple(overheads),
        waits=(QueueWait(nodes=1, expected_s=wait_s),) if wait_s else (),
    )


def profile(config: RunConfig, *kinds: str, **waits: float) -> Profile:
    """Measurements of some kinds; all by default."""
    return Profile(
        schema_version=4,
        created_at=TAKEN,
        identity=ProfileIdentity.of(config),
        samples=32,
        weights_bytes=4_000_000,
        lengths=(2, 3, 9),
        kinds={kind: kind_profile(kind, waits.get(kind, 0.0)) for kind in kinds or SPEED},
    )
