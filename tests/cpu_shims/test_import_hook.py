"""The import hook of Megatron-Core's modules; its packages are not needed."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from tests.cpu_shims import FOLDER
from tests.cpu_shims.megatron import cpu_import_hook


def test_sources_are_rewritten_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "import torch\n"
        "from torch.cuda import _lazy_call\n"
        "found = []\n"
        "_lazy_call(lambda: found.append('called'))\n"
        "device = torch.cuda.current_device()\n"
        "x = torch.zeros(2, device='cuda').cuda(device)\n"
        "kind = x.type() == 'torch.cuda.FloatTensor'\n"
        "named = f'cuda:{device}'\n"
        "moved = x.is_cuda\n"
        "x.record_stream(torch.cuda.current_stream())\n"
    )
    monkeypatch.syspath_prepend(FOLDER / "megatron")
    stub = importlib.import_module(cpu_import_hook.STUB_MODULE)
    space: dict[str, Any] = {cpu_import_hook._STUB_NAME: stub}
    exec(cpu_import_hook.rewrite_for_cpu(source), space)
    assert space["found"] == ["called"]
    assert space["x"].device == space["device"] == torch.device("cpu")
    assert (space["kind"], space["named"], space["moved"]) == (True, "cpu", True)
    assert np.all(space["x"].numpy() == 0)
