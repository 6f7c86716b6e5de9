"""Small folders of GR00T N1.5 and N1.7 in the published formats: several embodiments, padded states
and actions, a third camera, and more actions than are executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rlinf.models.character_tokenizer import DEFAULT_ALPHABET, write_character_tokenizer
from rlinf.models.gr00t import Gr00tPolicy
from rlinf.models.gr00t_folder import (
    IMAGE_TOKENS,
    Gr00tConfig,
    head_sizes,
    new_gr00t_config,
    new_vlm_config,
)
from rlinf.models.gr00t_network import Gr00tModel

SPEC: dict[str, Any] = {
    "observation": 5,
    "action": {"kind": "box", "size": 3},
    "images": {"front": [40, 40], "wrist": [28, 28]},
}
SIZES: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 48,
    "vision_hidden": 16,
    "vision_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "chunk_size": 6,
    "expert_layers": 5,
    "expert_hidden": 24,
}
CAMERAS = {"front": "front", "wrist": "wrist"}
"""The cameras of a folder that the task shows; it has a third one, ``spare``."""
VERSIONS = ("n1.5", "n1.7")
TAGS = {"n1.5": "gr1", "n1.7": "libero_sim"}
"""An embodiment of each version, beside ``new_embodiment``."""
NAMES = ("arm", "gripper")


def statistics(size: int, seed: int) -> dict[str, dict[str, list[float]]]:
    """Of two groups, the first with all numbers but one."""
    random, result = np.random.default_rng(seed), {}
    for group, count in zip(NAMES, (size - 1, 1), strict=True):
        low = random.uniform(-3, -2, count)
        names = ("min", "q01", "mean", "std", "q99", "max")
        steps = (0, 0.1, 1, 0.3, 4, 5)
        result[group] = {n: (low + d).tolist() for n, d in zip(names, steps, strict=True)}
    return result


def write_folder(folder: Path, version: Any, **changes: Any) -> None:
    """Write a folder with random weights, adaptive norms included, and ``folder/../vlm``."""
    vlm = folder.parent / "vlm"
    folder.mkdir(parents=True)
    vlm.mkdir(exist_ok=True)
    vocabulary = write_character_tokenizer(
        DEFAULT_ALPHABET + "\n", vlm, special_tokens=[IMAGE_TOKENS[version]]
    )
    config = Gr00tConfig(version=version, **SIZES)
    policy = new_gr00t_config(config, SPEC)
    vlm_settings = new_vlm_config(config, 32, vocabulary)
    (vlm / "config.json").write_text(json.dumps(vlm_settings))
    head: dict[str, Any] = policy.get("action_head_cfg", policy)
    head |= {"max_state_dim": 7, "max_num_embodiments": 32, "num_inference_timesteps": 5}
    kept = ["model_type", "backbone_cfg", "action_head_cfg", "action_horizon"]
    if version == "n1.5":
        head["action_dim"] = 5
        policy["action_horizon"] = 6
        embodiments(folder, TAGS[version], changes.pop("video", ["front", "spare", "wrist"]))
    else:
        policy["max_action_dim"] = 5
        kept = [n for n in policy if n not in ("type", "input_features", "output_features")]
        processor(folder, TAGS[version], **changes.pop("processor", {}))
    settings = {name: policy[name] for name in kept if name in policy} | changes
    for name in ("embodiment", "embodiment_id", "chunk_size", "n_action_steps", "prompt"):
        settings.pop(name, None)
    (folder / "config.json").write_text(json.dumps(settings))
    module = Gr00tModel(policy, vlm_settings, head_sizes(settings))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
    tensors = {name: t.detach().contiguous() for name, t in module.state_dict().items()}
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for name, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / name, {"format": "pt"})
    index = {"weight_map": {n: name for name, part in files.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def embodiments(folder: Path, tag: str, cameras: list[str]) -> None:
    """Write the statistics of a folder of N1.5."""
    (folder / "experiment_cfg").mkdir()
    metadata = {
        name: {
            "statistics": {"state": statistics(4, seed), "action": statistics(3, seed + 1)},
            "modalities": {"video": {camera: {"channels": 3} for camera in cameras}},
            "embodiment_tag": name,
        }
        for seed, name in enumerate((tag, "new_embodiment"))
    }
    (folder / "experiment_cfg" / "metadata.json").write_text(json.dumps(metadata))


def processor(folder: Path, tag: str, **changes: Any) -> None:
    """Write the statistics of a folder of N1.7."""
    keys: dict[str, Any] = {
        "video": {"delta_indices": [0], "modality_keys": ["front", "spare", "wrist"]},
        "state": {"delta_indices": [0], "modality_keys": list(NAMES)},
        "action": {"delta_indices": list(range(5)), "modality_keys": list(NAMES)},
        "language": {"delta_indices": [0], "modality_keys": ["annotation.task"]},
    }
    settings = {
        "modality_configs": {tag: keys, "new_embodiment": keys},
        "image_crop_size": [28, 28],
        "image_target_size": [32, 32],
        "formalize_language": True,
        "use_percentiles": True,
        "clip_outliers": True,
        **changes,
    }
    contents = {
        "processor_config": {"processor_class": "Gr00tN1d7Processor", "processor_kwargs": settings},
        "embodiment_id": {tag: 2, "new_embodiment": 10},
        "statistics": {
            name: {"state": statistics(4, seed), "action": statistics(3, seed + 1)}
            for seed, name in enumerate((tag, "new_embodiment"))
        },
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def start(folder: Path, source: Path, version: str, **options: Any) -> Gr00tPolicy:
    """The policy in ``folder`` that starts from a published folder."""
    config = Gr00tConfig(
        **{
            "path": source,
            "vlm_path": source.parent / "vlm",
            "camera_map": CAMERAS,
            "embodiment": TAGS[version],
            **options,
        }
    )
    folder.mkdir()
    Gr00tPolicy.create(config, SPEC, 0, folder)
    return Gr00tPolicy.load(folder, config)
