"""``python -m benchmarks.equality``: one update, computed in every way, gives the same weights.

The same batch, weights and algorithm (GRPO, three steps of AdamW) on one process and on several,
by every trainer, with rows packed and padded and at two budgets of a micro-batch. A trainer whose
packages are in an environment of its own (``make env NAME=...``) runs there; without it, it is
left out, and the table says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks import mixture
from rlinf.algorithms.grpo import GRPO, GRPOConfig
from rlinf.algorithms.learner import Learner
from rlinf.channels.world import ParallelLayout, World
from rlinf.config import OptimizerSection
from rlinf.data.batch import Sample
from rlinf.data.record import Identity, Record
from rlinf.errors import ConfigError
from rlinf.interpreters import interpreter
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.trainers import trainers

ALPHABET = "0123456789+="
LR, STEPS = 1e-3, 3
TOLERANCE = LR / 50
"""Of updated weights. A step of Adam is as long as the learning rate however small the gradient:
where that is zero up to rounding, so is its sign, and some keys' biases have no other."""
RELATIVE = 1e-5
"""Of losses and gradient norms."""
MODEL = CausalLMConfig(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128)
BUDGETS = (64, 100_000)
SEQUENCES, DISTRIBUTED = {"sequence_parallel": True}, {"distributed_optimizer": True}
LIMIT_S, ROOT = 300, Path(__file__).parents[1]


@dataclass(frozen=True)
class Way:
    """How the update is computed."""

    name: str
    trainer: str = "fsdp"
    processes: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    layout: str = ""
    """How processes share a copy of the model."""
    mixture: bool = False
    """Whether its layers have experts; compared with one process that has them too."""


WAYS = [
    Way("one process"),
    Way("FSDP2, 2 processes", processes=2, options={"unit_mb": 0}),
    Way("FSDP2, 2 copies on 2 each", processes=4, options={"unit_mb": 0, "replicas": 2}),
    *(
        Way(f"ZeRO-{stage}, 2 processes", "deepspeed", 2, {"stage": stage}, "deepspeed")
        for stage in (1, 2, 3)
    ),
    Way("Megatron TP2", "megatron", 2, {}, "megatron", "tp=2"),
    Way("Megatron TP2, positions too", "megatron", 2, SEQUENCES, "megatron", "tp=2"),
    Way("Megatron PP2", "megatron", 2, {}, "megatron", "pp=2"),
    Way("Megatron, distributed optimizer", "megatron", 2, DISTRIBUTED, "megatron"),
    Way("experts: one process", mixture=True),
    Way("experts: Megatron EP2", "megatron", 2, {}, "megatron", "ep=2", mixture=True),
]


def samples() -> list[Sample]:
    """Groups of answers of unlike lengths to a prompt each, with rewards."""
    random, found = np.random.default_rng(0), []
    for group, place in itertools.product(range(4), range(4)):
        prompt = np.random.default_rng(group).integers(2, 14, 3 + 2 * group)
        length = int(random.integers(2, 24))
        rewards = np.zeros(length, np.float32)
        rewards[-1] = random.normal()
        actions = random.integers(2, 14, length)
        identity = Identity(0, group * 4 + place)
        trajectory = Record(identity, {"actions": actions}, {"prompt": prompt}, {"group": group})
        reward = Record(identity, {"rewards": rewards}, info={"keep": True})
        found.append(Sample(trajectory, reward))
    return found


def compute(folder: Path, way: Way, packing: bool, budget: int, rank: int, out: Path) -> None:
    """The update by one process of a way; the first writes what came of it."""
    cls = trainers.get(way.trainer)
    meeting, layout = out / "channels" / "group-e.json", ParallelLayout.parse(way.layout)
    world = World(rank, way.processes, rank, meeting=meeting, layout=layout)
    load = CausalLM.outline if way.processes > 1 else CausalLM.load
    model = CausalLMConfig() if way.mixture else MODEL
    options = {"device": "cpu", "packing": packing, "token_budget": budget, **way.options}
    trainer = cls(
        load(folder, model), cls.Config.model_validate(options), OptimizerSection(lr=LR), world
    )
    algorithm, said = GRPO(GRPOConfig(entropy_bonus=0.01)), []
    for iteration in range(STEPS):
        learner = Learner(trainer, {"policy": LR}, iteration=iteration)
        algorithm.update(learner, [samples()])
        said.append([learner.metrics["loss"], learner.metrics["grad_norm"]])
    state = {name: tensor.clone() for name, tensor in trainer.full_state(copy=True).items()}
    if rank == 0:
        save_file(state, out / "weights.safetensors")
        (out / "said.json").write_text(json.dumps(said))


def run(folder: Path, way: Way, packing: bool, budget: int, out: Path) -> None:
    """All processes of a way."""
    python = sys.executable
    if way.environment is not None:
        python = interpreter(way.environment, "equality")
    (out / "channels").mkdir(parents=True)
    told = json.dumps([str(folder), asdict(way), packing, budget, str(out)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [python, "-m", "benchmarks.equality", "--compute", told, "--rank", str(rank)],
            env=environment,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(way.processes)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{way.name}:\n{errors[0]}")


def main() -> int:
    """Compute, compare, print the table; 1 where a difference is above its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compute", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ways", default="", help="those whose names hold this, and the first")
    arguments = parser.parse_args()
    if arguments.compute:
        folder, way, packing, budget, out = json.loads(arguments.compute)
        compute(Path(folder), Way(**way), packing, budget, arguments.rank, Path(out))
        return 0
    table = Table("", "rows", "budget", "loss", "gradient norm", "weights differ by", "")
    failed = False
    chosen = [way for way in WAYS if arguments.ways in way.name or "one process" in way.name]
    with tempfile.TemporaryDirectory() as name:
        dense, experts = (Path(name) / part for part in ("model", "experts"))
        dense.mkdir()
        experts.mkdir()
        CausalLM.create(MODEL, {"alphabet": ALPHABET}, 0, dense)
        mixture.create(MODEL, ALPHABET, experts)
        first: dict[Path, tuple[list[list[float]], dict[str, torch.Tensor]]] = {}
        for way in chosen:
            folder = experts if way.mixture else dense
            if way.environment is not None:
                try:
                    interpreter(way.environment, "equality")
                except ConfigError:
                    table.add_row(way.name, f"not run: make env NAME={way.environment}")
                    continue
            for packing, budget in itertools.product((False, True), reversed(BUDGETS)):
                out = Path(name) / f"{way.name}-{packing}-{budget}"
                run(folder, way, packing, budget, out)
                said = json.loads((out / "said.json").read_text())
                weights = load_file(out / "weights.safetensors")
                right = first.setdefault(folder, (said, weights))
                worst = max(
                    float((tensor - right[1][name]).abs().max()) for name, tensor in weights.items()
                )
                same = np.allclose(said, right[0], rtol=RELATIVE, atol=RELATIVE)
                good = bool(same) and worst <= TOLERANCE and weights.keys() == right[1].keys()
                failed |= not good
                table.add_row(
                    way.name,
                    "packed" if packing else "padded",
                    str(budget),
                    f"{said[-1][0]:.7f}",
                    f"{said[-1][1]:.6f}",
                    f"{worst:.1e}",
                    "" if good else "differs",
                )
    Console(width=110).print(table)
    print(
        f"after {STEPS} steps at learning rate {LR:g}; tolerance {TOLERANCE:g} for weights, "
        f"{RELATIVE:g} for the loss and the gradient's norm"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
