"""Checks of a whole configuration before anything is written or submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np

from pipeline.fitting import (
    check_continues,
    check_fit,
    check_held_out,
    check_replay,
    check_starts,
    check_tasks,
    check_turns,
    check_unfinished,
    check_values,
    warn_of_precision,
)
from pipeline.launch import ClusterConfig
from pipeline.needs import pool_needs
from pipeline.plan import Plan
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.unread_keys import refuse_unread_keys
from rlinf.channels.world import ParallelLayout
from rlinf.config import RunConfig, validate
from rlinf.engines import engines
from rlinf.envs.base import Extent
from rlinf.errors import ConfigError, nearest, require
from rlinf.fit import LANGUAGE_MODEL, REPLAYS
from rlinf.interpreters import OF_STAGES, check_interpreter, know, missing_modules, named
from rlinf.models.chat_format import ChatFormat
from rlinf.registry import own_attribute
from rlinf.track import LogConfig, sinks
from rlinf.trainers import trainers
from slurm.site import load_site
from slurm.words import check_folder
from stages.flow import DYNAMIC, Flow, flow_of
from stages.layout import CONFIG
from stages.parts import environment_class, make_algorithm, policy_class, reward_class
from stages.runner import load_config


def check(config: RunConfig) -> None:
    """Validate every part by its own section, then what must fit together.

    Raises:
        ConfigError: names the key.
        DataError: a file of the task or model is missing or malformed.
        PlanError: the site file is missing or malformed.
        MissingPackageError: a part needs a package that is not installed.
    """
    policy, model_options = policy_class(config)
    environment, task_options = environment_class(config)
    engine = engines.get(config.engine.name)
    engine_options = config.engine.options(engine.Config, "engine")
    trainer = trainers.get(config.trainer.name)
    trainer_options = config.trainer.options(trainer.Config, "trainer")
    algorithm = make_algorithm(config)
    refuse_unread_keys(algorithm, config.algorithm.name)
    reward, reward_options = reward_class(config)
    reward.check(reward_options)
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    if cluster.launcher == "slurm":
        check_folder(config.run.folder)
    if cluster.site is not None:
        know(load_site(cluster.site).interpreters)
    for number, tracker in enumerate(validate(LogConfig, config.log, "log").trackers):
        check_tracker(tracker, f"log.trackers.{number}", config)
    simulates = environment.modules(task_options)
    generates = engine.packages(engine_options)
    check_interpreters(config, cluster, simulates, generates, trainer.packages(trainer_options))
    check_warm_start(config, generates)
    for key, (name, modules) in engine.interpreters(engine_options).items():
        check_interpreter(name, f"engine.{key}", modules)
    check_flow(flow_of(config), "flow")
    check_videos(config, environment.films(task_options))
    check_fit(config)
    check_continues(config)
    check_starts(config, environment.alike(task_options))
    check_refills(config, algorithm)
    check_tasks(config, environment.tasks(task_options))
    check_sampling(config, engine.needs)
    check_groups(config, policy.groups)
    algorithm.check(model_options)
    check_turns(config, algorithm)
    check_unfinished(config, algorithm)
    check_replay(config, algorithm, trainer, trainer_options)
    check_values(config, algorithm, model_options, trainer_options)
    warn_of_precision(config, trainer_options)
    samples = config.rollout.batch * config.rollout.group_size
    if samples % algorithm.minibatches:
        raise ConfigError(
            f"algorithm.minibatches: {samples} samples (rollout.batch {config.rollout.batch} x "
            f"rollout.group_size {config.rollout.group_size}) cannot be cut into "
            f"{algorithm.minibatches} equal minibatches"
        )
    if cluster.launcher != "slurm":
        for section, options in (("engine", engine_options), ("trainer", trainer_options)):
            check_device(getattr(options, "device", "auto"), f"{section}.device")
    if config.warm_start.max_steps:
        environment.check_demonstrations(task_options)
    spec = environment.describe(task_options)
    check_held_out(config, environment.held_out_overlap(task_options), task_options)
    processor = policy.check(model_options, spec)
    engine.check_policy(engine_options, model_options)
    extent = environment.extent(task_options, processor)
    if processor is not None and LANGUAGE_MODEL in policy.offers:
        check_stops(config, ChatFormat.of(processor))
    positions = policy.positions(model_options)
    check_context(getattr(engine_options, "context", None), positions)
    check_extent(config, extent, positions)


def completed(config: RunConfig) -> RunConfig:
    """The configuration with the keys of the task that are read from its environment.

    What is given is compared with the environment too, before a run directory is made for it.

    Raises:
        ConfigError: a key is wrong, or cannot be read here.
    """
    environment, options = environment_class(config)
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    if cluster.site is not None:
        know(load_site(cluster.site).interpreters)
    if (name := named(config, "task")) is not None:
        check_interpreter(name, "task.python", environment.modules(options))
    # Where stages have an interpreter of their own, so have the simulators that they step.
    here = named(config, "task") is not None or named(config, "engine") is None
    more = environment.complete(options, compare=here and not _is_frozen(config))
    return config.with_read(more) if more else config


def _is_frozen(config: RunConfig) -> bool:
    """Return whether the run is there with this very task, which was compared when it was made."""
    try:
        frozen = load_config(config.run.folder / CONFIG)
    except ConfigError:  # there is none, or it is damaged
        return False
    return frozen.task.model_dump(mode="json") == config.task.model_dump(mode="json")


def check_interpreters(
    config: RunConfig,
    cluster: ClusterConfig,
    simulates: tuple[str, ...],
    generates: tuple[str, ...],
    trains: tuple[str, ...],
) -> None:
    """See that interpreters which are named are there and have what runs under them.

    Args:
        simulates: modules that the simulator processes import.
        generates: optional packages of the engine.
        trains: optional packages of the trainer.

    Raises:
        ConfigError: one is not, has not, or would have to run stages of the driver's process.
        MissingPackageError: no interpreter is named, and the own one lacks an optional package.
    """
    for section, modules in (("task", simulates), ("engine", generates), ("trainer", trains)):
        stages = section != "task"
        if (name := named(config, section)) is None:
            for package in modules if stages else ():
                require(package, package, f"{section}={getattr(config, section).name}")
            continue
        check_interpreter(name, f"{section}.python", (*(OF_STAGES if stages else ()), *modules))
        if stages and cluster.launcher == "inprocess":
            raise ConfigError(
                f"{section}.python: stages run in the driver's own process with "
                "cluster.launcher=inprocess; choose cluster=local or cluster=slurm"
            )


def check_warm_start(config: RunConfig, generates: tuple[str, ...]) -> None:
    """See that the warm start, which trains, can generate where its samples are scored.

    Args:
        generates: optional packages of the engine.

    Raises:
        ConfigError: the interpreter that it runs under lacks one.
    """
    if not (generates and config.warm_start.max_steps and config.warm_start.scored):
        return
    name = named(config, "trainer")
    if name is None:
        lacking = [package for package in generates if find_spec(package) is None]
    else:
        lacking = missing_modules(name, "trainer.python", generates)
    if lacking:
        raise ConfigError(
            f"warm_start.scored: the process that trains generates the held-out samples, and its "
            f"interpreter lacks the package {lacking[0]!r} of engine={config.engine.name}; set "
            f"trainer.python={named(config, 'engine') or 'one that has it'}, or "
            "warm_start.scored=false"
        )


def check_videos(config: RunConfig, films: tuple[str, ...]) -> None:
    """See that there is something to film held-out episodes by, where that is wanted.

    Raises:
        ConfigError: no camera.
        MissingPackageError: PyAV is not installed.
    """
    if config.evaluate.videos:
        if not films:
            raise ConfigError(
                f"evaluate.videos: task {config.task.name!r} has no cameras; set task.video "
                "({CAMERA: [HEIGHT, WIDTH]}), or evaluate.videos=0"
            )
        require("av", "video", "evaluate.videos")


def check_groups(config: RunConfig, groups: tuple[str, ...]) -> None:
    """See that learning rates and the like are of groups of parameters that the policy has.

    Raises:
        ConfigError: one is not.
    """
    for key in ("group_lr", "group_clip"):
        for name in getattr(config.optimizer, key):
            if name not in groups:
                raise ConfigError(
                    f"optimizer.{key}.{name}: {config.model.name} has no such group of parameters, "
                    f"but {', '.join(groups)}"
                )


def check_sampling(config: RunConfig, needs: frozenset[str]) -> None:
    """See that the engine draws tokens, where something is said of how.

    Raises:
        ConfigError: its steps are whole actions.
    """
    for key, section in (
        ("rollout.sampling", config.rollout.sampling),
        ("evaluate.sampling", config.evaluate.sampling),
    ):
        given = [] if section is None else list(section.settings())
        if given and LANGUAGE_MODEL not in needs:
            raise ConfigError(
                f"{key}.{given[0]}: engine {config.engine.name!r} draws no tokens; leave it out"
            )


def check_layouts(config: RunConfig, plan: Plan) -> None:
    """See that engine and trainer can share a model as the plan has it, and its processes suffice.

    Raises:
        ConfigError: they cannot, do not, or a pool would keep one part in two layouts.
    """
    of = plan.homes() if plan.pools else {}
    needs = [pool_needs(plan, number) for number in range(len(plan.pools))]
    sizes = [sum(part.nodes * part.processes for part in parts) for parts in needs]
    comes_and_goes = {stage for pool in plan.pools if pool.workers for stage in pool.stages}
    held: dict[tuple[int, str], tuple[str, ParallelLayout]] = {}
    for stage, spec in plan.flow.table.items():
        key, job = f"plan.stages.{stage}.layout", plan.of(stage)
        layout = job.layout
        pool = of.get(stage)
        size = job.nodes * job.processes if pool is None else sizes[pool]
        size = 1 if stage in comes_and_goes else size
        loads = spec.loads or plan.flow.table.get(spec.like or "", spec).loads
        if loads is not None and of and not spec.whole:
            first, other = held.setdefault((of[stage], loads), (stage, layout))
            if other != layout:
                raise ConfigError(
                    f"{key}: {str(layout) or 'none'}, but {first}, whose {loads} it uses in one "
                    f"pool with it, has {str(other) or 'none'}; give both the same"
                )
        if loads == "trainer":
            trainer = trainers.get(config.trainer.name)
            options = config.trainer.options(trainer.Config, "trainer")
            policy, model = policy_class(config)
            trainer.check(options, policy, model, config.optimizer, layout, size, key)
            if spec.whole and REPLAYS in plan.flow.needs and not plan.alone(stage):
                raise ConfigError(
                    f"plan.stages.{stage}: {job.nodes * job.processes} processes, but one process "
                    f"learns from transitions (flow={config.flow}); leave out nodes and processes"
                )
        if not layout.split():
            continue
        if loads is None or spec.whole:
            raise ConfigError(f"{key}: {stage} is the work of no model; leave it out")
        name, registry = getattr(config, loads).name, engines if loads == "engine" else trainers
        can = registry.get(name).layouts
        for way in layout.split():
            if way not in can:
                ways = ", ".join(sorted(can)) or "no way"
                raise ConfigError(
                    f"{key}.{way}: {loads} {name!r} cannot split a model so; it can in {ways}"
                )
        if loads == "engine":
            engine = engines.get(name)
            options = config.engine.options(engine.Config, "engine")
            engine.check_layout(options, policy_class(config)[1], layout, key)
        layout.check(size, key)


def check_tracker(name: str, key: str, config: RunConfig) -> None:
    """See that a tracker is there and can begin, without starting it.

    Raises:
        ConfigError: unknown, or it lacks a login.
        MissingPackageError: its package is not installed.
    """
    tracker = sinks.get(name, key)
    package: tuple[str, str] | None = getattr(tracker, "package", None)
    if package is not None:
        require(*package, f"{key}: {name}")
    check_settings: Callable[[RunConfig], None] | None = getattr(tracker, "check", None)
    if check_settings is not None:
        check_settings(config)


def check_flow(flow: Flow, key: str) -> None:
    """See that each stage has a program, and inputs that are there when it runs.

    Raises:
        ConfigError: it has not; names the stage.
    """
    if not flow.stages or not flow.offline:
        raise ConfigError(
            f"{key}: a flow has stages, and an offline stage that makes the first weights"
        )
    before = set(flow.offline)
    for name, stage in flow.table.items():
        where = f"{key}: stage {name}"
        for entry in stage.inputs.values():
            for source in filter(None, (entry.stage, entry.otherwise)):
                if source not in flow.table:
                    hint = nearest(source, flow.table)
                    raise ConfigError(f"{where} takes {source!r}, which is no stage of it{hint}")
            if not entry.back and entry.stage not in before and not entry.lags:
                raise ConfigError(f"{where} takes {entry.stage}, which comes later; put it before")
        for section in stage.sections:
            if section not in RunConfig.model_fields:
                hint = nearest(section, RunConfig.model_fields)
                raise ConfigError(f"{where} has no such section: {section!r}{hint}")
        own_attribute(flow.program(name), "run", where)
        before.add(name)


def check_refills(config: RunConfig, algorithm: Algorithm) -> None:
    """See that a cap of what is drawn anew is given where something is, and there alone.

    Raises:
        ConfigError: it is not, or the algorithm keeps whatever is drawn.
    """
    flow = flow_of(config)
    redraws = DYNAMIC in map(flow.program, flow.stages)
    if redraws and config.rollout.refills is None:
        raise ConfigError(
            f"rollout.refills: flow {config.flow!r} draws groups anew; say how often at most"
        )
    if not redraws and config.rollout.refills is not None:
        raise ConfigError(
            f"rollout.refills: flow {config.flow!r} draws nothing anew; set flow=dynamic_sampling"
        )
    # Groups of two whose samples scored the same: the usual scores, and such as no task has.
    scores, groups = np.repeat([-1e9, 0.0, 1.0, 1e9], 2), np.repeat(np.arange(4), 2)
    if redraws and algorithm.keep(scores, groups).all():
        raise ConfigError(
            f"rollout.refills: algorithm {config.algorithm.name!r} keeps groups whose samples all "
            "scored the same, so that nothing would be drawn anew; set algorithm=dapo, or "
            "algorithm.drop_equal_groups=true with an algorithm of groups, or choose "
            "flow=on_policy without rollout.refills"
        )


def check_device(name: str, key: str) -> None:
    """See that this machine has a device.

    Raises:
        ConfigError: it has not.
    """
    import torch

    kind, _, number = name.partition(":")
    seen = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(number or 0) >= seen:
        has = f"{seen} GPUs" if seen else "no GPU"
        raise ConfigError(f"{key}: {name} is not there: this machine has {has}; use auto")


def check_stops(config: RunConfig, chat_format: ChatFormat) -> None:
    """See that stop strings are either texts or special tokens, which no decoded text shows.

    Raises:
        ConfigError: one mixes them, so that no engine would ever find it.
    """
    for key, section in (("rollout", config.rollout), ("evaluate", config.evaluate)):
        for text in () if section.sampling is None else section.sampling.stop:
            if (inside := chat_format.hidden_in(text)) is not None:
                raise ConfigError(
                    f"{key}.sampling.stop: {text!r} holds the special token {inside!r} and more, "
                    f"and would never be found; give {inside!r} alone"
                )


def check_context(context: int | None, positions: int | None) -> None:
    """See that an engine is not asked for longer samples than the model takes.

    Raises:
        ConfigError: it is; vLLM would not start.
    """
    if context is not None and positions is not None and context > positions:
        raise ConfigError(
            f"engine.context: {context} is more than the {positions} positions of the model; set "
            f"it to {positions} or less, or leave it out"
        )


def check_extent(config: RunConfig, extent: Extent, positions: int | None) -> None:
    """See that there are as many problems as are asked, and room for the answers.

    Raises:
        ConfigError: there are not.
    """
    held_out = config.evaluate.horizon or config.rollout.horizon
    for key, asked, there, file in (
        ("rollout.batch", config.rollout.batch, extent.train, "task.train"),
        ("evaluate.samples", config.evaluate.samples, extent.test, "task.test"),
    ):
        if there is not None and asked > there:
            raise ConfigError(
                f"{key}: {asked} different problems are asked at once, and {file} has {there} that "
                f"can be used; set {key}={there} or less"
            )
    asks: Iterable[tuple[str, int]] = (
        ("rollout.horizon", config.rollout.horizon),
        ("evaluate.horizon", held_out),
    )
    for key, horizon in asks:
        if positions is not None and extent.longest_prompt + horizon > positions:
            raise ConfigError(
                f"{key}: prompts of up to {extent.longest_prompt} tokens and {horizon} new ones do "
                f"not fit into the {positions} positions of the model; lower it"
                + _or_model(config.model.model_extra or {})
            )


def _or_model(options: dict[str, Any]) -> str:
    if not options.get("path"):
        return " or raise model.max_positions"
    return " or task.max_prompt_tokens, or raise model.context as far as config.json allows"
