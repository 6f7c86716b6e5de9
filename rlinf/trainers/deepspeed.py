"""Training with DeepSpeed's ZeRO.

The optimizer's state is shared out over processes (stage 1), then gradients (2), then weights (3).

Batches are cut, losses summed and gradients clipped as by every trainer, and the files of a state
are the same: a run may change between trainers at a checkpoint.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlinf.channels.world import ParallelLayout, World
from rlinf.config import OptimizerSection
from rlinf.errors import ConfigError, require
from rlinf.models.base import Batch, Policy, StepOutputs, misfit
from rlinf.residency import buffers_to, give_memory, placed
from rlinf.trainers import shards
from rlinf.trainers.minibatch import MinibatchConfig, MinibatchTrainer
from rlinf.trainers.optimizer import GROUP, begin, make_optimizer
from rlinf.trainers.zero import Fragment, Zero, Zero3, Zero12, total_norm

UNITS = 50_000_000
"""Most elements that are reduced or gathered at once."""


class DeepSpeedConfig(MinibatchConfig):
    """How a training step is executed; nothing here changes its mathematics."""

    stage: Literal[1, 2, 3] = 2
    """What is shared out over processes: the optimizer's state (1), gradients too (2), weights too
    (3)."""
    offload_optimizer: bool = False
    """Keep float32 weights and moments in the host's memory, and step there."""
    offload_param: bool = False
    """Keep weights in the host's memory as well; of stage 3."""


SHARES_TRAINED = (
    "3 shares out weights that are trained, and here not all are (trainer.lora); choose 1 or 2"
)


def _check_options(config: DeepSpeedConfig) -> None:
    """
    Raises:
        ConfigError: two of them do not go together.
    """
    if config.offload_param and config.stage != 3:
        raise ConfigError(
            f"trainer.offload_param: stage {config.stage} of ZeRO keeps weights on the device; "
            "set trainer.stage=3"
        )
    if config.lora is not None and config.stage == 3:
        raise ConfigError(f"trainer.stage: {SHARES_TRAINED}")
    if config.lora is not None and config.param_dtype != "float32":
        raise ConfigError(
            "trainer.param_dtype: DeepSpeed rounds weights that adapters leave alone, and "
            "keeps no others; set trainer.param_dtype=float32, or choose trainer=fsdp"
        )


def _check_stacks(policy: Policy) -> None:
    """
    Raises:
        ConfigError: it has several networks.
    """
    if len(policy.stacks()) > 1:
        raise ConfigError(
            f"trainer.name: {type(policy).__name__} has several networks, of which an update may "
            "leave one out, which deepspeed has not been tried with; choose trainer=fsdp"
        )


class _Root(nn.Module):
    """What DeepSpeed calls instead of the network: losses call that as they like."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, call: Callable[[], Tensor]) -> Tensor:
        return call()


class DeepSpeedTrainer(MinibatchTrainer):
    """Owns DeepSpeed's engine of a policy's module."""

    Config = DeepSpeedConfig
    config: DeepSpeedConfig

    @classmethod
    def packages(cls, config: MinibatchConfig) -> tuple[str, ...]:
        return ("deepspeed", *super().packages(config))

    @classmethod
    def check(
        cls,
        config: DeepSpeedConfig,
        policy: type[Policy],
        model: Any,
        optimizer: OptimizerSection,
        layout: ParallelLayout,
        processes: int,
        key: str,
    ) -> None:
        super().check(config, policy, model, optimizer, layout, processes, key)
        _check_options(config)
        if (sketch := policy.sketch(model)) is not None:
            _check_stacks(sketch)

    def __init__(
        self, policy: Policy, config: DeepSpeedConfig, optimizer: OptimizerSection, world: World
    ) -> None:
        _check_stacks(policy)
        _check_options(config)
        super().__init__(policy, config, optimizer, world)
        if config.stage == 3 and not all(p.requires_grad for p in policy.module.parameters()):
            raise ConfigError(f"trainer.stage: {SHARES_TRAINED}")
        require("deepspeed", "deepspeed", "trainer=deepspeed")
        world.connect(self.device.type)
        self._outline = copy.deepcopy(policy.module) if _empty(policy.module) else None
        if self._outline is not None:
            buffers_to(policy.module, self.device)
            give_memory(policy.module, self.device)
            policy.fill()
        placed(policy.module, self.device)
        self._types = {name: t.dtype for name, t in _named(policy.module).items()}
        super()._reset_adapters()
        self.optimizer = make_optimizer(policy, optimizer)
        self._chosen: set[str] = {group[GROUP] for group in self.optimizer.param_groups}
        self._engine = self._start()
        self._zero: Zero = (Zero3 if config.stage == 3 else Zero12)(self._engine.optimizer)
        self._fragments = {id(part.parameter): part for part in self._zero.fragments()}
        self._compute_by(1)

    def _start(self) -> Any:
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        # Some of it is read from there, the rest from the process group that is there already.
        os.environ.setdefault("LOCAL_RANK", str(self.world.local_rank))
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        if self.config.param_dtype == "float16" and not get_accelerator().is_fp16_supported():
            raise ConfigError(
                "trainer.param_dtype: DeepSpeed computes in float16 on GPUs, and on CPUs that have "
                "its instructions, which this one has not; set trainer.param_dtype=bfloat16, or "
                "choose trainer=fsdp or trainer=megatron"
            )
        # It serves inference on CPUs, and compiling it takes a minute or two.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
        )
        dtype = self.config.param_dtype
        offload = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        # DeepSpeed takes even ones alone.
        count = sum(p.numel() for p in self.policy.module.parameters())
        unit = min(UNITS, count + count % 2)
        zero: dict[str, Any] = {
            "stage": self.config.stage,
            "overlap_comm": False,
            "reduce_bucket_size": unit,
            "allgather_bucket_size": unit,
        }
        if self.config.offload_optimizer:
            zero["offload_optimizer"] = offload
        if self.config.offload_param:
            zero["offload_param"] = offload
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # Gradients add up until a step, however many passes that are.
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": dtype == "bfloat16"},
            # Losses are scaled before they come here.
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
            # Frequencies of positions, say, are no parameters: they keep their type.
            buffer.data = buffers[name].to(buffer.device)
        return engine

    def _evaluate(self, policy: Policy, inputs: Batch, temperature: float) -> StepOutputs:
        said: list[StepOutputs] = []

        def call() -> Tensor:
            said.append(policy.evaluate(inputs, temperature))
            return said[0].logprobs

        self._engine(call)
        return said[0]

    def _backward(
        self, loss: Callable[[], tuple[Tensor, dict[str, Tensor]]], factor: float, *, last: bool
    ) -> dict[str, Tensor]:
        said: dict[str, Tensor] = {}

        def call() -> Tensor:
            value, metrics = loss()
            said.update({"loss": value.detach(), **metrics})
            return value * factor

        self._engine.backward(self._engine(call), scale_wrt_gas=False)
        return said

    def discard(self) -> None:
        self._sums = None
        self._zero.discard()

    @torch.no_grad()
    def _leave_out(self, chosen: Collection[str]) -> None:
        self._chosen = set(chosen)
        self._begin()
        self._zero.reduce()

    def _parts(self, groups: Collection[str]) -> list[Tensor]:
        """The reduced gradient of what is chosen of some groups."""
        return [
            gradient
            for number in range(len(self._zero.flats))
            if self._group(number) in self._chosen.intersection(groups)
            for gradient in self._zero.gradients(number)
        ]

    def _gradient_norm(self, groups: Collection[str]) -> float:
        return float(total_norm([part.float() for part in self._parts(groups)]))

    @torch.no_grad()
    def _step(self, scales: Mapping[str, float]) -> None:
        for group, scale in scales.items():
            for gradient in self._parts([group]) if scale != 1 else ():
                gradient.mul_(scale)
        kept: list[tuple[Tensor, Tensor | None]] = []

        def before(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                if group[GROUP] not in self._chosen:
                    for flat in group["params"]:
                        kept.append((flat, flat.grad))
                        flat.grad = None

        # A tensor without a gradient is not stepped, and keeps its moments.
        hook = self.optimizer.register_step_pre_hook(before)
        try:
            self._zero.optimizer.step()
        finally:
            hook.remove()
        if self._zero.offloads:  # its gradient has its memory for good
            for flat, own in kept:
                flat.grad = own

    def _group(self, flat: int) -> str:
        name: str = self.optimizer.param_groups[self._zero.owner(flat)][GROUP]
        return name

    def _begin(self) -> None:
        """Have moments, as before any step."""
        for flat in self._zero.flats:
            begin(self.optimizer, flat, self._moments)

    def resident(self) -> dict[str, list[Tensor]]:
        if self._closed:
            return {}
        own = [*_named(self.policy.module).values(), *self.policy.module.parameters()]
        weights = [t.ds_tensor if hasattr(t, "ds_tensor") else t for t in own]
        weights += [t for t in own if hasattr(t, "ds_tensor") and t.numel()]
        weights = [t.detach() for t in weights]
        flats = self._zero.flats
        to_come = [torch.empty_like(flat, device="meta") for flat in flats]
        moments: list[Tensor] = []
        if not self._zero.offloads:
            moments += flats
            for flat, empty in zip(flats, to_come, strict=True):
                state = self.optimizer.state.get(flat)
                moments += state.values() if state else [empty] * len(self._moments)
        return {
            "weights": weights,
            "gradients": self._zero.accumulated() or to_come,
            "optimizer": moments,
        }

    def load(self, folder: Path) -> None:
        state = self._state()
        steps = state["optimizer"]["state"]
        # One count for all of a flat tensor: what no loss depended on has fewer steps elsewhere.
        counts = {name: torch.zeros(()) for name, parts in steps.items() if "step" in parts}
        for name, count in counts.items():
            steps[name]["step"] = count
        shards.read(folder, state, self._places)
        named = dict(self.policy.module.named_parameters())
        for number, flat in enumerate(self._zero.flats):
            found = [
                count
                for name, count in counts.items()
                if self._fragments[id(named[name])].flat == number
            ]
            if found:
                self.optimizer.state[flat]["step"].copy_(max(found))
        self._zero.refresh()

    @torch.no_grad()
    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        named = _named(self.policy.module)
        own = self._own(named.items())
        given = set[int]()
        for name, tensor in tensors:
            if name not in own or _shape(named[name]) != tensor.shape:
                raise misfit(name, 1)
            given.add(id(named[name]))
            place, part = self._places.get(f"model/{name}"), own[name]
            if place is None:
                part.copy_(tensor)
            else:
                part.copy_(tensor.reshape(-1)[place.start : place.start + len(part)])
        lacking = [name for name, tensor in named.items() if id(tensor) not in given]
        if lacking:
            raise misfit(lacking[0], len(lacking))
        self._zero.refresh()

    def fill(self, folder: Path) -> None:
        """Each process reads the whole once, and keeps its part."""
        twin = copy.copy(self.policy)
        assert self._outline is not None
        twin.module = copy.deepcopy(self._outline)
        give_memory(twin.module, torch.device("cpu"))
        twin.fill(folder)
        self.load_weights(twin.module.state_dict().items())

    def _like(self, name: str, tensor: Tensor) -> Tensor:
        return torch.empty(_shape(tensor), dtype=self._types[name], device="meta")

    @torch.no_grad()
    def _gathered(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            part, dtype = self._fragments.get(id(tensor)), self._types.get(name, torch.float32)
            if part is None or (self.config.stage < 3 and tensor.dtype == dtype):
                yield name, tensor.detach()
                continue
            whole = torch.zeros(part.shape, device=self.device)
            whole.view(-1)[part.start : part.start + part.count] = self._view(part, None)
            torch.distributed.all_reduce(whole)
            yield name, whole.to(dtype)

    def _view(self, part: Fragment, moment: str | None) -> Tensor:
        """A fragment of the float32 weights, or of one of their moments."""
        flat = self._zero.flats[part.flat]
        if moment is not None:
            flat = self.optimizer.state[flat][moment]
        return flat.detach()[part.begin : part.begin + part.count]

    def _own(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """What this process has of some tensors of the module, by name."""
        found = {}
        for name, tensor in named:
            part = self._fragments.get(id(tensor))
            found[name] = tensor.detach() if part is None else self._view(part, None)
            if part is not None:
                self._places[f"model/{name}"] = shards.Place(part.shape, part.start)
        return found

    @torch.no_grad()
    def _reset_adapters(self) -> None:
        super()._reset_adapters()
        if self._adapters is not None:  # of stages 1 and 2, which have them whole
            for part in self._fragments.values():
                own = part.parameter.view(-1)[part.start : part.start + part.count]
                self._view(part, None).copy_(own)

    def _state(self) -> dict[str, Any]:
        self._begin()
        state: dict[str, Any] = {}
        for name, parameter in self.policy.module.named_parameters():
            if (part := self._fragments.get(id(parameter))) is None:
                continue
            state[name] = {moment: self._view(part, moment) for moment in self._moments}
            for moment in self._moments:
                place = shards.Place(part.shape, part.start)
                self._places[f"optimizer/state/{name}/{moment}"] = place
            own = self.optimizer.state[self._zero.flats[part.flat]]
            if "step" in own:
                state[name]["step"] = own["step"]
        named = (
            _named(self.policy.module) if self._adapters is None else self._adapters.parameters()
        )
        model = self._own(dict(named).items())
        return {"model": model, "optimizer": {"state": state}, **self._scaling.state()}

    def _release(self) -> None:
        self.optimizer.state.clear()
        self._engine.destroy()
        self._zero.release(self._engine.module)
        self._outline, self._fragments = None, {}
        del self._engine, self._zero


_named = functools.partial(nn.Module.state_dict, keep_vars=True)
"""A module's parameters and buffers by all their names; of tied ones the same tensor."""


def _shape(tensor: Tensor) -> torch.Size:
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def _empty(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())
