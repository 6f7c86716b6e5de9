"""A policy that acts by tokens on a simulator with pictures: its expert, then two updates."""

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
    "run.name=openvla",
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
    "sft.max_steps=8",
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


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("policy", "fused", "chunk"),
    [
        ("openvla_oft", "false", 8),
        ("openvla", "false", 1),
        pytest.param("openvla_oft", "true", 8, marks=pytest.mark.slow),
    ],
)
def test_it_learns_from_the_expert_and_then_from_rewards(
    compose: Compose, policy: str, fused: str, chunk: int
) -> None:
    need_environment("metaworld")
    words = [*SMALL, f"model.use_fused_vision_backbone={fused}"]
    values = compose(*words, experiment=f"metaworld_{policy}")
    run_experiment(values)
    run = Path(values["run"]["root"]) / "openvla"
    curve = output(run, "sft")[0].extra["curve"]
    losses = [row["loss"] for row in curve]
    assert losses[0] == pytest.approx(np.log(256), abs=0.3), "of a network that knows nothing"
    assert np.mean(losses[-2:]) < losses[0] - 0.5
    for iteration in range(2):
        _, data = output(run, "it", f"{iteration:04d}", "rollout")
        records = list(RecordFileReader(data.glob("*.h5")))
        assert len(records) == 4
        for record in records:
            steps = record.steps
            assert steps["actions"].shape == steps["tokens"].shape == (3, chunk, 4)
            assert steps["executed"].tolist() == [chunk] * 3
            assert steps["images.corner"].shape == (3, 24, 24, 3)
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
    assert moved, "two updates changed nothing"
    parts = {name.partition(".")[0] for name in moved}
    assert parts >= {"vision_backbone", "projector", "language_model"}
    assert ("proprio_projector" in parts) == (policy == "openvla_oft")


@pytest.mark.usefixtures("undrawn")
def test_a_regression_head_imitates_and_is_evaluated(compose: Compose) -> None:
    need_environment("metaworld")
    words = [*SMALL, "iterations=0", "model.action_head=l1", "model.use_film=true"]
    values = compose(*words, experiment="metaworld_openvla_oft")
    run_experiment(values)
    run = Path(values["run"]["root"]) / "openvla"
    losses = [row["loss"] for row in output(run, "sft")[0].extra["curve"]]
    assert losses[-1] < losses[0]
    assert "score" in output(run, "evaluate", "0000")[0].metrics


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("task.demonstrations=0", r"sft\.max_steps: .*task\.demonstrations"),
        ("model.chnuk=3", r"model\.chnuk: unknown key.*chunk"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    compose: Compose, changed: str, message: str
) -> None:
    need_environment("metaworld")
    values = compose(changed, experiment="metaworld_openvla_oft")
    with pytest.raises(ConfigError, match=message):
        validate_experiment(values)
    assert not (Path(values["run"]["root"]) / "metaworld_openvla_oft").exists()


def test_a_task_without_pictures_is_refused(compose: Compose) -> None:
    need_environment("metaworld")
    values = compose(experiment="metaworld_openvla_oft")
    values["task"]["images"] = {}
    with pytest.raises(ConfigError, match=r"task\.images: model\.name=openvla_oft reads images"):
        validate_experiment(values)
