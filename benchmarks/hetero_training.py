"""Train one model on nodes of different speed: throughput against the sum of each kind alone.

The ``a100`` nodes of the dev cluster run half of the time (slurm/devcluster/site.yaml). Steps of
the real train stage run as Slurm jobs: on an ``h100`` node, on an ``a100`` node, and on one of each
in one job, with shares by speed and with equal shares; in turns, several rounds. All nodes are one
machine: what two jobs that share nothing give side by side is the most that one job could.
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
"""Optimizer steps of a job; the first, in which much happens for the first time, does not count."""
SAME_GRADIENT = 1e-4
"""Relative difference of gradient norms that rounding in float32 explains."""
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
    # The model has learnt nothing yet: without this term its gradient would be zero.
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
    """Bring the cluster up and measure."""
    start_dev_cluster()
    with tempfile.TemporaryDirectory() as name:
        step = HeteroStep(Path(name))
        alone = {
            kind: {"partition": kind, "gpus": 1, "gpu_type": kind} for kind in ("h100", "a100")
        }
        for plan in alone.values():
            step.seconds(plan)  # the page cache and the filesystem are warm then
        known: dict[str, list[float]] = {kind: [] for kind in alone}
        unequal, equal, ratios, separate = [], [], [], []
        for _ in range(ROUNDS):
            for kind, plan in alone.items():
                known[kind].append(step.seconds(plan))
            median = {kind: statistics.median(every) for kind, every in known.items()}
            ratio = round(median["a100"] / median["h100"], 2)
            mixed = MIXED | {"speed_weights": {"h100": ratio, "a100": 1.0}}
            both = sum(1 / every[-1] for every in known.values())
            ratios.append(ratio)
            unequal.append(1 / step.seconds(mixed) / both)
            equal.append(1 / step.seconds(MIXED) / both)
            separate.append(step.beside(alone["a100"], alone["h100"]) / both)
        step.check()
    of_limit = [one / most for one, most in zip(unequal, separate, strict=True)]
    return [
        median_row("hetero_efficiency", unequal, "of the sum", 0.92, "higher"),
        median_row("hetero_apart", separate, "of the sum", None, "higher"),
        median_row("hetero_of_apart", of_limit, "x", None, "higher"),
        median_row("hetero_equal_shares", equal, "of the sum", None, "higher"),
        median_row("hetero_speed_ratio", ratios, "x", None, "higher"),
    ]


class HeteroStep:
    """Optimizer steps of the train stage on a batch collected once."""

    def __init__(self, root: Path) -> None:
        from launchers.submitit import SubmititLauncher
        from pipeline.cluster_config import ClusterConfig
        from pipeline.commands.experiment import compose, prepare_run
        from pipeline.graph import Graph, StageNode
        from rlinf.config import validate
        from slurm.client import SlurmClient
        from stages.layout import CONFIG_FILE
        from stages.runner import StageCall, run_stage
        from stages.worker_state import WorkerState

        self._run = prepare_run(compose([*SETTINGS, f"++run.root={root}"]))
        self._cluster = validate(ClusterConfig, self._run.config.cluster, "cluster")
        self._launcher = SubmititLauncher(SlurmClient(poll_interval_s=0.2))
        graph, folder = Graph(self._run.config), self._run.folder
        resident = WorkerState()
        self._norms: list[float] = []
        self._count = 0

        def call(node: StageNode, out: Path) -> StageCall:
            sources = graph.inputs(node).items()
            inputs = {name: graph.output_folder(folder, source) for name, source in sources}
            return StageCall(node.stage, folder / CONFIG_FILE, out, 0, inputs)

        for stage in ("sft", "rollout", "reward", "inference"):
            node = StageNode(stage, 0)
            run_stage(call(node, graph.output_folder(folder, node)), worker_state=resident)
        self._train: Callable[[Path], StageCall] = lambda out: call(StageNode("train", 0), out)

    def seconds(self, plan: dict[str, Any]) -> float:
        """Seconds of an optimizer step under a plan."""
        job, out = self._start(plan)
        self._wait(job)
        return self._step_seconds(out)

    def beside(self, slow: dict[str, Any], quick: dict[str, Any]) -> float:
        """Steps per second of a job and of others, one after another, while it runs; together."""
        job, out = self._start(slow)
        others: list[float] = []
        while not others or self._launcher.poll([job])[job].state.is_active:
            others.append(self.seconds(quick))
        self._wait(job)
        # The last of them may have gone on alone.
        return 1 / self._step_seconds(out) + 1 / statistics.median(others[:-1] or others)

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
        """The next step must not start while this one's ranks still end."""
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
            RuntimeError: they had not.
        """
        middle = statistics.median(self._norms)
        off = max(abs(norm / middle - 1) for norm in self._norms)
        if off > SAME_GRADIENT:
            raise RuntimeError(f"gradient norms differ by {off:.1e}: {self._norms}")


def step_seconds(manifest: Manifest) -> float:
    """Seconds of an optimizer step after the first, of the rank that needs most.

    Raises:
        RuntimeError: they cannot be told apart in what the stage recorded.
    """
    ranks: dict[int, list[float]] = {}
    for span in manifest.timing["spans"]:
        if span["name"] == "update":
            ranks.setdefault(span["rank"], []).append(span["end"] - span["start"])
    return max(statistics.mean(steps(spans)[1:]) for spans in ranks.values())


def steps(spans: list[float]) -> list[float]:
    """Seconds of each optimizer step: a gradient, and what changes the weights by it, which takes
    a small part of that and may have been recorded with it."""
    found: list[float] = []
    for seconds in spans:
        if seconds > max(spans) / 3:
            found.append(seconds)
        elif found:
            found[-1] += seconds
    if len(found) != STEPS:
        raise RuntimeError(f"{STEPS} optimizer steps are not to be seen in spans of {spans} s")
    return found
