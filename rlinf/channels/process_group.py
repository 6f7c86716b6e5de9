"""The processes of one stage: torchrun-style variables and the process group made of them."""

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
"""Names the processes that were started together; no others ever have this name."""
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


class ParallelLayout(Section):
    """How processes share one copy of a model; what is left over is data parallel.

    Neighbouring ranks are tensor parallel, then context parallel, then data parallel, then pipeline
    parallel, as Megatron-Core orders them by default.
    """

    tp: PositiveInt = 1
    """Processes that share each matrix (tensor parallel)."""
    pp: PositiveInt = 1
    """Groups of processes that have layers of their own (pipeline parallel)."""
    cp: PositiveInt = 1
    """Processes that share each sequence (context parallel)."""
    ep: PositiveInt = 1
    """Processes, of those with different data or parts of a sequence, that share the experts of a
    mixture (expert parallel)."""

    @property
    def model_parallel_size(self) -> int:
        """Processes of one copy of the model."""
        return self.tp * self.pp * self.cp

    def check(self, size: int, where: str) -> None:
        """See that so many processes can be laid out.

        Raises:
            ConfigError: they cannot.
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
        """Read what ``str`` gives: ``tp=2,pp=4``.

        Raises:
            ConfigError: it is none.
        """
        pairs = (part.partition("=") for part in filter(None, text.split(",")))
        values = {name: int(text) if text.isdigit() else text for name, _, text in pairs}
        return validate(cls, values, LAYOUT_VARIABLE)

    def __str__(self) -> str:
        return ",".join(f"{name}={count}" for name, count in self.parallel_dims().items())

    def parallel_dims(self) -> dict[str, int]:
        """The ways in which it splits something, and over how many."""
        return {name: count for name, count in self if count > 1}


DATA_PARALLEL_ONLY = ParallelLayout()
"""Every process has a copy of the model, or a shard of it that is gathered."""


@dataclass(frozen=True)
class ProcessGroupInfo:
    """Which process of how many this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    speed_weights: tuple[float, ...] | None = None
    """Relative speeds of the processes; None: all alike."""
    rendezvous_file: Path | None = None
    """File of a run by which they find each other (:mod:`rlinf.channels.rendezvous`).

    None: where torch's ``env://`` says, which is open to strangers and for use outside of runs.
    """
    layout: ParallelLayout = DATA_PARALLEL_ONLY

    @property
    def data_parallel_size(self) -> int:
        """Into how many shares data is cut: copies of the model, or processes where each has one or
        gathers it."""
        return self.size // self.layout.model_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the data is this process's; those of one copy have the same."""
        return self._share(self.rank)

    @property
    def is_primary(self) -> bool:
        """Whether records and metrics of its share are this process's to write: the first of its
        copy of the model. Rank 0 always does."""
        return self.rank % self._inner == 0 and self.rank < self._inner * self.data_parallel_size

    @property
    def primary_ranks(self) -> list[int]:
        """The ranks that speak, by data rank."""
        return [share * self._inner for share in range(self.data_parallel_size)]

    @property
    def data_parallel_speeds(self) -> tuple[float, ...]:
        """Relative speed of each share of the data: of the slowest process that computes it."""
        speeds = [float("inf")] * self.data_parallel_size
        for rank, speed in enumerate(self.speed_weights or (1.0,) * self.size):
            share = self._share(rank)
            speeds[share] = min(speeds[share], speed)
        return tuple(speeds)

    @property
    def _inner(self) -> int:
        """Neighbouring ranks with the same data."""
        return self.layout.tp * self.layout.cp

    def _share(self, rank: int) -> int:
        return rank // self._inner % self.data_parallel_size

    def shard(self, count: int) -> list[int]:
        """Which of ``count`` like pieces of work are this process's own, or its copy's."""
        if self.speed_weights is None:
            return list(range(self.data_parallel_rank, count, self.data_parallel_size))
        return balance_costs([1] * count, self.data_parallel_speeds)[self.data_parallel_rank]

    @classmethod
    def from_environment(cls, channels: Path | None = None) -> ProcessGroupInfo:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; one process when they are not set.

        ``RLINF_SHARES`` holds the relative speeds of all processes, divided by commas, and
        ``RLINF_LAYOUT`` how they share a model.

        Args:
            channels: the run's folder for channels, where those of ``RLINF_GROUP`` meet.

        Raises:
            ConfigError: they are set but make no sense.
        """
        try:
            rank, size, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
            text = os.environ.get(SPEED_WEIGHTS_VARIABLE)
            shares = tuple(float(part) for part in text.split(",")) if text else None
            meeting = (
                None
                if channels is None
                else channels / f"group-{os.environ.get(GROUP_VARIABLE)}.json"
            )
            layout = ParallelLayout.parse(os.environ.get(LAYOUT_VARIABLE, ""))
            world = cls(rank, size, local, shares, meeting, layout)
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
        """Form the default process group (NCCL on GPUs, Gloo on CPUs) unless it exists.

        Raises:
            StageError: not all processes came to the meeting in time, or what this process computes
                with has formed one of other processes.
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
