"""A policy's optimizer with separately updated groups, its offload, and dynamic loss scaling."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlinf.config import OptimizerSection
from rlinf.errors import StageError
from rlinf.models.base import Policy
from rlinf.sharded_tensors import is_sharded, local_shard

GROUP_KEY = "group"
"""Key, in an entry of ``optimizer.param_groups``, of the policy's parameter group. A group has two
entries if some of its parameters have weight decay and some have none."""
MOMENT_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""Names of the state tensors that each optimizer keeps per parameter, of the parameter's size."""


def create_optimizer(
    policy: Policy,
    settings: OptimizerSection,
    parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
) -> Optimizer:
    """Return an optimizer that has no moments yet.

    Args:
        parameters: pairs of the policy's parameter group and a parameter; None: all trainable
            parameters of the policy.
    """
    if parameters is None:
        named = policy.module.named_parameters()
        parameters = ((policy.parameter_group(name), p) for name, p in named if p.requires_grad)
    # Few entries, because each costs as much time per step as a small network.
    decays = (settings.weight_decay, 0.0) if settings.weight_decay else (0.0,)
    entries: dict[tuple[float, str], dict[str, Any]] = {
        (decay, name): {GROUP_KEY: name, "weight_decay": decay, "params": []}
        for decay in decays
        for name in policy.parameter_groups
    }
    for group, parameter in parameters:
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        entries[decay, group]["params"].append(parameter)
    non_empty = [entry for entry in entries.values() if entry["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(non_empty, lr=settings.lr, momentum=settings.betas[0], foreach=True)
    # The fused optimizer reads memory once instead of five times. It does not support a mix of
    # sharded and other tensors, and on a GPU it would keep step counts on the GPU.
    all_params = [p for entry in non_empty for p in entry["params"]]
    fused = all(p.device.type == "cpu" and not is_sharded(p) for p in all_params)
    impl = {"fused": True} if fused else {"foreach": True}
    betas, eps = settings.betas, settings.eps
    return torch.optim.AdamW(non_empty, lr=settings.lr, betas=betas, eps=eps, **impl)


def set_learning_rates(
    optimizer: Optimizer, rates: float | Mapping[str, float], groups: Collection[str] | None
) -> set[str]:
    """Set the learning rates of the parameter groups that the next step changes; None: all groups.

    Returns:
        The names of these groups.

    Raises:
        ValueError: a group does not exist, or has no learning rate.
    """
    names = {group[GROUP_KEY] for group in optimizer.param_groups}
    chosen = names if groups is None else set(groups)
    with_rate = chosen if isinstance(rates, float | int) else set(rates)
    if unknown := (chosen - names) | (chosen - with_rate):
        raise ValueError(f"no group of parameters, or no learning rate: {sorted(unknown)}")
    for group in optimizer.param_groups:
        if group[GROUP_KEY] in chosen:
            group["lr"] = rates if isinstance(rates, float | int) else rates[group[GROUP_KEY]]
    return chosen


@torch.no_grad()
def scale_gradients(optimizer: Optimizer, scales: Mapping[str, float]) -> None:
    """Multiply the gradients of each parameter group by its factor in ``scales``."""
    for group in optimizer.param_groups:
        if (scale := scales[group[GROUP_KEY]]) != 1:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)


@torch.no_grad()
def freeze_other_groups(
    optimizer: Optimizer, moments: Collection[str], chosen: Collection[str]
) -> None:
    """Restrict the next step to the groups ``chosen``.

    Parameters that the step does not change (of other groups, or without a gradient) get initial
    ``moments`` (their names), because checkpoints contain the moments of all parameters.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group[GROUP_KEY] not in chosen:
                parameter.grad = None
            if parameter.grad is None:
                init_optimizer_state(optimizer, parameter, moments)


def init_optimizer_state(optimizer: Optimizer, parameter: Tensor, moments: Collection[str]) -> None:
    """Create a parameter's optimizer state with its initial value, zero, unless it exists."""
    if not optimizer.state[parameter]:
        initial = {name: torch.zeros_like(parameter) for name in moments}
        if "exp_avg" in initial:
            initial["step"] = torch.zeros((), dtype=torch.float32)
        optimizer.state[parameter].update(initial)


OFFLOAD_CHUNK_BYTES = 256 << 20
"""Maximum size of the parameters whose state is on the device at the same time."""
HOST_DEVICE = torch.device("cpu")


def step_with_offload(
    optimizer: torch.optim.Optimizer, device: torch.device, max_bytes: int = OFFLOAD_CHUNK_BYTES
) -> None:
    """Do an optimizer step in chunks of parameters, with only one chunk's state on the device.

    The optimizer must treat each parameter separately. The result then equals that of an ordinary
    step, byte for byte.
    """
    groups = optimizer.param_groups
    group_params = [group["params"] for group in groups]
    try:
        for chunk in _chunks([p for params in group_params for p in params], max_bytes):
            for group, params in zip(groups, group_params, strict=True):
                group["params"] = [p for p in params if p in chunk]
            move_optimizer_state(optimizer, chunk, device)
            optimizer.step()
            move_optimizer_state(optimizer, chunk, HOST_DEVICE)
    finally:
        for group, params in zip(groups, group_params, strict=True):
            group["params"] = params


def move_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: set[nn.Parameter], device: torch.device
) -> None:
    """Move the optimizer state of these parameters to a device."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for name, tensor in state.items():
            # Step counts (scalars) are not moved: the optimizer chooses their device.
            if isinstance(tensor, Tensor) and tensor.dim():
                state[name] = to_device(tensor, device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; a tensor that is already there is not copied."""
    if not is_sharded(tensor):
        return tensor.to(device)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local_shard(tensor).to(device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _chunks(parameters: list[nn.Parameter], max_bytes: int) -> Iterator[set[nn.Parameter]]:
    """Yield adjacent parameters of up to ``max_bytes`` in total; a single one may be larger."""
    chunk, size = set[nn.Parameter](), 0
    for parameter in parameters:
        nbytes = local_shard(parameter).nbytes
        if chunk and size + nbytes > max_bytes:
            yield chunk
            chunk, size = set(), 0
        chunk.add(parameter)
        size += nbytes
    if chunk:
        yield chunk


log = logging.getLogger("rlinf")
LOSS_SCALE = "loss_scale"
"""Name of the scaler's tensor in checkpoints."""
MIN_LOSS_SCALE = 2.0**-24
"""Smallest float16 number. A gradient that overflows even at this scale is itself not finite."""


class LossScaler:
    """Loss scale, by which a loss is multiplied before its gradient is computed in float16."""

    def __init__(self, initial_scale: float = 1.0, window: int | None = None) -> None:
        """
        Args:
            initial_scale: a power of two, so that dividing by it is exact.
            window: number of steps without overflow after which the scale is doubled. None: the
                scale is constant.
        """
        self._window = window
        self._state = torch.tensor([initial_scale, 0.0])
        """The scale, and the number of steps without overflow since it last changed."""

    @property
    def value(self) -> float:
        return float(self._state[0])

    @property
    def is_dynamic(self) -> bool:
        return self._window is not None

    def state(self) -> Mapping[str, Tensor]:
        """Return the scaler's part of a trainer's state, not copied; empty for a constant scale."""
        return {LOSS_SCALE: self._state} if self.is_dynamic else {}

    def record_step(self) -> None:
        """Count a step without overflow."""
        if self._window is None:
            return
        self._state[1] += 1
        if int(self._state[1]) >= self._window:
            doubled = 2 * self.value
            self._state[0] = doubled if doubled < torch.finfo(torch.float32).max else self.value
            self._state[1] = 0.0

    def record_overflow(self) -> None:
        """Halve the scale after an overflow.

        Raises:
            StageError: the scale is at its minimum.
        """
        if self.value <= MIN_LOSS_SCALE:
            raise StageError(
                f"the gradient is not finite in float16 even at loss scale {MIN_LOSS_SCALE:.1g}; "
                "the previous weights are untouched. Set trainer.param_dtype=bfloat16, or lower "
                "optimizer.lr"
            )
        self._state[0] /= 2
        self._state[1] = 0.0
        log.info("a gradient overflowed float16: no step; loss scale %g", self.value)
