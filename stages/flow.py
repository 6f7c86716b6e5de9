"""Flows: the stages of an iteration, their inputs and their requirements.

This is the only table of stages. Identities, plans, pools, the planner, retention and the report
read it. A new algorithm with other stages needs a :class:`Flow`, and a module for each stage that
the package does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from rlinf.config import RunConfig
from rlinf.data.episodes import OPEN_EPISODES
from rlinf.errors import ConfigError, did_you_mean
from rlinf.registry import (
    NO_ROLLOUTS,
    REPLAY_ALGORITHM,
    TRANSITION_REPLAY,
    Registry,
    import_user_attribute,
)

EVALUATE = "evaluate"
WEIGHTS = "weights"
"""Name of the input with the weights of the policy."""
POLICY_SUFFIX = ".generate"
"""Suffix in plans: ``rollout.generate`` is the part of the rollout stage that runs the policy."""


@dataclass(frozen=True)
class InputSource:
    """The source of an input: a stage of the same or of an earlier iteration, or a setup stage."""

    stage: str
    lag: int = 0
    """Number of iterations by which the output is older; 0: it is from the same iteration."""
    initial: str | None = None
    """The setup stage that is the source before the first iteration; None: no input then."""
    history: int = 1
    """Number of consecutive iterations whose outputs are inputs: ``NAME`` is the newest, ``NAME.1``
    that of the iteration before, and so on."""
    stale: bool = False
    """Whether ``rollout.staleness`` is added to the lag."""


@dataclass(frozen=True)
class StageSpec:
    """The inputs, the configuration and the requirements of a stage."""

    inputs: Mapping[str, InputSource] = field(default_factory=dict)
    """The source of each input, by name of the input."""
    config_sections: tuple[str, ...] = ()
    """The configuration sections on which the output depends; they are part of its identity."""
    output_stream: str | None = None
    """The channel of its output records, which are streamed while the stage runs."""
    holds: Literal["engine", "trainer"] | None = None
    """The component with the model in each process of the stage; None: neither of the two."""
    uses_device: bool = True
    """Whether the stage computes with the model, in any number of processes, on GPUs if there are
    some. If False, a job of the stage has one process and no GPU."""
    single_process: bool = False
    """Whether one process computes the stage, even in a pool, unless the plan sets more."""
    elastic: bool = False
    """Whether its workers may join and leave at any time, because they keep only weights."""
    colocate_with: str | None = None
    """The stage in whose pool this one runs unless the plan lists it in another pool; None: the
    plan must list it."""
    module: str = ""
    """The module with its ``run(context)``; by default ``stages.NAME``."""


@dataclass(frozen=True)
class Flow:
    """The stages of one iteration in an order that respects their inputs."""

    stages: Mapping[str, StageSpec]
    """The stages by name; the last one publishes the next version of the weights."""
    setup_stages: Mapping[str, StageSpec] = field(default_factory=dict)
    """The stages that run once, before the first iteration."""
    evaluate: StageSpec = field(default_factory=StageSpec)
    """The evaluation of one version of the weights, outside the iterations."""
    requires: frozenset[str] = frozenset()
    """Capabilities that components must provide; see :mod:`rlinf.registry`."""
    provides: frozenset[str] = frozenset()
    """Capabilities that components may require."""
    separate_policy: Mapping[str, StageSpec] = field(default_factory=dict)
    """The policy of the rollout stage, if a plan places it in a pool of its own; by name in plans,
    see :meth:`with_separate_policy`."""

    @cached_property
    def all_stages(self) -> dict[str, StageSpec]:
        """All stages by name, including a separately placed policy."""
        return {**self.setup_stages, **self.stages, EVALUATE: self.evaluate, **self.separate_policy}

    @cached_property
    def publish_stage(self) -> str:
        """The stage that publishes the weights."""
        return list(self.stages)[-1]

    @cached_property
    def initial_stage(self) -> str:
        """The setup stage whose weights are version 0."""
        return list(self.setup_stages)[-1]

    @cached_property
    def elastic_stage(self) -> str | None:
        """The stage of an iteration whose workers may join and leave."""
        return next((name for name, stage in self.stages.items() if stage.elastic), None)

    @cached_property
    def rollout_stage(self) -> str | None:
        """The stage of an iteration that runs the engine."""
        return next((name for name, s in self.stages.items() if s.holds == "engine"), None)

    @cached_property
    def policy_stage(self) -> str | None:
        """The name in plans of the rollout stage's policy; the rest of the stage is simulators."""
        return None if self.rollout_stage is None else self.rollout_stage + POLICY_SUFFIX

    def with_separate_policy(self) -> Flow:
        """Return the flow for plans that place :attr:`policy_stage` in another pool. The policy
        answers the simulators; it has no output and is not a stage of an iteration."""
        if self.rollout_stage is None or self.policy_stage is None:
            return self
        policy = StageSpec(holds="engine", config_sections=("engine",))
        return replace(self, separate_policy={self.policy_stage: policy})

    @cached_property
    def train_stage(self) -> str:
        """The stage that produces the checkpoint of the published weights."""
        sources = (source.stage for source in self.stages[self.publish_stage].inputs.values())
        return next((name for name in sources if name in self.stages), self.publish_stage)

    def producer_of(self, channel: str) -> str | None:
        """Return the last stage of an iteration that writes a channel."""
        producers = [name for name, stage in self.stages.items() if stage.output_stream == channel]
        return producers[-1] if producers else None

    @cached_property
    def stream_channels(self) -> frozenset[str]:
        """The channels whose records are streamed."""
        return frozenset(
            stage.output_stream for stage in self.stages.values() if stage.output_stream
        )

    def num_retained_outputs(self, stage: str) -> int:
        """Return how many of the newest outputs of a stage are still inputs of some stage."""
        sources = (source for spec in self.all_stages.values() for source in spec.inputs.values())
        return max((s.lag + s.history for s in sources if s.stage == stage), default=0)

    def module_of(self, stage: str) -> str:
        return self.all_stages[stage].module or f"stages.{stage}"

    def direct_dependencies(self) -> dict[str, tuple[str, ...]]:
        """Return the stages of the same iteration that each stage must wait for, by stage.

        Dependencies that follow from others are left out, as is the publish stage: it only
        transfers weights.
        """
        names = [name for name in self.stages if name != self.publish_stage]
        direct = {
            name: {s.stage for s in self.stages[name].inputs.values() if not s.lag} & set(names)
            for name in names
        }
        ancestors: dict[str, set[str]] = {}
        for name in names:
            ancestors[name] = direct[name].union(*(ancestors[source] for source in direct[name]))
        return {
            name: tuple(
                source
                for source in names
                if source in direct[name]
                and not any(source in ancestors[other] for other in direct[name])
            )
            for name in names
        }


INITIAL_WEIGHTS = InputSource("sft")
NEWEST_WEIGHTS = InputSource("sync", lag=1, initial="sft")

on_policy = Flow(
    setup_stages={
        "sft": StageSpec(
            config_sections=(
                "seed",
                "task",
                "model",
                "engine",
                "trainer",
                "sft",
                "evaluate",
            ),
            colocate_with="train",
        )
    },
    stages={
        "rollout": StageSpec(
            {"weights": InputSource("sync", lag=1, initial="sft", stale=True)},
            ("seed", "task", "model", "engine", "rollout"),
            output_stream="trajectories",
            holds="engine",
            elastic=True,
        ),
        "reward": StageSpec(
            {"trajectories": InputSource("rollout"), "initial": INITIAL_WEIGHTS},
            ("task", "model", "reward", "algorithm"),
            output_stream="rewards",
            uses_device=False,
            single_process=True,
            colocate_with="train",
        ),
        "inference": StageSpec(
            {
                "trajectories": InputSource("rollout"),
                "initial": INITIAL_WEIGHTS,
                "weights": NEWEST_WEIGHTS,
            },
            ("model", "algorithm", "trainer", "rollout"),
            output_stream="logprobs",
            holds="trainer",
            colocate_with="train",
        ),
        "train": StageSpec(
            {
                "trajectories": InputSource("rollout"),
                "rewards": InputSource("reward"),
                "logprobs": InputSource("inference"),
                "initial": INITIAL_WEIGHTS,
                "checkpoint": InputSource("train", lag=1),
            },
            ("seed", "model", "algorithm", "optimizer", "trainer", "rollout"),
            holds="trainer",
        ),
        "sync": StageSpec(
            {"initial": INITIAL_WEIGHTS, "checkpoint": InputSource("train")},
            ("model",),
            holds="trainer",
            uses_device=False,
            colocate_with="train",
        ),
    },
    evaluate=StageSpec(
        {"weights": NEWEST_WEIGHTS},
        ("task", "model", "engine", "rollout", "evaluate"),
        elastic=True,
        colocate_with="rollout",
    ),
)
"""Collect with the newest weights, train on this batch only, publish."""

OFF_POLICY_TRAIN_SECTIONS = (
    "seed",
    "model",
    "algorithm",
    "optimizer",
    "trainer",
    "rollout",
    "reward",
)
"""Sections of the train stage. It needs ``reward`` to compute the rewards of offline data."""
off_policy = Flow(
    setup_stages=on_policy.setup_stages,
    stages={
        "rollout": on_policy.stages["rollout"],
        "reward": on_policy.stages["reward"],
        "replay": StageSpec(
            {
                "trajectories": InputSource("rollout"),
                "rewards": InputSource("reward"),
                "initial": INITIAL_WEIGHTS,
                # Iterations are added to the buffer in order.
                "replay": InputSource("replay", lag=1),
            },
            ("task", "model", "algorithm", "rollout"),
            uses_device=False,
            single_process=True,
            colocate_with="train",
        ),
        "train": StageSpec(
            {
                "replay": InputSource("replay"),
                "initial": INITIAL_WEIGHTS,
                "checkpoint": InputSource("train", lag=1),
            },
            OFF_POLICY_TRAIN_SECTIONS,
            holds="trainer",
            single_process=True,
        ),
        # One process has the trainer.
        "sync": replace(on_policy.stages["sync"], single_process=True),
    },
    evaluate=on_policy.evaluate,
    requires=frozenset({REPLAY_ALGORITHM}),
    provides=frozenset({TRANSITION_REPLAY}),
)
"""Collect, add to a replay buffer on disk, train on samples of the buffer, publish."""

offline = Flow(
    setup_stages=on_policy.setup_stages,
    stages={
        "train": StageSpec(
            {"initial": INITIAL_WEIGHTS, "checkpoint": InputSource("train", lag=1)},
            OFF_POLICY_TRAIN_SECTIONS,
            holds="trainer",
            single_process=True,
        ),
        # One process has the trainer.
        "sync": replace(on_policy.stages["sync"], single_process=True),
    },
    evaluate=replace(on_policy.evaluate, colocate_with="train"),
    requires=frozenset({REPLAY_ALGORITHM}),
    provides=frozenset({TRANSITION_REPLAY, NO_ROLLOUTS}),
)
"""Train on existing transitions (``algorithm.offline_data``), and publish."""

flows = Registry(
    "flow",
    {
        "on_policy": f"{__name__}:on_policy",
        "off_policy": f"{__name__}:off_policy",
        "offline": f"{__name__}:offline",
    },
    base=f"{__name__}:Flow",
    instances=True,
)


ROLLOUT_MODULE = "stages.rollout"
DYNAMIC_SAMPLING_MODULE = "stages.dynamic_sampling"


def with_resampling(flow: Flow) -> Flow:
    """Return a flow whose rollouts resample groups (``rollout.max_resamples``).

    A flow whose rollout is not that of :mod:`stages.rollout` is returned unchanged.
    """
    name = flow.elastic_stage
    if name is None or flow.module_of(name) != ROLLOUT_MODULE:
        return flow
    stage = flow.stages[name]
    resampling = replace(
        stage,
        config_sections=(*stage.config_sections, "reward", "algorithm"),
        # Not elastic, because elastic workers have the weights but not the reward.
        elastic=False,
        module=DYNAMIC_SAMPLING_MODULE,
    )
    return replace(flow, stages={**flow.stages, name: resampling})


def with_carried_episodes(flow: Flow) -> Flow:
    """Return a flow whose rollouts continue open episodes (``task.carry_over_episodes``).

    A flow without an elastic stage is returned unchanged.
    """
    if (name := flow.elastic_stage) is None:
        return flow
    stage = flow.stages[name]
    inputs = {**stage.inputs, OPEN_EPISODES: InputSource(name, lag=1)}
    # Not elastic, because elastic workers have the weights but not the open episodes.
    carrying_over = replace(stage, inputs=inputs, elastic=False)
    return replace(flow, stages={**flow.stages, name: carrying_over})


def carries_over_episodes(config: RunConfig) -> bool:
    """Return whether episodes continue across iterations (``task.carry_over_episodes``)."""
    return (config.task.model_extra or {}).get("carry_over_episodes") is True


def with_co_training(flow: Flow) -> Flow:
    """Return a flow whose update also learns from demonstrations (``algorithm.sft_loss_coef``)."""
    stage = flow.stages[flow.train_stage]
    sections = dict.fromkeys((*stage.config_sections, "task", "sft"))
    co_training = replace(stage, config_sections=tuple(sections))
    return replace(flow, stages={**flow.stages, flow.train_stage: co_training})


def get_flow(name: str) -> Flow:
    """Return a flow by its registered name or by ``module:variable``.

    Raises:
        ConfigError: there is no such flow.
    """
    flow: Flow = flows.get(name, "flow")
    return flow


def flow_of(config: RunConfig) -> Flow:
    """Return the flow of a configuration.

    Raises:
        ConfigError: there is no such flow.
    """
    resamples = config.rollout.max_resamples is not None
    carries_over = carries_over_episodes(config)
    co_trains = bool((config.algorithm.model_extra or {}).get("sft_loss_coef"))
    if not (resamples or carries_over or co_trains):
        return get_flow(config.flow)
    return _build_flow(config.flow, resamples, carries_over, co_trains)


def check_flow(flow: Flow, key: str) -> None:
    """Check that each stage has a module with ``run``, and that its inputs exist when it runs.

    Args:
        key: configuration key of the flow, for error messages.

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


def check_rollouts(config: RunConfig) -> None:
    """Check that the flow has a rollout that resamples groups or continues episodes, if configured.

    Raises:
        ConfigError: it has none, or episodes cannot continue with the other settings.
    """
    flow, resamples = flow_of(config), config.rollout.max_resamples is not None
    if resamples and DYNAMIC_SAMPLING_MODULE not in map(flow.module_of, flow.stages):
        raise ConfigError(
            f"rollout.max_resamples: flow {config.flow!r} has no rollout that can resample groups; "
            "choose flow=on_policy, or leave it out"
        )
    if not carries_over_episodes(config):
        return
    if resamples:
        raise ConfigError(
            "task.carry_over_episodes: a rollout that resamples groups cannot continue episodes; "
            "leave rollout.max_resamples out, or set task.carry_over_episodes=false"
        )
    if not any(OPEN_EPISODES in stage.inputs for stage in flow.stages.values()):
        raise ConfigError(
            f"task.carry_over_episodes: flow={config.flow} does not read the previous rollout; "
            "choose flow=on_policy or flow=off_policy, or set task.carry_over_episodes=false"
        )
    if config.rollout.group_size > 1:
        raise ConfigError(
            "task.carry_over_episodes: the samples of a group would start alike only in the "
            "first iteration; set rollout.group_size=1, or task.carry_over_episodes=false"
        )


@lru_cache
def _build_flow(name: str, resamples: bool, carries_over: bool, co_trains: bool) -> Flow:
    flow = get_flow(name)
    if resamples:
        flow = with_resampling(flow)
    if co_trains:
        flow = with_co_training(flow)
    return with_carried_episodes(flow) if carries_over else flow
