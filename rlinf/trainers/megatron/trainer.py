"""Training with Megatron-Core: tensor, sequence, pipeline, context and expert parallelism.

The weights of a policy's ``transformers`` network are converted into Megatron's model by their
names, and are exported under the same names. Splitting batches, summing losses and clipping
gradients work as in every trainer, and the checkpoint files are the same. A run may therefore
change between trainers and layouts at a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from rlinf.channels.process_group import LAYOUT_VARIABLE, ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.load_balancing import StepSpan
from rlinf.data.trajectory import Trajectory
from rlinf.device_memory import allocate_parameters
from rlinf.errors import ConfigError, require_package
from rlinf.models.base import Policy, StepOutputs, weight_mismatch
from rlinf.models.causal_lm import CausalLM
from rlinf.registry import RunComponents
from rlinf.safetensors_io import StreamedState
from rlinf.trainers import sharded_checkpoint
from rlinf.trainers.base import LossFunction, merge_metrics
from rlinf.trainers.lora import initial_factor
from rlinf.trainers.megatron import hf_mapping, parallel_dims
from rlinf.trainers.megatron.compatibility import (
    ONLY_CAUSAL_LM_MESSAGE,
    check_adapters,
    check_layout,
    check_model,
    check_options,
    read_model_config,
)
from rlinf.trainers.megatron.local_params import LocalParams, LocalTensors, read_part, write_part
from rlinf.trainers.megatron.lora_layers import add_lora_layers
from rlinf.trainers.megatron.model import MegatronNetwork, head_size
from rlinf.trainers.minibatch import (
    MicroBatches,
    MinibatchTrainer,
    MinibatchTrainerConfig,
    ThreadedDataParallel,
)
from rlinf.trainers.optimizer import create_optimizer, init_optimizer_state, scale_gradients


class MegatronConfig(MinibatchTrainerConfig):
    """Settings of a training step's memory, speed and rounding; the algorithm is unchanged."""

    sequence_parallel: bool = False
    """Also split the positions between the matrices over tensor-parallel processes."""
    use_distributed_optimizer: bool = False
    """Shard moments and float32 weights over processes with the same weights; with AdamW."""
    layers_per_pipeline_stage: tuple[PositiveInt, ...] = ()
    """Number of layers of each pipeline stage; empty: evenly distributed."""


class MegatronTrainer(MinibatchTrainer):
    """Trainer with this process's part of Megatron's model, and its optimizer."""

    Config = MegatronConfig
    rounds_frozen_weights = True
    config: MegatronConfig
    parallel_dims: ClassVar[frozenset[str]] = frozenset({"tp", "pp", "cp", "ep"})

    @classmethod
    def required_packages(cls, config: MinibatchTrainerConfig) -> tuple[str, ...]:
        return ("megatron", *super().required_packages(config))

    @classmethod
    def check_layout(
        cls,
        options: MegatronConfig,
        run: RunComponents,
        layout: ParallelLayout,
        processes: int,
        key: str,
    ) -> None:
        model, optimizer = run.options["model"], run.config.optimizer
        is_distributed = options.use_distributed_optimizer
        check_options(options, layout, optimizer, key, distributed_optimizer=is_distributed)
        settings = read_model_config(model)
        check_model(settings)
        check_layout(settings, layout, options.layers_per_pipeline_stage, key)
        check_adapters(options, settings, layout, model.dtype)
        super().check_layout(options, run, layout, processes, key)

    def __init__(
        self,
        policy: Policy,
        config: MegatronConfig,
        optimizer: OptimizerSection,
        world: ProcessGroupInfo,
    ) -> None:
        if not isinstance(policy, CausalLM) or policy.network is not policy.module:
            raise ConfigError(ONLY_CAUSAL_LM_MESSAGE)
        is_distributed, key = config.use_distributed_optimizer, LAYOUT_VARIABLE
        check_options(config, world.layout, optimizer, key, distributed_optimizer=is_distributed)
        network: Any = policy.module
        model = network.config.to_dict()
        check_model(model)
        check_layout(model, world.layout, config.layers_per_pipeline_stage, key)
        dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
        check_adapters(config, model, world.layout, dtype)
        if world.layout.cp > 1:
            config = config.model_copy(update={"packing": False})
        super().__init__(policy, config, optimizer, world)
        require_package("megatron", "megatron", "trainer=megatron")
        parallel_dims.initialize_process_groups(world, self.device.type)
        if self._is_packed:  # the collation of packed rows is the same on every device
            policy.enable_packing(torch.device("cpu"), torch.float32)
        self._meta_module = _copy_to_meta(network)
        named = network.state_dict(keep_vars=True)
        first_names: dict[int, str] = {}
        self._canonical_names = {n: first_names.setdefault(id(t), n) for n, t in named.items()}
        """The first name of each tensor, by each of its names; tied tensors have several."""
        self._templates = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in named.items()
        }
        """Meta tensors in the shapes and types of the network's tensors, by name."""
        factors = () if self._adapters is None else self._adapters.parameters()
        self._factors = {name: torch.empty(p.shape, device="meta") for name, p in factors}
        """Meta tensors in the shapes of the adapters' A and B, by name."""
        module = MegatronNetwork(
            network, world.layout, options=self._options(network), device=self.device
        )
        if config.lora is not None:
            first_layer = _first_layer(module.inner)
            add_lora_layers(module.inner, module.config, first_layer, self._factors, config.lora)
        mappings = self._param_mappings(module.inner)

        def create(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            grouped = [(_parameter_group(policy, mappings[id(p)]), p) for p in parameters]
            return create_optimizer(policy, optimizer, grouped)

        self._params = LocalParams(module.inner, create, distributed_optimizer=is_distributed)
        self.optimizer = self._params.optimizer
        self._tensors = LocalTensors(self._params, mappings, [*self._templates, *self._factors])
        self._check_complete()
        self._shard_coords = (world.rank, world.size)
        for part in self._tensors.trained_parts:
            self._placements[f"model/{part.name}"] = part.placement
            for moment in self._moment_names:
                self._placements[f"optimizer/state/{part.name}/{moment}"] = part.placement
            step_placement = sharded_checkpoint.ShardPlacement((), 0)
            self._placements[f"optimizer/state/{part.name}/step"] = step_placement
        policy.module = module
        self._threads = ThreadedDataParallel(policy, 1)
        if any(tensor.is_meta for tensor in named.values()):
            self._load_with(lambda cpu_policy: cpu_policy.load_weights())
        else:
            self._load_tensors(network.state_dict().items())
        self._reset_adapters()

    def _options(self, network: Any) -> dict[str, Any]:
        """Return the options of Megatron's configuration that depend on the trainer."""
        config, layout = self.config, self.world.layout
        dtype = getattr(torch, config.compute_dtype)
        # Megatron requires sequence parallelism if there are experts.
        splits_sequences = config.sequence_parallel or bool(
            getattr(network.config, "num_experts", 0)
        )
        options: dict[str, Any] = {
            "sequence_parallel": splits_sequences and layout.tp > 1,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
        }
        if config.layers_per_pipeline_stage and layout.pp > 1:
            stages = [["decoder"] * count for count in config.layers_per_pipeline_stage]
            stages[0].insert(0, "embedding")
            stages[-1].append("loss")
            options["pipeline_model_parallel_layout"] = stages
        if config.gradient_checkpointing:
            options |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        return options

    def _param_mappings(self, inner: Any) -> dict[int, hf_mapping.ParamMapping]:
        """Return each parameter's mapping to tensors of the original network, by ``id``."""
        from megatron.core import parallel_state

        module: Any = self.policy.module
        hf_config, tp = module.config, self.world.layout.tp
        head_dim = head_size(hf_config)
        queries_per_kv = hf_config.num_attention_heads // hf_config.num_key_value_heads
        tensors = self._templates | self._factors
        rank_slice = hf_mapping.RankSlice(
            shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            tp=tp,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            first_layer=_first_layer(inner),
            first_expert=parallel_state.get_expert_model_parallel_rank()
            * (getattr(hf_config, "num_experts", None) or 0)
            // self.world.layout.ep,
            query_and_kv_rows=(queries_per_kv * head_dim, head_dim),
            tied=bool(hf_config.tie_word_embeddings),
        )
        mappings = {}
        for name, parameter in inner.named_parameters():
            mapping = hf_mapping.map_param(name, tuple(parameter.shape), rank_slice)
            # LocalParams reads these to count the processes with the same fragment.
            parameter.is_split = mapping.is_tensor_parallel
            parameter.is_tied_copy = rank_slice.tied and name == "output_layer.weight"
            mappings[id(parameter)] = mapping
        return mappings

    def _check_complete(self) -> None:
        """Check that every tensor of the network has a counterpart in Megatron's model.

        Raises:
            ConfigError: a tensor has no counterpart.
        """
        has_all = self.world.layout.pp == 1 and not self.config.use_distributed_optimizer
        expected = {*self._canonical_names.values(), *self._factors}
        missing = expected - self._tensors.tensor_parts.keys()
        if has_all and missing:  # otherwise other processes have them
            raise ConfigError(
                f"model.path: trainer=megatron has no place for {sorted(missing)[0]} of the model; "
                "choose trainer=fsdp"
            )

    def _backward(
        self, loss: Callable[[], tuple[Tensor, dict[str, Tensor]]], factor: float, *, last: bool
    ) -> dict[str, Tensor]:
        self._params.allocate_gradients()
        value, metrics = loss()
        # Gradients are summed over processes. Context-parallel processes have the same loss.
        weight = factor / self.world.data_parallel_size / self.world.layout.cp
        (value * weight).backward()  # type: ignore[no-untyped-call]
        return {"loss": value.detach(), **metrics}

    def _gradients(
        self,
        policy: Policy,
        trajectories: Sequence[Trajectory],
        batches: MicroBatches,
        loss: LossFunction,
    ) -> dict[str, Any]:
        if self.world.layout.pp == 1:
            return super()._gradients(policy, trajectories, batches, loss)

        def compute(batch: tuple[list[StepSpan], bool]) -> tuple[Tensor, dict[str, Tensor]]:
            spans, is_real = batch
            value, metrics = loss(policy, self._inputs(policy, trajectories, spans), spans)
            weight = 1.0 if is_real else 0.0
            all_metrics = {"loss": value.detach(), **metrics}
            value = value * (weight * self._loss_scaler.value / self.world.layout.cp)
            return value, {name: metric * weight for name, metric in all_metrics.items()}

        self._params.allocate_gradients()
        pairs = list(zip(batches.spans, batches.is_real, strict=True))
        sums: dict[str, Tensor] = {}
        for metrics in parallel_dims.run_pipeline(
            self._params.ddp_model, pairs, compute, backward=True
        ):
            merge_metrics(sums, metrics)
        return dict(parallel_dims.broadcast_metric_sums(sums, self.device))

    def _outputs(
        self,
        policy: Policy,
        trajectories: Sequence[Trajectory],
        batches: MicroBatches,
        temperature: float,
    ) -> Iterable[StepOutputs]:
        if self.world.layout.pp == 1:
            return super()._outputs(policy, trajectories, batches, temperature)
        sizes: list[torch.Size] = []

        def compute(spans: list[StepSpan]) -> tuple[Tensor, Tensor]:
            inputs = self._inputs(policy, trajectories, spans)
            sizes.append(inputs["mask"].shape)
            logprobs: Tensor = policy.evaluate(inputs, temperature).logprobs
            return logprobs, logprobs

        logprobs_out = parallel_dims.run_pipeline(
            self._params.ddp_model, batches.spans, compute, backward=False
        )
        logprobs_out = logprobs_out or [torch.zeros(size, device=self.device) for size in sizes]
        return [
            StepOutputs(parallel_dims.broadcast_from_last_stage(logprobs.contiguous()))
            for logprobs in logprobs_out
        ]

    def discard_gradients(self) -> None:
        self._metric_sums = None
        self._params.discard_gradients()

    def _prepare_step(self, groups: Any) -> None:
        self._params.reduce_gradients()
        super()._prepare_step(groups)

    def _gradient_norm(self, groups: Collection[str]) -> float:
        return float(self._params.grad_norm(groups))

    @torch.no_grad()
    def _step(self, scales: Mapping[str, float]) -> None:
        scale_gradients(self.optimizer, scales)
        self.optimizer.step()
        self._params.sync_model_weights()

    def tensor_groups(self) -> dict[str, list[Tensor]]:
        if self._closed:
            return {}
        module = self.policy.module
        weights = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        moments: list[Tensor] = []
        for fragment in self._params.fragments:
            main, state = fragment.main, self.optimizer.state.get(fragment.main)
            if self.config.compute_dtype != "float32":  # otherwise main is the weight itself
                moments.append(main.detach())
            meta_moment = torch.empty_like(main, device="meta")
            moments += state.values() if state else [meta_moment] * len(self._moment_names)
        return {
            "weights": weights,
            "gradients": self._params.gradients(),
            "optimizer": moments,
        }

    @torch.no_grad()
    def _load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        loaded = set[str]()
        for name, tensor in tensors:
            if name not in self._templates or self._templates[name].shape != tensor.shape:
                raise weight_mismatch(name, 1)
            loaded.add(self._canonical_names[name])
            self._tensors.set_part(self._canonical_names[name], tensor)
        missing = [name for name, first in self._canonical_names.items() if first not in loaded]
        if missing:
            raise weight_mismatch(missing[0], len(missing))
        self._params.sync_model_weights()

    def load_policy_folder(self, folder: Path) -> None:
        self._load_with(lambda cpu_policy: cpu_policy.load_weights(folder))
        self._reset_adapters()

    @torch.no_grad()
    def _reset_adapters(self) -> None:
        for name, template in self._factors.items():
            self._tensors.set_part(name, initial_factor(name, template.shape))
        if self._factors:
            self._params.sync_model_weights()

    def _load_with(self, fill: Callable[[Policy], None]) -> None:
        """Load all weights into a policy on the CPU with ``fill``, and keep this process's part."""
        cpu_policy = copy.copy(self.policy)
        cpu_policy.module = copy.deepcopy(self._meta_module)
        allocate_parameters(cpu_policy.module, torch.device("cpu"))
        fill(cpu_policy)
        self._load_tensors(cpu_policy.module.state_dict().items())

    def stream_weights(self, *, copy: bool = False) -> StreamedState:
        templates = {name: self._templates[first] for name, first in self._canonical_names.items()}
        return StreamedState(templates, self._full_weights())

    @torch.no_grad()
    def _full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, unsharded, with adapters merged in."""
        merge, gather_args = None, (self.device, self.world.size)
        if self._adapters is not None:
            factors = {
                n: self._tensors.gather(n, template, *gather_args)
                for n, template in self._factors.items()
            }
            merge = self._adapters.weight_merger(factors)
        for name in dict.fromkeys(self._canonical_names.values()):
            full = self._tensors.gather(name, self._templates[name], *gather_args)
            yield name, (full if merge is None else merge(name, full)).cpu()

    def _local_state(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Return the weights and moments of this process, by fragment."""
        tensors = self._tensors
        moments = {m: tensors.moments(self.optimizer, m) for m in self._moment_names}
        return tensors.weights(), moments

    def _init_moments(self) -> None:
        for fragment in self._params.fragments:
            init_optimizer_state(self.optimizer, fragment.main, self._moment_names)

    @torch.no_grad()
    def _state(self) -> dict[str, Any]:
        """Return copies of this rank's primary tensor parts, whose elements are not contiguous."""
        self._init_moments()
        weights, moments = self._local_state()
        model: dict[str, Tensor] = {}
        state: dict[str, dict[str, Tensor]] = {}
        for part in filter(self._tensors.is_primary, self._tensors.trained_parts):
            model[part.name] = read_part(weights, part)
            state[part.name] = {name: read_part(moment, part) for name, moment in moments.items()}
            first_state = self.optimizer.state[self._params.fragments[part.ranges[0][0]].main]
            if "step" in first_state and part.placement.start == 0:
                state[part.name]["step"] = first_state["step"].clone()
        for name, first_name in self._canonical_names.items():
            if name != first_name and first_name in model:
                model[name] = model[first_name]
        return {"model": model, "optimizer": {"state": state}, **self._loss_scaler.state()}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self._init_moments()
        has_step_counts = "exp_avg" in self._moment_names
        model: dict[str, Tensor] = {}
        state: dict[str, dict[str, Tensor]] = {}
        for part in self._tensors.trained_parts:
            size = sum(count for *_, count in part.ranges)
            model[part.name] = torch.empty(size)
            state[part.name] = {name: torch.empty(size) for name in self._moment_names}
            if has_step_counts:
                state[part.name]["step"] = torch.zeros(())
        target = {"model": model, "optimizer": {"state": state}, **self._loss_scaler.state()}
        sharded_checkpoint.read_shards(folder, target, self._placements)
        weights, moments = self._local_state()
        steps: dict[int, Tensor] = {}
        for part in self._tensors.trained_parts:
            write_part(weights, part, model[part.name])
            for name, moment in moments.items():
                write_part(moment, part, state[part.name][name])
            for fragment_index, *_ in part.ranges if has_step_counts else ():
                # A parameter gets the largest step count of its tensors in the files.
                count = state[part.name]["step"]
                steps[fragment_index] = torch.maximum(steps.get(fragment_index, count), count)
        for fragment_index, count in steps.items():
            self.optimizer.state[self._params.fragments[fragment_index].main]["step"].copy_(count)
        self._params.sync_model_weights()

    def _release(self) -> None:
        self._params.release()
        self._meta_module = None
        del self._params, self._tensors


def _copy_to_meta(module: nn.Module) -> Any:
    """Return a copy of a network whose parameters have no memory; tied ones stay tied."""
    copies: dict[int, Any] = {}
    for submodule in module.modules():
        for parameter in submodule._parameters.values():
            if parameter is not None:
                empty = torch.empty_like(parameter, device="meta")
                copies.setdefault(id(parameter), nn.Parameter(empty))
    # Deepcopy uses these as the copies of the parameters.
    return copy.deepcopy(module, dict(copies))


def _first_layer(inner: Any) -> int:
    """Return the index, in the whole network, of the first layer of this process."""
    layers = inner.decoder.layers
    return layers[0].layer_number - 1 if len(layers) else 0


def _parameter_group(policy: Policy, mapping: hf_mapping.ParamMapping) -> str:
    """Return the parameter group of a Megatron parameter.

    Raises:
        ConfigError: the parameter's tensors are in several groups.
    """
    groups = sorted({policy.parameter_group(tensor_slice.name) for tensor_slice in mapping.slices})
    if len(groups) > 1:
        raise ConfigError(
            f"model.name: {mapping.slices[0].name} and others that trainer=megatron keeps in one "
            f"matrix are in the groups {', '.join(groups)}; choose trainer=fsdp"
        )
    return groups[0]
