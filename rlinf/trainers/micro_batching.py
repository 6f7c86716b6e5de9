"""Split a minibatch over processes, their threads, and micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.data.load_balancing import StepSpan, balance_costs, even_microbatches, pack_microbatches
from rlinf.data.trajectory import Trajectory
from rlinf.models.base import Policy


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one thread of this rank.

    All ranks run the same number of micro-batches, because collectives must match. A rank with
    fewer repeats a small row with ``is_real`` false and weight zero. A single process adds no such
    row.
    """

    batches: list[list[StepSpan]]
    is_real: list[bool]


def split_micro_batches(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    row_groups: Sequence[Sequence[int]] | None,
    *,
    max_tokens: int,
    padded: bool,
    speeds: Sequence[float],
    rank: int,
    num_threads: int,
) -> list[MicroBatches]:
    """Return the micro-batches of each thread of a rank.

    Every rank computes the shares of all ranks and so knows how many micro-batches they run.

    Args:
        row_groups: groups of rows that must be in one micro-batch, unsplit. None: rows are
            independent, and are split into spans where the policy's steps are independent. Rows
            that share a prompt are then placed together.
        max_tokens: maximum number of positions of a micro-batch.
        padded: whether rows are padded to the longest of their micro-batch.
        speeds: relative speeds of the ranks.

    Raises:
        ValueError: a row is missing in ``row_groups``, or is there twice.
    """
    if row_groups is None:
        workers = [speed for speed in speeds for _ in range(num_threads)]
        units = _units(policy, trajectories, max_tokens, workers)
    else:
        units = [list(unit) for unit in row_groups]
    if sorted(row for unit in units for row in unit) != list(range(len(trajectories))):
        raise ValueError("each row has to be in one micro-batch")
    pieces, unit_piece_ids = list[list[StepSpan]](), list[list[int]]()
    for unit in units:
        unsplit = [StepSpan(row, 0, len(trajectories[row])) for row in unit]
        unit_pieces = (
            _pieces(policy, trajectories, unit, max_tokens) if row_groups is None else [unsplit]
        )
        unit_piece_ids.append(list(range(len(pieces), len(pieces) + len(unit_pieces))))
        pieces += unit_pieces
    widest = max(map(len, pieces), default=1)
    costs = []
    for piece in pieces:
        parts = [trajectories[row].slice_steps(start, stop) for row, start, stop in piece]
        # An upper bound of the padded size: the number of rows times the largest cost.
        size = widest * max(map(policy.num_tokens, parts)) if padded else _packed(policy, parts)
        costs.append(size)
    # One process gets all spans of a trajectory, because it reports the outputs to others.
    totals = [sum(costs[piece] for piece in numbers) for numbers in unit_piece_ids]
    assigned = [
        [piece for unit in items for piece in unit_piece_ids[unit]]
        for items in balance_costs(totals, [speed for speed in speeds for _ in range(num_threads)])
    ]

    def spans(batches: list[list[int]]) -> list[list[StepSpan]]:
        return [[span for item in items for span in pieces[item]] for items in batches]

    cuts = [pack_microbatches(costs, items, max_tokens, padded=padded) for items in assigned]
    if len(speeds) == 1:
        return [
            MicroBatches(spans(batches_of_rank), [True] * len(batches_of_rank))
            for batches_of_rank in cuts
        ]
    count = max(1, *map(len, cuts))
    out = []
    for items in assigned[rank * num_threads :][:num_threads]:
        # Ranks wait for each other at every micro-batch, so micro-batches are of even size.
        batches_of_rank = even_microbatches(costs, items, count, max_tokens, padded=padded)
        num_fillers = count - len(batches_of_rank)
        filler = [min(items, key=lambda i: costs[i])] if items else [0]
        real = [True] * len(batches_of_rank) + [False] * num_fillers
        out.append(MicroBatches(spans(batches_of_rank + [filler] * num_fillers), real))
    return out


def _packed(policy: Policy, trajectories: Sequence[Trajectory]) -> int:
    """Return the number of positions of trajectories in one packed sequence."""
    shared = [policy.shared_prefix(trajectory) for trajectory in trajectories]
    own = sum(map(policy.num_tokens, trajectories)) - sum(length for _, length in shared)
    return own + sum(dict(shared).values())


def _units(
    policy: Policy, trajectories: Sequence[Trajectory], budget: int, workers: Sequence[float]
) -> list[list[int]]:
    """Group rows that share a prompt, unless a worker would become slower by it."""
    shared = [policy.shared_prefix(trajectory) for trajectory in trajectories]
    if not any(length for _, length in shared):
        return [[row] for row in range(len(trajectories))]
    costs = [policy.num_tokens(trajectory) for trajectory in trajectories]
    groups: dict[object, list[int]] = {}
    for row, (key, length) in enumerate(shared):
        groups.setdefault(key if length else row, []).append(row)

    def size(rows: Sequence[int]) -> int:
        parts = dict(shared[row] for row in rows)
        return sum(costs[row] - shared[row][1] for row in rows) + sum(parts.values())

    def split(most: int) -> list[list[int]]:
        units = []
        for rows in groups.values():
            unit: list[int] = []
            for row in rows:
                if unit and size([*unit, row]) > most:
                    units.append(unit)
                    unit = []
                unit.append(row)
            units.append(unit)
        return units

    def slowest(units: list[list[int]]) -> float:
        assigned = balance_costs([size(unit) for unit in units], workers)
        rows = [[row for number in numbers for row in units[number]] for numbers in assigned]
        return max(size(mine) / speed for mine, speed in zip(rows, workers, strict=True))

    if len(workers) == 1:
        return split(budget)
    share = sum(map(size, groups.values())) // len(workers)
    # Whole groups first, because every worker with a part of a group computes the shared prompt.
    ways = [split(min(budget, most)) for most in (budget, share, share // 2, share // 4)]
    return min(ways, key=slowest)


def _pieces(
    policy: Policy, trajectories: Sequence[Trajectory], unit: Sequence[int], budget: int
) -> list[list[StepSpan]]:
    """Split a unit into parts that are evaluated at once: all of it, or spans where its steps are
    independent."""
    if len(unit) > 1 or not policy.has_independent_steps:
        return [[StepSpan(row, 0, len(trajectories[row])) for row in unit]]
    row, length = unit[0], len(trajectories[unit[0]])
    count = max(1, min(length, -(-policy.num_tokens(trajectories[row]) // budget)))
    bounds = [length * k // count for k in range(count + 1)]
    return [[StepSpan(row, *pair)] for pair in itertools.pairwise(bounds)]
