"""Rows of tokens side by side in one, without padding; none sees another.

The network is told by positions that start again at 0. ``transformers`` makes the mask of them: of
blocks, for attention by torch; with flash attention none, which takes the rows' lengths instead and
never computes what lies between rows.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.base import Batch
from rlinf.models.logprobs import HEAD_LAST

log = logging.getLogger("rlinf")
APART = {
    *(HEAD_LAST - {"bloom", "gpt_oss", "lfm2", "mpt", "opt", "qwen3_next"}),
    *("cohere", "cohere2", "gemma2", "gemma3_text", "granite"),
}
"""Families whose attention is all that joins tokens, and heeds positions."""


def use_packing(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Prepare a network for packed rows.

    Args:
        dtype: that it computes in.

    Raises:
        ConfigError: it is not known to keep rows apart.
    """
    from transformers.utils.import_utils import is_flash_attn_2_available

    family = getattr(module.config, "model_type", "")
    if family not in APART:
        raise ConfigError(
            f"trainer.packing: models of type {family!r} are not known to keep packed rows apart; "
            "set it to false"
        )
    if device.type != "cuda":
        return
    if dtype in (torch.bfloat16, torch.float16) and is_flash_attn_2_available():
        module.set_attn_implementation("flash_attention_2")
    else:
        log.warning(
            "packed rows are kept apart by a mask, whose size and work are those of the whole "
            "micro-batch squared; with the package flash-attn and trainer.param_dtype=bfloat16 "
            "they are not"
        )


def pack(prompts: Sequence[np.ndarray], actions: Sequence[np.ndarray], length: int) -> Batch:
    """Model inputs of rows: a prompt and the tokens that answer it, ``length`` of them at most.

    Returns:
        ``tokens`` and ``positions`` ``[1, L]``, of each row all but its last token; ``kept``,
        ``taken`` and ``places`` ``[n]``: for each token of an answer where in ``L`` it is
        predicted, which it is, and where it stands in ``[B, length]`` laid out flat.
    """
    rows = [np.concatenate(pair)[:-1] for pair in zip(prompts, actions, strict=True)]
    begins = [0, *itertools.accumulate(len(row) for row in rows)]
    steps = [np.arange(len(answer)) for answer in actions]
    arrays = {
        "tokens": np.concatenate(rows)[None],
        "positions": np.concatenate([np.arange(len(row)) for row in rows])[None],
        "kept": np.concatenate(
            [begins[i] + len(prompts[i]) - 1 + step for i, step in enumerate(steps)]
        ),
        "taken": np.concatenate(actions),
        "places": np.concatenate([i * length + step for i, step in enumerate(steps)]),
    }
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


def unpack(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """Values ``[n]`` at their places of a tensor like ``[B, T]``, zero elsewhere."""
    return values.new_zeros(like.numel()).index_copy(0, places, values).view(like.shape)
