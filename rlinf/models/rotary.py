"""Rotary scalings with length-dependent frequencies: LongRoPE and dynamic NTK.

``transformers`` chooses these frequencies in each call, by the longest row. The results of a row
would then depend on the other rows, and an update on the micro-batches. Therefore this module
chooses the frequencies once, by ``model.max_model_len``, as vLLM does.

Sources: LongRoPE, arXiv 2402.13753; dynamic NTK as in ``transformers.modeling_rope_utils``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.errors import DataError

ROPE_TYPES = {"longrope": "longrope", "su": "longrope", "dynamic": "dynamic"}
"""Rope types in ``config.json`` that depend on the length, and their names in ``transformers``."""

MAX_LENGTH_KEYS = ("max_position_embeddings", "model_max_length", "max_seq_len")
"""Keys in ``config.json`` of the longest sequence; the first one that is set counts."""
HUNYUAN_FIXED_KEY = "alpha"
"""Key in the dynamic scaling of HunYuan models that scales the frequency base for all lengths
(``ntk_alpha`` in ``transformers``)."""


@dataclass(frozen=True)
class LengthScaling:
    """A rotary scaling whose frequencies depend on the sequence length in tokens."""

    rope_type: str
    """``longrope`` or ``dynamic``."""
    original_length: int
    """Longest sequence without scaling."""
    max_length: int
    """Longest sequence that the scaling supports."""


def length_scaling(settings: Mapping[str, Any]) -> LengthScaling | None:
    """Return the length-dependent scaling of a ``config.json``, or None."""
    is_hunyuan = str(settings.get("model_type")).startswith("hunyuan")
    inner = settings.get("text_config")
    settings = inner if isinstance(inner, dict) else settings
    lengths = (settings.get(name) for name in MAX_LENGTH_KEYS)
    max_length = next((length for length in lengths if isinstance(length, int)), None)
    for rope in _ropes(settings):
        rope_type = ROPE_TYPES.get(str(rope.get("rope_type", rope.get("type"))))
        if rope_type is None or max_length is None:
            continue
        if rope_type == "dynamic" and is_hunyuan and rope.get(HUNYUAN_FIXED_KEY):
            continue
        key = "original_max_position_embeddings"
        original_length = settings.get(key) or rope.get(key)
        if rope_type == "longrope":
            return LengthScaling(rope_type, int(original_length or max_length), max_length)
        # Up to max_position_embeddings, transformers does not scale.
        factor = max(1.0, float(rope.get("factor") or 1.0))
        return LengthScaling(rope_type, max_length, int(max_length * factor))
    return None


def _ropes(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rotary settings of a ``config.json``: one, or one per layer type."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def freeze_rotary(module: Any, settings: dict[str, Any], limit: int | None, source: str) -> None:
    """Freeze length-dependent frequencies at their values for the longest sequence of the run.

    Networks without such frequencies do not change.

    Args:
        module: A network of ``transformers``; changed in place.
        settings: Its ``config.json``.
        limit: The longest sequence in tokens; None: the longest without scaling, as in
            :meth:`rlinf.models.hf_folder.HFFolder.max_model_len`.
        source: The key and the folder, for error messages.

    Raises:
        DataError: The network has no rotary embedding of ``transformers`` that can be fixed, or its
            own code depends on the longest row.
    """
    scaling = length_scaling(settings)
    if scaling is None:
        return
    length = limit or scaling.original_length
    has_scaling = False
    for part in module.modules():
        value = getattr(part, "rope_type", None)
        rope_types = value if isinstance(value, dict) else {None: value}  # by layer type
        for layer_type in [k for k, value in rope_types.items() if _depends_on_length(value)]:
            has_scaling = True
            _freeze(part, length, layer_type)
            if not _is_frozen(part, scaling, length, layer_type):
                raise DataError(
                    f"{source}: {type(part).__name__} of transformers chooses its "
                    f"{scaling.rope_type} scaling by the longest row of each call, so beyond "
                    f"{scaling.original_length} tokens samples would depend on their neighbours; "
                    "set model.max_model_len (reward.max_length of a reward model) to "
                    f"{scaling.original_length} at most"
                )
    if not has_scaling:
        raise DataError(
            f"{source}: no rotary embedding of its network has the {scaling.rope_type} scaling of "
            "config.json, so its frequencies cannot be fixed for the run, and samples might depend "
            "on their neighbours; use a checkpoint of a family whose scaling transformers "
            "computes, such as Llama or Phi-3"
        )


def _depends_on_length(rope_type: Any) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _freeze(part: Any, length: int, layer_type: str | None) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    rope_type = part.rope_type if layer_type is None else part.rope_type[layer_type]
    buffer = getattr(part, f"{prefix}inv_freq")
    if buffer.is_meta:  # the network is only inspected
        return
    options = {} if layer_type is None else {"layer_type": layer_type}
    compute = ROPE_INIT_FUNCTIONS[rope_type]
    frequencies, attention_scaling = compute(part.config, None, seq_len=length, **options)
    buffer.copy_(frequencies)
    setattr(part, f"{prefix}attention_scaling", attention_scaling)
    # For the type "default", transformers does not update the frequencies in each call.
    if layer_type is None:
        part.rope_type = "default"
    else:
        part.rope_type = {**part.rope_type, layer_type: "default"}


def _is_frozen(part: Any, scaling: LengthScaling, length: int, layer_type: str | None) -> bool:
    """Return whether the embedding of a position is independent of a later position in the call."""
    import torch

    if getattr(part, f"{'' if layer_type is None else f'{layer_type}_'}inv_freq").is_meta:
        return True
    settings = part.config.rope_parameters
    settings = settings if layer_type is None else settings[layer_type]
    position, last_position = min(scaling.original_length, length) - 1, length - 1
    embeddings = []
    for other in (position, last_position):
        positions = torch.tensor([[position, other]])
        if "mrope_section" in settings:  # time, height and width
            positions = positions.expand(3, -1, -1)
        options = {} if layer_type is None else {"layer_type": layer_type}
        result = part(torch.zeros(1), positions, **options)
        tensors = result if isinstance(result, tuple) else (result,)
        embeddings.append([tensor[..., 0, :] for tensor in tensors])
    return all(map(torch.equal, *embeddings))
