"""Vision towers, against what timm says of its own (``timm_reference.py``)."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.models.openvla_folder import KNOWN_TOWERS
from rlinf.models.openvla_network import TOWERS, PretrainedVisionTower
from tests.rlinf.models import timm_reference

FOUND: dict[str, Any] = json.loads(
    Path(timm_reference.__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def small(tower: str) -> PretrainedVisionTower:
    sizes = timm_reference.SMALL[tower]
    shapes = FOUND["small"][tower]["shapes"]
    registers = shapes["reg_token"][1] if "reg_token" in shapes else None
    module = PretrainedVisionTower(
        {
            "image_size": sizes["img_size"],
            "patch_size": 14,
            "hidden_size": sizes["embed_dim"],
            "num_hidden_layers": sizes["depth"],
            "num_attention_heads": sizes["num_heads"],
            "intermediate_size": shapes["blocks.0.mlp.fc1.bias"][0],
            "registers": registers,
        }
    )
    module.load_state_dict(timm_reference.weights(shapes))
    return module


@pytest.mark.parametrize("tower", TOWERS)
def test_features_are_those_that_timm_recorded(tower: str) -> None:
    wanted = torch.tensor(FOUND["small"][tower]["features"], dtype=torch.float64)
    pixels = timm_reference.pixels()
    with torch.no_grad():
        single, double = small(tower)(pixels), small(tower).double()(pixels.double())
    assert single.shape == (2, 6, timm_reference.SMALL[tower]["embed_dim"])
    assert wanted.std() > 0.5
    assert (single - wanted).abs().max() < 1e-5 * wanted.std()
    assert (double - wanted).abs().max() < 1e-12 * wanted.std()


@pytest.mark.parametrize("tower", TOWERS)
def test_every_tensor_that_is_read_matters_and_no_other_is_trained(tower: str) -> None:
    module = small(tower)
    module(timm_reference.pixels()).square().sum().backward()
    trained = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    last = f"blocks.{timm_reference.SMALL[tower]['depth'] - 1}."
    unread = {n for n in module.state_dict() if n.startswith((last, "norm.", "attn_pool."))}
    assert trained == module.state_dict().keys() - unread
    assert {name for name, _ in module.named_buffers()} == unread


@pytest.mark.parametrize(("tower", "name"), zip(TOWERS, KNOWN_TOWERS, strict=True))
def test_towers_of_published_folders_have_the_tensors_of_timm(tower: str, name: str) -> None:
    assert timm_reference.TOWERS[tower] == name
    with torch.device("meta"):
        whole = PretrainedVisionTower({**KNOWN_TOWERS[name], "image_size": [224, 224]})
    found = {name: list(tensor.shape) for name, tensor in whole.state_dict().items()}
    assert found == FOUND["whole"][tower]


def test_timm_still_says_so(tmp_path: Path) -> None:
    """Where the version of the recording is installed."""
    try:
        version = importlib.metadata.version("timm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("timm is not installed (timm_reference.py says how)")
    if version != FOUND["timm"]:
        pytest.skip(f"timm {version} is installed; {FOUND['timm']} was recorded")
    target = tmp_path / "again.json"
    subprocess.run([sys.executable, timm_reference.__file__, target], check=True)
    again = json.loads(target.read_text(encoding="utf-8"))
    assert again["whole"] == FOUND["whole"]
    for tower in TOWERS:
        result, before = (torch.tensor(f["small"][tower]["features"]) for f in (again, FOUND))
        assert torch.allclose(result, before, atol=1e-5)
