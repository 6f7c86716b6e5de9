"""A small profile with numbers that anyone can check."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from pipeline.planning.profile.identity import Identity
from pipeline.planning.profile.schema import (
    KindProfile,
    Lengths,
    Measured,
    Overhead,
    Point,
    Profile,
)
from pipeline.planning.profile.trial import Case, Task
from pipeline.run import Run
from stages.layout import CONFIG, offline_folder

IDENTITY = Identity(model="m", config="c", code="0.1+1")


def point(stage: str, processes: int, seconds: float, **more: object) -> Point:
    values = {"nodes": 1, "samples": 8, "tokens": 80, **more}
    return Point(
        stage=stage,
        processes=processes,
        time=Measured.of([seconds, seconds * 1.1]),
        **values,
    )


def overhead(name: str, seconds: float, processes: int = 1) -> Overhead:
    return Overhead.of([seconds], name=name, nodes=1, processes=processes)


def kind(*points: Point, **more: object) -> KindProfile:
    return KindProfile(
        partition="a100",
        gpu_type="a100",
        devices_per_node=4,
        points=points or (point("train", 1, 4.0, token_budget=64),),
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
        schema_version=1,
        taken=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        identity=IDENTITY,
        samples=8,
        token_budget=64,
        weights_bytes=1000,
        lengths=Lengths(samples=(2, 3, 9), count=3, truncated_share=0.1, horizon=12),
        kinds=kinds or {"a100": kind()},
    )


def task(run: Run, folder: Path, **more: object) -> Task:
    """A task of one process on this machine."""
    values = {
        "cases": (Case(starts=run.config.rollout.batch, token_budget=8192),),
        "seconds": 1,
        **more,
    }
    return Task(
        config=run.folder / CONFIG,
        initial=offline_folder(run.folder, "warm_start"),
        key="k",
        kinds=("local",),
        folder=folder,
        nodes=1,
        processes=1,
        submitted=0,
        **values,
    )
