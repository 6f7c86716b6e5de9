"""Whether the tensors of a checkpoint are those of the network that its configuration describes.

Libraries give a network random numbers where a checkpoint has nothing for it: training would go on
from there without a word.
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
"""Names in a message; of the others it says how many there are."""
IMAGE_FAMILIES = {"qwen2_5_vl"}
"""Families that read images as well, and have a policy of their own."""
TensorShapes = Mapping[str, Sequence[int]]
LEGACY_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|masked_bias|(attn|attention)\.bias|position_ids)$"
)
"""Constants that older versions of the library saved, and that networks now make themselves."""


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the weight files of a folder; reads headers only.

    Raises:
        DataError: a file is truncated, empty, or something else.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in tensor_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    found[name] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{path} cannot be read as safetensors ({error}); fetch the checkpoint again"
            ) from None
    return found


def network_shapes(module: nn.Module) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Name and shape of every tensor of a network, and the names of those tied to an earlier one.

    The network may be on the meta device, where it takes no memory.
    """
    shapes, tied, seen = dict[str, tuple[int, ...]](), set[str](), dict[int, str]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        shapes[name] = tuple(tensor.shape)
        first = seen.setdefault(id(tensor), name)
        if first != name:
            tied |= {first, name}
    return shapes, tied


def check_tensors(where: str, stored: TensorShapes, module: nn.Module) -> None:
    """See that stored tensors are a network's by name and shape; of tied ones, one is enough.

    Raises:
        DataError: see :func:`raise_tensor_mismatch`.
    """
    own, tied = network_shapes(module)
    missing = own.keys() - stored.keys()
    if tied & stored.keys():
        missing -= tied
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in stored.keys() - own.keys()
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    unlike = [
        (name, stored[name], own[name])
        for name in own.keys() & stored.keys()
        if tuple(stored[name]) != tuple(own[name])
    ]
    raise_tensor_mismatch(where, missing, unexpected, unlike)


def raise_tensor_mismatch(
    where: str,
    missing: Iterable[str],
    unexpected: Iterable[str],
    unlike: Iterable[tuple[str, Sequence[int], Sequence[int]]],
) -> None:
    """Refuse a checkpoint that lacks tensors, or has others, or others' shapes.

    Args:
        where: the key and folder that the message begins with.
        unlike: name, stored shape and shape in the network.

    Raises:
        DataError: any of the three is not empty; names some and counts all.
    """
    shapes = [f"{n} {list(stored)}, not {list(own)}" for n, stored, own in sorted(unlike)]
    kinds = {
        "missing": sorted(missing),
        "not of this network": sorted(
            name for name in unexpected if not LEGACY_BUFFERS.search(name)
        ),
        "of another shape": shapes,
    }
    parts = [f"{what}: {_listed(names)}" for what, names in kinds.items() if names]
    if parts:
        raise DataError(
            f"{where}: the weights are not those that config.json describes\n"
            + "\n".join(parts)
            + "\nfetch the checkpoint again, whole, or mend its config.json"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED_NAMES
    return ", ".join(names[:MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


def has_own_checkpoint_names(module: Any) -> bool:
    """Whether checkpoints of a network name tensors otherwise than it does; only loading tells."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    names = set[str]()
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            # One that is sharded has a class of its own, derived from that.
            names |= {part.config.model_type, *(one.__name__ for one in type(part).__mro__)}
    known = any(get_checkpoint_conversion_mapping(name) for name in names)  # type: ignore[no-untyped-call]
    return known or bool(getattr(module, "_checkpoint_conversion_mapping", None))


def network_class(settings: Any) -> Any:
    """The library's class of a configuration's network: a causal language model, or one that sees.

    Of a checkpoint that reads images too, whose language model is a class of its own in the library
    (Qwen3.5), it is the class of the whole: what is saved has all that was read.

    Raises:
        KeyError: it has none.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if settings.model_type in IMAGE_FAMILIES:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(settings)]
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    if isinstance(settings, cls.config_class) or not settings.sub_configs:
        return cls
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(settings)]


def to_checkpoint_tensors(module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A network's tensors by the names and shapes that its checkpoints have: one for each expert,
    say, where the network has all in one. What others load is that."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(module, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def add_base_prefix(stored: Mapping[str, V], module: nn.Module) -> dict[str, V]:
    """What is stored by the names in a network, where it is that of the part below the head."""
    prefix, own = f"{getattr(module, 'base_model_prefix', '')}.", module.state_dict().keys()
    if prefix == "." or any(name.startswith(prefix) for name in stored):
        return dict(stored)
    return {prefix + n if prefix + n in own else n: value for n, value in stored.items()}


def check_checkpoint_tensors(folder: Path) -> None:
    """See that a checkpoint has all tensors of its network and no others, without loading it.

    Where the names in the files are not the network's own (model code of the checkpoint, tensors
    that are fused on loading), loading tells.

    Raises:
        DataError: lists what is missing, unexpected or of another shape.
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
    if not has_own_checkpoint_names(module):
        check_tensors(f"model.path: {folder}", add_base_prefix(stored, module), module)
