"""The layout of a run folder: names of its folders and files, which only this module defines."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE, PLAN_FILE, RUN_FILE = "config.yaml", "plan.yaml", "run.json"
"""Frozen configuration; plan; and the run's checksum, versions and effective settings."""
CODE_FILE, ACCEPTED_FILE = "code.json", "accepted_mismatches.json"
"""``CODE_FILE`` has the digests of the modules on which results depend; ``ACCEPTED_FILE`` lists the
results that ``--keep`` accepted although code or configuration differ."""
CHANNELS_FOLDER = "channels"
"""Keys and addresses of the processes that accept connections."""
POOLS_FOLDER, STATUS_FILE = "pools", "status.json"
"""Folder of the pools' state; the file in it has the current state of all workers."""
REWARD_CACHE_FOLDER = "reward-cache"
"""Answers of reward servers and judges, so that a repeated stage sends no request twice."""
VIDEOS_FOLDER = "videos"
"""Videos of held-out episodes, in the output of an evaluation."""
DRIVER_JOB_FOLDER = "driver"
"""Folder of the Slurm job of a submitted driver."""
STOP_FILE = "stop"
"""Contains the token of the driver that must stop."""
METRICS_FILE, TIMINGS_FILE = "metrics.jsonl", "timings.jsonl"
"""One line per finished iteration with its metrics; one line per stage with its times."""
GPU_HOURS_FILE = "gpu_hours.json"
"""For how long each job has held how many GPUs."""
DATA_FILE = "data.json"
"""Sizes of the sets of problems of a language task."""
TRACKED_FILE = "tracked.txt"
"""Digests of the metrics that trackers have received."""


def setup_stage_folder(run: Path, stage: str) -> Path:
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
"""Stage name that the status shows for a work item (some of the starts of a rollout)."""


def worker_name(pool: str, rank: int) -> str:
    """Return the name by which the driver and other workers address a rank of a pool."""
    return f"{pool}-r{rank}"


def worker_pointer(folder: Path, worker: str) -> Path:
    """Return the file in the folder for channels by which other workers find a worker's server."""
    return folder / f"{worker}.json"


def work_item_channel(work_item: str) -> str:
    """Return the channel of a work item's trajectories in the worker that generates them."""
    return f"work-item-{work_item}"


def partial_samples_channel(work_item: str) -> str:
    """Return the channel of a work item's unfinished samples in the worker that began it."""
    return f"partial-samples-{work_item}"
