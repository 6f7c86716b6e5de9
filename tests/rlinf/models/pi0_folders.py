"""Small folders of pi-0 and pi-0.5 as LeRobot writes them: padded states and actions, a camera that
no task shows, actions that are not carried out, and statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.models.character_tokenizer import DEFAULT_ALPHABET, write_character_tokenizer
from rlinf.models.flow_vla import write_weights
from rlinf.models.pi0 import Pi0Policy, Pi05Policy
from rlinf.models.pi0_folder import (
    PiConfig,
    network_sizes,
    new_pi_config,
    prompt_step,
    write_pi_processors,
)
from rlinf.models.pi0_network import PiNetwork

POLICIES: dict[str, type[Pi0Policy]] = {"pi0": Pi0Policy, "pi05": Pi05Policy}
SPEC: dict[str, Any] = {
    "observation": 4,
    "action": {"kind": "box", "size": 3},
    "images": {"front": [40, 40], "wrist": [28, 28]},
}
# LeRobot's joint pass needs eight heads.
SIZES: dict[str, Any] = {
    "hidden": 48,
    "layers": 2,
    "heads": 8,
    "head_dim": 8,
    "intermediate": 64,
    "vision_hidden": 16,
    "vision_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "expert_hidden": 32,
    "expert_intermediate": 48,
}
CAMERAS = {"front": "front", "wrist": "wrist"}
"""The cameras of a folder that the task shows; it has a third one, ``spare``."""


def statistics(seed: int = 0) -> dict[str, dict[str, list[float]]]:
    """Statistics of four numbers of states and three of actions."""
    random = np.random.default_rng(seed)
    return {
        name: {
            "mean": random.normal(size=size).tolist(),
            "std": random.uniform(0.5, 2, size).tolist(),
            "q01": random.uniform(-3, -2, size).tolist(),
            "q99": random.uniform(2, 3, size).tolist(),
        }
        for name, size in (("observation.state", 4), ("action", 3))
    }


def write_folder(folder: Path, kind: str, **changes: Any) -> None:
    """Write a folder with random weights, adaptive norms included."""
    (folder / "tokenizer").mkdir(parents=True)
    vocabulary = write_character_tokenizer(DEFAULT_ALPHABET + "\n", folder / "tokenizer")
    config = PiConfig(**SIZES)
    settings = new_pi_config(config, SPEC, kind, len(vocabulary)) | {
        "chunk_size": 6,
        "n_action_steps": 4,
        "max_state_dim": 7,
        "max_action_dim": 5,
        "num_inference_steps": 5,
        **changes,
    }
    spare = {"observation.images.spare": {"type": "VISUAL", "shape": [3, 28, 28]}}
    settings["input_features"] |= spare
    step = prompt_step(settings, config, None)
    if "max_state_dim" in step["config"]:
        step["config"]["max_state_dim"] = 7
    write_pi_processors(folder, settings, statistics(), step)
    (folder / "config.json").write_text(json.dumps(settings))
    random = torch.Generator().manual_seed(0)
    sizes = network_sizes(settings)
    module = PiNetwork(settings, sizes, learned_noise=False).model
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            scale = 0.3 if ".dense." in name else 0.1
            tensor.add_(scale * torch.randn(tensor.shape, generator=random))
    write_weights(folder, {f"model.{name}": t for name, t in module.state_dict().items()})


def start(folder: Path, source: Path, kind: str, **options: Any) -> Pi0Policy:
    """The policy in ``folder`` that starts from another folder."""
    config = PiConfig(path=source, camera_map=CAMERAS, **options)
    folder.mkdir()
    POLICIES[kind].create(config, SPEC, 0, folder)
    return POLICIES[kind].load(folder, config)
