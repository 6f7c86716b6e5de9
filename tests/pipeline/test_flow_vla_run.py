"""Policies that denoise chunks on a simulator with pictures: its expert, then two updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.commands.experiment import run_experiment, validate_experiment
from rlinf.channels.record_files import RecordFileReader
from rlinf.data.episodes import INSTRUCTION_COLUMN, decode_instruction
from rlinf.errors import ConfigError
from rlinf.safetensors_io import load_tensors
from tests.environments import need_environment
from tests.pipeline.helpers import output

Compose = Callable[..., dict[str, Any]]
SMALL = [
    "run.name=small",
    "iterations=2",
    "reward=environment",
    "task.demonstrations=2",
    "task.images={corner: [24, 24]}",
    "model.hidden=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.intermediate=64",
    "model.vision_hidden=16",
    "model.patch_size=8",
    "model.vision_heads=2",
    "sft.max_steps=12",
    "sft.batch_size=1",
    "sft.lr=3e-3",
    "sft.lr_warmup_steps=0",
    "sft.eval_generation=false",
    "rollout.batch_size=2",
    "rollout.group_size=2",
    "rollout.horizon=3",
    "algorithm.minibatches=2",
    "evaluate.samples=2",
    "evaluate.horizon=2",
    "optimizer.lr=1e-3",
]


GR00T = ["model=gr00t", "model.expert_hidden=24"]
PI = ["model.head_dim=8", "model.expert_hidden=24", "model.expert_intermediate=48"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("experiment", "further", "parts"),
    [
        ("metaworld_smolvla", [], ("connector", "text_model", "lm_expert", "state_proj")),
        ("metaworld_pi05", PI, ("multi_modal_projector", "language_model", "norm.dense")),
        ("metaworld_pi05", [*PI, "model=pi0"], ("language_model", "gemma_expert", "state_proj")),
        ("metaworld_pi05", GR00T, ("language_model", "transformer_blocks", "state_encoder")),
        ("metaworld_wall_oss", [], ("visual", "moe.experts.0", "moe.experts.1", "propri_proj")),
    ],
    ids=["smolvla", "pi05", "pi0", "gr00t", "wall_oss"],
)
def test_it_learns_from_the_expert_and_then_from_rewards_of_chunks(
    compose: Compose, experiment: str, further: list[str], parts: tuple[str, ...]
) -> None:
    need_environment("metaworld")
    values = compose(*SMALL, *further, experiment=experiment)
    run_experiment(values)
    run = Path(values["run"]["root"]) / "small"
    losses = [row["loss"] for row in output(run, "sft")[0].extra["curve"]]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    for iteration in range(2):
        _, data = output(run, "it", f"{iteration:04d}", "rollout")
        records = list(RecordFileReader(data.glob("*.h5")))
        assert len(records) == 4
        for record in records:
            steps = record.steps
            assert steps["actions"].shape == steps["logprobs"].shape == (3, 8, 4)
            assert steps["chain"].shape == (3, 5, 8, 4)
            assert steps["executed"].tolist() == [8, 8, 8]
            assert {decode_instruction(row) for row in steps[INSTRUCTION_COLUMN]} == {
                "drawer close"
            }
        gap = output(run, "it", f"{iteration:04d}", "inference")[0].metrics["logprob_diff_max"]
        assert gap[0] / gap[1] < 1e-5 if isinstance(gap, (list, tuple)) else gap < 1e-5
    before, after = (
        load_tensors(output(run, *place)[1] / "weights" / "model.safetensors")
        for place in (("sft",), ("it", "0001", "sync"))
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    for part in parts:
        assert any(part in name for name in moved), part
    assert not any("lm_head" in name for name in moved), "it is not used"


def test_what_cannot_work_is_refused_before_anything_is_written(compose: Compose) -> None:
    need_environment("metaworld")
    values = compose("model.patch_size=7", experiment="metaworld_smolvla")
    with pytest.raises(ConfigError, match=r"model\.image_size: images are resized to 96 x 96"):
        validate_experiment(values)
    assert not (Path(values["run"]["root"]) / "metaworld_smolvla").exists()
