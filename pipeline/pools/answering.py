"""Which workers answer the simulators of a stage whose policy the plan placed elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline.flow import Node
from pipeline.plan import Plan
from pipeline.pools.leases import Member, PoolState
from stages.flow import EVALUATE, WEIGHTS
from stages.worker.messages import Answer, Over, StageOrder


class Answering:
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
        send: Callable[[str, Answer | Over], None],
    ) -> None:
        self._of, self._ranks, self._send = of, ranks, send
        self._part, acts = next(iter(plan.flow.apart), ""), str(plan.flow.acts)
        # Evaluations ask too, but where the plan has them elsewhere: they are whole there.
        asking = (name for name in (acts, EVALUATE) if of[name] is of[acts]) if self._part else ()
        self._asking = frozenset(asking)
        self._by: dict[Node, tuple[Member, str]] = {}
        """By stage that was ordered: the lease that answers it, and which attempt."""

    def asks(self, stage: str) -> bool:
        """Whether a stage has its simulators alone."""
        return stage in self._asking

    def can(self, node: Node) -> bool:
        """Whether a stage has its policy, or those are there that do."""
        return not self.asks(node.stage) or self._of[self._part].active is not None

    def by(self, node: Node) -> tuple[PoolState, Member] | None:
        """The pool and lease that answer a stage, or are to; None: it asks nobody."""
        if not self.asks(node.stage):
            return None
        pool = self._of[self._part]
        member = self._by[node][0] if node in self._by else pool.active
        return None if member is None else (pool, member)

    def ranks(self) -> Sequence[int]:
        """The processes of their pool that answer."""
        return self._ranks[self._part]

    def workers(self, node: Node) -> tuple[str, ...]:
        """Those that a stage asks, each rank the one of its number."""
        found = self.by(node)
        return () if found is None else tuple(found[1].workers(self.ranks()))

    def begin(self, node: Node, order: StageOrder, sims: list[str], *, live: bool) -> None:
        """Have an order that asks answered.

        Args:
            sims: the workers that have the order.
            live: whether the weights come by memory.
        """
        found = self.by(node)
        if found is None:
            return
        self._by[node] = found[1], order.attempt
        found[1].answers.add(node)
        for number, worker in enumerate(order.asks):
            if askers := tuple(sims[number :: len(order.asks)]):
                answer = Answer(
                    node=order.node,
                    stage=order.stage,
                    iteration=order.iteration,
                    position=order.position,
                    out=order.out,
                    attempt=order.attempt,
                    weights=(order.inputs[WEIGHTS][0], live),
                    askers=askers,
                )
                self._send(worker, answer)

    def over(self, node: Node) -> None:
        """An attempt has ended: it is answered no more."""
        member, attempt = self._by.pop(node, (None, ""))
        if member is not None and member in self._of[self._part].members:
            reason = "the attempt that asked has ended"
            for worker in member.workers(self.ranks()):
                self._send(worker, Over(node=node.name, attempt=attempt, reason=reason))

    def lost(self, member: Member) -> None:
        """A lease is gone: those that it answers give up, and report that."""
        member.answers.clear()
        reason = "its lease is over"
        for node, attempt in [(n, a) for n, (other, a) in self._by.items() if other is member]:
            for asker in [m for m in self._of[node.stage].members if node in m.given]:
                for worker in asker.workers(self._ranks[node.stage]):
                    self._send(worker, Over(node=node.name, attempt=attempt, reason=reason))

    def busy(self, member: Member) -> bool:
        """Whether a lease answers somebody."""
        return any(other == member for other, _ in self._by.values())

    def credit(self, node: Node) -> None:
        """A stage has gone well: so has what its policy's lease did for it."""
        if node in self._by:
            self._by[node][0].finished += 1
            self._of[self._part].failures = 0
