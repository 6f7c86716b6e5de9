"""Low-rank adapters (LoRA, arXiv 2106.09685) through PEFT. Only the adapters are trained.

The adapters belong to the trainer. Its checkpoints contain them and their moments. Engines and
policy folders receive the network's weights with the adapters merged in, under their usual names.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rlinf.config import Section
from rlinf.errors import ConfigError, DataError, did_you_mean, require_package
from rlinf.models.base import Policy
from rlinf.sharded_tensors import local_rows, local_shard
from rlinf.trainers.sharded_checkpoint import read_full_tensors

ADAPTER_NAME = "default"
"""Part of the names of all adapter parameters in PEFT."""
CHECKPOINT_PREFIX = "model/"
"""Prefix of the names of weights and adapters in the checkpoints of trainers."""
PEFT_PREFIX = "base_model.model."
"""Prefix of the names of adapters in PEFT's folders."""
PEFT_WEIGHTS_FILE = "adapter_model.safetensors"


class LoRAConfig(Section):
    """Settings of adapters, which are trained in place of all weights."""

    rank: int = Field(gt=0)
    alpha: float = Field(default=16.0, gt=0)
    """Numerator of the scale ``alpha / rank`` of the adapters' output."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of the linear layers that get an adapter; empty: all except the
    head."""


class LoRAAdapters:
    """The adapters of a policy's module. The module's ``named_parameters`` contain the adapters;
    its state dict does not."""

    def __init__(self, policy: Policy, settings: LoRAConfig) -> None:
        """
        Raises:
            ConfigError: a target module does not exist in the network, or the policy does not
                support adapters.
        """
        check_lora_targets(type(policy), policy, settings)
        require_package("peft", "peft", "trainer.lora")
        from peft import LoraConfig, inject_adapter_in_model

        targets = list(settings.target_modules) or _linears_in_blocks(policy)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
            target_modules=targets,
        )
        is_meta = any(parameter.is_meta for parameter in policy.module.parameters())
        inject_adapter_in_model(config, policy.module, ADAPTER_NAME, low_cpu_mem_usage=is_meta)
        self._policy = policy
        self.scale = settings.alpha / settings.rank
        layers = dict(_lora_layers(policy.module))
        self._layer_names = list(layers)
        for layer in layers.values():
            layer.register_state_dict_post_hook(_rename_to_base)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the adapters by name. If the module is sharded, they are this rank's rows; request
        the module's state dict first, because they may be gathered after a pass."""
        for name, parameter in self._policy.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    @torch.no_grad()
    def reset(self) -> None:
        """Reset the adapters; see :func:`initial_factor`."""
        for name, parameter in self.parameters():
            start, stop = local_rows(parameter)
            local_shard(parameter).copy_(initial_factor(name, parameter.shape)[start:stop])

    def weight_merger(self, factors: Mapping[str, Tensor]) -> Callable[[str, Tensor], Tensor]:
        """Return a function that merges the adapters into a weight. Its arguments are the name that
        the weight has without adapters, and the weight.

        Args:
            factors: the adapters' A and B, unsharded, by name.
        """
        layers_by_weight = {f"{name}.weight": name for name in self._layer_names}

        def merge(name: str, weight: Tensor) -> Tensor:
            if (layer := layers_by_weight.get(name)) is None:
                return weight
            b, a = (factors[f"{layer}.lora_{side}.{ADAPTER_NAME}.weight"] for side in "BA")
            return (weight + self.scale * (b @ a)).to(weight.dtype)

        return merge


def check_lora_targets(cls: type[Policy], policy: Policy | None, settings: LoRAConfig) -> None:
    """Check that a policy supports adapters, and that every target exists and can be merged into.

    Args:
        policy: an instance of ``cls``, possibly without memory. None: the modules are not known
            yet, and targets are not checked.

    Raises:
        ConfigError: a check failed; the message names the target.
    """
    if not (cls if policy is None else policy).supports_lora:
        raise ConfigError(
            f"trainer.lora: {cls.__name__} has parts that adapters do not train; "
            "train all weights (trainer.lora=null)"
        )
    if policy is None:
        return
    key, modules = "trainer.lora.target_modules", dict(policy.module.named_modules())
    weight_users = Counter(id(w) for _, w in policy.module.named_parameters(remove_duplicate=False))
    for target in settings.target_modules or _linears_in_blocks(policy):
        named = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not named:
            linears = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
            hint = did_you_mean(target, {name.rpartition(".")[2] for name in linears})
            raise ConfigError(f"{key}: {target!r} is not in the model{hint}")
        for name in named:
            if not isinstance(module := modules[name], nn.Linear):
                raise ConfigError(
                    f"{key}: {name} is a {type(module).__name__}; adapters support only linear "
                    "layers"
                )
            if weight_users[id(module.weight)] > 1:
                raise ConfigError(
                    f"{key}: {name} shares its weight with another layer, so nothing can be merged "
                    "into it; leave it out"
                )


def write_adapter_folder(checkpoint: Path, target: Path, settings: LoRAConfig, base: str) -> None:
    """Write the adapters of a trainer's checkpoint as a folder that PEFT and vLLM load.

    Args:
        checkpoint: a checkpoint of any trainer.
        target: an existing folder.
        base: hub name or path of the model that the adapters belong to.

    Raises:
        DataError: the checkpoint has no adapters, or is no checkpoint.
    """
    require_package("peft", "peft", "--adapter")
    from peft import LoraConfig
    from safetensors.torch import save_file

    suffix = f".{ADAPTER_NAME}.weight"
    factors = {
        name.removeprefix(CHECKPOINT_PREFIX): tensor
        for name, tensor in read_full_tensors(checkpoint, CHECKPOINT_PREFIX).items()
        if ".lora_" in name and name.endswith(suffix)
    }
    if not factors:
        raise DataError(f"{checkpoint}: has no adapters")
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
        # Full names, because the last part of a name may also be that of a layer without adapter.
        target_modules=sorted({name.rpartition(".lora_")[0] for name in factors}),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    tensors = {
        f"{PEFT_PREFIX}{name.removesuffix(suffix)}.weight": tensor
        for name, tensor in factors.items()
    }
    save_file(tensors, target / PEFT_WEIGHTS_FILE, metadata={"format": "pt"})
    config.save_pretrained(str(target))


@torch.no_grad()
def initial_factor(name: str, shape: Sequence[int]) -> Tensor:
    """Return the initial value of a factor (A or B) of an adapter, unsharded, float32.

    A has random numbers, the same in every process and run. B is zero, so that the network's output
    is unchanged at first.
    """
    if ".lora_B." in name:
        return torch.zeros(*shape)
    seed = hashlib.blake2b(name.encode(), digest_size=8).digest()
    random = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
    bound = shape[1] ** -0.5  # like the initial weights of nn.Linear
    return torch.empty(*shape).uniform_(-bound, bound, generator=random)


def _lora_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, m) for name, m in module.named_modules() if isinstance(m, LoraLayer))


def _linears_in_blocks(policy: Policy) -> list[str]:
    """Return the full names of the linear layers inside the blocks."""
    ids_in_blocks = {id(submodule) for block in policy.blocks() for submodule in block.modules()}
    names = [
        name
        for name, submodule in policy.module.named_modules()
        if isinstance(submodule, nn.Linear) and id(submodule) in ids_in_blocks
    ]
    if not names:
        raise ConfigError(
            f"trainer.lora: {type(policy).__name__} names no blocks with linear layers; name the "
            "layers in trainer.lora.target_modules"
        )
    return names


def _rename_to_base(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Rename a layer's state to the names that it has without an adapter; remove the adapter."""
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if name.startswith("base_layer."):
            state[prefix + name.removeprefix("base_layer.")] = state.pop(key)
        elif name.startswith("lora_"):
            del state[key]
