"""Devices of the tests in this folder: their bodies run on a CPU too, so that a GPU tests CUDA.

``make test-gpu`` runs those on a GPU; ``make test`` and its like run those on a CPU.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch

from tests.environments import need_environment

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    ],
)
DEVICES = ["cpu", CUDA]


def need_two(device: str) -> None:
    """Skip a test whose two processes need a GPU each."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("torch sees fewer than two GPUs, and each of two processes needs its own")


def need_interpreter(package: str, device: str) -> str:
    """This interpreter if it has the package, or that of the package's environment; else skip."""
    if find_spec(package) is not None:
        return sys.executable
    return need_environment(package if device == "cpu" else f"{package}-gpu")
