"""Ranks of one node use a GPU each."""

from __future__ import annotations

import pytest
import torch

from rlinf.models.base import local_device


@pytest.mark.parametrize(("seen", "index"), [(4, 2), (1, 0), (2, 0)])
def test_each_rank_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, seen: int, index: int
) -> None:
    for name, value in {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    assert local_device("auto") == local_device("cuda") == torch.device("cuda", index)
    assert local_device("cuda:1") == torch.device("cuda", 1)
    assert local_device("cpu") == torch.device("cpu")


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device("auto") == torch.device("cpu")
