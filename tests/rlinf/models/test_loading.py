"""A network that is built without memory gets the weights of any checkpoint of it, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlinf.errors import DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, folder, records

__all__ = ["folder"]


def outlined(path: Path, config: CausalLMConfig = CONFIG) -> CausalLM:
    """With memory that holds nothing of use yet; tied weights stay tied."""
    policy = CausalLM.meta_from_folder(path, config)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in policy.module.modules():
        for name, own in part._parameters.items():
            if own is not None:
                assert own.is_meta
                made.setdefault(own, nn.Parameter(torch.full_like(own, torch.nan, device="cpu")))
                part._parameters[name] = made[own]
    return policy


def assert_loaded(policy: CausalLM, right: CausalLM) -> None:
    own, others = policy.module.state_dict(), right.module.state_dict()
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in others.items())
    one, other = (p.evaluate(p.collate(records()), 1.0).logprobs for p in (policy, right))
    assert torch.equal(one, other)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_network_that_loading_whole_gives(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    config = CONFIG.model_copy(update={"architecture": architecture})
    CausalLM.create(config, {"alphabet": "0123456789+="}, 0, tmp_path)
    config = config.model_copy(update={"dtype": dtype})
    policy = outlined(tmp_path, config)
    policy.load_weights()
    assert_loaded(policy, CausalLM.load(tmp_path, config))


def in_parts(folder: Path, target: Path) -> Path:
    """The checkpoint in two files with an index."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    table = {}
    for number in range(2):
        part = {name: tensors[name] for name in sorted(tensors)[number::2]}
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file(part, target / file, metadata={"format": "pt"})
        table |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return target


def test_the_files_of_a_sharded_checkpoint_are_found_by_its_index(
    folder: Path, tmp_path: Path
) -> None:
    policy = outlined(in_parts(folder, tmp_path / "parts"))
    policy.load_weights()
    assert_loaded(policy, CausalLM.load(folder, CONFIG))
    other = outlined(folder)
    other.load_weights(tmp_path / "parts")
    assert_loaded(other, CausalLM.load(folder, CONFIG))


def test_weights_may_be_those_of_the_network_below_the_head(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    tensors = {name.removeprefix("model."): t for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    policy = outlined(tmp_path / "base")
    policy.load_weights()
    assert_loaded(policy, CausalLM.load(folder, CONFIG))


def test_tensors_that_are_not_its_own_are_listed_and_nothing_changes(
    folder: Path, tmp_path: Path
) -> None:
    parts = in_parts(folder, tmp_path / "parts")
    path = parts / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    gone = sorted(name for name in tensors if "mlp" in name)[0]
    del tensors[gone]
    tensors["model.extra"] = torch.ones(2)
    shaped = sorted(name for name in tensors if "norm" in name)[0]
    tensors[shaped] = torch.ones(3)
    save_file(tensors, path, metadata={"format": "pt"})
    policy = outlined(parts)
    with pytest.raises(DataError) as refused:
        policy.load_weights()
    message = str(refused.value)
    assert f"missing: {gone}" in message
    assert "not of this network: model.extra" in message
    assert f"of another shape: {shaped} [3], not " in message
    assert all(tensor.isnan().all() for tensor in policy.module.parameters())
