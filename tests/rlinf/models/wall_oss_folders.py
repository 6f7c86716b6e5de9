"""Small folders of WALL-OSS: as LeRobot writes them, and as the original code does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlinf.models.character_tokenizer import DEFAULT_ALPHABET, write_character_tokenizer
from rlinf.models.flow_vla import write_weights
from rlinf.models.images import PREPROCESSOR_FILE, ImageProcessor
from rlinf.models.wall_oss import WallOSSPolicy
from rlinf.models.wall_oss_folder import (
    SPECIAL_TOKENS,
    WallOSSConfig,
    new_network_config,
    new_policy_config,
    write_wall_processors,
)
from tests.rlinf.models.pi0_folders import CAMERAS, SPEC, statistics

SIZES: dict[str, Any] = {
    "hidden": 48,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 64,
    "expert_intermediate": 40,
    "vision_hidden": 16,
    "vision_layers": 3,
    "vision_heads": 2,
    "image_size": 56,
    "patch_size": 7,
}
DOFS = {"arm": 7, "other_arm": 7, "body": 6}


def write_folder(folder: Path, changes: dict[str, Any] | None = None, **network: Any) -> None:
    """Write a policy folder of LeRobot with random weights.

    Args:
        changes: Entries of LeRobot's ``config.json``.
        network: Entries of the network's ``config.json``.
    """
    vlm = folder / "vlm"
    vlm.mkdir(parents=True)
    vocabulary = write_character_tokenizer(
        DEFAULT_ALPHABET + "\n", vlm, special_tokens=SPECIAL_TOKENS
    )
    config = WallOSSConfig(**SIZES)
    settings = new_policy_config(config, SPEC) | {
        "chunk_size": 6,
        "n_action_steps": 4,
        "max_state_dim": 20,
        "max_action_dim": 20,
        **(changes or {}),
    }
    spare = {"observation.images.spare": {"type": "VISUAL", "shape": [3, 28, 28]}}
    settings["input_features"] |= spare
    sizes = new_network_config(config, settings, SPEC, vocabulary)
    sizes |= {"dof_config": DOFS, "agent_pos_config": DOFS}
    sizes["noise_scheduler"] = {"num_inference_timesteps": 5}
    # Windows of two by two tokens, of which an image has several.
    sizes["vision_config"] |= {"window_size": 28, "fullatt_block_indexes": [1]}
    sizes |= network
    (vlm / "config.json").write_text(json.dumps(sizes))
    (vlm / PREPROCESSOR_FILE).write_text(
        json.dumps(ImageProcessor(0, (), patch_size=7).to_settings())
    )
    (folder / "config.json").write_text(json.dumps(settings))
    write_wall_processors(folder, settings, statistics())
    first = folder.with_name(f"{folder.name}_first")
    first.mkdir()
    # The network of a new policy has the same sizes, except for the padding of actions.
    spec = {**SPEC, "observation": 20, "action": {"kind": "box", "size": 20}}
    WallOSSPolicy.create(config, spec, 0, first)
    tensors = load_file(first / "model.safetensors")
    shutil.rmtree(first)
    random = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
    write_weights(folder, tensors)


def to_original(source: Path, folder: Path, data_sets: tuple[str, ...] = ("lab",)) -> None:
    """Write a folder of LeRobot as the original code does: one configuration, other names, and
    normalizers among the weights."""
    shutil.copytree(source / "vlm", folder)
    stored = load_file(source / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    random = torch.Generator().manual_seed(1)
    for kind in ("action", "propri"):
        for name in data_sets:
            low = torch.randn(20, generator=random)
            tensors[f"action_preprocessor.normalizer_{kind}.min.{name}"] = low
            tensors[f"action_preprocessor.normalizer_{kind}.delta.{name}"] = 2 + low.abs()
    save_file(tensors, folder / "model.safetensors")


def start(folder: Path, source: Path, **options: Any) -> WallOSSPolicy:
    """The policy in ``folder`` that starts from another folder."""
    config = WallOSSConfig(path=source, camera_map=CAMERAS, **options)
    folder.mkdir()
    WallOSSPolicy.create(config, SPEC, 0, folder)
    return WallOSSPolicy.load(folder, config)
