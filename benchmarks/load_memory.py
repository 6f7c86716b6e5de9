"""Peak memory of a process that loads, saves and publishes its shard of a model.

A random model of about a billion parameters in float32 (4 GB) runs on 4 processes of one machine,
without optimizer state. Each process builds the network on the meta device, shards it, reads its
rows of the checkpoint, writes a sharded checkpoint and takes part in publishing all weights. The
row is peak anonymous and shared memory minus that after imports, divided by the bytes of the shard
plus the largest tensor. It is that of the process with the largest ratio.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.process_memory import measure_peaks
from benchmarks.row import BenchmarkRow, median_row
from rlinf import process_tuning

PROCESSES = 4
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 7168,
    "tie_word_embeddings": True,
}
"""Sizes of a Qwen2 model; ``RLINF_BENCH_LAYERS`` overrides the number of layers."""


def measure() -> list[BenchmarkRow]:
    """Load the model once and measure all processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layers = int(os.environ.get("RLINF_BENCH_LAYERS", SIZES["num_hidden_layers"]))
        largest, total = write_model(folder / "model", SIZES | {"num_hidden_layers": layers})
        (folder / "channels").mkdir()
        command = [sys.executable, "-m", "benchmarks.load_memory", str(folder)]
        results = measure_peaks([[*command, str(rank)] for rank in range(PROCESSES)])
        ratios = [
            (peak - baseline) / (int(shard_bytes) + largest)
            for baseline, peak, shard_bytes in results
        ]
    print(f"  model of {total / 4e9:.2f} billion parameters; each process: {ratios}")
    return [median_row("load_memory_ratio", [max(ratios)], "", 1.3, "lower")]


def write_model(folder: Path, sizes: Mapping[str, Any]) -> tuple[int, int]:
    """Write random weights, one tensor at a time; returns bytes of the largest one and of all.

    Args:
        sizes: settings of a Qwen2 model, as :data:`SIZES`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlinf.safetensors_io import StreamedState, save_tensors

    folder.mkdir()
    settings = AutoConfig.for_model("qwen2", **sizes)
    settings.architectures = ["Qwen2ForCausalLM"]
    settings.save_pretrained(folder)
    with torch.device("meta"):
        meta_state = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).state_dict()
    del meta_state["lm_head.weight"]
    random = np.random.default_rng(0)
    weights = (
        (name, torch.from_numpy(random.standard_normal(tuple(t.shape), np.float32)).mul_(0.02))
        for name, t in meta_state.items()
    )
    save_tensors(
        folder / "model.safetensors",
        StreamedState(meta_state, weights),
        list(meta_state),
        {"format": "pt"},
    )
    nbytes = [tensor.nbytes for tensor in meta_state.values()]
    return max(nbytes), sum(nbytes)


def run(folder: Path, rank: int) -> None:
    """Run one process, with the memory allocator tuned as in a run."""
    process_tuning.tune_process()
    import torch
    from transformers import Qwen2ForCausalLM  # noqa: F401 - imported before the measurement

    import rlinf.trainers.fsdp  # noqa: F401
    from rlinf.channels.process_group import ProcessGroupInfo
    from rlinf.config import OptimizerSection
    from rlinf.models.causal_lm import CausalLM
    from rlinf.models.causal_lm_config import CausalLMConfig
    from rlinf.sharded_tensors import local_shard
    from rlinf.trainers import sharded_checkpoint
    from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer

    torch.set_num_threads(1)
    print("ready", flush=True)
    sys.stdin.readline()
    model = folder / "model"
    policy = CausalLM.meta_from_folder(model, CausalLMConfig(path=model))
    world = ProcessGroupInfo(rank, PROCESSES, rendezvous_file=folder / "channels" / "group-t.json")
    trainer = FSDPTrainer(policy, FSDPConfig(device="cpu"), OptimizerSection(), world)
    weights = policy.module.state_dict(keep_vars=True)
    sharded_checkpoint.write_shards(folder / "checkpoint", {"model": weights}, rank, PROCESSES)
    state = trainer.stream_weights()
    if rank == 0:
        (folder / "published").mkdir()
        policy.save_state(folder / "published", state)
    state.drain()
    shard_bytes = {id(tensor): local_shard(tensor).nbytes for tensor in weights.values()}
    print(sum(shard_bytes.values()), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
