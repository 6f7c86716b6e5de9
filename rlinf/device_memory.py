"""Device memory: which tensors are on the device, and which are offloaded to host memory.

Stages that take turns on one device share its memory: the weights of an engine; the weights,
gradients and optimizer state of a trainer; the weights of a reference. Each object divides its
memory into groups of tensors that are used together. Before a stage computes, its groups are loaded
back. The least recently used other groups are offloaded, no more than necessary.

Each object moves its own memory, by its own means: an engine's server sleeps and wakes, for
example. Objects that have tensors inherit :class:`OffloadableTensors`. This module does not know
when a stage computes: call :meth:`DeviceMemoryManager.acquire` in the stage's turn.
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
"""Fraction of a GPU's memory that is reserved for computation if no budget is set: activations,
cached keys and values, gathered parameters."""
GIB = 1 << 30
SpanTimer = Callable[[str], AbstractContextManager[Any]]
"""Returns a context manager that records its duration under a name."""


class MemorySize(NamedTuple):
    """Bytes of a group."""

    on_device: int
    """On the device."""
    on_host: int
    """Offloaded to host memory; loaded back when the group is next used."""
    to_allocate: int
    """Additional bytes that computing with the group will allocate."""


class Offloadable(Protocol):
    """An object whose device memory can be offloaded between calls, group by group.

    Groups do not overlap. Memory that was offloaded is loaded back unchanged.
    """

    device: torch.device

    def group_sizes(self) -> Mapping[str, MemorySize]:
        """Return the sizes by group."""

    def offload(self, group: str, min_bytes: int) -> int:
        """Offload at least ``min_bytes`` of a group, or all of it; return the freed bytes."""

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        """Load offloaded memory of some groups back.

        Args:
            copy_data: False if the groups are about to be overwritten, so that no bytes need
                copying.
        """


class DeviceMemoryManager:
    """Moves groups of :class:`Offloadable` objects between a device and the host; one per process.

    The first :meth:`acquire` registers an object. Deleted objects are forgotten.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        """
        Args:
            device: objects on other devices neither count nor move.
            budget_bytes: bytes that may stay on the device. None: on a GPU all but
                :data:`RESERVED_FRACTION` of its memory, on a CPU everything.
        """
        if str(device) == "cuda":  # the devices of tensors have an index
            device = torch.device("cuda", torch.cuda.current_device())
        self._device, self._budget = device, budget_bytes
        self._limit = _default_limit(device) if budget_bytes is None else budget_bytes
        """Bytes that may stay on the device; None: nothing is offloaded."""
        self._clock = itertools.count(1)
        self._last_used: WeakKeyDictionary[Offloadable, dict[str, int]] = WeakKeyDictionary()
        """When each group was last used, as a count of acquisitions."""

    @torch.no_grad()
    def acquire(
        self,
        owner: Offloadable,
        *groups: str,
        copy_data: bool = True,
        span: SpanTimer = nullcontext,
    ) -> None:
        """Load groups of an object on the device, and make room for what they will allocate.

        The object's device becomes the current one of this thread.

        Args:
            owner: the object.
            groups: names of groups; none: all groups of the object.
            copy_data: as for :meth:`Offloadable.onload`.
            span: times ``offload`` and ``onload`` when memory moves.

        Raises:
            ConfigError: these groups alone exceed the budget; nothing has moved.
        """
        use_device(owner.device)
        if self._limit is None or owner.device != self._device:
            return
        sizes_by_group = owner.group_sizes()
        groups = groups or tuple(sizes_by_group)
        group_bytes = {group: sum(sizes_by_group[group]) for group in groups}
        total = sum(group_bytes.values())
        if self._budget is not None and total > self._budget:
            details = ", ".join(f"{group} {size / GIB:.3g}" for group, size in group_bytes.items())
            raise ConfigError(
                f"device_memory_gib: {self._budget / GIB:.3g} GiB is too little: "
                f"{type(owner).__name__} needs {total / GIB:.3g} GiB at once ({details}); "
                "raise it, or shard the model over more processes"
            )
        now = next(self._clock)
        self._last_used.setdefault(owner, {}).update(dict.fromkeys(groups, now))
        self._make_room(total - self._limit, {(owner, group) for group in groups}, span)
        if any(sizes_by_group[group].on_host for group in groups):
            with span("onload"):
                owner.onload(groups, copy_data=copy_data)

    @torch.no_grad()
    def offload_all(self, *, span: SpanTimer = nullcontext) -> None:
        """Offload everything if there is a limit, before work whose memory needs are unknown."""
        if self._limit is not None:
            self._make_room(sys.maxsize, set(), span)

    def _make_room(
        self, excess: int, requested: set[tuple[Offloadable, str]], span: SpanTimer
    ) -> None:
        """Offload the least recently used groups until ``requested`` and the rest fit the limit.

        Args:
            excess: size of ``requested`` minus the limit, bytes.
        """
        candidates = [
            (last_used.get(group, 0), owner, group, size.on_device)
            for owner, last_used in self._last_used.items()
            for group, size in owner.group_sizes().items()
            if size.on_device and (owner, group) not in requested
        ]
        excess += sum(on_device for *_, on_device in candidates)
        if excess <= 0 or not candidates:
            return
        with span("offload"):
            for _, owner, group, _ in sorted(candidates, key=lambda entry: entry[0]):
                if excess <= 0:
                    break
                excess -= owner.offload(group, excess)
            if self._device.type == "cuda":
                # torch keeps freed memory, which an engine in another process may need.
                torch.cuda.empty_cache()


class OffloadableTensors:
    """Base of objects with offloadable tensors.

    Storages move, not tensors. A storage that is emptied and filled again keeps all of its views
    valid: tied weights, shards of FSDP2 (which does the same with gathered parameters), shared
    weights of data parallel threads, and the groups of an optimizer.
    """

    device: torch.device

    def tensor_groups(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the tensors by group; those on other devices, or memory-mapped, do not count.

        A ``meta`` tensor stands for memory of its size that computing with the group will allocate.
        """
        raise NotImplementedError

    def group_sizes(self) -> dict[str, MemorySize]:
        tensors_by_group = self.tensor_groups()
        storages = {group: self._storages(tensors) for group, tensors in tensors_by_group.items()}
        # An offloaded tensor, such as a gradient, may be deleted: drop its host copy.
        current = {storage for group in storages.values() for storage in group}
        host_copies = self._host_copies
        for storage in [storage for storage in host_copies if storage not in current]:
            del host_copies[storage]
        return {
            group: MemorySize(
                sum(storage.nbytes() for storage in storages[group]),
                sum(host_copies[s].nbytes for s in storages[group] if s in host_copies),
                sum(tensor.nbytes for tensor in tensors if tensor.is_meta),
            )
            for group, tensors in tensors_by_group.items()
        }

    @torch.no_grad()
    def offload(self, group: str, min_bytes: int) -> int:
        copies: dict[UntypedStorage, Tensor] = {}
        for storage in self._storages(self.tensor_groups()[group]):
            if sum(copy.nbytes for copy in copies.values()) >= min_bytes:
                break
            if storage not in self._host_copies and storage.nbytes():
                copies[storage] = start_copy_to_host(_bytes(storage))
        synchronize(self.device)
        for storage, copy in copies.items():
            self._host_copies[storage] = copy
            storage.resize_(0)
        return sum(copy.nbytes for copy in copies.values())

    @torch.no_grad()
    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        all_groups, host_copies = self.tensor_groups(), self._host_copies
        tensors = itertools.chain.from_iterable(all_groups[group] for group in groups)
        storages = [storage for storage in self._storages(tensors) if storage in host_copies]
        for storage in storages:
            storage.resize_(host_copies[storage].nbytes)
            if copy_data:
                _bytes(storage).copy_(host_copies[storage], non_blocking=True)
        synchronize(self.device)
        for storage in storages:
            del host_copies[storage]

    def drop_host_copies(self) -> None:
        """Free the host copies, because their tensors are deleted or about to be overwritten."""
        self._host_copies.clear()

    @property
    def _host_copies(self) -> dict[UntypedStorage, Tensor]:
        """Emptied storages and their host copies."""
        host_copies: dict[UntypedStorage, Tensor] = self.__dict__.setdefault("_offloaded", {})
        return host_copies

    def _storages(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Return the distinct storages of tensors on the device, without memory-mapped ones."""
        storages = (t.untyped_storage() for t in tensors if t.device == self.device)
        return list(dict.fromkeys(storage for storage in storages if storage.resizable()))


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread, before it computes there.

    CUDA's current device belongs to a thread, and that of a new thread is GPU 0. Collectives and
    streams of FSDP2 are those of the current device, whatever device its tensors are on.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all work, including copies; a CPU has always finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to new host memory; from a GPU, the copy is complete only after a
    synchronization.

    Copies from and to pinned memory are several times as fast as others. Pages of new memory cost
    more than the copy, but torch keeps pinned memory that is freed for later copies.
    """
    on_gpu = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", pin_memory=on_gpu).copy_(
        tensor, non_blocking=on_gpu
    )


def move_to_device(module: M, device: torch.device) -> M:
    """Move a module to a device, into memory that can be offloaded.

    Weights that were read on a CPU may still be memory-mapped, which cannot be offloaded.
    """
    module.to(device)
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return module


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module whose parameters have no memory yet."""
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            submodule._buffers[name] = None if buffer is None else buffer.to(device)


def allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Allocate memory for parameters without any; its content is undefined.

    A parameter that several modules share stays shared, unlike with ``to_empty``.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in allocated:
                    memory = torch.empty_like(parameter, device=device)
                    allocated[parameter] = nn.Parameter(memory, parameter.requires_grad)
                submodule._parameters[name] = allocated[parameter]


def _default_limit(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int((1 - RESERVED_FRACTION) * torch.cuda.get_device_properties(device).total_memory)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
