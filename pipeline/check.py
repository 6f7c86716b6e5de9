"""Checks of a whole configuration before anything is written or submitted."""

from __future__ import annotations

from rlinf.config import RunConfig, validate
from rlinf.engines import engines
from rlinf.errors import ConfigError
from rlinf.track import LogConfig, sinks
from rlinf.trainers import trainers
from stages.parts import environment_class, make_algorithm, make_reward, policy_class


def check(config: RunConfig) -> None:
    """Validate every part by its own section, then what must fit together.

    Raises:
        ConfigError: names the key.
        DataError: a file of the task or model is missing or malformed.
    """
    policy, model_options = policy_class(config)
    environment, task_options = environment_class(config)
    engine = engines.get(config.engine.name)
    config.engine.options(engine.Config, "engine")
    trainer = trainers.get(config.trainer.name)
    config.trainer.options(trainer.Config, "trainer")
    algorithm = make_algorithm(config)
    make_reward(config)
    if algorithm.needs_groups and config.rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size: {config.rollout.group_size} under algorithm.name "
            f"{config.algorithm.name!r}, which compares the samples of a group: all advantages "
            "would be 0; set it to 2 or more"
        )
    samples = config.rollout.batch * config.rollout.group_size
    if samples % algorithm.config.minibatches:
        raise ConfigError(
            f"algorithm.minibatches: {samples} samples (rollout.batch {config.rollout.batch} x "
            f"rollout.group_size {config.rollout.group_size}) cannot be cut into "
            f"{algorithm.config.minibatches} equal minibatches"
        )
    for tracker in validate(LogConfig, config.log, "log").trackers:
        sinks.get(tracker)
    policy.check(model_options, environment.describe(task_options))
