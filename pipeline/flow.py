"""Flows: which stage feeds which. What an algorithm's author writes.

A flow is a table of stages; each input names the stage it comes from and how many iterations back.
Unrolled over a number of iterations it is the graph that every driver walks, Snakemake included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlinf.config import RunConfig
from rlinf.errors import ConfigError, nearest
from stages.layout import PER_ITERATION, stage_folder


class Node(NamedTuple):
    """A stage instance: a stage of one iteration, or an offline stage."""

    stage: str
    iteration: int

    @property
    def name(self) -> str:
        """Readable and unique: ``rollout/3``."""
        return f"{self.stage}/{self.iteration}"


@dataclass(frozen=True)
class Source:
    """Where an input comes from: a stage of the same iteration, or of one before."""

    stage: str
    back: int = 0
    otherwise: str | None = None
    """The offline stage that stands in before the first iteration; None: the input is left out."""


@dataclass(frozen=True)
class Flow:
    """The stages of one iteration in an order that respects their inputs."""

    stages: Mapping[str, Mapping[str, Source]]
    offline: Mapping[str, Mapping[str, Source]] = field(default_factory=dict)


INITIAL = Source("warm_start")

on_policy = Flow(
    offline={"warm_start": {}},
    stages={
        "rollout": {"weights": Source("sync", back=1, otherwise="warm_start")},
        "reward": {"trajectories": Source("rollout"), "initial": INITIAL},
        "inference": {
            "trajectories": Source("rollout"),
            "initial": INITIAL,
            "weights": Source("sync", back=1, otherwise="warm_start"),
        },
        "train": {
            "trajectories": Source("rollout"),
            "rewards": Source("reward"),
            "logprobs": Source("inference"),
            "initial": INITIAL,
            "checkpoint": Source("train", back=1),
        },
        "sync": {"initial": INITIAL, "checkpoint": Source("train")},
    },
)
"""Collect with the newest weights, learn from that batch alone, publish."""

FLOWS = {"on_policy": on_policy}


class Graph:
    """A flow unrolled for one run."""

    def __init__(self, config: RunConfig) -> None:
        """
        Raises:
            ConfigError: unknown flow.
        """
        if config.flow not in FLOWS:
            raise ConfigError(f"flow: unknown flow {config.flow!r}{nearest(config.flow, FLOWS)}")
        self.flow = FLOWS[config.flow]
        self.iterations = config.iterations
        self._every = config.evaluate.every
        self._staleness = config.rollout.staleness

    def inputs(self, node: Node) -> dict[str, Node]:
        """The nodes a node reads, by input name."""
        if node.stage == "evaluate":
            version = node.iteration
            weights = Node("sync", version - 1) if version else Node("warm_start", 0)
            return {"weights": weights}
        offline = node.stage in self.flow.offline
        table = self.flow.offline if offline else self.flow.stages
        found = {}
        for name, source in table[node.stage].items():
            iteration = node.iteration - source.back
            if (node.stage, name) == ("rollout", "weights"):
                iteration -= self._staleness
            if source.stage in self.flow.offline:
                found[name] = Node(source.stage, 0)
            elif iteration >= 0:
                found[name] = Node(source.stage, iteration)
            elif source.otherwise is not None:
                found[name] = Node(source.otherwise, 0)
        return found

    def edges(self) -> dict[str, set[str]]:
        """The names of the inputs between each two stages, by edge: ``rollout -> reward``."""
        found: dict[str, set[str]] = {"sync -> evaluate": {"weights"}}
        for target, sources in self.flow.stages.items():
            for name, source in sources.items():
                found.setdefault(f"{source.stage} -> {target}", set()).add(name)
        return found

    def evaluated(self, version: int) -> bool:
        """Whether a version of the weights is to be evaluated."""
        ends = version in (0, self.iterations)
        return ends or (self._every > 0 and version % self._every == 0)

    def before(self) -> Iterator[Node]:
        """The nodes that come before the first iteration."""
        for stage in self.flow.offline:
            yield Node(stage, 0)

    def nodes(self) -> Iterator[Node]:
        """All nodes in an order in which they can run one after the other."""
        yield from self.before()
        for version in range(self.iterations + 1):
            if version:
                for stage in self.flow.stages:
                    yield Node(stage, version - 1)
            if self.evaluated(version):
                yield Node("evaluate", version)

    def folder(self, run: Path, node: Node) -> Path:
        """Output folder of a node."""
        return stage_folder(run, node.stage, node.iteration)


assert tuple(on_policy.stages) == PER_ITERATION
