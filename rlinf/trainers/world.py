"""The processes of one stage: torchrun-style variables and the process group made from them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from rlinf.errors import ConfigError


@dataclass(frozen=True)
class World:
    """Which process of how many this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> World:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; one process when they are not set.

        Raises:
            ConfigError: they are set but make no sense.
        """
        try:
            world = cls(*(int(os.environ.get(name, default)) for name, default in _VARIABLES))
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK must be numbers: {error}") from None
        if not 0 <= world.rank < world.size:
            raise ConfigError(f"RANK {world.rank} is not below WORLD_SIZE {world.size}")
        return world

    def connect(self, device_type: str, timeout_s: float = 600) -> None:
        """Form the default process group (NCCL on GPUs, Gloo on CPUs) unless it exists."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import HashStore

        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if self.size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            return
        dist.init_process_group(
            backend, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=timeout_s)
        )


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
