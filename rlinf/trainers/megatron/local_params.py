"""This process's weights, moments and gradients under Megatron's data parallelism, by tensor.

Gradients are accumulated in float32 buffers of Megatron's ``DistributedDataParallel``. Without the
distributed optimizer, a process updates all its parameters, in float32. With the distributed
optimizer, each process updates an equal shard of each buffer, and the weights are gathered from
these shards. With adapters, all other parameters are frozen; they have no float32 copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlinf.trainers.megatron import hf_mapping
from rlinf.trainers.optimizer import GROUP_KEY

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Function that creates an optimizer of some of the model's parameters."""


@dataclass(frozen=True)
class ParamFragment:
    """The contiguous elements of one parameter that this process updates."""

    parameter: nn.Parameter
    main: Tensor
    """Float32 tensor of any shape with these elements, which the optimizer updates (Megatron's main
    parameter). If the parameter is frozen, the parameter itself."""
    start: int
    """Offset of the elements in the parameter."""
    num_copies: int
    """Number of processes that have the same fragment."""
    is_primary: bool
    """Whether this process, and no other one with the same fragment, writes it to checkpoints."""

    @property
    def flat(self) -> Tensor:
        return self.main.detach().view(-1)


class LocalParams:
    """The parameters of this process's part of a network, with their gradients and optimizer."""

    def __init__(
        self, inner: Any, create_optimizer: OptimizerFactory, *, distributed_optimizer: bool
    ) -> None:
        """
        Args:
            inner: Megatron's model.
            distributed_optimizer: whether moments and float32 weights are sharded over processes
                with the same weights.
        """
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
        )
        self.ddp_model = DistributedDataParallel(inner.config, settings, inner)
        self._buffers = [*self.ddp_model.buffers, *self.ddp_model.expert_parallel_buffers]
        self._buffer_bytes = [b.grad_data.untyped_storage().nbytes() for b in self._buffers]
        self._distributed_optimizers: list[Any] = []
        """Megatron's optimizers, which gather and scatter shards; empty if nothing is sharded."""
        self._has_gradients = True
        """Whether the gradient buffers have memory."""
        # By id of the parameter: the float32 tensor that is updated, and its offset.
        mains: dict[int, tuple[Tensor, int]] = {}
        if distributed_optimizer:
            self.optimizer = self._shard_optimizer(inner.config, create_optimizer)
            for sharder in self._distributed_optimizers:
                groups = zip(
                    (*sharder.model_fp32_groups, *sharder.model_float16_groups),
                    (*sharder.shard_fp32_groups, *sharder.shard_fp32_from_float16_groups),
                    strict=True,
                )
                for parameters, shards in groups:
                    for parameter, main in zip(parameters, shards, strict=True):
                        param_range = sharder._get_model_param_range_map(parameter)["param"]
                        mains[id(parameter)] = (main, param_range.start)
        else:
            trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
            self.optimizer = create_optimizer(trained)
            for parameter in trained:
                is_float32 = parameter.dtype == torch.float32
                main = parameter if is_float32 else parameter.detach().float()
                mains[id(parameter)] = (main, 0)
            for group in self.optimizer.param_groups:
                group["params"] = [mains[id(parameter)][0] for parameter in group["params"]]
        frozen = {id(p): (p.detach(), 0) for p in inner.parameters() if not p.requires_grad}
        self.fragments = list(self._fragments(inner, mains, is_sharded=distributed_optimizer))
        """Fragments of the trained parameters."""
        self.frozen_fragments = list(self._fragments(inner, frozen, is_sharded=False))
        """Fragments of the frozen parameters, each a whole parameter."""
        self.discard_gradients()

    def _shard_optimizer(self, config: Any, create_optimizer: OptimizerFactory) -> Optimizer:
        """Return one optimizer of this process's shards, including those of experts."""
        from megatron.core import parallel_state
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        settings = OptimizerConfig(
            bf16=config.bf16, use_distributed_optimizer=True, clip_grad=0.0, lr=0.0
        )
        optimizers: list[Optimizer] = []
        for buffers, group in (
            (
                self.ddp_model.buffers,
                parallel_state.get_data_parallel_group(with_context_parallel=True),
            ),
            (
                self.ddp_model.expert_parallel_buffers,
                parallel_state.get_expert_data_parallel_group(),
            ),
        ):
            if not buffers:
                continue
            optimizers.append(
                create_optimizer(parameter for buffer in buffers for parameter in buffer.params)
            )
            sharder = DistributedOptimizer(
                optimizers[-1],
                settings,
                None,
                None,
                [self.ddp_model],
                {0: buffers},
                group,
                None,
                0,
                0,
            )
            self._distributed_optimizers.append(sharder)
        for optimizer in optimizers[1:]:
            optimizers[0].param_groups += optimizer.param_groups
        return optimizers[0]

    def _fragments(
        self, inner: Any, mains: dict[int, tuple[Tensor, int]], *, is_sharded: bool
    ) -> Iterator[ParamFragment]:
        """Yield the fragments of the parameters in ``mains``, which maps a parameter's ``id`` to
        its float32 tensor and its offset."""
        from megatron.core import parallel_state

        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        for parameter in inner.parameters():
            if id(parameter) not in mains:
                continue
            is_dense = getattr(parameter, "allreduce", True)
            # Index of this process among those with the same fragment, and their number.
            rank, num_copies = (
                (
                    parallel_state.get_data_parallel_rank(with_context_parallel=True),
                    parallel_state.get_data_parallel_world_size(with_context_parallel=True),
                )
                if is_dense
                else (
                    parallel_state.get_expert_data_parallel_rank(),
                    parallel_state.get_expert_data_parallel_world_size(),
                )
            )
            if is_sharded:
                rank, num_copies = 0, 1
            # Tensor-parallel ranks have parts of split parameters, and copies of the others.
            if not getattr(parameter, "is_split", True):
                rank, num_copies = rank * tp_size + tp_rank, num_copies * tp_size
            # The last pipeline stage has a second copy of the embedding, for its head.
            is_tied_copy = getattr(parameter, "is_tied_copy", False)
            main, start = mains[id(parameter)]
            yield ParamFragment(parameter, main, start, num_copies, not rank and not is_tied_copy)

    def allocate_gradients(self) -> None:
        """Allocate zero gradients, unless some were accumulated."""
        if self._has_gradients:
            return
        for buffer, size in zip(self._buffers, self._buffer_bytes, strict=True):
            buffer.grad_data.untyped_storage().resize_(size)
        self.ddp_model.zero_grad_buffer()
        self._has_gradients = True

    def discard_gradients(self) -> None:
        """Discard gradients, also those of a failed pass, and free their memory."""
        for parameter in self.ddp_model.module.parameters():
            parameter.grad = None
        for group in self.optimizer.param_groups:
            for main in group["params"]:
                main.grad = None
        for buffer in self._buffers:
            buffer.grad_data.untyped_storage().resize_(0)
        self._has_gradients = False

    def gradients(self) -> list[Tensor]:
        """Return the gradient buffers, or meta tensors of their size."""
        if self._has_gradients:
            return [buffer.grad_data for buffer in self._buffers]
        return [torch.empty(n, dtype=torch.uint8, device="meta") for n in self._buffer_bytes]

    def reduce_gradients(self) -> None:
        """Reduce the gradient of the trained fragments over processes; collective."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.ddp_model])
        for sharder in self._distributed_optimizers:
            sharder._copy_model_grads_to_main_grads()
        if not self._distributed_optimizers:
            for fragment in self.fragments:
                fragment.main.grad = fragment.parameter.main_grad  # type: ignore[attr-defined]

    @torch.no_grad()
    def grad_norm(self, groups: Collection[str]) -> Tensor:
        """Return the norm of the gradient of the fragments in ``groups``; collective."""
        total = torch.zeros((), device=next(self.ddp_model.parameters()).device)
        chosen = {
            id(main)
            for group in self.optimizer.param_groups
            if group[GROUP_KEY] in groups
            for main in group["params"]
        }
        for fragment in self.fragments:
            is_tied_copy = getattr(fragment.parameter, "is_tied_copy", False)
            if fragment.main.grad is not None and not is_tied_copy and id(fragment.main) in chosen:
                total += fragment.main.grad.square().sum() / fragment.num_copies
        torch.distributed.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def sync_model_weights(self) -> None:
        """Copy the updated float32 weights to the model; collective."""
        for sharder in self._distributed_optimizers:
            sharder._copy_main_params_to_model_params()
        if self._distributed_optimizers:
            self.ddp_model.start_param_sync(force_sync=True)
            return
        for fragment in self.fragments:
            if fragment.main is not fragment.parameter:
                fragment.parameter.copy_(fragment.main)

    def release(self) -> None:
        """Drop references that keep the parameters in memory."""
        self.ddp_model.grad_accs.clear()
        self.ddp_model.param_to_bucket_group.clear()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []


class LocalTensors:
    """This process's parts of the network's tensors, by the names of ``transformers`` and PEFT.
    Their elements are in Megatron's parameters."""

    def __init__(
        self,
        params: LocalParams,
        mappings: Mapping[int, hf_mapping.ParamMapping],
        names: Sequence[str],
    ) -> None:
        """
        Args:
            mappings: mapping of each parameter, by its ``id``.
            names: the names of all tensors, in order.
        """
        self._trained = params.fragments
        self._all_fragments = [*params.fragments, *params.frozen_fragments]
        mapped = [
            (
                mappings[id(fragment.parameter)],
                tuple(fragment.parameter.shape),
                fragment.start,
                fragment.flat.numel(),
            )
            for fragment in self._all_fragments
        ]
        positions = {name: position for position, name in enumerate(names)}
        parts = hf_mapping.tensor_parts(mapped, positions.__getitem__)
        self.tensor_parts = {part.name: part for part in parts}
        # The fragments of a part are either all trained or all frozen.
        self.trained_parts = [part for part in parts if part.ranges[0][0] < len(self._trained)]
        """The parts in checkpoints: of all weights, or of adapters only."""

    def is_primary(self, part: hf_mapping.TensorPart) -> bool:
        """Return whether this process writes a part to checkpoints and passes it to a gather."""
        return all(self._all_fragments[index].is_primary for index, *_ in part.ranges)

    def weights(self) -> list[Tensor]:
        """Return the elements of each fragment, in one dimension."""
        return [fragment.flat for fragment in self._all_fragments]

    def moments(self, optimizer: Optimizer, name: str) -> list[Tensor]:
        """Return the elements of a moment of each trained fragment, in one dimension."""
        return [optimizer.state[fragment.main][name].view(-1) for fragment in self._trained]

    def set_part(self, name: str, full: Tensor) -> None:
        """Store this process's part of a tensor, if it has one."""
        if (part := self.tensor_parts.get(name)) is not None:
            write_part(self.weights(), part, part.placement.extract(full))

    def gather(self, name: str, template: Tensor, device: torch.device, processes: int) -> Tensor:
        """Return a full tensor: the sum of all parts, as bytes, padded with zeros; collective."""
        full = torch.zeros(template.shape, dtype=template.dtype, device=device)
        part = self.tensor_parts.get(name)
        if part is not None and self.is_primary(part):
            part.placement.insert(full, read_part(self.weights(), part).to(template.dtype))
        if processes > 1:
            torch.distributed.all_reduce(full.view(-1).view(torch.uint8))
        return full


def read_part(flats: Sequence[Tensor], part: hf_mapping.TensorPart) -> Tensor:
    """Return the elements of a part, given the elements of each fragment."""
    return torch.cat([flats[index][first : first + n] for index, first, n in part.ranges])


def write_part(flats: Sequence[Tensor], part: hf_mapping.TensorPart, elements: Tensor) -> None:
    """Write the elements of a part into ``flats``, the elements of each fragment."""
    position = 0
    for index, first, count in part.ranges:
        flats[index][first : first + count] = elements[position : position + count]
        position += count
