"""Tensor parallelism of engine servers over the GPUs of several processes (``layout.tp``).

The primary rank of a model replica starts the server on the GPUs of all its ranks and sends the
requests. The other ranks free their GPUs and wait while the server computes.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.errors import ConfigError

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
BARRIER_TIMEOUT = timedelta(days=30)
"""Maximum duration of a batch. The wait ends earlier if a process fails and disconnects."""


class ReplicaGroup:
    """The ranks of one model replica."""

    def __init__(self, world: ProcessGroupInfo, device_type: str) -> None:
        """Create the process group; a collective operation of all ranks of the stage."""
        world.init_process_group(device_type)
        size = world.layout.tp
        groups = [
            dist.new_group([*range(first, first + size)], timeout=BARRIER_TIMEOUT, backend="gloo")
            for first in range(0, world.size, size)
        ]
        self._group = groups[world.rank // size]

    def barrier(self) -> None:
        """Wait until all ranks of the replica have called this."""
        dist.barrier(self._group)


def check_attention_heads(
    settings: Any, size: int, key: str = "plan.stages.rollout.layout"
) -> None:
    """Check that the attention heads can be divided over a number of ranks.

    All ranks have the same number of query heads. Key-value heads are divided too; if there are
    fewer than ranks, each is replicated the same number of times.

    Args:
        settings: The text config of the model, with the field names of transformers.
        size: The number of ranks.
        key: The configuration key of the layout, for the error message.

    Raises:
        ConfigError: The number is not possible; the message lists possible ones.
    """
    if size == 1:
        return
    heads = settings.num_attention_heads
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads

    def can_divide(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not can_divide(size):
        choices = ", ".join(str(n) for n in range(1, heads + 1) if can_divide(n))
        raise ConfigError(
            f"{key}.tp: {size} processes cannot divide the {heads} attention heads of the model, "
            f"{kv_heads} of keys and values; choose one of {choices}"
        )


def server_gpus(local_rank: int, server_index: int, num_servers: int, gpus_per_server: int) -> str:
    """Return the GPUs of one server in the format of CUDA_VISIBLE_DEVICES.

    Args:
        local_rank: Local rank of the starting process; the ranks of a replica are adjacent.
        server_index: Index of the server within the replica.
        num_servers: Servers of the replica, and GPUs of each of its ranks.
        gpus_per_server: GPUs of the server, and ranks of the replica.

    Raises:
        ConfigError: This process does not see enough GPUs.
    """
    visible = os.environ.get(CUDA_VISIBLE_DEVICES)
    names = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    # Launchers show each process either all GPUs of the node or only its own.
    first = local_rank * num_servers % max(1, len(names)) + server_index * gpus_per_server
    if first + gpus_per_server > len(names):
        raise ConfigError(
            f"engine.replicas: {num_servers} servers of {gpus_per_server} GPUs each need GPUs "
            f"{first} to {first + gpus_per_server - 1} of this process, which sees {len(names)}; "
            "give the stage more GPUs on a node, or lower engine.replicas or the layout's tp"
        )
    return ",".join(names[first : first + gpus_per_server])
