"""Memory of a GPU that other processes open by its CUDA IPC handle.

CUDA hands out whole allocations of torch's caching allocator, so a handle goes with a place in one.
Torch counts the uses of what it shares, but one for each handle it gives: it cannot count readers
that come and go. They hold locks instead (``shared.py``). The one use it counts is the owner's, so
memory whose owner was lost is never used for something else while the process lives.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from rlinf.errors import TransferError

_UNCOUNTED = b"/"
"""Of torch's counters of uses, one that cannot exist: who opens a handle counts nothing down."""


@dataclass(frozen=True)
class Handle:
    """Where memory of another process is; plain data."""

    device: str
    """UUID of the GPU: numbers of GPUs differ between processes."""
    allocation: bytes
    """CUDA's handle of the allocation, as torch wraps it."""
    offset: int
    """Bytes from the start of the allocation."""
    nbytes: int

    def to_json(self) -> str:
        """The handle as text, with a checksum."""
        fields = asdict(self) | {"allocation": self.allocation.hex()}
        return json.dumps(fields | {"sum": _sum(fields)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Handle:
        """Read what :meth:`to_json` wrote.

        Raises:
            TransferError: not a handle, or a damaged one.
        """
        try:
            fields = json.loads(text)
            # A wrong place in an allocation would be seen by nobody before the GPU faults, which
            # ends all work of the process on it.
            if fields.pop("sum") != _sum(fields):
                raise ValueError("its checksum differs")
            handle = cls(**fields | {"allocation": bytes.fromhex(fields["allocation"])})
            numbers = (handle.offset, handle.nbytes)
            if not isinstance(handle.device, str) or not handle.allocation:
                raise ValueError("no GPU or allocation")
            if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers) or not numbers[1]:
                raise ValueError(f"offset and size {numbers}")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise TransferError(f"damaged handle of GPU memory ({error})") from None
        return handle

    def index(self) -> int:
        """The number its GPU has in this process.

        Raises:
            TransferError: this process does not see the GPU, or cannot use CUDA.
        """
        try:
            seen = [
                str(torch.cuda.get_device_properties(number).uuid)
                for number in range(torch.cuda.device_count())
            ]
        except RuntimeError as error:
            raise TransferError(f"CUDA cannot be used in this process ({error})") from None
        if self.device not in seen:
            raise TransferError(
                f"the weights are in memory of GPU {self.device!r}; this process sees "
                f"{', '.join(seen) or 'no GPU'}. Slurm hides the GPUs of other jobs, and with "
                "--gpus-per-task those of other tasks: give writer and reader the same GPU, or "
                'write to host memory (device="cpu")'
            )
        return seen.index(self.device)

    def open(self) -> Tensor:
        """Map the memory, uint8 ``[nbytes]``, until the last tensor in it is gone.

        The owner must keep it until then. CUDA would allow to write to it: do not.

        Raises:
            TransferError: the GPU is not to be seen here, the owner has ended, or is this process.
        """
        index = self.index()
        try:
            # No event to wait for either: who announces what the memory holds has waited.
            storage = torch.UntypedStorage._new_shared_cuda(
                index, self.allocation, self.nbytes, self.offset, _UNCOUNTED, 0, b"", False
            )
        except RuntimeError as error:
            raise TransferError(
                f"memory of GPU {self.device} cannot be opened ({error}). Its owner must be alive, "
                'and another process than this; else write to host memory (device="cpu")'
            ) from None
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Exported:
    """Memory of a GPU, ``flat`` uint8 ``[nbytes]``, that other processes open by ``handle``.

    Raises:
        TransferError: it cannot be had: no such GPU, too little memory, or an allocator that does
            not share.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        try:
            self.flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            storage = self.flat.untyped_storage()
            shared = storage._share_cuda_()  # type: ignore[no-untyped-call]
            uuid = str(torch.cuda.get_device_properties(self.flat.device).uuid)
        except (RuntimeError, AssertionError) as error:  # the latter from torch without CUDA
            raise TransferError(
                f"cannot make {nbytes} bytes of memory on {device} that can be shared ({error}); "
                "send weights another way"
            ) from None
        _, allocation, _, offset, *self._counter, _, _ = shared
        self.handle = Handle(uuid, allocation, offset, nbytes)

    def free(self) -> None:
        """Let the memory go; no other process may have it open."""
        torch.UntypedStorage._release_ipc_counter_cuda(*self._counter)
        del self.flat


def finish(device: torch.device) -> None:
    """Wait for all that was started on a GPU; on a CPU nothing is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sum(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
