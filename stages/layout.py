"""Where a run keeps what: the one place that knows the names of folders and files."""

from __future__ import annotations

from pathlib import Path

CONFIG, PLAN, RUN = "config.yaml", "plan.yaml", "run.json"
CODE, KEPT = "code.json", "kept.json"
"""Digests of the modules that make results, and which results count though those differ."""
CHANNELS = "channels"
"""Keys, and the addresses of those who can be spoken to."""
POOLS, STATUS = "pools", "status.json"
ANSWERS = "answers"
"""What others answered the reward, which is not asked again when a stage is repeated."""
VIDEOS = "videos"
"""Of held-out episodes, in the output of an evaluation."""
DRIVER = "driver"
"""The job of a driver that was submitted."""
STOP = "stop"
"""Holds the token of the driver that is to stop."""
METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
TOLD = "told.txt"
"""Digests of what trackers were told."""


def offline_folder(run: Path, stage: str) -> Path:
    """Output folder of a stage that runs once, before the first iteration."""
    return run / stage


def stage_folder(run: Path, stage: str, iteration: int) -> Path:
    """Output folder of a stage of an iteration, or of an evaluation.

    ``iteration`` counts from 0; for ``evaluate`` it is the version of the weights: 0 before the
    first iteration, n after n iterations.
    """
    if stage == "evaluate":
        return run / stage / f"{iteration:04d}"
    return run / "it" / f"{iteration:04d}" / stage
