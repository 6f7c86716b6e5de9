"""Rows of tokens side by side in one, without padding; none sees another.

Products of the network see tokens alone, and a prompt that several rows answer once: its answers
stand behind it as branches, each at the positions that it would have alone. Attention is the one
place where rows are apart (:func:`attend`): rows of about one length are brought together for it.

On GPUs with flash attention rows stand whole, prompts repeated: it takes their lengths from
positions that start again at 0, and needs no padding.
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
"""Families whose tokens meet elsewhere too, or whose attention does not heed positions."""
OWN_ATTENTION_FAMILIES = {"codegen", "gptj", "nemotron", "stablelm"}
"""Families that compute attention by themselves."""
PACKABLE_FAMILIES = PLAIN_HEAD_FAMILIES - UNPACKABLE_FAMILIES - OWN_ATTENTION_FAMILIES | {
    "cohere",
    "cohere2",
    "gemma2",
    "gemma3_text",
    "granite",
}
"""Families whose attention is all that joins tokens, heeds positions, and can be ours."""
PACKED_ATTENTION = "rlinf_packed"
"""Of :func:`attend`, among the attention functions of ``transformers``."""
MIN_LENGTH_RATIO = 0.6
"""Least length of a row over that of the longest it is brought together with."""


def enable_packed_attention(module: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Prepare a network for packed rows.

    Args:
        dtype: that it computes in.

    Returns:
        Whether prompts are shared.

    Raises:
        ConfigError: it is not known to keep rows apart.
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
    """See that a family keeps packed rows apart: recurrent layers, for one, do not.

    Raises:
        ConfigError: it is not known to.
    """
    if family not in PACKABLE_FAMILIES:
        raise ConfigError(
            f"trainer.packing: models of type {family!r} are not known to keep packed rows apart; "
            "set it to false"
        )


@dataclass(frozen=True)
class PackedRows:
    """How packed tokens are brought together for attention: rows of about one length in a block.

    Of a block the queries are ``[n, r]``, padded on the right (by any token); the keys are
    ``[n, k]``, the prompt before each row, padded on the left, and then the row itself.
    """

    queries: Tensor
    """Where each query of all blocks, laid out flat, is in the packed tokens."""
    keys: Tensor
    """The same of the keys."""
    key_padding: Tensor
    """How much of each row's keys is padding on the left, one block after the other."""
    order: Tensor
    """``[L]``: where each packed token is among the queries."""
    shapes: list[tuple[int, int, int, int]]
    """``(n, r, k)`` of each block, and 1 where keys are padded on the left."""
    masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)
    """Of blocks, by number and window, as they were made for an earlier layer."""

    @classmethod
    def from_batch(cls, batch: Mapping[str, Tensor]) -> PackedRows | None:
        """That of a batch which :func:`pack` made; None: rows stand whole."""
        if "shapes" not in batch:
            return None
        shapes = [(n, r, k, left) for n, r, k, left in batch["shapes"].tolist()]
        return cls(batch["queries"], batch["keys"], batch["begins"], batch["order"], shapes)

    def mask(self, number: int, window: int | None) -> Tensor | None:
        """``[n, 1, r, k]``, or of one for all rows, true where a query of a block sees a key; None:
        all up to itself."""
        key = (number, window)
        if key not in self.masks:
            self.masks[key] = self._mask(number, window)
        return self.masks[key]

    def _mask(self, number: int, window: int | None) -> Tensor | None:
        _, width, wide, left = self.shapes[number]
        if window is not None and window >= wide:
            window = None
        if width == wide and window is None:
            return None
        keys = torch.arange(wide, device=self.keys.device)
        last = torch.arange(wide - width, wide, device=keys.device)[:, None]
        seen = keys <= last
        if window is not None:
            seen = seen & (keys > last - window)
        # Padding on the right stands behind all tokens of its row: none sees it.
        if not left:
            return seen[None, None]
        begins = torch.split(self.key_padding, [n for n, *_ in self.shapes])[number]
        return (seen & (keys >= begins[:, None, None]))[:, None]


def pack(
    prompts: Sequence[np.ndarray],
    actions: Sequence[np.ndarray],
    length: int,
    *,
    share: bool,
    keys: Sequence[bytes] | None = None,
    positions: Sequence[np.ndarray] | None = None,
) -> Batch:
    """Model inputs of rows: a prompt and the tokens that answer it, ``length`` of them at most.

    Args:
        share: whether a prompt that several rows have stands there once.
        keys: of each row what its prompt is told by; by default the tokens.
        where: of each row the positions of its tokens, ``[..., P + T - 1]``; by default they are
            counted from 0.

    Returns:
        ``tokens`` and ``positions`` ``[1, L]`` (``[..., 1, L]``), of each answer all but its last
        token; ``kept``
        and ``places`` ``[n]``: for each token of an answer where in ``L`` it is predicted, and
        where it stands in ``[B, length]`` laid out flat. With ``share`` also what :class:`Rows`
        holds.
    """
    tokens, parts, spans = list[np.ndarray](), list[np.ndarray](), list[tuple[int, int, int]]()
    size = 0

    def place(number: int, row: np.ndarray, before: int, prompt: int) -> int:
        """Put tokens of a row behind ``before`` others of it, which stand at ``prompt``; returns
        where."""
        nonlocal size
        begin, size = size, size + len(row)
        if len(row):
            tokens.append(row)
            stop = before + len(row)
            own = (
                np.arange(before, stop)
                if positions is None
                else positions[number][..., before:stop]
            )
            parts.append(own)
            spans.append((begin, len(row), prompt if before else -1))
        return begin

    told = list[object](keys or [prompt.tobytes() for prompt in prompts])
    told = told if share else list(range(len(prompts)))
    counts = Counter[object](told)
    first: dict[object, int] = {}
    kept = []
    for i, (key, prompt, answer) in enumerate(zip(told, prompts, actions, strict=True)):
        if counts[key] == 1:
            begin = place(i, np.concatenate((prompt, answer[:-1])), 0, -1)
            kept.append(begin + len(prompt) - 1 + np.arange(len(answer)))
            continue
        if key not in first:
            first[key] = place(i, prompt, 0, -1)
        begin = place(i, answer[:-1], len(prompt), first[key])
        own = begin - 1 + np.arange(len(answer))
        own[:1] = first[key] + len(prompt) - 1
        kept.append(own)
    arrays = {
        "tokens": np.concatenate(tokens)[None],
        "positions": np.concatenate(parts, axis=-1)[..., None, :],
        "kept": np.concatenate(kept),
        "places": np.concatenate([i * length + np.arange(len(a)) for i, a in enumerate(actions)]),
    }
    if share:
        ends = {begin: begin + size for begin, size, prompt in spans if prompt < 0}
        arrays |= _blocks(spans, ends, size)
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


def _blocks(
    spans: Sequence[tuple[int, int, int]], ends: Mapping[int, int], size: int
) -> dict[str, np.ndarray]:
    """What :class:`Rows` holds.

    Args:
        spans: begin, length, and begin of the prompt before them (or -1) of the rows.
        ends: by its begin, where a prompt ends.
        size: number of all tokens.
    """
    queries, keys, begins = list[np.ndarray](), list[np.ndarray](), list[int]()
    order, done, shapes = np.empty(size, np.int64), 0, list[tuple[int, int, int, int]]()
    # Rows with a prompt before them need a mask, others do not.
    for rows in (
        block
        for some in (False, True)
        for block in _alike([span for span in spans if (span[2] >= 0) is some])
    ):
        width = max(length for _, length, _ in rows)
        before = max(ends[prompt] - prompt if prompt >= 0 else 0 for _, _, prompt in rows)
        left = 0
        for begin, length, prompt in rows:
            own = np.zeros(before + width, np.int64)
            own[before : before + length] = places = np.arange(begin, begin + length)
            first = before - (ends[prompt] - prompt if prompt >= 0 else 0)
            own[first:before] = np.arange(prompt, prompt + before - first)
            order[places] = done + np.arange(length)
            done += width
            queries.append(own[before:])
            keys.append(own)
            begins.append(first)
            left |= first > 0
        shapes.append((len(rows), width, before + width, left))
    arrays = {"queries": np.concatenate(queries), "keys": np.concatenate(keys), "order": order}
    return {**arrays, "begins": np.array(begins), "shapes": np.array(shapes)}


def _alike(spans: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Rows by falling length, in blocks of about one."""
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
    """Attention of packed rows, as ``transformers`` calls it.

    Args:
        query: ``[1, H, L, D]``; keys and values may have fewer heads.
        sliding_window: how many tokens a token sees, itself included.
        softcap: scores are ``softcap * tanh(score / softcap)``.

    Returns:
        ``[1, L, H, D]`` and no weights.
    """
    every = [states[0].transpose(0, 1) for states in (query, key, value)]
    # Each in one go: the gradient of every such choice is as large as what it is chosen from.
    queries = torch.split(
        every[0].index_select(0, rows.queries), [n * r for n, r, *_ in rows.shapes]
    )
    keys, values = (
        torch.split(states.index_select(0, rows.keys), [n * k for n, _, k, _ in rows.shapes])
        for states in every[1:]
    )
    found = []
    for number, (n, *_) in enumerate(rows.shapes):
        # [n, H, r, D]
        own, seen, there = (
            parts[number].view(n, -1, *parts[number].shape[1:]).transpose(1, 2)
            for parts in (queries, keys, values)
        )
        mask = rows.mask(number, sliding_window)
        if softcap is None:
            out = F.scaled_dot_product_attention(
                own,
                seen,
                there,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=own.shape[1] != seen.shape[1],
            )
        else:
            out = softcapped_attention(own, seen, there, mask, scaling, softcap)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).index_select(0, rows.order)[None], None


def softcapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Attention by the formula, its scores ``softcap * tanh(score / softcap)`` (Gemma 2,
    arXiv 2408.00118, section 2).

    Args:
        query: ``[B, H, r, D]``.
        key: ``[B, K, k, D]``; H is a multiple of K.
        value: ``[B, K, k, D]``.
        mask: bool, broadcast to ``[B, H, r, k]``, true where visible; None: all up to itself.

    Returns:
        ``[B, H, r, D]``.
    """
    times = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(query.dtype) @ value


def unpack(values: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    """Values ``[n]`` at their places of a tensor like ``[B, T]``, zero elsewhere."""
    return values.new_zeros(mask.numel()).index_copy(0, places, values).view(mask.shape)
