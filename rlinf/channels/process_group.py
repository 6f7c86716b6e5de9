"""The processes of one stage: torchrun-style variables and their process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pydantic import PositiveInt

from rlinf.config import Section, validate
from rlinf.data.load_balancing import balance_costs
from rlinf.errors import ConfigError, StageError

SPEED_WEIGHTS_VARIABLE, LAYOUT_VARIABLE = "RLINF_SHARES", "RLINF_LAYOUT"
GROUP_VARIABLE = "RLINF_GROUP"
"""Unique name of the processes that were started together."""
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


class ParallelLayout(Section):
    """Model-parallel layout: how processes share one copy of a model. The rest is data parallel.

    Neighbouring ranks are tensor parallel, then context parallel, then data parallel, then pipeline
    parallel, as Megatron-Core orders them by default.
    """

    tp: PositiveInt = 1
    """Processes that share each matrix (tensor parallel)."""
    pp: PositiveInt = 1
    """Groups of processes with layers of their own (pipeline parallel)."""
    cp: PositiveInt = 1
    """Processes that share each sequence (context parallel)."""
    ep: PositiveInt = 1
    """Processes, among those with different data or parts of a sequence, that share the experts of
    a mixture (expert parallel)."""

    @property
    def model_parallel_size(self) -> int:
        """Number of processes of one copy of the model."""
        return self.tp * self.pp * self.cp

    def check(self, size: int, where: str) -> None:
        """Check that a number of processes fits the layout.

        Raises:
            ConfigError: it does not.
        """
        if size % self.model_parallel_size:
            raise ConfigError(
                f"{where}: {self} takes {self.model_parallel_size} processes for one copy of the "
                f"model, and {size} are no multiple of that"
            )
        left = size // (self.tp * self.pp)
        if left % self.ep:
            raise ConfigError(
                f"{where}: ep={self.ep} does not divide the {left} processes of {size} that each "
                "group of experts is shared out over"
            )

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Parse the output of ``str``: ``tp=2,pp=4``.

        Raises:
            ConfigError: the text is no layout.
        """
        pairs = (part.partition("=") for part in filter(None, text.split(",")))
        values = {name: int(text) if text.isdigit() else text for name, _, text in pairs}
        return validate(cls, values, LAYOUT_VARIABLE)

    def __str__(self) -> str:
        return ",".join(f"{name}={count}" for name, count in self.parallel_dims().items())

    def parallel_dims(self) -> dict[str, int]:
        """Return the dimensions larger than 1 by name."""
        return {name: count for name, count in self if count > 1}


DATA_PARALLEL_ONLY = ParallelLayout()
"""Every process has a full copy of the model, or a shard that is gathered."""


@dataclass(frozen=True)
class ProcessGroupInfo:
    """Rank, size and layout of the processes of a stage."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    speed_weights: tuple[float, ...] | None = None
    """Relative speeds of the processes; None: all equal."""
    rendezvous_file: Path | None = None
    """File of the run by which the processes find each other (:mod:`rlinf.channels.rendezvous`).

    None: torch's ``env://`` is used, which is open to strangers and only for use outside runs."""
    layout: ParallelLayout = DATA_PARALLEL_ONLY

    @property
    def data_parallel_size(self) -> int:
        """Number of shares of the data: copies of the model, or processes where each has its own
        copy or gathers it."""
        return self.size // self.layout.model_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """This process's share of the data; equal for the processes of one copy."""
        return self._share(self.rank)

    @property
    def is_primary(self) -> bool:
        """True on the primary rank of each model replica, which writes records and metrics.

        Rank 0 is always one.
        """
        return self.rank % self._inner == 0 and self.rank < self._inner * self.data_parallel_size

    @property
    def primary_ranks(self) -> list[int]:
        """The primary ranks by data-parallel rank."""
        return [share * self._inner for share in range(self.data_parallel_size)]

    @property
    def data_parallel_speeds(self) -> tuple[float, ...]:
        """Relative speed of each share of the data: that of its slowest process."""
        speeds = [float("inf")] * self.data_parallel_size
        for rank, speed in enumerate(self.speed_weights or (1.0,) * self.size):
            share = self._share(rank)
            speeds[share] = min(speeds[share], speed)
        return tuple(speeds)

    @property
    def _inner(self) -> int:
        """Number of neighbouring ranks with the same data."""
        return self.layout.tp * self.layout.cp

    def _share(self, rank: int) -> int:
        return rank // self._inner % self.data_parallel_size

    def shard(self, count: int) -> list[int]:
        """Return which of ``count`` equal work items belong to this process or its replica."""
        if self.speed_weights is None:
            return list(range(self.data_parallel_rank, count, self.data_parallel_size))
        return balance_costs([1] * count, self.data_parallel_speeds)[self.data_parallel_rank]

    @classmethod
    def from_environment(cls, channels: Path | None = None) -> ProcessGroupInfo:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; one process when they are not set.

        ``RLINF_SHARES`` holds the relative speeds of all processes, separated by commas, and
        ``RLINF_LAYOUT`` the model-parallel layout.

        Args:
            channels: the run's folder for channels, where the processes of ``RLINF_GROUP`` meet.

        Raises:
            ConfigError: a variable is invalid.
        """
        try:
            rank, size, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
            text = os.environ.get(SPEED_WEIGHTS_VARIABLE)
            shares = tuple(float(part) for part in text.split(",")) if text else None
            rendezvous = (
                None
                if channels is None
                else channels / f"group-{os.environ.get(GROUP_VARIABLE)}.json"
            )
            layout = ParallelLayout.parse(os.environ.get(LAYOUT_VARIABLE, ""))
            world = cls(rank, size, local, shares, rendezvous, layout)
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_RANK, {SPEED_WEIGHTS_VARIABLE} must be numbers: {error}"
            ) from None
        if not 0 <= world.rank < world.size:
            raise ConfigError(f"RANK {world.rank} is not below WORLD_SIZE {world.size}")
        if shares is not None and (len(shares) != world.size or not min(shares) > 0):
            raise ConfigError(
                f"{SPEED_WEIGHTS_VARIABLE}: {text} gives no positive speed to each of {world.size} "
                "processes"
            )
        layout.check(size, LAYOUT_VARIABLE)
        if channels is not None and size > 1 and not os.environ.get(GROUP_VARIABLE):
            raise ConfigError(
                f"WORLD_SIZE is {size} but {GROUP_VARIABLE} is not set: the processes of a run are "
                "started by its launchers, which say by what name they find each other"
            )
        return world

    def init_process_group(self, device_type: str, timeout_s: float = 600) -> None:
        """Initialise the default process group (NCCL on GPUs, Gloo on CPUs) unless it exists.

        Raises:
            StageError: a process did not arrive in time, or a library of this process has
                initialised a group of other processes.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import HashStore, Store

        if dist.is_initialized():
            if dist.get_world_size() != self.size:
                raise StageError(
                    f"this process is in a process group of {dist.get_world_size()}, and its stage "
                    f"has {self.size} processes: an engine that forms its own group cannot be in "
                    "one process with a trainer; give each a pool of its own in the plan"
                )
            return
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        store: Store | None = None
        if self.size == 1:
            store = HashStore()
        elif self.rendezvous_file is not None:
            from rlinf.channels.curve_sockets import interface_towards
            from rlinf.channels.rendezvous import join_rendezvous

            store, address = join_rendezvous(self.rendezvous_file, self.rank, self.size, timeout_s)
            # NCCL's monitor would ask the store each second, in a thread that outlives Python.
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
            # Gloo's own choice, what the host's name stands for, often is the loopback.
            if interface := interface_towards(address):
                os.environ.setdefault(GLOO_INTERFACE_VARIABLE, interface)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
        )


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
