"""Optimizer steps of a language model by two processes beside one, each with one thread.

About 50 million parameters, float32, rows packed; the same batch by one process, FSDP2, DeepSpeed
ZeRO-2 and Megatron with tensors cut in two, in turns. What has its packages in an environment of
its own is left out where that is not made.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.result_cache import missing_environment
from benchmarks.row import BenchmarkRow, median_row
from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.load_balancing import StepSpan
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.interpreters import resolve_interpreter
from rlinf.models.base import StepOutputs
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from rlinf.trainers import trainers
from rlinf.trainers.base import Loss, loss_from_steps

MODEL = CausalLMConfig(hidden=512, layers=12, heads=8, kv_heads=8, intermediate=2048)
ROWS, PROMPT, ANSWER, ROUNDS = 16, 32, 64, 5
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class ScalingSetup:
    """A setup of processes that computes a step."""

    row: str
    trainer: str
    processes: int
    environment: str | None = None
    """An environment of :mod:`rlinf.interpreters`; None: this one."""
    options: dict[str, Any] = field(default_factory=dict)
    tp: int = 1


SCALING_SETUPS = {
    "one": ScalingSetup("", "fsdp", 1),
    "fsdp2": ScalingSetup("fsdp2_scaling", "fsdp", 2),
    "zero2": ScalingSetup("zero2_scaling", "deepspeed", 2, "deepspeed", {"stage": 2}),
    "tp2": ScalingSetup("megatron_tp2_scaling", "megatron", 2, "megatron", tp=2),
}
GOALS = {"fsdp2": 1.6}
"""Times that one process takes longer."""


def measure() -> list[BenchmarkRow]:
    """A row of each way of two processes."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "policy").mkdir()
        CausalLM.create(MODEL, {"alphabet": "0123456789+="}, 0, folder / "policy")
        started = {}
        for key, way in SCALING_SETUPS.items():
            if (lacks := missing_environment(way.environment)) is None:
                started[key] = stack.enter_context(processes(key, way, folder))
            else:
                print(f"  {key}: {lacks}")
        times: dict[str, list[float]] = {key: [] for key in started}
        for _ in range(ROUNDS + 1):
            for key, ranks in started.items():
                times[key].append(step(ranks))
    print("  " + ", ".join(f"{key} {min(found):.1f} s" for key, found in times.items()))
    ones = times.pop("one")[1:]
    return [
        median_row(
            SCALING_SETUPS[key].row,
            [one / other for one, other in zip(ones, found[1:], strict=True)],
            "x",
            GOALS.get(key),
            "higher",
        )
        for key, found in times.items()
    ]


@contextlib.contextmanager
def processes(key: str, way: ScalingSetup, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of a setup; each takes a step for every line that it reads."""
    python = (
        sys.executable
        if way.environment is None
        else resolve_interpreter(way.environment, "scaling")
    )
    (folder / key / "channels").mkdir(parents=True)
    found = [
        subprocess.Popen(
            [python, "-m", "benchmarks.scaling", key, str(rank), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(way.processes)
    ]
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


def step(ranks: list[subprocess.Popen[str]]) -> float:
    """Seconds of a step, those of the slowest process.

    Raises:
        RuntimeError: a process has failed.
    """
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    line = [process.stdout.readline() for process in ranks if process.stdout is not None]
    if not all(line):
        raise RuntimeError("a process failed; what it said is above")
    return max(map(float, line))


def trajectories() -> list[Trajectory]:
    """Rows of equal length."""
    random = np.random.default_rng(0)
    return [
        Trajectory(
            identity=RecordId(0, row),
            actions=random.integers(2, 14, ANSWER),
            prompt=random.integers(2, 14, PROMPT),
        )
        for row in range(ROWS)
    ]


def loss(outputs: StepOutputs, spans: list[StepSpan]) -> Loss:
    """Return the loss of supervised fine-tuning."""
    return -outputs.logprobs.mean(), {"rows": torch.tensor(float(len(spans)))}


def main(key: str, rank: int, folder: Path) -> None:
    """One process of a way."""
    # Libraries print there, too.
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    way = SCALING_SETUPS[key]
    world = ProcessGroupInfo()
    if way.processes > 1:
        rendezvous = folder / key / "channels" / "group-s.json"
        layout = ParallelLayout(tp=way.tp)
        world = ProcessGroupInfo(
            rank, way.processes, rank, rendezvous_file=rendezvous, layout=layout
        )
    cls = trainers.get(way.trainer)
    load = CausalLM.meta_from_folder if way.processes > 1 else CausalLM.load
    options = {"device": "cpu", "packing": True, **way.options}
    trainer = cls(
        load(folder / "policy", MODEL),
        cls.Config.model_validate(options),
        OptimizerSection(),
        world,
    )
    data = trajectories()
    for _ in sys.stdin:
        began = time.perf_counter()
        trainer.step(data, loss_from_steps(loss), lr=1e-5)
        print(time.perf_counter() - began, file=parent, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
