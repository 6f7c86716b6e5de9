"""``python -m benchmarks.equality``: check that every trainer computes the same update.

Batch, weights and algorithm (GRPO, three steps of AdamW) are the same for every trainer. Each one
runs on one process or several, with packed and padded rows, and with two token budgets of a
micro-batch. Then the greedy responses of every engine are compared
(:mod:`benchmarks.engine_equality`). Trainers and engines with a separate Python environment
(``make env NAME=...``) run there; the table shows which ones were skipped without it.

Each line is printed when it is ready and cached in ``equality.json``. The next call computes only
results that are missing there, or whose settings or code changed.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks import engine_equality, moe_checkpoint
from benchmarks.result_cache import ResultCache, missing_environment, result_key
from rlinf.algorithms.group_relative import GRPO, GRPOConfig
from rlinf.algorithms.learner import Learner
from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.batch import TrainingSample
from rlinf.data.record import RecordId
from rlinf.data.trajectory import StepRewards, Trajectory
from rlinf.interpreters import resolve_interpreter
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from rlinf.trainers import trainers
from tests.cpu_shims import use_cpu_shims

LR, STEPS = 1e-3, 3
TOLERANCE = LR / 50
"""Tolerance of updated weights. A step of Adam has the size of the learning rate, even if the
gradient is tiny. The gradient of some key biases is zero up to rounding, so its sign is random."""
EXPERTS_TOLERANCE = LR / 10
"""The same for a mixture of experts, in which each expert sees few tokens. Its gradients (measured
by a step of SGD at rate 1) differ between packed and padded rows by at most 1e-5 of the largest
gradient of a tensor."""
RELATIVE = 1e-5
"""Tolerance of losses and gradient norms, relative to 1 plus their size."""
ALPHABET = "0123456789+="
MODEL = CausalLMConfig(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128)
SEQUENCE_PARALLEL = {"sequence_parallel": True}
DISTRIBUTED_OPTIMIZER = {"use_distributed_optimizer": True}
LORA: dict[str, Any] = {"lora": {"rank": 8, "alpha": 16.0}}
TIMEOUT_S, ROOT = 300, Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class TrainerSetup:
    """A trainer, its options and its number of processes."""

    name: str
    trainer: str = "fsdp"
    processes: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    """An environment of :mod:`rlinf.interpreters`; None: this one."""
    layout: dict[str, int] = field(default_factory=dict)
    """How a model replica is split over processes (:class:`ParallelLayout`)."""
    mixture: bool = False
    """Whether the model is a mixture of experts."""

    @property
    def kind(self) -> tuple[bool, bool]:
        """Return whether the model has experts, and adapters; only equal kinds are compared."""
        return self.mixture, "lora" in self.options

    @property
    def splits(self) -> list[BatchSplit]:
        """Return the supported batch splits: context parallelism needs padded rows."""
        return [split for split in BATCH_SPLITS if not (split.packing and "cp" in self.layout)]


@dataclass(frozen=True)
class BatchSplit:
    """How the rows of a batch are split into micro-batches."""

    packing: bool
    budget: int

    @property
    def rows(self) -> str:
        """The name of the row layout in the table."""
        return "packed" if self.packing else "padded"


TRAINER_SETUPS = [
    TrainerSetup("one process"),
    TrainerSetup("FSDP2, 2 processes", processes=2, options={"fsdp_wrap_min_mb": 0}),
    TrainerSetup(
        "FSDP2, 2 copies on 2 each", processes=4, options={"fsdp_wrap_min_mb": 0, "replicas": 2}
    ),
    *(
        TrainerSetup(f"ZeRO-{stage}, 2 processes", "deepspeed", 2, {"stage": stage}, "deepspeed")
        for stage in (1, 2, 3)
    ),
    TrainerSetup("Megatron TP2", "megatron", 2, {}, "megatron", {"tp": 2}),
    TrainerSetup(
        "Megatron TP2, positions too", "megatron", 2, SEQUENCE_PARALLEL, "megatron", {"tp": 2}
    ),
    TrainerSetup("Megatron PP2", "megatron", 2, {}, "megatron", {"pp": 2}),
    TrainerSetup("Megatron CP2", "megatron", 2, {}, "megatron", {"cp": 2}),
    TrainerSetup(
        "Megatron, distributed optimizer", "megatron", 2, DISTRIBUTED_OPTIMIZER, "megatron"
    ),
    TrainerSetup("experts: one process", mixture=True),
    TrainerSetup("experts: Megatron EP2", "megatron", 2, {}, "megatron", {"ep": 2}, mixture=True),
    TrainerSetup("adapters: one process", options=LORA),
    TrainerSetup(
        "adapters: FSDP2, 2 processes", processes=2, options={"fsdp_wrap_min_mb": 0, **LORA}
    ),
    TrainerSetup("adapters: Megatron TP2", "megatron", 2, LORA, "megatron", {"tp": 2}),
    TrainerSetup(
        "adapters: Megatron TP2, positions too",
        "megatron",
        2,
        SEQUENCE_PARALLEL | LORA,
        "megatron",
        {"tp": 2},
    ),
    TrainerSetup("adapters: Megatron PP2", "megatron", 2, LORA, "megatron", {"pp": 2}),
]
"""Each setup is compared with the first one of its kind."""
BATCH_SPLITS = [
    BatchSplit(packing, budget) for packing in (False, True) for budget in (100_000, 64)
]


@dataclass(frozen=True)
class UpdateComparison:
    """Differences between the result of a setup and the reference."""

    metrics: list[list[float]]
    """Loss and gradient norm of each step."""
    metrics_differ: float
    """Maximum difference of a metric, relative to 1 plus its size."""
    weights_differ: float
    """Maximum difference of a weight after the last step."""

    def good(self, setup: TrainerSetup) -> bool:
        """Return whether the results are equal up to rounding."""
        tolerance = EXPERTS_TOLERANCE if setup.mixture else TOLERANCE
        return self.metrics_differ <= RELATIVE and self.weights_differ <= tolerance

    def line(self, setup: TrainerSetup, split: BatchSplit) -> str:
        """Return the row of the table, in Markdown."""
        loss, norm = self.metrics[-1]
        return (
            f"| {setup.name} | {split.rows} | {split.budget} | {loss:.7f} | {norm:.6f} "
            f"| {self.metrics_differ:.0e} | {self.weights_differ:.1e} |"
            + ("" if self.good(setup) else " differs")
        )


HEAD = """
| | rows | budget | loss | gradient norm | both differ by | weights differ by |
|---|---|---|---|---|---|---|"""


def samples() -> list[TrainingSample]:
    """Return groups of responses of different lengths, one prompt per group, with rewards."""
    random, result = np.random.default_rng(0), []
    for group, member in itertools.product(range(4), range(4)):
        prompt = np.random.default_rng(group).integers(2, 14, 3 + 2 * group)
        length = int(random.integers(2, 24))
        rewards = np.zeros(length, np.float32)
        rewards[-1] = random.normal()
        actions = random.integers(2, 14, length)
        identity = RecordId(0, group * 4 + member)
        trajectory = Trajectory(identity=identity, actions=actions, prompt=prompt, group=group)
        reward = StepRewards(identity=identity, rewards=rewards)
        result.append(TrainingSample(trajectory, reward))
    return result


def compute(
    folder: Path, setup: TrainerSetup, split: BatchSplit, world: ProcessGroupInfo
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Compute the update as one process of a setup; returns metrics per step, and the weights."""
    cls = trainers.get(setup.trainer)
    load = CausalLM.meta_from_folder if setup.processes > 1 else CausalLM.load
    options = {
        "device": "cpu",
        "packing": split.packing,
        "max_tokens_per_microbatch": split.budget,
        **setup.options,
    }
    config = cls.Config.model_validate(options)
    model = CausalLMConfig() if setup.mixture else MODEL
    trainer = cls(load(folder, model), config, OptimizerSection(lr=LR), world)
    algorithm, metrics = GRPO(GRPOConfig(entropy_coeff=0.01)), []
    for iteration in range(STEPS):
        learner = Learner(trainer, {"policy": LR}, iteration=iteration)
        algorithm.update(learner, [samples()])
        metrics.append([learner.metrics["loss"], learner.metrics["grad_norm"]])
    state = {name: tensor.clone() for name, tensor in trainer.full_state_dict(copy=True).items()}
    trainer.close()
    return metrics, state


def run_rank(task: str, rank: int) -> None:
    """Run one process of :func:`run`. Rank 0 prints the metrics of each finished split."""
    folder_name, setup_fields, split_fields, out_name = json.loads(task)
    folder, setup, out = Path(folder_name), TrainerSetup(**setup_fields), Path(out_name)
    # Libraries print to stdout too, so redirect it to stderr.
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    layout = ParallelLayout.model_validate(setup.layout)
    rendezvous = out / "channels" / "group-e.json"
    world = ProcessGroupInfo(rank, setup.processes, rank, rendezvous_file=rendezvous, layout=layout)
    for number, split in enumerate(split_fields):
        metrics, state = compute(folder, setup, BatchSplit(**split), world)
        if rank == 0:
            save_file(state, out / f"{number}.safetensors")
            print(json.dumps(metrics), file=parent, flush=True)


def run(
    folder: Path, setup: TrainerSetup, splits: Sequence[BatchSplit], out: Path
) -> Iterator[tuple[BatchSplit, Any, Any]]:
    """Run batch splits of a setup; yields each one with the results of :func:`compute`.

    Raises:
        RuntimeError: a process failed or exceeded :data:`TIMEOUT_S`; the message has the logs.
    """
    python = (
        sys.executable
        if setup.environment is None
        else resolve_interpreter(setup.environment, "equality")
    )
    (out / "channels").mkdir(parents=True)
    task = json.dumps([str(folder), asdict(setup), [asdict(split) for split in splits], str(out)])
    logs = [out / f"{rank}.log" for rank in range(setup.processes)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            processes.append(
                subprocess.Popen(
                    [python, "-m", "benchmarks.equality", "--compute", task, "--rank", str(rank)],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    cwd=ROOT,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=stream,
                    text=True,
                )
            )
    timer = threading.Timer(TIMEOUT_S, _kill, [processes])
    timer.start()
    try:
        assert processes[0].stdout is not None
        for number, line in enumerate(processes[0].stdout):
            yield splits[number], json.loads(line), load_file(out / f"{number}.safetensors")
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError("\n".join(log.read_text()[-2000:] for log in logs))
    finally:
        timer.cancel()
        _kill(processes)
        for process in processes:
            process.wait()


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def compared(metrics: Any, weights: Any, reference: tuple[Any, Any]) -> UpdateComparison:
    """Compare the result of a setup with the reference."""
    values, expected = np.array(metrics), np.array(reference[0])
    if weights.keys() != reference[1].keys():
        return UpdateComparison(metrics, float("inf"), float("inf"))
    differences = torch.stack(
        [(tensor - reference[1][name]).abs().max() for name, tensor in weights.items()]
    )
    return UpdateComparison(
        metrics,
        float((np.abs(values - expected) / (1 + np.abs(expected))).max()),
        float(differences.max()),
    )


def updates(cache: ResultCache, keys: dict[tuple[str, BatchSplit], str], root: Path) -> bool:
    """Compute missing results and print the first table; returns whether all results agree."""
    folders = {False: root / "dense", True: root / "experts"}
    for folder in folders.values():
        folder.mkdir()
    CausalLM.create(MODEL, {"alphabet": ALPHABET}, 0, folders[False])
    moe_checkpoint.create_moe_checkpoint(MODEL, ALPHABET, folders[True])
    references = {setup.kind: setup for setup in reversed(TRAINER_SETUPS)}
    expected: dict[tuple[bool, bool], tuple[Any, Any]] = {}
    all_equal = True
    print(HEAD, flush=True)
    for setup in TRAINER_SETUPS:
        if (advice := missing_environment(setup.environment)) is not None:
            print(f"| {setup.name} | {advice} | | | | | |", flush=True)
            continue
        missing = [split for split in setup.splits if keys[setup.name, split] not in cache]
        for split in setup.splits:
            if split not in missing:
                result = UpdateComparison(**cache[keys[setup.name, split]])
                print(result.line(setup, split), flush=True)
                all_equal &= result.good(setup)
        if not missing:
            continue
        folder = folders[setup.mixture]
        if setup.kind not in expected:
            reference = references[setup.kind]
            _, metrics, weights = next(
                run(folder, reference, BATCH_SPLITS[:1], root / f"right {reference.name}")
            )
            expected[setup.kind] = metrics, weights
        try:
            for split, metrics, weights in run(folder, setup, missing, root / setup.name):
                result = compared(metrics, weights, expected[setup.kind])
                print(result.line(setup, split), flush=True)
                cache[keys[setup.name, split]] = asdict(result)
                all_equal &= result.good(setup)
        except RuntimeError as error:
            print(f"| {setup.name} | failed | | | | | |\n{error}", flush=True)
            all_equal = False
    return all_equal


def main() -> int:
    """Print both tables; returns 1 if a difference exceeds its tolerance."""
    use_cpu_shims()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equality")
    parser.add_argument("--anew", action="store_true", help="delete cached results first")
    parser.add_argument("--compute", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compute:
        run_rank(arguments.compute, arguments.rank)
        return 0
    if arguments.anew:
        FILE.unlink(missing_ok=True)
    sources = [inspect.getsource(part) for part in (samples, compute)]
    common = {"model": MODEL.model_dump(), "lr": LR, "steps": STEPS, "work": sources}
    keys = {
        (setup.name, split): result_key(
            setup.environment, **common, way=asdict(setup), cut=asdict(split)
        )
        for setup in TRAINER_SETUPS
        for split in setup.splits
    }
    cache, engine_keys = ResultCache(FILE), engine_equality.keys()
    cache.discard_others([*keys.values(), *engine_keys.values()])
    with tempfile.TemporaryDirectory() as name:
        all_equal = updates(cache, keys, Path(name))
        print(
            f"\nafter {STEPS} steps in float32 at learning rate {LR:g}; tolerance {TOLERANCE:g} "
            f"for weights ({EXPERTS_TOLERANCE:g} with experts), {RELATIVE:g} for loss and gradient "
            "norm, relative to 1 plus their size"
        )
        all_equal &= engine_equality.compare(cache, engine_keys, Path(name))
    return int(not all_equal)


if __name__ == "__main__":
    sys.exit(main())
