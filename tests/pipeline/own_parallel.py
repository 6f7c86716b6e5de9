"""An engine and a trainer as a user's own file has them, whose matrices several processes share."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from rlinf.channels.channel import LocalChannel
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.record import Record
from rlinf.device_memory import allocate_parameters, move_buffers
from rlinf.engines.base import NO_HOOKS, RequestReceiver, RolloutHooks
from rlinf.engines.transformers import TransformersEngine
from rlinf.models.base import Policy
from rlinf.sharded_tensors import local_shard
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from rlinf.trainers.optimizer import GROUP_KEY


def split(module: nn.Module, world: ProcessGroupInfo) -> None:
    """Give each process of a copy of the model its rows of every matrix in the blocks."""
    shape = (world.data_parallel_size, world.layout.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tp"))["tp"]
    matrices = {
        name: ColwiseParallel(output_layouts=Replicate())
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and ".layers." in name
    }
    assert matrices
    parallelize_module(module, mesh, matrices)


class ParallelTrainer(FSDPTrainer):
    """Its copies of the model each belong to ``layout.tp`` processes."""

    parallel_dims = frozenset({"tp"})

    def __init__(
        self,
        policy: Policy,
        config: FSDPConfig,
        optimizer: OptimizerSection,
        world: ProcessGroupInfo,
    ) -> None:
        super().__init__(policy, config, optimizer, world)
        for group in self.optimizer.param_groups:
            group["foreach"] = False  # shared and whole parameters do not mix

    def _shard(self, policy: Policy) -> None:
        split(policy.module, self.world)
        move_buffers(policy.module, self.device)
        allocate_parameters(policy.module, self.device)
        policy.load_weights()
        tp = self.world.layout.tp
        self._replica_index = self.world.data_parallel_rank
        self._shard_coords = (self.world.rank % tp, tp)
        self._root, self._is_single_unit = None, False

    def _gradient_norm(self, groups: Collection[str]) -> float:
        """Of the gradients, which the copies of the model add up first."""
        if self.world.size == 1:
            return super()._gradient_norm(groups)
        total = torch.zeros(())
        group = init_device_mesh(
            "cpu",
            (self.world.data_parallel_size, self.world.layout.tp),
            mesh_dim_names=("data", "tp"),
        )["data"].get_group()
        mine = [g["params"] for g in self.optimizer.param_groups if g[GROUP_KEY] in groups]
        for parameter in (parameter for parameters in mine for parameter in parameters):
            if parameter.grad is None:
                continue
            dist.all_reduce(local_shard(parameter.grad), group=group)
            local_shard(parameter.grad).div_(self.world.data_parallel_size)
            squares = local_shard(parameter.grad).square().sum()
            if isinstance(parameter, DTensor):
                dist.all_reduce(squares, group=parameter.device_mesh.get_group())
            total += squares
        return float(total.sqrt())


class ParallelEngine(TransformersEngine):
    """The process that speaks tells the others of its copy of each request."""

    parallel_dims = frozenset({"tp"})

    def load(self, folder: Path, version: int) -> None:
        self._module = None
        super().load(folder, version)
        if self.world.layout.parallel_dims():
            self.world.init_process_group("cpu")
            split(self._module, self.world)

    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        if not self.world.layout.parallel_dims():
            yield from super().generate(requests, seed=seed, stage=stage, hooks=hooks)
            return
        for request in requests:
            self._tell(request)
            yield from super().generate(one(request), seed=seed, stage=stage)
        self._tell(None)

    def run_follower(self, *, seed: int, stage: str) -> None:
        while (request := self._tell(None)) is not None:
            for _ in super().generate(one(request), seed=seed, stage=stage):
                pass

    def _tell(self, request: Record | None) -> Record | None:
        tp, values = self.world.layout.tp, [request]
        groups = [dist.new_group([*range(first, first + tp)]) for first in self._firsts()]
        first = self.world.rank // tp * tp
        dist.broadcast_object_list(values, first, groups[first // tp])
        return values[0]

    def _firsts(self) -> range:
        return range(0, self.world.size, self.world.layout.tp)


def one(request: Record) -> LocalChannel:
    channel = LocalChannel()
    channel.put(request)
    channel.close()
    return channel
