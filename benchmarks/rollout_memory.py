"""Peak memory of a rank that collects and writes a rollout with images, per byte that it writes.

64 environments, 200 steps and two cameras of 128 x 128 are 1.26 GB. Two ranks collect one half
each, with one simulator process per rank, and write it as the stage does. The row is peak anonymous
and shared memory minus that before the rollout, divided by the bytes of the written trajectories.
It is that of the rank with the largest ratio.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.process_memory import measure_peaks
from benchmarks.row import BenchmarkRow, median_row
from rlinf import process_tuning

RANKS, BATCH, HORIZON, SIZE = 2, 64, 200, (128, 128)
TASK = {
    "id": "Hopper-v5",
    "observation": 11,
    "action": {"kind": "box", "size": 3},
    "images": {"track": SIZE, "free": SIZE},
}
"""A task with short episodes, so that resets are included."""


def measure() -> list[BenchmarkRow]:
    """Measure one rollout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.rollout_memory", folder]
        results = measure_peaks([[*command, str(rank)] for rank in range(RANKS)])
    ratios = [(peak - baseline) / int(written_bytes) for baseline, peak, written_bytes in results]
    sizes = [int(written_bytes) / 1e6 for *_, written_bytes in results]
    print(f"  {sizes} MB each; each rank: {ratios}")
    return [median_row("embodied_records_ratio", [max(ratios)], "", 1.2, "lower")]


def run(folder: Path, rank: int) -> None:
    """Run one rank, with the memory allocator tuned as in a run."""
    process_tuning.tune_process()
    import torch

    from rlinf.channels.record_files import RecordFileWriter
    from rlinf.engines.direct import DirectConfig, DirectEngine
    from rlinf.envs.base import RolloutRequest
    from rlinf.envs.gym import GymConfig, GymEnvironment
    from rlinf.models.actor_critic import CNNConfig, CNNPolicy
    from stages.rollout import local_rollout_iter

    torch.set_num_threads(1)
    task, policy = GymConfig.model_validate(TASK), CNNConfig()
    environment = GymEnvironment(task, None)
    (out := folder / f"rank{rank}").mkdir()
    CNNPolicy.create(policy, GymEnvironment.model_spec(task), 0, out)
    engine = DirectEngine(DirectConfig(), CNNPolicy, policy)
    engine.load(out, 0)
    print("ready", flush=True)
    sys.stdin.readline()
    writer, size = RecordFileWriter(out, "trajectories", rank), 0
    samples = range(rank, BATCH, RANKS)
    for trajectory in local_rollout_iter(
        environment,
        engine,
        RolloutRequest(0, 0, "train", samples, BATCH, 1, HORIZON, 1.0),
        "rollout",
    ):
        record = trajectory.to_record()
        size += sum(column.nbytes for column in record.steps.values())
        writer.put(record)
    writer.close()
    environment.close()
    assert writer.count == BATCH // RANKS
    assert sum(file.stat().st_size for file in out.glob("trajectories-*")) > size
    print(size, flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
