"""What several processes take of one budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.errors import DataError
from rlinf.rewards.chat_endpoint import RequestBlocks


@pytest.mark.parametrize("most", [1, 7, 5000])
def test_no_more_is_taken_than_there_is(tmp_path: Path, most: int) -> None:
    processes = [RequestBlocks(tmp_path / "requests") for _ in range(3)]
    chosen, each = 0, 1
    while each:
        each = sum(process.reserve(most, 100) for process in processes)
        chosen += each
    assert chosen == most
    assert RequestBlocks(tmp_path / "requests").reserve(most, 100) == 0, "nor by a later one"
    assert RequestBlocks(tmp_path / "requests").reserve(most + 1, 100) == 1, (
        "but of a larger budget"
    )


@pytest.mark.parametrize(("wanted", "size"), [(0, 1), (1, 1), (3, 3), (5, 5), (100, 5)])
def test_a_block_has_no_more_than_is_wanted(tmp_path: Path, wanted: int, size: int) -> None:
    assert RequestBlocks(tmp_path).reserve(5000, wanted) == size


def test_one_without_a_folder_is_alone() -> None:
    claims = RequestBlocks(None)
    assert [claims.reserve(2, 2) for _ in range(3)] == [1, 1, 0]


def test_a_file_that_is_no_block_is_named(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("many")
    with pytest.raises(DataError, match=f"{tmp_path}/0 does not contain"):
        RequestBlocks(tmp_path).reserve(3, 3)
