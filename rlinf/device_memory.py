"""Device memory: which tensors are on the device, and which are offloaded to host memory.

Stages that take turns on one device share its memory: the weights of an engine; the weights,
gradients and optimizer state of a trainer; the weights of a reference. Before a stage computes, its
memory is loaded back. The least recently used groups are offloaded, no more than necessary.

Each object moves its own memory, by its own means: an engine's server sleeps and wakes, for
example. Objects that have tensors inherit :class:`OffloadableTensors`. Nothing here says when a
stage computes: call it in the stage's turn.
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
"""Fraction of a GPU that is left to computation if no budget is set: activations, cached keys and
values, gathered parameters."""
GIB = 1 << 30
SpanTimer = Callable[[str], AbstractContextManager[Any]]
"""Times a block under a name."""


class MemorySize(NamedTuple):
    """Bytes of a group."""

    on_device: int
    """On the device."""
    on_host: int
    """Offloaded to host memory; on the device once the group is used."""
    to_allocate: int
    """Additional bytes that computing with the group will allocate."""


class Offloadable(Protocol):
    """An object whose device memory can be offloaded between calls, in groups that are used
    together.

    Groups do not overlap. Memory that was offloaded comes back unchanged.
    """

    device: torch.device

    def group_sizes(self) -> Mapping[str, MemorySize]:
        """Return the sizes by group."""

    def offload(self, group: str, min_bytes: int) -> int:
        """Free at least ``min_bytes`` of a group on the device, or all; returns the freed bytes."""

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        """Load offloaded memory of some groups back.

        Args:
            copy_data: false if they are about to be overwritten, so that no bytes need copying.
        """


class DeviceMemoryManager:
    """Moves groups of :class:`Offloadable` objects between a device and the host; one per process.

    It learns of an object at its first :meth:`acquire`, and forgets deleted objects.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        """Set the device and its budget.

        Args:
            device: objects on other devices neither count nor move.
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
        """Load groups of an object on the device, with room for what they will allocate.

        Args:
            owner: the object.
            groups: all groups, if none is named.
            copy_data: false if they are about to be overwritten, so that no bytes need copying.
            span: times ``offload`` and ``onload`` when memory moves.

        Raises:
            ConfigError: these groups alone exceed the budget; nothing has moved.
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
        """Offload everything if there is a limit, because the next use is of unknown size."""
        if self._limit is not None:
            self._make_room(sys.maxsize, set(), span)

    def _make_room(
        self, excess: int, wanted: set[tuple[Offloadable, str]], span: SpanTimer
    ) -> None:
        """Offload the least recently used groups until ``wanted`` and the rest fit the limit.

        Args:
            excess: bytes by which ``wanted`` alone exceeds it; negative: free bytes.
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
    """Base of objects with offloadable tensors.

    Storages move, not tensors. A storage that is emptied and filled again keeps all of its views
    valid: tied weights, shards of FSDP2 (which does the same with gathered parameters), shared
    weights of data parallel threads, and the groups of an optimizer.
    """

    device: torch.device

    def tensor_groups(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the tensors by group; those on other devices, or memory-mapped, do not count.

        A tensor on the ``meta`` device stands for one of that size that computing with its group
        will allocate.
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
        """Free the host copies: their tensors are deleted, or no longer useful."""
        self._away.clear()

    @property
    def _away(self) -> dict[UntypedStorage, Tensor]:
        """Emptied storages and their host copies."""
        found: dict[UntypedStorage, Tensor] = self.__dict__.setdefault("_moved", {})
        return found

    def _storages(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Return the distinct storages of tensors on the device, without memory-mapped ones."""
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
    """Move a module to a device, into memory of its own.

    Weights that were read on a CPU may still be mapped from their file, and could not be offloaded.
    """
    module.to(device)
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return module


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module whose parameters have no memory yet."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)


def allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Allocate memory for parameters without any; its content is undefined.

    Unlike ``to_empty``, a parameter that several modules share stays one.
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
