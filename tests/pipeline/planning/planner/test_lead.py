"""When the first part of a rollout is ready, beside batches that are decoded step by step."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.planning.planner.first_chunk import first_chunk_shares

PARTS = (1, 2, 4, 8)


def decoded(lengths: np.ndarray, rows: int, c0: float, c1: float) -> np.ndarray:
    """When each sample of one process has ended, a step at a time."""
    left, ends, clock = list(enumerate(lengths)), np.zeros(len(lengths)), 0.0
    running: dict[int, int] = {}
    while left or running:
        while left and len(running) < rows:
            sample, length = left.pop(0)
            running[sample] = int(length)
        clock += c0 + c1 * len(running)
        running = {sample: n - 1 for sample, n in running.items()}
        for sample in [sample for sample, n in running.items() if not n]:
            ends[sample] = clock
            del running[sample]
    return ends


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("rows", "processes"), [(64, 1), (16, 1), (16, 2), (4, 4)])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_it_is_ready_when_its_longest_sample_is(
    seed: int, rows: int, processes: int, share: float
) -> None:
    rng, samples = np.random.default_rng(seed), 64
    seen = np.minimum(rng.geometric(1 / 12, 4000), 60)
    # What a step costs beside its rows, as a share of what 16 rows cost.
    c0, c1 = share, (1 - share) / 16

    def whole(count: int) -> float:
        return float(
            np.mean([decoded(rng.choice(seen, count), rows, c0, c1).max() for _ in range(150)])
        )

    fixed = max(0.0, 2 * whole(samples // 2) / whole(samples) - 1)
    found = first_chunk_shares(seen.tolist(), samples, rows, (1, processes), PARTS, fixed)
    true: dict[int, list[float]] = {m: [] for m in PARTS}
    for _ in range(150):
        each = [
            decoded(rng.choice(seen, samples // processes), rows, c0, c1) for _ in range(processes)
        ]
        last = max(ends.max() for ends in each)
        for m in PARTS:
            true[m].append(max(ends[: len(ends) // m].max() for ends in each) / last)
    for m in PARTS:
        # Of 16 waves the tail is so short that what a step costs can hardly be told from it.
        near = 0.12 if rows == 4 else 0.05
        assert found[m][processes] == pytest.approx(np.mean(true[m]), abs=near), m


def test_samples_of_one_length_are_ready_all_at_once() -> None:
    """Simulators with a fixed horizon: nothing can begin on a part of such a rollout."""
    found = first_chunk_shares([24], 64, None, (1, 4), PARTS, 0.3)
    assert all(share == 1 for shares in found.values() for share in shares.values())


def test_what_waits_for_rows_is_ready_in_turn() -> None:
    """Of eight waves of one length the first half is there after half of the time."""
    found = first_chunk_shares([24], 64, 8, (1, 8), PARTS, 0.0)
    assert [found[m][1] for m in PARTS] == pytest.approx([1 / m for m in PARTS])
    assert [found[m][8] for m in PARTS] == pytest.approx([1.0] * len(PARTS))


def test_the_same_seed_gives_the_same_answer() -> None:
    args = ([3, 9, 24], 100, 16, (1, 2), PARTS, 0.2)
    assert first_chunk_shares(*args) == first_chunk_shares(*args)
