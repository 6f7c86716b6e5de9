"""Keys and values of what a model has read, in buffers allocated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


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

    def join(self, other: KeyValueCache, skip: int, room: int) -> None:
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
            shape = (len(keys) + len(more_keys), keys.shape[1], length + room, keys.shape[3])
            # Zeros: what nobody attends to must be finite all the same.
            self._layers[number] = (
                joined(_columns(keys.new_zeros, shape), keys, more_keys),
                joined(values.new_zeros(shape), values, more_values),
            )
        self.length, self._capacity = length, length + room

    def get_seq_length(self, layer: int = 0) -> int:
        """Positions stored so far."""
        return self.length

    def __len__(self) -> int:
        return len(self._layers)


def _columns(make: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...]) -> Tensor:
    """A tensor ``[B, heads, n, D]`` in which the n are neighbours."""
    rows, heads, columns, width = shape
    return make((rows, heads, width, columns)).transpose(2, 3)
