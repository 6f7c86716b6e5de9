"""Keys and values of what a model has read, in buffers allocated once."""

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
    """Of all layers, ``[B, heads, capacity, head_dim]`` each; rows end at the same column.

    The columns of keys are neighbours in memory: scores of a single query are up to twice as quick.

    Implements what attention layers of ``transformers`` call on a cache.
    """

    is_compileable = False

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._layers: list[tuple[Tensor, Tensor]] = []
        self.length = 0

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, heads, n, head_dim]`` to a layer; returns all of it so far."""
        if layer == len(self._layers):
            shape = (*keys.shape[:2], self._capacity, keys.shape[3])
            self._layers.append((_columns(keys.new_empty, shape), values.new_empty(shape)))
        stored_keys, stored_values = self._layers[layer]
        stop = self.length + keys.shape[2]
        stored_keys[:, :, self.length : stop] = keys
        stored_values[:, :, self.length : stop] = values
        return stored_keys[:, :, :stop], stored_values[:, :, :stop]

    def advance(self, count: int) -> None:
        """Count ``count`` positions as stored, once every layer has them."""
        self.length += count

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) rows."""
        for number, (keys, values) in enumerate(self._layers):
            shape = (len(rows), *keys.shape[1:])
            kept = _columns(keys.new_empty, shape), values.new_empty(shape)
            for out, stored in zip(kept, (keys, values), strict=True):
                out[:, :, : self.length] = stored[rows, :, : self.length]
            self._layers[number] = kept

    def join(self, other: KeyValueCache, skip: int, free_columns: int) -> None:
        """Add the rows of another cache below; where one is shorter, zeros stand before it.

        Args:
            skip: leading columns of this one that are dropped.
            room: free columns after the join.
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
            # Zeros: what nobody attends to must be finite all the same.
            self._layers[number] = (
                joined(_columns(keys.new_zeros, shape), keys, more_keys),
                joined(values.new_zeros(shape), values, more_values),
            )
        self.length, self._capacity = length, length + free_columns

    def get_seq_length(self, layer: int = 0) -> int:
        """Positions stored so far."""
        return self.length

    def __len__(self) -> int:
        return len(self._layers)


def _columns(make: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...]) -> Tensor:
    """A tensor ``[B, heads, n, D]`` in which the n are neighbours."""
    rows, heads, columns, width = shape
    return make((rows, heads, width, columns)).transpose(2, 3)


FAMILIES_WITHOUT_CACHE = {
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("minimax", "recurrent_gemma", "xlstm"),
}
"""Families that count positions by the tokens that are no padding, and families that keep what they
read elsewhere than in the library's common cache classes."""
CACHED_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Layers that the engine's own cache can serve."""


def supports_padding(settings: Any) -> bool:
    """Return whether rows of several lengths can be decoded side by side, padded on the left."""
    text = settings.get_text_config()
    return (
        settings.model_type in PACKABLE_FAMILIES | IMAGE_FAMILIES
        and set(getattr(text, "layer_types", None) or ()) <= CACHED_LAYER_TYPES
    )


@dataclass
class EqualLengthRows:
    """Rows of one length.

    ``rows`` ``[n]`` are their places in the batch, ``tokens`` ``[n, L]`` what they have read.
    """

    rows: Tensor
    tokens: Tensor
    cache: Any

    def select(self, which: Tensor, rows: Tensor) -> None:
        """Keep (or repeat) some of its rows, ``[m]`` numbers, at other places of the batch."""
        self.rows, self.tokens = rows, self.tokens[which]
        if self.cache is not None:
            self.cache.reorder_cache(which)


class EqualLengthCache:
    """The cache of a batch of rows of any lengths; its ``length`` is that of the longest."""

    def __init__(self, cohorts: list[EqualLengthRows], size: int, length: int) -> None:
        self._size, self.length = size, length
        self.groups = cohorts

    def select(self, rows: Tensor) -> None:
        """Keep rows ``[n]``, each once at most."""
        place = torch.full((self._size,), -1, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        for cohort in self.groups:
            places = place[cohort.rows]
            which = (places >= 0).nonzero()[:, 0]
            if len(which) < len(places):
                cohort.select(which, places[which])
            else:
                cohort.rows = places
        self.groups = [cohort for cohort in self.groups if len(cohort.rows)]
        self._size = len(rows)

    def join(self, other: EqualLengthCache, skip: int, free_columns: int) -> None:
        """Add the rows of another batch below; of this one ``skip`` leading columns are void."""
        for cohort in other.groups:
            cohort.rows = cohort.rows + self._size
        self.groups += other.groups
        self._size += other._size
        self.length = max(self.length - skip, other.length)

    def advance(self, count: int) -> None:
        """Count ``count`` more columns."""
        self.length += count


class EqualLengthNetwork:
    """A network that reads rows in cohorts."""

    def __init__(self, module: Any) -> None:
        self._module = module
        names = inspect.signature(module.forward).parameters
        held = [name for name in ("past_key_values", "cache_params") if name in names]
        kind = module.config.model_type
        self._cache_name = held[0] if held and kind not in FAMILIES_WITHOUT_CACHE else None
        self._keeps = "logits_to_keep" in names
        self._places = "position_ids" in names

    def prefill(
        self, contexts: Sequence[np.ndarray], device: torch.device
    ) -> tuple[Tensor, EqualLengthCache]:
        """Read each distinct context once.

        Args:
            contexts: token ids of each row.

        Returns:
            Logits ``[B, V]`` float32 of the next tokens, and the cache.
        """
        by_length: dict[int, dict[bytes, list[int]]] = {}
        for i, context in enumerate(contexts):
            same = by_length.setdefault(len(context), {})
            same.setdefault(np.ascontiguousarray(context, np.int64).tobytes(), []).append(i)
        cohorts, found, order = list[EqualLengthRows](), list[Tensor](), list[int]()
        for distinct in by_length.values():
            tokens = np.stack([np.frombuffer(key, np.int64) for key in distinct])
            rows = [i for numbers in distinct.values() for i in numbers]
            which = [k for k, numbers in enumerate(distinct.values()) for _ in numbers]
            places = torch.tensor(rows, device=device)
            cohort = EqualLengthRows(places, torch.from_numpy(tokens).to(device), self._new_cache())
            logits = self._run(cohort, cohort.tokens)
            chosen = torch.tensor(which, device=device)
            cohort.select(chosen, places)
            cohorts.append(cohort)
            found.append(logits[chosen])
            order += rows
        logits = torch.empty_like(torch.cat(found))
        logits[torch.tensor(order, device=device)] = torch.cat(found)
        return logits, EqualLengthCache(cohorts, len(contexts), max(map(len, contexts)))

    def step(self, tokens: Tensor, cache: EqualLengthCache) -> Tensor:
        """Return logits ``[B, V]`` float32 after one more token of each row, ``[B, 1]``."""
        logits: Tensor | None = None
        for cohort in cache.groups:
            new = tokens[cohort.rows]
            cohort.tokens = torch.cat([cohort.tokens, new], dim=1)
            part = self._run(cohort, new if cohort.cache is not None else cohort.tokens)
            if logits is None:
                logits = part.new_zeros(len(tokens), part.shape[1])
            logits[cohort.rows] = part
        assert logits is not None
        cache.advance(1)
        return logits

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return None if self._cache_name is None else DynamicCache(config=self._module.config)

    def _run(self, cohort: EqualLengthRows, tokens: Tensor) -> Tensor:
        """Logits ``[n, V]`` float32 after the last of ``tokens`` ``[n, L]``."""
        options: dict[str, Any] = {"use_cache": cohort.cache is not None}
        if self._cache_name is not None:
            options[self._cache_name] = cohort.cache
            if self._places and cohort.cache is not None:
                # Some families count from 0 in each call.
                stop = cohort.tokens.shape[1]
                places = torch.arange(stop - tokens.shape[1], stop, device=tokens.device)
                options["position_ids"] = places.expand(len(tokens), -1)
        if self._keeps:
            options["logits_to_keep"] = 1
        logits: Tensor = self._module(input_ids=tokens, **options).logits[:, -1].float()
        return logits
