"""``python -m benchmarks.equality``: one update, computed in every way, gives the same weights.

The same batch, weights and algorithm (GRPO, three steps of AdamW) on one process and on several,
by every trainer, with rows packed and padded and at two budgets of a micro-batch; then the same
greedy responses by every engine (:mod:`benchmarks.engine_equality`). What has its packages in an
environment of its own (``make env NAME=...``) runs there; without it, it is left out, and the table
says so.

Each line is printed as soon as it is known and kept in ``equality.json``: the next call computes
what is missing there, or was made by other settings or code.
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

LR, STEPS = 1e-3, 3
TOLERANCE = LR / 50
"""Of updated weights. A step of Adam is as long as the learning rate however small the gradient:
where that is zero up to rounding, so is its sign, and some keys' biases have no other."""
OF_EXPERTS = LR / 10
"""The same of a mixture, whose experts see few tokens each. Its gradients (a step of SGD at a rate
of 1) of packed and padded rows differ by 1e-5 of the largest of their tensor at most."""
RELATIVE = 1e-5
"""Tolerance of losses and gradient norms, relative to 1 plus their size."""
ALPHABET = "0123456789+="
MODEL = CausalLMConfig(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128)
POSITIONS, DISTRIBUTED = {"sequence_parallel": True}, {"use_distributed_optimizer": True}
LORA: dict[str, Any] = {"lora": {"rank": 8, "alpha": 16.0}}
LIMIT_S, ROOT = 300, Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class TrainerSetup:
    """A trainer and the processes that compute the update."""

    name: str
    trainer: str = "fsdp"
    processes: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    """An environment of :mod:`rlinf.interpreters`; None: this one."""
    layout: dict[str, int] = field(default_factory=dict)
    """How the processes share a replica of the model (:class:`ParallelLayout`)."""
    mixture: bool = False
    """Whether its layers have experts."""

    @property
    def kind(self) -> tuple[bool, bool]:
        """Return whether it has experts, and adapters: only equal kinds are compared."""
        return self.mixture, "lora" in self.options

    @property
    def cuts(self) -> list[BatchSplit]:
        """Return the supported layouts of rows: context parallelism needs padded rows."""
        return [cut for cut in BATCH_SPLITS if not (cut.packing and "cp" in self.layout)]


@dataclass(frozen=True)
class BatchSplit:
    """The layout of the batch's rows."""

    packing: bool
    budget: int

    @property
    def rows(self) -> str:
        """The layout's name in the table."""
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
    TrainerSetup("Megatron TP2, positions too", "megatron", 2, POSITIONS, "megatron", {"tp": 2}),
    TrainerSetup("Megatron PP2", "megatron", 2, {}, "megatron", {"pp": 2}),
    TrainerSetup("Megatron CP2", "megatron", 2, {}, "megatron", {"cp": 2}),
    TrainerSetup("Megatron, distributed optimizer", "megatron", 2, DISTRIBUTED, "megatron"),
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
        POSITIONS | LORA,
        "megatron",
        {"tp": 2},
    ),
    TrainerSetup("adapters: Megatron PP2", "megatron", 2, LORA, "megatron", {"pp": 2}),
]
"""Others are compared with the first of their kind."""
BATCH_SPLITS = [
    BatchSplit(packing, budget) for packing in (False, True) for budget in (100_000, 64)
]


@dataclass(frozen=True)
class UpdateComparison:
    """The result of a setup and a split."""

    metrics: list[list[float]]
    """Loss and gradient norm of each step."""
    metrics_differ: float
    """Most that they differ by, over 1 and their size."""
    weights_differ: float
    """Most that a weight differs by after the last step."""

    def good(self, way: TrainerSetup) -> bool:
        """Return whether the results are equal up to rounding."""
        tolerance = OF_EXPERTS if way.mixture else TOLERANCE
        return self.metrics_differ <= RELATIVE and self.weights_differ <= tolerance

    def line(self, way: TrainerSetup, cut: BatchSplit) -> str:
        """A row of the table, in Markdown."""
        loss, norm = self.metrics[-1]
        return (
            f"| {way.name} | {cut.rows} | {cut.budget} | {loss:.7f} | {norm:.6f} "
            f"| {self.metrics_differ:.0e} | {self.weights_differ:.1e} |"
            + ("" if self.good(way) else " differs")
        )


HEAD = """
| | rows | budget | loss | gradient norm | both differ by | weights differ by |
|---|---|---|---|---|---|---|"""


def samples() -> list[TrainingSample]:
    """Groups of answers of unlike lengths to a prompt each, with rewards."""
    random, found = np.random.default_rng(0), []
    for group, place in itertools.product(range(4), range(4)):
        prompt = np.random.default_rng(group).integers(2, 14, 3 + 2 * group)
        length = int(random.integers(2, 24))
        rewards = np.zeros(length, np.float32)
        rewards[-1] = random.normal()
        actions = random.integers(2, 14, length)
        identity = RecordId(0, group * 4 + place)
        trajectory = Trajectory(identity=identity, actions=actions, prompt=prompt, group=group)
        reward = StepRewards(identity=identity, rewards=rewards)
        found.append(TrainingSample(trajectory, reward))
    return found


def compute(
    folder: Path, way: TrainerSetup, cut: BatchSplit, world: ProcessGroupInfo
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The update by one process of a way: loss and norm of each step, and the weights."""
    cls = trainers.get(way.trainer)
    load = CausalLM.meta_from_folder if way.processes > 1 else CausalLM.load
    options = {
        "device": "cpu",
        "packing": cut.packing,
        "max_tokens_per_microbatch": cut.budget,
        **way.options,
    }
    config = cls.Config.model_validate(options)
    model = CausalLMConfig() if way.mixture else MODEL
    trainer = cls(load(folder, model), config, OptimizerSection(lr=LR), world)
    algorithm, metrics = GRPO(GRPOConfig(entropy_coeff=0.01)), []
    for iteration in range(STEPS):
        learner = Learner(trainer, {"policy": LR}, iteration=iteration)
        algorithm.update(learner, [samples()])
        metrics.append([learner.metrics["loss"], learner.metrics["grad_norm"]])
    state = {name: tensor.clone() for name, tensor in trainer.full_state_dict(copy=True).items()}
    trainer.close()
    return metrics, state


def computed(task: str, rank: int) -> None:
    """One process of :func:`run`; the first tells its parent of each cut when it is there."""
    folder_name, way_fields, cut_fields, out_name = json.loads(task)
    folder, way, out = Path(folder_name), TrainerSetup(**way_fields), Path(out_name)
    # Libraries print there, too.
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    layout = ParallelLayout.model_validate(way.layout)
    rendezvous = out / "channels" / "group-e.json"
    world = ProcessGroupInfo(rank, way.processes, rank, rendezvous_file=rendezvous, layout=layout)
    for number, cut in enumerate(cut_fields):
        metrics, state = compute(folder, way, BatchSplit(**cut), world)
        if rank == 0:
            save_file(state, out / f"{number}.safetensors")
            print(json.dumps(metrics), file=parent, flush=True)


def run(
    folder: Path, way: TrainerSetup, cuts: Sequence[BatchSplit], out: Path
) -> Iterator[tuple[BatchSplit, Any, Any]]:
    """Some cuts of a way by its processes, one after the other, with what :func:`compute` gives.

    Raises:
        RuntimeError: a process failed, or they took longer than they may; with its last words.
    """
    python = (
        sys.executable
        if way.environment is None
        else resolve_interpreter(way.environment, "equality")
    )
    (out / "channels").mkdir(parents=True)
    task = json.dumps([str(folder), asdict(way), [asdict(cut) for cut in cuts], str(out)])
    logs = [out / f"{rank}.log" for rank in range(way.processes)]
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
    late = threading.Timer(LIMIT_S, _kill, [processes])
    late.start()
    try:
        assert processes[0].stdout is not None
        for number, line in enumerate(processes[0].stdout):
            yield cuts[number], json.loads(line), load_file(out / f"{number}.safetensors")
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError("\n".join(log.read_text()[-2000:] for log in logs))
    finally:
        late.cancel()
        _kill(processes)
        for process in processes:
            process.wait()


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def compared(metrics: Any, weights: Any, right: tuple[Any, Any]) -> UpdateComparison:
    """Compare the result of a setup with the reference."""
    one, other = np.array(metrics), np.array(right[0])
    if weights.keys() != right[1].keys():
        return UpdateComparison(metrics, float("inf"), float("inf"))
    worst = torch.stack([(tensor - right[1][name]).abs().max() for name, tensor in weights.items()])
    return UpdateComparison(
        metrics, float((np.abs(one - other) / (1 + np.abs(other))).max()), float(worst.max())
    )


def updates(kept: ResultCache, keys: dict[tuple[str, BatchSplit], str], place: Path) -> bool:
    """Compute and print what is missing of the first table; whether all of it is the same."""
    folders = {False: place / "dense", True: place / "experts"}
    for folder in folders.values():
        folder.mkdir()
    CausalLM.create(MODEL, {"alphabet": ALPHABET}, 0, folders[False])
    moe_checkpoint.create_moe_checkpoint(MODEL, ALPHABET, folders[True])
    firsts = {way.kind: way for way in reversed(TRAINER_SETUPS)}
    right: dict[tuple[bool, bool], tuple[Any, Any]] = {}
    good = True
    print(HEAD, flush=True)
    for way in TRAINER_SETUPS:
        if (lacks := missing_environment(way.environment)) is not None:
            print(f"| {way.name} | {lacks} | | | | | |", flush=True)
            continue
        left = [cut for cut in way.cuts if keys[way.name, cut] not in kept]
        for cut in way.cuts:
            if cut not in left:
                result = UpdateComparison(**kept[keys[way.name, cut]])
                print(result.line(way, cut), flush=True)
                good &= result.good(way)
        if not left:
            continue
        folder = folders[way.mixture]
        if way.kind not in right:
            first = firsts[way.kind]
            _, metrics, weights = next(
                run(folder, first, BATCH_SPLITS[:1], place / f"right {first.name}")
            )
            right[way.kind] = metrics, weights
        try:
            for cut, metrics, weights in run(folder, way, left, place / way.name):
                result = compared(metrics, weights, right[way.kind])
                print(result.line(way, cut), flush=True)
                kept[keys[way.name, cut]] = asdict(result)
                good &= result.good(way)
        except RuntimeError as error:
            print(f"| {way.name} | failed | | | | | |\n{error}", flush=True)
            good = False
    return good


def main() -> int:
    """Compute, compare, print the tables; 1 where a difference is above its tolerance."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equality")
    parser.add_argument("--anew", action="store_true", help="forget what was computed before")
    parser.add_argument("--compute", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compute:
        computed(arguments.compute, arguments.rank)
        return 0
    if arguments.anew:
        FILE.unlink(missing_ok=True)
    work = [inspect.getsource(part) for part in (samples, compute)]
    same = {"model": MODEL.model_dump(), "lr": LR, "steps": STEPS, "work": work}
    keys = {
        (way.name, cut): result_key(way.environment, **same, way=asdict(way), cut=asdict(cut))
        for way in TRAINER_SETUPS
        for cut in way.cuts
    }
    kept, engine_keys = ResultCache(FILE), engine_equality.keys()
    kept.discard_others([*keys.values(), *engine_keys.values()])
    with tempfile.TemporaryDirectory() as name:
        good = updates(kept, keys, Path(name))
        print(
            f"\nafter {STEPS} steps in float32 at learning rate {LR:g}; tolerance {TOLERANCE:g} "
            f"for weights ({OF_EXPERTS:g} with experts), {RELATIVE:g} for loss and gradient norm, "
            "over 1 and their size"
        )
        good &= engine_equality.compare(kept, engine_keys, Path(name))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
