"""Optimizer state that waits in the host's memory, and comes to the device a part at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rlinf.sharded import is_shared, local

PART_BYTES = 256 << 20
"""Parameters whose state is on the device at once."""
HOST = torch.device("cpu")


def step(optimizer: torch.optim.Optimizer, device: torch.device, most: int = PART_BYTES) -> None:
    """An optimizer step, of some parameters after the others; their state is on the host after it.

    Of an optimizer that treats each parameter by itself, which gives the same bytes as at once.
    """
    groups = optimizer.param_groups
    every = [group["params"] for group in groups]
    try:
        for part in _parts([p for params in every for p in params], most):
            for group, params in zip(groups, every, strict=True):
                group["params"] = [p for p in params if p in part]
            move(optimizer, part, device)
            optimizer.step()
            move(optimizer, part, HOST)
    finally:
        for group, params in zip(groups, every, strict=True):
            group["params"] = params


def move(
    optimizer: torch.optim.Optimizer, parameters: set[nn.Parameter], device: torch.device
) -> None:
    """Bring the state of some parameters to a device."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for name, tensor in state.items():
            # Counts of steps are where the optimizer has them.
            if isinstance(tensor, Tensor) and tensor.dim():
                state[name] = moved(tensor, device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; one that is there already is not copied."""
    if not is_shared(tensor):
        return tensor.to(device)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local(tensor).to(device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _parts(parameters: list[nn.Parameter], most: int) -> Iterator[set[nn.Parameter]]:
    """Parameters in order, until they have ``most`` bytes; one alone may have more."""
    part, size = set[nn.Parameter](), 0
    for parameter in parameters:
        nbytes = local(parameter).nbytes
        if part and size + nbytes > most:
            yield part
            part, size = set(), 0
        part.add(parameter)
        size += nbytes
    if part:
        yield part
