"""Records: one content, one digest, wherever it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf.channels.record_files import (
    RecordFileReader,
    RecordFileWriter,
    read_records,
    write_records,
)
from rlinf.channels.wire_format import decode_record, encode_record
from rlinf.data.record import Record, RecordId, combine_digests, digest_records


def record(sample: int = 3, **changes: Any) -> Record:
    content: dict[str, Any] = {
        "steps": {"tokens": np.arange(4), "logprobs": np.linspace(-1, 0, 4, dtype=np.float32)},
        "context": {"prompt": np.arange(7)},
        "info": {"answer": "17", "score": 0.1, "group": 2},
    }
    return Record(RecordId(5, sample), **(content | changes))


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    made = [record(sample) for sample in range(6)]
    writer = RecordFileWriter(tmp_path, "trajectories")
    for each in made:
        writer.put(each)
    writer.close()
    read = list(RecordFileReader(tmp_path.glob("*.h5")))
    assert [each.digest() for each in read] == [each.digest() for each in made]
    assert digest_records(reversed(read)) == digest_records(made) != digest_records(made[1:])


@pytest.mark.parametrize(
    "values",
    [
        [True, False],
        [np.bool_(True), 2],
        [np.float64(0.5), np.float64(1)],
        [np.float32(0.1), np.int32(3)],
        [0, 0.5, -(2**63), 1.0],
        [2**53 + 1, 0.5],
        [2**63, 1],
        [2**64 - 1, 0.0],
        [np.str_("a"), "b"],
    ],
)
def test_the_digest_is_that_of_what_was_written_and_sent(values: list[Any], tmp_path: Path) -> None:
    made = [record(sample, info={"value": value}) for sample, value in enumerate(values)]
    write_records(tmp_path / "a.h5", made)
    digests = [each.digest() for each in made]
    assert [each.digest() for each in read_records(tmp_path / "a.h5")] == digests
    assert [decode_record(encode_record(each).to_bytes()).digest() for each in made] == digests


def test_numbers_of_more_than_64_bits_are_refused(tmp_path: Path) -> None:
    made = [record(sample, info={"value": value}) for sample, value in enumerate([2**63, -1])]
    with pytest.raises(ValueError, match=r"'value' .* 64 bits"):
        write_records(tmp_path / "a.h5", made)


def test_another_attempt_with_the_same_content_is_the_same() -> None:
    again = record()
    again.identity = RecordId(5, 3, attempt=1)
    assert again.digest() == record().digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"sample": 4},
        {"steps": {"tokens": np.arange(4)}},
        {"context": {"prompt": np.arange(7, dtype=np.int32)}},
        {"context": {"prompt": np.arange(7)[:, None]}},
        {"context": {"prompt": np.array([0, 1, 2, 3, 4, 5, 7])}},
        {"context": {"prompts": np.arange(7)}},
        {"info": {"answer": "17", "score": 0.1, "group": 3}},
    ],
)
def test_all_else_counts(changes: dict[str, Any]) -> None:
    assert record(**changes).digest() != record().digest()


def test_equal_records_do_not_cancel_in_the_digest_of_many() -> None:
    record = Record(RecordId(0, 1), {"actions": np.arange(3)})
    other = Record(RecordId(0, 2), {"actions": np.arange(3)})
    twice = digest_records([record, record])
    assert twice not in (0, digest_records([]), digest_records([other, other]))
    assert digest_records([record, other]) == digest_records([other, record])
    whole = digest_records([record, other, other])
    assert combine_digests([digest_records([other]), digest_records([record, other])]) == whole
