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
"""See :meth:`ProcessGroupInfo.from_environment`."""
GROUP_VARIABLE = "RLINF_GROUP"
"""Unique name of the group of processes that were started together."""
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

    def check(self, size: int, source: str) -> None:
        """Check that ``size`` processes fit the layout; ``source`` says where it was set.

        Raises:
            ConfigError: they do not fit.
        """
        if size % self.model_parallel_size:
            raise ConfigError(
                f"{source}: {self} takes {self.model_parallel_size} processes for one copy of the "
                f"model, and {size} are no multiple of that"
            )
        expert_processes = size // (self.tp * self.pp)
        if expert_processes % self.ep:
            raise ConfigError(
                f"{source}: ep={self.ep} does not divide the {expert_processes} processes "
                f"of {size} that each group of experts is shared out over"
            )

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Parse the output of ``str``: ``tp=2,pp=4``.

        Raises:
            ConfigError: the text is not a layout.
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
    """Number of processes (world size)."""
    local_rank: int = 0
    speed_weights: tuple[float, ...] | None = None
    """Relative speeds of the processes; None: all equal."""
    rendezvous_file: Path | None = None
    """File of the run by which the processes find each other (:mod:`rlinf.channels.rendezvous`).

    None: use torch's ``env://``, which accepts any connection and is only for use outside runs."""
    layout: ParallelLayout = DATA_PARALLEL_ONLY

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks: all processes, divided by those of one model replica."""
        return self.size // self.layout.model_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """The data-parallel rank of this process; equal for all processes of one replica."""
        return self._data_parallel_rank_of(self.rank)

    @property
    def is_primary(self) -> bool:
        """True on the primary rank of each model replica, which writes records and metrics.

        Rank 0 is always a primary rank.
        """
        rank, step = self.rank, self._num_same_data
        return rank % step == 0 and rank < step * self.data_parallel_size

    @property
    def primary_ranks(self) -> list[int]:
        """The primary ranks by data-parallel rank."""
        return [rank * self._num_same_data for rank in range(self.data_parallel_size)]

    @property
    def data_parallel_speeds(self) -> tuple[float, ...]:
        """Relative speed by data-parallel rank: the speed of its slowest process."""
        speeds = [float("inf")] * self.data_parallel_size
        for rank, speed in enumerate(self.speed_weights or (1.0,) * self.size):
            data_rank = self._data_parallel_rank_of(rank)
            speeds[data_rank] = min(speeds[data_rank], speed)
        return tuple(speeds)

    @property
    def _num_same_data(self) -> int:
        """Number of consecutive ranks with the same data: those of one tensor- and context-parallel
        group."""
        return self.layout.tp * self.layout.cp

    def _data_parallel_rank_of(self, rank: int) -> int:
        return rank // self._num_same_data % self.data_parallel_size

    def shard(self, count: int) -> list[int]:
        """Return the indices of the items that this data-parallel rank processes, among ``count``
        items of equal cost."""
        if self.speed_weights is None:
            return list(range(self.data_parallel_rank, count, self.data_parallel_size))
        return balance_costs([1] * count, self.data_parallel_speeds)[self.data_parallel_rank]

    @classmethod
    def from_environment(cls, channels: Path | None = None) -> ProcessGroupInfo:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; one process if they are not set.

        ``RLINF_SHARES`` contains the relative speeds of all processes, separated by commas, and
        ``RLINF_LAYOUT`` the model-parallel layout.

        Args:
            channels: the run's folder for channels, which will contain the rendezvous file; None:
                outside of runs.

        Raises:
            ConfigError: a variable is invalid.
        """
        try:
            values = [int(os.environ.get(name, default)) for name, default in _RANK_DEFAULTS]
            rank, size, local_rank = values
            text = os.environ.get(SPEED_WEIGHTS_VARIABLE)
            speeds = tuple(float(part) for part in text.split(",")) if text else None
            rendezvous = (
                None
                if channels is None
                else channels / f"group-{os.environ.get(GROUP_VARIABLE)}.json"
            )
            layout = ParallelLayout.parse(os.environ.get(LAYOUT_VARIABLE, ""))
            info = cls(rank, size, local_rank, speeds, rendezvous, layout)
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_RANK, {SPEED_WEIGHTS_VARIABLE} must be numbers: {error}"
            ) from None
        if not 0 <= rank < size:
            raise ConfigError(f"RANK {rank} is not below WORLD_SIZE {size}")
        if speeds is not None and (len(speeds) != size or not min(speeds) > 0):
            raise ConfigError(
                f"{SPEED_WEIGHTS_VARIABLE}: {text} gives no positive speed to each of {size} "
                "processes"
            )
        layout.check(size, LAYOUT_VARIABLE)
        if channels is not None and size > 1 and not os.environ.get(GROUP_VARIABLE):
            raise ConfigError(
                f"WORLD_SIZE is {size} but {GROUP_VARIABLE} is not set: the processes of a run are "
                "started by its launchers, which set the name of their group"
            )
        return info

    def init_process_group(self, device_type: str, timeout_s: float = 600) -> None:
        """Initialise the default process group (NCCL on GPUs, Gloo on CPUs) unless it exists.

        Raises:
            StageError: a process did not join in time, or a library in this process has
                initialised a group of another size.
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
            # NCCL's monitor would query the store each second, in a thread that outlives Python.
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
            # By default Gloo resolves the host name, which is often the loopback address.
            if interface := interface_towards(address):
                os.environ.setdefault(GLOO_INTERFACE_VARIABLE, interface)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
        )


_RANK_DEFAULTS = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
"""Environment variables with their values for a single process."""
