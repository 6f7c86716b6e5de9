"""Pools that serve the policy of rollouts, if the plan separates the policy from the
simulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline.graph import StageNode
from pipeline.plan import Plan
from pipeline.pools.leases import Lease, PoolState
from stages.flow import EVALUATE, WEIGHTS
from stages.worker.messages import AttemptEnded, ServePolicy, StageOrder


class PolicyPools:
    """Assigns policy workers to simulator stages, and tells each side when the other side ends.

    Args:
        pool_of: pool by stage, including the separate policy stage.
        ranks_of: ranks of the pool that compute each stage.
    """

    def __init__(
        self,
        plan: Plan,
        pool_of: Mapping[str, PoolState],
        ranks_of: Mapping[str, Sequence[int]],
        send: Callable[[str, ServePolicy | AttemptEnded], None],
    ) -> None:
        self._pool_of, self._ranks_of, self._send = pool_of, ranks_of, send
        self._policy_stage = next(iter(plan.flow.separate_policy), "")
        self._client_stages = frozenset[str]()
        if self._policy_stage:
            rollout_stage = str(plan.flow.rollout_stage)
            # Evaluations need a policy server too, unless the plan runs them in another pool.
            self._client_stages = frozenset(
                name
                for name in (rollout_stage, EVALUATE)
                if pool_of[name] is pool_of[rollout_stage]
            )
        self._serving: dict[StageNode, tuple[Lease, str]] = {}
        """Serving lease and attempt, by dispatched node."""

    def needs_policy(self, stage: str) -> bool:
        """Return whether a stage has only simulators, and needs a policy server."""
        return stage in self._client_stages

    def is_ready(self, node: StageNode) -> bool:
        """Return whether a node needs no policy server, or an active lease can serve it."""
        return (
            not self.needs_policy(node.stage)
            or self._pool_of[self._policy_stage].active_lease is not None
        )

    def serving_lease(self, node: StageNode) -> tuple[PoolState, Lease] | None:
        """Return the pool and lease that serve or will serve a node; None if it needs no policy
        server or none is active."""
        if not self.needs_policy(node.stage):
            return None
        pool = self._pool_of[self._policy_stage]
        lease = self._serving[node][0] if node in self._serving else pool.active_lease
        return None if lease is None else (pool, lease)

    def ranks(self) -> Sequence[int]:
        """Return the ranks of the pool that serve the policy."""
        return self._ranks_of[self._policy_stage]

    def workers(self, node: StageNode) -> tuple[str, ...]:
        """Return the policy workers of a node; rank n queries the n-th one."""
        serving = self.serving_lease(node)
        return () if serving is None else tuple(serving[1].workers(self.ranks()))

    def begin(
        self, node: StageNode, order: StageOrder, simulators: list[str], *, live: bool
    ) -> None:
        """Start to serve a dispatched node.

        Args:
            simulators: workers that run the simulators.
            live: whether the weights come from memory.
        """
        serving = self.serving_lease(node)
        if serving is None:
            return
        self._serving[node] = serving[1], order.attempt
        serving[1].served.add(node)
        for number, worker in enumerate(order.policy_workers):
            if clients := tuple(simulators[number :: len(order.policy_workers)]):
                policy_order = ServePolicy(
                    node=order.node,
                    stage=order.stage,
                    iteration=order.iteration,
                    position=order.position,
                    output=order.output,
                    attempt=order.attempt,
                    weights=(order.inputs[WEIGHTS][0], live),
                    clients=clients,
                )
                self._send(worker, policy_order)

    def end_attempt(self, node: StageNode) -> None:
        """Stop serving an attempt that ended."""
        lease, attempt = self._serving.pop(node, (None, ""))
        if lease is not None and lease in self._pool_of[self._policy_stage].leases:
            reason = "the attempt of the simulators has ended"
            for worker in lease.workers(self.ranks()):
                self._send(worker, AttemptEnded(node=node.name, attempt=attempt, reason=reason))

    def on_lease_lost(self, lease: Lease) -> None:
        """Tell the simulator workers that a serving lease is lost; they give up and report it."""
        lease.served.clear()
        reason = "its lease has ended"
        for node, attempt in [(n, a) for n, (other, a) in self._serving.items() if other is lease]:
            for client in [m for m in self._pool_of[node.stage].leases if node in m.assigned]:
                for worker in client.workers(self._ranks_of[node.stage]):
                    self._send(worker, AttemptEnded(node=node.name, attempt=attempt, reason=reason))

    def is_busy(self, lease: Lease) -> bool:
        """Return whether a lease serves a node."""
        return any(other == lease for other, _ in self._serving.values())

    def credit(self, node: StageNode) -> None:
        """Count the success of a node for the lease that served it."""
        if node in self._serving:
            self._serving[node][0].num_finished += 1
            self._pool_of[self._policy_stage].failures = 0
