"""KV caches of the transformers engine: one padded buffer, or groups of rows of equal length.

Left padding is correct only if attention is the only operation that mixes tokens. Recurrent layers
(Mamba, linear attention, short convolutions), position biases (ALiBi) and chunked attention would
read the padding. For such families, rows of equal length form a group without padding, so a sample
depends only on its own tokens. Groups use the cache classes of ``transformers``; families without
such a cache compute all tokens again for each new token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.models.checkpoint_tensors import IMAGE_FAMILIES
from rlinf.models.packed_attention import PACKABLE_FAMILIES


class KeyValueCache:
    """A KV cache with one buffer ``[B, heads, capacity, head_dim]`` per layer, allocated once.

    All rows end at the same column. The columns of keys are contiguous in memory, which makes the
    scores of a single query up to twice as fast. The class implements the methods that attention
    layers of ``transformers`` call on a cache.
    """

    is_compileable = False  # read by transformers

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._layers: list[tuple[Tensor, Tensor]] = []
        self.length = 0
        """Number of stored columns."""

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, heads, n, head_dim]`` to a layer and return all its keys and values."""
        if layer == len(self._layers):
            shape = (*keys.shape[:2], self._capacity, keys.shape[3])
            self._layers.append((_new_buffer(keys.new_empty, shape), values.new_empty(shape)))
        stored_keys, stored_values = self._layers[layer]
        stop = self.length + keys.shape[2]
        stored_keys[:, :, self.length : stop] = keys
        stored_values[:, :, self.length : stop] = values
        return stored_keys[:, :, :stop], stored_values[:, :, :stop]

    def advance(self, count: int) -> None:
        """Increase the number of stored columns, after all layers were updated."""
        self.length += count

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the rows with these indices."""
        for layer, (keys, values) in enumerate(self._layers):
            shape = (len(rows), *keys.shape[1:])
            selected = _new_buffer(keys.new_empty, shape), values.new_empty(shape)
            for out, stored in zip(selected, (keys, values), strict=True):
                out[:, :, : self.length] = stored[rows, :, : self.length]
            self._layers[layer] = selected

    def join(self, other: KeyValueCache, skip: int, free_columns: int) -> None:
        """Append the rows of another cache; the shorter rows are padded with zeros on the left.

        Args:
            skip: Number of leading columns of this cache to drop.
            free_columns: Number of free columns of the joined cache.
        """
        length = max(self.length - skip, other.length)

        def fill(out: Tensor, old: Tensor, new: Tensor) -> Tensor:
            out[: len(old), :, length - self.length + skip : length] = old[:, :, skip : self.length]
            out[len(old) :, :, length - other.length : length] = new[:, :, : other.length]
            return out

        for layer, ((keys, values), (other_keys, other_values)) in enumerate(
            zip(self._layers, other._layers, strict=True)
        ):
            shape = (
                len(keys) + len(other_keys),
                keys.shape[1],
                length + free_columns,
                keys.shape[3],
            )
            # Zeros, because masked columns must be finite, too.
            self._layers[layer] = (
                fill(_new_buffer(keys.new_zeros, shape), keys, other_keys),
                fill(values.new_zeros(shape), values, other_values),
            )
        self.length, self._capacity = length, length + free_columns

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of stored columns."""
        return self.length

    def __len__(self) -> int:
        return len(self._layers)


def _new_buffer(create: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Create a tensor ``[B, heads, n, D]`` in which dimension n is contiguous."""
    rows, heads, columns, head_dim = shape
    return create((rows, heads, head_dim, columns)).transpose(2, 3)


FAMILIES_WITHOUT_CACHE = {
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("minimax", "recurrent_gemma", "xlstm"),
}
"""Families that derive positions from non-padding tokens, and families that do not use the common
cache classes of ``transformers``."""
CACHED_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Layer types that :class:`KeyValueCache` supports."""


def supports_padding(settings: Any) -> bool:
    """Return whether rows of different lengths can be decoded together with left padding."""
    text = settings.get_text_config()
    return (
        settings.model_type in PACKABLE_FAMILIES | IMAGE_FAMILIES
        and set(getattr(text, "layer_types", None) or ()) <= CACHED_LAYER_TYPES
    )


@dataclass
class EqualLengthRows:
    """A group of rows of equal length; they may have different prompts."""

    rows: Tensor
    """Row indices in the batch, ``[n]``."""
    tokens: Tensor
    """All tokens, ``[n, L]``."""
    cache: Any
    """The cache of ``transformers``; None if the family has no supported cache."""

    def select(self, indices: Tensor, rows: Tensor) -> None:
        """Keep (or repeat) rows ``[m]`` of the group, with new row indices in the batch."""
        self.rows, self.tokens = rows, self.tokens[indices]
        if self.cache is not None:
            self.cache.reorder_cache(indices)


class EqualLengthCache:
    """The cache of ``size`` rows, in groups of equal length; ``length`` is the longest row's."""

    def __init__(self, groups: list[EqualLengthRows], size: int, length: int) -> None:
        self._size, self.length = size, length
        self.groups = groups

    def select(self, rows: Tensor) -> None:
        """Keep the rows with these indices ``[n]``, each at most once."""
        new_index = torch.full((self._size,), -1, device=rows.device)
        new_index[rows] = torch.arange(len(rows), device=rows.device)
        for group in self.groups:
            new_rows = new_index[group.rows]
            kept = (new_rows >= 0).nonzero()[:, 0]
            if len(kept) < len(new_rows):
                group.select(kept, new_rows[kept])
            else:
                group.rows = new_rows
        self.groups = [group for group in self.groups if len(group.rows)]
        self._size = len(rows)

    def join(self, other: EqualLengthCache, skip: int, free_columns: int) -> None:
        """Append the rows of another cache; ``skip`` leading columns of this cache are unused."""
        for group in other.groups:
            group.rows = group.rows + self._size
        self.groups += other.groups
        self._size += other._size
        self.length = max(self.length - skip, other.length)

    def advance(self, count: int) -> None:
        """Increase the length by ``count`` tokens."""
        self.length += count


class EqualLengthNetwork:
    """A network that computes groups of rows of equal length, without padding."""

    def __init__(self, module: Any) -> None:
        self._module = module
        names = inspect.signature(module.forward).parameters
        cache_names = [name for name in ("past_key_values", "cache_params") if name in names]
        family = module.config.model_type
        has_cache = bool(cache_names) and family not in FAMILIES_WITHOUT_CACHE
        self._cache_name = cache_names[0] if has_cache else None
        """Name of the argument for the cache; None: tokens are computed again."""
        self._has_logits_to_keep = "logits_to_keep" in names
        self._has_position_ids = "position_ids" in names

    def prefill(
        self, contexts: Sequence[np.ndarray], device: torch.device
    ) -> tuple[Tensor, EqualLengthCache]:
        """Compute each distinct context once.

        Args:
            contexts: Token ids of each row.

        Returns:
            Logits ``[B, V]`` float32 of the next tokens, and the cache.
        """
        # By length and by content of the context: the rows that have this context.
        by_length: dict[int, dict[bytes, list[int]]] = {}
        for i, context in enumerate(contexts):
            distinct = by_length.setdefault(len(context), {})
            distinct.setdefault(np.ascontiguousarray(context, np.int64).tobytes(), []).append(i)
        groups, logits_by_group, row_order = list[EqualLengthRows](), list[Tensor](), list[int]()
        for distinct in by_length.values():
            tokens = np.stack([np.frombuffer(key, np.int64) for key in distinct])
            rows = [i for repeats in distinct.values() for i in repeats]
            context_of_row = [k for k, repeats in enumerate(distinct.values()) for _ in repeats]
            row_indices = torch.tensor(rows, device=device)
            distinct_tokens = torch.from_numpy(tokens).to(device)
            group = EqualLengthRows(row_indices, distinct_tokens, self._new_cache())
            logits = self._run(group, group.tokens)
            context_indices = torch.tensor(context_of_row, device=device)
            group.select(context_indices, row_indices)
            groups.append(group)
            logits_by_group.append(logits[context_indices])
            row_order += rows
        logits = torch.empty_like(torch.cat(logits_by_group))
        logits[torch.tensor(row_order, device=device)] = torch.cat(logits_by_group)
        return logits, EqualLengthCache(groups, len(contexts), max(map(len, contexts)))

    def step(self, tokens: Tensor, cache: EqualLengthCache) -> Tensor:
        """Return logits ``[B, V]`` float32 after one more token of each row, ``[B, 1]``."""
        logits: Tensor | None = None
        for group in cache.groups:
            new_tokens = tokens[group.rows]
            group.tokens = torch.cat([group.tokens, new_tokens], dim=1)
            group_logits = self._run(group, new_tokens if group.cache is not None else group.tokens)
            if logits is None:
                logits = group_logits.new_zeros(len(tokens), group_logits.shape[1])
            logits[group.rows] = group_logits
        assert logits is not None
        cache.advance(1)
        return logits

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return None if self._cache_name is None else DynamicCache(config=self._module.config)

    def _run(self, group: EqualLengthRows, tokens: Tensor) -> Tensor:
        """Return logits ``[n, V]`` float32 after the last of ``tokens`` ``[n, L]``."""
        options: dict[str, Any] = {"use_cache": group.cache is not None}
        if self._cache_name is not None:
            options[self._cache_name] = group.cache
            if self._has_position_ids and group.cache is not None:
                # Some families count positions from 0 in each call.
                stop = group.tokens.shape[1]
                positions = torch.arange(stop - tokens.shape[1], stop, device=tokens.device)
                options["position_ids"] = positions.expand(len(tokens), -1)
        if self._has_logits_to_keep:
            options["logits_to_keep"] = 1
        logits: Tensor = self._module(input_ids=tokens, **options).logits[:, -1].float()
        return logits
