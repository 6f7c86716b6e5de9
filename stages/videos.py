"""Videos of held-out episodes: of each camera an MP4 file beside the trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlinf.data.record import Record
from rlinf.data.video import write_video


def write_videos(
    folder: Path, trajectories: Sequence[Record], columns: Sequence[str], *, most: int, fps: int
) -> int:
    """Write those of the first samples; returns how many files there are.

    Args:
        columns: pictures, uint8 ``[T, H, W, 3]``, of a camera each.
        most: samples below this number are written, if they have a step.
        fps: steps of a second.
    """
    count = 0
    for trajectory in trajectories:
        number = trajectory.identity.sample
        for name in columns if number < most and len(trajectory) else ():
            folder.mkdir(exist_ok=True)
            path = folder / f"{number:04d}-{name.partition('.')[2]}.mp4"
            write_video(path, trajectory.steps[name], fps)
            count += 1
    return count


def without(trajectory: Record, columns: Sequence[str]) -> Record:
    """A trajectory that leaves out some of its columns of steps."""
    steps = {name: column for name, column in trajectory.steps.items() if name not in columns}
    return Record(trajectory.identity, steps, trajectory.context, trajectory.info)
