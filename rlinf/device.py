"""The device of a process: the GPU of its rank, or the CPU."""

from __future__ import annotations

import torch

from rlinf.trainers.world import World


def local_device(name: str) -> torch.device:
    """The device that a setting means for this process.

    Args:
        name: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` (the GPU of this rank's number
            among those the process sees), or one GPU such as ``cuda:1``.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda" or ":" in name:
        return device
    # A launcher may show each rank all GPUs of the node, or its own alone.
    seen = max(1, torch.cuda.device_count())
    return torch.device("cuda", World.from_environment().local_rank % seen)
