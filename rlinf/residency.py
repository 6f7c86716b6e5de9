"""What is on the device, and what waits in the host's memory until it is needed again.

Stages that take turns on one device share its memory: the weights an engine generates with; the
weights, gradients and optimizer state of a trainer; the weights of a reference. Before a stage
computes, what it needs comes back; what was needed longest ago goes out, no more of it than must.

Storages move, not tensors: one that is emptied and filled again keeps every view of it as it was,
tied weights, shards of FSDP2 (which does the same with what it gathers), the weights that lanes
share and the groups of an optimizer. Nothing here says who computes when: call it in one's turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn

from rlinf.errors import ConfigError

M = TypeVar("M", bound=nn.Module)
RESERVE = 0.4
"""Share of a GPU that is left to what stages compute with, where no budget is given: activations,
cached keys and values, gathered parameters."""
GIB = 1 << 30
Span = Callable[[str], AbstractContextManager[Any]]
"""Times what happens inside, under a name."""


class Holder(Protocol):
    """Has tensors on the device between its calls."""

    def resident(self) -> Mapping[str, Sequence[Tensor]]:
        """They, in groups that are needed together.

        A tensor on the ``meta`` device stands for one of that size which computing with its group
        will make.
        """
        ...


class Residency:
    """Moves the groups of holders between a device and the host; of each process one.

    It learns of a holder when that is first needed, and forgets those that are gone.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        """
        Args:
            device: tensors elsewhere neither count nor move.
            budget_bytes: what may stay on it; None: on a GPU all but :data:`RESERVE` of it, on a
                CPU everything.
        """
        self._device, self._budget = device, budget_bytes
        self._limit = _room(device) if budget_bytes is None else budget_bytes
        self._clock = itertools.count(1)
        self._needed: WeakKeyDictionary[Holder, dict[str, int]] = WeakKeyDictionary()
        """When each group was last needed."""
        self._out: dict[UntypedStorage, Tensor] = {}
        """Emptied storages and their bytes."""

    @torch.no_grad()
    def need(
        self, holder: Holder, *groups: str, filled: bool = True, span: Span = nullcontext
    ) -> None:
        """Have groups of a holder on the device, and room for what they will grow by.

        Args:
            groups: all it has, if none is named.
            filled: false: they are about to be overwritten, so that their bytes need not come.
            span: times ``offload`` and ``onload``, where something moves.

        Raises:
            ConfigError: they alone are larger than the budget; nothing has moved.
        """
        if self._limit is None:
            return
        state = holder.resident()
        groups = groups or tuple(state)
        sizes = {group: self._size(state[group]) for group in groups}
        size = sum(sizes.values())
        if self._budget is not None and size > self._budget:
            parts = ", ".join(f"{group} {part / GIB:.3g}" for group, part in sizes.items())
            raise ConfigError(
                f"device_memory_gib: {self._budget / GIB:.3g} GiB are too few: "
                f"{type(holder).__name__} needs {size / GIB:.3g} GiB at once ({parts}); "
                "raise it, or let more processes share the model"
            )
        now = next(self._clock)
        self._needed.setdefault(holder, {}).update(dict.fromkeys(groups, now))
        wanted = self._storages(itertools.chain.from_iterable(state[group] for group in groups))
        self._move_out(self._oldest(size - self._limit, wanted), span)
        self._move_in([storage for storage in wanted if storage in self._out], filled, span)

    @torch.no_grad()
    def clear(self, *, span: Span = nullcontext) -> None:
        """Move everything out, where there is a limit: what comes next is of unknown size."""
        if self._limit is not None:
            self._move_out(list(self._present()), span)

    def _oldest(self, excess: int, wanted: Iterable[UntypedStorage]) -> list[UntypedStorage]:
        """Storages that must go so that ``wanted`` and the rest are within the limit.

        Args:
            excess: by how many bytes ``wanted`` alone exceeds it; negative: what is left.
        """
        present = self._present()
        for storage in wanted:
            present.pop(storage, None)
        excess += sum(storage.nbytes() for storage in present)
        leaving = []
        for storage in sorted(present, key=lambda storage: present[storage]):
            if excess <= 0:
                break
            leaving.append(storage)
            excess -= storage.nbytes()
        return leaving

    def _present(self) -> dict[UntypedStorage, int]:
        """Storages on the device and when they were last needed; forgets those nobody has."""
        known: dict[UntypedStorage, int] = {}
        for holder, needed in self._needed.items():
            for group, tensors in holder.resident().items():
                for storage in self._storages(tensors):
                    known[storage] = max(known.get(storage, 0), needed.get(group, 0))
        self._out = {storage: host for storage, host in self._out.items() if storage in known}
        return {storage: when for storage, when in known.items() if storage not in self._out}

    def _storages(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Of the tensors on the device, each once; what is mapped from a file is not its memory."""
        found = (t.untyped_storage() for t in tensors if t.device == self._device)
        return list(dict.fromkeys(storage for storage in found if storage.resizable()))

    def _size(self, tensors: Sequence[Tensor]) -> int:
        """Bytes on the device, now or once they are there."""
        to_come = sum(tensor.nbytes for tensor in tensors if tensor.is_meta)
        storages = self._storages(tensors)
        out = sum(self._out[storage].nbytes for storage in storages if storage in self._out)
        return to_come + out + sum(storage.nbytes() for storage in storages)

    def _move_out(self, storages: Sequence[UntypedStorage], span: Span) -> None:
        if not storages:
            return
        with span("offload"):
            copies = {storage: self._to_host(storage) for storage in storages}
            self._synchronise()
            for storage, host in copies.items():
                self._out[storage] = host
                storage.resize_(0)

    def _move_in(self, storages: Sequence[UntypedStorage], filled: bool, span: Span) -> None:
        if not storages:
            return
        with span("onload"):
            for storage in storages:
                storage.resize_(self._out[storage].nbytes)
                if filled:
                    _bytes(storage).copy_(self._out[storage], non_blocking=True)
            self._synchronise()
            for storage in storages:
                del self._out[storage]

    def _to_host(self, storage: UntypedStorage) -> Tensor:
        # Pinned memory: copies run at the speed of the bus. torch keeps it for the next ones.
        host = torch.empty(
            storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        return host.copy_(_bytes(storage), non_blocking=True)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def placed(module: M, device: torch.device) -> M:
    """The module on a device, in memory of its own.

    Weights that were read on a CPU may still be mapped from their file, and cannot move then.
    """
    module.to(device)
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return module


def _room(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int((1 - RESERVE) * torch.cuda.get_device_properties(device).total_memory)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
