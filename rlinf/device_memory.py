"""What is on the device, and what waits in the host's memory until it is needed again.

Stages that take turns on one device share its memory: the weights an engine generates with; the
weights, gradients and optimizer state of a trainer; the weights of a reference. Before a stage
computes, what it needs comes back; what was needed longest ago goes out, no more of it than must.

A holder moves its own memory, by whatever means it has: an engine's server sleeps and wakes, say.
Objects that have tensors inherit :class:`OffloadableTensors`. Nothing here says when a stage
computes: call it in the stage's turn.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn

from rlinf.errors import ConfigError

M = TypeVar("M", bound=nn.Module)
RESERVED_FRACTION = 0.4
"""Share of a GPU that is left to what stages compute with, where no budget is given: activations,
cached keys and values, gathered parameters."""
GIB = 1 << 30
SpanTimer = Callable[[str], AbstractContextManager[Any]]
"""Times what happens inside, under a name."""


class MemorySize(NamedTuple):
    """Bytes of a group."""

    on_device: int
    """On the device."""
    on_host: int
    """In the host's memory, and on the device once the group is needed."""
    to_allocate: int
    """That computing with the group will take."""


class Offloadable(Protocol):
    """Has memory on a device between its calls, in groups that are needed together.

    Groups have nothing in common. What has been asked to leave comes back as it was.
    """

    device: torch.device

    def group_sizes(self) -> Mapping[str, MemorySize]:
        """Its groups."""

    def offload(self, group: str, min_bytes: int) -> int:
        """Free so many bytes of a group on the device, or all it has; returns how many."""

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        """Bring back what left of some groups.

        Args:
            filled: false: they are about to be overwritten, so that their bytes need not come.
        """


class DeviceMemoryManager:
    """Moves the groups of holders between a device and the host; of each process one.

    It learns of a holder when that is first needed, and forgets those that are gone.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        """
        Args:
            device: holders elsewhere neither count nor move.
            budget_bytes: bytes that may stay on it. None: on a GPU all but
                :data:`RESERVED_FRACTION` of its memory, on a CPU everything.
        """
        self._device, self._budget = device, budget_bytes
        self._limit = _room(device) if budget_bytes is None else budget_bytes
        self._clock = itertools.count(1)
        self._needed: WeakKeyDictionary[Offloadable, dict[str, int]] = WeakKeyDictionary()
        """When each group was last needed."""

    @torch.no_grad()
    def acquire(
        self,
        owner: Offloadable,
        *groups: str,
        copy_data: bool = True,
        span: SpanTimer = nullcontext,
    ) -> None:
        """Have groups of a holder on the device, and room for what they will grow by.

        Args:
            groups: all it has, if none is named.
            filled: false: they are about to be overwritten, so that their bytes need not come.
            span: times ``offload`` and ``onload``, where something moves.

        Raises:
            ConfigError: they alone are larger than the budget; nothing has moved.
        """
        if self._limit is None or owner.device != self._device:
            return
        state = owner.group_sizes()
        groups = groups or tuple(state)
        sizes = {group: sum(state[group]) for group in groups}
        size = sum(sizes.values())
        if self._budget is not None and size > self._budget:
            parts = ", ".join(f"{group} {part / GIB:.3g}" for group, part in sizes.items())
            raise ConfigError(
                f"device_memory_gib: {self._budget / GIB:.3g} GiB are too few: "
                f"{type(owner).__name__} needs {size / GIB:.3g} GiB at once ({parts}); "
                "raise it, or let more processes share the model"
            )
        now = next(self._clock)
        self._needed.setdefault(owner, {}).update(dict.fromkeys(groups, now))
        self._make_room(size - self._limit, {(owner, group) for group in groups}, span)
        if any(state[group].on_host for group in groups):
            with span("onload"):
                owner.onload(groups, copy_data=copy_data)

    @torch.no_grad()
    def offload_all(self, *, span: SpanTimer = nullcontext) -> None:
        """Move everything out, where there is a limit: what comes next is of unknown size."""
        if self._limit is not None:
            self._make_room(sys.maxsize, set(), span)

    def _make_room(
        self, excess: int, wanted: set[tuple[Offloadable, str]], span: SpanTimer
    ) -> None:
        """Move out what was needed longest ago, so that ``wanted`` and the rest are in the limit.

        Args:
            excess: by how many bytes ``wanted`` alone exceeds it; negative: what is left.
        """
        there = [
            (needed.get(group, 0), holder, group, size.on_device)
            for holder, needed in self._needed.items()
            for group, size in holder.group_sizes().items()
            if size.on_device and (holder, group) not in wanted
        ]
        excess += sum(here for *_, here in there)
        if excess <= 0 or not there:
            return
        with span("offload"):
            for _, holder, group, _ in sorted(there, key=lambda entry: entry[0]):
                if excess <= 0:
                    break
                excess -= holder.offload(group, excess)


class OffloadableTensors:
    """A holder of tensors.

    Storages move, not tensors: one that is emptied and filled again keeps every view of it as it
    was, tied weights, shards of FSDP2 (which does the same with what it gathers), the weights that
    lanes share and the groups of an optimizer.
    """

    device: torch.device

    def tensor_groups(self) -> Mapping[str, Sequence[Tensor]]:
        """Its tensors by group; those on other devices, or mapped from a file, do not count.

        One on the ``meta`` device stands for one of that size which computing with its group will
        make.
        """
        raise NotImplementedError

    def group_sizes(self) -> dict[str, MemorySize]:
        state = self.tensor_groups()
        storages = {group: self._storages(tensors) for group, tensors in state.items()}
        # Gradients, say, may be dropped while they are away.
        known = {storage for group in storages.values() for storage in group}
        away = self._away
        for storage in [storage for storage in away if storage not in known]:
            del away[storage]
        return {
            group: MemorySize(
                sum(storage.nbytes() for storage in storages[group]),
                sum(away[storage].nbytes for storage in storages[group] if storage in away),
                sum(tensor.nbytes for tensor in tensors if tensor.is_meta),
            )
            for group, tensors in state.items()
        }

    @torch.no_grad()
    def offload(self, group: str, min_bytes: int) -> int:
        copies: dict[UntypedStorage, Tensor] = {}
        for storage in self._storages(self.tensor_groups()[group]):
            if sum(host.nbytes for host in copies.values()) >= min_bytes:
                break
            if storage not in self._away and storage.nbytes():
                copies[storage] = self._to_host(storage)
        self._synchronize()
        for storage, host in copies.items():
            self._away[storage] = host
            storage.resize_(0)
        return sum(host.nbytes for host in copies.values())

    @torch.no_grad()
    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        state, away = self.tensor_groups(), self._away
        wanted = self._storages(itertools.chain.from_iterable(state[group] for group in groups))
        storages = [storage for storage in wanted if storage in away]
        for storage in storages:
            storage.resize_(away[storage].nbytes)
            if copy_data:
                _bytes(storage).copy_(away[storage], non_blocking=True)
        self._synchronize()
        for storage in storages:
            del away[storage]

    def drop_host_copies(self) -> None:
        """Free what waits in the host's memory: its tensors are gone, or are no longer of use."""
        self._away.clear()

    @property
    def _away(self) -> dict[UntypedStorage, Tensor]:
        """Emptied storages and their bytes."""
        found: dict[UntypedStorage, Tensor] = self.__dict__.setdefault("_moved", {})
        return found

    def _storages(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Of the tensors on the device, each once; what is mapped from a file is not its memory."""
        found = (t.untyped_storage() for t in tensors if t.device == self.device)
        return list(dict.fromkeys(storage for storage in found if storage.resizable()))

    def _to_host(self, storage: UntypedStorage) -> Tensor:
        # Pinned memory: copies run at the speed of the bus. torch keeps it for the next ones.
        host = torch.empty(
            storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        )
        return host.copy_(_bytes(storage), non_blocking=True)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def move_to_device(module: M, device: torch.device) -> M:
    """The module on a device, in memory of its own.

    Weights that were read on a CPU may still be mapped from their file, and cannot move then.
    """
    module.to(device)
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return module


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers to a device, of a module whose parameters have no memory yet."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)


def allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Give those parameters memory that have none; what is in it is to be written.

    As ``to_empty``, which would make several of a parameter that several modules have.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, own in part._parameters.items():
            if own is not None and own.is_meta:
                if own not in allocated:
                    empty = torch.empty_like(own, device=device)
                    allocated[own] = nn.Parameter(empty, requires_grad=own.requires_grad)
                part._parameters[name] = allocated[own]


def _room(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int((1 - RESERVED_FRACTION) * torch.cuda.get_device_properties(device).total_memory)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
