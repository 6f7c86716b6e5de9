"""KV caches of the transformers engine: one padded buffer, or groups of rows of equal length.

Left padding is harmless only if attention is the sole operation that mixes tokens. Recurrent layers
(Mamba, linear attention, short convolutions), position biases (ALiBi) and chunked attention would
read the padding. For such families, rows of equal length form a group without padding, so a sample
depends only on its own tokens. Groups use the cache classes of ``transformers``; families without
such a cache read all tokens again for each new token.
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

    is_compileable = False

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._layers: list[tuple[Tensor, Tensor]] = []
        self.length = 0

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, heads, n, head_dim]`` to a layer and return all its keys and values."""
        if layer == len(self._layers):
            shape = (*keys.shape[:2], self._capacity, keys.shape[3])
            self._layers.append((_columns(keys.new_empty, shape), values.new_empty(shape)))
        stored_keys, stored_values = self._layers[layer]
        stop = self.length + keys.shape[2]
        stored_keys[:, :, self.length : stop] = keys
        stored_values[:, :, self.length : stop] = values
        return stored_keys[:, :, :stop], stored_values[:, :, :stop]

    def advance(self, count: int) -> None:
        """Count ``count`` more columns as stored, after all layers have them."""
        self.length += count

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the rows with these numbers."""
        for number, (keys, values) in enumerate(self._layers):
            shape = (len(rows), *keys.shape[1:])
            selected = _columns(keys.new_empty, shape), values.new_empty(shape)
            for out, stored in zip(selected, (keys, values), strict=True):
                out[:, :, : self.length] = stored[rows, :, : self.length]
            self._layers[number] = selected

    def join(self, other: KeyValueCache, skip: int, free_columns: int) -> None:
        """Append the rows of another cache; the shorter rows are padded with zeros on the left.

        Args:
            skip: Leading columns of this cache to drop.
            free_columns: Free columns afterwards.
        """
        length = max(self.length - skip, other.length)

        def joined(out: Tensor, own: Tensor, new: Tensor) -> Tensor:
            out[: len(own), :, length - self.length + skip : length] = own[:, :, skip : self.length]
            out[len(own) :, :, length - other.length : length] = new[:, :, : other.length]
            return out

        for number, ((keys, values), (more_keys, more_values)) in enumerate(
            zip(self._layers, other._layers, strict=True)
        ):
            shape = (
                len(keys) + len(more_keys),
                keys.shape[1],
                length + free_columns,
                keys.shape[3],
            )
            # Zeros, because columns without attention must be finite, too.
            self._layers[number] = (
                joined(_columns(keys.new_zeros, shape), keys, more_keys),
                joined(values.new_zeros(shape), values, more_values),
            )
        self.length, self._capacity = length, length + free_columns

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of stored columns."""
        return self.length

    def __len__(self) -> int:
        return len(self._layers)


def _columns(create: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return a tensor ``[B, heads, n, D]`` whose columns n are contiguous."""
    rows, heads, columns, width = shape
    return create((rows, heads, width, columns)).transpose(2, 3)


FAMILIES_WITHOUT_CACHE = {
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("minimax", "recurrent_gemma", "xlstm"),
}
"""Families that derive positions from non-padding tokens, and families that do not use the common
cache classes of the library."""
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
    """A group of rows of equal length.

    ``rows`` ``[n]`` are their row numbers in the batch, ``tokens`` ``[n, L]`` all their tokens.
    """

    rows: Tensor
    tokens: Tensor
    cache: Any

    def select(self, which: Tensor, rows: Tensor) -> None:
        """Keep (or repeat) rows ``[m]`` of the group, with new row numbers in the batch."""
        self.rows, self.tokens = rows, self.tokens[which]
        if self.cache is not None:
            self.cache.reorder_cache(which)


class EqualLengthCache:
    """The cache of a batch as groups of equal length; ``length`` is that of the longest row."""

    def __init__(self, groups: list[EqualLengthRows], size: int, length: int) -> None:
        self._size, self.length = size, length
        self.groups = groups

    def select(self, rows: Tensor) -> None:
        """Keep the rows with these numbers ``[n]``, each at most once."""
        place = torch.full((self._size,), -1, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        for group in self.groups:
            places = place[group.rows]
            which = (places >= 0).nonzero()[:, 0]
            if len(which) < len(places):
                group.select(which, places[which])
            else:
                group.rows = places
        self.groups = [group for group in self.groups if len(group.rows)]
        self._size = len(rows)

    def join(self, other: EqualLengthCache, skip: int, free_columns: int) -> None:
        """Append the rows of another batch; ``skip`` leading columns of this one are unused."""
        for group in other.groups:
            group.rows = group.rows + self._size
        self.groups += other.groups
        self._size += other._size
        self.length = max(self.length - skip, other.length)

    def advance(self, count: int) -> None:
        """Count ``count`` more columns as stored."""
        self.length += count


class EqualLengthNetwork:
    """A network that computes groups of rows of equal length, without padding."""

    def __init__(self, module: Any) -> None:
        self._module = module
        names = inspect.signature(module.forward).parameters
        caches = [name for name in ("past_key_values", "cache_params") if name in names]
        family = module.config.model_type
        self._cache_name = caches[0] if caches and family not in FAMILIES_WITHOUT_CACHE else None
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
        by_length: dict[int, dict[bytes, list[int]]] = {}
        for i, context in enumerate(contexts):
            same = by_length.setdefault(len(context), {})
            same.setdefault(np.ascontiguousarray(context, np.int64).tobytes(), []).append(i)
        groups, parts, order = list[EqualLengthRows](), list[Tensor](), list[int]()
        for distinct in by_length.values():
            tokens = np.stack([np.frombuffer(key, np.int64) for key in distinct])
            rows = [i for numbers in distinct.values() for i in numbers]
            which = [k for k, numbers in enumerate(distinct.values()) for _ in numbers]
            places = torch.tensor(rows, device=device)
            group = EqualLengthRows(places, torch.from_numpy(tokens).to(device), self._new_cache())
            logits = self._run(group, group.tokens)
            chosen = torch.tensor(which, device=device)
            group.select(chosen, places)
            groups.append(group)
            parts.append(logits[chosen])
            order += rows
        logits = torch.empty_like(torch.cat(parts))
        logits[torch.tensor(order, device=device)] = torch.cat(parts)
        return logits, EqualLengthCache(groups, len(contexts), max(map(len, contexts)))

    def step(self, tokens: Tensor, cache: EqualLengthCache) -> Tensor:
        """Return logits ``[B, V]`` float32 after one more token of each row, ``[B, 1]``."""
        logits: Tensor | None = None
        for group in cache.groups:
            new = tokens[group.rows]
            group.tokens = torch.cat([group.tokens, new], dim=1)
            part = self._run(group, new if group.cache is not None else group.tokens)
            if logits is None:
                logits = part.new_zeros(len(tokens), part.shape[1])
            logits[group.rows] = part
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
                places = torch.arange(stop - tokens.shape[1], stop, device=tokens.device)
                options["position_ids"] = places.expand(len(tokens), -1)
        if self._has_logits_to_keep:
            options["logits_to_keep"] = 1
        logits: Tensor = self._module(input_ids=tokens, **options).logits[:, -1].float()
        return logits
