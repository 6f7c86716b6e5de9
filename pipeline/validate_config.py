"""Validation of a complete configuration before anything is written or submitted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.plan import Plan
from pipeline.resources import ClusterConfig, pool_resources
from rlinf.algorithms.unused_keys import reject_unused_keys
from rlinf.channels.process_group import ParallelLayout
from rlinf.config import RunConfig, SamplingSection, SuiteSet, validate
from rlinf.envs import environments
from rlinf.envs.base import TaskSize
from rlinf.errors import ConfigError, DataError, PlanError, RlinfError, require_package
from rlinf.interpreters import (
    STAGE_PACKAGES,
    check_interpreter,
    check_own_torch,
    configured_interpreter,
    missing_modules,
    set_interpreters,
)
from rlinf.registry import (
    LANGUAGE_MODEL,
    OBSERVATIONS,
    REPLAY_ALGORITHM,
    SAMPLE_GROUPS,
    STALE_ROLLOUTS,
    Registry,
    RunComponents,
    import_user_attribute,
)
from rlinf.track import LogConfig, trackers
from slurm.sbatch_options import check_log_folder
from stages.factory import (
    component_class,
    create_algorithm,
    environment_class,
    evaluation_suite,
)
from stages.flow import EVALUATE, check_flow, check_rollouts, flow_of
from stages.identity import CLASS_REGISTRIES
from stages.layout import CONFIG_FILE
from stages.runner import load_config

if TYPE_CHECKING:
    from rlinf.models.chat_format import ChatFormat

log = logging.getLogger("rlinf")
SERVED_SECTIONS = ("engine", "model")
"""Sections of the configuration that a served model depends on."""


def validate_config(config: RunConfig) -> TaskSize:
    """Validate the section of each component, and then the combination of components.

    Returns:
        The size of the task.

    Raises:
        ConfigError: a key is invalid; the message names it.
        DataError: a file of the task or model is missing or malformed.
        PlanError: the site file is missing or malformed.
        MissingPackageError: a component needs a package that is not installed.
    """
    check_own_torch()
    run = load_components(config)
    reject_unused_keys(create_algorithm(config), config.algorithm.name)
    cluster = validate(ClusterConfig, config.cluster, "cluster")
    if cluster.launcher == "slurm":
        check_log_folder(config.run.folder)
    if cluster.site is not None:
        set_interpreters(_site_interpreters(cluster.site))
    for number, tracker in enumerate(validate(LogConfig, config.log, "log").trackers):
        check_tracker(tracker, f"log.trackers.{number}", config)
    check_interpreters(run, cluster)
    check_flow(flow_of(config), "flow")
    check_requirements(run)
    check_rollouts(config)
    if cluster.launcher != "slurm":
        for section in ("engine", "trainer"):
            check_device(getattr(run.options[section], "device", "auto"), f"{section}.device")
    policy, environment = run.classes["model"], run.classes["task"]
    spec = environment.model_spec(run.options["task"])
    processor = policy.check_spec(run.options["model"], spec)
    for section, cls in run.classes.items():
        cls.check(run.options[section], run)
    check_train_test_overlap(
        config, environment.train_test_overlap(run.options["task"]), run.options["task"]
    )
    if processor is not None and LANGUAGE_MODEL in policy.provides:
        from rlinf.models.chat_format import ChatFormat

        chat_format = ChatFormat.from_tokenizer(processor)
        check_stop_strings("rollout", config.rollout.sampling, chat_format)
        check_stop_strings("evaluate", config.evaluate.sampling, chat_format)
    size = environment.task_size(run.options["task"], processor)
    positions = policy.max_model_len(run.options["model"])
    check_sizes(config, size, positions)
    check_held_out_sets(run, processor, positions)
    return size


def check_held_out_sets(run: RunComponents, processor: Any, positions: int | None) -> None:
    """Check the sets of problems in ``evaluate.sets``.

    Args:
        processor: the tokenizer of the policy; None if it does not exist before the run.
        positions: maximum number of tokens of the model; None if unlimited.

    Raises:
        ConfigError, DataError: a set is invalid, or the policy is no language model.
    """
    suite = evaluation_suite(run.config)
    if suite is None:
        return
    if LANGUAGE_MODEL not in run.classes["model"].provides or processor is None:
        raise ConfigError(
            "evaluate.sets: only a language model with a tokenizer of its own (model.path) can be "
            "evaluated on sets of problems; leave it out"
        )
    from rlinf.models.chat_format import ChatFormat

    settings = run.config.evaluate
    suite.model_spec(settings)
    suite(settings, processor).check_lengths(positions)
    chat_format = ChatFormat.from_tokenizer(processor)
    for name, problem_set in settings.sets.items():
        check_stop_strings(f"evaluate.sets.{name}", problem_set.sampling, chat_format)
    if run.config.iterations or run.config.sft.max_steps:
        warn_of_training_problems(run.config, settings.sets)


def warn_of_training_problems(config: RunConfig, sets: Mapping[str, SuiteSet]) -> None:
    """Warn of held-out problems that a run trains on.

    Problems are equal if all messages of the user are, apart from white space.

    Args:
        config: configuration of the run that trains.
        sets: the sets of held-out problems by name.

    Raises:
        DataError: a file is missing or malformed.
    """
    from rlinf.data.json_lines import count_overlap
    from rlinf.envs.chat_problems import question_text
    from rlinf.envs.problem_set import ProblemSetEnvironment
    from rlinf.envs.suite import SETS_KEY, set_class

    environment, options = environment_class(config)
    if not issubclass(environment, ProblemSetEnvironment):
        return
    training = [part.problems for part in environment.training_sets(options).values()]
    for name, problem_set in sets.items():
        set_cls, set_options = set_class(f"{SETS_KEY}.{name}", problem_set)
        held_out = set_cls.load_problems(set_options, "test")
        num_shared, total = count_overlap(training, held_out, question_text)
        if num_shared:
            log.warning(
                "%s.%s: %d of %d held-out problems are training problems (task.train) of %s too, "
                "so the score does not measure generalization alone",
                SETS_KEY,
                name,
                num_shared,
                total,
                config.run.name,
            )


def check_served_model(config: RunConfig) -> RunComponents:
    """Check model and engine of a configuration, for a process that serves the model itself.

    Raises:
        ConfigError, DataError: they do not fit each other or this machine.
        MissingPackageError: the engine needs a package that is not installed.
    """
    run = load_components(config)
    policy, options = run.classes["model"], run.options["model"]
    capabilities = {"model": policy.provides, "engine": run.classes["engine"].requires}
    for section, capability in capabilities.items():
        if LANGUAGE_MODEL not in capability:
            raise ConfigError(
                f"{section}.name: {getattr(config, section).name!r} is not for language models, "
                "and only these can be served"
            )
    if (python := configured_interpreter(config, "engine")) is not None:
        raise ConfigError(
            f"engine.python: rlinf serve runs the engine in its own process; remove the key and "
            f"start it with {python} -m rlinf serve"
        )
    check_interpreters(run, validate(ClusterConfig, config.cluster, "cluster"))
    check_device(getattr(run.options["engine"], "device", "auto"), "engine.device")
    policy.check_spec(options, {})
    for section in SERVED_SECTIONS:
        run.classes[section].check(run.options[section], run)
    return run


def load_components(config: RunConfig) -> RunComponents:
    """Import the classes of all components, and validate their options.

    Raises:
        ConfigError: there is no such component, or an option is invalid.
    """
    flow, classes, options = flow_of(config), dict[str, Any](), dict[str, Any]()
    for section in CLASS_REGISTRIES:
        classes[section], options[section] = component_class(config, section)
    provided = flow.provides.union(*(cls.provides for cls in classes.values()))
    if config.rollout.group_size > 1:
        provided |= {SAMPLE_GROUPS}
    inputs = (entry for stage in flow.all_stages.values() for entry in stage.inputs.values())
    if config.rollout.staleness and any(entry.stale for entry in inputs):
        provided |= {STALE_ROLLOUTS}
    return RunComponents(config, classes, options, provided)


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


def check_requirements(run: RunComponents) -> None:
    """Check that the components provide what components and flow require (:mod:`rlinf.registry`).

    Raises:
        ConfigError: a requirement is not met; the message names alternatives that meet it.
    """
    config, flow = run.config, flow_of(run.config)
    for section, cls in run.classes.items():
        if missing := cls.requires - run.provided:
            registry = CLASS_REGISTRIES[section]
            names = [name for name in registry.names() if _fits(registry, name, run.provided)]
            others = (f"{s} {getattr(config, s).name}" for s in run.classes if s != section)
            raise ConfigError(
                f"{section}.name: {getattr(config, section).name!r} needs {sorted(missing)[0]}, "
                f"which no component of this run provides ({', '.join(others)})"
                + (f"; alternatives: {', '.join(names)}" if names else "")
            )
    if missing := flow.requires - run.provided:
        raise ConfigError(
            f"flow: {config.flow!r} needs {sorted(missing)[0]}; {config.algorithm.name!r} is none"
        )


def _fits(registry: Registry, name: str, provided: frozenset[str]) -> bool:
    """Return whether the requirements of a registered component are met."""
    try:
        required: frozenset[str] = registry.get(name).requires
    except (RlinfError, ImportError):
        return False
    return required <= provided


def check_interpreters(run: RunComponents, cluster: ClusterConfig) -> None:
    """Check that configured interpreters exist and have the modules that run under them.

    Raises:
        ConfigError: an interpreter or module is missing, or stages of the driver's process would
            need another interpreter.
        MissingPackageError: no interpreter is configured, and this interpreter lacks an optional
            package.
    """
    config = run.config
    if (name := configured_interpreter(config, "task")) is not None:
        modules = run.classes["task"].required_modules(run.options["task"])
        check_interpreter(name, "task.python", modules)
    for section in ("engine", "trainer"):
        packages = run.classes[section].required_packages(run.options[section])
        if (name := configured_interpreter(config, section)) is None:
            for package in packages:
                require_package(package, package, f"{section}={getattr(config, section).name}")
            continue
        check_interpreter(name, f"{section}.python", (*STAGE_PACKAGES, *packages))
        if cluster.launcher == "inprocess":
            raise ConfigError(
                f"{section}.python: stages run in the driver's own process with "
                "cluster.launcher=inprocess; choose cluster=local or cluster=slurm"
            )
    _check_sft_interpreter(run)
    processes = run.classes["engine"].interpreters(run.options["engine"])
    for key, (name, modules) in processes.items():
        check_interpreter(name, f"engine.{key}", modules)


def _check_sft_interpreter(run: RunComponents) -> None:
    """Check that the SFT stage, which the trainer's interpreter runs, can generate if it must.

    Raises:
        ConfigError: the interpreter of the trainer lacks a package of the engine.
    """
    config = run.config
    packages = run.classes["engine"].required_packages(run.options["engine"])
    if not (packages and config.sft.max_steps and config.sft.eval_generation):
        return
    name = configured_interpreter(config, "trainer")
    if name is None:
        lacking = [package for package in packages if find_spec(package) is None]
    else:
        lacking = missing_modules(name, "trainer.python", packages)
    if lacking:
        raise ConfigError(
            "sft.eval_generation: the process that trains generates the held-out samples, "
            f"and its interpreter lacks the package {lacking[0]!r} of engine={config.engine.name}; "
            f"set trainer.python={configured_interpreter(config, 'engine') or 'one that has it'}, "
            "or sft.eval_generation=false"
        )


def check_layouts(config: RunConfig, plan: Plan) -> None:
    """Check that engine and trainer support the layouts and numbers of processes in the plan.

    Raises:
        ConfigError: a layout is not supported, or a pool would need one component in two layouts.
    """
    run = load_components(config)
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
        learns_alone = spec.single_process and REPLAY_ALGORITHM in plan.flow.requires
        if component == "trainer" and learns_alone and not plan.is_single_process(stage):
            raise ConfigError(
                f"plan.stages.{stage}: {num_processes} processes, but one process "
                f"learns from transitions (flow={config.flow}); leave out nodes and processes"
            )
        if layout.parallel_dims() and (component is None or spec.single_process):
            raise ConfigError(f"{key}: {stage} computes with no model; remove the key")
        if component is not None:
            options = run.options[component]
            run.classes[component].check_layout(options, run, layout, size, key)
        if layout.parallel_dims():
            layout.check(size, key)


def check_gpu_counts(config: RunConfig, plan: Plan) -> None:
    """Check that no stage job requests GPUs that its processes would leave idle.

    A process uses one GPU, or ``engine.replicas`` of them if it generates.

    Raises:
        PlanError: a stage has more GPUs than its processes use.
    """
    if plan.pools:
        return  # pool_resources checks pools
    replicas = getattr(load_components(config).options["engine"], "replicas", 1)
    for stage, spec in plan.flow.all_stages.items():
        stage_plan = plan.stage_plan(stage)
        per_process = replicas if "engine" in spec.config_sections else 1
        if spec.uses_device and stage_plan.gpus > stage_plan.processes * per_process:
            advice = (
                "one process computes this stage, so leave gpus at 1"
                if spec.single_process
                else f"set processes: {stage_plan.gpus // per_process} (per node, as gpus)"
            )
            each = "a GPU" if per_process == 1 else f"{per_process} GPUs (engine.replicas)"
            raise PlanError(
                f"plan.stages.{stage}: gpus: {stage_plan.gpus}, but processes: "
                f"{stage_plan.processes}, and each uses {each}: the others would idle; {advice}"
            )


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


def check_stop_strings(key: str, sampling: SamplingSection | None, chat_format: ChatFormat) -> None:
    """Check that each stop string is either plain text or one special token.

    Args:
        key: key of the section that has the sampling settings.

    Raises:
        ConfigError: a stop string mixes them, so that no engine would ever match it.
    """
    for text in () if sampling is None else sampling.stop:
        if (token := chat_format.undecoded_token_in(text)) is not None:
            raise ConfigError(
                f"{key}.sampling.stop: {text!r} has the special token {token!r} and more text, "
                f"so it would never match; use {token!r} alone"
            )


def check_sizes(config: RunConfig, size: TaskSize, positions: int | None) -> None:
    """Check that the task has enough problems, and that prompts and responses fit the model.

    Args:
        size: number of problems, and length of the longest prompt.
        positions: maximum number of tokens of the model; None if unlimited.

    Raises:
        ConfigError: the task has too few problems, or the model too few positions.
    """
    # Sets of problems have sizes of their own.
    uses_test_problems = not config.evaluate.sets or config.sft.max_steps > 0
    if config.iterations and size.train == 0:
        raise ConfigError(
            f"task.train: task {config.task.name!r} has no training problems; name a file of them, "
            "or only evaluate (rlinf evaluate)"
        )
    # Without iterations nothing is trained, as in rlinf evaluate.
    num_training = size.train if config.iterations else None
    for key, requested, available, file in (
        ("rollout.batch_size", config.rollout.batch_size, num_training, "task.train"),
        (
            "evaluate.samples",
            config.evaluate.samples,
            size.test if uses_test_problems else None,
            "task.test",
        ),
    ):
        if available is not None and requested > available:
            raise ConfigError(
                f"{key}: {requested} different problems are needed at once, but {file} has "
                f"only {available} usable ones; set {key}={available} or less"
            )
    horizons = {"rollout.horizon": config.rollout.horizon}
    if uses_test_problems:
        horizons["evaluate.horizon"] = config.evaluate.horizon or config.rollout.horizon
    for key, horizon in horizons.items():
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


def check_residency(config: RunConfig, plan: Plan, launcher: str) -> None:
    """Check that the trainer stays in memory between the checkpoints on disk.

    Raises:
        ConfigError: ``checkpoint.save_every`` is above 1, and another process would have to read a
            checkpoint that is not on disk, or it could not be computed again.
    """
    if config.checkpoint.save_every == 1:
        return
    flow, key = plan.flow, f"checkpoint.save_every={config.checkpoint.save_every}"
    if launcher != "inprocess" and plan.execution != "pools":
        raise ConfigError(
            f"{key}: each stage is a job of its own, which must read the checkpoint from disk; "
            "leave it at 1, or use a plan with pools"
        )
    train = flow.train_stage
    state_inputs = {
        source.stage
        for source in flow.stages[train].inputs.values()
        if source.stage in flow.stages and source.stage != train
    } - {name for name, stage in flow.stages.items() if stage.output_stream}
    if state_inputs or flow.rollout_stage is None:
        needed = ", ".join(sorted(state_inputs)) or "data that no stage recorded"
        raise ConfigError(
            f"{key}: after a loss, {train} could not be repeated from trajectories alone, because "
            f"this flow needs {needed}; leave it at 1"
        )
    pools = plan.stage_pools() if plan.pools else {}
    for name, stage in flow.stages.items():
        if any(s.stage == train for s in stage.inputs.values()) and pools.get(name) != pools.get(
            train
        ):
            raise ConfigError(
                f"{key}: {name} is in another pool than {train}, and must read the checkpoint from "
                "disk; put both in one pool of the plan, or leave it at 1"
            )


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


def _site_interpreters(path: Path) -> Mapping[str, str]:
    from slurm.site import load_site

    return load_site(path).interpreters
