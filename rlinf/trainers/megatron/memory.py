"""What of weights, moments and gradients a process has under Megatron's data parallelism.

Gradients are added up in float32 buffers of Megatron's ``DistributedDataParallel``. Without its
distributed optimizer a process steps all parameters that it computes with, in float32; with it, its
even share of each buffer, from which weights are gathered again. Parameters that take no gradients
(those beside adapters) are there once, in the type in which they are computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlinf.trainers.optimizer import GROUP

Maker = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Fragment:
    """A process's elements of one parameter, which it steps."""

    parameter: nn.Parameter
    main: Tensor
    """In any shape: what is stepped, in float32; or the parameter, if it is never stepped."""
    start: int
    """Where they begin in the parameter."""
    copies: int
    """Processes that have the same fragment."""
    first: bool
    """Whether this one speaks for them."""

    @property
    def flat(self) -> Tensor:
        return self.main.detach().view(-1)


class Memory:
    """Of a part of a network."""

    def __init__(self, inner: Any, make: Maker, *, distributed: bool) -> None:
        """
        Args:
            inner: Megatron's model.
            make: an optimizer of some of its parameters.
            distributed: whether processes with the same weights share out moments and float32
                weights.
        """
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        )
        self.parallel = DistributedDataParallel(inner.config, settings, inner)
        self._buffers = [*self.parallel.buffers, *self.parallel.expert_parallel_buffers]
        self._sizes = [buffer.grad_data.untyped_storage().nbytes() for buffer in self._buffers]
        self._shards: list[Any] = []
        self._there = True
        mains: dict[int, tuple[Tensor, int]] = {}
        if distributed:
            self.optimizer = self._share_out(inner.config, make)
            for shard in self._shards:
                groups = zip(
                    (*shard.model_fp32_groups, *shard.model_float16_groups),
                    (*shard.shard_fp32_groups, *shard.shard_fp32_from_float16_groups),
                    strict=True,
                )
                for parameters, own in groups:
                    for parameter, main in zip(parameters, own, strict=True):
                        at = shard._get_model_param_range_map(parameter)["param"]
                        mains[id(parameter)] = (main, at.start)
        else:
            own = [parameter for parameter in inner.parameters() if parameter.requires_grad]
            self.optimizer = make(own)
            for parameter in own:
                half = parameter.dtype != torch.float32
                mains[id(parameter)] = (parameter.detach().float() if half else parameter, 0)
            for group in self.optimizer.param_groups:
                group["params"] = [mains[id(parameter)][0] for parameter in group["params"]]
        still = {id(p): (p.detach(), 0) for p in inner.parameters() if not p.requires_grad}
        self.fragments = list(self._fragments(inner, mains, shared_out=distributed))
        self.still = list(self._fragments(inner, still, shared_out=False))
        """Parameters that take no gradients."""
        self.discard()

    def _share_out(self, config: Any, make: Maker) -> Optimizer:
        """One optimizer of this process's shares, of experts too."""
        from megatron.core import parallel_state
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        settings = OptimizerConfig(
            bf16=config.bf16, use_distributed_optimizer=True, clip_grad=0.0, lr=0.0
        )
        made: list[Optimizer] = []
        for buffers, group in (
            (
                self.parallel.buffers,
                parallel_state.get_data_parallel_group(with_context_parallel=True),
            ),
            (
                self.parallel.expert_parallel_buffers,
                parallel_state.get_expert_data_parallel_group(),
            ),
        ):
            if not buffers:
                continue
            made.append(make(parameter for buffer in buffers for parameter in buffer.params))
            shard = DistributedOptimizer(
                made[-1], settings, None, None, [self.parallel], {0: buffers}, group, None, 0, 0
            )
            self._shards.append(shard)
        for other in made[1:]:
            made[0].param_groups += other.param_groups
        return made[0]

    def _fragments(
        self, inner: Any, mains: dict[int, tuple[Tensor, int]], *, shared_out: bool
    ) -> Iterator[Fragment]:
        from megatron.core import parallel_state as groups

        inner_rank = groups.get_tensor_model_parallel_rank()
        inner_size = groups.get_tensor_model_parallel_world_size()
        for parameter in inner.parameters():
            if id(parameter) not in mains:
                continue
            dense = getattr(parameter, "allreduce", True)
            rank, size = (
                (
                    groups.get_data_parallel_rank(with_context_parallel=True),
                    groups.get_data_parallel_world_size(with_context_parallel=True),
                )
                if dense
                else (
                    groups.get_expert_data_parallel_rank(),
                    groups.get_expert_data_parallel_world_size(),
                )
            )
            if shared_out:
                rank, size = 0, 1
            # What is split so belongs to this process alone; the rest its neighbours have too.
            if not getattr(parameter, "split", True):
                rank, size = rank * inner_size + inner_rank, size * inner_size
            # A last stage has the embedding once more, for its head.
            again = getattr(parameter, "again", False)
            main, start = mains[id(parameter)]
            yield Fragment(parameter, main, start, size, not rank and not again)

    def want(self) -> None:
        """Have memory for gradients, which are zero, unless some were accumulated."""
        if self._there:
            return
        for buffer, size in zip(self._buffers, self._sizes, strict=True):
            buffer.grad_data.untyped_storage().resize_(size)
        self.parallel.zero_grad_buffer()
        self._there = True

    def discard(self) -> None:
        """Forget gradients, those of a pass that failed too, and give their memory back."""
        for parameter in self.parallel.module.parameters():
            parameter.grad = None
        for group in self.optimizer.param_groups:
            for main in group["params"]:
                main.grad = None
        for buffer in self._buffers:
            buffer.grad_data.untyped_storage().resize_(0)
        self._there = False

    def gradients(self) -> list[Tensor]:
        """What holds them, or stands for what will."""
        if self._there:
            return [buffer.grad_data for buffer in self._buffers]
        return [torch.empty(size, dtype=torch.uint8, device="meta") for size in self._sizes]

    def reduce(self) -> None:
        """Complete the gradient of what is stepped here; collective."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.parallel])
        for shard in self._shards:
            shard._copy_model_grads_to_main_grads()
        if not self._shards:
            for each in self.fragments:
                each.main.grad = each.parameter.main_grad  # type: ignore[attr-defined]

    @torch.no_grad()
    def norm(self, groups: Collection[str]) -> Tensor:
        """Euclidean norm of the gradient of what will be stepped of some groups; collective."""
        total = torch.zeros((), device=next(self.parallel.parameters()).device)
        chosen = {
            id(main)
            for group in self.optimizer.param_groups
            if group[GROUP] in groups
            for main in group["params"]
        }
        for each in self.fragments:
            again = getattr(each.parameter, "again", False)
            if each.main.grad is not None and not again and id(each.main) in chosen:
                total += each.main.grad.square().sum() / each.copies
        torch.distributed.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def publish(self) -> None:
        """Compute with what is stepped as it is now; collective."""
        for shard in self._shards:
            shard._copy_main_params_to_model_params()
        if self._shards:
            self.parallel.start_param_sync(force_sync=True)
            return
        for each in self.fragments:
            if each.main is not each.parameter:
                each.parameter.copy_(each.main)

    def release(self) -> None:
        """Let go of what keeps the parameters."""
        self.parallel.grad_accs.clear()
        self.parallel.param_to_bucket_group.clear()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
