"""The KV cache takes the configured memory, or a share of that of the GPU or of the job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlinf.engines import cache_limit
from rlinf.engines.cache_limit import (
    host_memory_bytes,
    kv_bytes_per_token,
    measure_cache_limit,
)

GIB = 1 << 30
CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


def test_a_gpu_gives_a_share_of_what_is_free_or_kept_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 35 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15 * GIB)
    limit = measure_cache_limit(GPU, 1 << 20, None)
    assert limit.tokens == 12 * 1024
    assert str(limit) == "12288 tokens (12 GiB, 40% of 30 GiB of free memory of cuda:1)"


def test_processes_of_a_node_divide_the_memory_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_limit, "host_memory_bytes", lambda: 100 * GIB)
    assert measure_cache_limit(CPU, 1 << 20, None).tokens == 40 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    limit = measure_cache_limit(CPU, 1 << 20, None)
    assert str(limit) == "10240 tokens (10 GiB, 40% of 25 GiB of host memory for each process)"


def test_the_configured_size_is_used() -> None:
    limit = measure_cache_limit(GPU, 1 << 20, 1.5)
    assert str(limit) == "1536 tokens (1.5 GiB, engine.kv_cache_gib)"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("memory/job/memory.limit_in_bytes", "4096\n", 4096),
        ("memory/job/task/memory.limit_in_bytes", "4096\n", 4096),
        ("job/memory.max", "8192\n", 8192),
        ("job/memory.max", "max\n", None),
        ("other/memory.max", "1\n", None),
    ],
)
def test_a_cgroup_limits_the_memory_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: int | None
) -> None:
    everything = host_memory_bytes()
    membership = tmp_path / "self"
    membership.write_text("4:cpu:/job\n3:memory:/job/task\n0::/job/task\n")
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(cache_limit, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(cache_limit, "CGROUP_MEMBERSHIP", membership)
    found = host_memory_bytes()
    assert found == expected if expected is not None else found >= everything


def test_slurm_limits_the_memory_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")
    everything = host_memory_bytes()
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "64")
    assert host_memory_bytes() == 64 << 20 < everything


def test_the_bytes_of_a_token_are_those_of_the_heads_of_a_device() -> None:
    config = SimpleNamespace(
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, hidden_size=3584
    )
    assert kv_bytes_per_token(config, torch.bfloat16) == 57344
    assert kv_bytes_per_token(config, torch.float32, 2) == 57344
    layers = [
        SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, head_dim=16),
        SimpleNamespace(num_attention_heads=8, num_key_value_heads=1, head_dim=64),
    ]
    mixed = SimpleNamespace(is_heterogeneous=True, per_layer_config=layers)
    assert kv_bytes_per_token(mixed, torch.float32) == 2 * (2 * 16 + 64) * 4


def test_a_network_without_attention_has_room_for_any_number_of_tokens() -> None:
    assert kv_bytes_per_token(SimpleNamespace(num_hidden_layers=2), torch.float32) == 0
    assert measure_cache_limit(CPU, 0, 1).tokens == GIB
