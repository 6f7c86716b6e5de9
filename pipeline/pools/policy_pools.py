"""Pools whose workers serve the policy of rollouts, if the plan places it separately from the
simulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline.graph import StageNode
from pipeline.plan import Plan
from pipeline.pools.leases import Lease, PoolState
from stages.flow import EVALUATE, WEIGHTS
from stages.worker.messages import AttemptEnded, ServePolicy, StageOrder


class PolicyPools:
    """Assigns policy workers to simulator stages, and tells each side when the other one ends.

    Args:
        of: pool by stage, including the separate policy.
        ranks: ranks of the pool that compute each of them.
    """

    def __init__(
        self,
        plan: Plan,
        of: Mapping[str, PoolState],
        ranks: Mapping[str, Sequence[int]],
        send: Callable[[str, ServePolicy | AttemptEnded], None],
    ) -> None:
        self._of, self._ranks, self._send = of, ranks, send
        self._policy_stage, acts = (
            next(iter(plan.flow.separate_policy), ""),
            str(plan.flow.rollout_stage),
        )
        # Evaluations need a policy server too, unless the plan runs them in another pool.
        client_stages = (
            (name for name in (acts, EVALUATE) if of[name] is of[acts])
            if self._policy_stage
            else ()
        )
        self._client_stages = frozenset(client_stages)
        self._serving: dict[StageNode, tuple[Lease, str]] = {}
        """Serving lease and attempt, by dispatched node."""

    def needs_policy(self, stage: str) -> bool:
        """Return whether a stage has only simulators, and needs a policy server."""
        return stage in self._client_stages

    def is_ready(self, node: StageNode) -> bool:
        """Return whether a node has its policy, or an active lease serves it."""
        return (
            not self.needs_policy(node.stage)
            or self._of[self._policy_stage].active_lease is not None
        )

    def serving_lease(self, node: StageNode) -> tuple[PoolState, Lease] | None:
        """Return the pool and lease that serve a node, or will; None if it needs no policy
        server."""
        if not self.needs_policy(node.stage):
            return None
        pool = self._of[self._policy_stage]
        member = self._serving[node][0] if node in self._serving else pool.active_lease
        return None if member is None else (pool, member)

    def ranks(self) -> Sequence[int]:
        """Return the ranks of the pool that serve the policy."""
        return self._ranks[self._policy_stage]

    def workers(self, node: StageNode) -> tuple[str, ...]:
        """Return the policy workers of a node; rank n queries the n-th one."""
        found = self.serving_lease(node)
        return () if found is None else tuple(found[1].workers(self.ranks()))

    def begin(self, node: StageNode, order: StageOrder, sims: list[str], *, live: bool) -> None:
        """Start to serve a dispatched node.

        Args:
            sims: the workers that run the simulators.
            live: whether the weights come from memory.
        """
        found = self.serving_lease(node)
        if found is None:
            return
        self._serving[node] = found[1], order.attempt
        found[1].served.add(node)
        for number, worker in enumerate(order.policy_workers):
            if clients := tuple(sims[number :: len(order.policy_workers)]):
                answer = ServePolicy(
                    node=order.node,
                    stage=order.stage,
                    iteration=order.iteration,
                    position=order.position,
                    output=order.output,
                    attempt=order.attempt,
                    weights=(order.inputs[WEIGHTS][0], live),
                    clients=clients,
                )
                self._send(worker, answer)

    def end_attempt(self, node: StageNode) -> None:
        """Stop serving an attempt that ended."""
        member, attempt = self._serving.pop(node, (None, ""))
        if member is not None and member in self._of[self._policy_stage].leases:
            reason = "the attempt of the simulators has ended"
            for worker in member.workers(self.ranks()):
                self._send(worker, AttemptEnded(node=node.name, attempt=attempt, reason=reason))

    def on_lease_lost(self, member: Lease) -> None:
        """Tell the simulator workers that a serving lease is lost; they give up and report it."""
        member.served.clear()
        reason = "its lease has ended"
        for node, attempt in [(n, a) for n, (other, a) in self._serving.items() if other is member]:
            for client in [m for m in self._of[node.stage].leases if node in m.assigned]:
                for worker in client.workers(self._ranks[node.stage]):
                    self._send(worker, AttemptEnded(node=node.name, attempt=attempt, reason=reason))

    def is_busy(self, member: Lease) -> bool:
        """Return whether a lease serves a node."""
        return any(other == member for other, _ in self._serving.values())

    def credit(self, node: StageNode) -> None:
        """Count the success of a node for the lease that served it."""
        if node in self._serving:
            self._serving[node][0].num_finished += 1
            self._of[self._policy_stage].failures = 0
