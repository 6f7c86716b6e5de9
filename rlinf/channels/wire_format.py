"""The wire format of records, for sockets and shared memory.

A record is one block: the length of its header (4 bytes, little-endian), the header, and the raw
little-endian arrays, each at a multiple of 64 bytes. The header is a msgpack list of four: the
record's id; name, dtype and shape of each step array; the same of each context array; names and
values of the scalars. Received bytes are validated before use (types, names, sizes, counts);
nothing is unpickled or executed.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from rlinf.data.record import Record, RecordId, Scalar
from rlinf.errors import DataError

ALIGN_BYTES = 64
MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 16
MAX_ARRAYS = 4096
_KINDS = ["?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"]
DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in _KINDS}
"""The element types that can be sent."""


class EncodedRecord:
    """A record that is ready to be sent: its packed header, and its arrays.

    Only arrays that are not contiguous are copied. ``size`` is the number of bytes of the block,
    ``header_size`` that of its header.
    """

    __slots__ = ("_pieces", "header_size", "size")

    def __init__(self, record: Record) -> None:
        arrays: list[np.ndarray] = []
        for name, value in record.info.items():
            if not isinstance(value, float | int | str):
                raise TypeError(f"scalar {name!r} is a {type(value).__name__}")
        header = msgpack.packb(
            (
                record.identity,
                [_describe(name, array, arrays) for name, array in record.steps.items()],
                [_describe(name, array, arrays) for name, array in record.context.items()],
                list(record.info.items()),
            )
        )
        self.header_size = len(header)
        self._pieces: list[Any] = [len(header).to_bytes(4, "little"), header]
        """The bytes of the block, one piece after another: bytes or arrays."""
        end = 4 + len(header)
        for array in arrays:
            start = _aligned(end)
            self._pieces += [bytes(start - end), array]
            end = start + array.nbytes
        self.size = end

    def to_bytes(self) -> bytes:
        """Return the block; gaps between arrays are zero."""
        return b"".join(self._pieces)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes of the block from ``start`` to ``stop - 1``, as views of the record."""
        views, position = [], 0
        for piece in self._pieces:
            data = np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else piece
            data = data.reshape(-1).view(np.uint8)
            view = data[max(0, start - position) : max(0, stop - position)].data
            if len(view):
                views.append(view)
            position += len(data)
        return views


def encode_record(record: Record) -> EncodedRecord:
    """Prepare a record for the wire.

    Raises:
        DataError: an array's element type is not in :data:`DTYPES`, a scalar is neither a number
            nor a string, or the header is larger than ``MAX_HEADER_BYTES``.
    """
    try:
        encoded = EncodedRecord(record)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"record {tuple(record.identity)} cannot be sent: {error}; "
            "records carry numeric arrays, 64-bit numbers and text"
        ) from None
    if encoded.header_size > MAX_HEADER_BYTES:
        raise DataError(
            f"record {tuple(record.identity)}: names and scalars take {encoded.header_size} "
            f"bytes, at most {MAX_HEADER_BYTES} are sent; put long text in an array"
        )
    return encoded


def decode_record(block: memoryview | bytes | bytearray) -> Record:
    """Return the record of a block; its arrays are read-only views of ``block``.

    Misaligned arrays are copied.

    Raises:
        DataError: the block was not written by :func:`encode_record`.
    """
    try:
        return _decode(memoryview(block).toreadonly())
    except DataError:
        raise
    except Exception as error:  # foreign bytes may cause any error
        raise DataError(f"malformed record: {error}") from None


def _decode(data: memoryview) -> Record:
    _check(len(data) >= 4, "no header")
    end = 4 + int.from_bytes(data[:4], "little")
    _check(end <= min(len(data), MAX_HEADER_BYTES + 4), "header longer than the block")
    header = msgpack.unpackb(data[4:end], use_list=False, raw=False, ext_hook=_no_extension)
    _check(_is_tuple(header, 4), "header is no list of four")
    identity, steps, context, info = header
    _check(_is_tuple(identity, 3) and all(type(i) is int for i in identity), "bad identity")
    _check(len(steps) + len(context) <= MAX_ARRAYS, "too many arrays")
    groups: list[dict[str, np.ndarray]] = []
    for descriptions in (steps, context):
        group: dict[str, np.ndarray] = {}
        for name, dtype_name, shape in descriptions:
            _check(type(name) is str and name not in group, "bad or repeated name")
            dtype = DTYPES[dtype_name]
            _check(_is_tuple(shape) and len(shape) <= MAX_DIMENSIONS, "bad shape")
            _check(all(type(n) is int and n >= 0 for n in shape), "bad shape")
            start, count = _aligned(end), math.prod(shape)
            end = start + count * dtype.itemsize
            if end > len(data):
                raise DataError(f"malformed record: array {name[:40]!r} longer than the block")
            array = np.frombuffer(data, dtype, count, start).reshape(shape)
            group[name] = array if array.flags.aligned else array.copy()
        groups.append(group)
    _check(end == len(data), "bytes left over")
    scalars: dict[str, Scalar] = {}
    for name, value in info:
        _check(type(name) is str and name not in scalars, "bad or repeated name")
        _check(isinstance(value, float | int | str), "bad scalar")
        scalars[name] = value
    return Record(RecordId(*identity), groups[0], groups[1], scalars)


def _describe(name: str, array: np.ndarray, arrays: list[np.ndarray]) -> tuple[Any, ...]:
    """Append a contiguous little-endian array to ``arrays``; return its name, dtype and shape."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.dtype.str not in DTYPES:
        raise TypeError(f"array {name!r} has element type {array.dtype}")
    arrays.append(np.ascontiguousarray(array))
    return (name, array.dtype.str, array.shape)


def _aligned(position: int) -> int:
    """Return the position, rounded up to a multiple of ``ALIGN_BYTES``."""
    return -(-position // ALIGN_BYTES) * ALIGN_BYTES


def _is_tuple(value: Any, length: int | None = None) -> bool:
    return type(value) is tuple and (length is None or len(value) == length)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise DataError(f"malformed record: {message}")


def _no_extension(code: int, data: bytes) -> Any:
    raise DataError(f"malformed record: extension type {code}")
