"""Packed sequences: the rows of a batch in one sequence without padding, with separate attention.

A row is a prompt and its response. All operations except attention see only the packed tokens. A
prompt that several rows share is stored once, and its responses follow with the position ids of
their own rows. A *span* is a complete row, a shared prompt, or a response to a shared prompt.
:func:`packed_attention` gathers spans of similar length into blocks and computes the attention of
each span separately.

With flash attention on GPUs, prompts are repeated and rows are contiguous. Flash attention finds
the rows by positions that restart at 0 and needs no padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.errors import ConfigError
from rlinf.models.base import Batch
from rlinf.models.logprobs import PLAIN_HEAD_FAMILIES

UNPACKABLE_FAMILIES = {"bloom", "gpt_oss", "lfm2", "mpt", "opt", "qwen3_next"}
"""Families that mix tokens outside attention, or whose attention ignores positions."""
OWN_ATTENTION_FAMILIES = {"codegen", "gptj", "nemotron", "stablelm"}
"""Families with their own attention implementation."""
PACKABLE_FAMILIES = PLAIN_HEAD_FAMILIES - UNPACKABLE_FAMILIES - OWN_ATTENTION_FAMILIES | {
    "cohere",
    "cohere2",
    "gemma2",
    "gemma3_text",
    "granite",
}
"""Families that mix tokens only in attention, use positions, and support custom attention."""
PACKED_ATTENTION = "rlinf_packed"
"""The name of :func:`packed_attention` in the attention registry of ``transformers``."""
MIN_LENGTH_RATIO = 0.6
"""Smallest length of a span in a block, relative to the longest span of the block."""


def enable_packed_attention(module: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Prepare a network for packed rows.

    Args:
        module: The network.
        device: Its device.
        dtype: The type of its computation.

    Returns:
        Whether a prompt of several rows is stored once; false with flash attention.

    Raises:
        ConfigError: The family does not support packing.
    """
    from transformers import AttentionInterface
    from transformers.utils.import_utils import is_flash_attn_2_available

    check_packable(getattr(module.config, "model_type", ""))
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda" and half and is_flash_attn_2_available():
        module.set_attn_implementation("flash_attention_2")
        return False
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    module.set_attn_implementation(PACKED_ATTENTION)
    return True


def check_packable(family: str) -> None:
    """Check that packed rows of a family are independent. Recurrent layers would mix them.

    Raises:
        ConfigError: The family does not support packing.
    """
    if family not in PACKABLE_FAMILIES:
        raise ConfigError(
            f"trainer.packing: models of type {family!r} are not known to separate packed rows; "
            "set it to false"
        )


@dataclass(frozen=True)
class PackedRows:
    """The layout of packed tokens for attention, as blocks of spans of similar length.

    The queries ``[n, r]`` of a block are its ``n`` spans, right-padded with arbitrary tokens. Its
    keys ``[n, k]`` are the shared prompt of each span, left-padded, followed by the span itself.
    """

    queries: Tensor
    """Index in the packed tokens of each query; all blocks are flattened and concatenated."""
    keys: Tensor
    """Index in the packed tokens of each key, for all blocks as in ``queries``."""
    key_padding: Tensor
    """Number of left padding tokens in the keys of each span, for the spans of all blocks."""
    order: Tensor
    """Index in ``queries`` of each packed token, ``[L]``."""
    shapes: list[tuple[int, int, int, int]]
    """``(n, r, k)`` of each block, followed by 1 if its keys have left padding, else 0."""
    masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)
    """Cached masks by block index and window."""

    @classmethod
    def from_batch(cls, batch: Mapping[str, Tensor]) -> PackedRows | None:
        """Return the layout of a batch from :func:`pack`, or None if rows are contiguous."""
        if "shapes" not in batch:
            return None
        shapes = [(n, r, k, padded) for n, r, k, padded in batch["shapes"].tolist()]
        return cls(batch["queries"], batch["keys"], batch["key_padding"], batch["order"], shapes)

    def mask(self, block: int, window: int | None) -> Tensor | None:
        """Return the attention mask of a block, bool ``[n, 1, r, k]`` or ``[1, 1, r, k]``. It is
        true where a query sees a key. None: the plain causal mask."""
        key = (block, window)
        if key not in self.masks:
            self.masks[key] = self._create_mask(block, window)
        return self.masks[key]

    def _create_mask(self, block: int, window: int | None) -> Tensor | None:
        _, num_queries, num_keys, has_left_padding = self.shapes[block]
        if window is not None and window >= num_keys:
            window = None
        if num_queries == num_keys and window is None:
            return None
        keys = torch.arange(num_keys, device=self.keys.device)
        queries = torch.arange(num_keys - num_queries, num_keys, device=keys.device)[:, None]
        visible = keys <= queries
        if window is not None:
            visible = visible & (keys > queries - window)
        # Right padding follows all tokens of its span, so no token sees it.
        if not has_left_padding:
            return visible[None, None]
        padding = torch.split(self.key_padding, [n for n, *_ in self.shapes])[block]
        return (visible & (keys >= padding[:, None, None]))[:, None]


def pack(
    prompts: Sequence[np.ndarray],
    actions: Sequence[np.ndarray],
    length: int,
    *,
    share: bool,
    prompt_keys: Sequence[bytes] | None = None,
    positions: Sequence[np.ndarray] | None = None,
) -> Batch:
    """Pack rows, each a prompt and its response of at most ``length`` tokens.

    Args:
        prompts: Token ids of each prompt.
        actions: Token ids of each response.
        length: Number of columns ``T`` of the padded outputs.
        share: Whether a prompt of several rows is stored once.
        prompt_keys: A key per row; rows with equal keys share their prompt. Default: its token ids.
        positions: Position ids of each row's tokens, ``[..., P + T - 1]``; default: from 0.

    Returns:
        ``tokens`` ``[1, L]`` and ``positions`` ``[..., 1, L]``, without the last token of each
        response. For each response token, ``logit_indices`` ``[n]`` is the index in ``L`` at which
        it is predicted, and ``step_indices`` ``[n]`` its index in the flattened ``[B, length]``.
        With ``share``, also the fields of :class:`PackedRows`.
    """
    tokens, token_positions = list[np.ndarray](), list[np.ndarray]()
    spans = list[tuple[int, int, int]]()  # as in _blocks
    size = 0

    def append(row: int, part: np.ndarray, offset: int, prompt_start: int) -> int:
        """Append the part of a row after its first ``offset`` tokens, and return its index in
        ``L``. ``prompt_start`` is the index of these first tokens; -1: there are none."""
        nonlocal size
        begin, size = size, size + len(part)
        if len(part):
            tokens.append(part)
            stop = offset + len(part)
            token_positions.append(
                np.arange(offset, stop) if positions is None else positions[row][..., offset:stop]
            )
            spans.append((begin, len(part), prompt_start if offset else -1))
        return begin

    keys = list[object](prompt_keys or [prompt.tobytes() for prompt in prompts])
    keys = keys if share else list(range(len(prompts)))
    counts = Counter[object](keys)
    prompt_starts: dict[object, int] = {}
    logit_indices = []
    for i, (key, prompt, answer) in enumerate(zip(keys, prompts, actions, strict=True)):
        if counts[key] == 1:
            begin = append(i, np.concatenate((prompt, answer[:-1])), 0, -1)
            logit_indices.append(begin + len(prompt) - 1 + np.arange(len(answer)))
            continue
        if key not in prompt_starts:
            prompt_starts[key] = append(i, prompt, 0, -1)
        begin = append(i, answer[:-1], len(prompt), prompt_starts[key])
        predictors = begin - 1 + np.arange(len(answer))
        predictors[:1] = prompt_starts[key] + len(prompt) - 1
        logit_indices.append(predictors)
    step_indices = [i * length + np.arange(len(answer)) for i, answer in enumerate(actions)]
    arrays = {
        "tokens": np.concatenate(tokens)[None],
        "positions": np.concatenate(token_positions, axis=-1)[..., None, :],
        "logit_indices": np.concatenate(logit_indices),
        "step_indices": np.concatenate(step_indices),
    }
    if share:
        ends = {begin: begin + count for begin, count, prompt_start in spans if prompt_start < 0}
        arrays |= _blocks(spans, ends, size)
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


def _blocks(
    spans: Sequence[tuple[int, int, int]], ends: Mapping[int, int], size: int
) -> dict[str, np.ndarray]:
    """Return the fields of :class:`PackedRows`.

    Args:
        spans: Start and length of each span, and the start of its shared prompt (or -1).
        ends: The end of each shared prompt, by its start.
        size: Number of packed tokens.
    """
    queries, keys, key_padding = list[np.ndarray](), list[np.ndarray](), list[int]()
    order, num_queries, shapes = np.empty(size, np.int64), 0, list[tuple[int, int, int, int]]()
    # Only spans with a shared prompt need a mask.
    for block in (
        group
        for has_prompt in (False, True)
        for group in _group_by_length([s for s in spans if (s[2] >= 0) is has_prompt])
    ):
        width = max(length for _, length, _ in block)
        max_prompt = max(ends[prompt] - prompt if prompt >= 0 else 0 for _, _, prompt in block)
        has_left_padding = 0
        for begin, length, prompt in block:
            indices = np.zeros(max_prompt + width, np.int64)
            span = np.arange(begin, begin + length)
            indices[max_prompt : max_prompt + length] = span
            padding = max_prompt - (ends[prompt] - prompt if prompt >= 0 else 0)
            indices[padding:max_prompt] = np.arange(prompt, prompt + max_prompt - padding)
            order[span] = num_queries + np.arange(length)
            num_queries += width
            queries.append(indices[max_prompt:])
            keys.append(indices)
            key_padding.append(padding)
            has_left_padding |= padding > 0
        shapes.append((len(block), width, max_prompt + width, has_left_padding))
    arrays = {"queries": np.concatenate(queries), "keys": np.concatenate(keys), "order": order}
    return {**arrays, "key_padding": np.array(key_padding), "shapes": np.array(shapes)}


def _group_by_length(spans: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Group spans of similar length into blocks, longest first."""
    blocks: list[list[tuple[int, int, int]]] = []
    for span in sorted(spans, key=lambda span: (-span[1], span[0])):
        if blocks and span[1] >= MIN_LENGTH_RATIO * blocks[-1][0][1]:
            blocks[-1].append(span)
        else:
            blocks.append([span])
    return blocks


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    rows: PackedRows,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of packed rows, with the signature of ``transformers``.

    Args:
        query: ``[1, H, L, D]``; keys and values may have fewer heads.
        sliding_window: Number of tokens that a token sees, including itself.
        softcap: Scores are ``softcap * tanh(score / softcap)``.
        rows: The layout of the packed tokens.

    Returns:
        ``[1, L, H, D]`` and None for the attention weights.
    """
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    # One gather each, because the gradient of a gather is as large as its input.
    queries = torch.split(
        flat[0].index_select(0, rows.queries), [n * r for n, r, *_ in rows.shapes]
    )
    keys, values = (
        torch.split(states.index_select(0, rows.keys), [n * k for n, _, k, _ in rows.shapes])
        for states in flat[1:]
    )
    outputs = []
    for block, (n, *_) in enumerate(rows.shapes):
        # [n, H, r, D]
        q, k, v = (
            parts[block].view(n, -1, *parts[block].shape[1:]).transpose(1, 2)
            for parts in (queries, keys, values)
        )
        mask = rows.mask(block, sliding_window)
        if softcap is None:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            out = softcapped_attention(q, k, v, mask, scaling, softcap)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, rows.order)[None], None


def softcapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Compute attention with scores ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv 2408.00118,
    section 2).

    Args:
        query: ``[B, H, r, D]``.
        key: ``[B, K, k, D]``; H is a multiple of K.
        value: ``[B, K, k, D]``.
        mask: bool, broadcast to ``[B, H, r, k]``, true where visible; None: causal.

    Returns:
        ``[B, H, r, D]``.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(query.dtype) @ value


def unpack(values: Tensor, step_indices: Tensor, mask: Tensor) -> Tensor:
    """Scatter values ``[n]`` to a tensor with the shape ``[B, T]`` of ``mask``, zero elsewhere."""
    return values.new_zeros(mask.numel()).index_copy(0, step_indices, values).view(mask.shape)
