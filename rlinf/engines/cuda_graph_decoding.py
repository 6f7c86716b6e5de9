"""The fused decoding step as a CUDA graph.

On a GPU, launching the kernels of a decoding step takes longer than running them. A CUDA graph
launches all of them at once, but its kernels always use the same addresses and shapes. So the
inputs are copied to fixed tensors, and attention covers a whole block of columns of the KV cache,
of which a mask hides those that are not stored yet.

Other threads may use the GPU during a capture, because it concerns only its own thread.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from rlinf.engines.fused_decoding import FusedDecodeStep
from rlinf.engines.kv_cache import KeyValueCache

COLUMN_BLOCK = 256
"""A graph covers a multiple of this number of columns; beyond it, another graph is captured."""


class FixedColumns:
    """The first ``columns`` columns of a KV cache, with the column to write in a tensor ``[1]``.

    The cache is freed when its batch is; a captured graph does not keep it.
    """

    def __init__(self, cache: KeyValueCache, columns: int) -> None:
        self._cache = weakref.ref(cache)
        self.columns = columns
        self.column = torch.zeros(1, dtype=torch.int64, device=cache.layers[0][0].device)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store ``[B, heads, 1, head_dim]`` of a layer and return the covered keys and values."""
        cache = self._cache()
        assert cache is not None
        stored_keys, stored_values = cache.layers[layer]
        stored_keys.index_copy_(2, self.column, keys)
        stored_values.index_copy_(2, self.column, values)
        return stored_keys[:, :, : self.columns], stored_values[:, :, : self.columns]


class FixedInputStep:
    """The decoding step with inputs at fixed addresses, for one cache and one block of columns."""

    def __init__(
        self, step: FusedDecodeStep, cache: KeyValueCache, columns: int, rows: int
    ) -> None:
        self._step, self._cache = step, FixedColumns(cache, columns)
        buffer = cache.layers[0][0]
        self._buffer, device = weakref.ref(buffer), buffer.device
        self._tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._visible = torch.zeros(rows, 1, 1, columns, dtype=torch.bool, device=device)

    def fits(self, step: FusedDecodeStep, cache: KeyValueCache) -> bool:
        """Whether this is the step for the next column of a cache."""
        return (
            step is self._step
            and cache.layers[0][0] is self._buffer()
            and cache.length < self._cache.columns
        )

    def set_inputs(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, column: int
    ) -> None:
        """Copy the inputs of :meth:`FusedDecodeStep.__call__`, which writes to ``column``."""
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        self._cache.column.fill_(column)
        visible = self._visible[..., : column + 1]
        if mask is None:
            visible.fill_(True)
        else:
            visible.copy_(mask)

    def run(self) -> Tensor:
        """Return the logits ``[B, V]``."""
        return self._step(self._tokens, self._positions, self._visible, self._cache)


class GraphedDecodeStep:
    """Captures a decoding step when it is needed, and replays it; for one generation.

    The weights must stay at their addresses. Replayed logits are overwritten by the next call.
    """

    def __init__(self) -> None:
        self._fixed: FixedInputStep | None = None
        self._graph: Any = None
        self._logits: Tensor | None = None

    def __call__(
        self,
        step: FusedDecodeStep,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KeyValueCache,
    ) -> Tensor:
        """Compute what ``step`` computes with the same arguments."""
        fixed = self._fixed
        if is_new := fixed is None or not fixed.fits(step, cache):
            columns = covered_columns(cache.length, cache.capacity)
            fixed = self._fixed = FixedInputStep(step, cache, columns, len(tokens))
        assert fixed is not None
        fixed.set_inputs(tokens, positions, mask, cache.length)
        if is_new:
            self._capture(fixed)
        self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _capture(self, fixed: FixedInputStep) -> None:
        """Capture a step whose inputs are set."""
        self._logits = None
        # The first run of a kernel allocates workspaces, which a capture does not allow. Running
        # the step twice stores the same keys and values twice.
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fixed.run()
        torch.cuda.current_stream().wait_stream(stream)
        # The new graph reuses the memory of the old one, which must exist until then.
        pool = None if self._graph is None else self._graph.pool()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            self._logits = fixed.run()
        self._graph = graph


def covered_columns(length: int, capacity: int) -> int:
    """Return the number of columns that the graph for column ``length`` covers."""
    return min(capacity, (length // COLUMN_BLOCK + 1) * COLUMN_BLOCK)
