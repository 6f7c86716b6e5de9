"""Transfers that share a network: fluid flows at max-min fair rates.

Every flow crosses some links. Rates grow together until a link is full; the flows on it keep their
rate and the others go on growing (progressive filling; Bertsekas and Gallager, Data Networks,
section 6.5.2). Rates are computed anew whenever a flow comes or goes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Iterable, Mapping
from typing import Any

import simpy


class _Flow:
    def __init__(self, size: float, links: frozenset[Hashable], done: simpy.Event) -> None:
        self.left, self.links, self.done, self.rate = size, links, done, 0.0


class SharedNetwork:
    """Links with capacities in bytes/s, and the flows on them."""

    def __init__(
        self, env: simpy.Environment, capacities: Mapping[Hashable, float], latency_s: float = 0.0
    ) -> None:
        self._env, self._capacities, self._latency = env, capacities, latency_s
        self._flows: list[_Flow] = []
        self._since = env.now
        self._change = 0

    def send(self, size: float, links: Iterable[Hashable]) -> Generator[Any, Any, None]:
        """Process that ends when ``size`` bytes have crossed all ``links``.

        Latency comes first. Links without a capacity do not limit it.
        """
        yield self._env.timeout(self._latency)
        known = frozenset(link for link in links if link in self._capacities)
        if size <= 0 or not known:
            return
        flow = _Flow(size, known, self._env.event())
        self._advance()
        self._flows.append(flow)
        self._share()
        yield flow.done

    def _advance(self) -> None:
        elapsed = self._env.now - self._since
        for flow in self._flows:
            flow.left -= flow.rate * elapsed
        self._since = self._env.now

    def _share(self) -> None:
        for flow, rate in zip(
            self._flows, fair_rates([f.links for f in self._flows], self._capacities), strict=True
        ):
            flow.rate = rate
        self._change += 1
        if self._flows:
            self._env.process(self._wait(self._change))

    def _wait(self, change: int) -> Generator[Any, Any, None]:
        first = min(self._flows, key=lambda flow: flow.left / flow.rate)
        yield self._env.timeout(max(0.0, first.left / first.rate))
        if change != self._change:
            return
        self._advance()
        # Equal flows end together; what rounding left of them is not worth an event.
        ended = [f for f in self._flows if f is first or f.left <= 1e-9 * f.rate]
        self._flows = [f for f in self._flows if f not in ended]
        for flow in ended:
            flow.done.succeed()
        self._share()


def fair_rates(
    flows: list[frozenset[Hashable]], capacities: Mapping[Hashable, float]
) -> list[float]:
    """Max-min fair rates of flows that each cross the given links."""
    rates = [0.0] * len(flows)
    free = dict(capacities)
    growing = set(range(len(flows)))
    while growing:
        crowd: dict[Hashable, int] = {}
        for i in growing:
            for link in flows[i]:
                crowd[link] = crowd.get(link, 0) + 1
        step = min((free[link] / count for link, count in crowd.items()), default=math.inf)
        if math.isinf(step):
            raise ValueError("a flow crosses no link with a capacity")
        full = {link for link, count in crowd.items() if free[link] <= step * count * (1 + 1e-12)}
        for i in growing:
            rates[i] += step
        for link, count in crowd.items():
            free[link] -= step * count
        growing = {i for i in growing if not flows[i] & full}
    return rates
