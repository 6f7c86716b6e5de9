"""Records survive files exactly, equal records give equal bytes, nothing is unpickled."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.channels.channel import ChannelClosed
from rlinf.channels.record_files import (
    RecordFileReader,
    RecordFileWriter,
    _split,
    read_records,
    write_records,
)
from rlinf.data.record import Record, RecordId


def equal(a: Record, b: Record) -> bool:
    return (
        a.identity == b.identity
        and a.info == b.info
        and a.steps.keys() == b.steps.keys()
        and all(np.array_equal(a.steps[k], b.steps[k]) for k in a.steps)
        and all(np.array_equal(a.context[k], b.context[k]) for k in a.context)
    )


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=0, max_size=8),
    text=st.text(max_size=12),
    width=st.integers(1, 3),
)
def test_records_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], text: str, width: int
) -> None:
    path = tmp_path_factory.mktemp("records") / "a.h5"
    records = [
        Record(
            RecordId(3, i),
            {"actions": np.arange(n), "observations": np.ones((n, width), np.float32) * i},
            {"prompt": np.arange(n + 1)},
            {"text": text + str(i), "count": i, "share": i / 7},
        )
        for i, n in enumerate(lengths)
    ]
    write_records(path, records)
    back = read_records(path)
    assert len(back) == len(records)
    assert all(equal(a, b) for a, b in zip(records, back, strict=True))


def test_equal_records_give_equal_bytes_at_any_time(tmp_path: Path) -> None:
    records = [Record(RecordId(0, 1), {"x": np.arange(4)}, info={"s": "a"})]
    write_records(tmp_path / "a.h5", records)
    time.sleep(1.1)
    write_records(tmp_path / "b.h5", records)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=20, deadline=None)
@given(
    order=st.permutations(range(12)),
    sizes=st.lists(st.integers(0, 40), min_size=12, max_size=12),
    wide=st.booleans(),
    stay=st.integers(0, 4),
)
def test_equal_records_give_equal_bytes_in_whatever_order_they_come(
    tmp_path_factory: pytest.TempPathFactory,
    order: list[int],
    sizes: list[int],
    wide: bool,
    stay: int,
) -> None:
    records = [
        Record(
            RecordId(0, i),
            {"x": np.full((n, 200 if wide else 1), i + n / 100)},
            {"prompt": np.arange(i)},
            {"text": "t" * i, "count": n, "mixed": i / 2 if i % 3 else i},
        )
        for i, n in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlinf.channels.record_files.PART_BYTES", 50_000 if wide else 300)
        patch.setattr("rlinf.channels.record_files.MAX_OPEN_PARTS", stay)
        found = []
        for places in (range(12), order):
            folder = tmp_path_factory.mktemp("records")
            writer = RecordFileWriter(folder, "t")
            for i in places:
                writer.put(records[i])
            writer.close()
            found.append(files(folder))
            back = list(RecordFileReader(folder.glob("t-r*.h5")))
            assert all(equal(a, b) for a, b in zip(records, back, strict=True))
    assert found[0] == found[1]


def test_records_that_come_in_order_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf.channels.record_files.PART_BYTES", 800)
    writer = RecordFileWriter(tmp_path, "t")
    for i in range(30):
        writer.put(Record(RecordId(0, i), {"x": np.zeros(10)}))
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    writer.close()
    assert len(before) == 3
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("width", [1, 1000])
def test_parts_are_put_in_order_by_a_look_at_each_for_each(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one for each record, nor with all that the others have: a commit is beside a stage."""
    count, parts = 60, 5
    size = np.zeros((2, width)).nbytes
    monkeypatch.setattr("rlinf.channels.record_files.PART_BYTES", count // parts * size)
    writer, opens, decoded = RecordFileWriter(tmp_path, "t"), list[str](), list[str]()
    for i in np.random.default_rng(0).permutation(count).tolist():
        writer.put(Record(RecordId(0, i), {"x": np.full((2, width), i)}, info={"text": str(i)}))

    class Opened(h5py.File):
        def __init__(self, path: Any, mode: str, **options: Any) -> None:
            super().__init__(path, mode, **options)
            opens.append(mode)

    def split(data: Any, offsets: np.ndarray) -> list[np.ndarray]:
        found = _split(data, offsets)
        decoded.extend(str(piece) for piece in found if piece.dtype == np.uint8)
        return found

    monkeypatch.setattr(h5py, "File", Opened)
    monkeypatch.setattr("rlinf.channels.record_files._split", split)
    writer.close()
    wide = width > 1
    assert opens.count("w") == parts * (2 if wide else 1)
    assert parts <= opens.count("r") <= parts + (parts**2 if wide else 0)
    # Each text is decoded with its neighbours, not with all of its file for each part.
    assert len(decoded) == count


@settings(max_examples=25, deadline=None)
@given(chosen=st.sets(st.integers(0, 11)), wide=st.booleans())
def test_some_samples_are_read_as_among_all(
    tmp_path_factory: pytest.TempPathFactory, chosen: set[int], wide: bool
) -> None:
    path = tmp_path_factory.mktemp("records") / "a.h5"
    records = [
        Record(
            RecordId(0, i),
            {"x": np.full((i, 200 if wide else 1), float(i))},
            {"state": np.arange(i, dtype=np.uint8)},
            {"text": str(i), "mixed": i / 2 if i % 3 else i},
        )
        for i in (0, 2, 3, 5, 6, 7, 10)
    ]
    write_records(path, records)
    wanted = [record for record in records if record.identity.sample in chosen]
    found = list(RecordFileReader([path], chosen))
    assert len(found) == len(wanted)
    assert all(equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_the_latest_attempt_of_a_sample_is_read(tmp_path: Path) -> None:
    for rank, attempt in ((0, 0), (1, 1)):
        writer = RecordFileWriter(tmp_path, "t", rank)
        writer.put(Record(RecordId(0, 5, attempt), info={"attempt": attempt}))
        writer.close()
    assert [r.info["attempt"] for r in RecordFileReader(tmp_path.glob("*.h5"))] == [1]


def test_records_of_one_channel_have_one_schema(tmp_path: Path) -> None:
    records = [Record(RecordId(0, 0), {"a": np.ones(2)}), Record(RecordId(0, 1), {"b": np.ones(2)})]
    with pytest.raises(ValueError, match="one schema"):
        write_records(tmp_path / "a.h5", records)


def test_steps_have_one_length() -> None:
    with pytest.raises(ValueError, match="one length"):
        Record(RecordId(0, 0), {"a": np.ones(2), "b": np.ones(3)})


def test_a_file_that_is_no_channel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(b"not hdf5")
    with pytest.raises(ValueError, match="not a readable HDF5"):
        read_records(path)


def test_nothing_is_put_after_the_end_and_nothing_read_beyond_it(tmp_path: Path) -> None:
    writer = RecordFileWriter(tmp_path, "t")
    for i, n in enumerate([4, 4, 9]):
        writer.put(Record(RecordId(0, i), {"x": np.zeros(n)}))
    writer.close()
    with pytest.raises(ChannelClosed):
        writer.put(Record(RecordId(0, 9), {"x": np.zeros(1)}))
    reader = RecordFileReader(tmp_path.glob("*.h5"))
    assert [r.identity.sample for r in reader] == [0, 1, 2]
    with pytest.raises(ChannelClosed):
        reader.get()


@pytest.mark.parametrize("limit", [0, 96, 4000, 16000])
def test_a_file_that_grows_too_large_is_an_error_and_no_crash(tmp_path: Path, limit: int) -> None:
    body = f"""
import resource, sys
from pathlib import Path
import numpy as np
from rlinf.channels.record_files import write_records
from rlinf.data.record import RecordId, Record
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
records = [Record(RecordId(0, i), {{"x": np.arange(100.0)}}, info={{"s": "x"}}) for i in range(20)]
try:
    write_records(Path(sys.argv[1]), records)
except OSError as error:
    print(error.errno)
"""
    done = subprocess.run(
        [sys.executable, "-c", body, str(tmp_path / "x.h5")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(errno.EFBIG)), done.stderr[-500:]
    assert done.stderr == ""
