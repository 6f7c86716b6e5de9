"""Peak memory of a rank for a batch of image trajectories: reading its own rows, over all rows.

Episodes have 84 x 84 x 3 bytes per step. Each of four ranks splits the batch as a trainer does and
collates its micro-batches in order. It reads images when it needs them, or all of them first. The
row compares peak anonymous and shared memory above that after imports, of the rank with the most.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.process_memory import measure_peaks
from benchmarks.row import BenchmarkRow, median_row
from rlinf.channels.record_files import RecordFileReader, RecordFileWriter
from rlinf.data.batch import pad_right
from rlinf.data.record import RecordId, to_array
from rlinf.data.trajectory import Trajectory
from rlinf.trainers.minibatch import split_micro_batches

RANKS, EPISODES, STEPS, BUDGET = 4, 64, 200, 256
IMAGE = (84, 84, 3)


class StepwiseBatch:
    """The attributes of a policy with independent steps that splitting a batch needs."""

    has_independent_steps = True

    def num_tokens(self, trajectory: Trajectory) -> int:
        return len(trajectory)

    def shared_prefix(self, trajectory: Trajectory) -> tuple[bytes, int]:
        return b"", 0


def measure() -> list[BenchmarkRow]:
    """Measure both cases, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        command = [sys.executable, "-m", "benchmarks.sharded_batch_memory", name]
        peaks = {}
        for way in ("own", "all"):
            results = measure_peaks([[*command, way, str(rank)] for rank in range(RANKS)])
            peaks[way] = max(peak - baseline for baseline, peak, _ in results)
    print(f"  own {peaks['own'] / 1e6:.0f} MB, all {peaks['all'] / 1e6:.0f} MB")
    return [median_row("owner_memory_ratio", [peaks["own"] / peaks["all"]], "", None, "lower")]


def write(folder: Path) -> None:
    """Write the batch, one episode at a time."""
    random = np.random.default_rng(0)
    writer = RecordFileWriter(folder, "trajectories")
    for number in range(EPISODES):
        images = {"front": random.integers(0, 255, (STEPS, *IMAGE), dtype=np.uint8)}
        actions, identity = np.zeros(STEPS, np.int64), RecordId(0, number)
        episode = Trajectory(identity=identity, actions=actions, images=images, group=number)
        writer.put(episode.to_record())
    writer.close()


def run(folder: Path, way: str, rank: int) -> None:
    """Run one rank."""
    print("ready", flush=True)
    sys.stdin.readline()
    files = RecordFileReader(folder.glob("*-r*.h5"))
    trajectories = list(map(Trajectory.from_record, files))
    if way == "all":
        for trajectory in trajectories:
            trajectory.images = {"front": to_array(trajectory.images["front"])}
    policy: Any = StepwiseBatch()
    (own_batch,) = split_micro_batches(
        policy,
        trajectories,
        None,
        max_tokens=BUDGET,
        padded=True,
        speeds=[1.0] * RANKS,
        rank=rank,
        num_threads=1,
    )
    for spans in own_batch.spans:
        parts = [trajectories[row].slice_steps(start, stop) for row, start, stop in spans]
        pad_right([part.images["front"] for part in parts], max(map(len, parts)))


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
