"""A bound on every grouping of stages into pools at once, from what each pool needs by itself.

Give each kind of GPU a price such that all of them together cost 1. Within ``T`` seconds a pool
does its stages one after the other, for which it needs GPUs of at least some price; where the
prices of a grouping's pools add up to more than 1, none of its placements is done in ``T``. A price
is bounded from below by letting each stage of a pool spend all of it on the GPUs that suit that
stage best. That stages of different pools wait for each other is left to
:mod:`pipeline.planning.planner.relax`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.planning.planner.predict import Predictor
from pipeline.planning.planner.problem import Pools, homes, jobs
from pipeline.planning.planner.relax import hull

Array = np.ndarray

BUDGETS, CHEAPEST = 256, 1 / 512
"""How many prices of a pool are looked at, and the least of them."""
TIMES = 200
FAVOUR = 0.8
"""Share of all prices that falls on a kind that is made dear."""


def quick_bounds(predictor: Predictor, groupings: Sequence[Pools]) -> Array:
    """Seconds that no placement of each grouping goes below, float64 ``[groupings]``."""
    stages, sizes = predictor.problem.stages, [kind.gpus for kind in predictor.problem.kinds]
    everything = np.array(sizes)[:, None]
    least = np.array(
        [predictor.duration(s, everything, 0 * everything)[0] for s in range(len(stages))]
    )
    found = np.full(len(groupings), least.max())
    if not np.isfinite(found).all():
        return found
    members = np.arange(1 << len(stages))[:, None] >> np.arange(len(stages)) & 1
    switches = np.array([_switches(predictor, np.flatnonzero(row)) for row in members])
    # The empty pool fills up those of few pools; it costs nothing.
    every = [(n, less) for n, grouping in enumerate(groupings) for less in _apart(grouping)]
    of, pools = np.array([n for n, _ in every]), np.zeros((len(every), len(stages)), np.int64)
    for row, (_, grouping) in zip(pools, every, strict=True):
        row[: len(grouping)] = [sum(1 << s for s in pool) for pool in grouping]
    times = np.geomspace(least.max(), least.sum() + switches.max(), TIMES)
    budgets = np.concatenate([[0.0], np.geomspace(CHEAPEST, 1, BUDGETS)])
    for prices in _prices(predictor, least):
        spent = np.stack([_seconds(predictor, s, prices, budgets) for s in range(len(stages))])
        needed = members @ spent + switches[:, None]
        costs = np.zeros((len(members), TIMES))
        for row, seconds in zip(costs[1:], needed[1:], strict=True):
            # The first budget that suffices; what the pool needs is more than the one before.
            first = np.searchsorted(-seconds, -times * (1 + 1e-9))
            row[:] = np.where(first < len(budgets), budgets[np.maximum(first, 1) - 1], 2.0)
        enough = np.sum([costs[pools[:, p]] for p in range(len(stages))], axis=0) <= 1
        last = np.where(enough.any(1), enough.argmax(1), TIMES) - 1
        np.maximum.at(found, of, np.where(last >= 0, times[last], 0.0))
    return found


def _apart(pools: Pools) -> Iterator[Pools]:
    """What needs no more than pools that overlap: without the stages that are in several of them,
    and with one pool of each job alone, as if the stages beside it needed nothing."""
    together = jobs(pools)
    if len(together) == len(pools):
        yield pools
        return
    home = homes(pools)
    yield tuple(tuple(s for s in pool if len(home[s]) == 1) for pool in pools)
    for n in range(max(map(len, together))):
        yield tuple(pools[job[min(n, len(job) - 1)]] for job in together)


def _prices(predictor: Predictor, least: Array) -> Iterator[Array]:
    """Prices of one GPU of each kind ``[kinds]``: all alike, by what they are worth to a stage or
    to all, and each kind dear in turn."""
    kinds = predictor.problem.kinds
    worth = np.array([[table[-1] for table in row] for row in predictor.best]) * least[:, None]
    shares = [np.ones(len(kinds)), worth.sum(0), *worth, *(FAVOUR * np.eye(len(kinds)) + 0.1)]
    sizes = np.array([kind.gpus for kind in kinds])
    for share in np.unique(np.maximum(shares, 1e-9), axis=0):
        yield share / share.sum() / sizes


def _seconds(predictor: Predictor, stage: int, prices: Array, budgets: Array) -> Array:
    """Least seconds of a stage for each budget, on whatever (fractions of) GPUs serve it best."""
    pieces = []
    for price, rates in zip(prices, predictor.best[stage], strict=True):
        corners = hull(rates)
        for a, b in zip(corners[:-1], corners[1:], strict=True):
            pieces.append(((rates[b] - rates[a]) / ((b - a) * price), (b - a) * price))
    pieces.sort(reverse=True)
    gain, cost = np.array(pieces).T
    speed = np.interp(budgets, np.cumsum([0, *cost]), np.cumsum([0, *(gain * cost)]))
    return 1 / np.maximum(speed, 1e-30)


def _switches(predictor: Predictor, pool: Array) -> float:
    """Least seconds that a pool of these stages changes between them."""
    members = [int(s) for s in pool]
    here = [[s for s in group if s in members] for group in predictor.groups]
    return sum(predictor.least_switch(group, members) for group in here if group)
