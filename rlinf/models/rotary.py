"""Rotary scalings whose frequencies depend on a length: LongRoPE and dynamic NTK.

The model library chooses such frequencies in every call, by the longest row of that call. A row
would then depend on the rows beside it, and an update on how it is cut. Here they are chosen once,
by the length that the run declares (``model.max_model_len``), as vLLM chooses them by its
``max_model_len``.

Sources: LongRoPE, arXiv 2402.13753; dynamic NTK as in ``transformers.modeling_rope_utils``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.errors import DataError

ROPE_TYPES = {"longrope": "longrope", "su": "longrope", "dynamic": "dynamic"}
"""Names in ``config.json``, and what the library calls the kind."""

LENGTH_KEYS = ("max_position_embeddings", "model_max_length", "max_seq_len")
"""Names in ``config.json`` of the length that a model was made for, in tokens."""
HUNYUAN_FIXED_KEY = "alpha"
"""In the dynamic scaling of a HunYuan model: stretches the base of the frequencies once for all
lengths (``ntk_alpha`` in ``transformers``)."""


@dataclass(frozen=True)
class LengthScaling:
    """A rotary scaling whose frequencies depend on the length of a sequence, in tokens."""

    rope_type: str
    """``longrope`` or ``dynamic``."""
    original_length: int
    """Longest sequence that keeps the frequencies of the first training."""
    max_length: int
    """Longest sequence that the scaling was made for."""


def length_scaling(settings: Mapping[str, Any]) -> LengthScaling | None:
    """Return the scaling of a ``config.json`` that depends on the length, or None."""
    hunyuan = str(settings.get("model_type")).startswith("hunyuan")
    inner = settings.get("text_config")
    settings = inner if isinstance(inner, dict) else settings
    lengths = (settings.get(name) for name in LENGTH_KEYS)
    most = next((length for length in lengths if isinstance(length, int)), None)
    for rope in _ropes(settings):
        kind = ROPE_TYPES.get(str(rope.get("rope_type", rope.get("type"))))
        if kind is None or most is None:
            continue
        if kind == "dynamic" and hunyuan and rope.get(HUNYUAN_FIXED_KEY):
            continue
        named = settings.get("original_max_position_embeddings")
        before = named or rope.get("original_max_position_embeddings")
        if kind == "longrope":
            return LengthScaling(kind, int(before or most), most)
        # The library keeps the plain frequencies up to max_position_embeddings.
        factor = max(1.0, float(rope.get("factor") or 1.0))
        return LengthScaling(kind, most, int(most * factor))
    return None


def _ropes(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rotary settings of a ``config.json``: one, or one for each kind of layer."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    return nested or [rope]


def freeze_rotary(module: Any, settings: dict[str, Any], limit: int | None, where: str) -> None:
    """Fix frequencies that depend on a length as those of the longest sequence of the run.

    Does nothing to networks of another kind.

    Args:
        module: a network of ``transformers``; changed in place.
        settings: its ``config.json``.
        limit: the longest sequence, in tokens; None: the longest with plain
            frequencies, as in :meth:`rlinf.models.hf_folder.HFFolder.max_model_len`.
        where: what an error calls its folder.

    Raises:
        DataError: the network has no rotary embedding of the library that could be fixed, or one
            whose own code chooses by the longest row all the same.
    """
    scaling = length_scaling(settings)
    if scaling is None:
        return
    length = limit or scaling.original_length
    found = False
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        layers = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type in [name for name, kind in layers.items() if _varies(kind)]:
            found = True
            _fix(part, length, layer_type)
            if not _is_fixed(part, scaling, length, layer_type):
                raise DataError(
                    f"{where}: {type(part).__name__} of the model library chooses its "
                    f"{scaling.rope_type} scaling by the longest row of each call, so beyond "
                    f"{scaling.original_length} tokens samples would depend on their neighbours; "
                    "set model.max_model_len (reward.max_length of a reward model) to "
                    f"{scaling.original_length} at most"
                )
    if not found:
        raise DataError(
            f"{where}: no rotary embedding of its network has the {scaling.rope_type} scaling of "
            "config.json, so its frequencies cannot be fixed for the run, and samples might depend "
            "on their neighbours; use a checkpoint of a family whose scaling the model library "
            "computes, such as Llama or Phi-3"
        )


def _varies(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _fix(part: Any, length: int, layer_type: str | None) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    kind = part.rope_type if layer_type is None else part.rope_type[layer_type]
    buffer = getattr(part, f"{prefix}inv_freq")
    if buffer.is_meta:  # a network that is only looked at
        return
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](part.config, None, seq_len=length, **options)
    buffer.copy_(frequencies)
    setattr(part, f"{prefix}attention_scaling", scaling)
    # The library changes the frequencies of these kinds in each call, and of no other kind.
    if layer_type is None:
        part.rope_type = "default"
    else:
        part.rope_type = {**part.rope_type, layer_type: "default"}


def _is_fixed(part: Any, scaling: LengthScaling, length: int, layer_type: str | None) -> bool:
    """Whether a rotary embedding turns a position alike beside a near one and the last one."""
    import torch

    if getattr(part, f"{'' if layer_type is None else f'{layer_type}_'}inv_freq").is_meta:
        return True
    settings = part.config.rope_parameters
    settings = settings if layer_type is None else settings[layer_type]
    position, last = min(scaling.original_length, length) - 1, length - 1
    turned = []
    for neighbour in (position, last):
        positions = torch.tensor([[position, neighbour]])
        if "mrope_section" in settings:  # time, height and width
            positions = positions.expand(3, -1, -1)
        options = {} if layer_type is None else {"layer_type": layer_type}
        found = part(torch.zeros(1), positions, **options)
        parts = found if isinstance(found, tuple) else (found,)
        turned.append([one[..., 0, :] for one in parts])
    return all(map(torch.equal, *turned))
