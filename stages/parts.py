"""The library objects a stage works with, built from the run's configuration."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms import algorithms
from rlinf.algorithms.base import Algorithm
from rlinf.artifacts import read_manifest, verify
from rlinf.channels.world import World
from rlinf.config import OptimizerSection, RunConfig
from rlinf.engines import engines
from rlinf.engines.base import Engine
from rlinf.envs import environments
from rlinf.envs.base import Environment
from rlinf.errors import ArtifactError
from rlinf.models import policies
from rlinf.models.device import local_device
from rlinf.residency import GIB, Holder, Residency
from rlinf.rewards import rewards
from rlinf.rewards.base import Resources, Reward
from rlinf.trainers import trainers
from rlinf.trainers.base import Trainer
from stages.board import keep_newest
from stages.context import Context
from stages.flow import flow_of
from stages.layout import ANSWERS, stage_folder
from stages.resident import Evaluated, Trained

LOOK_S = 0.05
KEPT = 4
"""Newest published weights whose trainer's state is remembered."""
WEIGHTS = "weights"
"""Folder of a policy in an output, and the name of its tensors in memory."""


def policy_class(config: RunConfig) -> tuple[Any, Any]:
    """The policy class and its validated options."""
    cls = policies.get(config.model.name)
    return cls, config.model.options(cls.Config, "model")


def environment_class(config: RunConfig) -> tuple[Any, Any]:
    """The environment class and its validated options."""
    cls = environments.get(config.task.name)
    return cls, config.task.options(cls.Config, "task")


def make_algorithm(config: RunConfig) -> Algorithm:
    """The run's algorithm."""
    cls = algorithms.get(config.algorithm.name)
    algorithm: Algorithm = cls(config.algorithm.options(cls.Config, "algorithm"))
    return algorithm


def reward_class(config: RunConfig) -> tuple[Any, Any]:
    """The reward class and its validated options."""
    cls = rewards.get(config.reward.name)
    return cls, config.reward.options(cls.Config, "reward")


def sent_type(config: RunConfig) -> torch.dtype | None:
    """The type in which engines take float32 weights; None: as they are."""
    cls = engines.get(config.engine.name)
    dtype: torch.dtype | None = cls.takes_dtype(config.engine.options(cls.Config, "engine"))
    return dtype


def engine_rows(config: RunConfig) -> int | None:
    """Most samples that a process decodes at once; None: all that it is asked."""
    cls = engines.get(config.engine.name)
    rows: int | None = cls.rows(config.engine.options(cls.Config, "engine"))
    return rows


def held_environment(ctx: Context, folder: Callable[[], Path]) -> Environment:
    """The task's environment, with the processor of the policy in ``folder()``; kept resident."""
    held = ctx.resident
    if held.environment is None:
        policy, policy_options = policy_class(ctx.config)
        cls, options = environment_class(ctx.config)
        environment: Environment = cls(options, policy.processor(folder(), policy_options))
        held.environment = environment
    return held.environment


def speaking_environment(ctx: Context) -> Environment | None:
    """The same, by the weights that are generated with; None where another process speaks."""
    if not ctx.world.speaks:
        return None
    return held_environment(ctx, lambda: ctx.verified("weights") / WEIGHTS)


def held_reward(ctx: Context) -> Reward:
    """The run's reward, with what it may use of this process; kept resident."""
    held, rank = ctx.resident, (ctx.world.data_rank, ctx.world.data_size)
    if held.reward is None or held.reward_rank != rank:
        held.drop_reward()
        cls, options = reward_class(ctx.config)
        resources = Resources(
            ctx.world, str(local_device("auto")), residency(ctx), ctx.run / ANSWERS
        )
        reward: Reward = cls(options, resources)
        held.reward, held.reward_rank = reward, rank
    return held.reward


def residency(ctx: Context) -> Residency:
    """What of this process is on its device."""
    if ctx.resident.residency is None:
        gib = ctx.config.device_memory_gib
        budget = None if gib is None else int(gib * GIB)
        ctx.resident.residency = Residency(local_device("auto"), budget)
    return ctx.resident.residency


def on_device(ctx: Context, holder: Holder, *groups: str, filled: bool = True) -> None:
    """Bring what the stage computes with next to its device; see :meth:`Residency.need`.

    After every wait anew: other stages may compute meanwhile, with other things.
    """
    residency(ctx).need(holder, *groups, filled=filled, span=ctx.span)


def bare_engine(ctx: Context, world: World | None = None) -> Engine:
    """The generation engine of this process, with whatever weights; kept resident.

    Args:
        world: in place of the stage's own.
    """
    held, world = ctx.resident.engine, world or ctx.world
    if held is not None and held.world.layout != world.layout:
        ctx.resident.drop_engine()
    if ctx.resident.engine is None:
        from rlinf import first_calls

        first_calls.make()
        cls = engines.get(ctx.config.engine.name)
        policy, options = policy_class(ctx.config)
        engine: Engine = cls(ctx.config.engine.options(cls.Config, "engine"), policy, options)
        engine.logs = ctx.run / "logs" / "engine"
        ctx.resident.engine = engine
    ctx.resident.engine.world = world
    return ctx.resident.engine


def held_engine(ctx: Context, name: str, version: int, newest: int | None = None) -> Engine:
    """The engine serving the weights of an input; loaded again only when they changed.

    It is on its device: until it is through with them the stage must not wait for anything.

    Args:
        newest: one that serves this version, or one in between, goes on with it.
    """
    entry = ctx.inputs[name]
    engine, resident = bare_engine(ctx), ctx.resident
    served = resident.engine_weights
    if newest is not None and served is not None and version < engine.version <= newest:
        on_device(ctx, engine)
        return engine
    state = entry.state
    # Only now: while this one waited for it, another stage may have loaded other weights.
    served, resident.engine_weights = resident.engine_weights, None
    if served != state:
        tensors = entry.held(WEIGHTS) if served is not None else None
        if tensors is None:
            _ = entry.manifest  # waits for it: what follows must not
            # Others may have loaded something meanwhile, which is overwritten now.
            resident.engine_weights = None
        if engine.version < 0:
            residency(ctx).clear(span=ctx.span)
        on_device(ctx, engine, filled=False)
        with ctx.span("load"):
            if tensors is None:
                if served is not None and resident.deltas is not None:
                    tensors = resident.deltas.read(ctx, name)
                state = entry.state
            if tensors is not None:
                engine.load_state(policy_class(ctx.config)[0].served(tensors.items()), version)
            else:
                engine.load(ctx.verified(name) / WEIGHTS, version)
    on_device(ctx, engine)
    resident.engine_weights = state
    return engine


def newer_weights(ctx: Context, engine: Engine) -> Callable[[], tuple[Path, int] | None]:
    """What a rollout's engine asks for weights that were committed since it began."""
    looked, states = 0.0, dict[int, str]()
    publishes = flow_of(ctx.config).publishes

    def newer() -> tuple[Path, int] | None:
        nonlocal looked
        if engine.version in states:  # loaded, since it asks again
            ctx.resident.engine_weights = states.pop(engine.version)
        if engine.version >= ctx.iteration or time.monotonic() - looked < LOOK_S:
            return None
        looked = time.monotonic()
        for version in range(ctx.iteration, engine.version, -1):
            folder = stage_folder(ctx.run, publishes, version - 1)
            with contextlib.suppress(ArtifactError):  # who cannot do without them says so
                manifest = read_manifest(folder)
                if manifest is not None:
                    verify(folder, manifest, checksums=False)
                    ctx.resident.engine_weights = None
                    states[version] = f"{folder}/{manifest.data}"
                    return folder / manifest.data / WEIGHTS, version
        return None

    return newer


def held_trainer(ctx: Context) -> Trainer:
    """The trainer in the state of input ``checkpoint``, or fresh from input ``initial``.

    Its weights are on the device, as long as the stage does not wait for anything.
    """
    initial, checkpoint = ctx.inputs["initial"], ctx.inputs.get("checkpoint")
    state = checkpoint.state if checkpoint else ""
    start = initial.state
    resident = ctx.resident
    fresh = resident.policy
    if resident.trainer is None and checkpoint is None and fresh and fresh.state == start:
        # Nothing has been trained yet: what evaluates the first weights is a fresh trainer of them.
        resident.policy, resident.trainer = None, Trained(fresh.trainer, start, state)
    del fresh
    held = resident.trainer
    if held is None or (held.start, held.state) != (start, state):
        for entry in (initial, checkpoint) if checkpoint else (initial,):
            _ = entry.manifest  # waits for it: what follows must not
        # The old one leaves the memory before the new one is made.
        del held
        resident.drop_trainer()
        residency(ctx).clear(span=ctx.span)
        with ctx.span("load"):
            trainer = new_trainer(ctx, ctx.verified("initial") / WEIGHTS)
            if checkpoint:
                trainer.load(ctx.verified("checkpoint") / "checkpoint")
        held = resident.trainer = Trained(trainer, start, state)
    on_device(ctx, held.trainer, "weights")
    return held.trainer


def held_policy(ctx: Context) -> Trainer:
    """A trainer with the weights of input ``weights``, to evaluate the policy with.

    Where training goes on in this process and has come as far as these weights, it is that one.
    Another one keeps no optimizer state, and takes later weights as they come. As for the trainer,
    it is on the device until a wait.
    """
    start, weights = ctx.inputs["initial"].state, ctx.inputs["weights"]
    state, resident = weights.state, ctx.resident
    training = (start, "") if state == start else resident.published.get(state)
    trained = resident.trainer
    if trained is not None and (trained.start, trained.state) == training:
        resident.drop_policy()
        on_device(ctx, trained.trainer, "weights")
        return trained.trainer
    held = resident.policy
    if held is None or held.state != state:
        tensors = weights.held(WEIGHTS)
        if tensors is None:
            _ = weights.manifest  # waits for it: what follows must not
            state = weights.state
        if resident.policy is not None and not resident.policy.trainer.takes_weights:
            resident.drop_policy()
        held, resident.policy = resident.policy, None
        with ctx.span("load"):
            if held is None:
                residency(ctx).clear(span=ctx.span)
                source = "weights" if tensors is None else "initial"
                trainer = new_trainer(ctx, ctx.verified(source) / WEIGHTS)
            else:
                trainer = held.trainer
                on_device(ctx, trainer, "weights", filled=False)
                if tensors is None and by_rows(ctx):
                    trainer.fill(ctx.verified("weights") / WEIGHTS)
                elif tensors is None and resident.deltas is not None and resident.deltas.exact:
                    tensors = resident.deltas.read(ctx, "weights")
                elif tensors is None:
                    tensors = committed_weights(ctx, "weights")
            if tensors is not None:
                trainer.load_weights(tensors.items())
        held = resident.policy = Evaluated(trainer, state)
    on_device(ctx, held.trainer, "weights")
    return held.trainer


def held_reference(ctx: Context) -> Trainer:
    """The policy that training began with; like the trainer it is on the device until a wait."""
    if ctx.resident.reference is None:
        _ = ctx.inputs["initial"].manifest  # waits for it: what follows must not
        residency(ctx).clear(span=ctx.span)
        ctx.resident.reference = new_trainer(ctx, ctx.verified("initial") / WEIGHTS)
    on_device(ctx, ctx.resident.reference, "weights")
    return ctx.resident.reference


def new_trainer(ctx: Context, folder: Path, optimizer: OptimizerSection | None = None) -> Trainer:
    """A trainer for the policy in ``folder`` with a fresh optimizer."""
    cls = trainers.get(ctx.config.trainer.name)
    policy, options = policy_class(ctx.config)
    load = policy.outline if by_rows(ctx) else policy.load
    trainer: Trainer = cls(
        load(folder, options),
        ctx.config.trainer.options(cls.Config, "trainer"),
        optimizer or ctx.config.optimizer,
        ctx.world,
    )
    return trainer


def by_rows(ctx: Context) -> bool:
    """Whether several processes share the policy, none of which need hold it whole."""
    cls, _ = policy_class(ctx.config)
    return ctx.world.size > 1 and bool(cls.by_rows)


def committed_weights(ctx: Context, name: str) -> dict[str, Tensor]:
    """The weights in the policy folder of an input, whole, by the policy's names.

    Raises:
        ArtifactError: they are damaged.
    """
    cls, options = policy_class(ctx.config)
    tensors: dict[str, Tensor] = cls.load(ctx.verified(name) / WEIGHTS, options).module.state_dict()
    return tensors


def save_weights(ctx: Context, trainer: Trainer, folder: Path) -> None:
    """Write a policy folder with the trainer's weights as they come, by rank 0; all take part."""
    state = trainer.stream()
    try:
        if ctx.world.rank == 0:
            folder.mkdir()
            trainer.policy.save_state(folder, state)
    finally:
        # The others wait for this one, whatever failed here.
        state.drain()


def changing_trainer(ctx: Context) -> None:
    """The trainer's weights are about to change: it counts as held again once the stage is through.

    An attempt that fails leaves half an update in it, which must not serve the next one. While
    gradients only add up, inference on the rest of the batch may still use it.
    """
    if ctx.resident.trainer is not None:
        ctx.resident.trainer = replace(ctx.resident.trainer, state=None)


def trainer_moved(ctx: Context) -> None:
    """Remember that the resident trainer is now in the state that this attempt will commit."""
    if ctx.resident.trainer is not None:
        ctx.resident.trainer = replace(ctx.resident.trainer, state=f"{ctx.out}/{ctx.data.name}")


def trainer_published(ctx: Context) -> None:
    """Remember which state of the trainer has the weights that this attempt will commit."""
    held, known = ctx.resident.trainer, ctx.resident.published
    if held is not None:
        known[f"{ctx.out}/{ctx.data.name}"] = (held.start, held.state)
        keep_newest(known, KEPT)
