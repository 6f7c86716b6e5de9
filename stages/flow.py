"""Flows: the stages of an iteration, what each takes, and what each needs. The one table of stages.

Everything else that has to know a stage (its identity, plans, pools, planner, retention, report)
asks here. What an author of an algorithm writes: a :class:`Flow`, and a program for each stage that
the package does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from rlinf.config import RunConfig
from rlinf.data.left_open import OPEN
from rlinf.fit import REPLAY, REPLAYS, WITHOUT_ROLLOUTS
from rlinf.registry import Registry

EVALUATE = "evaluate"
WEIGHTS = "weights"
GENERATE = ".generate"
"""Ends the name of the part of a stage that has the policy."""


@dataclass(frozen=True)
class Source:
    """Where an input comes from: a stage of the same iteration, or of one before."""

    stage: str
    back: int = 0
    otherwise: str | None = None
    """The offline stage that stands in before the first iteration; None: the input is left out."""
    window: int = 1
    """So many outputs in a row, the newest first: ``NAME``, then ``NAME.1`` of the iteration before
    it, ``NAME.2``, ... Retention keeps them."""
    lags: bool = False
    """``rollout.staleness`` iterations further back."""


@dataclass(frozen=True)
class Stage:
    """What a stage takes, what its output depends on, and what it needs."""

    inputs: Mapping[str, Source] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    """Sections of the configuration that change its output; part of its identity."""
    streams: str | None = None
    """The channel of the records it makes, which can be sent while they are made."""
    loads: Literal["engine", "trainer"] | None = None
    device: bool = True
    """Computes with the model, on a GPU where there are some, in several processes at will. Else it
    is the work of one process without a GPU, where it is a job of its own."""
    whole: bool = False
    """One process does its work, in a pool too, unless the plan gives the stage itself more."""
    elastic: bool = False
    """Its workers may come and go: they keep nothing but weights."""
    like: str | None = None
    """The stage with which it runs where a plan does not name it; None: pools have to."""
    program: str = ""
    """Module whose ``run(context)`` it is; by default ``stages.NAME``."""


@dataclass(frozen=True)
class Flow:
    """The stages of one iteration in an order that respects their inputs."""

    stages: Mapping[str, Stage]
    """The last one publishes the weights of the next version."""
    offline: Mapping[str, Stage] = field(default_factory=dict)
    """Before the first iteration."""
    evaluate: Stage = field(default_factory=Stage)
    """Of a version of the weights, beside the iterations."""
    needs: frozenset[str] = frozenset()
    """What parts must offer; see :mod:`rlinf.fit`."""
    offers: frozenset[str] = frozenset()
    """What parts may need."""
    apart: Mapping[str, Stage] = field(default_factory=dict)
    """Parts of stages that a plan places for themselves; see :meth:`with_policy_apart`."""

    @cached_property
    def table(self) -> dict[str, Stage]:
        """All stages by name, and what is placed as if it were one."""
        return {**self.offline, **self.stages, EVALUATE: self.evaluate, **self.apart}

    @cached_property
    def publishes(self) -> str:
        """The stage that publishes weights."""
        return list(self.stages)[-1]

    @cached_property
    def initial(self) -> str:
        """The offline stage whose weights are version 0."""
        return list(self.offline)[-1]

    @cached_property
    def elastic(self) -> str | None:
        """The stage of an iteration whose workers may come and go."""
        return next((name for name, stage in self.stages.items() if stage.elastic), None)

    @cached_property
    def acts(self) -> str | None:
        """The stage of an iteration that has the policy act, whose workers come and go or stay."""
        return next((name for name, s in self.stages.items() if s.loads == "engine"), None)

    @cached_property
    def generates(self) -> str | None:
        """What plans call the part of that stage that has the policy; the rest are simulators."""
        return None if self.acts is None else self.acts + GENERATE

    def with_policy_apart(self) -> Flow:
        """The same where a plan places :attr:`generates`: it answers what the simulators of
        rollouts observe, and has no output of its own. It is no stage of an iteration."""
        if self.acts is None or self.generates is None:
            return self
        part = Stage(loads="engine", sections=("engine",))
        return replace(self, apart={self.generates: part})

    @cached_property
    def trains(self) -> str:
        """The stage of whose state the published weights are."""
        sources = (source.stage for source in self.stages[self.publishes].inputs.values())
        return next((name for name in sources if name in self.stages), self.publishes)

    def maker(self, channel: str) -> str | None:
        """The stage of an iteration that makes the records of a channel; of several the last."""
        makers = [name for name, stage in self.stages.items() if stage.streams == channel]
        return makers[-1] if makers else None

    @cached_property
    def streams(self) -> frozenset[str]:
        """Inputs that are records, by the name of their channel."""
        return frozenset(stage.streams for stage in self.stages.values() if stage.streams)

    def taken(self, stage: str) -> int:
        """How many of its newest outputs other stages take."""
        sources = (source for other in self.table.values() for source in other.inputs.values())
        return max((s.back + s.window for s in sources if s.stage == stage), default=0)

    def program(self, stage: str) -> str:
        """The module of a stage."""
        return self.table[stage].program or f"stages.{stage}"

    def after(self) -> dict[str, tuple[str, ...]]:
        """The stages of an iteration that hold devices, and whose output of the same iteration each
        waits for; not what follows from others. The last stage is the transfer of the weights."""
        held = [name for name in self.stages if name != self.publishes]
        direct = {
            name: {s.stage for s in self.stages[name].inputs.values() if not s.back} & set(held)
            for name in held
        }
        reach: dict[str, set[str]] = {}
        for name in held:
            reach[name] = direct[name].union(*(reach[source] for source in direct[name]))
        return {
            name: tuple(
                source
                for source in held
                if source in direct[name]
                and not any(source in reach[other] for other in direct[name])
            )
            for name in held
        }


INITIAL = Source("warm_start")
NEWEST = Source("sync", back=1, otherwise="warm_start")

on_policy = Flow(
    offline={
        "warm_start": Stage(
            sections=("seed", "task", "model", "engine", "trainer", "warm_start", "evaluate"),
            like="train",
        )
    },
    stages={
        "rollout": Stage(
            {"weights": Source("sync", back=1, otherwise="warm_start", lags=True)},
            ("seed", "task", "model", "engine", "rollout"),
            streams="trajectories",
            loads="engine",
            elastic=True,
        ),
        "reward": Stage(
            {"trajectories": Source("rollout"), "initial": INITIAL},
            ("task", "model", "reward", "algorithm"),
            streams="rewards",
            device=False,
            whole=True,
            like="train",
        ),
        "inference": Stage(
            {"trajectories": Source("rollout"), "initial": INITIAL, "weights": NEWEST},
            ("model", "algorithm", "trainer", "rollout"),
            streams="logprobs",
            loads="trainer",
            like="train",
        ),
        "train": Stage(
            {
                "trajectories": Source("rollout"),
                "rewards": Source("reward"),
                "logprobs": Source("inference"),
                "initial": INITIAL,
                "checkpoint": Source("train", back=1),
            },
            ("seed", "model", "algorithm", "optimizer", "trainer", "rollout"),
            loads="trainer",
        ),
        "sync": Stage(
            {"initial": INITIAL, "checkpoint": Source("train")},
            ("model",),
            loads="trainer",
            device=False,
            like="train",
        ),
    },
    evaluate=Stage(
        {"weights": NEWEST},
        ("task", "model", "engine", "rollout", "evaluate"),
        elastic=True,
        like="rollout",
    ),
)
"""Collect with the newest weights, learn from that batch alone, publish."""

DYNAMIC = "stages.dynamic_sampling"
dynamic_sampling = replace(
    on_policy,
    stages={
        **on_policy.stages,
        # Who is judged while it is generated is not shared out anew: its workers stay.
        "rollout": replace(
            on_policy.stages["rollout"],
            sections=(*on_policy.stages["rollout"].sections, "reward", "algorithm"),
            elastic=False,
            program=DYNAMIC,
        ),
    },
)
"""The same, with a rollout that draws groups anew which the algorithm would not keep."""

REPLAYED = ("seed", "model", "algorithm", "optimizer", "trainer", "rollout", "reward")
"""The reward judges prior transitions too, which no other stage sees."""
off_policy = Flow(
    offline=on_policy.offline,
    stages={
        "rollout": on_policy.stages["rollout"],
        "reward": on_policy.stages["reward"],
        "replay": Stage(
            {
                "trajectories": Source("rollout"),
                "rewards": Source("reward"),
                "initial": INITIAL,
                # The buffer is added to in the order of the iterations, whatever is ahead.
                "replay": Source("replay", back=1),
            },
            ("task", "model", "algorithm", "rollout"),
            device=False,
            whole=True,
            like="train",
        ),
        "train": Stage(
            {"replay": Source("replay"), "initial": INITIAL, "checkpoint": Source("train", back=1)},
            REPLAYED,
            loads="trainer",
            whole=True,
        ),
        # By the one process that has the trainer.
        "sync": replace(on_policy.stages["sync"], whole=True),
    },
    evaluate=on_policy.evaluate,
    needs=frozenset({REPLAYS}),
    offers=frozenset({REPLAY}),
)
"""Collect, add to a buffer on disk, learn from what is in it, publish."""

offline = Flow(
    offline=on_policy.offline,
    stages={
        "train": Stage(
            {"initial": INITIAL, "checkpoint": Source("train", back=1)},
            REPLAYED,
            loads="trainer",
            whole=True,
        ),
        # By the one process that has the trainer.
        "sync": replace(on_policy.stages["sync"], whole=True),
    },
    evaluate=replace(on_policy.evaluate, like="train"),
    needs=frozenset({REPLAYS}),
    offers=frozenset({REPLAY, WITHOUT_ROLLOUTS}),
)
"""Learn from transitions that were there before (``algorithm.prior``), and publish."""

flows = Registry(
    "flow",
    {
        "on_policy": f"{__name__}:on_policy",
        "dynamic_sampling": f"{__name__}:dynamic_sampling",
        "off_policy": f"{__name__}:off_policy",
        "offline": f"{__name__}:offline",
    },
    base=f"{__name__}:Flow",
    instances=True,
)


@lru_cache
def continued(flow: str) -> Flow:
    """A flow whose rollouts also take what the ones before left open (``task.continues``).

    It is the same where it has no elastic stage.

    Raises:
        ConfigError: there is no such flow.
    """
    found = flow_named(flow)
    if (name := found.elastic) is None:
        return found
    stage = found.stages[name]
    inputs = {**stage.inputs, OPEN: Source(name, back=1)}
    # Workers that come and go have weights alone.
    goes_on = replace(stage, inputs=inputs, elastic=False)
    return replace(found, stages={**found.stages, name: goes_on})


def continues(config: RunConfig) -> bool:
    """Whether episodes go on over iterations (``task.continues``)."""
    return (config.task.model_extra or {}).get("continues") is True


def flow_named(name: str) -> Flow:
    """A flow by its name in the configuration, or by ``module:variable``.

    Raises:
        ConfigError: there is none.
    """
    flow: Flow = flows.get(name, "flow")
    return flow


def flow_of(config: RunConfig) -> Flow:
    """The flow of a configuration.

    Raises:
        ConfigError: there is no such flow.
    """
    return continued(config.flow) if continues(config) else flow_named(config.flow)
