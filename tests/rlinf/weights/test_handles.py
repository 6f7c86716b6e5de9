"""What names memory of a GPU is checked as bytes of a stranger before CUDA sees it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.errors import TransferError
from rlinf.weights import handles
from rlinf.weights.handles import Exported, Handle

ABSENT = "00000000-1111-2222-3333-444444444444"
HANDLES = st.builds(
    Handle,
    st.text(),
    st.binary(min_size=1),
    st.integers(0, (1 << 62) - 1),
    st.integers(1, (1 << 62) - 1),
)


def text_of(fields: dict[str, Any]) -> str:
    """Fields with the checksum that is right for them: only what they are can be wrong."""
    return json.dumps(fields | {"sum": handles._sum(fields)})


@given(HANDLES)
def test_a_handle_survives_as_text(handle: Handle) -> None:
    assert Handle.from_json(handle.to_json().encode()) == handle


@given(st.data(), HANDLES)
def test_no_damage_leads_to_another_place(data: st.DataObject, handle: Handle) -> None:
    text = bytearray(handle.to_json().encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] = data.draw(st.integers(0, 255))
    with suppress(TransferError):
        assert Handle.from_json(bytes(text)) == handle


@pytest.mark.parametrize("length", [0, 1, 40])
def test_half_a_handle_is_refused(length: int) -> None:
    text = Handle(ABSENT, b"memory", 0, 64).to_json()
    with pytest.raises(TransferError, match="damaged handle"):
        Handle.from_json(text[:length])


@pytest.mark.parametrize("text", ["7", "[]", "null", "{}", '"text"', "[" * 100_000, b"\xff"])
def test_what_is_no_handle_is_refused(text: str | bytes) -> None:
    with pytest.raises(TransferError, match="damaged handle"):
        Handle.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": 0},
        {"device": None},
        {"allocation": ""},
        {"allocation": "xy"},
        {"allocation": "abc"},
        {"allocation": 7},
        {"offset": -1},
        {"offset": 1 << 63},
        {"offset": 1.0},
        {"offset": True},
        {"offset": "0"},
        {"nbytes": 0},
        {"nbytes": -64},
        {"nbytes": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_field_of_another_kind_is_refused(wrong: dict[str, Any]) -> None:
    right = {"device": ABSENT, "allocation": b"memory".hex(), "offset": 512, "nbytes": 64}
    assert Handle.from_json(text_of(right)) == Handle(ABSENT, b"memory", 512, 64)
    with pytest.raises(TransferError, match="damaged handle"):
        Handle.from_json(text_of(right | wrong))


@pytest.mark.parametrize("field", ["device", "allocation", "offset", "nbytes"])
def test_a_missing_field_is_refused(field: str) -> None:
    fields = {"device": ABSENT, "allocation": b"memory".hex(), "offset": 512, "nbytes": 64}
    del fields[field]
    with pytest.raises(TransferError, match="damaged handle"):
        Handle.from_json(text_of(fields))


def test_who_does_not_see_the_gpu_is_told_what_to_do() -> None:
    with pytest.raises(TransferError, match=f"GPU '{ABSENT}'; this process sees .*Slurm hides"):
        Handle(ABSENT, b"memory", 0, 64).open()


@pytest.mark.parametrize("device", ["cuda:99", "meta"])
def test_memory_of_no_gpu_is_not_exported(device: str) -> None:
    with pytest.raises(TransferError, match=f"64 bytes of memory on {device} that can be shared"):
        Exported(64, torch.device(device))
