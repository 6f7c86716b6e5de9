"""The memory that the KV cache of an engine may take, and the number of tokens that it holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlinf.device_memory import GIB

KV_CACHE_SHARE = 0.4
"""Largest share of the memory that the KV cache takes by default. The rest is for activations, and
for copies: when rows join the batch, both parts and the joined cache exist for a moment."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class CacheLimit:
    """The largest KV cache of one generation."""

    tokens: int
    """Tokens of all rows together, padding included."""
    source: str
    """The size and its origin, for messages."""

    def __str__(self) -> str:
        return f"{self.tokens} tokens ({self.source})"


def measure_cache_limit(
    device: torch.device, bytes_per_token: int, kv_cache_gib: float | None
) -> CacheLimit:
    """Return the limit that is configured, or else a share of the memory.

    On a GPU, the memory is what is free now. On a CPU, it is the memory of the job, divided by its
    processes on this node. The free memory of a node would change from run to run, and with it the
    rounding of batches of another size.

    Args:
        device: The device of the KV cache.
        bytes_per_token: See :func:`kv_bytes_per_token`.
        kv_cache_gib: The configured size, GiB; None: :data:`KV_CACHE_SHARE` of the memory.
    """
    if kv_cache_gib is not None:
        size, source = kv_cache_gib * GIB, "engine.kv_cache_gib"
    else:
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            # torch keeps freed memory, which the KV cache can use.
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            memory, name = free + unused, f"of free memory of {device}"
        else:
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            memory, name = host_memory_bytes() // processes, "of host memory for each process"
        size = KV_CACHE_SHARE * memory
        source = f"{KV_CACHE_SHARE:.0%} of {memory / GIB:.3g} GiB {name}"
    return CacheLimit(int(size) // max(1, bytes_per_token), f"{size / GIB:.3g} GiB, {source}")


def kv_bytes_per_token(text_config: Any, dtype: torch.dtype, tensor_parallel: int = 1) -> int:
    """Return the bytes of the keys and values of one token on each device.

    There are 2 x key-value heads of this device x head size numbers in each layer; none in a
    network without attention.

    Args:
        text_config: The ``transformers`` configuration of the language model.
        dtype: Type of the keys and values.
        tensor_parallel: Number of devices that share the heads.
    """
    if getattr(text_config, "is_heterogeneous", False):
        layers = list(text_config.per_layer_config)
    else:
        layers = [text_config] * text_config.num_hidden_layers
    numbers = 0
    for layer in layers:
        if heads := getattr(layer, "num_attention_heads", 0):
            head_size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
            kv_heads = getattr(layer, "num_key_value_heads", None) or heads
            numbers += 2 * max(1, kv_heads // tensor_parallel) * head_size
    return int(numbers * dtype.itemsize)


def host_memory_bytes() -> int:
    """Return the memory of this process's job on this node, as Slurm or a cgroup limits it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if slurm_mb := int(os.environ.get("SLURM_MEM_PER_NODE", "0")):  # 0: all memory of the node
        limits.append(slurm_mb << 20)
    for line in CGROUP_MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # cgroup v2
            root, name = CGROUP_ROOT, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUP_ROOT / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        # A container may hide the folders of its cgroups.
        files = [parent / name for parent in (folder, *folder.parents) if (parent / name).is_file()]
        texts = [file.read_text().strip() for file in files]
        limits += [int(text) for text in texts if text.isdigit()]  # "max": no limit
    return min(limits)
