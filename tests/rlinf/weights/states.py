"""States of random names, types, shapes and bit patterns."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

TYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits, so NaNs of all kinds, infinities and subnormal numbers among them."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype == torch.bool:
        raw &= 1
    out = torch.empty(shape, dtype=dtype)
    out.view(-1).view(torch.uint8).copy_(torch.from_numpy(raw))
    return out


@st.composite
def states(draw: st.DrawFn) -> dict[str, Tensor]:
    """A state of up to six tensors, some of them tied or empty."""
    names = draw(st.lists(st.sampled_from(["a", "b.c", "d/e", "é", "gaps/a", "z"]), unique=True))
    out: dict[str, Tensor] = {}
    for name in names:
        if out and draw(st.integers(0, 4)) == 0:
            out[name] = out[draw(st.sampled_from(sorted(out)))]
        else:
            kind, shape = draw(st.sampled_from(TYPES)), draw(SHAPES)
            out[name] = random_tensor(kind, shape, draw(st.integers(0, 2**32)))
    return out


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything about a tensor that must survive; equal for equal NaNs."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return {n: bits(t) for n, t in left.items()} == {n: bits(t) for n, t in right.items()}
