"""Validation of a complete configuration before anything is written or submitted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.plan import Plan
from pipeline.resources import ClusterConfig, pool_resources
from rlinf.algorithms import algorithms
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.unused_keys import reject_unused_keys
from rlinf.channels.process_group import ParallelLayout
from rlinf.config import RunConfig, validate
from rlinf.data.episodes import OPEN_EPISODES
from rlinf.engines import engines
from rlinf.envs import environments
from rlinf.envs.base import TaskSize
from rlinf.errors import (
    ConfigError,
    DataError,
    PlanError,
    RlinfError,
    did_you_mean,
    require_package,
)
from rlinf.interpreters import (
    STAGE_PACKAGES,
    check_interpreter,
    configured_interpreter,
    missing_modules,
    set_interpreters,
)
from rlinf.models import policies
from rlinf.registry import (
    ACTION_VALUES,
    DEMONSTRATIONS,
    EPISODE_REWARDS,
    EVAL_DEMONSTRATIONS,
    LANGUAGE_MODEL,
    NO_ROLLOUTS,
    OBSERVATIONS,
    REPLAY_ALGORITHM,
    SAMPLE_GROUPS,
    STALE_ROLLOUTS,
    STEP_REWARDS,
    TRANSITION_REPLAY,
    TURN_REWARDS,
    TURNS,
    VALUE_ESTIMATES,
    Registry,
    import_user_attribute,
)
from rlinf.rewards import rewards
from rlinf.track import LogConfig, trackers
from rlinf.trainers import trainers
from rlinf.trainers.base import Trainer
from slurm.sbatch_options import check_log_folder
from stages.factory import create_algorithm, environment_class, policy_class, reward_class
from stages.flow import DYNAMIC_SAMPLING_MODULE, EVALUATE, Flow, carries_over_episodes, flow_of
from stages.layout import CONFIG_FILE
from stages.runner import load_config

if TYPE_CHECKING:
    from rlinf.models.chat_format import ChatFormat

log = logging.getLogger("rlinf")


def validate_config(config: RunConfig) -> None:
    """Validate the section of each component, and then the combination of components.

    Raises:
        ConfigError: a key is invalid; the message names it.
        DataError: a file of the task or model is missing or malformed.
        PlanError: the site file is missing or malformed.
        MissingPackageError: a component needs a package that is not installed.
    """
    policy, model_options = policy_class(config)
    environment, task_options = environment_class(config)
    engine = engines.get(config.engine.name)
    engine_options = config.engine.validate_options(engine.Config, "engine")
    trainer = trainers.get(config.trainer.name)
    trainer_options = config.trainer.validate_options(trainer.Config, "trainer")
    algorithm = create_algorithm(config)
    reject_unused_keys(algorithm, config.algorithm.name)
    reward, reward_options = reward_class(config)
    reward.check(reward_options)
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    if cluster.launcher == "slurm":
        check_log_folder(config.run.folder)
    if cluster.site is not None:
        set_interpreters(_site_interpreters(cluster.site))
    for number, tracker in enumerate(validate(LogConfig, config.log, "log").trackers):
        check_tracker(tracker, f"log.trackers.{number}", config)
    simulator_modules = environment.required_modules(task_options)
    engine_packages = engine.required_packages(engine_options)
    trainer_packages = trainer.required_packages(trainer_options)
    check_interpreters(config, cluster, simulator_modules, engine_packages, trainer_packages)
    check_sft(config, engine_packages)
    for key, (name, modules) in engine.interpreters(engine_options).items():
        check_interpreter(name, f"engine.{key}", modules)
    check_flow(flow_of(config), "flow")
    check_videos(config, environment.video_columns(task_options))
    check_components(config)
    check_episode_carryover(config)
    check_group_starts(config, environment.has_deterministic_reset(task_options))
    check_resampling(config, algorithm)
    check_eval_samples(config, environment.num_tasks(task_options))
    check_sampling(config, engine.requires)
    check_parameter_groups(config, policy.parameter_groups)
    algorithm.check(model_options)
    check_turns(config, algorithm)
    check_truncated_episodes(config, algorithm)
    check_replay(config, algorithm, trainer, trainer_options)
    check_value_head(config, algorithm, model_options, trainer_options)
    warn_about_precision(config, trainer_options)
    samples = config.rollout.batch_size * config.rollout.group_size
    if samples % algorithm.minibatches:
        raise ConfigError(
            f"algorithm.minibatches: {samples} samples (rollout.batch_size "
            f"{config.rollout.batch_size} x rollout.group_size {config.rollout.group_size}) "
            f"cannot be split into {algorithm.minibatches} equal minibatches"
        )
    if cluster.launcher != "slurm":
        for section, options in (("engine", engine_options), ("trainer", trainer_options)):
            check_device(getattr(options, "device", "auto"), f"{section}.device")
    if config.sft.max_steps:
        environment.check_demonstrations(task_options)
    spec = environment.model_spec(task_options)
    check_train_test_overlap(config, environment.train_test_overlap(task_options), task_options)
    processor = policy.check(model_options, spec)
    engine.check_policy(engine_options, model_options)
    size = environment.task_size(task_options, processor)
    if processor is not None and LANGUAGE_MODEL in policy.provides:
        from rlinf.models.chat_format import ChatFormat

        check_stop_strings(config, ChatFormat.from_tokenizer(processor))
    positions = policy.max_model_len(model_options)
    check_context(getattr(engine_options, "max_model_len", None), positions)
    check_sizes(config, size, positions)


def complete_config(config: RunConfig) -> RunConfig:
    """Return the configuration after reading unset keys of the task from its environment.

    Keys that are already set are compared with the environment, unless the run exists with the same
    task.

    Raises:
        ConfigError: a key is wrong, or cannot be read here.
    """
    environment, options = environment_class(config)
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    if cluster.site is not None:
        set_interpreters(_site_interpreters(cluster.site))
    if (name := configured_interpreter(config, "task")) is not None:
        check_interpreter(name, "task.python", environment.required_modules(options))
    # Simulators run under the interpreter of their stages, if these have one.
    can_compare = (
        configured_interpreter(config, "task") is not None
        or configured_interpreter(config, "engine") is None
    )
    values = environment.infer_config(options, check_given=can_compare and not _is_frozen(config))
    return config.with_environment_keys(values) if values else config


def _is_frozen(config: RunConfig) -> bool:
    """Return whether the run exists with the same task, which was checked when it was created."""
    try:
        frozen = load_config(config.run.folder / CONFIG_FILE)
    except ConfigError:  # there is none, or it is damaged
        return False
    return frozen.task.model_dump(mode="json") == config.task.model_dump(mode="json")


def check_interpreters(
    config: RunConfig,
    cluster: ClusterConfig,
    simulator_modules: tuple[str, ...],
    engine_packages: tuple[str, ...],
    trainer_packages: tuple[str, ...],
) -> None:
    """Check that configured interpreters exist and have the modules that run under them.

    Args:
        simulator_modules: modules that the simulator processes import.
        engine_packages: optional packages of the engine.
        trainer_packages: optional packages of the trainer.

    Raises:
        ConfigError: an interpreter or module is missing, or stages of the driver's process would
            need another interpreter.
        MissingPackageError: no interpreter is configured, and this interpreter lacks an optional
            package.
    """
    all_modules = (simulator_modules, engine_packages, trainer_packages)
    for section, modules in zip(("task", "engine", "trainer"), all_modules, strict=True):
        is_stage_section = section != "task"
        if (name := configured_interpreter(config, section)) is None:
            for package in modules if is_stage_section else ():
                require_package(package, package, f"{section}={getattr(config, section).name}")
            continue
        check_interpreter(
            name, f"{section}.python", (*(STAGE_PACKAGES if is_stage_section else ()), *modules)
        )
        if is_stage_section and cluster.launcher == "inprocess":
            raise ConfigError(
                f"{section}.python: stages run in the driver's own process with "
                "cluster.launcher=inprocess; choose cluster=local or cluster=slurm"
            )


def check_sft(config: RunConfig, engine_packages: tuple[str, ...]) -> None:
    """Check that the SFT stage can generate, if it scores held-out samples.

    Args:
        engine_packages: optional packages of the engine.

    Raises:
        ConfigError: the interpreter of the trainer lacks one of these packages.
    """
    if not (engine_packages and config.sft.max_steps and config.sft.eval_generation):
        return
    name = configured_interpreter(config, "trainer")
    if name is None:
        lacking = [package for package in engine_packages if find_spec(package) is None]
    else:
        lacking = missing_modules(name, "trainer.python", engine_packages)
    if lacking:
        raise ConfigError(
            "sft.eval_generation: the process that trains generates the held-out samples, "
            f"and its interpreter lacks the package {lacking[0]!r} of engine={config.engine.name}; "
            f"set trainer.python={configured_interpreter(config, 'engine') or 'one that has it'}, "
            "or sft.eval_generation=false"
        )


def check_videos(config: RunConfig, video_columns: tuple[str, ...]) -> None:
    """Check that the task has a camera, if held-out episodes are recorded.

    Raises:
        ConfigError: the task has no camera.
        MissingPackageError: PyAV is not installed.
    """
    if config.evaluate.videos:
        if not video_columns:
            raise ConfigError(
                f"evaluate.videos: task {config.task.name!r} has no cameras; set task.video "
                "({CAMERA: [HEIGHT, WIDTH]}), or evaluate.videos=0"
            )
        require_package("av", "video", "evaluate.videos")


def check_parameter_groups(config: RunConfig, groups: tuple[str, ...]) -> None:
    """Check that optimizer settings name parameter groups of the policy.

    Raises:
        ConfigError: a group does not exist.
    """
    for key in ("group_lr", "group_clip_grad"):
        for name in getattr(config.optimizer, key):
            if name not in groups:
                raise ConfigError(
                    f"optimizer.{key}.{name}: {config.model.name} has no such parameter group; "
                    f"available: {', '.join(groups)}"
                )


def check_sampling(config: RunConfig, engine_requires: frozenset[str]) -> None:
    """Check that the engine samples tokens, if sampling settings are given.

    Raises:
        ConfigError: the engine returns whole actions, which it does not sample token by token.
    """
    for key, section in (
        ("rollout.sampling", config.rollout.sampling),
        ("evaluate.sampling", config.evaluate.sampling),
    ):
        settings = [] if section is None else list(section.non_default_settings())
        if settings and LANGUAGE_MODEL not in engine_requires:
            raise ConfigError(
                f"{key}.{settings[0]}: engine {config.engine.name!r} samples no tokens; remove it"
            )


def check_layouts(config: RunConfig, plan: Plan) -> None:
    """Check that engine and trainer support the layouts and numbers of processes in the plan.

    Raises:
        ConfigError: a layout is not supported, or a pool would need one component in two layouts.
    """
    pools = plan.stage_pools() if plan.pools else {}
    pool_components = [pool_resources(plan, number) for number in range(len(plan.pools))]
    pool_sizes = [sum(c.nodes * c.processes for c in components) for components in pool_components]
    elastic_stages = {stage for pool in plan.pools if pool.workers for stage in pool.stages}
    layouts: dict[tuple[int, str], tuple[str, ParallelLayout]] = {}
    for stage, spec in plan.flow.all_stages.items():
        key, stage_plan = f"plan.stages.{stage}.layout", plan.stage_plan(stage)
        layout, num_processes = stage_plan.layout, stage_plan.nodes * stage_plan.processes
        pool = pools.get(stage)
        size = num_processes if pool is None else pool_sizes[pool]
        size = 1 if stage in elastic_stages else size
        component = spec.holds or plan.flow.all_stages.get(spec.colocate_with or "", spec).holds
        if component is not None and pools and not spec.single_process:
            other_stage, other = layouts.setdefault((pools[stage], component), (stage, layout))
            if other != layout:
                raise ConfigError(
                    f"{key}: {str(layout) or 'none'}, but {other_stage}, whose {component} it uses "
                    f"in one pool with it, has {str(other) or 'none'}; give both the same"
                )
        if component == "trainer":
            trainer = trainers.get(config.trainer.name)
            options = config.trainer.validate_options(trainer.Config, "trainer")
            policy, model = policy_class(config)
            trainer.check(options, policy, model, config.optimizer, layout, size, key)
            if (
                spec.single_process
                and REPLAY_ALGORITHM in plan.flow.requires
                and not plan.is_single_process(stage)
            ):
                raise ConfigError(
                    f"plan.stages.{stage}: {num_processes} processes, but one process "
                    f"learns from transitions (flow={config.flow}); leave out nodes and processes"
                )
        if not layout.parallel_dims():
            continue
        if component is None or spec.single_process:
            raise ConfigError(f"{key}: {stage} computes with no model; remove the key")
        name = getattr(config, component).name
        if component == "engine":
            supported = engines.get(name).supported_layouts
        else:
            supported = trainers.get(name).parallel_dims
        for dim in layout.parallel_dims():
            if dim not in supported:
                dims = ", ".join(sorted(supported)) or "none"
                raise ConfigError(
                    f"{key}.{dim}: {component} {name!r} does not support it; supported: {dims}"
                )
        if component == "engine":
            engine = engines.get(name)
            options = config.engine.validate_options(engine.Config, "engine")
            engine.check_layout(options, policy_class(config)[1], layout, key)
        layout.check(size, key)


def check_tracker(name: str, key: str, config: RunConfig) -> None:
    """Check that a tracker exists and can be initialised, without starting it.

    Raises:
        ConfigError: the tracker is unknown, or lacks a login.
        MissingPackageError: the package of the tracker is not installed.
    """
    tracker = trackers.get(name, key)
    package: tuple[str, str] | None = getattr(tracker, "package", None)
    if package is not None:
        require_package(*package, f"{key}: {name}")
    check_settings: Callable[[RunConfig], None] | None = getattr(tracker, "check", None)
    if check_settings is not None:
        check_settings(config)


def check_flow(flow: Flow, key: str) -> None:
    """Check that each stage has a module with ``run``, and that its inputs exist when it runs.

    Raises:
        ConfigError: the flow is invalid; the message names the stage.
    """
    if not flow.stages or not flow.setup_stages:
        raise ConfigError(
            f"{key}: a flow needs stages, and a setup stage that creates the initial weights"
        )
    earlier = set(flow.setup_stages)
    for name, stage in flow.all_stages.items():
        label = f"{key}: stage {name}"
        for entry in stage.inputs.values():
            for source in filter(None, (entry.stage, entry.initial)):
                if source not in flow.all_stages:
                    hint = did_you_mean(source, flow.all_stages)
                    raise ConfigError(
                        f"{label} reads {source!r}, which is not a stage of the flow{hint}"
                    )
            if not entry.lag and entry.stage not in earlier and not entry.stale:
                raise ConfigError(f"{label} reads {entry.stage}, which comes later; put it first")
        for section in stage.config_sections:
            if section not in RunConfig.model_fields:
                hint = did_you_mean(section, RunConfig.model_fields)
                raise ConfigError(f"{label} has no such section: {section!r}{hint}")
        import_user_attribute(flow.module_of(name), "run", label)
        earlier.add(name)


def check_resampling(config: RunConfig, algorithm: Algorithm) -> None:
    """Check that groups can be resampled, if ``rollout.max_resamples`` is set.

    Raises:
        ConfigError: the flow has no rollout that resamples, or the algorithm accepts every group.
    """
    if config.rollout.max_resamples is None:
        return
    flow = flow_of(config)
    if DYNAMIC_SAMPLING_MODULE not in map(flow.module_of, flow.stages):
        raise ConfigError(
            f"rollout.max_resamples: flow {config.flow!r} has no rollout that can resample groups; "
            "choose flow=on_policy, or leave it out"
        )
    # Groups of two samples with equal scores, both ordinary and extreme ones.
    scores, groups = np.repeat([-1e9, 0.0, 1.0, 1e9], 2), np.repeat(np.arange(4), 2)
    if algorithm.select_samples(scores, groups).all():
        raise ConfigError(
            f"rollout.max_resamples: algorithm {config.algorithm.name!r} keeps groups whose "
            "samples all scored the same, so that nothing would be resampled; set algorithm=dapo, "
            "or algorithm.filter_zero_variance_groups=true with an algorithm of groups, or leave "
            "rollout.max_resamples out"
        )


def check_device(name: str, key: str) -> None:
    """Check that this machine has a device.

    Raises:
        ConfigError: the machine lacks the device.
    """
    import torch

    kind, _, number = name.partition(":")
    device_count = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(number or 0) >= device_count:
        has = f"{device_count} GPUs" if device_count else "no GPU"
        raise ConfigError(f"{key}: {name} does not exist: this machine has {has}; use auto")


def check_stop_strings(config: RunConfig, chat_format: ChatFormat) -> None:
    """Check that each stop string is either plain text or one special token.

    Raises:
        ConfigError: a stop string mixes them, so that no engine would ever match it.
    """
    for key, section in (("rollout", config.rollout), ("evaluate", config.evaluate)):
        for text in () if section.sampling is None else section.sampling.stop:
            if (token := chat_format.undecoded_token_in(text)) is not None:
                raise ConfigError(
                    f"{key}.sampling.stop: {text!r} has the special token {token!r} and more text, "
                    f"so it would never match; use {token!r} alone"
                )


def check_context(context: int | None, positions: int | None) -> None:
    """Check that the context length of the engine does not exceed the positions of the model.

    Raises:
        ConfigError: it exceeds them, so that vLLM would not start.
    """
    if context is not None and positions is not None and context > positions:
        raise ConfigError(
            f"engine.max_model_len: {context} is more than the {positions} positions of the model; "
            f"set it to {positions} or less, or leave it out"
        )


def check_sizes(config: RunConfig, size: TaskSize, positions: int | None) -> None:
    """Check that the task has enough problems, and that prompts and responses fit the model.

    Args:
        size: number of problems, and length of the longest prompt.
        positions: maximum number of tokens of the model; None if unlimited.

    Raises:
        ConfigError: the task has too few problems, or the model too few positions.
    """
    eval_horizon = config.evaluate.horizon or config.rollout.horizon
    if config.iterations and size.train == 0:
        raise ConfigError(
            f"task.train: task {config.task.name!r} has no training problems; name a file of them, "
            "or only evaluate (rlinf evaluate)"
        )
    # Without iterations nothing is trained, as in rlinf evaluate.
    num_training = size.train if config.iterations else None
    for key, requested, available, file in (
        ("rollout.batch_size", config.rollout.batch_size, num_training, "task.train"),
        ("evaluate.samples", config.evaluate.samples, size.test, "task.test"),
    ):
        if available is not None and requested > available:
            raise ConfigError(
                f"{key}: {requested} different problems are needed at once, but {file} has "
                f"only {available} usable ones; set {key}={available} or less"
            )
    horizons: Iterable[tuple[str, int]] = (
        ("rollout.horizon", config.rollout.horizon),
        ("evaluate.horizon", eval_horizon),
    )
    for key, horizon in horizons:
        if positions is not None and size.max_prompt_tokens + horizon > positions:
            raise ConfigError(
                f"{key}: prompts of up to {size.max_prompt_tokens} tokens and {horizon} new ones "
                f"do not fit into the {positions} positions of the model; lower it"
                + _positions_hint(config.model.model_extra or {})
            )


def _positions_hint(options: dict[str, Any]) -> str:
    if not options.get("path"):
        return " or raise model.max_position_embeddings"
    return " or task.max_prompt_length, or raise model.max_model_len as far as config.json allows"


def check_separate_policy(config: RunConfig, plan: Plan) -> None:
    """Check that the task has simulators, if the plan places the policy separately from them.

    Raises:
        PlanError: the task has none, or a stage with simulators cannot query a policy server.
    """
    rollout = plan.flow.rollout_stage
    for policy in plan.flow.separate_policy if rollout is not None else ():
        if OBSERVATIONS not in environments.get(config.task.name).provides:
            raise PlanError(
                f"plan.pools: {policy}: task {config.task.name!r} has no simulators that a policy "
                f"could be placed separately from; leave {policy} out"
            )
        import_user_attribute(
            plan.flow.module_of(str(rollout)), "policy_runner", f"plan.pools: {policy}"
        )
        pools = plan.stage_pools()
        if pools[EVALUATE] == pools[str(rollout)]:
            try:
                import_user_attribute(
                    plan.flow.module_of(EVALUATE), "policy_runner", f"plan.pools: {policy}"
                )
            except ConfigError as error:
                raise PlanError(
                    f"{error}; or name {EVALUATE} in another pool than {rollout}, where it has "
                    "simulators and policy"
                ) from None


class ConfigComponent(NamedTuple):
    """A component of the run, with the registry of its alternatives."""

    section: str
    """Section of the configuration that chooses the component."""
    name: str
    """Chosen name, a key of the registry."""
    registry: Registry

    @property
    def key(self) -> str:
        return f"{self.section}.name"


def check_components(config: RunConfig) -> None:
    """Check that each component provides what the others require (:mod:`rlinf.registry`).

    Raises:
        ConfigError: a requirement is not met; the message names alternatives that meet it.
    """
    parts = [
        ConfigComponent("task", config.task.name, environments),
        ConfigComponent("model", config.model.name, policies),
        ConfigComponent("engine", config.engine.name, engines),
        ConfigComponent("reward", config.reward.name, rewards),
        ConfigComponent("algorithm", config.algorithm.name, algorithms),
    ]
    flow = flow_of(config)
    provided = {word for part in parts for word in part.registry.get(part.name).provides}
    provided |= flow.provides
    if config.rollout.group_size > 1:
        provided.add(SAMPLE_GROUPS)
    inputs = (entry for stage in flow.all_stages.values() for entry in stage.inputs.values())
    if config.rollout.staleness and any(entry.stale for entry in inputs):
        provided.add(STALE_ROLLOUTS)
    for part in parts:
        missing = part.registry.get(part.name).requires - provided
        if missing:
            names = part.registry.names()
            alternatives = [n for n in names if _are_requirements_met(part.registry, n, provided)]
            raise ConfigError(
                f"{part.key}: {part.name!r} needs {sorted(missing)[0]}, which no component of this "
                f"run provides ({', '.join(f'{p.section} {p.name}' for p in parts if p != part)})"
                + (f"; alternatives: {', '.join(alternatives)}" if alternatives else "")
            )
    if missing := flow.requires - provided:
        raise ConfigError(
            f"flow: {config.flow!r} needs {sorted(missing)[0]}; {config.algorithm.name!r} is none"
        )
    if config.sft.max_steps and DEMONSTRATIONS not in provided:
        raise ConfigError(
            f"sft.max_steps: task {config.task.name!r} has no demonstrations to learn from; "
            "set it to 0"
        )
    if config.sft.eval_samples and EVAL_DEMONSTRATIONS not in provided:
        raise ConfigError(
            f"sft.eval_samples: task {config.task.name!r} has no held-out demonstrations; "
            "set it to 0"
        )


def _are_requirements_met(registry: Registry, name: str, provided: set[str]) -> bool:
    try:
        required: frozenset[str] = registry.get(name).requires
    except (RlinfError, ImportError):
        return False
    return required <= provided


def check_episode_carryover(config: RunConfig) -> None:
    """Check that episodes can continue across iterations, if configured.

    Raises:
        ConfigError: episodes cannot continue.
    """
    if not carries_over_episodes(config):
        return
    if config.rollout.max_resamples is not None:
        raise ConfigError(
            "task.carry_over_episodes: a rollout that resamples groups cannot continue episodes; "
            "leave rollout.max_resamples out, or set task.carry_over_episodes=false"
        )
    if not any(OPEN_EPISODES in stage.inputs for stage in flow_of(config).stages.values()):
        raise ConfigError(
            f"task.carry_over_episodes: flow={config.flow} does not read the previous rollout; "
            "choose flow=on_policy or flow=off_policy, or set task.carry_over_episodes=false"
        )
    if config.rollout.group_size > 1:
        raise ConfigError(
            "task.carry_over_episodes: the samples of a group would start alike only in the "
            "first iteration; set rollout.group_size=1, or task.carry_over_episodes=false"
        )


def check_group_starts(config: RunConfig, has_equal_starts: bool) -> None:
    """Check that the samples of a group can be compared.

    Args:
        has_equal_starts: whether the samples of a group start in the same state.

    Raises:
        ConfigError: they start in different states.
    """
    if config.rollout.group_size > 1 and not has_equal_starts:
        hint = "; algorithm=ppo needs no groups"
        raise ConfigError(
            f"rollout.group_size: {config.rollout.group_size}, but the samples of a group would "
            "start in different states and could not be compared: in this simulator a seed does "
            "not determine the initial state; set rollout.group_size=1"
            + (hint if algorithms.get(config.algorithm.name).requires & {SAMPLE_GROUPS} else "")
        )


def check_train_test_overlap(config: RunConfig, overlap: tuple[int, int], options: Any) -> None:
    """Check that held-out problems are not training problems, unless the run only evaluates.

    Args:
        overlap: number of held-out problems that are training problems too, and number of all
            held-out problems.
        options: options of the task; ``allow_train_test_overlap`` permits a complete overlap.

    Raises:
        DataError: all held-out problems are training problems, and the run trains.
    """
    num_shared, total = overlap
    if not num_shared or not (config.iterations or config.sft.max_steps):
        return
    if num_shared == total and not getattr(options, "allow_train_test_overlap", False):
        raise DataError(
            f"task.test: the same problems as in task.train: all {total} held-out ones are there, "
            "so that their score would not measure generalization. Use another file, or set "
            "task.allow_train_test_overlap=true"
        )
    log.warning(
        "task.test: %d of %d held-out problems are training problems (task.train) too, so "
        "the score does not measure generalization alone",
        num_shared,
        total,
    )


def check_truncated_episodes(config: RunConfig, algorithm: Algorithm) -> None:
    """Check that the steps of a truncated episode do not get reward 0.

    Raises:
        ConfigError: rewards come only at the end of an episode, a sample contains several episodes,
            and no value function estimates the return of the last one.
    """
    rewards_at_end = EPISODE_REWARDS in rewards.get(config.reward.name).provides
    has_values = algorithm.requires & {VALUE_ESTIMATES, ACTION_VALUES, TRANSITION_REPLAY}
    if not rewards_at_end or has_values or config.rollout.group_size > 1:
        return
    if OBSERVATIONS in environments.get(config.task.name).provides:
        raise ConfigError(
            f"reward.name: {config.reward.name!r} scores an episode when it ends, and "
            f"algorithm={config.algorithm.name} has no value estimates for truncated episodes: "
            "their steps would get reward 0; set "
            "reward=environment, rollout.group_size above 1 (a sample is one episode then), or "
            "algorithm=ppo"
        )


def check_turns(config: RunConfig, algorithm: Algorithm) -> None:
    """Check that the reward gives one value per turn, if advantages are per turn.

    Raises:
        ConfigError: the task has no turns, or the reward is one number per dialogue.
    """
    if not algorithm.needs_turns:
        return
    if TURNS not in environments.get(config.task.name).provides:
        raise ConfigError(
            f"algorithm.advantage_level: turn is for dialogues, but task {config.task.name!r} has "
            "no turns; set it to trajectory"
        )
    if TURN_REWARDS not in rewards.get(config.reward.name).provides:
        raise ConfigError(
            f"algorithm.advantage_level: turn needs a reward per turn, but reward "
            f"{config.reward.name!r} gives one number for a whole dialogue; set "
            "reward=environment, which uses the task's reward of each message, or "
            "algorithm.advantage_level=trajectory"
        )


def check_eval_samples(config: RunConfig, num_tasks: int) -> None:
    """Check that every task has the same number of held-out samples.

    Raises:
        ConfigError: the samples cannot be divided equally.
    """
    if config.evaluate.samples % num_tasks:
        nearest = max(config.evaluate.samples // num_tasks, 1) * num_tasks
        raise ConfigError(
            f"evaluate.samples: {config.evaluate.samples} cannot be divided equally among "
            f"{num_tasks} tasks; set it to {nearest}"
        )


def check_replay(
    config: RunConfig, algorithm: Algorithm, trainer: type[Trainer], options: Any
) -> None:
    """Check that an off-policy algorithm can learn from transitions in every iteration.

    Args:
        options: options of the trainer.

    Raises:
        ConfigError: the algorithm cannot.
    """
    if TRANSITION_REPLAY not in algorithm.requires:
        return
    if not trainer.supports_batches:
        raise ConfigError(
            f"trainer.name: {config.trainer.name!r} does not support batches of transitions; set "
            "trainer=fsdp"
        )
    has_rollouts = NO_ROLLOUTS not in flow_of(config).provides
    if not has_rollouts and getattr(algorithm.config, "gradient_steps", 1) is None:
        raise ConfigError(
            "algorithm.gradient_steps: optimizer steps are counted by new transitions, and "
            f"flow={config.flow} collects none; set the number per iteration"
        )
    learns_from_prior_data = ACTION_VALUES in algorithm.requires and bool(
        getattr(algorithm.config, "offline_data", 0)
    )
    if learns_from_prior_data and STEP_REWARDS not in rewards.get(config.reward.name).requires:
        raise ConfigError(
            "algorithm.offline_data: prior transitions have the rewards of the simulator, "
            f"but new ones would have those of reward={config.reward.name}, so values would mix "
            "both; set reward=environment (reward.scale multiplies both), or leave "
            "algorithm.offline_data out"
        )
    dtype = getattr(options, "param_dtype", "float32")
    if ACTION_VALUES in algorithm.requires and dtype != "float32":
        raise ConfigError(
            f"trainer.param_dtype: the critics of {config.algorithm.name!r} compute in float32, "
            f"not in {dtype}; set trainer.param_dtype=float32"
        )


def warn_about_precision(config: RunConfig, options: Any) -> None:
    """Log a warning if bfloat16 may round most weight updates away.

    Args:
        options: options of the trainer.
    """
    is_bfloat16 = getattr(config.model, "dtype", "float32") == "bfloat16"
    if is_bfloat16 and config.trainer.name == "fsdp" and getattr(options, "lora", None) is None:
        log.warning(
            "model.dtype=bfloat16: weights and moments are bfloat16 too, so rounding removes most "
            "steps at small rates; trainer.param_dtype=bfloat16 only computes in bfloat16"
        )


def check_value_head(config: RunConfig, algorithm: Algorithm, model: Any, options: Any) -> None:
    """Check that the value head is trained if the algorithm needs one.

    Args:
        model: options of the policy.
        options: options of the trainer.

    Raises:
        ConfigError: the algorithm needs the value head, but only adapters are trained; or it needs
            none, but ``model.value_level`` is ``action``.
    """
    if (
        getattr(model, "value_level", "chunk") == "action"
        and VALUE_ESTIMATES not in algorithm.requires
    ):
        raise ConfigError(
            f"model.value_level: action needs an algorithm with values (ppo, async_ppo), but "
            f"{config.algorithm.name!r} has none; set it to chunk"
        )
    if VALUE_ESTIMATES in algorithm.requires and getattr(options, "lora", None) is not None:
        raise ConfigError(
            f"trainer.lora: adapters do not train the value head, but {config.algorithm.name!r} "
            "needs a trained one; set trainer.lora=null, or choose an algorithm without values"
        )


def _site_interpreters(path: Path) -> Mapping[str, str]:
    from slurm.site import load_site

    return load_site(path).interpreters
