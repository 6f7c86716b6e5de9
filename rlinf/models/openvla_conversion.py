"""Conversion of OpenVLA checkpoints with pickled weights to folders for ``model.path``.

There are two kinds. A *native* folder of OpenVLA's training (Prismatic) has all weights in one file
in ``checkpoints``. A folder of OpenVLA-OFT's fine-tuning has safetensors files of the merged
network, and pickled parts: ``action_head--*``, ``proprio_projector--*`` and, with FiLM,
``vision_backbone--*``. Its vision backbone may have LoRA adapters, which are merged.

Pickled files are read once, by ``torch.load`` with ``weights_only=True``, in a process of their
own: ``python -m rlinf.models.openvla_conversion SOURCE TARGET [TOKENIZER]``.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf.errors import DataError, RlinfError
from rlinf.models.action_encoding import STATISTICS_FILE
from rlinf.models.character_tokenizer import read_tokenizer
from rlinf.models.hf_folder import (
    INDEX_FILE,
    check_checkpoint,
    check_weight_files,
    copy_non_weight_files,
    non_weight_files,
    read_config_json,
    read_json_object,
    tensor_files,
)
from rlinf.models.images import PREPROCESSOR_FILE
from rlinf.models.loading import check_new_folder, new_model_folder
from rlinf.models.openvla_folder import (
    COMPONENT_FILES,
    KNOWN_TOWERS,
    MODEL_TYPE,
    TOWER_NORMALIZATION,
)
from rlinf.models.openvla_network import L1, TOWERS
from rlinf.safetensors_io import SafetensorsReader
from rlinf.verified_io import copy_file

COMMAND = "rlinf convert"
SHARD_BYTES = 4 << 30
"""Size of a weight file from which on the next one begins."""
NATIVE_BASES = ("prism-dinosiglip-224px+7b", "prism-dinosiglip-224px-controlled+7b")
"""Values of ``vla.base_vlm`` with OpenVLA's two towers and Llama 2 (7B)."""
NATIVE_NAMES = (
    (r"^projector\.0\.", "projector.fc1."),
    (r"^projector\.2\.", "projector.fc2."),
    (r"^projector\.4\.", "projector.fc3."),
    (r"^llm\.", "language_model."),
    (r"^dino_featurizer\.(.*)\.gamma$", r"vision_backbone.featurizer.\1.scale_factor"),
    (r"^dino_featurizer\.", "vision_backbone.featurizer."),
    (r"^siglip_featurizer\.", "vision_backbone.fused_featurizer."),
)
"""Pattern and replacement that give a published tensor name for one of OpenVLA's training."""
COMPONENTS = ("action_head", "proprio_projector", "vision_backbone")
LORA_A, LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
LORA_ALPHA_LIMIT = 16
"""OpenVLA-OFT adapts with a LoRA alpha of the rank, but at most this."""


def convert_openvla(source: Path, target: Path, tokenizer: Path | None) -> None:
    """Convert a folder with pickled weights.

    Args:
        source: A native folder of OpenVLA, or one of OpenVLA-OFT's fine-tuning.
        target: The new folder.
        tokenizer: Folder with Llama 2's ``tokenizer.json``, which native folders lack.

    Raises:
        DataError: The target exists, or the source is malformed or not supported.
    """
    check_new_folder(target)
    _check_source(source, tokenizer)
    with new_model_folder(target) as written:
        command = [sys.executable, "-m", __name__, str(source), str(written)]
        command += [] if tokenizer is None else [str(tokenizer)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
            raise DataError(f"{source}: cannot be converted: {lines[-1]}")


def _is_native(source: Path) -> bool:
    return "vla" in read_json_object(source / "config.json", COMMAND)


def _check_source(source: Path, tokenizer: Path | None) -> None:
    """Check what can be checked without pickled files.

    Raises:
        DataError: The source or the tokenizer does not fit.
    """
    if not _is_native(source):
        if tokenizer is not None:
            raise DataError(f"--tokenizer {tokenizer}: {source} has its own; remove the option")
        check_checkpoint(source, True)
        check_weight_files(source)
        if (kind := read_config_json(source)["model_type"]) != MODEL_TYPE:
            raise DataError(f"{source}: is a {kind!r} model; expected a folder of OpenVLA")
        _component_files(source)
        return
    base = read_json_object(source / "config.json", COMMAND)["vla"].get("base_vlm")
    if base not in NATIVE_BASES:
        raise DataError(
            f"{source / 'config.json'}: vla.base_vlm: {base!r}; known are {', '.join(NATIVE_BASES)}"
        )
    read_json_object(source / STATISTICS_FILE, COMMAND)
    _native_checkpoint(source)
    if tokenizer is None:
        raise DataError(
            f"{source}: has no tokenizer; give --tokenizer FOLDER with that of Llama 2, such as a "
            "published folder of OpenVLA"
        )
    read_tokenizer(tokenizer)


def _component_files(source: Path) -> dict[str, Path]:
    """Return the pickled parts of a fine-tuned folder by name.

    Raises:
        DataError: There are none, several of one kind, or unknown ones.
    """
    found: dict[str, Path] = {}
    for path in sorted(source.glob(COMPONENT_FILES)):
        name = path.name.partition("--")[0]
        if name not in COMPONENTS:
            raise DataError(f"{path}: a part that is not supported; known: {', '.join(COMPONENTS)}")
        if name in found:
            raise DataError(f"{path}: {found[name].name} is there too; keep the one to convert")
        found[name] = path
    if not found:
        raise DataError(f"{source}: has no {COMPONENT_FILES}; use it as it is: model.path={source}")
    return found


def _native_checkpoint(source: Path) -> Path:
    """Return the newest checkpoint of a native folder.

    Raises:
        DataError: There is none.
    """
    folder = source / "checkpoints"
    if (latest := folder / "latest-checkpoint.pt").is_file():
        return latest
    checkpoints = sorted(folder.glob("step-*.pt"))
    if not checkpoints:
        raise DataError(f"{folder}: has no latest-checkpoint.pt and no step-*.pt")
    return checkpoints[-1]


def main(source: Path, target: Path, tokenizer: Path | None) -> None:
    """Convert a folder; the arguments are those of :func:`convert_openvla`."""
    if tokenizer is not None:
        _convert_native(source, target, tokenizer)
    else:
        _convert_finetuned(source, target)


def _convert_native(source: Path, target: Path, tokenizer: Path) -> None:
    """Write ``config.json``, statistics, tokenizer and bfloat16 weights of a native folder."""
    checkpoint = _native_checkpoint(source)
    parts = _load_pickle(checkpoint).get("model")
    names = ("vision_backbone", "projector", "llm_backbone")
    if not isinstance(parts, Mapping) or not all(isinstance(parts.get(n), Mapping) for n in names):
        raise DataError(f"{checkpoint}: has no model with {', '.join(names)}")
    for name in non_weight_files(tokenizer):
        if "token" in name:
            copy_file(tokenizer / name, target / name)
    statistics = read_json_object(source / STATISTICS_FILE, COMMAND)
    (target / STATISTICS_FILE).write_text(json.dumps(statistics, indent=1))
    (target / "config.json").write_text(json.dumps(_native_config(statistics), indent=1))
    normalization = [TOWER_NORMALIZATION[tower] for tower in TOWERS]
    preprocessor = {
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, 224, 224]] * len(TOWERS),
        "tvf_normalize_params": normalization,
    }
    (target / PREPROCESSOR_FILE).write_text(json.dumps(preprocessor, indent=1))
    tensors = (
        (_published_name(name, checkpoint), tensor.to(torch.bfloat16))
        for part in names
        for name, tensor in parts[part].items()
    )
    _write_shards(target, tensors)


def _native_config(statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of a folder that is published as openvla-7b."""
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "image_resize_strategy": "resize-naive",
        "image_sizes": [224, 224],
        "model_type": MODEL_TYPE,
        "n_action_bins": 256,
        "norm_stats": dict(statistics),
        "pad_to_multiple_of": 64,
        "pad_token_id": 32000,
        "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064},
        "timm_model_ids": list(KNOWN_TOWERS),
        "torch_dtype": "bfloat16",
        "use_fused_vision_backbone": True,
    }


def _published_name(name: str, checkpoint: Path) -> str:
    for pattern, replacement in NATIVE_NAMES:
        published, count = re.subn(pattern, replacement, name)
        if count:
            return published
    raise DataError(f"{checkpoint}: {name}: a tensor that OpenVLA does not have")


def _convert_finetuned(source: Path, target: Path) -> None:
    """Write the files of a fine-tuned folder with its pickled parts as safetensors."""
    files = _component_files(source)
    copy_non_weight_files(source, target)
    settings: dict[str, Any] = {"decoding": "parallel", "use_film": "vision_backbone" in files}
    parts: dict[str, Tensor] = {}
    if "action_head" in files:
        parts |= _load_component(files["action_head"], "action_head.")
        if "action_head.model.fc1.weight" not in parts:
            raise DataError(
                f"{files['action_head']}: no regression head (of the L1 loss); a diffusion head is "
                "not supported"
            )
        settings["action_head"] = L1
    settings["proprio_dim"] = 0
    if "proprio_projector" in files:
        parts |= _load_component(files["proprio_projector"], "proprio_projector.")
        settings["proprio_dim"] = parts["proprio_projector.fc1.weight"].shape[1]
    if "vision_backbone" in files:
        backbone = _merge_lora(_load_component(files["vision_backbone"], ""))
        parts |= {name.replace(".block.", ".", 1): tensor for name, tensor in backbone.items()}
    values = {**read_config_json(source), **settings}
    (target / "config.json").write_text(json.dumps(values, indent=1))
    _write_shards(target, _replaced(source, parts))


def _replaced(source: Path, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder, then those of its parts, which replace equal names."""
    for path in tensor_files(source):
        stored = SafetensorsReader(path).tensors()
        yield from ((name, tensor) for name, tensor in stored if name not in parts)
    yield from parts.items()


def _load_component(path: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a pickled part, with a prefix instead of that of PyTorch's DDP."""
    tensors = _load_pickle(path)
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise DataError(f"{path}: has other values than tensors")
    return {prefix + name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def _load_pickle(path: Path) -> dict[str, Any]:
    """Read a file of ``torch.save`` that has only tensors.

    Raises:
        DataError: It has other objects, or cannot be read.
    """
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{path}: is damaged, or has other objects than weights ({reason})"
        ) from None
    if not isinstance(values, dict):
        raise DataError(f"{path}: has no dictionary of tensors")
    return values


def _merge_lora(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with PEFT's names under their own names, with adapters merged."""
    merged = {n.replace(".base_layer.", "."): t for n, t in tensors.items() if ".lora_" not in n}
    for name, down in tensors.items():
        if name.endswith(LORA_A):
            layer = name.removesuffix(LORA_A)
            weight, up = merged[f"{layer}.weight"], tensors[layer + LORA_B]
            scale = min(len(down), LORA_ALPHA_LIMIT) / len(down)
            total = weight.float() + scale * (up.float() @ down.float())
            merged[f"{layer}.weight"] = total.to(weight.dtype)
    return merged


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors to weight files of limited size, and their index."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor.clone(memory_format=torch.contiguous_format)
    flush()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}, indent=1))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
    except RlinfError as error:
        sys.exit(str(error))
