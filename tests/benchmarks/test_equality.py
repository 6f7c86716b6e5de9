"""What the comparison of ways keeps, and what it calls the same."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.equality import BATCH_SPLITS, RELATIVE, TOLERANCE, TRAINER_SETUPS, compared
from benchmarks.result_cache import ResultCache, result_key


def test_results_are_kept_until_what_they_were_made_by_changes(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    first, other = result_key(None, lr=1.0), result_key(None, lr=2.0)
    assert first == result_key(None, lr=1.0)
    assert len({first, other, result_key("deepspeed", lr=1.0), result_key("vllm", lr=1.0)}) == 4
    kept = ResultCache(path)
    kept[first], kept[other] = {"a": 1}, {"a": 2}
    again = ResultCache(path)
    assert again[first] == {"a": 1}
    again.discard_others([other])
    assert first not in ResultCache(path)
    assert ResultCache(path)[other] == {"a": 2}


def test_only_what_is_within_the_tolerance_is_the_same() -> None:
    zero, near = torch.zeros(2), torch.tensor([0.0, TOLERANCE / 2])
    right = ([[-0.2, 0.6]], {"v": zero, "w": zero})
    assert compared([[-0.2, 0.6]], {"v": zero, "w": near}, right).good(TRAINER_SETUPS[0])
    for found_result, weights in (
        ([[-0.2, 0.6]], {"v": zero, "w": 4 * near}),
        ([[-0.2 - 3 * RELATIVE, 0.6]], {"v": zero, "w": near}),
        ([[float("nan"), 0.6]], {"v": zero, "w": near}),
        ([[-0.2, 0.6]], {"v": zero, "w": torch.tensor([0.0, float("nan")])}),
        ([[-0.2, 0.6]], {"v": zero}),
    ):
        result = compared(found_result, weights, right)
        assert not result.good(TRAINER_SETUPS[0])
        assert result.line(TRAINER_SETUPS[0], BATCH_SPLITS[0]).endswith("differs")
