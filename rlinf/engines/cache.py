"""Keys and values of what a model has read, in buffers allocated once."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class KeyValueCache:
    """Of all layers, ``[B, heads, capacity, head_dim]`` each; rows end at the same column.

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
            shape = (keys.shape[0], keys.shape[1], self._capacity, keys.shape[3])
            self._layers.append((keys.new_empty(shape), values.new_empty(shape)))
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
        self._layers = [
            (self._take(keys, rows), self._take(values, rows)) for keys, values in self._layers
        ]

    def join(self, other: KeyValueCache, skip: int, room: int) -> None:
        """Add the rows of another cache below; where one is shorter, zeros stand before it.

        Args:
            skip: leading columns of this one that are dropped.
            room: free columns after the join.
        """
        length = max(self.length - skip, other.length)

        def joined(own: Tensor, new: Tensor) -> Tensor:
            # Zeros: what nobody attends to must be finite all the same.
            shape = (len(own) + len(new), own.shape[1], length + room, own.shape[3])
            out = own.new_zeros(shape)
            out[: len(own), :, length - self.length + skip : length] = own[:, :, skip : self.length]
            out[len(own) :, :, length - other.length : length] = new[:, :, : other.length]
            return out

        self._layers = [
            (joined(keys, more_keys), joined(values, more_values))
            for (keys, values), (more_keys, more_values) in zip(
                self._layers, other._layers, strict=True
            )
        ]
        self.length, self._capacity = length, length + room

    def _take(self, stored: Tensor, rows: Tensor) -> Tensor:
        out = stored.new_empty((len(rows), *stored.shape[1:]))
        out[:, :, : self.length] = stored[rows, :, : self.length]
        return out

    def get_seq_length(self, layer: int = 0) -> int:
        """Positions stored so far."""
        return self.length

    def __len__(self) -> int:
        return len(self._layers)
