"""The stage graph: a flow (:mod:`stages.flow`) unrolled over the iterations of a run. The driver
and the Snakemake workflow follow it. Setup stages run once, before the first iteration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlinf.config import RunConfig
from stages.flow import EVALUATE, flow_of
from stages.layout import setup_stage_folder, stage_folder


class StageNode(NamedTuple):
    """A node of the graph: a stage of one iteration, or a setup stage."""

    stage: str
    iteration: int
    """Index from 0. For an evaluation, the version of the weights; for a setup stage, 0."""

    @property
    def name(self) -> str:
        """A readable and unique name, such as ``rollout/3``."""
        return f"{self.stage}/{self.iteration}"


class Graph:
    """The stage graph of one run."""

    def __init__(self, config: RunConfig) -> None:
        """Unroll the flow of a configuration.

        Raises:
            ConfigError: unknown flow.
        """
        self.flow = flow_of(config)
        self.iterations = config.iterations
        self._evaluate_every = config.evaluate.every
        self._staleness = config.rollout.staleness

    def inputs(self, node: StageNode) -> dict[str, StageNode]:
        """Return the nodes whose outputs a node reads, by input name (:mod:`stages.flow`).

        If an input has a history, ``NAME.1`` is the output one iteration older than ``NAME``.
        """
        nodes = {}
        for name, source in self.flow.all_stages[node.stage].inputs.items():
            staleness = self._staleness if source.stale else 0
            for age in range(source.history):
                iteration = node.iteration - source.lag - staleness - age
                key = f"{name}.{age}" if age else name
                if source.stage in self.flow.setup_stages:
                    nodes[key] = StageNode(source.stage, 0)
                elif iteration >= 0:
                    nodes[key] = StageNode(source.stage, iteration)
                elif source.initial is not None and not age:
                    nodes[key] = StageNode(source.initial, 0)
        return nodes

    def edges(self) -> dict[str, set[str]]:
        """Return the names of the inputs of each edge, such as ``rollout -> reward``."""
        inputs_by_edge: dict[str, set[str]] = {}
        for target, stage in {**self.flow.stages, EVALUATE: self.flow.evaluate}.items():
            for name, source in stage.inputs.items():
                inputs_by_edge.setdefault(f"{source.stage} -> {target}", set()).add(name)
        return inputs_by_edge

    def is_evaluated(self, version: int) -> bool:
        """Return whether a version of the weights is evaluated."""
        is_first_or_last = version in (0, self.iterations)
        every = self._evaluate_every
        return is_first_or_last or (every > 0 and version % every == 0)

    def setup_nodes(self) -> Iterator[StageNode]:
        for stage in self.flow.setup_stages:
            yield StageNode(stage, 0)

    def nodes(self) -> Iterator[StageNode]:
        """Yield all nodes in topological order."""
        yield from self.setup_nodes()
        for version in range(self.iterations + 1):
            if version:
                for stage in self.flow.stages:
                    yield StageNode(stage, version - 1)
            if self.is_evaluated(version):
                yield StageNode(EVALUATE, version)

    def output_folder(self, run: Path, node: StageNode) -> Path:
        if node.stage in self.flow.setup_stages:
            return setup_stage_folder(run, node.stage)
        return stage_folder(run, *node)
