"""Policies that see pictures: what they see matters, and what cannot work is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError
from rlinf.models.actor_critic import CNNConfig, CNNPolicy

SPEC: dict[str, Any] = {
    "observation": 3,
    "action": {"kind": "box", "size": 2},
    "images": {"front": [36, 36], "wrist": [40, 36]},
}


def policy(folder: Path, **options: Any) -> CNNPolicy:
    config = CNNConfig(hidden=(8,), features_dim=8, **options)
    CNNPolicy.create(config, SPEC, 0, folder)
    found = CNNPolicy.load(folder, config)
    assert isinstance(found, CNNPolicy)
    return found


def records(count: int = 3) -> list[Trajectory]:
    random = np.random.default_rng(0)
    return [
        Trajectory(
            identity=RecordId(0, number),
            observations=random.normal(size=(5, 3)).astype(np.float32),
            actions=random.normal(size=(5, 2)).astype(np.float32),
            images={
                "front": random.integers(0, 256, (5, 36, 36, 3), np.uint8),
                "wrist": random.integers(0, 256, (5, 40, 36, 3), np.uint8),
            },
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("camera", ["images.front", "images.wrist"])
def test_each_picture_matters_at_its_own_step_alone(tmp_path: Path, camera: str) -> None:
    made = policy(tmp_path)
    batch = made.collate(records())
    before = made.evaluate(batch, 1.0)
    assert before.values is not None
    batch[camera][1, 2] = 255 - batch[camera][1, 2]
    after = made.evaluate(batch, 1.0)
    assert after.values is not None
    changed = (after.values != before.values).nonzero().tolist()
    assert changed == [[1, 2]]


@pytest.mark.parametrize("sees", [True, False])
def test_the_state_is_an_input_only_where_it_is_wanted(tmp_path: Path, sees: bool) -> None:
    made = policy(tmp_path, use_state=sees)
    batch = made.collate(records())
    before = made.evaluate(batch, 1.0).values
    batch["observations"] = batch["observations"] + 1
    after = made.evaluate(batch, 1.0).values
    assert before is not None
    assert after is not None
    assert torch.equal(before, after) is not sees


def test_a_gradient_reaches_every_layer(tmp_path: Path) -> None:
    made = policy(tmp_path)
    out = made.evaluate(made.collate(records()), 1.0)
    assert out.values is not None
    (out.logprobs.sum() + out.values.sum()).backward()
    lacking = [n for n, p in made.module.named_parameters() if p.grad is None or not p.grad.any()]
    assert lacking == []


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ({}, r"model\.name: cnn reads images, and the task shows none; set task\.images"),
        ({"front": [36, 20]}, r"task\.images\.front: 36 x 20 is too small .* 36 at least"),
    ],
)
def test_what_it_cannot_see_is_refused(
    images: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        CNNPolicy.check_spec(CNNConfig(), {**SPEC, "images": images})
