"""Data parallelism over the threads of one process: each thread computes micro-batches of its own.

A small model gains nothing from splitting each matrix product over threads, because waking them
costs as much as the product. Here, each thread computes whole micro-batches instead, on a replica
of the module that shares the weights and has its own gradients. torch releases Python's lock during
the work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import nn

from rlinf import mkl_warmup
from rlinf.models.base import Policy

A = TypeVar("A")
R = TypeVar("R")


class ThreadedDataParallel:
    """``count`` threads, each with its own replica of a policy. With one thread, the caller
    computes itself."""

    def __init__(self, policy: Policy, count: int) -> None:
        mkl_warmup.warm_up()
        self.replicas = [policy, *(_twin(policy) for _ in range(count - 1))]
        self._threads = (
            ThreadPoolExecutor(count, "lane", torch.set_num_threads, (1,)) if count > 1 else None
        )

    def __len__(self) -> int:
        return len(self.replicas)

    def map(self, work: Callable[[Policy, A], R], parts: Sequence[A]) -> list[R]:
        """Return ``work(policy, part)`` of each thread's part, computed concurrently, in the order
        of the threads."""
        if self._threads is None:
            return [work(self.replicas[0], parts[0])]
        futures = [
            self._threads.submit(work, policy, part)
            for policy, part in zip(self.replicas, parts, strict=True)
        ]
        # After an error, too, no thread may continue beside later work.
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def reduce_gradients(self) -> None:
        """Add the gradients of the replicas to the policy's own, always in the same order."""
        for twin in self.replicas[1:]:
            own = self.replicas[0].module.parameters()
            for parameter, other in zip(own, twin.module.parameters(), strict=True):
                if other.grad is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = other.grad
                else:
                    parameter.grad.add_(other.grad)
                other.grad = None


def _twin(policy: Policy) -> Policy:
    """Return a policy whose module shares weights and buffers with the original."""
    twin = copy.copy(policy)
    twin.module = copy.deepcopy(policy.module)
    for own, other in zip(policy.module.parameters(), twin.module.parameters(), strict=True):
        other.data = own.data
    for mine, its in zip(policy.module.modules(), twin.module.modules(), strict=True):
        _share_buffers(mine, its)
    return twin


def _share_buffers(module: nn.Module, twin: nn.Module) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        twin._buffers[name] = buffer
