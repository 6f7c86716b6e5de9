"""Training of one model on nodes of different speed, compared with the sum of their speeds.

The ``a100`` nodes of the dev cluster run half of the time (slurm/devcluster/site.yaml). The train
stage runs as Slurm jobs: on an ``h100`` node, on an ``a100`` node, and on one of each in one job,
with shares by speed and with equal shares. The jobs alternate for several rounds. All nodes are the
same machine, so two independent jobs side by side give an upper bound for one job on both nodes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.row import BenchmarkRow, median_row
from benchmarks.slurm_jobs import start_dev_cluster
from rlinf import package_paths
from rlinf.artifacts import Manifest, read_manifest

if TYPE_CHECKING:
    from stages.runner import StageCall

ROUNDS = 3
STEPS = 3
"""Optimizer steps of a job. The first does not count, because it includes one-time work."""
SAME_GRADIENT = 1e-4
"""Relative difference of gradient norms that float32 rounding can cause."""
SETTINGS = [
    "experiment=arithmetic_grpo",
    "iterations=1",
    "++run.name=unlike",
    "++model.hidden=256",
    "++model.heads=8",
    "++model.kv_heads=4",
    "++model.intermediate=768",
    "++sft.max_steps=0",
    "++rollout.batch_size=128",
    "++rollout.group_size=8",
    "++rollout.horizon=24",
    "++algorithm.filter_zero_variance_groups=false",
    # The model is untrained: without this term its gradient would be zero.
    "++algorithm.entropy_coeff=0.01",
    f"++algorithm.epochs={STEPS}",
    "++trainer.cpu_threads=1",
    "++trainer.max_tokens_per_microbatch=8192",
    "++log.trackers=[]",
    "cluster=slurm",
    f"++cluster.site={package_paths.ROOT}/slurm/devcluster/site.yaml",
]
MIXED = {"partition": "gpu", "nodes": 2, "gpus": 1, "constraint": "[a100*1&h100*1]"}


def measure() -> list[BenchmarkRow]:
    """Start the dev cluster and measure all rows."""
    start_dev_cluster()
    with tempfile.TemporaryDirectory() as name:
        step = HeteroStep(Path(name))
        plans = {
            kind: {"partition": kind, "gpus": 1, "gpu_type": kind} for kind in ("h100", "a100")
        }
        for plan in plans.values():
            step.seconds(plan)  # warm up the page cache and the filesystem
        seconds_by_kind: dict[str, list[float]] = {kind: [] for kind in plans}
        unequal, equal, ratios, separate = [], [], [], []
        for _ in range(ROUNDS):
            for kind, plan in plans.items():
                seconds_by_kind[kind].append(step.seconds(plan))
            median = {kind: statistics.median(values) for kind, values in seconds_by_kind.items()}
            ratio = round(median["a100"] / median["h100"], 2)
            mixed = MIXED | {"speed_weights": {"h100": ratio, "a100": 1.0}}
            sum_of_speeds = sum(1 / values[-1] for values in seconds_by_kind.values())
            ratios.append(ratio)
            unequal.append(1 / step.seconds(mixed) / sum_of_speeds)
            equal.append(1 / step.seconds(MIXED) / sum_of_speeds)
            separate.append(step.side_by_side(plans["a100"], plans["h100"]) / sum_of_speeds)
        step.check()
    relative_to_separate = [a / b for a, b in zip(unequal, separate, strict=True)]
    return [
        median_row("hetero_efficiency", unequal, "of the sum", 0.92, "higher"),
        median_row("hetero_apart", separate, "of the sum", None, "higher"),
        median_row("hetero_of_apart", relative_to_separate, "x", None, "higher"),
        median_row("hetero_equal_shares", equal, "of the sum", None, "higher"),
        median_row("hetero_speed_ratio", ratios, "x", None, "higher"),
    ]


class HeteroStep:
    """Runs optimizer steps of the train stage on a batch that is collected once."""

    def __init__(self, root: Path) -> None:
        from launchers.slurm_launcher import SlurmLauncher
        from pipeline.commands.experiment import compose, prepare_run
        from pipeline.graph import Graph, StageNode
        from pipeline.resources import ClusterConfig
        from rlinf.config import validate
        from slurm.client import SlurmClient
        from stages.layout import CONFIG_FILE
        from stages.runner import StageCall, run_stage
        from stages.worker_state import WorkerState

        self._run = prepare_run(compose([*SETTINGS, f"++run.root={root}"]))
        self._cluster = validate(ClusterConfig, self._run.config.cluster, "cluster")
        self._launcher = SlurmLauncher(SlurmClient(poll_interval_s=0.2))
        graph, folder = Graph(self._run.config), self._run.folder
        worker_state = WorkerState()
        self._norms: list[float] = []
        self._count = 0

        def call(node: StageNode, out: Path) -> StageCall:
            sources = graph.inputs(node).items()
            inputs = {name: graph.output_folder(folder, source) for name, source in sources}
            return StageCall(node.stage, folder / CONFIG_FILE, out, 0, inputs)

        for stage in ("sft", "rollout", "reward", "inference"):
            node = StageNode(stage, 0)
            run_stage(call(node, graph.output_folder(folder, node)), worker_state=worker_state)
        self._train: Callable[[Path], StageCall] = lambda out: call(StageNode("train", 0), out)

    def seconds(self, plan: dict[str, Any]) -> float:
        """Return the seconds of an optimizer step under a plan."""
        job, out = self._start(plan)
        self._wait(job)
        return self._step_seconds(out)

    def side_by_side(self, slow: dict[str, Any], quick: dict[str, Any]) -> float:
        """Return the total steps per second of a slow job and of quick jobs that run beside it."""
        job, out = self._start(slow)
        quick_seconds: list[float] = []
        while not quick_seconds or self._launcher.poll([job])[job].state.is_active:
            quick_seconds.append(self.seconds(quick))
        self._wait(job)
        # The last quick job may have run longer than the slow one.
        return 1 / self._step_seconds(out) + 1 / statistics.median(
            quick_seconds[:-1] or quick_seconds
        )

    def _start(self, plan: dict[str, Any]) -> tuple[str, Path]:
        from pipeline.graph import StageNode
        from pipeline.job_executor import stage_job
        from pipeline.plan import parse_plan
        from pipeline.resources import job_resources

        self._count += 1
        out = self._run.folder / f"step-{self._count}"
        stage = parse_plan({"stages": {"train": {**plan, "cpus": 1}}}, "plan").stage_plan("train")
        needs = job_resources(stage, self._cluster)
        job = stage_job(StageNode("train", self._count), self._train(out), self._run.folder, needs)
        return self._launcher.submit(job), out

    def _wait(self, job: str) -> None:
        """Wait until all ranks of a job have ended, so that they do not slow the next job down."""
        while self._launcher.poll([job])[job].state.is_active:
            time.sleep(0.2)
        while self._launcher.client.queue()[job].state.is_active:
            time.sleep(0.2)

    def _step_seconds(self, out: Path) -> float:
        manifest = read_manifest(out)
        if manifest is None:
            raise RuntimeError(f"train in {out} did not end well")
        self._norms.append(manifest.metrics["grad_norm"])
        return step_seconds(manifest)

    def check(self) -> None:
        """Check that all steps had the same gradient.

        Raises:
            RuntimeError: gradients differ.
        """
        median = statistics.median(self._norms)
        max_difference = max(abs(norm / median - 1) for norm in self._norms)
        if max_difference > SAME_GRADIENT:
            raise RuntimeError(f"gradient norms differ by {max_difference:.1e}: {self._norms}")


def step_seconds(manifest: Manifest) -> float:
    """Return the mean seconds of an optimizer step after the first, of the slowest rank.

    Raises:
        RuntimeError: the steps cannot be identified in the recorded spans.
    """
    ranks: dict[int, list[float]] = {}
    for span in manifest.timing["spans"]:
        if span["name"] == "update":
            ranks.setdefault(span["rank"], []).append(span["end"] - span["start"])
    return max(statistics.mean(steps(spans)[1:]) for spans in ranks.values())


def steps(spans: list[float]) -> list[float]:
    """Return the seconds of each optimizer step from its spans.

    A span of a gradient may include the weight update; otherwise a much shorter span follows.
    """
    result: list[float] = []
    for seconds in spans:
        if seconds > max(spans) / 3:
            result.append(seconds)
        elif result:
            result[-1] += seconds
    if len(result) != STEPS:
        raise RuntimeError(f"{STEPS} optimizer steps are not to be seen in spans of {spans} s")
    return result
