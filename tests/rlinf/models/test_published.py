"""Names that other projects know, of tensors that come by the network's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlinf.errors import DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.causal_lm_config import Architecture
from rlinf.models.loading import CheckpointExporter, inspect_module
from rlinf.safetensors_io import load_tensors

SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 16}


def made(folder: Path, architecture: Architecture) -> tuple[CausalLM, CheckpointExporter]:
    config = CausalLMConfig(architecture=architecture, **SIZES)
    CausalLM.create(config, {"alphabet": "01+="}, 0, folder)
    return CausalLM.load(folder, config), CheckpointExporter(inspect_module(folder, config))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe", "mixtral", "olmoe"])
def test_they_are_those_of_the_checkpoint(tmp_path: Path, architecture: Architecture) -> None:
    policy, published = made(tmp_path, architecture)
    stored = load_tensors(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in published.meta_tensors.items()} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    assert all(tensor.is_meta for tensor in published.meta_tensors.values())
    got = dict(published.export(policy.module.state_dict().items()))
    assert got.keys() == stored.keys()
    assert all(torch.equal(got[name], stored[name]) for name in stored)


def test_experts_come_layer_by_layer(tmp_path: Path) -> None:
    """They are never there all at once."""
    policy, published = made(tmp_path, "qwen3_moe")
    state, requests = policy.module.state_dict(), list[str]()

    def tensors():  # type: ignore[no-untyped-def]
        for name, tensor in state.items():
            requests.append(name)
            yield name, tensor

    first = next(name for name, _ in published.export(tensors()) if ".experts." in name)
    assert first.startswith("model.layers.0.")
    assert not any(name.startswith("model.layers.1.") for name in requests)


def test_of_tied_ones_any_is_enough(tmp_path: Path) -> None:
    policy, published = made(tmp_path, "qwen2")
    state = policy.module.state_dict()
    del state["model.embed_tokens.weight"]
    assert published.meta_tensors.keys() == dict(published.export(state.items())).keys()


@pytest.mark.parametrize("wrong", ["missing", "unknown", "shape"])
def test_others_are_refused(tmp_path: Path, wrong: str) -> None:
    policy, published = made(tmp_path, "qwen3_moe")
    state, name = policy.module.state_dict(), "model.layers.1.mlp.experts.down_proj"
    tensor = state.pop(name)
    if wrong != "missing":
        state[name if wrong == "shape" else "other"] = tensor[:2]
    with pytest.raises(DataError, match="other" if wrong == "unknown" else name):
        dict(published.export(state.items()))
