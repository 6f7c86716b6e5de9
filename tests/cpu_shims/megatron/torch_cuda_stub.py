"""Stub of ``torch.cuda`` for Megatron-Core's modules on machines without a GPU.

The generator is that of the CPU, the device is the CPU, and streams do nothing because calls are
synchronous. All other names are those of ``torch.cuda``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FloatTensor, HalfTensor = torch.FloatTensor, torch.HalfTensor
BFloat16Tensor = torch.BFloat16Tensor
_CPU = torch.device("cpu")


class _Generators:
    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


default_generators = _Generators()


class Stream:
    """Stub of a stream; all streams are equal."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    __hash__ = object.__hash__

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> Stream:
        """Return the stream itself as the event, because callers only wait for it."""
        return self

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


def current_stream(device: object = None) -> Stream:
    return Stream()


default_stream = current_stream


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def current_device() -> torch.device:
    return _CPU


def is_available() -> bool:
    return False


def synchronize(device: object = None) -> None:
    pass


def empty_cache() -> None:
    pass


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def get_rng_state(device: object = None) -> Tensor:
    return torch.get_rng_state()


def set_rng_state(state: Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


class random:  # stands for the module torch.cuda.random
    get_rng_state = staticmethod(get_rng_state)
    set_rng_state = staticmethod(set_rng_state)


def _lazy_call(call: Callable[[], None], **_: Any) -> None:
    call()


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)
