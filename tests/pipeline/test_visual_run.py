"""GRPO on questions about images, from SFT to the second update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.commands.experiment import run_experiment, validate_experiment
from rlinf.channels.record_files import RecordFileReader
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from rlinf.models.qwen2_5_vl import Qwen25VL, Qwen25VLConfig
from tests.pipeline.helpers import output

Compose = Callable[..., dict[str, Any]]
SMALL = [
    "run.name=visual",
    "iterations=2",
    "model.hidden=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.intermediate=64",
    "model.vision_hidden=16",
    "model.vision_heads=2",
    "sft.max_steps=6",
    "sft.batch_size=16",
    "sft.lr=1e-2",
    "rollout.batch_size=4",
    "rollout.group_size=4",
    "rollout.horizon=12",
    "evaluate.samples=8",
    "algorithm.filter_zero_variance_groups=false",
    "algorithm.entropy_coeff=0.1",
    "optimizer.lr=1e-2",
]


@pytest.mark.usefixtures("undrawn")
def test_two_iterations_agree_about_log_probs_and_train(compose: Compose) -> None:
    values = compose(*SMALL, experiment="visual_grpo")
    run_experiment(values)
    run = Path(values["run"]["root"]) / "visual"
    config = Qwen25VLConfig(hidden=32)
    for iteration, folder in ((0, "sft"), (1, "it/0000/sync")):
        _, data = output(run, "it", f"{iteration:04d}", "rollout")
        records = list(map(Trajectory.from_record, RecordFileReader(data.glob("*.h5"))))
        assert len(records) == 16
        # Each group has its image, and its samples have it too.
        images = {r.group: r.pixels.tobytes() for r in records}
        assert len(set(images.values())) == 4
        assert all(r.pixels.tobytes() == images[r.group] for r in records)
        policy = Qwen25VL.load(output(run, folder)[1] / "weights", config)
        with torch.no_grad():
            outputs = policy.evaluate(policy.collate(records), 1.0).logprobs.numpy()
        for row, record in zip(outputs, records, strict=True):
            np.testing.assert_allclose(row[: len(record)], record.logprobs, atol=1e-5)
    one, two = (
        Qwen25VL.load(output(run, "it", f"000{i}", "sync")[1] / "weights", config).module
        for i in (0, 1)
    )
    moved = {
        name
        for name, tensor in one.state_dict().items()
        if not torch.equal(tensor, two.state_dict()[name])
    }
    assert any("visual" in name for name in moved)
    assert any("language_model" in name for name in moved)


def test_parts_that_do_not_see_are_refused(compose: Compose) -> None:
    for words, text in (
        (["model=small"], "'visual_questions' needs .* images, which no component"),
        (["engine=vllm"], "'visual_questions' needs an engine that takes images"),
    ):
        values = compose(*words, experiment="visual_grpo")
        with pytest.raises(ConfigError, match=text):
            validate_experiment(values)
