"""The memory of a layout beside what torch itself counts of the trainer that a stage runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline.planning.cost.model_shape import from_hf_config
from pipeline.planning.cost.workloads import TRAINER_STATE, TrainingWorkload

PROCESSES, TOKENS = 4, 128
CASES = {
    "bfloat16": ("bfloat16", False, 32),
    "bfloat16, recomputed": ("bfloat16", True, 32),
    "float32": ("float32", False, 32),
    "few rows": ("float32", False, 4),
}
"""Type of the weights that compute, whether layers are recomputed, and rows of a micro-batch."""
PROGRAM = """
import json, sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.trainers.base import loss_from_steps
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer

folder, processes, tokens, cases = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
# Collectives of the others are taken as done: sizes are right, contents are not.
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
shape = CausalLMConfig(hidden=256, layers=8, heads=4, kv_heads=2, intermediate=1024)
CausalLM.create(shape, {"alphabet": "0123456789+="}, 0, folder)

def loss(outputs, spans):
    return -outputs.logprobs.mean(), {"rows": torch.tensor(float(len(spans)))}

for dtype, recompute, rows in cases:
    random = np.random.default_rng(0)
    records = [
        Trajectory(
            identity=RecordId(0, row),
            actions=random.integers(2, 14, tokens - 32),
            prompt=random.integers(2, 14, 32),
        )
        for row in range(rows * processes)
    ]
    config = FSDPConfig(
        device="cpu", param_dtype=dtype, max_tokens_per_microbatch=1 << 20,
        gradient_checkpointing=recompute, fsdp_wrap_min_mb=1,
    )
    policy = CausalLM.load(folder, shape)
    world = ProcessGroupInfo(0, processes, 0)
    trainer = FSDPTrainer(policy, config, OptimizerSection(lr=1e-3), world)
    trainer.step(records, loss_from_steps(loss), lr=1e-3)
    tracker = FSDPMemTracker(policy.module, trainer.optimizer)
    with tracker:
        trainer.step(records, loss_from_steps(loss), lr=1e-3)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    print(json.dumps({str(getattr(key, "value", key)): size for key, size in peak.items()}))
"""


@cache
def counted(folder: Path) -> list[dict[str, int]]:
    """Of each case the bytes at the peak of an optimizer step, by what they are of."""
    words = [str(folder), str(PROCESSES), str(TOKENS), json.dumps(list(CASES.values()))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_step_takes_what_is_planned(folder: Path, case: str) -> None:
    """Within a fifth: formulas know no copies of keys and values, nor the types of norms."""
    dtype, recompute, rows = CASES[case]
    found = counted(folder)[list(CASES).index(case)]
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    shape = from_hf_config({**config, "dtype": dtype})
    work = TrainingWorkload(
        rows * PROCESSES,
        TOKENS,
        micro_batch=rows,
        recompute="full" if recompute else "selective",
    )
    assert work.memory_bytes(shape, PROCESSES) == pytest.approx(found["Total"], rel=0.2)
    weights = TRAINER_STATE.weights * shape.parameters / PROCESSES
    moments = TRAINER_STATE.optimizer * shape.parameters / PROCESSES
    assert found["Sharded Param"] == pytest.approx(weights, rel=0.02)
    assert found["OptState"] == pytest.approx(moments, rel=0.02)
