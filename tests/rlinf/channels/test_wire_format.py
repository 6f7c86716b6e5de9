"""Records survive the wire exactly; foreign bytes are refused, never believed."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlinf.channels.wire_format import DTYPES, decode_record, encode_record
from rlinf.data.record import Record, RecordId
from rlinf.errors import DataError

int64 = st.integers(-(2**63), 2**63 - 1)
names = st.text(max_size=8)
arrays = hnp.arrays(
    st.sampled_from(list(DTYPES.values())), hnp.array_shapes(min_dims=1, max_dims=4, min_side=0)
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    length = draw(st.integers(0, 5))
    steps = st.dictionaries(names, arrays.filter(lambda a: len(a) > 0), max_size=3)
    return Record(
        RecordId(draw(int64), draw(int64), draw(int64)),
        {name: np.resize(a, (length, *a.shape[1:])) for name, a in draw(steps).items()},
        draw(st.dictionaries(names, arrays, max_size=3)),
        draw(st.dictionaries(names, st.one_of(int64, st.floats(), st.text()), max_size=4)),
    )


def same(a: Record, b: Record) -> bool:
    return (
        a.identity == b.identity
        and repr(a.info) == repr(b.info)
        and all(
            list(x) == list(y)
            and all(x[k].dtype == y[k].dtype and x[k].shape == y[k].shape for k in x)
            and all(x[k].tobytes() == y[k].tobytes() for k in x)
            for x, y in ((a.steps, b.steps), (a.context, b.context))
        )
    )


@settings(max_examples=60, deadline=None)
@given(records())
def test_records_come_back_as_they_were(record: Record) -> None:
    assert same(decode_record(encode_record(record).to_bytes()), record)


@settings(max_examples=150, deadline=None)
@given(records(), st.data())
def test_a_damaged_block_is_refused_or_another_record(record: Record, data: st.DataObject) -> None:
    block = bytearray(encode_record(record).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    block = block[: data.draw(st.integers(0, len(block)))] + data.draw(st.binary(max_size=9))
    try:
        assert isinstance(decode_record(block), Record)
    except DataError:
        pass


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(block: bytes) -> None:
    with pytest.raises(DataError):
        decode_record(block)


@pytest.mark.parametrize(
    "header",
    [
        ((0, 0, 0), (("x", "|O", (1,)),), (), ()),
        ((0, 0, 0), (("x", "<f8", (-1,)),), (), ()),
        ((0, 0, 0), (("x", "<f8", (2**62, 2**62)),), (), ()),
        ((0, 0, 0), (("x", "<f8", (True,)),), (), ()),
        ((0, 0, 0), (("x", "<f8", ()),), (), ()),
        ((0, 0, 0), (("x", "|u1", (0,)), ("x", "|u1", (0,))), (), ()),
        ((0, 0, 0), (("x", "|u1", (0,)), ("y", "|u1", (0, 0))), (), (("k", None),)),
        ((0, 0, 0.5), (), (), ()),
        ((0, 0, 0), (), (), (("k", b"bytes"),)),
        ((0, 0, 0), {}, (), (msgpack.ExtType(1, b""),)),
        ((0, 0, 0), (), ((("x",), "|u1", (0,)),), ()),
        ((0, 0), (), (), ()),
        7,
    ],
)
def test_a_header_that_lies_is_refused(header: object) -> None:
    packed = msgpack.packb(header)
    with pytest.raises(DataError, match="malformed"):
        decode_record(len(packed).to_bytes(4, "little") + packed)


def test_views_are_read_only_and_not_copied() -> None:
    block = encode_record(Record(RecordId(0, 0), {"x": np.arange(9.0)})).to_bytes()
    array = decode_record(block).steps["x"]
    assert np.shares_memory(array, np.frombuffer(block, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_arrays_of_any_layout_are_sent_by_value() -> None:
    turned = np.arange(12, dtype=">i4").reshape(3, 4).T
    back = decode_record(
        encode_record(Record(RecordId(0, 0), context={"x": turned})).to_bytes()
    ).context["x"]
    assert back.dtype == np.dtype("<i4")
    assert np.array_equal(back, turned)


@pytest.mark.parametrize(
    "record",
    [
        Record(RecordId(0, 0), context={"x": np.array([object()])}),
        Record(RecordId(0, 0), info={"x": None}),  # type: ignore[dict-item]
        Record(RecordId(0, 0), info={"x": 2**70}),
        Record(RecordId(0, 0), info={"x": "\ud800"}),
        Record(RecordId(0, 2**64)),
        Record(RecordId(0, 0), info={"x": "y" * (1 << 20)}),
    ],
)
def test_what_cannot_travel_is_refused_by_the_sender(record: Record) -> None:
    with pytest.raises(DataError, match="record"):
        encode_record(record)
