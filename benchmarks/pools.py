"""Resident pools: what they save over jobs per stage, and what passing parts of a batch on gains.

The main job without SFT; every iteration is that of a real run with the real driver,
from one rollout's begin to the next one's. The first ones do not count.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.row import BenchmarkRow, median_row
from benchmarks.slurm_jobs import start_dev_cluster
from pipeline.commands.experiment import compose, drive, prepare_run
from pipeline.metrics import stage_manifest
from stages.flow import on_policy

ROUNDS = 3
PAIRS = 5
"""Rounds of pipelining: a machine whose speed drifts by a third needs more of them."""
ITERATIONS = 6
STAGES = tuple(on_policy.stages)
WARM = 2
COMPUTE = frozenset({"generate", "score", "forward", "reference", "update"})
DEMO = [
    "experiment=arithmetic_grpo",
    "++sft.max_steps=0",
    "++algorithm.filter_zero_variance_groups=false",
    # Samples that all fail would not be trained on.
    "++algorithm.entropy_coeff=0.01",
    "++evaluate.every=0",
    "++evaluate.samples=8",
    "++log.trackers=[]",
]
BALANCED = [
    # So wide that arithmetic bounds both sides: single tokens of a narrow model are decoded at the
    # speed of a cache, which two cores share.
    "++model.layers=2",
    "++model.hidden=256",
    "++model.heads=8",
    "++model.kv_heads=4",
    "++model.intermediate=1024",
    "++rollout.batch_size=66",
    "++rollout.horizon=24",
    "++engine.ignore_eos=true",
    "++trainer.cpu_threads=1",
    # As many micro-batches of one size either way: larger ones are slower on a CPU.
    "++trainer.max_tokens_per_microbatch=1536",
]
CHUNKS = 11
"""Parts of 48 samples."""
ROWS = (16, 24, 48, 96)
"""Samples decoded at once: with one of these rollout takes about as long as all else."""
ONE_POOL = {
    "pools": [{"stages": ["rollout", "reward", "inference", "train"], "devices": {"cpu": 1}}],
}
TWO_POOLS = {
    "pools": [
        {"stages": ["rollout"], "devices": {"cpu": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"cpu": 1}},
    ],
}
ON_SLURM = {"defaults": {"partition": "cpu", "mem_mb": 2000, "cpus": 2}}


def measure() -> list[BenchmarkRow]:
    """All rows."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        return [*overhead(root), *pipelining(root)]


def overhead(root: Path) -> list[BenchmarkRow]:
    """The demo in one pool, and as a job per stage, both on the dev cluster."""
    start_dev_cluster()
    stage, segment, shares = [], [], []
    for number in range(ROUNDS):
        folder = run(root, f"stage-{number}", "slurm", ON_SLURM, 4, DEMO)
        stage.append(statistics.median(seconds(folder, 4)))
        folder = run(root, f"segment-{number}", "slurm", ONE_POOL | ON_SLURM, 12, DEMO)
        segment.append(statistics.median(seconds(folder, 12)))
        shares.append(statistics.median(idle(folder, 12)))
    ratios = [a / b for a, b in zip(stage, segment, strict=True)]
    return [
        median_row("noncompute_share", shares, "share", 0.05, "lower"),
        median_row("segment_vs_stage", ratios, "x", 10, "higher"),
        median_row("segment_iteration_s", segment, "s", None, "lower"),
    ]


def pipelining(root: Path) -> list[BenchmarkRow]:
    """Two workers, with the batch passed on whole and in parts."""
    gains, balances, besides = [], [], []
    words = [*DEMO, *BALANCED, f"++engine.max_num_seqs={balanced_rows(root)}"]
    for number in range(PAIRS):
        whole = run(root, f"whole-{number}", "local", TWO_POOLS, ITERATIONS, words)
        plan = TWO_POOLS | {"num_chunks": CHUNKS}
        parts = run(root, f"parts-{number}", "local", plan, ITERATIONS, words)
        sequential = statistics.median(seconds(whole, ITERATIONS))
        gains.append(sequential / statistics.median(seconds(parts, ITERATIONS)))
        balances.append(balance(whole, ITERATIONS))
        besides.append(computing(parts, ITERATIONS) / computing(whole, ITERATIONS))
    return [
        median_row("pipeline_speedup", gains, "x", 1.7, "higher"),
        median_row("pipeline_balance", balances, "x", None, "higher"),
        median_row("pipeline_beside", besides, "x", None, "lower"),
    ]


def computing(folder: Path, iterations: int) -> float:
    """Seconds that both sides of an iteration compute, together."""
    every = [compute(folder, i, STAGES) for i in range(WARM, iterations)]
    return statistics.median(every)


def balanced_rows(root: Path) -> int:
    """Return the number of samples at which rollout takes as long as all other stages on this
    machine."""
    found = {}
    for rows in ROWS:
        words = [*DEMO, *BALANCED, f"++engine.max_num_seqs={rows}"]
        folder = run(root, f"rows-{rows}", "local", TWO_POOLS, WARM + 2, words)
        found[rows] = abs(math.log(balance(folder, WARM + 2)))
    return min(found, key=lambda rows: found[rows])


def balance(folder: Path, iterations: int) -> float:
    """Return the time of rollout over that of all other stages."""
    rollout = statistics.median(compute(folder, i, ("rollout",)) for i in range(WARM, iterations))
    rest = statistics.median(compute(folder, i, STAGES[1:]) for i in range(WARM, iterations))
    return rollout / rest


def run(
    root: Path,
    name: str,
    cluster: str,
    plan: Mapping[str, Any],
    iterations: int,
    words: list[str],
) -> Path:
    """A finished run; returns its folder."""
    values = compose(
        [
            *words,
            f"iterations={iterations}",
            f"++run.root={root}",
            f"++run.name={name}",
            f"cluster={cluster}",
            "++cluster.poll_interval_s=0.2",
        ]
    )
    made = prepare_run({**values, "plan": dict(plan)})
    drive(made)
    return made.folder


def seconds(folder: Path, iterations: int) -> list[float]:
    """Seconds from the begin of one rollout to that of the next."""
    starts = [_manifest(folder, "rollout", i)["start"] for i in range(WARM, iterations)]
    return [after - before for before, after in pairwise(starts)]


def idle(folder: Path, iterations: int) -> list[float]:
    """Share of each iteration in which its one worker computed nothing."""
    lengths = seconds(folder, iterations)
    return [1 - compute(folder, i, STAGES) / length for i, length in enumerate(lengths, WARM)]


def compute(folder: Path, iteration: int, stages: tuple[str, ...]) -> float:
    """Seconds that stages of an iteration spent computing."""
    return sum(
        span["end"] - span["start"]
        for stage in stages
        for span in _manifest(folder, stage, iteration)["spans"]
        if span["name"] in COMPUTE
    )


def _manifest(folder: Path, stage: str, iteration: int) -> dict[str, Any]:
    manifest = stage_manifest(folder, stage, iteration)
    assert manifest is not None
    return manifest.timing
