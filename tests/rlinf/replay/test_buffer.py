"""The buffer keeps the newest transitions, whatever interrupts or repeats an append."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.transitions import transition_dtype
from rlinf.errors import DataError
from rlinf.replay import buffer as module
from rlinf.replay.buffer import ROWS_FILE, STATE_FILE, ReplayBuffer

KIND = transition_dtype(2, 1)


def rows(first: int, count: int) -> np.ndarray:
    made = np.zeros(count, KIND)
    made["rewards"] = np.arange(first, first + count)
    made["observations"] = made["rewards"][:, None] + [0.25, 0.5]
    return made


def opened(folder: Path, **changed: Any) -> ReplayBuffer:
    return ReplayBuffer(
        folder / "replay", **{"dtype": KIND, "capacity": 10, "max_append": 4, **changed}
    )


def held(buffer: ReplayBuffer, iteration: int) -> list[float]:
    view = buffer.view(iteration)
    chosen = view.take(np.arange(len(view)))
    np.testing.assert_array_equal(chosen["observations"][:, 1], chosen["rewards"] + 0.5)
    return [float(value) for value in chosen["rewards"]]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 12))
def test_a_view_is_the_newest_of_all_that_was_added(counts: list[int], capacity: int) -> None:
    """However often the file is opened anew, and of the iterations before the newest too."""
    with tempfile.TemporaryDirectory() as name:
        ends = np.cumsum(counts).tolist()
        for iteration, (count, end) in enumerate(zip(counts, ends, strict=True)):
            opened(Path(name), capacity=capacity).append(iteration, rows(end - count, count))
            buffer = opened(Path(name), capacity=capacity)
            for back in range(min(3, iteration + 1)):
                stop = ends[iteration - back]
                wanted = list(range(max(0, stop - capacity), stop))
                assert held(buffer, iteration - back) == wanted
            assert buffer.view(iteration).num_new == count
        assert (Path(name) / "replay" / ROWS_FILE).stat().st_size == buffer.slots * KIND.itemsize


def test_the_same_append_again_changes_nothing(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    first = buffer.append(0, rows(0, 4))
    second = buffer.append(1, rows(4, 4))
    before = (tmp_path / "replay" / ROWS_FILE).read_bytes()
    again = opened(tmp_path)
    assert again.append(1, rows(4, 4)) == second
    assert again.append(0, rows(0, 4)) == first
    assert (tmp_path / "replay" / ROWS_FILE).read_bytes() == before
    assert held(again, 1) == list(range(8))


@pytest.mark.parametrize("step", ["write", "commit"])
def test_an_append_that_is_cut_off_is_not_seen_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    buffer = opened(tmp_path)
    for iteration in range(6):
        buffer.append(iteration, rows(4 * iteration, 4))
    wanted = held(buffer, 5), held(buffer, 4)

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    def half(handle: int, data: memoryview, at: int, real: Any = os.pwrite) -> int:
        real(handle, data[: len(data) // 2], at)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "write_atomic", stop)
        if step == "write":
            patch.setattr(module.os, "pwrite", half)
        buffer.append(6, rows(24, 4))
    after = opened(tmp_path)
    assert (held(after, 5), held(after, 4)) == wanted
    with pytest.raises(DataError, match="none were added"):
        after.view(6)
    after.append(6, rows(24, 4))
    assert held(after, 6) == list(range(18, 28))


def test_an_iteration_that_is_done_otherwise_replaces_what_it_and_later_ones_added(
    tmp_path: Path,
) -> None:
    buffer = opened(tmp_path)
    for iteration in range(3):
        buffer.append(iteration, rows(4 * iteration, 4))
    buffer.append(1, rows(100, 3))
    assert held(buffer, 1) == [0, 1, 2, 3, 100, 101, 102]
    with pytest.raises(DataError, match="none were added"):
        buffer.view(2)


def test_what_was_overwritten_is_not_given_out(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    for iteration in range(9):
        buffer.append(iteration, rows(4 * iteration, 4))
    with pytest.raises(DataError, match="overwritten"):
        buffer.view(5)
    with pytest.raises(DataError, match="iteration 4 is done again"):
        buffer.append(4, rows(500, 4))


def test_a_buffer_of_another_schema_is_refused_by_the_name_of_the_field(tmp_path: Path) -> None:
    opened(tmp_path).append(0, rows(0, 4))
    with pytest.raises(DataError, match="another schema; field 'observations'"):
        opened(tmp_path, dtype=transition_dtype(3, 1))
    with pytest.raises(DataError, match=r"capacity is 10, not 11"):
        opened(tmp_path, capacity=11)
    with pytest.raises(DataError, match="field 'actions'"):
        opened(tmp_path).append(1, np.zeros(1, transition_dtype(2, 3)))
    with pytest.raises(DataError, match="adds 5 transitions, room is for 4"):
        opened(tmp_path).append(1, rows(0, 5))


def test_damage_is_noticed(tmp_path: Path) -> None:
    opened(tmp_path).append(0, rows(0, 4))
    file = tmp_path / "replay" / ROWS_FILE
    data = bytearray(file.read_bytes())
    data[KIND.itemsize + 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="transitions of iteration 0 are damaged"):
        opened(tmp_path).view(0)
    file.write_bytes(data[:-1])
    with pytest.raises(DataError, match="damaged"):
        opened(tmp_path)
    (tmp_path / "replay" / STATE_FILE).write_text(json.dumps({"schema": 1}))
    with pytest.raises(DataError, match="not the state of a replay buffer"):
        opened(tmp_path)


def test_a_buffer_that_lost_a_file_is_no_new_one(tmp_path: Path) -> None:
    opened(tmp_path).append(0, rows(0, 4))
    rest = (tmp_path / "replay" / ROWS_FILE).rename(tmp_path / "rest")
    with pytest.raises(DataError, match="0 bytes"):
        opened(tmp_path)
    rest.rename(tmp_path / "replay" / ROWS_FILE)
    (tmp_path / "replay" / STATE_FILE).unlink()
    with pytest.raises(DataError, match="lost"):
        opened(tmp_path)


def test_what_an_iteration_added_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"iteration 6: .* 0 has added nothing \(the folder is empty"
    ):
        opened(tmp_path).append(6, rows(24, 4))
    for iteration in range(2):
        opened(tmp_path).append(iteration, rows(4 * iteration, 4))
    with pytest.raises(DataError, match="iteration 5: iteration 2 has added nothing"):
        opened(tmp_path).append(5, rows(8, 4))
    opened(tmp_path).append(2, rows(8, 4))
    assert held(opened(tmp_path), 2) == list(range(2, 12))


@pytest.mark.parametrize("step", ["write_atomic", "os.ftruncate"])
def test_a_buffer_that_was_cut_off_while_it_was_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"{module.__name__}.{step}", stop)
        opened(tmp_path)
    opened(tmp_path).append(0, rows(0, 4))
    assert held(opened(tmp_path), 0) == list(range(4))


def test_the_first_iteration_can_be_done_again(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    buffer.append(0, rows(0, 4))
    buffer.append(1, rows(4, 4))
    buffer.append(0, rows(50, 2))
    assert held(buffer, 0) == [50, 51]


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    opened(tmp_path).append(0, rows(0, 4))
    folder = tmp_path / "replay"
    assert folder.stat().st_mode & 0o077 == 0
    for name in (ROWS_FILE, STATE_FILE):
        assert (folder / name).stat().st_mode & 0o077 == 0
