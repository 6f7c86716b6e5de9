"""An optimizer step on rows of long-tailed lengths: packed side by side over padded ones."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.row import Row, median_row
from rlinf.channels.world import World
from rlinf.config import OptimizerSection
from rlinf.data.packing import Span
from rlinf.data.record import Identity, Record
from rlinf.models.base import StepOutputs
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.trainers.base import Loss, of_steps
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer

ROWS, MEAN, LONGEST, PROMPT, ROUNDS = 128, 41, 256, 16, 7
BUDGETS = (512, 2048)
"""Of a micro-batch: packed rows of one are masked from each other, work that grows with it."""


def measure() -> list[Row]:
    """Seconds padded over seconds packed, one thread, each with the best of its budgets."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = CausalLMConfig(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=512)
        CausalLM.create(config, {"alphabet": "0123456789+="}, 0, folder)
        ways = [
            trainer(folder, config, packing=packing, budget=budget)
            for packing in (False, True)
            for budget in BUDGETS
        ]
        data = records()
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(ROUNDS + 1):
            for made, of in zip(ways, times, strict=True):
                start = time.perf_counter()
                made.step(data, of_steps(loss), lr=1e-5)
                of.append(time.perf_counter() - start)
    medians = [statistics.median(of[1:]) for of in times]
    print("  " + ", ".join(f"{second:.2f} s" for second in medians))
    best = [min(range(first, first + len(BUDGETS)), key=lambda i: medians[i]) for first in (0, 2)]
    padded, packed = (times[i][1:] for i in best)
    ratios = [one / other for one, other in zip(padded, packed, strict=True)]
    return [median_row("packing_speedup", ratios, "", None, "higher")]


def records() -> list[Record]:
    """Rows whose answers have geometric lengths, as those of a language model in training."""
    random = np.random.default_rng(0)
    lengths = np.minimum(random.geometric(1 / MEAN, ROWS), LONGEST)
    return [
        Record(
            Identity(0, i),
            {"actions": random.integers(2, 14, length)},
            {"prompt": random.integers(2, 14, PROMPT)},
        )
        for i, length in enumerate(lengths)
    ]


def trainer(folder: Path, config: CausalLMConfig, *, packing: bool, budget: int) -> FSDPTrainer:
    """Of one process and thread."""
    settings = FSDPConfig(packing=packing, token_budget=budget, device="cpu")
    return FSDPTrainer(CausalLM.load(folder, config), settings, OptimizerSection(lr=1e-5), World())


def loss(outputs: StepOutputs, spans: list[Span]) -> Loss:
    """Any: its work is that of the network."""
    return -outputs.logprobs.mean(), {"rows": torch.tensor(float(len(spans)))}
