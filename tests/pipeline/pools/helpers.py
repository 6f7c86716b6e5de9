"""Pools without processes: leases that are there when a test says so, and the orders sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.commands.experiment import validate_experiment
from pipeline.executors import stage_call
from pipeline.graph import Graph, StageNode
from pipeline.plan import Plan
from pipeline.pools.leases import Lease, pool_states
from pipeline.pools.scheduler import WorkScheduler
from pipeline.pools.stage_placement import StagePlacement
from pipeline.run import Run
from rlinf.config import RunConfig
from stages.worker.messages import RunStages

STAGES = ("rollout", "reward", "inference", "train", "sync")
HELD = list(STAGES[:4])
MAX_FAILURES = 1
"""Of the shares of one rollout."""


def checked(values: dict[str, Any], plan: dict[str, Any]) -> tuple[RunConfig, Plan]:
    return validate_experiment(values | {"plan": plan})


class Pools:
    """The pools of a plan and their scheduler; a test plays the driver and the workers."""

    def __init__(self, config: RunConfig, plan: Plan, folder: Path) -> None:
        self.run, self.graph = Run(folder, config), Graph(config)
        self.pools = pool_states(plan)
        self.placement = StagePlacement(config, plan, self.pools)
        self.committed: set[str] = set()
        """Folders of committed outputs."""
        self.sent: list[tuple[str, Any]] = []
        self.now = 0.0
        self.scheduler = WorkScheduler(
            self.run,
            self.placement,
            self.pools,
            lambda worker, order: self.sent.append((worker, order)),
            lambda folder: folder in self.committed,
            MAX_FAILURES,
        )

    def lease(self, pool: int, number: int = 0) -> Lease:
        """Connect all workers of a lease."""
        state = self.pools[pool]
        lease = Lease(state, f"pool-{state.name}-{number}", "1")
        for rank in range(lease.size):
            lease.add_worker({"rank": rank, "host": "here"})
        state.leases.append(lease)
        return lease

    def add(self, *nodes: StageNode) -> None:
        for node in nodes:
            self.scheduler.add(node, stage_call(self.run, self.graph, node), self.now)

    def dispatch(self) -> list[tuple[str, Any]]:
        """The orders that are sent now; stages one by one."""
        self.sent.clear()
        self.now += 1
        self.scheduler.dispatch(self.now)
        return [
            (worker, part)
            for worker, order in self.sent
            for part in (order.stages if isinstance(order, RunStages) else (order,))
        ]
