"""Memory of the weights that eight processes of a collocated pool hold, over one copy of them.

A random model of 73 million parameters in float32 (292 MB) is sharded over eight processes of one
machine. In each version, all of them collect the full weights as the sync stage does, and read them
as an engine does that loads them. Memory is the proportional set size: a page that several
processes share counts once.

``node_copy_memory_ratio`` is the memory of all processes with a version of the weights, minus that
after they have freed it, divided by the bytes of the weights; the largest of all versions.
``node_copy_buffers_mib`` is what the collections leave in each process. It depends on the largest
blocks that the allocator retains (32 MiB), not on the size of the model. The trainer is on CPUs;
pinned buffers of GPUs are not measured.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.load_memory import SIZES, write_model
from benchmarks.process_memory import proportional_bytes
from benchmarks.row import BenchmarkRow, median_row
from rlinf import process_tuning

PROCESSES, VERSIONS = 8, 2
MODEL = SIZES | {
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
}


def measure() -> list[BenchmarkRow]:
    """Measure all processes at the start, and with and without each version."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, total = write_model(folder / "model", MODEL)
        (folder / "channels").mkdir()
        command = [sys.executable, "-m", "benchmarks.node_copy_memory", name]
        processes = [
            subprocess.Popen(
                [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(PROCESSES)
        ]
        try:
            start, *sizes = [_measure_memory(processes) for _ in range(1 + 2 * VERSIONS)]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    ratios = [(held - freed) / total for held, freed in zip(sizes[::2], sizes[1::2], strict=True)]
    buffers = (sizes[-1] - start) / PROCESSES / 2**20
    print(f"  {total / 1e6:.0f} MB in {PROCESSES} processes; each version: {ratios}")
    return [
        median_row("node_copy_memory_ratio", [max(ratios)], "", 1.2, "lower"),
        median_row("node_copy_buffers_mib", [buffers], "MiB", None, "lower"),
    ]


def _measure_memory(processes: list[subprocess.Popen[str]]) -> int:
    """Wait until each process has printed a line; return their memory, and let them continue.

    Raises:
        RuntimeError: a process ended.
    """
    for process in processes:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("a process ended before it had the weights")
    size = sum(proportional_bytes(process.pid) for process in processes)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return size


def run(folder: Path, rank: int) -> None:
    """Run one process, with the memory allocator tuned as in a run."""
    process_tuning.tune_process()
    import torch

    from rlinf.channels.process_group import ProcessGroupInfo
    from rlinf.config import OptimizerSection
    from rlinf.models.causal_lm import CausalLM
    from rlinf.models.causal_lm_config import CausalLMConfig
    from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
    from rlinf.weights.node_copy import collect_once_per_node

    torch.set_num_threads(1)
    model = folder / "model"
    policy = CausalLM.meta_from_folder(model, CausalLMConfig(path=model))
    world = ProcessGroupInfo(rank, PROCESSES, rendezvous_file=folder / "channels" / "group-t.json")
    trainer = FSDPTrainer(policy, FSDPConfig(device="cpu"), OptimizerSection(), world)
    _wait("created")
    for _ in range(VERSIONS):
        weights = collect_once_per_node(trainer.stream_weights, is_needed=True)
        assert weights is not None
        _ = [float(tensor.sum()) for tensor in weights.values()]  # reads all pages
        _wait("held")
        del weights
        _wait("freed")


def _wait(state: str) -> None:
    """Report the state of this process, and wait until its memory is measured."""
    print(state, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
