"""What the parts of a run need of each other, checked before it begins (:mod:`rlinf.fit`)."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from pipeline.plan import Plan
from rlinf.algorithms import algorithms
from rlinf.algorithms.base import Algorithm
from rlinf.config import RunConfig
from rlinf.data.left_open import OPEN
from rlinf.engines import engines
from rlinf.envs import environments
from rlinf.errors import ConfigError, DataError, PlanError, RlinfError
from rlinf.fit import (
    ACTION_VALUES,
    DEMONSTRATIONS,
    EPISODE_REWARDS,
    GROUPS,
    HELD_OUT_DEMONSTRATIONS,
    OBSERVATIONS,
    REPLAY,
    STALE,
    STEP_REWARDS,
    TURN_REWARDS,
    TURNS,
    VALUES,
    WITHOUT_ROLLOUTS,
)
from rlinf.models import policies
from rlinf.registry import Registry, own_attribute
from rlinf.rewards import rewards
from rlinf.trainers.base import Trainer
from stages.flow import EVALUATE, continues, flow_of

log = logging.getLogger("rlinf")


def check_apart(config: RunConfig, plan: Plan) -> None:
    """See that there are simulators, where the plan places the policy apart from them.

    Raises:
        PlanError: there are none, or a stage that has them cannot ask for answers.
    """
    acts = plan.flow.acts
    for part in plan.flow.apart if acts is not None else ():
        if OBSERVATIONS not in environments.get(config.task.name).offers:
            raise PlanError(
                f"plan.pools: {part}: task {config.task.name!r} has no simulators that a policy "
                f"could be placed apart from; leave {part} out"
            )
        own_attribute(plan.flow.program(str(acts)), "acting", f"plan.pools: {part}")
        homes = plan.homes()
        if homes[EVALUATE] == homes[str(acts)]:
            try:
                own_attribute(plan.flow.program(EVALUATE), "acting", f"plan.pools: {part}")
            except ConfigError as error:
                raise PlanError(
                    f"{error}; or name {EVALUATE} in another pool than {acts}, where it has "
                    "simulators and policy"
                ) from None


class Part(NamedTuple):
    """A part of the run, and all that could stand in its place."""

    section: str
    name: str
    registry: Registry

    @property
    def key(self) -> str:
        return f"{self.section}.name"


def check_fit(config: RunConfig) -> None:
    """See that what each part needs is offered by another one (:mod:`rlinf.fit`).

    Raises:
        ConfigError: a need is not met; names the parts of the same kind that would fit.
    """
    parts = [
        Part("task", config.task.name, environments),
        Part("model", config.model.name, policies),
        Part("engine", config.engine.name, engines),
        Part("reward", config.reward.name, rewards),
        Part("algorithm", config.algorithm.name, algorithms),
    ]
    flow = flow_of(config)
    offered = {word for part in parts for word in part.registry.get(part.name).offers}
    offered |= flow.offers
    if config.rollout.group_size > 1:
        offered.add(GROUPS)
    sources = (source for stage in flow.table.values() for source in stage.inputs.values())
    if config.rollout.staleness and any(source.lags for source in sources):
        offered.add(STALE)
    for part in parts:
        missing = part.registry.get(part.name).needs - offered
        if missing:
            others = [name for name in part.registry.names() if _fits(part.registry, name, offered)]
            raise ConfigError(
                f"{part.key}: {part.name!r} needs {sorted(missing)[0]}, which no part of this run "
                f"offers ({', '.join(f'{p.section} {p.name}' for p in parts if p != part)})"
                + (f"; here fits: {', '.join(others)}" if others else "")
            )
    if missing := flow.needs - offered:
        raise ConfigError(
            f"flow: {config.flow!r} needs {sorted(missing)[0]}; {config.algorithm.name!r} is none"
        )
    if config.warm_start.max_steps and DEMONSTRATIONS not in offered:
        raise ConfigError(
            f"warm_start.max_steps: task {config.task.name!r} has no demonstrations to learn from; "
            "set it to 0"
        )
    if config.warm_start.held_out and HELD_OUT_DEMONSTRATIONS not in offered:
        raise ConfigError(
            f"warm_start.held_out: task {config.task.name!r} has no held-out demonstrations to "
            "take the loss of; set it to 0"
        )


def _fits(registry: Registry, name: str, offered: set[str]) -> bool:
    try:
        needs: frozenset[str] = registry.get(name).needs
    except (RlinfError, ImportError):
        return False
    return needs <= offered


def check_continues(config: RunConfig) -> None:
    """See that episodes can go on over iterations, where they are to.

    Raises:
        ConfigError: they cannot.
    """
    if not continues(config):
        return
    if not any(OPEN in stage.inputs for stage in flow_of(config).stages.values()):
        raise ConfigError(
            f"task.continues: flow={config.flow} takes nothing from the rollout before; choose "
            "flow=on_policy or flow=off_policy, or set task.continues=false"
        )
    if config.rollout.group_size > 1:
        raise ConfigError(
            "task.continues: the samples of a group would begin alike in the first iteration "
            "alone; set rollout.group_size=1, or task.continues=false"
        )


def check_starts(config: RunConfig, alike: bool) -> None:
    """See that the samples of a group can be compared.

    Args:
        alike: whether those of a start begin alike.

    Raises:
        ConfigError: they begin in different states.
    """
    if config.rollout.group_size > 1 and not alike:
        others = "; algorithm=ppo needs no groups"
        raise ConfigError(
            f"rollout.group_size: {config.rollout.group_size}, but the samples of a group would "
            "begin in different states and could not be compared: in this simulator a seed does "
            "not say where an episode begins; set rollout.group_size=1"
            + (others if algorithms.get(config.algorithm.name).needs & {GROUPS} else "")
        )


def check_held_out(config: RunConfig, overlap: tuple[int, int], options: Any) -> None:
    """See that a score on held-out problems is of problems that are not trained on. A run that
    only evaluates may have one file for both.

    Args:
        overlap: held-out problems that are training problems too, and all held-out ones.
        options: of the task; ``allow_overlap`` lets all of them be trained on.

    Raises:
        DataError: all of them are, and the run trains.
    """
    both, count = overlap
    if not both or not (config.iterations or config.warm_start.max_steps):
        return
    if both == count and not getattr(options, "allow_overlap", False):
        raise DataError(
            f"task.test: the same problems as in task.train: all {count} held-out ones are there, "
            "so that their score would say nothing of other problems. Name other ones, or set "
            "task.allow_overlap=true where that is wanted"
        )
    log.warning(
        "task.test: %d of %d held-out problems are training problems (task.train) too; their score "
        "is of problems that were trained on",
        both,
        count,
    )


def check_unfinished(config: RunConfig, algorithm: Algorithm) -> None:
    """See that steps of an episode that the horizon cut off are not learned from as worth nothing.

    Raises:
        ConfigError: rewards come at the end of an episode alone, several episodes follow one
            another in a sample, and no values say what the last of them is worth.
    """
    judged_at_ends = EPISODE_REWARDS in rewards.get(config.reward.name).offers
    values = algorithm.needs & {VALUES, ACTION_VALUES, REPLAY}
    if not judged_at_ends or values or config.rollout.group_size > 1:
        return
    if OBSERVATIONS in environments.get(config.task.name).offers:
        raise ConfigError(
            f"reward.name: {config.reward.name!r} judges an episode when it ends, and "
            f"algorithm={config.algorithm.name} has no values for those that the horizon cuts off: "
            "their steps would count as worth 0, beside scores below or above it; set "
            "reward=environment, rollout.group_size above 1 (a sample is one episode then), or "
            "algorithm=ppo"
        )


def check_turns(config: RunConfig, algorithm: Algorithm) -> None:
    """See that turns have rewards of their own, where they are to be compared.

    Raises:
        ConfigError: the task has no turns, or the reward gives them none.
    """
    if not algorithm.needs_turns:
        return
    if TURNS not in environments.get(config.task.name).offers:
        raise ConfigError(
            f"algorithm.advantage_level: turn is of dialogues, and task {config.task.name!r} tells "
            "no turns apart; set it to trajectory"
        )
    if TURN_REWARDS not in rewards.get(config.reward.name).offers:
        raise ConfigError(
            f"algorithm.advantage_level: turn compares rewards of turns, and reward "
            f"{config.reward.name!r} gives one number for a whole dialogue; set "
            "reward=environment, which takes what the task gives for each message, or "
            "algorithm.advantage_level=trajectory"
        )


def check_tasks(config: RunConfig, tasks: int) -> None:
    """See that held-out scores are of all tasks alike.

    Args:
        tasks: among how many starts are shared out.

    Raises:
        ConfigError: some would have more held-out starts than others, or none.
    """
    if config.evaluate.samples % tasks:
        nearest = max(config.evaluate.samples // tasks, 1) * tasks
        raise ConfigError(
            f"evaluate.samples: {config.evaluate.samples} starts are not as many of each of "
            f"{tasks} tasks; set {nearest}"
        )


def check_replay(
    config: RunConfig, algorithm: Algorithm, trainer: type[Trainer], options: Any
) -> None:
    """See that an algorithm that learns from transitions can, and does so in every iteration.

    Args:
        options: of the trainer.

    Raises:
        ConfigError: it cannot, or would not.
    """
    if REPLAY not in algorithm.needs:
        return
    if not trainer.takes_batches:
        raise ConfigError(
            f"trainer.name: {config.trainer.name!r} takes no batches of transitions; set "
            "trainer=fsdp"
        )
    collects = WITHOUT_ROLLOUTS not in flow_of(config).offers
    if not collects and getattr(algorithm.config, "updates", 1) is None:
        raise ConfigError(
            "algorithm.updates: optimizer steps are counted by new transitions, and "
            f"flow={config.flow} collects none; say how many an iteration has"
        )
    values_prior = ACTION_VALUES in algorithm.needs and bool(getattr(algorithm.config, "prior", 0))
    if values_prior and STEP_REWARDS not in rewards.get(config.reward.name).needs:
        raise ConfigError(
            "algorithm.prior: prior transitions have the rewards that a simulator gave their "
            f"steps, from which reward={config.reward.name} does not come, and values would be of "
            "two kinds; set reward=environment (reward.scale multiplies both), or leave "
            "algorithm.prior out"
        )
    dtype = getattr(options, "param_dtype", "float32")
    if ACTION_VALUES in algorithm.needs and dtype != "float32":
        raise ConfigError(
            f"trainer.param_dtype: the critics of {config.algorithm.name!r} compute in float32, "
            f"not in {dtype}; set trainer.param_dtype=float32"
        )


def warn_of_precision(config: RunConfig, options: Any) -> None:
    """Say so where most updates may be rounded away.

    Args:
        options: of the trainer.
    """
    half = getattr(config.model, "dtype", "float32") == "bfloat16"
    if half and config.trainer.name == "fsdp" and getattr(options, "lora", None) is None:
        log.warning(
            "model.dtype=bfloat16: weights and moments are trained in it, and most steps at small "
            "rates are rounded away; trainer.param_dtype=bfloat16 computes in it alone"
        )


def check_values(config: RunConfig, algorithm: Algorithm, model: Any, options: Any) -> None:
    """See that the value head learns, where there is one that has to.

    Args:
        model: the options of the policy.
        options: of the trainer.

    Raises:
        ConfigError: adapters alone are trained, or nothing learns from values of actions.
    """
    if getattr(model, "value_level", "chunk") == "action" and VALUES not in algorithm.needs:
        raise ConfigError(
            f"model.value_level: action is for an algorithm with values (ppo, async_ppo), and "
            f"{config.algorithm.name!r} has none; set it to chunk"
        )
    if VALUES in algorithm.needs and getattr(options, "lora", None) is not None:
        raise ConfigError(
            f"trainer.lora: adapters leave the value head as it is, and {config.algorithm.name!r} "
            "needs one that learns; set trainer.lora=null, or choose an algorithm without values"
        )
