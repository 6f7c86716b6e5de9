"""Memory of a process that builds its part of a model and publishes it, over what must be there.

A random model of about a billion parameters, in float32 (4 GB), on 4 processes of one machine, with
no optimizer state: each builds the network without memory, shards it, reads its rows of the
checkpoint, writes them as a checkpoint and takes part in publishing the whole. Most anonymous and
shared memory of a process above its own after imports, of the process with most; over the bytes of
its shard and of the largest tensor.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

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
"""Layers of a network of the Qwen2 family; ``RLINF_BENCH_LAYERS`` overrides them."""


def measure() -> list[BenchmarkRow]:
    """One load of the model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        largest, whole = write_model(folder / "model")
        (folder / "channels").mkdir()
        command = [sys.executable, "-m", "benchmarks.load_memory", str(folder)]
        found = measure_peaks([[*command, str(rank)] for rank in range(PROCESSES)])
        shares = [(peak - rest) / (int(output) + largest) for rest, peak, output in found]
    print(f"  model of {whole / 4e9:.2f} billion parameters; each process: {shares}")
    return [median_row("load_memory_ratio", [max(shares)], "", 1.3, "lower")]


def write_model(folder: Path) -> tuple[int, int]:
    """A checkpoint with random weights, a tensor at a time; bytes of the largest and of all."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlinf.safetensors_io import StreamedState, save_tensors

    folder.mkdir()
    layers = int(os.environ.get("RLINF_BENCH_LAYERS", SIZES["num_hidden_layers"]))
    settings = AutoConfig.for_model("qwen2", **{**SIZES, "num_hidden_layers": layers})
    settings.architectures = ["Qwen2ForCausalLM"]
    settings.save_pretrained(folder)
    with torch.device("meta"):
        like = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).state_dict()
    del like["lm_head.weight"]
    random = np.random.default_rng(0)
    each = (
        (name, torch.from_numpy(random.standard_normal(tuple(t.shape), np.float32)).mul_(0.02))
        for name, t in like.items()
    )
    save_tensors(
        folder / "model.safetensors", StreamedState(like, each), list(like), {"format": "pt"}
    )
    sizes = [tensor.nbytes for tensor in like.values()]
    return max(sizes), sum(sizes)


def run(folder: Path, rank: int) -> None:
    """One process, which keeps what it frees as those of a run do."""
    process_tuning.tune_process()
    import torch
    from transformers import Qwen2ForCausalLM  # noqa: F401 - its import counts as one

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
    own = {id(tensor): local_shard(tensor).nbytes for tensor in weights.values()}
    print(sum(own.values()), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
