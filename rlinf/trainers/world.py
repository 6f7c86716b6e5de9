"""The processes of one stage: torchrun-style variables and the process group made from them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from rlinf.data.packing import balance
from rlinf.errors import ConfigError

SHARES = "RLINF_SHARES"


@dataclass(frozen=True)
class World:
    """Which process of how many this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    shares: tuple[float, ...] | None = None
    """Relative speeds of the processes; None: all alike."""

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speed of each process."""
        return self.shares or (1.0,) * self.size

    def mine(self, count: int) -> list[int]:
        """Which of ``count`` like pieces of work are this process's own."""
        if self.shares is None:
            return list(range(self.rank, count, self.size))
        return balance([1] * count, self.shares)[self.rank]

    @classmethod
    def from_environment(cls) -> World:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; one process when they are not set.

        ``RLINF_SHARES`` holds the relative speeds of all processes, divided by commas.

        Raises:
            ConfigError: they are set but make no sense.
        """
        try:
            rank, size, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
            text = os.environ.get(SHARES)
            shares = tuple(float(part) for part in text.split(",")) if text else None
            world = cls(rank, size, local, shares)
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_RANK, {SHARES} must be numbers: {error}"
            ) from None
        if not 0 <= world.rank < world.size:
            raise ConfigError(f"RANK {world.rank} is not below WORLD_SIZE {world.size}")
        if shares is not None and (len(shares) != world.size or not min(shares) > 0):
            raise ConfigError(
                f"{SHARES}: {text} gives no positive speed to each of {world.size} processes"
            )
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
