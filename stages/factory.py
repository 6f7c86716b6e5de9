"""Create the components of a stage from the run's configuration, and keep them loaded."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.base import Algorithm
from rlinf.artifacts import read_manifest, verify_output
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import NamedComponent, OptimizerSection, RunConfig
from rlinf.device_memory import GIB, DeviceMemoryManager, Offloadable
from rlinf.engines.base import Engine
from rlinf.envs.base import Environment
from rlinf.errors import ArtifactError
from rlinf.models.base import ModelHolder, default_dtype, local_device
from rlinf.rewards.base import Reward, RewardResources
from rlinf.trainers.base import Trainer
from stages.context import COMPUTE, StageContext
from stages.flow import flow_of
from stages.identity import CLASS_REGISTRIES
from stages.layout import REWARD_CACHE_FOLDER, stage_folder
from stages.live_store import evict_oldest
from stages.worker_state import LoadedActor, LoadedTrainer

log = logging.getLogger("rlinf")
WEIGHTS_POLL_S = 0.05
"""Minimum seconds between two searches for newer weights during a rollout."""
MAX_PUBLISHED_STATES = 4
"""Number of published versions whose trainer state is remembered."""
WEIGHTS = "weights"
"""The folder of a policy in an output, and the name of its tensors in memory."""
CHECKPOINT = "checkpoint"
"""The folder of a trainer's state in the output of the train stage."""


def component_class(config: RunConfig, section: str) -> tuple[Any, Any]:
    """Return the class of the component that a section chooses, and its validated options.

    Args:
        section: a key of :data:`stages.identity.CLASS_REGISTRIES`.

    Raises:
        ConfigError: there is no such component, or an option is invalid.
    """
    chosen: NamedComponent = getattr(config, section)
    cls = CLASS_REGISTRIES[section].get(chosen.name)
    return cls, chosen.validate_options(cls.Config, section)


def policy_class(config: RunConfig) -> tuple[Any, Any]:
    return component_class(config, "model")


def environment_class(config: RunConfig) -> tuple[Any, Any]:
    return component_class(config, "task")


def reward_class(config: RunConfig) -> tuple[Any, Any]:
    return component_class(config, "reward")


def create_algorithm(config: RunConfig) -> Algorithm:
    cls, options = component_class(config, "algorithm")
    algorithm: Algorithm = cls(options)
    return algorithm


def weight_sync_dtype(config: RunConfig) -> torch.dtype | None:
    """Return the dtype to which float32 weights are cast for engines; None: no cast."""
    cls, options = component_class(config, "engine")
    dtype: torch.dtype | None = cls.weight_dtype(options)
    return dtype


def engine_max_batch(config: RunConfig) -> int | None:
    """Return the maximum number of samples that a process decodes at once; None: no limit."""
    cls, options = component_class(config, "engine")
    max_batch: int | None = cls.max_batch(options)
    return max_batch


def default_dtype_of(config: RunConfig, device: str) -> str | None:
    """Return the data type in which the policy computes on a device of this process, if the
    configuration does not set it; see :func:`rlinf.models.base.default_dtype`.

    Args:
        device: name of the device in the configuration.
    """
    cls, options = policy_class(config)
    return default_dtype(cls.provides, getattr(options, "path", None), local_device(device))


def with_default_dtype(config: RunConfig, section: str, options: Any, key: str) -> Any:
    """Return the options of an engine or trainer with the default data type on its device, if the
    configuration does not set it; the log of the stage then names the type.

    Args:
        section: ``engine`` or ``trainer``.
        options: the validated options of the section.
        key: the key of the data type.
    """
    if getattr(options, key, "") is not None:
        return options
    dtype = default_dtype_of(config, getattr(options, "device", "auto"))
    if dtype is None:
        return options
    log.info("%s.%s: %s, the default for checkpoints on GPUs", section, key, dtype)
    return options.model_copy(update={key: dtype})


def evaluation_suite(config: RunConfig) -> Any:
    """Return the class of the sets in ``evaluate.sets``; None if there are none. Its options are
    ``config.evaluate``."""
    if not config.evaluate.sets:
        return None
    from rlinf.envs.suite import EvaluationSuite  # few runs have sets

    return EvaluationSuite


def required_context(config: RunConfig) -> int | None:
    """Return the largest number of tokens of prompt and response together; None: unknown."""
    cls, options = environment_class(config)
    horizon = max(config.rollout.horizon, config.evaluate.horizon or 0)
    contexts = [cls.max_context(options, horizon)]
    if (suite := evaluation_suite(config)) is not None:
        contexts.append(suite.max_context(config.evaluate, horizon))
    return None if None in contexts else max(contexts)


def eval_environment(ctx: StageContext) -> Environment | None:
    """Return the environment of evaluations on a primary rank, None on other ranks."""
    suite = evaluation_suite(ctx.config)
    if suite is None or not ctx.world.is_primary:
        return primary_rank_environment(ctx)
    if ctx.worker_state.eval_environment is None:
        policy_cls, policy_options = policy_class(ctx.config)
        folder = ctx.verified_folder("weights") / WEIGHTS
        processor = policy_cls.processor(folder, policy_options)
        environment: Environment = suite(ctx.config.evaluate, processor)
        ctx.worker_state.eval_environment = environment
    return ctx.worker_state.eval_environment


def get_environment(ctx: StageContext, folder: Callable[[], Path]) -> Environment:
    """Return the resident environment, created with the processor of the policy in ``folder()``."""
    worker_state = ctx.worker_state
    if worker_state.environment is None:
        policy_cls, policy_options = policy_class(ctx.config)
        cls, options = environment_class(ctx.config)
        environment: Environment = cls(options, policy_cls.processor(folder(), policy_options))
        worker_state.environment = environment
    return worker_state.environment


def primary_rank_environment(ctx: StageContext) -> Environment | None:
    """Return the environment on a primary rank, None on other ranks."""
    if not ctx.world.is_primary:
        return None
    return get_environment(ctx, lambda: ctx.verified_folder("weights") / WEIGHTS)


def get_reward(ctx: StageContext) -> Reward:
    worker_state = ctx.worker_state
    shard = (ctx.world.data_parallel_rank, ctx.world.data_parallel_size)
    if worker_state.reward is None or worker_state.reward_shard != shard:
        worker_state.drop_reward()
        cls, options = reward_class(ctx.config)
        resources = RewardResources(
            ctx.world,
            str(local_device("auto")),
            get_device_memory(ctx),
            ctx.run_folder / REWARD_CACHE_FOLDER,
        )
        reward: Reward = cls(options, resources)
        worker_state.reward, worker_state.reward_shard = reward, shard
    return worker_state.reward


def get_device_memory(ctx: StageContext) -> DeviceMemoryManager:
    """Return the device memory manager of this process."""
    if ctx.worker_state.device_memory is None:
        gib = ctx.config.device_memory_gib
        budget = None if gib is None else int(gib * GIB)
        ctx.worker_state.device_memory = DeviceMemoryManager(local_device("auto"), budget)
    return ctx.worker_state.device_memory


def record_compute(ctx: StageContext, holder: ModelHolder) -> None:
    """Record in the manifest in which data type and on which device an engine or trainer computes.

    Only the node where the stage runs knows both, if the configuration leaves them open.
    """
    section = "engine" if isinstance(holder, Engine) else "trainer"
    is_gpu = holder.device.type == "cuda"
    device = torch.cuda.get_device_name(holder.device) if is_gpu else str(holder.device)
    values = {"dtype": holder.compute_dtype, "device": device}
    ctx.manifest_extra.setdefault(COMPUTE, {})[section] = values


def ensure_on_device(
    ctx: StageContext, offloadable: Offloadable, *groups: str, copy_data: bool = True
) -> None:
    """Load an object, or only these groups of its tensors, onto its device.

    Call it again after every wait, because other stages may have used the device. Arguments: see
    :meth:`DeviceMemoryManager.acquire`.
    """
    if isinstance(offloadable, ModelHolder):
        record_compute(ctx, offloadable)
    get_device_memory(ctx).acquire(offloadable, *groups, copy_data=copy_data, span=ctx.span)


def get_or_create_engine(ctx: StageContext, world: ProcessGroupInfo | None = None) -> Engine:
    """Return the resident engine of this process with its weights; a new engine has none.

    Args:
        world: the process group of the engine; None: that of the stage.
    """
    loaded, world = ctx.worker_state.engine, world or ctx.world
    if loaded is not None and loaded.world.layout != world.layout:
        ctx.worker_state.drop_engine()
    if ctx.worker_state.engine is None:
        from rlinf import mkl_warmup

        mkl_warmup.warm_up()
        cls, engine_options = component_class(ctx.config, "engine")
        engine_options = with_default_dtype(ctx.config, "engine", engine_options, "dtype")
        engine: Engine = cls(engine_options, *policy_class(ctx.config))
        engine.log_folder = ctx.run_folder / "logs" / "engine"
        engine.required_context = required_context(ctx.config)
        ctx.worker_state.engine = engine
    ctx.worker_state.engine.world = world
    return ctx.worker_state.engine


def get_engine(
    ctx: StageContext, name: str, version: int, max_version: int | None = None
) -> Engine:
    """Return the engine with the weights of an input, loading them only if they changed.

    The engine is on its device. While the stage uses the engine it must not wait for an input,
    because other work may use the device during a wait.

    Args:
        name: the input with the weights.
        max_version: a newer version up to this one may stay loaded; None: only ``version`` may.
    """
    weights = ctx.inputs[name]
    engine, worker_state = get_or_create_engine(ctx), ctx.worker_state
    loaded_id = worker_state.engine_weights
    is_newer = loaded_id is not None and version < engine.version
    if max_version is not None and is_newer and engine.version <= max_version:
        ensure_on_device(ctx, engine)
        return engine
    content_id = weights.content_id
    # Read the id again: another stage may have loaded other weights while this stage waited.
    loaded_id, worker_state.engine_weights = worker_state.engine_weights, None
    if loaded_id != content_id:
        tensors = weights.live_object(WEIGHTS) if loaded_id is not None else None
        if tensors is None:
            _ = weights.manifest  # wait here, because the loading must not wait
            # Another stage may have loaded other weights meanwhile; they are overwritten now.
            worker_state.engine_weights = None
        if engine.version < 0:  # it has no weights yet, so its memory needs are unknown
            get_device_memory(ctx).offload_all(span=ctx.span)
        ensure_on_device(ctx, engine, copy_data=False)
        with ctx.span("load"):
            if tensors is None:
                if loaded_id is not None and worker_state.weight_deltas is not None:
                    tensors = worker_state.weight_deltas.read(ctx, name)
                content_id = weights.content_id
            if tensors is not None:
                policy_cls = policy_class(ctx.config)[0]
                engine.load_state(policy_cls.engine_weights(tensors.items()), version)
            else:
                engine.load(ctx.verified_folder(name) / WEIGHTS, version)
    ensure_on_device(ctx, engine)
    worker_state.engine_weights = content_id
    return engine


def newer_weights_poller(
    ctx: StageContext, engine: Engine
) -> Callable[[], tuple[Path, int] | None]:
    """Return a function that finds weights which were committed after the rollout began.

    The function returns folder and version of the newest weights, or None if there are none.
    """
    last_check, content_ids = 0.0, dict[int, str]()
    publish_stage = flow_of(ctx.config).publish_stage

    def find_newer_weights() -> tuple[Path, int] | None:
        nonlocal last_check
        if engine.version in content_ids:  # the engine has loaded the weights found before
            ctx.worker_state.engine_weights = content_ids.pop(engine.version)
        if engine.version >= ctx.iteration or time.monotonic() - last_check < WEIGHTS_POLL_S:
            return None
        last_check = time.monotonic()
        for version in range(ctx.iteration, engine.version, -1):
            folder = stage_folder(ctx.run_folder, publish_stage, version - 1)
            with contextlib.suppress(ArtifactError):  # a stage that needs them reports damage
                manifest = read_manifest(folder)
                if manifest is not None:
                    verify_output(folder, manifest, checksums=False)
                    ctx.worker_state.engine_weights = None
                    content_ids[version] = f"{folder}/{manifest.data}"
                    return folder / manifest.data / WEIGHTS, version
        return None

    return find_newer_weights


def get_trainer(ctx: StageContext) -> Trainer:
    """Return the trainer in the state of input ``checkpoint``, or a fresh one from ``initial``.

    The trainer's weights are on the device until the stage waits for an input.
    """
    initial, checkpoint = ctx.inputs["initial"], ctx.inputs.get("checkpoint")
    checkpoint_id = checkpoint.content_id if checkpoint else ""
    initial_id = initial.content_id
    worker_state = ctx.worker_state
    loaded, actor = worker_state.trainer, worker_state.actor
    if loaded is None and checkpoint is None and actor and actor.weights == initial_id:
        # Before the first update, the actor with the initial weights is a fresh trainer.
        loaded = LoadedTrainer(actor.trainer, initial_id, checkpoint_id)
        worker_state.actor, worker_state.trainer = None, loaded
    del actor
    if loaded is None or (loaded.initial_weights, loaded.checkpoint) != (initial_id, checkpoint_id):
        for stage_input in (initial, checkpoint) if checkpoint else (initial,):
            _ = stage_input.manifest  # wait here, because the loading must not wait
        # Free the memory of the old trainer before the new trainer is created.
        del loaded
        worker_state.drop_trainer()
        get_device_memory(ctx).offload_all(span=ctx.span)
        with ctx.span("load"):
            trainer = create_trainer(ctx, ctx.verified_folder("initial") / WEIGHTS)
            if checkpoint:
                trainer.load(ctx.verified_folder("checkpoint") / CHECKPOINT)
        loaded = worker_state.trainer = LoadedTrainer(trainer, initial_id, checkpoint_id)
    ensure_on_device(ctx, loaded.trainer, "weights")
    return loaded.trainer


def get_actor(ctx: StageContext) -> Trainer:
    """Return a trainer with the weights of input ``weights``, for forward passes of the policy.

    If the resident trainer has these weights, it is returned. Otherwise a second trainer, without
    optimizer state, loads them and stays resident. The weights are on the device until the stage
    waits for an input.
    """
    initial_id, weights = ctx.inputs["initial"].content_id, ctx.inputs["weights"]
    weights_id, worker_state = weights.content_id, ctx.worker_state
    state_by_weights = {**worker_state.published_states, initial_id: (initial_id, "")}
    trainer_state = state_by_weights.get(weights_id)
    resident = worker_state.trainer
    if resident is not None and (resident.initial_weights, resident.checkpoint) == trainer_state:
        worker_state.drop_actor()
        ensure_on_device(ctx, resident.trainer, "weights")
        return resident.trainer
    loaded = worker_state.actor
    if loaded is None or loaded.weights != weights_id:
        tensors = weights.live_object(WEIGHTS)
        if tensors is None:
            _ = weights.manifest  # wait here, because the loading must not wait
            weights_id = weights.content_id
        if worker_state.actor is not None and not worker_state.actor.trainer.can_load_weights:
            worker_state.drop_actor()
        loaded, worker_state.actor = worker_state.actor, None
        with ctx.span("load"):
            if loaded is None:
                get_device_memory(ctx).offload_all(span=ctx.span)
                source = "weights" if tensors is None else "initial"
                trainer = create_trainer(ctx, ctx.verified_folder(source) / WEIGHTS)
            else:
                trainer = loaded.trainer
                ensure_on_device(ctx, trainer, "weights", copy_data=False)
                if tensors is None and loads_sharded(ctx):
                    trainer.load_policy_folder(ctx.verified_folder("weights") / WEIGHTS)
                elif (
                    tensors is None
                    and worker_state.weight_deltas is not None
                    and worker_state.weight_deltas.is_exact
                ):
                    tensors = worker_state.weight_deltas.read(ctx, "weights")
                elif tensors is None:
                    tensors = load_committed_weights(ctx, "weights")
            if tensors is not None:
                trainer.load_weights(tensors.items())
        loaded = worker_state.actor = LoadedActor(trainer, weights_id)
    ensure_on_device(ctx, loaded.trainer, "weights")
    return loaded.trainer


def get_reference(ctx: StageContext) -> Trainer:
    """Return the reference policy, which is on the device until the stage waits for an input."""
    if ctx.worker_state.reference is None:
        _ = ctx.inputs["initial"].manifest  # wait here, because the loading must not wait
        get_device_memory(ctx).offload_all(span=ctx.span)
        ctx.worker_state.reference = create_trainer(ctx, ctx.verified_folder("initial") / WEIGHTS)
    ensure_on_device(ctx, ctx.worker_state.reference, "weights")
    return ctx.worker_state.reference


def create_trainer(
    ctx: StageContext, folder: Path, optimizer: OptimizerSection | None = None
) -> Trainer:
    """Create a trainer for the policy in ``folder`` with a fresh optimizer."""
    cls, trainer_options = component_class(ctx.config, "trainer")
    if getattr(trainer_options, "lora", None) is None or not cls.rounds_frozen_weights:
        trainer_options = with_default_dtype(ctx.config, "trainer", trainer_options, "param_dtype")
    policy_cls, options = policy_class(ctx.config)
    load = policy_cls.meta_from_folder if loads_sharded(ctx) else policy_cls.load
    trainer: Trainer = cls(
        load(folder, options), trainer_options, optimizer or ctx.config.optimizer, ctx.world
    )
    record_compute(ctx, trainer)
    return trainer


def loads_sharded(ctx: StageContext) -> bool:
    """Return whether each process loads only its shard of the policy."""
    cls, _ = policy_class(ctx.config)
    return ctx.world.size > 1 and bool(cls.supports_sharded_loading)


def load_committed_weights(ctx: StageContext, name: str) -> dict[str, Tensor]:
    """Load the full weights of an input, by the policy's parameter names.

    Raises:
        ArtifactError: the weights are damaged.
    """
    cls, options = policy_class(ctx.config)
    tensors: dict[str, Tensor] = cls.load(
        ctx.verified_folder(name) / WEIGHTS, options
    ).module.state_dict()
    return tensors


def save_weights(ctx: StageContext, trainer: Trainer, folder: Path) -> None:
    """Stream the trainer's weights into a new policy folder, which rank 0 writes; collective."""
    state = trainer.stream_weights()
    try:
        if ctx.world.rank == 0:
            folder.mkdir()
            trainer.policy.save_state(folder, state)
    finally:
        # Other ranks wait for rank 0, even after an error.
        state.drain()


def mark_trainer_dirty(ctx: StageContext) -> None:
    """Mark the trainer as dirty (its state is that of no checkpoint) until
    :func:`commit_trainer_state`.

    A failed attempt may leave a partial update, which the next attempt must not use. Accumulated
    gradients do not make a trainer dirty: inference on other chunks of the batch may still use it.
    """
    if ctx.worker_state.trainer is not None:
        ctx.worker_state.trainer = replace(ctx.worker_state.trainer, checkpoint=None)


def commit_trainer_state(ctx: StageContext) -> None:
    """Record that the trainer has the state that this attempt will commit."""
    if ctx.worker_state.trainer is not None:
        ctx.worker_state.trainer = replace(
            ctx.worker_state.trainer, checkpoint=f"{ctx.output_folder}/{ctx.data_folder.name}"
        )


def mark_published(ctx: StageContext) -> None:
    """Record the trainer state of the weights that this attempt publishes."""
    loaded, published = ctx.worker_state.trainer, ctx.worker_state.published_states
    if loaded is not None:
        published[f"{ctx.output_folder}/{ctx.data_folder.name}"] = (
            loaded.initial_weights,
            loaded.checkpoint,
        )
        evict_oldest(published, MAX_PUBLISHED_STATES)
