"""Training with fully sharded data parallelism (FSDP2), or in one process without sharding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.device_memory import allocate_parameters, move_buffers, move_to_device, synchronize
from rlinf.errors import ConfigError
from rlinf.models.base import Batch, Policy, copy_weights
from rlinf.registry import RunComponents
from rlinf.sharded_tensors import gather_full_tensors, local_shard
from rlinf.trainers import sharded_checkpoint
from rlinf.trainers.base import BatchLoss, merge_metrics
from rlinf.trainers.minibatch import MinibatchTrainer, MinibatchTrainerConfig
from rlinf.trainers.optimizer import (
    GROUP_KEY,
    HOST_DEVICE,
    create_optimizer,
    init_optimizer_state,
    move_optimizer_state,
    scale_gradients,
    step_with_offload,
)

log = logging.getLogger("rlinf")


class FSDPConfig(MinibatchTrainerConfig):
    """Settings of a training step's memory, speed and rounding; the algorithm is unchanged."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which the processes of a sharded model reduce gradients."""
    dp_replicate: int = Field(default=1, gt=0)
    """Number of model replicas, each sharded over an equal number of processes (hybrid sharding,
    HSDP). The processes of a replica have adjacent ranks, on one node where possible."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and move it to the device in chunks."""
    reshard_after_forward: bool = True
    fsdp_wrap_min_mb: int = Field(default=32, ge=0)
    """Minimum size, MiB, of the parameters of an FSDP unit, which processes gather at once."""


class FSDPTrainer(MinibatchTrainer):
    """Trainer with FSDP2: a sharded module and its optimizer."""

    Config = FSDPConfig
    supports_batches = True  # of transitions: accumulate_batch
    config: FSDPConfig

    def __init__(
        self,
        policy: Policy,
        config: FSDPConfig,
        optimizer: OptimizerSection,
        world: ProcessGroupInfo,
    ) -> None:
        super().__init__(policy, config, optimizer, world)
        self._root: Any = None
        """The module as FSDP has wrapped it; None: FSDP is not used."""
        device_type = self.device.type
        # One process uses FSDP too if it needs mixed precision.
        uses_fsdp = world.size > 1 or config.compute_dtype != "float32"
        if uses_fsdp:
            world.init_process_group(device_type)
            self._shard(policy)
        else:
            move_to_device(policy.module, self.device)
            weight = next(policy.module.parameters())
            self.compute_dtype = str(weight.dtype).removeprefix("torch.")
        self._reset_adapters()
        is_threaded = device_type == "cpu" and not uses_fsdp
        self._create_threads(config.cpu_threads if is_threaded else 1)
        self._torch_threads = 1 if is_threaded else config.cpu_threads
        self.optimizer = create_optimizer(policy, optimizer)

    @classmethod
    def check(cls, options: FSDPConfig, run: RunComponents) -> None:
        super().check(options, run)
        is_bfloat16 = getattr(run.options["model"], "dtype", "float32") == "bfloat16"
        if is_bfloat16 and options.lora is None:
            log.warning(
                "model.dtype=bfloat16: weights and moments are bfloat16 too, so rounding removes "
                "most steps at small rates; trainer.param_dtype=bfloat16 only computes in bfloat16"
            )

    @classmethod
    def check_layout(
        cls,
        options: FSDPConfig,
        run: RunComponents,
        layout: ParallelLayout,
        processes: int,
        key: str,
    ) -> None:
        super().check_layout(options, run, layout, processes, key)
        _check_replicas(options, processes, key.removesuffix(".layout"))

    def accumulate_batch(self, batch: Batch, loss: BatchLoss) -> None:
        if self.world.size > 1:
            raise ConfigError(
                "plan.stages.train: only one process can train on batches of transitions; remove "
                "the keys that give the stage more"
            )
        torch.set_num_threads(self._torch_threads)
        self._metric_sums = self._metric_sums or {}
        if not self.policy.module.training:
            self.policy.module.train()
        inputs = {name: tensor.to(self.device) for name, tensor in batch.items()}
        try:
            metrics = self._backward(
                lambda: loss(self.policy, inputs), self._loss_scaler.value, last=True
            )
            merge_metrics(self._metric_sums, metrics)
        except BaseException:
            self.discard_gradients()
            raise

    def _backward(
        self, loss: Callable[[], tuple[Tensor, dict[str, Tensor]]], factor: float, *, last: bool
    ) -> dict[str, Tensor]:
        if self._root is not None and self._is_single_unit:
            # A model that is one FSDP unit is gathered and reduced once for all micro-batches.
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)
        value, metrics = loss()
        (value * factor).backward()  # type: ignore[no-untyped-call]
        return {"loss": value.detach(), **metrics}

    def discard_gradients(self) -> None:
        self._metric_sums = None
        # In every thread, because a failed attempt may have left gradients in any of them.
        for policy in self._threads.policies:
            for parameter in self._parameters(policy):
                parameter.grad = None

    def _step(self, scales: Mapping[str, float]) -> None:
        scale_gradients(self.optimizer, scales)
        if self.config.offload_optimizer:
            step_with_offload(self.optimizer, self.device)
        else:
            self.optimizer.step()

    @torch.no_grad()
    def tensor_groups(self) -> dict[str, list[Tensor]]:
        """Return the tensors on the device; if the module is sharded, this rank's shards.

        See :class:`rlinf.device_memory.Offloadable`. The call makes FSDP free gathered parameters.
        """
        if self._closed:
            return {}
        weights = [local_shard(t) for t in self.policy.module.state_dict(keep_vars=True).values()]
        if self._adapters is not None:
            weights += [local_shard(parameter) for _, parameter in self._adapters.parameters()]
        gradients, moments = list[Tensor](), list[Tensor]()
        for parameter in self._parameters(self.policy):
            placeholder = torch.empty_like(local_shard(parameter), device="meta")
            gradients.append(placeholder if parameter.grad is None else local_shard(parameter.grad))
            if self.config.offload_optimizer:
                continue
            state = self.optimizer.state.get(parameter)
            moments += (
                [local_shard(t) for t in state.values()]
                if state
                else [placeholder] * len(self._moment_names)
            )
        return {"weights": weights, "gradients": gradients, "optimizer": moments}

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        sharded_checkpoint.read_shards(folder, state)
        if self._adapters is None:  # adapters are read into the trainer's own tensors
            set_state_dict(
                self.policy.module,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        if self.config.offload_optimizer:
            move_optimizer_state(self.optimizer, set(self._parameters(self.policy)), HOST_DEVICE)
            synchronize(self.device)

    def _load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # This requests the state dict, so FSDP frees the parameters gathered for the last pass.
        copy_weights(self.policy.module, tensors)

    def _gather_full(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return gather_full_tensors(named)

    def _release(self) -> None:
        # FSDP's modules are in reference cycles, which the next garbage collection frees.
        self.optimizer.state.clear()
        self._root = None

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        if self._adapters is not None:
            self.policy.module.state_dict()  # frees gathered parameters
            adapters = dict(self._adapters.parameters())
            for parameter in adapters.values():
                init_optimizer_state(self.optimizer, parameter, self._moment_names)
            states = {name: self.optimizer.state[parameter] for name, parameter in adapters.items()}
            return {"model": adapters, "optimizer": {"state": states}, **self._loss_scaler.state()}
        # Without state, ``get_state_dict`` would do an optimizer step, and count it.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                init_optimizer_state(self.optimizer, parameter, self._moment_names)
        model, optimizer = get_state_dict(self.policy.module, self.optimizer)
        return {"model": model, "optimizer": optimizer, **self._loss_scaler.state()}

    def _shard(self, policy: Policy) -> None:
        size = self.world.size
        _check_replicas(self.config, size, "a stage")
        mesh = create_mesh(self.device, size, self.config.dp_replicate if size > 1 else 1)
        self._replica_index, *shard = shard_coordinates(mesh)
        self._shard_coords = (shard[0], shard[1])
        self._root, self._is_single_unit = apply_fsdp(
            policy,
            mesh,
            self.device,
            MixedPrecisionPolicy(
                param_dtype=getattr(torch, self.config.compute_dtype),
                reduce_dtype=getattr(torch, self.config.reduce_dtype),
            ),
            wrap_min_bytes=self.config.fsdp_wrap_min_mb << 20,
            reshard_after_forward=self.config.reshard_after_forward,
        )

    def _parameters(self, policy: Policy) -> list[nn.Parameter]:
        """Return the parameters whose ``grad`` a thread fills; each thread has its own gradients.
        If the module is sharded, return the shards: ``module.parameters()`` may be gathered."""
        if policy is not self.policy:
            return list(policy.module.parameters())
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _gradient_norm(self, groups: Collection[str]) -> float:
        from torch.distributed.tensor import DTensor

        gradients = [
            parameter.grad
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if group[GROUP_KEY] in groups and parameter.grad is not None
        ]
        norm = nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _check_replicas(config: FSDPConfig, processes: int, stage: str) -> None:
    """
    Raises:
        ConfigError: the number of processes is not a multiple of the number of replicas.
    """
    if processes > 1 and processes % config.dp_replicate:
        raise ConfigError(
            f"trainer.dp_replicate: {config.dp_replicate} does not divide the {processes} "
            f"processes of {stage}; give a divisor, or 1 for one model replica over all processes"
        )


def create_mesh(device: torch.device, processes: int, replicas: int) -> DeviceMesh:
    """Return the device mesh. With several model replicas it is 2D, with a replica in each row."""
    if replicas == 1:
        return init_device_mesh(device.type, (processes,))
    shape, names = (replicas, processes // replicas), ("replicate", "shard")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def apply_fsdp(
    policy: Policy,
    mesh: DeviceMesh,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    *,
    wrap_min_bytes: int,
    reshard_after_forward: bool,
) -> tuple[Any, bool]:
    """Shard a policy's module. Parameters without memory get memory for this process's shard.

    Returns:
        The root module, and whether it is the only FSDP unit.
    """
    module = policy.module
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    if is_meta:
        move_buffers(module, device)
    else:
        move_to_device(module, device)
    full_precision = MixedPrecisionPolicy(
        param_dtype=torch.float32,
        reduce_dtype=precision.reduce_dtype,
        output_dtype=precision.param_dtype,
        cast_forward_inputs=False,
    )
    for exact in policy.float32_modules():
        fully_shard(exact, mesh=mesh, mp_policy=full_precision)
    # A unit never spans two networks, because one of them may be gathered without the other.
    units = [
        unit for stack in policy.block_stacks() for unit in _group_blocks(stack, wrap_min_bytes)
    ]
    for unit in units:
        fully_shard(
            unit, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward
        )
    # The backward pass needs the root's parameters first, so they stay gathered.
    root: Any = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    if is_meta:
        allocate_parameters(module, device)
        # ``_apply`` makes FSDP read its parameters again and pad them; weights are loaded after it.
        module._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]
        policy.load_weights()
    return root, not units


def shard_coordinates(mesh: DeviceMesh) -> tuple[int, int, int]:
    """Return the indices of this process's replica and shard, and the number of shards."""
    replica = mesh.get_local_rank(0) if mesh.ndim > 1 else 0
    return replica, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def _group_blocks(blocks: Sequence[nn.Module], min_bytes: int) -> list[list[nn.Module]]:
    """Group adjacent blocks into FSDP units of ``min_bytes`` or more; none if the total is less."""
    units: list[list[nn.Module]] = []
    size = min_bytes
    for block in blocks:
        if size >= min_bytes:
            units.append([])
            size = 0
        units[-1].append(block)
        size += sum(p.nbytes for p in block.parameters())
    return units if len(units) > 1 or size >= min_bytes else []
