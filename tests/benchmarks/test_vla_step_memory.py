"""The arithmetic minimum of a training step's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.vla_step_memory import KINDS, SPEC, minimum_bytes
from rlinf.models import policies


@pytest.mark.parametrize("kind", KINDS)
def test_only_one_block_keeps_what_it_computes(tmp_path: Path, kind: str) -> None:
    """So each further layer needs its weights four times, and the inputs of a block."""
    policy_class: Any = policies.get(kind)
    found = []
    for layers in (2, 3, 4):
        config = policy_class.Config(layers=layers, vision_layers=1)
        folder = tmp_path / str(layers)
        folder.mkdir()
        policy_class.create(config, SPEC, 0, folder)
        policy = policy_class.load(folder, config)
        weights = sum(tensor.nbytes for tensor in policy.module.parameters())
        found.append(minimum_bytes(policy))
        parts = {name: size / weights for name, size in found[-1].items() if name != "activations"}
        assert parts == {"weights": 1, "gradients": 1, "moments": 2}
    one, two = (b["activations"] - a["activations"] for a, b in zip(found, found[1:], strict=False))
    assert one == two > 0
    assert found[0]["activations"] > 3 * one
