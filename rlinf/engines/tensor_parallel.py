"""Servers that are divided over the GPUs of several processes (``layout.tp`` of a plan).

Of the processes that share a copy of the model the first one starts the server, on the GPUs of all
of them, and asks it. The others give up their GPUs while it computes, and wait.
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
"""That a batch takes; what a process waits for in vain breaks the connection and ends it sooner."""


class ReplicaGroup:
    """The processes of one copy of the model."""

    def __init__(self, world: ProcessGroupInfo, device_type: str) -> None:
        """All processes of the stage make theirs at the same time."""
        world.init_process_group(device_type)
        size = world.layout.tp
        groups = [
            dist.new_group([*range(first, first + size)], timeout=BARRIER_TIMEOUT, backend="gloo")
            for first in range(0, world.size, size)
        ]
        self._group = groups[world.rank // size]

    def barrier(self) -> None:
        """Wait until all of them are here."""
        dist.barrier(self._group)


def check_attention_heads(
    settings: Any, size: int, key: str = "plan.stages.rollout.layout"
) -> None:
    """See that attention can be divided over so many processes.

    Each has as many query heads. Heads of keys and values are divided too or, where there are fewer
    of them than processes, are there several times: as often each.

    Args:
        settings: with the numbers of both, by the names that transformers has for them.
        key: of the layout.

    Raises:
        ConfigError: it cannot; names the numbers that could.
    """
    if size == 1:
        return
    heads = settings.num_attention_heads
    shared = getattr(settings, "num_key_value_heads", None) or heads

    def able(size: int) -> bool:
        return heads % size == 0 and (shared % size == 0 or size % shared == 0)

    if not able(size):
        numbers = ", ".join(str(n) for n in range(1, heads + 1) if able(n))
        raise ConfigError(
            f"{key}.tp: {size} processes cannot divide the {heads} attention heads of the model, "
            f"{shared} of keys and values; choose one of {numbers}"
        )


def server_gpus(local_rank: int, server_index: int, num_servers: int, gpus_per_server: int) -> str:
    """The GPUs of one server, as CUDA_VISIBLE_DEVICES has them.

    Args:
        local_rank: of the process that starts it; those of one copy of the model are neighbours.
        number: of the server, of those of this copy.
        servers: how many there are of a copy; so many GPUs each of its processes has.
        each: processes of a copy, and GPUs of a server.

    Raises:
        ConfigError: this process does not see as many.
    """
    seen = os.environ.get(CUDA_VISIBLE_DEVICES)
    names = seen.split(",") if seen else [str(n) for n in range(torch.cuda.device_count())]
    # A launcher may show each process all GPUs of the node, or its own alone.
    first = local_rank * num_servers % max(1, len(names)) + server_index * gpus_per_server
    if first + gpus_per_server > len(names):
        raise ConfigError(
            f"engine.replicas: {num_servers} servers of {gpus_per_server} GPUs each need GPUs {first} to "
            f"{first + gpus_per_server - 1} of this process, which sees {len(names)}; give the stage more "
            "GPUs on a node, or lower engine.replicas or the layout's tp"
        )
    return ",".join(names[first : first + gpus_per_server])
