"""Optimizer steps on packed rows: over padded ones, and with prompts that rows share.

One thread; seconds of processor time, each way with the best of its budgets, in turns. Padded rows
that are cut into several micro-batches are sorted by length, so they hold little padding; a batch
in one micro-batch is padded to its longest row.
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
"""Mean tokens of rows with a long tail: of the answers (geometric), and of each prompt."""
EVEN, BEGIN = 32, 4
"""Rows whose lengths are evenly spread, so that their mean is half the longest one, and the prompt
of each."""
SHARED, ANSWER = 256, 64
"""Lengths of a prompt that a group shares and of each of its answers."""
BUDGETS = (2048, 8192)


def measure() -> list[BenchmarkRow]:
    """Both rows."""
    random = np.random.default_rng(0)
    tail = np.minimum(random.geometric(1 / MEAN, GROUPS * GROUP), LONGEST)
    tailed = trajectories(PROMPT, tail, GROUP)
    spread = trajectories(BEGIN, np.linspace(1, LONGEST - BEGIN, EVEN).astype(int), 1)
    one_batch = (EVEN * LONGEST,)
    equal = np.full(4 * GROUP, ANSWER)
    together, separate = (trajectories(SHARED, equal, group) for group in (GROUP, 1))
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
            ratios((True, separate, BUDGETS), (True, together, BUDGETS)),
            "",
            2.5,
            "higher",
        ),
    ]


Way = tuple[bool, list[Trajectory], tuple[int, ...]]
"""A setup: whether rows are packed, the rows, and the token budgets of a micro-batch."""


def ratios(*ways: Way) -> list[float]:
    """Seconds of the first way over those of the second, of each round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = CausalLMConfig(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=512)
        CausalLM.create(config, {"alphabet": "0123456789+="}, 0, folder)
        made = [
            (trainer(folder, config, packing=packing, budget=budget), data)
            for packing, data, budgets in ways
            for budget in budgets
        ]
        times: list[list[float]] = [[] for _ in made]
        for _ in range(ROUNDS + 1):
            for (one, data), of in zip(made, times, strict=True):
                start = time.process_time()
                one.step(data, loss_from_steps(loss), lr=1e-5)
                of.append(time.process_time() - start)
    medians = [statistics.median(of[1:]) for of in times]
    print("  " + ", ".join(f"{second:.2f} s" for second in medians))
    half = len(ways[0][2])
    sides = (range(half), range(half, len(made)))
    best = [min(side, key=lambda i: medians[i]) for side in sides]
    first, second = (times[i][1:] for i in best)
    return [one / other for one, other in zip(first, second, strict=True)]


def trajectories(prompt: int, lengths: np.ndarray, group: int) -> list[Trajectory]:
    """Rows of one prompt each ``group``; a prompt of so many tokens, answers of those lengths."""
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
    """Any: its work is that of the network."""
    return -outputs.logprobs.mean(), {"rows": torch.tensor(float(len(spans)))}
