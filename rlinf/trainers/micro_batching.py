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
    fewer repeats a small row, with ``is_real`` false and weight 0. A single process has no such
    micro-batches.
    """

    spans: list[list[StepSpan]]
    """The spans of each micro-batch, one per row."""
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

    Every rank computes the parts of all ranks, and so knows how many micro-batches each runs.

    Args:
        row_groups: groups of rows that must be in one micro-batch, unsplit. None: rows are
            independent, and are split into spans if the policy's steps are independent. Rows with
            a common prompt are then placed together.
        max_tokens: maximum number of positions of a micro-batch.
        padded: whether rows are padded to the longest of their micro-batch.
        speeds: relative speeds of the ranks.

    Raises:
        ValueError: a row is missing in ``row_groups``, or is in it twice.
    """
    thread_speeds = [speed for speed in speeds for _ in range(num_threads)]
    if row_groups is None:
        units = _units(policy, trajectories, max_tokens, thread_speeds)
    else:
        units = [list(unit) for unit in row_groups]
    if sorted(row for unit in units for row in unit) != list(range(len(trajectories))):
        raise ValueError("each row must be in one micro-batch")
    pieces, unit_piece_ids = list[list[StepSpan]](), list[list[int]]()
    for unit in units:
        unsplit = [StepSpan(row, 0, len(trajectories[row])) for row in unit]
        unit_pieces = (
            _pieces(policy, trajectories, unit, max_tokens) if row_groups is None else [unsplit]
        )
        unit_piece_ids.append(list(range(len(pieces), len(pieces) + len(unit_pieces))))
        pieces += unit_pieces
    max_rows = max(map(len, pieces), default=1)
    costs = []
    for piece in pieces:
        parts = [trajectories[row].slice_steps(start, stop) for row, start, stop in piece]
        # An upper bound of the padded size: the number of rows times the largest cost.
        longest = max(map(policy.num_tokens, parts))
        costs.append(max_rows * longest if padded else _packed_size(policy, parts))
    # One process gets all spans of a trajectory, because it reports the outputs to others.
    unit_costs = [sum(costs[piece] for piece in piece_ids) for piece_ids in unit_piece_ids]
    thread_pieces = [
        [piece for unit in units_of_thread for piece in unit_piece_ids[unit]]
        for units_of_thread in balance_costs(unit_costs, thread_speeds)
    ]

    def spans(batches: list[list[int]]) -> list[list[StepSpan]]:
        return [[span for piece in batch for span in pieces[piece]] for batch in batches]

    thread_batches = [
        pack_microbatches(costs, piece_ids, max_tokens, padded=padded)
        for piece_ids in thread_pieces
    ]
    if len(speeds) == 1:
        return [MicroBatches(spans(b), [True] * len(b)) for b in thread_batches]
    count = max(1, *map(len, thread_batches))
    out = []
    for piece_ids in thread_pieces[rank * num_threads :][:num_threads]:
        # Ranks wait for each other at every micro-batch, so micro-batches are of even size.
        batches = even_microbatches(costs, piece_ids, count, max_tokens, padded=padded)
        num_fillers = count - len(batches)
        filler = [min(piece_ids, key=lambda i: costs[i])] if piece_ids else [0]
        is_real = [True] * len(batches) + [False] * num_fillers
        out.append(MicroBatches(spans(batches + [filler] * num_fillers), is_real))
    return out


def _packed_size(policy: Policy, trajectories: Sequence[Trajectory]) -> int:
    """Return the number of positions of trajectories that are packed into one sequence."""
    prefixes = [policy.shared_prefix(trajectory) for trajectory in trajectories]
    unshared = sum(map(policy.num_tokens, trajectories)) - sum(length for _, length in prefixes)
    return unshared + sum(dict(prefixes).values())


def _units(
    policy: Policy, trajectories: Sequence[Trajectory], max_tokens: int, workers: Sequence[float]
) -> list[list[int]]:
    """Group rows with a common prompt, unless this would slow down the slowest worker."""
    prefixes = [policy.shared_prefix(trajectory) for trajectory in trajectories]
    if not any(length for _, length in prefixes):
        return [[row] for row in range(len(trajectories))]
    costs = [policy.num_tokens(trajectory) for trajectory in trajectories]
    groups: dict[object, list[int]] = {}
    for row, (key, length) in enumerate(prefixes):
        groups.setdefault(key if length else row, []).append(row)

    def size(rows: Sequence[int]) -> int:
        prefix_lengths = dict(prefixes[row] for row in rows)
        return sum(costs[row] - prefixes[row][1] for row in rows) + sum(prefix_lengths.values())

    def split(limit: int) -> list[list[int]]:
        units = []
        for rows in groups.values():
            unit: list[int] = []
            for row in rows:
                if unit and size([*unit, row]) > limit:
                    units.append(unit)
                    unit = []
                unit.append(row)
            units.append(unit)
        return units

    def slowest(units: list[list[int]]) -> float:
        assigned = balance_costs([size(unit) for unit in units], workers)
        worker_rows = [[row for unit in unit_ids for row in units[unit]] for unit_ids in assigned]
        return max(size(rows) / speed for rows, speed in zip(worker_rows, workers, strict=True))

    if len(workers) == 1:
        return split(max_tokens)
    even_share = sum(map(size, groups.values())) // len(workers)
    # Prefer large units, because every worker with a part of a group computes the shared prompt.
    limits = (max_tokens, even_share, even_share // 2, even_share // 4)
    candidates = [split(min(max_tokens, limit)) for limit in limits]
    return min(candidates, key=slowest)


def _pieces(
    policy: Policy, trajectories: Sequence[Trajectory], unit: Sequence[int], budget: int
) -> list[list[StepSpan]]:
    """Split a unit into pieces to evaluate: spans if steps are independent, else all of it."""
    if len(unit) > 1 or not policy.has_independent_steps:
        return [[StepSpan(row, 0, len(trajectories[row])) for row in unit]]
    row, length = unit[0], len(trajectories[unit[0]])
    count = max(1, min(length, -(-policy.num_tokens(trajectories[row]) // budget)))
    bounds = [length * k // count for k in range(count + 1)]
    return [[StepSpan(row, *pair)] for pair in itertools.pairwise(bounds)]
