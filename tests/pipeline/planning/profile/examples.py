"""A small profile with numbers that anyone can check."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from pipeline.planning.profile.measurement import ProfileTask
from pipeline.planning.profile.schema import (
    KindProfile,
    Measurement,
    Overhead,
    Profile,
    ProfileIdentity,
    ProfilePoint,
)
from pipeline.run import Run
from stages.layout import CONFIG_FILE, setup_stage_folder

IDENTITY = ProfileIdentity(model="m", config="c", code="0.1+1")


def point(stage: str, processes: int, seconds: float, **more: object) -> ProfilePoint:
    values = {"nodes": 1, "samples": 8, **more}
    return ProfilePoint(
        stage=stage,
        processes=processes,
        time=Measurement.of([seconds, seconds * 1.1]),
        **values,
    )


def overhead(name: str, seconds: float, processes: int = 1) -> Overhead:
    return Overhead.of([seconds], name=name, nodes=1, processes=processes)


def kind(*points: ProfilePoint, **more: object) -> KindProfile:
    return KindProfile(
        partition="a100",
        gpu_type="a100",
        devices_per_node=4,
        points=points or (point("train", 1, 4.0),),
        overheads=(
            overhead("submission", 1.0),
            overhead("startup", 2.0),
            overhead("imports", 3.0),
            overhead("trainer_load", 0.5),
            overhead("trainer_load", 1.5, processes=4),
        ),
        **more,
    )


def profile(**kinds: KindProfile) -> Profile:
    return Profile(
        schema_version=4,
        created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        identity=IDENTITY,
        samples=8,
        weights_bytes=1000,
        lengths=(2, 3, 9),
        kinds=kinds or {"a100": kind()},
    )


def task(run: Run, folder: Path, **more: object) -> ProfileTask:
    """A task of one process on this machine."""
    values = {
        "batch_sizes": (run.config.rollout.batch_size,),
        "seconds": 1,
        **more,
    }
    return ProfileTask(
        config=run.folder / CONFIG_FILE,
        initial=setup_stage_folder(run.folder, "sft"),
        key="k",
        kind="local",
        folder=folder,
        nodes=1,
        processes=1,
        submitted=0,
        **values,
    )
