"""The layout of a run folder: names of its folders and files, which only this module defines."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE, PLAN_FILE, RUN_FILE = "config.yaml", "plan.yaml", "run.json"
CODE_FILE, ACCEPTED_FILE = "code.json", "accepted_mismatches.json"
"""Digests of the modules on which results depend, and results that ``--keep`` accepted although
code or configuration differ."""
CHANNELS_FOLDER = "channels"
"""Keys and addresses of the processes that accept connections."""
POOLS_FOLDER, STATUS_FILE = "pools", "status.json"
REWARD_CACHE_FOLDER = "reward-cache"
"""Answers of reward servers and judges, so that a repeated stage sends no request twice."""
VIDEOS_FOLDER = "videos"
"""Videos of held-out episodes, in the output of an evaluation."""
DRIVER_JOB_FOLDER = "driver"
"""The job of a driver that was submitted to Slurm."""
STOP_FILE = "stop"
"""Contains the token of the driver that must stop."""
METRICS_FILE, TIMINGS_FILE = "metrics.jsonl", "timings.jsonl"
TRACKED_FILE = "tracked.txt"
"""Digests of the metrics that trackers have received."""


def offline_folder(run: Path, stage: str) -> Path:
    """Return the output folder of a stage that runs once, before the first iteration."""
    return run / stage


def stage_folder(run: Path, stage: str, iteration: int) -> Path:
    """Return the output folder of a stage of an iteration, or of an evaluation.

    ``iteration`` counts from 0; for ``evaluate`` it is the version of the weights: 0 before the
    first iteration, n after n iterations.
    """
    if stage == "evaluate":
        return run / stage / f"{iteration:04d}"
    return run / "it" / f"{iteration:04d}" / stage


WORK_ITEM = "work_item"
"""Stage name, in the status, of a work item: some of the starts of a rollout."""


def worker_name(pool: str, rank: int) -> str:
    """Return the name of a rank of a pool on the control link."""
    return f"{pool}-r{rank}"


def partial_samples_channel(work_item: str) -> str:
    """Return the channel for unfinished samples that a worker sends to its successor."""
    return f"partial-samples-{work_item}"
