"""The processes of one stage: torchrun-style variables and the process group made of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rlinf.data.packing import balance
from rlinf.errors import ConfigError

SHARES = "RLINF_SHARES"
GROUP = "RLINF_GROUP"
"""Names the processes that were started together; no others ever have this name."""
INTERFACES = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class World:
    """Which process of how many this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    shares: tuple[float, ...] | None = None
    """Relative speeds of the processes; None: all alike."""
    meeting: Path | None = None
    """File of a run by which they find each other (:mod:`rlinf.channels.rendezvous`).

    None: where torch's ``env://`` says, which is open to strangers and for use outside of runs.
    """

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
    def from_environment(cls, channels: Path | None = None) -> World:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; one process when they are not set.

        ``RLINF_SHARES`` holds the relative speeds of all processes, divided by commas.

        Args:
            channels: the run's folder for channels, where those of ``RLINF_GROUP`` meet.

        Raises:
            ConfigError: they are set but make no sense.
        """
        try:
            rank, size, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
            text = os.environ.get(SHARES)
            shares = tuple(float(part) for part in text.split(",")) if text else None
            meeting = None if channels is None else channels / f"group-{os.environ.get(GROUP)}.json"
            world = cls(rank, size, local, shares, meeting)
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
        if channels is not None and size > 1 and not os.environ.get(GROUP):
            raise ConfigError(
                f"WORLD_SIZE is {size} but {GROUP} is not set: the processes of a run are started "
                "by its launchers, which say by what name they find each other"
            )
        return world

    def connect(self, device_type: str, timeout_s: float = 600) -> None:
        """Form the default process group (NCCL on GPUs, Gloo on CPUs) unless it exists.

        Raises:
            StageError: not all processes came to the meeting in time.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import HashStore, Store

        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        store: Store | None = None
        if self.size == 1:
            store = HashStore()
        elif self.meeting is not None:
            from rlinf.channels.curve import interface_towards
            from rlinf.channels.rendezvous import meet

            store, address = meet(self.meeting, self.rank, self.size, timeout_s)
            # NCCL's monitor would ask the store each second, in a thread that outlives Python.
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
            # Gloo's own choice, what the host's name stands for, often is the loopback.
            if interface := interface_towards(address):
                os.environ.setdefault(INTERFACES, interface)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
        )


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
