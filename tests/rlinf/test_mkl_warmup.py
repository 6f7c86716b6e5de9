"""No two threads make the first call of a function of torch at once; see the module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.mkl_warmup import FUNCTIONS
from rlinf.models.causal_lm import CausalLM, CausalLMConfig

VECTOR_MATHEMATICS = {
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv"),
    *("exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt"),
    *("sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"),
}
"""What torch may leave to MKL (ATen/cpu/vml.h)."""
PROGRAM = """
import torch
from rlinf import mkl_warmup
from rlinf.trainers.minibatch import ThreadedDataParallel
from tests.rlinf.test_mkl_warmup import Plain
assert not mkl_warmup.is_warmed_up()
lanes = ThreadedDataParallel(Plain(), 2)
assert mkl_warmup.is_warmed_up(), "before a thread of theirs can call any"
lanes.close()
"""


class Plain:
    def __init__(self) -> None:
        self.module = nn.Linear(2, 2)


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        self.names.add(function.overloadpacket.__name__.rstrip("_"))
        return function(*given, **(named or {}))


def test_lanes_call_all_before_their_threads_do() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_what_a_model_computes_with_is_among_them(tmp_path: Path, architecture: Any) -> None:
    config = CausalLMConfig(
        architecture=architecture, hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16
    )
    CausalLM.create(config, {"alphabet": "abc"}, 0, tmp_path)
    policy = CausalLM.load(tmp_path, config)
    record = Trajectory(identity=RecordId(0, 0), actions=np.array([2, 3]), prompt=np.array([2, 2]))
    with Called() as called:
        outputs = policy.evaluate(policy.collate([record]), 0.7, entropy=True)
        outputs.logprobs.sum().backward()
    assert "cos" in called.names
    assert called.names & VECTOR_MATHEMATICS <= set(FUNCTIONS)
