"""Folders of OpenVLA's training and fine-tuning with pickled weights, converted once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.errors import DataError
from rlinf.models.action_encoding import STATISTICS_FILE
from rlinf.models.loading import read_weights
from rlinf.models.openvla import OpenVLAOFTPolicy
from rlinf.models.openvla_conversion import convert_openvla
from rlinf.models.openvla_folder import OpenVLAOFTConfig
from tests.rlinf.models.acting import SPEC
from tests.rlinf.models.test_openvla_published import evaluate, made, published

LORA_RANK = 32


def native_name(name: str) -> tuple[str, str]:
    """The part and the name in OpenVLA's training of a published tensor."""
    if name.startswith("projector.fc"):
        layer, _, rest = name.removeprefix("projector.fc").partition(".")
        return "projector", f"projector.{2 * (int(layer) - 1)}.{rest}"
    if name.startswith("language_model."):
        return "llm_backbone", "llm." + name.removeprefix("language_model.")
    name = name.replace("vision_backbone.featurizer.", "dino_featurizer.")
    name = name.replace("vision_backbone.fused_featurizer.", "siglip_featurizer.")
    return "vision_backbone", name.replace(".scale_factor", ".gamma")


def native(folder: Path) -> dict[str, torch.Tensor]:
    """A native folder of a small network, and its tensors by their published names."""
    made(folder / "own")
    tensors = load_file(folder / "own" / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if not name.startswith("value_head.")}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part, own = native_name(name)
        parts.setdefault(part, {})[own] = tensor
    (folder / "checkpoints").mkdir()
    torch.save({"model": parts}, folder / "checkpoints" / "step-000100-epoch-01-loss=0.5.pt")
    base = {"base_vlm": "prism-dinosiglip-224px+7b", "data_mix": "libero"}
    (folder / "config.json").write_text(json.dumps({"vla": base}))
    statistics = {"action": {"q01": [-1.0] * 3, "q99": [1.0] * 3}}
    (folder / STATISTICS_FILE).write_text(json.dumps({"libero": statistics}))
    return tensors


def test_a_native_folder_becomes_a_published_one(tmp_path: Path) -> None:
    tensors = native(tmp_path / "native")
    convert_openvla(tmp_path / "native", tmp_path / "new", tmp_path / "native" / "own")
    found = read_weights(tmp_path / "new")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t.to(torch.bfloat16)) for n, t in tensors.items())
    settings = json.loads((tmp_path / "new" / "config.json").read_text())
    assert settings["text_config"]["vocab_size"] - settings["pad_to_multiple_of"] == 32000
    assert settings["norm_stats"]["libero"]["action"]["q99"] == [1.0] * 3
    # The same network with its small sizes.
    own = json.loads((tmp_path / "native" / "own" / "config.json").read_text())
    sizes = ("vision_config", "text_config", "image_sizes", "pad_to_multiple_of", "n_action_bins")
    settings |= {name: own[name] for name in sizes}
    (tmp_path / "new" / "config.json").write_text(json.dumps(settings))
    config = OpenVLAOFTConfig(
        path=tmp_path / "new", chunk_size=4, center_crop=False, gripper="simulator"
    )
    (tmp_path / "run").mkdir()
    OpenVLAOFTPolicy.create(config, SPEC, 0, tmp_path / "run")
    policy = OpenVLAOFTPolicy.load(tmp_path / "run", config)
    assert torch.isfinite(evaluate(policy)["logprob"]).all()


def finetuned(folder: Path) -> OpenVLAOFTPolicy:
    """A folder as OpenVLA-OFT's fine-tuning saves it, and the policy that is in it."""
    config = published(folder, action_head="l1", use_film=True, proprio_dim=2)
    run = folder.parent / "wanted"
    run.mkdir()
    OpenVLAOFTPolicy.create(config, SPEC, 0, run)
    policy = OpenVLAOFTPolicy.load(run, config)
    settings = json.loads((folder / "config.json").read_text())
    settings = {n: v for n, v in settings.items() if n not in ("action_head", "use_film")}
    (folder / "config.json").write_text(json.dumps(settings))
    state = policy.module.state_dict()
    for name in ("action_head", "proprio_projector"):
        part = {
            "module." + key.removeprefix(f"{name}."): tensor
            for key, tensor in state.items()
            if key.startswith(f"{name}.")
        }
        torch.save(part, folder / f"{name}--100_checkpoint.pt")
    torch.save(with_adapters(state), folder / "vision_backbone--100_checkpoint.pt")
    # The weights beside it are those before the fine-tuning of the vision backbone.
    added = (*("action_head.", "proprio_projector."), *(f".{name}." for name in ("scale", "shift")))
    for path in folder.glob("*.safetensors"):
        kept = {n: t for n, t in load_file(path).items() if not any(part in n for part in added)}
        kept = {n: 0 * t if n.startswith("vision_backbone.") else t for n, t in kept.items()}
        save_file(kept, path, {"format": "pt"})
    return policy


def with_adapters(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The vision backbone under the names of FiLM and PEFT, whose adapters change attention."""
    random = torch.Generator().manual_seed(3)
    found = {}
    for published_name, tensor in state.items():
        if not published_name.startswith("vision_backbone."):
            continue
        head, dot, rest = published_name.partition(".blocks.")
        block, _, inner = rest.partition(".")
        is_wrapped = dot and not inner.startswith(("scale.", "shift."))
        name = f"{head}.blocks.{block}.block.{inner}" if is_wrapped else published_name
        layer, _, kind = name.rpartition(".")
        if not layer.endswith("attn.qkv"):
            found[name] = tensor
        elif kind == "bias":
            found[f"{layer}.base_layer.bias"] = tensor
        else:
            up = torch.randn((len(tensor), LORA_RANK), generator=random)
            down = torch.randn((LORA_RANK, tensor.shape[1]), generator=random)
            # OpenVLA-OFT's alpha is 16.
            found[f"{layer}.base_layer.weight"] = tensor - 0.5 * (up @ down)
            found[f"{layer}.lora_A.default.weight"] = down
            found[f"{layer}.lora_B.default.weight"] = up
    return found


def test_the_parts_of_a_finetuned_folder_are_joined(tmp_path: Path) -> None:
    wanted = finetuned(tmp_path / "finetuned")
    convert_openvla(tmp_path / "finetuned", tmp_path / "new", None)
    settings = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (settings["action_head"], settings["use_film"], settings["proprio_dim"]) == (
        *("l1", True),
        2,
    )
    options = {"unnorm_key": "one", "center_crop": False, "gripper": "simulator"}
    config = OpenVLAOFTConfig(path=tmp_path / "new", chunk_size=4, **options)
    OpenVLAOFTPolicy.check_spec(config, SPEC)
    (tmp_path / "run").mkdir()
    OpenVLAOFTPolicy.create(config, SPEC, 0, tmp_path / "run")
    policy = OpenVLAOFTPolicy.load(tmp_path / "run", config)
    state = policy.module.state_dict()
    for name, tensor in wanted.module.state_dict().items():
        if not name.startswith("value_head."):
            assert torch.allclose(state[name], tensor, atol=1e-5), name
    one, other = evaluate(wanted)["action"], evaluate(policy)["action"]
    assert torch.allclose(one, other, atol=1e-4)


class Intruder:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def test_a_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    finetuned(tmp_path / "finetuned")
    path = tmp_path / "finetuned" / "action_head--100_checkpoint.pt"
    torch.save({"weight": Intruder(tmp_path / "mark")}, path)
    with pytest.raises(DataError, match=r"action_head--100_checkpoint\.pt: .*other objects"):
        convert_openvla(tmp_path / "finetuned", tmp_path / "new", None)
    assert not (tmp_path / "mark").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["finetuned", "wanted"]


def removed(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return change


def diffusion(folder: Path) -> None:
    tensors = {"noise_predictor.mlp_resnet.fc1.weight": torch.zeros(2)}
    torch.save(tensors, folder / "action_head--100_checkpoint.pt")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            lambda f: (f / "action_head--200_checkpoint.pt").touch(),
            r"action_head--200_.*: action_head--100_checkpoint\.pt is there too",
        ),
        (
            lambda f: (f / "noisy_action_projector--1_checkpoint.pt").touch(),
            r"noisy_action_projector--1_.*not supported",
        ),
        (removed("*_checkpoint.pt"), r"use it as it is: model\.path="),
        (removed("model-00001*"), r"lacks model-00001"),
        (diffusion, r"action_head--100_.*diffusion head"),
        (
            lambda f: (f / "action_head--100_checkpoint.pt").write_bytes(b"no"),
            r"action_head--100_checkpoint\.pt: is damaged",
        ),
    ],
)
def test_a_finetuned_folder_that_cannot_be_converted_is_refused(
    change: Callable[[Path], None], wanted: str, tmp_path: Path
) -> None:
    finetuned(tmp_path / "finetuned")
    change(tmp_path / "finetuned")
    with pytest.raises(DataError, match=wanted):
        convert_openvla(tmp_path / "finetuned", tmp_path / "new", None)
    assert not (tmp_path / "new").exists()


def set_base(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"vla": {"base_vlm": "phi-2+3b"}}))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (set_base, r"vla\.base_vlm: 'phi-2\+3b'; known are prism-dinosiglip-224px\+7b"),
        (removed(STATISTICS_FILE), r"dataset_statistics\.json"),
        (removed("checkpoints/*"), r"checkpoints: has no latest-checkpoint\.pt"),
        (removed("own/tokenizer.json"), r"tokenizer\.json is no tokenizer"),
    ],
)
def test_a_native_folder_that_cannot_be_converted_is_refused(
    change: Callable[[Path], None], wanted: str, tmp_path: Path
) -> None:
    native(tmp_path / "native")
    change(tmp_path / "native")
    with pytest.raises(DataError, match=wanted):
        convert_openvla(tmp_path / "native", tmp_path / "new", tmp_path / "native" / "own")


def test_a_native_folder_needs_a_tokenizer(tmp_path: Path) -> None:
    native(tmp_path / "native")
    with pytest.raises(DataError, match="give --tokenizer FOLDER"):
        convert_openvla(tmp_path / "native", tmp_path / "new", None)
