"""Checks that a checkpoint has exactly the tensors of the network in its ``config.json``.

Without such a check, libraries initialize missing weights with random numbers, and training
continues silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rlinf.errors import DataError
from rlinf.models.hf_folder import one_line, tensor_files

V = TypeVar("V")
MAX_LISTED_NAMES = 3
"""Maximum number of tensor names in an error message; further names are only counted."""
IMAGE_FAMILIES = {"qwen2_5_vl"}
"""Families with image inputs, which have their own policy classes."""
TensorShapes = Mapping[str, Sequence[int]]
"""Shape of each tensor by name."""
LEGACY_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|masked_bias|(attn|attention)\.bias|position_ids)$"
)
"""Constants that older library versions saved and networks now compute themselves."""


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the weight files of a folder; only headers are read.

    Raises:
        DataError: A file is truncated, empty, or not in safetensors format.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in tensor_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{path} cannot be read as safetensors ({error}); fetch the checkpoint again"
            ) from None
    return shapes


def network_shapes(module: nn.Module) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the shape of each tensor of a network by name, and the names of tied tensors.

    The network may be on the meta device.
    """
    shapes, tied, first_names = dict[str, tuple[int, ...]](), set[str](), dict[int, str]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        shapes[name] = tuple(tensor.shape)
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            tied |= {first, name}
    return shapes, tied


def check_tensors(source: str, stored: TensorShapes, module: nn.Module) -> None:
    """Check that stored tensors fit a network by name and shape. Of tied tensors, one suffices.

    Raises:
        DataError: See :func:`raise_tensor_mismatch`.
    """
    expected, tied = network_shapes(module)
    missing = expected.keys() - stored.keys()
    if tied & stored.keys():
        missing -= tied
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in stored.keys() - expected.keys()
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    mismatched = [
        (name, stored[name], expected[name])
        for name in expected.keys() & stored.keys()
        if tuple(stored[name]) != tuple(expected[name])
    ]
    raise_tensor_mismatch(source, missing, unexpected, mismatched)


def raise_tensor_mismatch(
    source: str,
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]],
) -> None:
    """Raise an error if tensors of a checkpoint are missing, unexpected or of another shape.

    Args:
        source: The key and the folder, for the error message.
        missing: Names that the checkpoint lacks.
        unexpected: Names that the network does not have.
        mismatched: Name, stored shape and shape in the network.

    Raises:
        DataError: There are such tensors; the message lists some names and counts all.
    """
    shapes = [
        f"{name} {list(stored)}, not {list(expected)}"
        for name, stored, expected in sorted(mismatched)
    ]
    kinds = {
        "missing": sorted(missing),
        "not of this network": sorted(
            name for name in unexpected if not LEGACY_BUFFERS.search(name)
        ),
        "of another shape": shapes,
    }
    lines = [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]
    if lines:
        raise DataError(
            f"{source}: the weights are not those that config.json describes\n"
            + "\n".join(lines)
            + "\nfetch the complete checkpoint again, or correct its config.json"
        )


def _listed(names: Sequence[str]) -> str:
    omitted = len(names) - MAX_LISTED_NAMES
    listed = ", ".join(names[:MAX_LISTED_NAMES])
    return f"{listed} and {omitted} more" if omitted > 0 else listed


def checkpoint_names_differ(module: Any) -> bool:
    """Return whether checkpoints have other tensor names than the network in memory."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    names = set[str]()
    for submodule in module.modules():
        if isinstance(submodule, PreTrainedModel):
            # The class of a sharded module is a subclass of the original one.
            classes = type(submodule).__mro__
            names |= {submodule.config.model_type, *(cls.__name__ for cls in classes)}
    is_converted = any(get_checkpoint_conversion_mapping(name) for name in names)  # type: ignore[no-untyped-call]
    return is_converted or bool(getattr(module, "_checkpoint_conversion_mapping", None))


def network_class(settings: Any) -> Any:
    """Return the ``transformers`` class of a model: a causal or an image-text language model.

    If a checkpoint has image inputs and its language model has its own class (Qwen3.5), this is the
    class of the full model, so that saving preserves all weights.

    Args:
        settings: The ``transformers`` configuration of the model.

    Raises:
        KeyError: There is no such class.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if settings.model_type in IMAGE_FAMILIES:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(settings)]
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    if isinstance(settings, cls.config_class) or not settings.sub_configs:
        return cls
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(settings)]


def to_checkpoint_tensors(module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a network's tensors to the names and shapes of its checkpoints.

    For example, checkpoints have one tensor per expert; the network has one for all experts.
    """
    from transformers.core_model_loading import revert_weight_conversion

    converted = revert_weight_conversion(module, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in converted.items()}


def add_base_prefix(stored: Mapping[str, V], module: nn.Module) -> dict[str, V]:
    """Add the base model prefix (``model.``) to the tensor names of a checkpoint without a head."""
    prefix, names = f"{getattr(module, 'base_model_prefix', '')}.", module.state_dict().keys()
    if prefix == "." or any(name.startswith(prefix) for name in stored):
        return dict(stored)
    return {prefix + n if prefix + n in names else n: value for n, value in stored.items()}


def check_checkpoint_tensors(folder: Path) -> None:
    """Check that a checkpoint has exactly the tensors of its network, without loading it.

    If the files have other tensor names than the network (own model code, or tensors that are fused
    during loading), they are checked during loading instead.

    Raises:
        DataError: The message lists missing and unexpected tensors and other shapes.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if "auto_map" in json.loads((folder / "config.json").read_text()):
        return
    stored = stored_shapes(folder)
    try:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True)
        cls = network_class(settings)
        with torch.device("meta"):
            module = cls._from_config(settings)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        raise DataError(
            f"model.path: {folder}: cannot build the network ({one_line(error)})"
        ) from None
    if not checkpoint_names_differ(module):
        check_tensors(f"model.path: {folder}", add_base_prefix(stored, module), module)
