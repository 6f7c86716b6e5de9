"""Memory of a rank that collects a rollout with pictures and writes it, over its own share of it.

64 environments, 200 steps, two cameras of 128 x 128: 1.26 GB, by two ranks. Each collects its half
with a simulator process of its own and writes it as the stage does. Most anonymous and shared
memory of a rank above its own before the rollout, of the rank with most; over the bytes of the
trajectories that it wrote.
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
"""Episodes of it end soon, so that resets have their part."""


def measure() -> list[BenchmarkRow]:
    """One rollout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.rollout_memory", folder]
        found = measure_peaks([[*command, str(rank)] for rank in range(RANKS)])
    shares = [(peak - rest) / int(output) for rest, peak, output in found]
    print(f"  {[int(output) / 1e6 for *_, output in found]} MB each; each rank: {shares}")
    return [median_row("embodied_records_ratio", [max(shares)], "", 1.2, "lower")]


def run(folder: Path, rank: int) -> None:
    """One rank, which keeps what it frees as those of a run do."""
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
    starts = range(rank, BATCH, RANKS)
    for trajectory in local_rollout_iter(
        environment,
        engine,
        RolloutRequest(0, 0, "train", starts, BATCH, 1, HORIZON, 1.0),
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
