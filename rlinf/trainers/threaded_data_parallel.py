"""Data parallelism over the threads of one process: each computes its own micro-batches.

A small model gains nothing from splitting each matmul over threads, because waking the threads
takes as long as the matmul. Here, each thread computes whole micro-batches, on a replica of the
module that shares the weights and has its own gradients. torch releases the GIL meanwhile.
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
    """``count`` threads, each with a replica of a policy. A count of 1 uses the caller's thread."""

    def __init__(self, policy: Policy, count: int) -> None:
        mkl_warmup.warm_up()
        self.replicas = [policy, *(_twin(policy) for _ in range(count - 1))]
        self._executor = (
            ThreadPoolExecutor(count, "batches", torch.set_num_threads, (1,)) if count > 1 else None
        )

    def __len__(self) -> int:
        return len(self.replicas)

    def map(self, work: Callable[[Policy, A], R], parts: Sequence[A]) -> list[R]:
        """Compute ``work(policy, part)`` in all threads; return the results in order."""
        if self._executor is None:
            return [work(self.replicas[0], parts[0])]
        futures = [
            self._executor.submit(work, policy, part)
            for policy, part in zip(self.replicas, parts, strict=True)
        ]
        # Wait for all threads even after an error: none may overlap with later work.
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        if self._executor is not None:
            self._executor.shutdown()

    def reduce_gradients(self) -> None:
        """Add the gradients of the other replicas to the first one's, always in the same order."""
        modules = [policy.module for policy in self.replicas]
        for other in modules[1:]:
            for parameter, copied in zip(modules[0].parameters(), other.parameters(), strict=True):
                if copied.grad is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = copied.grad
                else:
                    parameter.grad.add_(copied.grad)
                copied.grad = None


def _twin(policy: Policy) -> Policy:
    """Return a policy whose module shares weights and buffers with the original."""
    twin = copy.copy(policy)
    twin.module = copy.deepcopy(policy.module)
    module, other = policy.module, twin.module
    for parameter, copied in zip(module.parameters(), other.parameters(), strict=True):
        copied.data = parameter.data
    for submodule, copied_submodule in zip(module.modules(), other.modules(), strict=True):
        _share_buffers(submodule, copied_submodule)
    return twin


def _share_buffers(module: nn.Module, twin: nn.Module) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        twin._buffers[name] = buffer
