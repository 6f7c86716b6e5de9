"""Speedup of optimizer steps of a language model by two processes over one, with one thread each.

About 50 million parameters, float32, packed rows. One process, FSDP2, DeepSpeed ZeRO-2 and Megatron
with tensor parallelism 2 compute the same batch, alternately. Setups whose separate Python
environment does not exist are skipped.
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
    """A trainer and its number of processes."""

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
"""Minimum speedup over one process."""


def measure() -> list[BenchmarkRow]:
    """Measure a row per setup with two processes."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "policy").mkdir()
        CausalLM.create(MODEL, {"alphabet": "0123456789+="}, 0, folder / "policy")
        started = {}
        for key, setup in SCALING_SETUPS.items():
            if (advice := missing_environment(setup.environment)) is None:
                started[key] = stack.enter_context(processes(key, setup, folder))
            else:
                print(f"  {key}: {advice}")
        times: dict[str, list[float]] = {key: [] for key in started}
        for _ in range(ROUNDS + 1):
            for key, ranks in started.items():
                times[key].append(step(ranks))
    print("  " + ", ".join(f"{key} {min(seconds):.1f} s" for key, seconds in times.items()))
    single = times.pop("one")[1:]
    return [
        median_row(
            SCALING_SETUPS[key].row,
            [single_s / setup_s for single_s, setup_s in zip(single, seconds[1:], strict=True)],
            "x",
            GOALS.get(key),
            "higher",
        )
        for key, seconds in times.items()
    ]


@contextlib.contextmanager
def processes(key: str, setup: ScalingSetup, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of a setup; each makes a step for every line that it reads."""
    python = (
        sys.executable
        if setup.environment is None
        else resolve_interpreter(setup.environment, "scaling")
    )
    (folder / key / "channels").mkdir(parents=True)
    started = [
        subprocess.Popen(
            [python, "-m", "benchmarks.scaling", key, str(rank), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(setup.processes)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def step(ranks: list[subprocess.Popen[str]]) -> float:
    """Return the seconds of a step, by the slowest process.

    Raises:
        RuntimeError: a process has failed.
    """
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [process.stdout.readline() for process in ranks if process.stdout is not None]
    if not all(lines):
        raise RuntimeError("a process failed; what it said is above")
    return max(map(float, lines))


def trajectories() -> list[Trajectory]:
    """Return rows of equal length."""
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
    """Run one process of a setup."""
    # Libraries print to stdout too, so redirect it to stderr.
    parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    setup = SCALING_SETUPS[key]
    world = ProcessGroupInfo()
    if setup.processes > 1:
        rendezvous = folder / key / "channels" / "group-s.json"
        layout = ParallelLayout(tp=setup.tp)
        world = ProcessGroupInfo(
            rank, setup.processes, rank, rendezvous_file=rendezvous, layout=layout
        )
    cls = trainers.get(setup.trainer)
    load = CausalLM.meta_from_folder if setup.processes > 1 else CausalLM.load
    options = {"device": "cpu", "packing": True, **setup.options}
    trainer = cls(
        load(folder / "policy", MODEL),
        cls.Config.model_validate(options),
        OptimizerSection(),
        world,
    )
    data = trajectories()
    for _ in sys.stdin:
        start = time.perf_counter()
        trainer.step(data, loss_from_steps(loss), lr=1e-5)
        print(time.perf_counter() - start, file=parent, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
