"""Pools of real workers compute on the device what one process computes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import read_metrics
from pipeline.run import compute_texts
from rlinf.artifacts import Manifest
from stages.layout import stage_folder
from tests.pipeline.helpers import budget_gib, moves

pytestmark = [pytest.mark.usefixtures("undrawn"), pytest.mark.slow]
TRAINING = ["reward", "inference", "train"]
POOLS = {"collocated": [["rollout", *TRAINING]], "apart": [["rollout"], TRAINING]}


@pytest.mark.parametrize("case", POOLS)
def test_a_run_in_pools_is_that_of_one_process(
    compose: Callable[..., dict[str, Any]], tiny_run: Path, tmp_path: Path, device: str, case: str
) -> None:
    words = [f"engine.device={device}", f"trainer.device={device}", "cluster=local"]
    if case == "collocated":  # so little that each stage makes room for the next
        words.append(f"device_memory_gib={budget_gib(tiny_run, 4.1)}")
    values = compose(*words)
    pools = [{"stages": stages, "devices": {"local": 1}} for stages in POOLS[case]]
    run_experiment({**values, "plan": {"pools": pools}})
    run = tmp_path / "tiny"
    found, expected = read_metrics(run), read_metrics(tiny_run)
    assert len(found) == len(expected)
    # Later iterations may differ, because a sampled token may fall to the other side of a boundary.
    for name in ("train/loss", "train/grad_norm", "rollout/completion_length"):
        assert found[0][name] == pytest.approx(expected[0][name], rel=1e-2, abs=1e-4)
    assert all(row["train/rollout_logprob_diff"] < 1e-3 for row in found)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    manifests = [
        Manifest.parse((stage_folder(run, stage, 1) / "manifest.json").read_bytes())
        for stage in ("rollout", "train")
    ]
    assert compute_texts(manifests) == dict.fromkeys(("engine", "trainer"), f"float32 on {name}")
    assert bool(moves(run)["onload"]) == (case == "collocated")
