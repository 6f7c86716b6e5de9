"""Training tokens per second on a GPU, and model FLOPs utilization against a measured matmul rate.

The model is a Qwen2.5 with 1.5 billion parameters and random weights, with FSDP2 on one device. It
computes in bfloat16; weights, gradients and moments are float32. FLOPs are counted by
:mod:`pipeline.planning.cost.model_shape`: matmuls and causal attention, three times a forward pass.
Recomputation does not count, nor does the head for tokens that are not predicted. The matmul rate
is that of two square bfloat16 matrices, an upper bound for a training step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.row import BenchmarkRow, median_row
from pipeline.planning.cost.model_shape import ModelShape, from_hf_config
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.load_balancing import StepSpan
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from rlinf.models.base import StepOutputs
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers.base import Loss, loss_from_steps
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer

ROUNDS, WARM = 5, 2
PROMPT, ANSWER, ROWS, BUDGET = 512, 1536, 32, 16384
"""Tokens of a prompt and of a response, sequences per step, and tokens per micro-batch."""
DEVICE = "cuda"
SIDE, PRODUCTS = 8192, 50
"""Size of the square matrices, and number of matmuls that are timed together."""
QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""Sizes of the published Qwen2.5-1.5B."""


def training_flops(shape: ModelShape, prompts: Sequence[int], answers: Sequence[int]) -> float:
    """Return the FLOPs of forward and backward passes over sequences of a prompt and a response.

    Of a sequence of ``L`` tokens the network reads the first ``L - 1``. Each one attends to half
    of them on average. The head runs only for the tokens of the response.
    """
    read = np.asarray(prompts, np.float64) + np.asarray(answers, np.float64) - 1
    layers = float(shape.layer_flops.sum()) + shape.layers * np.asarray(shape.score_flops(read / 2))
    return 3.0 * (float((read * layers).sum()) + shape.head_flops * float(np.sum(answers)))


def measure() -> list[BenchmarkRow]:
    """Measure both rows.

    Raises:
        ConfigError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "gpu_train_mfu: torch sees no CUDA device here; run it on a machine with a GPU and a "
            "torch for CUDA"
        )
    shape = from_hf_config(QWEN)
    data = trajectories(np.random.default_rng(0), QWEN["vocab_size"])
    learner = trainer()
    flops = training_flops(shape, [PROMPT] * ROWS, [ANSWER] * ROWS)
    tokens, shares, speeds = ROWS * (PROMPT + ANSWER), list[float](), list[float]()
    for number in range(WARM + ROUNDS):
        rate = matrix_rate()
        seconds = timed(lambda: learner.step(data, loss_from_steps(loss), lr=1e-6))
        print(f"  {tokens / seconds:.0f} tokens/s, products at {rate / 1e12:.0f} TFLOP/s")
        if number >= WARM:
            speeds.append(tokens / seconds)
            shares.append(flops / seconds / rate)
    return [
        median_row("gpu_train_tokens_per_s", speeds, "tokens/s", None, "higher"),
        median_row("gpu_train_mfu", shares, "", 0.45, "higher"),
    ]


def trainer(sizes: Mapping[str, Any] = QWEN, **options: Any) -> FSDPTrainer:
    """Return a trainer of one process, with random weights; ``options`` are keys of FSDPConfig."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    qwen = {name: value for name, value in sizes.items() if name != "model_type"}
    with torch.device(DEVICE):
        module = AutoModelForCausalLM.from_config(Qwen2Config(**qwen), dtype=torch.float32)
    defaults = {"device": DEVICE, "param_dtype": "bfloat16", "max_tokens_per_microbatch": BUDGET}
    config = FSDPConfig(**(defaults | options))
    return FSDPTrainer(
        CausalLM(module, Path()), config, OptimizerSection(lr=1e-6), ProcessGroupInfo()
    )


def trajectories(
    random: np.random.Generator,
    vocabulary: int,
    rows: int = ROWS,
    prompt: int = PROMPT,
    answer: int = ANSWER,
    group_size: int = 1,
) -> list[Trajectory]:
    """Return sequences of random tokens; ``group_size`` neighbours share a prompt."""
    prompts = [random.integers(0, vocabulary, prompt) for _ in range(-(-rows // group_size))]
    return [
        Trajectory(
            identity=RecordId(0, row),
            actions=random.integers(0, vocabulary, answer),
            prompt=prompts[row // group_size],
        )
        for row in range(rows)
    ]


def loss(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
    """Return an arbitrary loss: nearly all work is in the network."""
    rows = torch.tensor(float(len(spans)), device=outputs.logprobs.device)
    return -outputs.logprobs.mean(), {"rows": rows}


def matrix_rate() -> float:
    """Measure the current FLOP/s of a matmul of two square bfloat16 matrices."""
    left, right = (torch.randn(SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16) for _ in "ab")

    def products() -> None:
        for _ in range(PRODUCTS):
            left @ right

    timed(products)
    return 2.0 * SIDE**3 * PRODUCTS / timed(products)


def timed(work: Any) -> float:
    """Return the seconds until the GPU has finished the work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start
