"""Columns that are read as they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.artifacts import Manifest, commit_output, content_digest, describe_files
from rlinf.channels import record_files
from rlinf.channels.record_files import (
    RecordFileReader,
    large_columns_path,
    read_records,
    write_records,
)
from rlinf.data.batch import pad_right
from rlinf.data.record import LazyArray, Record, RecordId
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.errors import ArtifactError


def records(count: int = 6, width: int = 300) -> list[Record]:
    random = np.random.default_rng(3)
    return [
        Record(
            RecordId(0, i),
            {
                "images": random.integers(0, 255, (length, width, 5), dtype=np.uint8),
                "rewards": random.normal(size=length).astype(np.float32),
            },
            {"prompt": np.arange(3)},
            {"group": i // 2},
        )
        for i in range(count)
        for length in [5 + 900 * i]
    ]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Which rows were read."""
    requests: list[tuple[int, int]] = []
    real = record_files.LargeColumn._read

    def spy(rows: Any, start: int, stop: int) -> np.ndarray:
        requests.append((start, stop))
        return real(rows, start, stop)

    monkeypatch.setattr(record_files.LargeColumn, "_read", spy)
    return requests


def test_what_is_read_is_what_was_written_and_only_what_is_used(
    tmp_path: Path, read: list[tuple[int, int]]
) -> None:
    made, path = records(), tmp_path / "trajectories-r000-p000.h5"
    write_records(path, made)
    found = list(RecordFileReader([path]))
    assert path.stat().st_size < 100_000 < large_columns_path(path).stat().st_size
    for record, own in zip(found, made, strict=True):
        images: Any = record.steps["images"]
        assert isinstance(images, LazyArray)
        assert (images.shape, images.dtype) == (own.steps["images"].shape, np.uint8)
        assert images.nbytes == own.steps["images"].nbytes
        assert len(record) == len(own)
        assert record.slice_steps(2, 4).steps["images"].shape == (2, 300, 5)
    assert not read, "lengths and shapes cost nothing"
    part = pad_right([found[i].slice_steps(3, 900).steps["images"] for i in (2, 5)], 897)
    expected = [made[i].steps["images"][3:900] for i in (2, 5)]
    assert np.array_equal(part.numpy(), np.stack(expected))
    begins = np.cumsum([0, *(len(record) for record in made)])
    assert read == [(begins[i] + 3, begins[i] + 900) for i in (2, 5)]
    assert [record.digest() for record in found] == [record.digest() for record in made]


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_records(tmp_path / f"{name}.h5", records())
    for suffix in (".h5", ".rows.hdf5"):
        one, two = ((tmp_path / name).with_suffix(suffix) for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_a_record_may_have_large_rows_alone(tmp_path: Path) -> None:
    made = [Record(r.identity, {"images": r.steps["images"]}) for r in records()]
    write_records(tmp_path / "a.h5", made)
    found = read_records(tmp_path / "a.h5")
    assert [record.digest() for record in found] == [record.digest() for record in made]


def test_small_rows_are_in_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_records(path, records(width=10))
    assert not large_columns_path(path).exists()
    assert all(isinstance(r.steps["images"], np.ndarray) for r in read_records(path))


@given(
    start=st.integers(-3, 12),
    stop=st.integers(-3, 12) | st.none(),
    inner=st.integers(-3, 12),
    step=st.sampled_from([None, 1, 2]),
)
def test_a_slice_is_that_of_the_array(start: int, stop: Any, inner: int, step: Any) -> None:
    array = np.arange(40).reshape(10, 4)
    lazy = LazyArray(lambda first, last: array[first:last], array.shape, array.dtype)
    assert np.array_equal(lazy[start:stop:step], array[start:stop:step])
    assert np.array_equal(lazy[start:stop][inner:], array[start:stop][inner:])
    assert np.array_equal(np.concatenate([lazy, lazy]), np.concatenate([array, array]))
    assert np.array_equal(lazy[3], array[3])
    assert np.array_equal(lazy[-2], array[-2])


def test_it_computes_as_the_array_does() -> None:
    array, requests = np.arange(40).reshape(10, 4), list[tuple[int, int]]()

    def read(first: int, last: int) -> np.ndarray:
        requests.append((first, last))
        return array[first:last]

    lazy: Any = LazyArray(read, array.shape, array.dtype)
    for made, right in (
        (lazy == 0, array == 0),
        (lazy != 0, array != 0),
        (1 + lazy / 2, 1 + array / 2),
        (lazy + lazy, array + array),
        (lazy.astype(np.float32).mean(0), array.mean(0)),
        (np.sqrt(lazy), np.sqrt(array)),
        (lazy.reshape(5, -1), array.reshape(5, -1)),
    ):
        assert np.array_equal(made, right)
    requests.clear()
    assert [row.tolist() for row in lazy] == array.tolist()
    assert lazy[4].tolist() == array[4].tolist()
    assert requests == [(0, 10), (4, 5)]
    assert not hasattr(lazy, "nothing_of_the_kind")


def test_a_wide_submask_from_disk_counts(tmp_path: Path) -> None:
    submask = np.zeros((4, 300), np.float32)
    submask[1:3, 7] = 1
    steps = {"actions": np.zeros(4, np.int64), "submask": submask}
    write_records(tmp_path / "a.h5", [Record(RecordId(0, 0), steps)])
    (found,) = map(Trajectory.from_record, read_records(tmp_path / "a.h5"))
    assert isinstance(found.choice_mask, LazyArray)
    assert loss_mask(found).tolist() == [False, True, True, False]


def test_large_columns_stay_on_disk_as_trajectories_are_converted_and_cut(tmp_path: Path) -> None:
    def read(start: int, stop: int) -> np.ndarray:
        raise AssertionError(f"rows {start} to {stop} were read")

    images = LazyArray(read, (9, 8, 8, 3), np.dtype(np.uint8))
    steps: dict[str, Any] = {"actions": np.zeros(9), "images.front": images}
    trajectory = Trajectory.from_record(Record(RecordId(0, 0), steps))
    assert trajectory.images["front"] is images
    assert trajectory.to_record().steps["images.front"] is images
    assert trajectory.slice_steps(0, 9) is trajectory
    assert trajectory.slice_steps(2, 5).images["front"].shape == (3, 8, 8, 3)


def test_the_size_of_blocks_is_the_files_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path / "a.h5", records())
    monkeypatch.setattr(record_files, "BLOCK_BYTES", 1 << 14)
    found = read_records(tmp_path / "a.h5")
    assert [record.digest() for record in found] == [record.digest() for record in records()]


def test_a_committed_file_that_cannot_be_opened_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "out" / "data-1"
    data.mkdir(parents=True)
    write_records(data / "a.h5", records())
    made = describe_files(data)
    manifest = Manifest(
        stage="rollout",
        iteration=0,
        key="k",
        content=content_digest(made, {}),
        data="data-1",
        files=made,
        inputs={},
        metrics={},
        timing={},
        host="here",
        job="",
        world=1,
    )
    commit_output(tmp_path / "out", manifest)
    (first, *_, last) = read_records(data / "a.h5")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(record_files.h5py, "File", full)
        with pytest.raises(OSError, match="Too many open files") as error:
            np.asarray(first.steps["images"])
        assert not isinstance(error.value, ArtifactError)
    path = large_columns_path(data / "a.h5")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ArtifactError, match="rows"):
        np.asarray(last.steps["images"])


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_is_seen_where_it_is(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.h5"
    write_records(path, records())
    whole = large_columns_path(path).read_bytes()
    if damage == "missing":
        large_columns_path(path).unlink()
    elif damage == "truncated":
        large_columns_path(path).write_bytes(whole[: len(whole) // 2])
    else:
        at = len(whole) - 1000
        large_columns_path(path).write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    found = read_records(path)
    if damage == "flipped":
        assert np.asarray(found[0].steps["images"]).shape == (5, 300, 5), "another block"
    with pytest.raises(ValueError, match=r"a\.rows\.hdf5: images: "):
        np.asarray(found[-1].steps["images"])
