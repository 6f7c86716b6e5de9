"""A profile from data sheets and the model's shape, for plans before any measurement.

Times and memory follow the formulas of :mod:`pipeline.planning.cost`; other costs of a job are
assumed below. The profile has the same form as a measured profile, but is marked as ``estimated``,
so that the planner gives it wide intervals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from pipeline.planning.cost.data_sheet import (
    GIB,
    CandidateLayout,
    GenerationWorkload,
    GpuDevice,
    InferenceWorkload,
    StateBytes,
    TrainingWorkload,
    Workload,
    device_from_node_group,
    stage_memory,
    stage_seconds,
)
from pipeline.planning.cost.model_shape import ModelShape, Recompute, from_hf_config
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
TRAINER_STATE = StateBytes(weights=4, gradients=4, optimizer=8)
"""Bytes per parameter of the built-in trainers, all in float32."""
READ_BYTES_PER_S = 1e9
"""Read and write rate of a shared filesystem (assumed)."""
START_S, IMPORTS_S, LOAD_S, REWARD_S = 5.0, 15.0, 5.0, 1e-3
"""Seconds to start a job, to import packages, to create an engine or trainer (besides reading its
weights), and to compute the reward of a sample (all assumed)."""


def estimate_profile(config: RunConfig, inventory: Inventory, site: SiteConfig) -> Profile:
    """Return a profile of all kinds of GPUs with known data sheets.

    Raises:
        PlanError: no kind has a known data sheet, or the formulas do not support the model.
        DataError: the config.json of the model cannot be used.
    """
    run = _RunWork.of(config)
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
        token_budget=run.token_budget,
        weights_bytes=int(run.weights_bytes),
        lengths=tuple(int(n) for n in run.generation.lengths),
        kinds=kinds,
    )


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
    token_budget: int | None
    engine_dtype_bytes: int
    """Bytes per weight in the engine."""
    trainer_dtype_bytes: int
    """Bytes per weight in the trainer."""
    components: Mapping[str, str | None]
    """The component that each stage keeps in memory: ``engine``, ``trainer`` or None."""
    train_stage: str
    publish_stage: str
    recompute: Recompute

    @classmethod
    def of(cls, config: RunConfig) -> _RunWork:
        policy, options = policy_class(config)
        if LANGUAGE_MODEL not in policy.provides:
            raise PlanError(
                f"nothing is measured, and data sheets give times only of language models, not of "
                f"model {config.model.name!r}; measure with: rlinf profile"
            )
        environment, settings = environment_class(config)
        spec = environment.model_spec(settings)
        task_size = environment.task_size(settings, policy.check_spec(options, spec))
        shape = _model_shape(options, spec)
        trainer_shape = with_critic(shape) if getattr(options, "critic", None) == "own" else shape
        algorithm, rollout = create_algorithm(config), config.rollout
        engine, trainer = config.engine.model_extra or {}, config.trainer.model_extra or {}
        flow = flow_of(config)
        components = {name: stage.holds for name, stage in flow.stages.items()}
        trainer_stages = [name for name, component in components.items() if component == "trainer"]
        dtype_sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        samples, trainer_name = rollout.batch_size * rollout.group_size, config.trainer.name
        lengths = np.unique(np.linspace(1, rollout.horizon, 32).astype(np.int64))
        prompt_tokens = max(1, task_size.max_prompt_tokens)
        return cls(
            shape=shape,
            trainer_shape=trainer_shape,
            generation=GenerationWorkload(
                lengths,
                samples,
                prompt_tokens,
                rollout.group_size,
                engine_max_batch(config) or samples,
            ),
            training=TrainingWorkload(
                samples,
                prompt_tokens + round(float(lengths.mean())),
                prompt_tokens + rollout.horizon,
                algorithm.minibatches * int(getattr(algorithm.config, "epochs", 1)),
                _zero_stage(trainer_name, trainer),
                _state_bytes(shape, trainer.get("lora")),
                int(trainer.get("dp_replicate", 1)) if trainer_name == "fsdp" else 1,
                _optimizer_limit_bytes(trainer_name, trainer),
            ),
            token_budget=trainer.get("max_tokens_per_microbatch"),
            engine_dtype_bytes=dtype_sizes.get(str(engine.get("dtype")), shape.dtype_bytes),
            trainer_dtype_bytes=dtype_sizes.get(str(trainer.get("param_dtype", "float32")), 4),
            components=components,
            train_stage=[name for name in trainer_stages if name != flow.publish_stage][-1],
            publish_stage=flow.publish_stage,
            recompute="full" if trainer.get("gradient_checkpointing") else "selective",
        )

    @property
    def weights_bytes(self) -> float:
        return self.shape.parameters * self.shape.dtype_bytes

    def workload(self, stage: str, samples: int) -> tuple[Workload, ModelShape, float]:
        """Return a stage's workload for ``samples`` samples, the shape of its model, and the peak
        rate of its precision as a share of the GPU's bfloat16 rate."""
        is_engine = self.components[stage] == "engine"
        dtype_bytes = self.engine_dtype_bytes if is_engine else self.trainer_dtype_bytes
        shape = replace(self.shape if is_engine else self.trainer_shape, dtype_bytes=dtype_bytes)
        rate_share, training = FLOAT32_SHARE if dtype_bytes == 4 else 1.0, self.training
        if is_engine:
            return replace(self.generation, samples=samples), shape, rate_share
        if stage == self.train_stage:
            step_samples = max(1, samples // training.steps)
            return replace(training, samples=step_samples), shape, rate_share
        work = InferenceWorkload(samples, training.tokens, training.longest)
        return work, shape, rate_share


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
    return (
        OFFLOAD_CHUNK_BYTES * TRAINER_STATE.optimizer / TRAINER_STATE.weights
        if trainer == "fsdp"
        else 0.0
    )


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
    sizes = sorted(
        {run.generation.samples, max(run.generation.group_size, run.generation.samples // 2)}
    )
    for stage, component in run.components.items():
        if component is None or stage == run.publish_stage:
            reward_s = REWARD_S * run.generation.samples
            publish_s = run.weights_bytes / READ_BYTES_PER_S
            duration_s = publish_s if stage == run.publish_stage else reward_s
            yield _point(stage, 1, 1, run.generation.samples, duration_s)
            continue
        for count in counts:
            for samples in sizes:
                if count <= samples // (run.generation.group_size if component == "engine" else 1):
                    yield _estimate_point(run, device, stage, -(-count // per_node), count, samples)


def _node_counts(nodes: int) -> list[int]:
    """Return numbers of nodes: all up to 8, then powers of two, and the maximum ``nodes``."""
    small, powers = range(1, min(nodes, 8) + 1), (1 << n for n in range(nodes.bit_length()))
    return sorted({*small, *powers, nodes})


def _estimate_point(
    run: _RunWork, device: GpuDevice, stage: str, nodes: int, count: int, samples: int
) -> ProfilePoint:
    work, shape, rate_share = run.workload(stage, samples)
    device = replace(device, flops=device.flops * rate_share)
    budget = run.token_budget or 8192
    layout = CandidateLayout(
        dp=count, micro_batch=max(1, budget // run.training.longest), recompute=run.recompute
    )
    memory_bytes = float(np.max(stage_memory(shape, layout, work).total))
    point = partial(_point, stage, nodes, count, samples)
    token_budget = None if isinstance(work, GenerationWorkload) else run.token_budget
    duration_s = float(np.max(stage_seconds(shape, layout, work, device).total))
    if stage == run.train_stage and count > 1 and count % run.training.copies:
        reason = f"trainer.dp_replicate: {run.training.copies} does not divide {count} processes"
        return point(None, token_budget=token_budget, failure=reason)
    if memory_bytes > device.usable_bytes or not np.isfinite(duration_s):
        sizes = f"{memory_bytes / GIB:.1f} GiB of {device.usable_bytes / GIB:.1f} usable"
        reason = f"does not fit: it needs {sizes} ({device.name})"
        return point(None, token_budget=token_budget, failure=reason)
    return point(duration_s, token_budget=token_budget, peak_memory_bytes=int(memory_bytes))


def _point(
    stage: str,
    nodes: int,
    count: int,
    samples: int,
    duration_s: float | None,
    **fields: Any,
) -> ProfilePoint:
    return ProfilePoint(
        stage=stage,
        nodes=nodes,
        processes=count,
        samples=samples,
        time=None if duration_s is None else Measurement.of([duration_s]),
        **fields,
    )


def _overheads(run: _RunWork, device: GpuDevice) -> Iterator[Overhead]:
    read_s = run.weights_bytes / READ_BYTES_PER_S
    trainer_read_s = run.trainer_shape.parameters * run.trainer_shape.dtype_bytes / READ_BYTES_PER_S
    optimizer_bytes = (
        run.training.state.optimizer if run.training.optimizer_limit_bytes is None else 0.0
    )
    parameter_bytes = run.training.state.weights + optimizer_bytes
    offload_s = run.trainer_shape.parameters * parameter_bytes / device.host.bytes_per_s
    for name, duration_s in (
        ("startup", START_S),
        ("imports", IMPORTS_S),
        ("engine_load", LOAD_S + read_s),
        ("trainer_load", LOAD_S + trainer_read_s),
        ("weight_load", read_s),
        ("publish", trainer_read_s),
        ("offload", offload_s),
        ("onload", offload_s),
    ):
        yield Overhead.of([duration_s], name=name, nodes=1, processes=1)
