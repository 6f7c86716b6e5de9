"""Training with DeepSpeed's ZeRO (Rajbhandari et al., 2020).

ZeRO shards the optimizer's state over processes (stage 1), then gradients (2), then weights (3).

Splitting batches, summing losses and clipping gradients work as in every trainer, and the
checkpoint files are the same. A run may therefore change between trainers at a checkpoint.

DeepSpeed keeps the float32 weights in flat tensors, each with a process's shard of a parameter
group. A parameter's elements are contiguous in one flat tensor. The classes below read the flat
tensors from the optimizers of DeepSpeed 0.19, which have no interface for this.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.device_memory import allocate_parameters, move_buffers, move_to_device
from rlinf.errors import ConfigError, require_package
from rlinf.models.base import Batch, Policy, StepOutputs, weight_mismatch
from rlinf.registry import RunComponents
from rlinf.trainers import sharded_checkpoint
from rlinf.trainers.minibatch import MinibatchTrainer, MinibatchTrainerConfig
from rlinf.trainers.optimizer import GROUP_KEY, create_optimizer, init_optimizer_state


@dataclass(frozen=True)
class ZeroFragment:
    """The contiguous elements of one parameter in this process's shard; possibly none."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    flat_index: int
    """Index of the flat tensor that contains the elements."""
    flat_start: int
    """Offset of the elements in the flat tensor."""
    param_start: int
    """Offset of the elements in the parameter."""
    count: int
    """Number of elements."""

    @property
    def param_slice(self) -> slice:
        return slice(self.param_start, self.param_start + self.count)


class ZeroOptimizer(ABC):
    """Interface to the tensors of DeepSpeed's optimizer, by ZeRO stage."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """The flat tensors of float32 weights."""

    @abstractmethod
    def param_group_of(self, flat_index: int) -> int:
        """Return the index of a flat tensor's parameter group in the torch optimizer."""

    @abstractmethod
    def fragments(self) -> Iterator[ZeroFragment]:
        """Yield this process's fragment of each trained parameter."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Reduce the accumulated gradient over processes; collective."""

    def gradients(self, flat_index: int) -> list[Tensor]:
        """Return the reduced gradient of a flat tensor, in parts."""
        if self.is_offloaded:
            return [self.flat_weights[flat_index].grad]  # type: ignore[list-item]
        return list(self.optimizer.averaged_gradients[flat_index])

    @property
    @abstractmethod
    def is_offloaded(self) -> bool:
        """Whether float32 weights, moments and the reduced gradient are in host memory."""

    @abstractmethod
    def gradient_buffers(self) -> list[Tensor]:
        """Return the tensors that hold gradients between two backward passes."""

    @abstractmethod
    def discard_gradients(self) -> None:
        """Discard all gradients, also those of a failed pass; not collective."""

    def release(self, root: nn.Module) -> None:
        """Drop DeepSpeed's references to the modules in ``root``, whose engine is destroyed."""
        return None

    @abstractmethod
    def sync_model_weights(self) -> None:
        """Copy the current float32 weights to the model; collective."""


class ZeroStage12Optimizer(ZeroOptimizer):
    """Stages 1 and 2: every process has all weights of the model."""

    @property
    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def param_group_of(self, flat_index: int) -> int:
        return flat_index

    def fragments(self) -> Iterator[ZeroFragment]:
        for flat_index, group in enumerate(self.optimizer.bit16_groups):
            for parameter in group:
                shape, mapping = tuple(parameter.shape), parameter._hp_mapping
                if mapping is None:
                    yield ZeroFragment(parameter, shape, flat_index, 0, 0, 0)
                    continue
                flat_start = mapping.hp_fragment_address.start
                start, count = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
                yield ZeroFragment(parameter, shape, flat_index, flat_start, start, count)

    def reduce_gradients(self) -> None:
        if self.optimizer.partition_gradients:
            self.optimizer.finalize_gradient_accumulation_boundary()
            return
        self.optimizer.set_gradient_accumulation_boundary(True)
        self.optimizer.setup_buckets()
        self.optimizer.reduce_gradients()
        self.optimizer.set_gradient_accumulation_boundary(False)

    @property
    def is_offloaded(self) -> bool:
        return bool(self.optimizer.cpu_offload)

    def gradient_buffers(self) -> list[Tensor]:
        zero = self.optimizer
        buffers = [p.grad for group in zero.bit16_groups for p in group]
        buffers += [p.grad_accum for group in zero.bit16_groups for p in group]
        for parts in (*zero.all_grad_tensors.values(), *zero.averaged_gradients.values()):
            buffers += parts or []
        return [tensor for tensor in buffers if tensor is not None]

    def discard_gradients(self) -> None:
        zero = self.optimizer
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        for index in range(len(zero.bit16_groups)):
            zero.averaged_gradients[index] = zero.all_grad_tensors[index] = None
        zero.params_already_reduced = [False] * len(zero.params_already_reduced)
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero._release_ipg_buffers()
        zero.micro_step_id = -1
        zero._backward_active_depth = 0
        if self.is_offloaded:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()
            zero.accumulated_grads_in_cpu.clear()
            for flat in self.flat_weights:
                flat.grad.zero_()  # type: ignore[union-attr]

    def sync_model_weights(self) -> None:
        self.optimizer.update_lp_params()
        for index in range(len(self.optimizer.bit16_groups)):
            self.optimizer._update_model_bit16_weights(index)


class ZeroStage3Optimizer(ZeroOptimizer):
    """Stage 3: weights are gathered module by module."""

    @property
    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def param_group_of(self, flat_index: int) -> int:
        return int(self.optimizer.sub_group_to_group_id[flat_index])

    def fragments(self) -> Iterator[ZeroFragment]:
        zero = self.optimizer
        for parameter in (p for group in zero.fp16_groups for p in group):
            flat_index, flat_start, size = zero.grad_position[zero.get_param_id(parameter)]
            start = zero._get_param_partition_rank(parameter) * size
            count = max(0, min(size, parameter.ds_numel - start))
            shape = tuple(parameter.ds_shape)
            yield ZeroFragment(parameter, shape, flat_index, flat_start, start, count)

    def reduce_gradients(self) -> None:
        self.optimizer.finalize_gradient_accumulation_boundary()

    @property
    def is_offloaded(self) -> bool:
        return bool(self.optimizer.offload_optimizer)

    def gradient_buffers(self) -> list[Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

    def discard_gradients(self) -> None:
        zero = self.optimizer
        zero.zero_grad(set_to_none=True)
        zero.params_already_reduced = dict.fromkeys(zero.params_already_reduced, False)
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        # A parameter on which no loss depends would keep the gradient of an earlier step.
        zero.grad_partitions_flat_buffer.zero_()
        zero._backward_active_depth = 0
        if self.is_offloaded:
            zero.reset_cpu_buffers()
            zero._offload_boundary_param_ids = set()
            for flat in self.flat_weights:
                flat.grad.zero_()  # type: ignore[union-attr]
        else:
            zero.averaged_gradients = {}

    def sync_model_weights(self) -> None:
        zero = self.optimizer
        zero._partition_all_parameters()
        for index in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def release(self, root: nn.Module) -> None:
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK as STACK
        from deepspeed.runtime.zero.partitioned_param_coordinator import (
            PartitionedParameterCoordinator,
        )

        # Each pass leaves its root module on the stack; a failed one also leaves inner modules.
        released = set(root.modules())
        STACK[:] = [module for module in STACK if module not in released]
        # This method's cache belongs to the class and keeps every engine that called it alive.
        method = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(method).nonlocals["func"].cache_clear()


def global_grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of a gradient of which each process has a part; collective."""
    squared_norm = nn.utils.get_total_norm(gradients).square()
    torch.distributed.all_reduce(squared_norm)
    return squared_norm.sqrt()


MAX_BUCKET_ELEMENTS = 50_000_000
"""Maximum number of elements that are reduced or gathered at once."""


class DeepSpeedConfig(MinibatchTrainerConfig):
    """Settings of a training step's memory, speed and rounding; the algorithm is unchanged."""

    zero_stage: Literal[1, 2, 3] = 2
    """Sharded state: the optimizer's state (1), gradients too (2), weights too (3)."""
    offload_optimizer: bool = False
    """Keep float32 weights and moments in host memory, and step there."""
    offload_param: bool = False
    """Keep weights in host memory as well; with stage 3."""


STAGE_3_WITH_LORA_MESSAGE = (
    "3 shards only weights that are trained, but trainer.lora freezes some; choose 1 or 2"
)


def _check_options(config: DeepSpeedConfig) -> None:
    """Raise ``ConfigError`` if two options are incompatible."""
    if config.offload_param and config.zero_stage != 3:
        raise ConfigError(
            f"trainer.offload_param: stage {config.zero_stage} of ZeRO keeps weights on the "
            "device; set trainer.zero_stage=3"
        )
    if config.lora is not None and config.zero_stage == 3:
        raise ConfigError(f"trainer.zero_stage: {STAGE_3_WITH_LORA_MESSAGE}")
    if config.lora is not None and config.compute_dtype != "float32":
        raise ConfigError(
            "trainer.param_dtype: DeepSpeed rounds the frozen weights beside adapters and keeps "
            "no float32 copy; set trainer.param_dtype=float32, or choose trainer=fsdp"
        )


def _require_single_network(policy: Policy) -> None:
    """Raise ``ConfigError`` if the policy has several networks."""
    if len(policy.block_stacks()) > 1:
        raise ConfigError(
            f"trainer.name: {type(policy).__name__} has several networks, and an update may skip "
            "one of them, which is untested with deepspeed; choose trainer=fsdp"
        )


class _Root(nn.Module):
    """Root module of a DeepSpeed engine. It is called with a function that runs the network and
    computes the loss, so that DeepSpeed's hooks surround both."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, call: Callable[[], Tensor]) -> Tensor:
        return call()


class DeepSpeedTrainer(MinibatchTrainer):
    """Trainer that wraps a policy's module in a DeepSpeed engine (not an inference engine)."""

    Config = DeepSpeedConfig
    rounds_frozen_weights = True
    config: DeepSpeedConfig

    @classmethod
    def required_packages(cls, config: MinibatchTrainerConfig) -> tuple[str, ...]:
        return ("deepspeed", *super().required_packages(config))

    @classmethod
    def check_layout(
        cls,
        options: DeepSpeedConfig,
        run: RunComponents,
        layout: ParallelLayout,
        processes: int,
        key: str,
    ) -> None:
        super().check_layout(options, run, layout, processes, key)
        _check_options(options)
        meta_policy = run.classes["model"].meta_from_config(run.options["model"])
        if meta_policy is not None:
            _require_single_network(meta_policy)

    def __init__(
        self,
        policy: Policy,
        config: DeepSpeedConfig,
        optimizer: OptimizerSection,
        world: ProcessGroupInfo,
    ) -> None:
        _require_single_network(policy)
        _check_options(config)
        super().__init__(policy, config, optimizer, world)
        if config.zero_stage == 3 and not all(p.requires_grad for p in policy.module.parameters()):
            raise ConfigError(f"trainer.zero_stage: {STAGE_3_WITH_LORA_MESSAGE}")
        require_package("deepspeed", "deepspeed", "trainer=deepspeed")
        world.init_process_group(self.device.type)
        self._meta_module = copy.deepcopy(policy.module) if _is_meta(policy.module) else None
        if self._meta_module is not None:
            move_buffers(policy.module, self.device)
            allocate_parameters(policy.module, self.device)
            policy.load_weights()
        move_to_device(policy.module, self.device)
        self._dtypes = {name: t.dtype for name, t in _tensors(policy.module).items()}
        """Data types of the tensors before DeepSpeed converts them."""
        super()._reset_adapters()  # in the module: DeepSpeed has no copies of the weights yet
        self.optimizer = create_optimizer(policy, optimizer)
        self._groups_to_step: set[str] = {group[GROUP_KEY] for group in self.optimizer.param_groups}
        self._engine = self._create_engine()
        self._zero: ZeroOptimizer = (
            ZeroStage3Optimizer if config.zero_stage == 3 else ZeroStage12Optimizer
        )(self._engine.optimizer)
        self._fragments = {id(fragment.parameter): fragment for fragment in self._zero.fragments()}
        self._create_threads(1)  # the engine computes one micro-batch at a time

    def _create_engine(self) -> Any:
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        # DeepSpeed reads this variable; all else comes from the existing process group.
        os.environ.setdefault("LOCAL_RANK", str(self.world.local_rank))
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        if self.config.param_dtype == "float16" and not get_accelerator().is_fp16_supported():
            raise ConfigError(
                "trainer.param_dtype: DeepSpeed needs a GPU or a CPU with float16 instructions for "
                "float16, and this CPU has none; set trainer.param_dtype=bfloat16, or choose "
                "trainer=fsdp or trainer=megatron"
            )
        # This op is only for inference on CPUs, and compiling it takes a minute or two.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
        )
        dtype = self.config.compute_dtype
        offload = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        # DeepSpeed accepts only even sizes.
        count = sum(p.numel() for p in self.policy.module.parameters())
        bucket_size = min(MAX_BUCKET_ELEMENTS, count + count % 2)
        zero: dict[str, Any] = {
            "stage": self.config.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket_size,
            "allgather_bucket_size": bucket_size,
        }
        if self.config.offload_optimizer:
            zero["offload_optimizer"] = offload
        if self.config.offload_param:
            zero["offload_param"] = offload
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # Gradients accumulate until a step, over any number of passes.
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": dtype == "bfloat16"},
            # Losses are scaled before DeepSpeed receives them.
            "fp16": {"enabled": dtype == "float16", "loss_scale": 1.0},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": zero,
        }
        module = self.policy.module
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        engine, *_ = deepspeed.initialize(
            model=_Root(module), optimizer=self.optimizer, config=settings
        )
        for name, buffer in module.named_buffers():
            # Buffers, such as rotary frequencies, keep their data type.
            buffer.data = buffers[name].to(buffer.device)
        return engine

    def _evaluate(self, policy: Policy, inputs: Batch, temperature: float) -> StepOutputs:
        outputs: list[StepOutputs] = []

        def call() -> Tensor:
            outputs.append(policy.evaluate(inputs, temperature))
            return outputs[0].logprobs

        self._engine(call)
        return outputs[0]

    def _backward(
        self, loss: Callable[[], tuple[Tensor, dict[str, Tensor]]], factor: float, *, last: bool
    ) -> dict[str, Tensor]:
        metrics_out: dict[str, Tensor] = {}

        def call() -> Tensor:
            value, metrics = loss()
            metrics_out.update({"loss": value.detach(), **metrics})
            return value * factor

        self._engine.backward(self._engine(call), scale_wrt_gas=False)
        return metrics_out

    def discard_gradients(self) -> None:
        self._metric_sums = None
        self._zero.discard_gradients()

    @torch.no_grad()
    def _prepare_step(self, groups: Collection[str]) -> None:
        self._groups_to_step = set(groups)
        self._init_moments()
        self._zero.reduce_gradients()

    def _reduced_gradients(self, groups: Collection[str]) -> list[Tensor]:
        """Return the reduced gradient of those parameters of ``groups`` that the step changes."""
        return [
            gradient
            for flat_index in range(len(self._zero.flat_weights))
            if self._group_of(flat_index) in self._groups_to_step.intersection(groups)
            for gradient in self._zero.gradients(flat_index)
        ]

    def _gradient_norm(self, groups: Collection[str]) -> float:
        return float(
            global_grad_norm([gradient.float() for gradient in self._reduced_gradients(groups)])
        )

    @torch.no_grad()
    def _step(self, scales: Mapping[str, float]) -> None:
        for group, scale in scales.items():
            for gradient in self._reduced_gradients([group]) if scale != 1 else ():
                gradient.mul_(scale)
        excluded: list[tuple[Tensor, Tensor | None]] = []

        def exclude_groups(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                if group[GROUP_KEY] not in self._groups_to_step:
                    for flat in group["params"]:
                        excluded.append((flat, flat.grad))
                        flat.grad = None

        # The optimizer skips tensors without a gradient and keeps their moments.
        hook = self.optimizer.register_step_pre_hook(exclude_groups)
        try:
            self._zero.optimizer.step()
        finally:
            hook.remove()
        if self._zero.is_offloaded:  # then DeepSpeed always uses the same gradient tensors
            for flat, saved_gradient in excluded:
                flat.grad = saved_gradient

    def _group_of(self, flat_index: int) -> str:
        name: str = self.optimizer.param_groups[self._zero.param_group_of(flat_index)][GROUP_KEY]
        return name

    def _init_moments(self) -> None:
        for flat in self._zero.flat_weights:
            init_optimizer_state(self.optimizer, flat, self._moment_names)

    def tensor_groups(self) -> dict[str, list[Tensor]]:
        if self._closed:
            return {}
        tensors = [*_tensors(self.policy.module).values(), *self.policy.module.parameters()]
        # In stage 3: this process's shards, and the parameters that are gathered now.
        weights = [t.ds_tensor if hasattr(t, "ds_tensor") else t for t in tensors]
        weights += [t for t in tensors if hasattr(t, "ds_tensor") and t.numel()]
        weights = [t.detach() for t in weights]
        flats = self._zero.flat_weights
        placeholders = [torch.empty_like(flat, device="meta") for flat in flats]
        moments: list[Tensor] = []
        if not self._zero.is_offloaded:
            moments += flats
            for flat, placeholder in zip(flats, placeholders, strict=True):
                state = self.optimizer.state.get(flat)
                moments += state.values() if state else [placeholder] * len(self._moment_names)
        return {
            "weights": weights,
            "gradients": self._zero.gradient_buffers() or placeholders,
            "optimizer": moments,
        }

    def load(self, folder: Path) -> None:
        state = self._state()
        states = state["optimizer"]["state"]
        # A flat tensor gets the largest step count of its parameters in the files.
        counts = {name: torch.zeros(()) for name, tensors in states.items() if "step" in tensors}
        for name, count in counts.items():
            states[name]["step"] = count
        sharded_checkpoint.read_shards(folder, state, self._placements)
        named = dict(self.policy.module.named_parameters())
        for flat_index, flat in enumerate(self._zero.flat_weights):
            flat_counts = [
                count
                for name, count in counts.items()
                if self._fragments[id(named[name])].flat_index == flat_index
            ]
            if flat_counts:
                self.optimizer.state[flat]["step"].copy_(max(flat_counts))
        self._zero.sync_model_weights()

    @torch.no_grad()
    def _load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        named = _tensors(self.policy.module)
        local_parts = self._local_parts(named.items())
        loaded = set[int]()
        for name, tensor in tensors:
            if name not in local_parts or _shape(named[name]) != tensor.shape:
                raise weight_mismatch(name, 1)
            loaded.add(id(named[name]))
            placement, part = self._placements.get(f"model/{name}"), local_parts[name]
            if placement is None:
                part.copy_(tensor)
            else:
                part.copy_(tensor.reshape(-1)[placement.start : placement.start + len(part)])
        missing = [name for name, tensor in named.items() if id(tensor) not in loaded]
        if missing:
            raise weight_mismatch(missing[0], len(missing))
        self._zero.sync_model_weights()

    def load_policy_folder(self, folder: Path) -> None:
        """Load weights from a policy's folder. Each process reads them all and keeps its part."""
        cpu_policy = copy.copy(self.policy)
        assert self._meta_module is not None
        cpu_policy.module = copy.deepcopy(self._meta_module)
        allocate_parameters(cpu_policy.module, torch.device("cpu"))
        cpu_policy.load_weights(folder)
        self.load_weights(cpu_policy.module.state_dict().items())

    def _template(self, name: str, tensor: Tensor) -> Tensor:
        return torch.empty(_shape(tensor), dtype=self._dtypes[name], device="meta")

    @torch.no_grad()
    def _gather_full(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            fragment, dtype = self._fragments.get(id(tensor)), self._dtypes.get(name, torch.float32)
            if fragment is None or (self.config.zero_stage < 3 and tensor.dtype == dtype):
                yield name, tensor.detach()
                continue
            full = torch.zeros(fragment.shape, device=self.device)
            full.view(-1)[fragment.param_slice] = self._view(fragment, None)
            torch.distributed.all_reduce(full)
            yield name, full.to(dtype)

    def _view(self, fragment: ZeroFragment, moment: str | None) -> Tensor:
        """Return a view of a fragment in the float32 weights, or in a moment."""
        flat = self._zero.flat_weights[fragment.flat_index]
        if moment is not None:
            flat = self.optimizer.state[flat][moment]
        return flat.detach()[fragment.flat_start : fragment.flat_start + fragment.count]

    def _local_parts(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return this process's parts of these tensors, by name, and record their placements."""
        parts = {}
        for name, tensor in named:
            fragment = self._fragments.get(id(tensor))
            parts[name] = tensor.detach() if fragment is None else self._view(fragment, None)
            if fragment is not None:
                self._placements[f"model/{name}"] = sharded_checkpoint.ShardPlacement(
                    fragment.shape, fragment.param_start
                )
        return parts

    @torch.no_grad()
    def _reset_adapters(self) -> None:
        super()._reset_adapters()
        if self._adapters is not None:  # stages 1 and 2, which have full parameters
            for fragment in self._fragments.values():
                initial = fragment.parameter.view(-1)[fragment.param_slice]
                self._view(fragment, None).copy_(initial)

    def _state(self) -> dict[str, Any]:
        self._init_moments()
        state: dict[str, Any] = {}
        for name, parameter in self.policy.module.named_parameters():
            if (fragment := self._fragments.get(id(parameter))) is None:
                continue
            state[name] = {moment: self._view(fragment, moment) for moment in self._moment_names}
            for moment in self._moment_names:
                placement = sharded_checkpoint.ShardPlacement(fragment.shape, fragment.param_start)
                self._placements[f"optimizer/state/{name}/{moment}"] = placement
            flat_state = self.optimizer.state[self._zero.flat_weights[fragment.flat_index]]
            if "step" in flat_state:
                state[name]["step"] = flat_state["step"]
        adapters = self._adapters
        named = _tensors(self.policy.module) if adapters is None else adapters.parameters()
        model = self._local_parts(dict(named).items())
        return {"model": model, "optimizer": {"state": state}, **self._loss_scaler.state()}

    def _release(self) -> None:
        self.optimizer.state.clear()
        self._engine.destroy()
        self._zero.release(self._engine.module)
        self._meta_module, self._fragments = None, {}
        del self._engine, self._zero


_tensors = functools.partial(nn.Module.state_dict, keep_vars=True)
"""Returns a module's parameters and buffers by name; a tied tensor has several names."""


def _shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the full tensor, also if ZeRO has sharded it."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def _is_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())
