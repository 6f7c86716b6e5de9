"""A profile from data sheets and the model's shape, for plans before any measurement.

The profile has the same form as a measured profile, but is marked as ``estimated``, so that the
planner gives it wide intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pipeline.plan import Plan
from pipeline.planning.cost.data_sheet import GIB, GpuDevice, device_from_node_group
from pipeline.planning.cost.model_shape import ModelShape, from_hf_config
from pipeline.planning.cost.workloads import (
    TRAINER_STATE,
    GenerationWorkload,
    InferenceWorkload,
    StateBytes,
    TrainingWorkload,
    Workload,
)
from pipeline.planning.profile.device_kinds import list_kinds, node_group_of_kind
from pipeline.planning.profile.schema import (
    SCHEMA,
    KindProfile,
    Measurement,
    Overhead,
    Profile,
    ProfileIdentity,
    ProfilePoint,
)
from rlinf.config import RunConfig
from rlinf.errors import DataError, PlanError
from rlinf.registry import LANGUAGE_MODEL
from rlinf.trainers.optimizer import OFFLOAD_CHUNK_BYTES
from rlinf.verified_io import read_text
from slurm.inventory import Inventory
from slurm.site import SiteConfig
from stages.factory import create_algorithm, engine_max_batch, environment_class, policy_class
from stages.flow import flow_of

FLOAT32_SHARE = 1 / 16
"""Peak float32 rate without TF32 as a share of the bfloat16 rate: 19.5 of 312 TFLOP/s on the A100,
67 of 989 on the H100 (NVIDIA data sheets)."""
TENSOR_PARALLEL_SIZES, MAX_HINT_GPUS = (2, 4, 8), 1024
"""Degrees of tensor parallelism, and the maximum number of GPUs, that errors suggest."""
READ_BYTES_PER_S = 1e9
"""Read and write rate of a shared filesystem (assumed)."""
START_S, IMPORTS_S, LOAD_S, REWARD_S = 5.0, 15.0, 5.0, 1e-3
"""Seconds to start a job, to import packages, to create an engine or trainer (besides reading its
weights), and to compute the reward of a sample (all assumed)."""


def estimate_profile(
    config: RunConfig, inventory: Inventory, site: SiteConfig, plan: Plan | None = None
) -> Profile:
    """Return a profile of all kinds of GPUs with known data sheets.

    Args:
        plan: the plan whose tensor-parallel layout the engine has; None: it has none.

    Raises:
        PlanError: no kind has a known data sheet, or the formulas do not support the model.
        DataError: the config.json of the model cannot be used.
    """
    run = _RunWork.of(config, plan)
    kinds: dict[str, KindProfile] = {}
    reason = "there are no GPUs"
    for name, kind in list_kinds(inventory, site).items():
        group = node_group_of_kind(kind, inventory)
        if group is None or not group.gpus_per_node:
            continue
        try:
            device = device_from_node_group(name, group)
        except PlanError as error:
            reason = str(error)
            continue
        device = replace(device, slowdown=device.slowdown / kind.duty_cycle)
        kinds[name] = KindProfile(
            partition=kind.partition,
            gpu_type=kind.gpu_type,
            devices_per_node=kind.devices_per_node,
            duty_cycle=kind.duty_cycle,
            memory="device",
            points=tuple(_points(run, device, kind.nodes, kind.devices_per_node)),
            overheads=tuple(_overheads(run, device)),
        )
    if not kinds:
        raise PlanError(
            f"nothing is measured, and data sheets do not help: {reason}; measure with: "
            "rlinf profile"
        )
    return Profile(
        schema_version=SCHEMA,
        created_at=datetime.now(UTC),
        estimated=True,
        identity=ProfileIdentity.of(config),
        samples=run.generation.samples,
        weights_bytes=int(run.weights_bytes),
        lengths=tuple(int(n) for n in run.generation.lengths),
        kinds=kinds,
    )


def stage_memory_parts(
    config: RunConfig, stage: str, device: GpuDevice, processes: int, plan: Plan | None = None
) -> dict[str, float]:
    """Return the bytes per GPU of a stage by purpose: weights, activations, ...; the KV cache of an
    engine is that of all requests that run concurrently.

    Raises:
        PlanError, DataError: as :func:`estimate_profile`.
    """
    run = _RunWork.of(config, plan)
    work, shape = run.workload(stage, run.generation.samples)
    parts = work.memory_parts(shape, processes)
    if isinstance(work, GenerationWorkload):
        parts["KV cache"] = work.cache_bytes(shape, device)
    return parts


@dataclass(frozen=True)
class _RunWork:
    """The numbers of a run that determine its stages' times."""

    shape: ModelShape
    trainer_shape: ModelShape
    """The trainer's networks, including a separate critic."""
    generation: GenerationWorkload
    """Generation of the whole batch; lengths are uniform up to the horizon (assumed)."""
    training: TrainingWorkload
    """Training on the whole batch."""
    weights_bytes: float
    trainer_weights_bytes: float
    """Bytes of the weights in files, without and with a separate critic."""
    components: Mapping[str, str | None]
    """The component that each stage keeps in memory: ``engine``, ``trainer`` or None."""
    train_stage: str
    publish_stage: str

    @classmethod
    def of(cls, config: RunConfig, plan: Plan | None = None) -> _RunWork:
        policy, options = policy_class(config)
        if LANGUAGE_MODEL not in policy.provides:
            raise PlanError(
                f"nothing is measured, and data sheets give times only of language models, not of "
                f"model {config.model.name!r}; measure with: rlinf profile"
            )
        environment, settings = environment_class(config)
        spec = environment.model_spec(settings)
        task_size = environment.task_size(settings, policy.check_spec(options, spec))
        algorithm, rollout = create_algorithm(config), config.rollout
        engine, trainer = config.engine.model_extra or {}, config.trainer.model_extra or {}
        flow, trainer_name = flow_of(config), config.trainer.name
        components = {name: stage.holds for name, stage in flow.stages.items()}
        trainer_stages = [name for name, component in components.items() if component == "trainer"]
        shape = _model_shape(options, spec)
        dtype_sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        engine_bytes = dtype_sizes.get(str(engine.get("dtype")), shape.dtype_bytes)
        default = "bfloat16" if options.path is not None else "float32"  # on GPUs
        trainer_bytes = dtype_sizes.get(str(trainer.get("param_dtype") or default), 4)
        trainer_shape = with_critic(shape) if getattr(options, "critic", None) == "own" else shape
        samples = rollout.batch_size * rollout.group_size
        lengths = np.unique(np.linspace(1, rollout.horizon, 32).astype(np.int64)).astype(np.float64)
        prompt_tokens = max(1, task_size.max_prompt_tokens)
        budget, longest = trainer.get("max_tokens_per_microbatch"), prompt_tokens + rollout.horizon
        return cls(
            shape=replace(shape, dtype_bytes=engine_bytes),
            trainer_shape=replace(trainer_shape, dtype_bytes=trainer_bytes),
            generation=GenerationWorkload(
                lengths,
                samples,
                prompt_tokens,
                rollout.group_size,
                engine_max_batch(config) or samples,
                _tensor_parallel(plan),
            ),
            training=TrainingWorkload(
                samples,
                prompt_tokens + round(float(lengths.mean())),
                longest,
                max(1, (budget or 8192) // longest),
                steps=algorithm.minibatches * int(getattr(algorithm.config, "epochs", 1)),
                recompute="full" if trainer.get("gradient_checkpointing") else "selective",
                zero=_zero_stage(trainer_name, trainer),
                state=_state_bytes(shape, trainer.get("lora")),
                gathered_bytes=trainer_bytes,
                copies=int(trainer.get("dp_replicate", 1)) if trainer_name == "fsdp" else 1,
                optimizer_limit_bytes=_optimizer_limit_bytes(trainer_name, trainer),
            ),
            weights_bytes=shape.parameters * shape.dtype_bytes,
            trainer_weights_bytes=trainer_shape.parameters * shape.dtype_bytes,
            components=components,
            train_stage=[name for name in trainer_stages if name != flow.publish_stage][-1],
            publish_stage=flow.publish_stage,
        )

    def workload(self, stage: str, samples: int) -> tuple[Workload, ModelShape]:
        """Return a stage's workload for ``samples`` samples, and the shape of its model."""
        training = self.training
        if self.components[stage] == "engine":
            return replace(self.generation, samples=samples), self.shape
        if stage == self.train_stage:
            work = replace(training, samples=max(1, samples // training.steps))
            return work, self.trainer_shape
        size = training.tokens, training.longest, training.micro_batch
        sharding = training if training.zero == 3 else None
        return InferenceWorkload(samples, *size, sharding), self.trainer_shape


def _tensor_parallel(plan: Plan | None) -> int:
    """Return the number of processes that share each matrix of the engine in a plan."""
    if plan is None or plan.flow.rollout_stage is None:
        return 1
    return plan.stage_plan(plan.flow.rollout_stage).layout.tp


def _zero_stage(trainer: str, settings: Mapping[str, Any]) -> int:
    if trainer == "deepspeed":
        return int(settings.get("zero_stage", 2))
    if trainer == "megatron":
        return int(bool(settings.get("use_distributed_optimizer")))
    return 3


def _optimizer_limit_bytes(trainer: str, settings: Mapping[str, Any]) -> float | None:
    """Return the maximum optimizer bytes on the device; None: no limit. With DeepSpeed the host
    runs the optimizer step, so the limit is 0."""
    if not settings.get("offload_optimizer"):
        return None
    states_per_weight = TRAINER_STATE.optimizer / TRAINER_STATE.weights
    return OFFLOAD_CHUNK_BYTES * states_per_weight if trainer == "fsdp" else 0.0


def with_critic(shape: ModelShape) -> ModelShape:
    """Return the shape of a policy with a separate critic, which has twice the layers."""
    critic_dense_layers = tuple(number + shape.layers for number in shape.dense_layers)
    return replace(
        shape,
        layers=2 * shape.layers,
        dense_layers=(*shape.dense_layers, *critic_dense_layers),
        embeddings=2,
    )


def _state_bytes(shape: ModelShape, lora: Mapping[str, Any] | None) -> StateBytes:
    """Return the bytes per parameter of a trainer. With LoRA, only adapters have gradients and
    optimizer states; all linear layers of the blocks are assumed to have adapters."""
    if not lora:
        return TRAINER_STATE
    parameters_per_rank = [shape.hidden + shape.q_width] * 2 + [shape.hidden + shape.kv_width] * 2
    matrices = 3 if shape.gated else 2
    ffn_widths = [shape.ffn, shape.shared_ffn, *[shape.expert_ffn] * shape.experts]
    parameters_per_rank += [shape.hidden + width for width in ffn_widths if width] * matrices
    share = int(lora["rank"]) * sum(parameters_per_rank) * shape.layers / shape.parameters
    return StateBytes(
        TRAINER_STATE.weights * (1 + share),
        TRAINER_STATE.gradients * share,
        TRAINER_STATE.optimizer * share,
    )


def _model_shape(options: Any, spec: Mapping[str, Any]) -> ModelShape:
    if options.path is not None:
        path = options.path.expanduser() / "config.json"
        try:
            return from_hf_config(json.loads(read_text(path)))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {error}") from None
    return from_hf_config(
        {
            "model_type": options.architecture,
            "hidden_size": options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.heads,
            "num_key_value_heads": options.kv_heads,
            "head_dim": options.hidden // options.heads,
            "intermediate_size": options.intermediate,
            "vocab_size": len(spec.get("alphabet", "")) + 2,
            "tie_word_embeddings": True,
            "dtype": options.dtype,
        }
    )


def _points(run: _RunWork, device: GpuDevice, nodes: int, per_node: int) -> Iterator[ProfilePoint]:
    """Yield points of each stage for the batch and for half of the batch, on 1, 2, 4, ... devices
    of a node and on whole nodes."""
    counts_in_node = [1 << n for n in range(per_node.bit_length()) if 1 << n <= per_node]
    counts = sorted({*counts_in_node, *(per_node * n for n in _node_counts(nodes))})
    samples, group_size = run.generation.samples, run.generation.group_size
    for stage, component in run.components.items():
        if component is None or stage == run.publish_stage:
            is_publish = stage == run.publish_stage
            seconds = run.weights_bytes / READ_BYTES_PER_S if is_publish else REWARD_S * samples
            time = Measurement.of([seconds])
            yield ProfilePoint(stage=stage, nodes=1, processes=1, samples=samples, time=time)
            continue
        for count in counts:
            for size in sorted({samples, max(group_size, samples // 2)}):
                if count <= size // (group_size if component == "engine" else 1):
                    yield _point(run, device, stage, -(-count // per_node), count, size)


def _node_counts(nodes: int) -> list[int]:
    """Return numbers of nodes: all up to 8, then powers of two, and the maximum ``nodes``."""
    small, powers = range(1, min(nodes, 8) + 1), (1 << n for n in range(nodes.bit_length()))
    return sorted({*small, *powers, nodes})


def _point(
    run: _RunWork, device: GpuDevice, stage: str, nodes: int, count: int, samples: int
) -> ProfilePoint:
    work, shape = run.workload(stage, samples)
    if shape.dtype_bytes == 4:
        device = replace(device, flops=device.flops * FLOAT32_SHARE)
    memory_bytes, seconds = work.memory_bytes(shape, count), work.seconds(shape, count, device)
    failure = ""
    if memory_bytes > device.usable_bytes:
        sizes = f"{memory_bytes / GIB:.1f} GiB of {device.usable_bytes / GIB:.1f} usable"
        parts = [f"{n} {b / GIB:.1f}" for n, b in work.memory_parts(shape, count).items()]
        hint = _fitting_hint(work, shape, device)
        failure = f"does not fit: it needs {sizes} ({device.name}): {', '.join(parts)}; {hint}"
    elif not math.isfinite(seconds):
        failure = f"plan.stages.{stage}.layout: tp is larger than the {count} processes"
    if isinstance(work, GenerationWorkload) and count % work.tensor_parallel:
        tensor_parallel = work.tensor_parallel
        failure = f"plan.stages.{stage}.layout: tp={tensor_parallel} does not divide {count} GPUs"
    if stage == run.train_stage and count > 1 and count % run.training.copies:
        copies = run.training.copies
        failure = f"trainer.dp_replicate: {copies} does not divide {count} processes"
    return ProfilePoint(
        stage=stage,
        nodes=nodes,
        processes=count,
        samples=samples,
        time=None if failure else Measurement.of([seconds]),
        peak_memory_bytes=None if failure else int(memory_bytes),
        failure=failure,
    )


def _fitting_hint(work: Workload, shape: ModelShape, device: GpuDevice) -> str:
    """Return what to change so that a stage fits the memory of a kind of GPU."""

    def fits(work: Workload, processes: int) -> bool:
        return work.memory_bytes(shape, processes) <= device.usable_bytes

    if isinstance(work, GenerationWorkload):
        sizes = [n for n in TENSOR_PARALLEL_SIZES if not shape.heads % n]
        size = next((n for n in sizes if fits(replace(work, tensor_parallel=n), n)), None)
        if size is None:
            return "lower rollout.horizon, or choose GPUs with more memory"
        return f"it fits with tensor parallelism: plan.stages.rollout.layout={{tp: {size}}}"
    count = next((n for n in range(1, MAX_HINT_GPUS + 1) if fits(work, n)), None)
    if count is not None:
        return f"it fits on {count} such GPUs"
    return "lower trainer.max_tokens_per_microbatch, or set trainer.gradient_checkpointing=true"


def _overheads(run: _RunWork, device: GpuDevice) -> Iterator[Overhead]:
    read_s = run.weights_bytes / READ_BYTES_PER_S
    trainer_read_s = run.trainer_weights_bytes / READ_BYTES_PER_S
    state, is_offloaded = run.training.state, run.training.optimizer_limit_bytes is not None
    bytes_per_parameter = state.weights + (0.0 if is_offloaded else state.optimizer)
    offload_s = run.trainer_shape.parameters * bytes_per_parameter / device.host_bytes_per_s
    for name, seconds in (
        ("startup", START_S),
        ("imports", IMPORTS_S),
        ("engine_load", LOAD_S + read_s),
        ("trainer_load", LOAD_S + trainer_read_s),
        ("weight_load", read_s),
        ("publish", trainer_read_s),
        ("offload", offload_s),
        ("onload", offload_s),
    ):
        yield Overhead.of([seconds], name=name, nodes=1, processes=1)
