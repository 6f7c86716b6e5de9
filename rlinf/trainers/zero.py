"""What of weights, moments and gradients a process has under ZeRO (Rajbhandari et al., 2020).

DeepSpeed keeps the float32 weights that are trained in flat tensors, a process's part of a group of
parameters each, and a parameter's elements lie in one of them, one after the other. Read from the
optimizers of DeepSpeed 0.19, which have no interface for the parts themselves.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Fragment:
    """A process's elements of one parameter; it may have none."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    """Of the whole."""
    flat: int
    """Which flat tensor they are in."""
    begin: int
    """Where they begin in that."""
    start: int
    """Where they begin in the parameter."""
    count: int


class Zero(ABC):
    """The memory of DeepSpeed's optimizer of one stage."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    @abstractmethod
    def flats(self) -> list[Tensor]:
        """Float32 weights."""

    @abstractmethod
    def owner(self, flat: int) -> int:
        """The group of parameters of torch's optimizer that a flat tensor belongs to."""

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """Of all parameters that are trained."""

    @abstractmethod
    def reduce(self) -> None:
        """Complete the gradient of what was accumulated; collective."""

    def gradients(self, flat: int) -> list[Tensor]:
        """The reduced gradient of a flat tensor, in pieces."""
        if self.offloads:
            return [self.flats[flat].grad]  # type: ignore[list-item]
        return list(self.optimizer.averaged_gradients[flat])

    @property
    @abstractmethod
    def offloads(self) -> bool:
        """Whether float32 weights, moments and the reduced gradient are in the host's memory."""

    @abstractmethod
    def accumulated(self) -> list[Tensor]:
        """What holds gradients between two backward passes."""

    @abstractmethod
    def discard(self) -> None:
        """Forget all gradients, those of a pass that failed too; not collective."""

    def release(self, root: nn.Module) -> None:
        """Let go of what the engine has called, once it is destroyed."""
        return None

    @abstractmethod
    def refresh(self) -> None:
        """Compute with the float32 weights as they are now; collective."""


class Zero12(Zero):
    """Of stages 1 and 2: every process has all weights to compute with."""

    @property
    def flats(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def owner(self, flat: int) -> int:
        return flat

    def fragments(self) -> Iterator[Fragment]:
        for number, group in enumerate(self.optimizer.bit16_groups):
            for parameter in group:
                shape, at = tuple(parameter.shape), parameter._hp_mapping
                if at is None:
                    yield Fragment(parameter, shape, number, 0, 0, 0)
                    continue
                there, here = at.hp_fragment_address, at.lp_fragment_address
                yield Fragment(parameter, shape, number, there.start, here.start, here.numel)

    def reduce(self) -> None:
        if self.optimizer.partition_gradients:
            self.optimizer.finalize_gradient_accumulation_boundary()
            return
        self.optimizer.set_gradient_accumulation_boundary(True)
        self.optimizer.setup_buckets()
        self.optimizer.reduce_gradients()
        self.optimizer.set_gradient_accumulation_boundary(False)

    @property
    def offloads(self) -> bool:
        return bool(self.optimizer.cpu_offload)

    def accumulated(self) -> list[Tensor]:
        zero = self.optimizer
        found = [p.grad for group in zero.bit16_groups for p in group]
        found += [p.grad_accum for group in zero.bit16_groups for p in group]
        for parts in (*zero.all_grad_tensors.values(), *zero.averaged_gradients.values()):
            found += parts or []
        return [tensor for tensor in found if tensor is not None]

    def discard(self) -> None:
        zero = self.optimizer
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        for number in range(len(zero.bit16_groups)):
            zero.averaged_gradients[number] = zero.all_grad_tensors[number] = None
        zero.params_already_reduced = [False] * len(zero.params_already_reduced)
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero._release_ipg_buffers()
        zero.micro_step_id = -1
        zero._backward_active_depth = 0
        if self.offloads:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()
            zero.accumulated_grads_in_cpu.clear()
            for flat in self.flats:
                flat.grad.zero_()  # type: ignore[union-attr]

    def refresh(self) -> None:
        self.optimizer.update_lp_params()
        for number in range(len(self.optimizer.bit16_groups)):
            self.optimizer._update_model_bit16_weights(number)


class Zero3(Zero):
    """Of stage 3: weights are gathered module by module."""

    @property
    def flats(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def owner(self, flat: int) -> int:
        return int(self.optimizer.sub_group_to_group_id[flat])

    def fragments(self) -> Iterator[Fragment]:
        zero = self.optimizer
        for parameter in (p for group in zero.fp16_groups for p in group):
            flat, begin, size = zero.grad_position[zero.get_param_id(parameter)]
            start = zero._get_param_partition_rank(parameter) * size
            count = max(0, min(size, parameter.ds_numel - start))
            yield Fragment(parameter, tuple(parameter.ds_shape), flat, begin, start, count)

    def reduce(self) -> None:
        self.optimizer.finalize_gradient_accumulation_boundary()

    @property
    def offloads(self) -> bool:
        return bool(self.optimizer.offload_optimizer)

    def accumulated(self) -> list[Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

    def discard(self) -> None:
        zero = self.optimizer
        zero.zero_grad(set_to_none=True)
        zero.params_already_reduced = dict.fromkeys(zero.params_already_reduced, False)
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        # What no loss depends on would keep the gradient of an earlier step.
        zero.grad_partitions_flat_buffer.zero_()
        zero._backward_active_depth = 0
        if self.offloads:
            zero.reset_cpu_buffers()
            zero._offload_boundary_param_ids = set()
            for flat in self.flats:
                flat.grad.zero_()  # type: ignore[union-attr]
        else:
            zero.averaged_gradients = {}

    def refresh(self) -> None:
        zero = self.optimizer
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def release(self, root: nn.Module) -> None:
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK as STACK
        from deepspeed.runtime.zero.partitioned_param_coordinator import (
            PartitionedParameterCoordinator,
        )

        # Each pass leaves its root there, and one that fails the modules it was in.
        gone = set(root.modules())
        STACK[:] = [module for module in STACK if module not in gone]
        # A cached method: the cache is the class's, and holds every engine that used it for good.
        method = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(method).nonlocals["func"].cache_clear()


def total_norm(parts: list[Tensor]) -> Tensor:
    """Euclidean norm over all processes of a gradient that each has a part of."""
    squares = nn.utils.get_total_norm(parts).square()
    torch.distributed.all_reduce(squares)
    return squares.sqrt()
