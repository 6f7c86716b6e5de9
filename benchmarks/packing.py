"""Speed of optimizer steps on packed rows, compared with padded rows and without shared prompts.

CPU seconds on one thread. Each setup uses its best token budget, and setups alternate. Padded rows
in several micro-batches are sorted by length, so they have little padding. A batch in a single
micro-batch is padded to its longest row.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.row import BenchmarkRow, median_row
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.load_balancing import StepSpan
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.models.base import StepOutputs
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from rlinf.trainers.base import Loss, loss_from_steps
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer

GROUPS, GROUP, ROUNDS = 16, 8, 7
MEAN, LONGEST, PROMPT = 41, 256, 16
"""Rows with a long tail: mean and maximum length of the geometric responses, and prompt length."""
EVEN, BEGIN = 32, 4
"""Rows with evenly spread lengths (mean half the maximum): number of rows, and prompt length."""
SHARED, ANSWER = 256, 64
"""Length of a prompt that a group shares, and of each response."""
BUDGETS = (2048, 8192)


def measure() -> list[BenchmarkRow]:
    """Measure all rows."""
    random = np.random.default_rng(0)
    tail = np.minimum(random.geometric(1 / MEAN, GROUPS * GROUP), LONGEST)
    tailed = trajectories(PROMPT, tail, GROUP)
    spread = trajectories(BEGIN, np.linspace(1, LONGEST - BEGIN, EVEN).astype(int), 1)
    one_batch = (EVEN * LONGEST,)
    equal = np.full(4 * GROUP, ANSWER)
    shared, separate = (trajectories(SHARED, equal, group) for group in (GROUP, 1))
    packed = (True, tailed, BUDGETS)
    return [
        median_row(
            "packing_speedup",
            ratios((False, spread, one_batch), (True, spread, BUDGETS)),
            "",
            1.8,
            "higher",
        ),
        median_row(
            "packing_vs_sorted", ratios((False, tailed, BUDGETS), packed), "", None, "higher"
        ),
        median_row(
            "shared_prefix_speedup",
            ratios((True, separate, BUDGETS), (True, shared, BUDGETS)),
            "",
            2.5,
            "higher",
        ),
    ]


Setup = tuple[bool, list[Trajectory], tuple[int, ...]]
"""A setup: whether rows are packed, the rows, and the token budgets of a micro-batch."""


def ratios(*setups: Setup) -> list[float]:
    """Return the seconds of the first setup divided by those of the second, per round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = CausalLMConfig(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=512)
        CausalLM.create(config, {"alphabet": "0123456789+="}, 0, folder)
        runs = [
            (trainer(folder, config, packing=packing, budget=budget), data)
            for packing, data, budgets in setups
            for budget in budgets
        ]
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(ROUNDS + 1):
            for (run_trainer, data), run_times in zip(runs, times, strict=True):
                start = time.process_time()
                run_trainer.step(data, loss_from_steps(loss), lr=1e-5)
                run_times.append(time.process_time() - start)
    medians = [statistics.median(run_times[1:]) for run_times in times]
    print("  " + ", ".join(f"{second:.2f} s" for second in medians))
    half = len(setups[0][2])
    sides = (range(half), range(half, len(runs)))
    best = [min(side, key=lambda i: medians[i]) for side in sides]
    first, second = (times[i][1:] for i in best)
    return [a / b for a, b in zip(first, second, strict=True)]


def trajectories(prompt: int, lengths: np.ndarray, group: int) -> list[Trajectory]:
    """Return rows with responses of ``lengths``, and one prompt per ``group`` rows."""
    random = np.random.default_rng(0)
    prompts = random.integers(2, 14, (-(-len(lengths) // group), prompt))
    return [
        Trajectory(
            identity=RecordId(0, i),
            actions=random.integers(2, 14, length),
            prompt=prompts[i // group],
        )
        for i, length in enumerate(lengths)
    ]


def trainer(folder: Path, config: CausalLMConfig, *, packing: bool, budget: int) -> FSDPTrainer:
    """Return a trainer of one process and one thread."""
    settings = FSDPConfig(packing=packing, max_tokens_per_microbatch=budget, device="cpu")
    return FSDPTrainer(
        CausalLM.load(folder, config), settings, OptimizerSection(lr=1e-5), ProcessGroupInfo()
    )


def loss(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
    """Return an arbitrary loss: nearly all work is in the network."""
    return -outputs.logprobs.mean(), {"rows": torch.tensor(float(len(spans)))}
