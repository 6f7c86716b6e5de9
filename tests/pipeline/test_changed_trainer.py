"""A run goes on from its last checkpoint with another trainer, world or engine when asked to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.commands.experiment import run_experiment
from pipeline.resume import OnMismatch
from rlinf import api
from rlinf.errors import MismatchError
from stages.layout import ACCEPTED_FILE
from tests.environments import need_environment
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("undrawn")]
STEADY = ["optimizer.lr_scheduler_type=constant", "optimizer.lr_warmup_iterations=0"]
"""Rates that do not depend on how many iterations a start asks for."""
SPLIT = {"processes": 2, "layout": {"tp": 2}}


def assert_alike(run: Path, other: Path) -> None:
    """Weights up to a fiftieth of the learning rate: where a gradient is zero but for rounding, a
    step of Adam is not."""
    right, found = (api.load(folder).weights() for folder in (other, run))
    assert right.keys() == found.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize(
    ("trainer", "words", "stages"),
    [
        ("deepspeed", ["trainer.zero_stage=2"], {"train": {"processes": 2}}),
        ("megatron", [], {"train": SPLIT, "inference": SPLIT}),
    ],
)
def test_a_run_changes_its_trainer_and_world_and_back(
    trainer: str, words: list[str], stages: dict[str, Any], compose: Compose, tmp_path: Path
) -> None:
    """FSDP2, then ZeRO-2 or Megatron's tensor parallel on two processes, then FSDP2 on two."""
    need_environment(trainer)
    two = {"plan": {"stages": {"train": {"processes": 2}}}}
    same = [*STEADY, "model.kv_heads=2"]
    run_experiment(compose(*same, "run.name=straight", "iterations=3"))
    run_experiment(compose(*same, "iterations=1"))
    run, first = tmp_path / "tiny", contents(tmp_path / "tiny")

    there = ["cluster=local", f"trainer={trainer}", f"trainer.python={trainer}", *words]
    other = compose(*same, *there, "iterations=2") | {"plan": {"stages": stages}}
    with pytest.raises(MismatchError, match=rf'trainer\.name: "fsdp" -> "{trainer}"'):
        run_experiment(other)
    assert contents(run) == first, "nobody asked for it"
    run_experiment(other, OnMismatch.KEEP)
    second = contents(run)
    assert {name: second[name] for name in first} == first
    run_experiment(other)
    assert contents(run) == second, "once is enough"

    run_experiment(compose(*same, "cluster=local", "iterations=3") | two, OnMismatch.KEEP)
    third = contents(run)
    assert {name: third[name] for name in second} == second
    # What FSDP2 made is its own again; only what the other made is noted to count.
    to, back = json.loads((run / ACCEPTED_FILE).read_text())["entries"]
    assert f'trainer.name: "fsdp" -> "{trainer}"' in to["differences"]
    assert {"sft/0", "train/0"} <= set(to["outputs"])
    assert f'trainer.name: "{trainer}" -> "fsdp"' in back["differences"]
    assert "train/1" in back["outputs"]
    assert "train/0" not in back["outputs"]
    assert_alike(run, tmp_path / "straight")


def test_a_run_changes_its_engine_and_back(compose: Compose, tmp_path: Path) -> None:
    need_environment("vllm")
    # Heads of 64, which vLLM takes on every CPU.
    wide = [*STEADY, "model.hidden=128", "cluster=inprocess"]
    run_experiment(compose("iterations=1", *wide))
    run, first = tmp_path / "tiny", contents(tmp_path / "tiny")
    run_experiment(compose("iterations=2", "engine=vllm", *wide), OnMismatch.KEEP)
    second = contents(run)
    assert {name: second[name] for name in first} == first
    run_experiment(compose("iterations=3", *wide), OnMismatch.KEEP)
    third = contents(run)
    assert {name: third[name] for name in second} == second
    why = [
        entry["differences"] for entry in json.loads((run / ACCEPTED_FILE).read_text())["entries"]
    ]
    assert 'engine.name: "transformers" -> "vllm"' in why[0]
    assert 'engine.name: "vllm" -> "transformers"' in why[1]
    # Samples are drawn from the same weights by the same seeds, each engine by its own numbers.
    gaps = [
        row["train/rollout_logprob_diff"]
        for row in api.load(run).metrics()
        if "train/rollout_logprob_diff" in row
    ]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5
