"""Speedup of resident pools over one job per stage, and of passing the batch on in chunks.

The text demo without SFT, run by the real driver. An iteration lasts from the start of one rollout
to the start of the next. The first iterations do not count.
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
"""Rounds of pipelining: more than of the others, because the machine's speed drifts by a third."""
ITERATIONS = 6
STAGES = tuple(on_policy.stages)
WARM = 2
COMPUTE = frozenset({"generate", "score", "forward", "reference", "update"})
DEMO = [
    "experiment=arithmetic_grpo",
    "++sft.max_steps=0",
    "++algorithm.filter_zero_variance_groups=false",
    # Groups whose samples all fail have no gradient.
    "++algorithm.entropy_coeff=0.01",
    "++evaluate.every=0",
    "++evaluate.samples=8",
    "++log.trackers=[]",
]
BALANCED = [
    # A wide model, so that both pools are compute-bound: decoding a narrow model is bound by the
    # cache, which two cores share.
    "++model.layers=2",
    "++model.hidden=256",
    "++model.heads=8",
    "++model.kv_heads=4",
    "++model.intermediate=1024",
    "++rollout.batch_size=66",
    "++rollout.horizon=24",
    "++engine.ignore_eos=true",
    "++trainer.cpu_threads=1",
    # Equal micro-batches in both cases, because larger ones are slower on a CPU.
    "++trainer.max_tokens_per_microbatch=1536",
]
CHUNKS = 11
"""Number of chunks, of 48 samples each."""
ROWS = (16, 24, 48, 96)
"""Numbers of samples decoded at once; with one of them rollout takes as long as all the rest."""
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
    """Measure all rows."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        return [*overhead(root), *pipelining(root)]


def overhead(root: Path) -> list[BenchmarkRow]:
    """Measure the demo in one pool and with one job per stage, both on the dev cluster."""
    start_dev_cluster()
    job_s, pool_s, idle_shares = [], [], []
    for number in range(ROUNDS):
        folder = run(root, f"stage-{number}", "slurm", ON_SLURM, 4, DEMO)
        job_s.append(statistics.median(seconds(folder, 4)))
        folder = run(root, f"segment-{number}", "slurm", ONE_POOL | ON_SLURM, 12, DEMO)
        pool_s.append(statistics.median(seconds(folder, 12)))
        idle_shares.append(statistics.median(idle(folder, 12)))
    ratios = [a / b for a, b in zip(job_s, pool_s, strict=True)]
    return [
        median_row("noncompute_share", idle_shares, "share", 0.05, "lower"),
        median_row("pool_vs_jobs", ratios, "x", 10, "higher"),
        median_row("segment_iteration_s", pool_s, "s", None, "lower"),
    ]


def pipelining(root: Path) -> list[BenchmarkRow]:
    """Measure two workers, with the batch passed on as a whole and in chunks."""
    gains, balances, compute_ratios = [], [], []
    words = [*DEMO, *BALANCED, f"++engine.max_num_seqs={balanced_rows(root)}"]
    for number in range(PAIRS):
        whole = run(root, f"whole-{number}", "local", TWO_POOLS, ITERATIONS, words)
        plan = TWO_POOLS | {"num_chunks": CHUNKS}
        chunked = run(root, f"parts-{number}", "local", plan, ITERATIONS, words)
        whole_s = statistics.median(seconds(whole, ITERATIONS))
        gains.append(whole_s / statistics.median(seconds(chunked, ITERATIONS)))
        balances.append(balance(whole, ITERATIONS))
        compute_ratios.append(computing(chunked, ITERATIONS) / computing(whole, ITERATIONS))
    return [
        median_row("pipeline_speedup", gains, "x", 1.7, "higher"),
        median_row("pipeline_balance", balances, "x", None, "higher"),
        median_row("pipeline_beside", compute_ratios, "x", None, "lower"),
    ]


def computing(folder: Path, iterations: int) -> float:
    """Return the seconds of computing in an iteration, summed over both pools."""
    totals = [compute(folder, i, STAGES) for i in range(WARM, iterations)]
    return statistics.median(totals)


def balanced_rows(root: Path) -> int:
    """Return the number of samples at which rollout takes as long as all other stages on this
    machine."""
    imbalance = {}
    for rows in ROWS:
        words = [*DEMO, *BALANCED, f"++engine.max_num_seqs={rows}"]
        folder = run(root, f"rows-{rows}", "local", TWO_POOLS, WARM + 2, words)
        imbalance[rows] = abs(math.log(balance(folder, WARM + 2)))
    return min(imbalance, key=lambda rows: imbalance[rows])


def balance(folder: Path, iterations: int) -> float:
    """Return the time of rollout over that of all other stages."""
    rollout = statistics.median(compute(folder, i, ("rollout",)) for i in range(WARM, iterations))
    others = statistics.median(compute(folder, i, STAGES[1:]) for i in range(WARM, iterations))
    return rollout / others


def run(
    root: Path,
    name: str,
    cluster: str,
    plan: Mapping[str, Any],
    iterations: int,
    words: list[str],
) -> Path:
    """Run an experiment to its end; returns its folder."""
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
    new_run = prepare_run({**values, "plan": dict(plan)})
    drive(new_run)
    return new_run.folder


def seconds(folder: Path, iterations: int) -> list[float]:
    """Return the seconds from the start of each rollout to the start of the next."""
    starts = [_manifest(folder, "rollout", i)["start"] for i in range(WARM, iterations)]
    return [end - start for start, end in pairwise(starts)]


def idle(folder: Path, iterations: int) -> list[float]:
    """Return the share of each iteration in which its single worker computed nothing."""
    lengths = seconds(folder, iterations)
    return [1 - compute(folder, i, STAGES) / length for i, length in enumerate(lengths, WARM)]


def compute(folder: Path, iteration: int, stages: tuple[str, ...]) -> float:
    """Return the seconds that stages of an iteration spent computing."""
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
