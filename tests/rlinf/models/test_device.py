"""Ranks of one node use a GPU each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlinf.errors import ConfigError
from rlinf.models import base
from rlinf.models.base import default_dtype, local_device
from rlinf.models.causal_lm import CausalLM
from rlinf.models.vector_policy import VectorPolicy


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


def test_gpus_of_a_job_are_not_left_idle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    monkeypatch.setattr(base, "NVIDIA_DRIVER", tmp_path / "none")
    assert local_device("auto") == torch.device("cpu"), "the GPUs of a test cluster are no devices"
    monkeypatch.setattr(base, "NVIDIA_DRIVER", tmp_path)
    with pytest.raises(
        ConfigError, match=r"Slurm gave this job GPUs \(0,1\), but torch .* sees none"
    ):
        local_device("auto")
    assert local_device("cpu") == torch.device("cpu")
    monkeypatch.delenv("SLURM_JOB_GPUS")
    assert local_device("auto") == torch.device("cpu"), "a login node with a GPU"


@pytest.mark.parametrize(
    ("provides", "path", "device", "expected"),
    [
        (CausalLM.provides, Path("model"), "cuda:1", "bfloat16"),
        (CausalLM.provides, Path("model"), "cpu", None),
        (CausalLM.provides, None, "cuda:0", None),
        (VectorPolicy.provides, Path("model"), "cuda:0", None),
    ],
)
def test_checkpoints_of_language_models_compute_in_bfloat16_on_gpus(
    provides: frozenset[str], path: Path | None, device: str, expected: str | None
) -> None:
    assert default_dtype(provides, path, torch.device(device)) == expected
