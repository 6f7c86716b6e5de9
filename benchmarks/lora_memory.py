"""Memory of gradients and optimizer state: adapters of rank 8, divided by training all weights.

The model has the sizes of SmolLM2-135M and random float32 weights. The bytes on the device are read
after a backward pass and after a step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.row import BenchmarkRow, median_row
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.load_balancing import StepSpan
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.models.base import StepOutputs
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers.base import Loss, loss_from_steps
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from rlinf.trainers.lora import LoRAConfig

RANK = 8


def measure() -> list[BenchmarkRow]:
    """Measure the row."""
    adapters, full = allocated_bytes(LoRAConfig(rank=RANK)), allocated_bytes(None)
    print(f"  {adapters / 2**20:.1f} MiB of {full / 2**20:.0f} MiB")
    return [median_row("lora_memory_ratio", [adapters / full], "", 0.05, "lower")]


def allocated_bytes(lora: LoRAConfig | None) -> int:
    """Return the bytes of gradients after a backward pass plus optimizer state after a step."""
    settings = AutoConfig.for_model(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as name:
        module = AutoModelForCausalLM.from_config(settings)
        trainer = FSDPTrainer(
            CausalLM(module, Path(name)),
            FSDPConfig(device="cpu", lora=lora),
            OptimizerSection(),
            ProcessGroupInfo(),
        )
    example = Trajectory(identity=RecordId(0, 0), actions=np.arange(8), prompt=np.arange(8))
    trainer.accumulate([example], loss_from_steps(loss))
    gradients = trainer.group_sizes()["gradients"].on_device
    trainer.update(lr=1e-4)
    total = gradients + trainer.group_sizes()["optimizer"].on_device
    trainer.close()
    return total


def loss(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
    """Return the loss of supervised fine-tuning."""
    return -outputs.logprobs.mean(), {"rows": torch.tensor(float(len(spans)))}
