"""Safetensors files: rows of a tensor alone, and what is written as it comes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.safetensors_io import DTYPES, SafetensorsReader, StreamedState, save_tensors

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES), max_size=6)
)
def test_what_is_written_as_it_comes_has_the_bytes_of_the_formats_own_writer(
    kinds: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    kinds.pop("__metadata__", None)
    tensors = {
        name: torch.randint(2, shape).to(torch.uint8).to(dtype)
        for name, (dtype, shape) in kinds.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder) / "one", Path(folder) / "other"
        save_file(tensors, one, metadata={"format": "pt"})
        like = {name: tensor.to("meta") for name, tensor in tensors.items()}
        # In another order than that of the file.
        state = StreamedState(like, iter(reversed(tensors.items())))
        save_tensors(other, state, list(tensors), {"format": "pt"})
        assert one.read_bytes() == other.read_bytes()


def test_tied_tensors_come_once_and_are_written_under_each_wanted_name(tmp_path: Path) -> None:
    one, two = torch.rand(3, 2), torch.rand(4)
    like = {"a": one.to("meta"), "c": two.to("meta")}
    like["b"] = like["a"]
    save_tensors(
        tmp_path / "f", StreamedState(like, iter({"a": one, "c": two}.items())), ["a", "b"], {}
    )
    found = load_file(tmp_path / "f")
    assert found.keys() == {"a", "b"}
    assert all(torch.equal(tensor, one) for tensor in found.values())
    whole = StreamedState(like, iter({"a": one, "c": two}.items())).collect()
    assert whole["a"] is whole["b"] is one
    assert whole["c"] is two


def test_no_tensor_that_is_drained_is_copied_to_the_host() -> None:
    gathered, copied = iter([(name, torch.zeros(1)) for name in "abc"]), list[str]()

    def on_host() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in gathered:
            copied.append(name)
            yield name, tensor.cpu()

    state = StreamedState({}, on_host(), gathered)
    assert next(state.stream)[0] == "a"
    state.drain()
    assert (copied, list(gathered)) == (["a"], [])


def test_a_tensor_that_never_comes_is_an_error(tmp_path: Path) -> None:
    like = {"a": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(ValueError, match="1 tensors never came"):
        save_tensors(tmp_path / "f", StreamedState(like, iter([("a", like["a"])])), list(like), {})


@given(st.integers(1, 7), st.data())
def test_rows_of_a_file_are_those_of_its_tensors(rows: int, data: st.DataObject) -> None:
    tensors: dict[str, Tensor] = {
        "a": torch.rand(rows, 3),
        "b": torch.rand(rows, 2).bfloat16(),
        "c": torch.tensor(2.0),
        "d": torch.rand(rows),
    }
    wanted = {}
    for name in data.draw(st.sets(st.sampled_from("abcd"))):
        begin = data.draw(st.integers(0, rows))
        wanted[name] = (begin, data.draw(st.integers(begin, rows)))
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "f")
        found = dict(SafetensorsReader(Path(folder) / "f").tensors(wanted))
    assert found.keys() == wanted.keys()
    for name, (begin, end) in wanted.items():
        right = tensors[name]
        assert torch.equal(found[name], right[begin:end] if right.dim() else right)


def test_a_tensor_of_another_type_than_was_said_is_no_file(tmp_path: Path) -> None:
    """Its bytes would be read as those of the type in the header."""
    like = {"a": torch.empty(3, device="meta")}
    came = StreamedState(like, iter([("a", torch.zeros(3, dtype=torch.bfloat16))]))
    with pytest.raises(ValueError, match=r"a came as torch\.bfloat16 \(3,\)"):
        save_tensors(tmp_path / "f", came, ["a"], {})
