"""Warm-up of MKL: torch's vector functions and matmuls are called once before threads use them.

MKL chooses the kernel of each function at its first call. If two threads make that call at the same
moment, one of them may get a low-accuracy kernel: with torch 2.13 a cosine accurate to 1.5e-4
instead of 6e-8, in 1 of 3,000 processes. The results of a run would depend on it.
"""

from __future__ import annotations

import threading

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1"),
    *("lgamma", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sigmoid", "sin", "sinh"),
    *("sqrt", "tan", "tanh"),
)
_lock, _warmed_up = threading.Lock(), threading.Event()


def is_warmed_up() -> bool:
    """Return whether :func:`warm_up` has run."""
    return _warmed_up.is_set()


def warm_up() -> None:
    """Call the functions, once per process; takes about 15 ms."""
    with _lock:
        if _warmed_up.is_set():
            return
        for dtype in (torch.float32, torch.float64):
            # Long enough for vector kernels, and in the range of all functions.
            values = torch.linspace(0.1, 0.9, 256, dtype=dtype)
            for name in FUNCTIONS:
                getattr(values, name)()
            square = values.view(16, 16)
            torch.mm(square, square)
            torch.addmm(square, square, square.t())
            torch.bmm(square[None], square[None])
        _warmed_up.set()
