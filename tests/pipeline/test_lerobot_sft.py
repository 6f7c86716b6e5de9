"""Every robot policy learns from a LeRobot data set, in SFT and in co-training, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow", reason="the extra 'lerobot' is not installed")
pytest.importorskip("av", reason="the extra 'lerobot' is not installed")
pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")

from pipeline.commands.experiment import run_experiment, validate_experiment
from pipeline.metrics import read_metrics
from rlinf.config import RunConfig, validate
from rlinf.envs.dataset_demonstrations import LeRobotDemonstrations
from rlinf.errors import ConfigError, DataError
from stages.factory import policy_class
from tests.pipeline.helpers import contents, output
from tests.pipeline.painted import LAYOUTS, SIZE, episodes

Compose = Callable[..., dict[str, Any]]
INSTRUCTION = "go to the light"
EVERY_ACTION = np.concatenate([each["action"] for each in episodes()])
SMALL = [
    "run.name=data",
    "iterations=2",
    "reward=environment",
    "sft.max_steps=6",
    "sft.batch_size=3",
    "sft.demonstration_steps=4",
    "sft.lr=3e-3",
    "sft.lr_warmup_steps=0",
    "sft.eval_generation=false",
    "rollout.batch_size=2",
    "rollout.group_size=2",
    "rollout.horizon=2",
    "algorithm.minibatches=2",
    "algorithm.epochs=1",
    "algorithm.sft_loss_coef=0.5",
    "algorithm.sft_batch_size=2",
    "evaluate.samples=2",
    "evaluate.horizon=2",
    "evaluate.every=1",
    "optimizer.lr=1e-3",
    "optimizer.lr_scheduler_type=constant",
]
TASK: dict[str, Any] = {
    "name": "gym",
    "simulator": "gymnasium",
    "id": "tests.pipeline.painted:Painted-v0",
    "images": {"front": list(SIZE)},
    "instruction": INSTRUCTION,
    "demonstration_camera_map": {"cam": "front"},
}
VLA = [
    "model.hidden=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.intermediate=64",
    "model.vision_hidden=16",
    "model.patch_size=8",
    "model.vision_heads=2",
    "model.chunk_size=3",
    "model.proprio_dim=2",
]
PI = [*VLA, "model.head_dim=8", "model.expert_hidden=24", "model.expert_intermediate=48"]
MODELS: dict[str, tuple[str, list[str]]] = {
    "vla": ("metaworld_vla", VLA),
    "smolvla": ("metaworld_smolvla", VLA),
    "pi0": ("metaworld_pi05", ["model=pi0", *PI]),
    "pi05": ("metaworld_pi05", PI),
}


def values_of(compose: Compose, name: str, data: Path, *words: str, **task: Any) -> dict[str, Any]:
    experiment, sizes = MODELS[name]
    values = compose(*SMALL, *sizes, f"model.norm_stats={data}", *words, experiment=experiment)
    return {**values, "task": {**TASK, "demonstration_data": str(data), **task}}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("name", "layout", "kind"),
    [
        ("vla", "v2.1", "image"),
        ("smolvla", "v3.0", "video"),
        ("pi0", "v3.0", "image"),
        ("pi05", "v2.1", "video"),
    ],
)
def test_it_learns_from_data_and_from_rewards_by_one_scaling(
    compose: Compose, tmp_path: Path, name: str, layout: str, kind: str
) -> None:
    data = LAYOUTS[layout](tmp_path / "set", kind)
    values = values_of(compose, name, data)
    run_experiment(values)
    run = tmp_path / "data"
    losses = [row["loss"] for row in output(run, "sft")[0].extra["curve"]]
    assert losses[-1] < losses[0]
    for row in read_metrics(run):
        assert row["train/sft_loss"] > 0
        assert row["inference/logprob_diff_max"] < 1e-4
    cls, options = policy_class(validate(RunConfig, values))
    policy = cls.load(output(run, "it", "0001", "sync")[1] / "weights", options)
    shown = LeRobotDemonstrations(data, {"cam": "front"}, INSTRUCTION)[1]
    prepared = policy.prepare_demonstration(shown)
    batch, state = policy.collate([prepared]), torch.from_numpy(shown.observations)
    if name == "vla":
        found = policy.bins.decode(batch["actions"][0])
        assert policy.bins.low == pytest.approx(np.quantile(EVERY_ACTION, 0.01, axis=0))
    else:
        torch.testing.assert_close(batch["state"][0], policy.scale_state(state))
        found = policy.to_actions(batch["actions"][0], state)
    wanted = np.clip(prepared.actions, *np.quantile(EVERY_ACTION, [0.01, 0.99], axis=0))
    np.testing.assert_allclose(found.numpy(), wanted, atol=0.02, err_msg="in the task's units")


@pytest.mark.usefixtures("undrawn")
def test_a_resumed_run_has_the_same_bytes(compose: Compose, tmp_path: Path) -> None:
    data = LAYOUTS["v3.0"](tmp_path / "set", "image")
    run_experiment(values_of(compose, "pi0", data, "run.name=whole"))
    for iterations in (1, 2):
        words = ["run.name=parts", f"iterations={iterations}"]
        run_experiment(values_of(compose, "pi0", data, *words))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"demonstration_data": None}, r"task\.demonstration_camera_map needs"),
        ({"demonstrations": 3}, "set one of both keys"),
        ({"demonstration_camera_map": {}}, r"demonstration_camera_map: no camera"),
        ({"demonstration_data": "/none"}, r"/none/meta/info\.json: no description"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    compose: Compose, tmp_path: Path, task: dict[str, Any], message: str
) -> None:
    data = LAYOUTS["v2.1"](tmp_path / "set", "image")
    values = values_of(compose, "vla", data, **task)
    with pytest.raises((ConfigError, DataError), match=message):
        validate_experiment(values)
    assert not (tmp_path / "data").exists()
