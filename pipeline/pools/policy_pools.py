"""Which workers answer the simulators of a stage whose policy the plan placed elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline.graph import StageNode
from pipeline.plan import Plan
from pipeline.pools.leases import Lease, PoolState
from stages.flow import EVALUATE, WEIGHTS
from stages.worker.messages import AttemptEnded, ServePolicy, StageOrder


class PolicyPools:
    """Has the workers with the policy answer, and tells each side when the other is gone.

    Args:
        of: the pool of each stage, and of the part.
        ranks: of those, the processes of the pool that compute each.
    """

    def __init__(
        self,
        plan: Plan,
        of: Mapping[str, PoolState],
        ranks: Mapping[str, Sequence[int]],
        send: Callable[[str, ServePolicy | AttemptEnded], None],
    ) -> None:
        self._of, self._ranks, self._send = of, ranks, send
        self._part, acts = next(iter(plan.flow.separate_policy), ""), str(plan.flow.rollout_stage)
        # Evaluations ask too, but where the plan has them elsewhere: they are whole there.
        asking = (name for name in (acts, EVALUATE) if of[name] is of[acts]) if self._part else ()
        self._asking = frozenset(asking)
        self._by: dict[StageNode, tuple[Lease, str]] = {}
        """By stage that was ordered: the lease that answers it, and which attempt."""

    def needs_policy(self, stage: str) -> bool:
        """Whether a stage has its simulators alone."""
        return stage in self._asking

    def is_ready(self, node: StageNode) -> bool:
        """Whether a stage has its policy, or those are there that do."""
        return not self.needs_policy(node.stage) or self._of[self._part].active_lease is not None

    def serving_lease(self, node: StageNode) -> tuple[PoolState, Lease] | None:
        """The pool and lease that answer a stage, or are to; None: it asks nobody."""
        if not self.needs_policy(node.stage):
            return None
        pool = self._of[self._part]
        member = self._by[node][0] if node in self._by else pool.active_lease
        return None if member is None else (pool, member)

    def ranks(self) -> Sequence[int]:
        """The processes of their pool that answer."""
        return self._ranks[self._part]

    def workers(self, node: StageNode) -> tuple[str, ...]:
        """Those that a stage asks, each rank the one of its number."""
        found = self.serving_lease(node)
        return () if found is None else tuple(found[1].workers(self.ranks()))

    def begin(self, node: StageNode, order: StageOrder, sims: list[str], *, live: bool) -> None:
        """Have an order that asks answered.

        Args:
            sims: the workers that have the order.
            live: whether the weights come by memory.
        """
        found = self.serving_lease(node)
        if found is None:
            return
        self._by[node] = found[1], order.attempt
        found[1].served.add(node)
        for number, worker in enumerate(order.policy_workers):
            if askers := tuple(sims[number :: len(order.policy_workers)]):
                answer = ServePolicy(
                    node=order.node,
                    stage=order.stage,
                    iteration=order.iteration,
                    position=order.position,
                    output=order.output,
                    attempt=order.attempt,
                    weights=(order.inputs[WEIGHTS][0], live),
                    clients=askers,
                )
                self._send(worker, answer)

    def end_attempt(self, node: StageNode) -> None:
        """An attempt has ended: it is answered no more."""
        member, attempt = self._by.pop(node, (None, ""))
        if member is not None and member in self._of[self._part].leases:
            reason = "the attempt that asked has ended"
            for worker in member.workers(self.ranks()):
                self._send(worker, AttemptEnded(node=node.name, attempt=attempt, reason=reason))

    def on_lease_lost(self, member: Lease) -> None:
        """A lease is gone: those that it answers give up, and report that."""
        member.served.clear()
        reason = "its lease is over"
        for node, attempt in [(n, a) for n, (other, a) in self._by.items() if other is member]:
            for asker in [m for m in self._of[node.stage].leases if node in m.assigned]:
                for worker in asker.workers(self._ranks[node.stage]):
                    self._send(worker, AttemptEnded(node=node.name, attempt=attempt, reason=reason))

    def is_busy(self, member: Lease) -> bool:
        """Whether a lease answers somebody."""
        return any(other == member for other, _ in self._by.values())

    def credit(self, node: StageNode) -> None:
        """A stage has gone well: so has what its policy's lease did for it."""
        if node in self._by:
            self._by[node][0].num_finished += 1
            self._of[self._part].failures = 0
