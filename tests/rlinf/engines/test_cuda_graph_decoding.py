"""What a CUDA graph replays: the fused step with inputs at fixed addresses. Graphs themselves are
tested in tests/gpu."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from rlinf.engines.cuda_graph_decoding import COLUMN_BLOCK, FixedInputStep, covered_columns
from rlinf.engines.kv_cache import KeyValueCache
from tests.rlinf.engines.test_fused_decoding import FAMILIES, engine_of, prefill


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_the_step_with_free_inputs(
    tmp_path: Path, architecture: str, padded: bool
) -> None:
    """Columns that are not stored yet are covered, and have no effect whatever finite they hold."""
    engine = engine_of(tmp_path, architecture)
    step = engine._fused_step
    assert step is not None
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 7, 5) if padded else (5, 5, 5)
    contexts = [torch.randint(2, 12, (n,), generator=generator).numpy() for n in lengths]
    with torch.inference_mode():
        _, free, attend = prefill(engine, contexts, 6)
        _, covered, _ = prefill(engine, contexts, 6)
        assert isinstance(free, KeyValueCache)
        assert isinstance(covered, KeyValueCache)
        for keys, values in covered.layers:
            for buffer in (keys, values):
                buffer[:, :, covered.length :] = 1e3
        fixed = FixedInputStep(step, covered, covered.capacity, len(lengths))
        positions = torch.tensor([[n] for n in lengths])
        for _ in range(5):
            column = free.length
            attend[:, column] = True
            mask = attend[:, None, None, : column + 1] if padded else None
            tokens = torch.randint(2, 12, (3, 1), generator=generator)
            assert fixed.fits(step, covered)
            fixed.set_inputs(tokens, positions, mask, column)
            expected = step(tokens, positions, mask, free)
            torch.testing.assert_close(fixed.run(), expected, atol=2e-6, rtol=1e-5)
            positions = positions + 1
            free.advance(1)
            covered.advance(1)


def test_it_fits_one_cache_until_its_columns_are_full(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "qwen2")
    step = engine._fused_step
    assert step is not None
    contexts = [torch.arange(2, 6).numpy()] * 2
    with torch.inference_mode():
        _, cache, _ = prefill(engine, contexts, 8)
        _, other, _ = prefill(engine, contexts, 8)
        assert isinstance(cache, KeyValueCache)
        assert isinstance(other, KeyValueCache)
        fixed = FixedInputStep(step, cache, 6, 2)
        assert fixed.fits(step, cache)
        assert not fixed.fits(step, other)
        cache.advance(2)
        assert not fixed.fits(step, cache)
        cache.length = 4
        cache.select(torch.tensor([1]))  # rows in new buffers
        assert not fixed.fits(step, cache)


def test_it_does_not_keep_the_memory_of_a_cache_that_is_no_longer_used(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "qwen2")
    step = engine._fused_step
    assert step is not None
    with torch.inference_mode():
        _, cache, _ = prefill(engine, [torch.arange(2, 6).numpy()], 8)
        fixed = FixedInputStep(step, cache, 6, 1)
        buffers = [weakref.ref(buffer) for layer in cache.layers for buffer in layer]
        _, cache, _ = prefill(engine, [torch.arange(2, 6).numpy()], 8)
    assert not any(buffer() is not None for buffer in buffers)
    assert not fixed.fits(step, cache)


@pytest.mark.parametrize(
    ("length", "capacity", "columns"),
    [
        (0, 1000, COLUMN_BLOCK),
        (COLUMN_BLOCK - 1, 1000, COLUMN_BLOCK),
        (COLUMN_BLOCK, 1000, 2 * COLUMN_BLOCK),
        (999, 1000, 1000),
        (10, 20, 20),
    ],
)
def test_columns_are_covered_in_blocks_up_to_the_capacity(
    length: int, capacity: int, columns: int
) -> None:
    assert covered_columns(length, capacity) == columns
