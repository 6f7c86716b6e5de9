"""Selection of the device of a process: the GPU of its rank, or the CPU."""

from __future__ import annotations

import re
from typing import Annotated

import torch
from pydantic import AfterValidator

from rlinf.channels.process_group import ProcessGroupInfo


def _device_name(name: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is None:
        raise ValueError("expected auto, cpu, cuda, or one GPU such as cuda:1")
    return name


DeviceName = Annotated[str, AfterValidator(_device_name)]
"""A device name in a configuration; see :func:`local_device`."""


def local_device(name: str) -> torch.device:
    """Return the device of this process for a configured device name.

    Args:
        name: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` (the GPU of this rank's number
            among those the process sees), or one GPU such as ``cuda:1``.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda" or ":" in name:
        return device
    # Launchers show each rank either all GPUs of the node or only its own.
    count = max(1, torch.cuda.device_count())
    return torch.device("cuda", ProcessGroupInfo.from_environment().local_rank % count)
