"""What is used of a committed file is what was checked, whenever it is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlinf import verified_io
from rlinf.artifacts import (
    Manifest,
    commit_output,
    content_digest,
    describe_files,
    withdraw_manifest,
)
from rlinf.channels.record_files import read_records, write_records
from rlinf.data.record import Record, RecordId
from rlinf.errors import ArtifactError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.safetensors_io import SafetensorsReader, load_tensors
from rlinf.trainers import sharded_checkpoint
from rlinf.verified_io import copy_file, read_bytes, verified_temporary_copy
from stages.runner import withdraw_on_damage

STATE = {"a": torch.arange(6.0).view(2, 3), "s": torch.tensor(3.0), "b": torch.ones(9).bfloat16()}
MODEL = CausalLMConfig(hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8)
NET = {"observation": 2, "action": {"kind": "discrete", "size": 2}}


def committed(out: Path, write: Callable[[Path], None], attempt: str = "a") -> Path:
    """Data folder of an output."""
    data = out / f"data-{attempt}"
    data.mkdir(parents=True)
    write(data)
    files = describe_files(data)
    timing = {"start": 0, "end": 1, "spans": []}
    content = content_digest(files, {})
    one = Manifest("sync", 0, "k", content, data.name, files, {}, {}, timing, "h", "")
    commit_output(out, one)
    return data


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def write_records_to(folder: Path) -> None:
    records = [Record(RecordId(0, n, 0), {"actions": np.arange(5)}) for n in range(3)]
    write_records(folder / "file", records)


READERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "text": (lambda f: (f / "file").write_bytes(b"x" * 99), lambda f: read_bytes(f / "file"), ""),
    "tensors": (
        lambda f: save_file(STATE, f / "file"),
        lambda f: load_tensors(f / "file"),
        "",
    ),
    "records": (write_records_to, lambda f: read_records(f / "file"), ""),
    "optimizer": (
        lambda f: sharded_checkpoint.write_shards(f, STATE, 0, 1),
        lambda f: sharded_checkpoint.read_shards(
            f, {name: torch.zeros_like(t) for name, t in STATE.items()}
        ),
        "rank-0-of-1.safetensors",
    ),
    "model": (
        lambda f: CausalLM.create(MODEL, {"alphabet": "ab"}, 0, f),
        lambda f: CausalLM.load(f, MODEL),
        "model.safetensors",
    ),
    "settings": (
        lambda f: CausalLM.create(MODEL, {"alphabet": "ab"}, 0, f),
        lambda f: CausalLM.load(f, MODEL),
        "config.json",
    ),
    "tokenizer": (
        lambda f: CausalLM.create(MODEL, {"alphabet": "ab"}, 0, f),
        lambda f: CausalLM.processor(f, MODEL),
        "tokenizer.json",
    ),
    "actor": (
        lambda f: MLPPolicy.create(MLPConfig(), NET, 0, f),
        lambda f: MLPPolicy.load(f, MLPConfig()),
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("at", [0, -1])
def test_a_file_damaged_after_it_was_looked_at_is_not_used(
    tmp_path: Path, name: str, at: int
) -> None:
    write, read, file = READERS[name]
    folder = committed(tmp_path, write)  # type: ignore[arg-type]
    read(folder)
    flip(folder / (file or "file"), at)
    with pytest.raises(ArtifactError, match="altered") as error:
        read(folder)
    assert error.value.data == folder.name


@pytest.mark.parametrize("name", ["text", "tensors", "records"])
def test_a_file_that_changes_while_it_is_read_is_used_as_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write, read, _ = READERS[name]
    folder = committed(tmp_path, write)  # type: ignore[arg-type]
    finish = verified_io.VerifiedReader.finish

    def late(reader: verified_io.VerifiedReader) -> None:
        finish(reader)
        for at in range(0, (folder / "file").stat().st_size, 7):
            flip(folder / "file", at)

    whole = repr(read(folder))
    monkeypatch.setattr(verified_io.VerifiedReader, "finish", late)
    assert repr(read(folder)) == whole


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"])
def test_a_file_of_another_length_is_damaged(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    folder = committed(tmp_path, lambda f: save_file(STATE, f / "file"))
    (folder / "file").write_bytes(change((folder / "file").read_bytes()))
    with pytest.raises(ArtifactError):
        load_tensors(folder / "file")


def test_a_copy_of_a_damaged_file_is_not_left(tmp_path: Path) -> None:
    folder = committed(tmp_path, lambda f: (f / "a.json").write_text("{}"))
    with verified_temporary_copy(folder, ["a.json"]) as private:
        flip(folder / "a.json", 0)
        assert json.loads((private / "a.json").read_text()) == {}
    assert not private.exists()
    with pytest.raises(ArtifactError):
        copy_file(folder / "a.json", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_what_was_withdrawn_is_not_read(tmp_path: Path) -> None:
    folder = committed(tmp_path, lambda f: (f / "file").write_text("1"))
    withdraw_manifest(tmp_path / "manifest.json", folder.name)
    with pytest.raises(ArtifactError, match="withdrawn"):
        read_bytes(folder / "file")


def test_who_found_damage_late_leaves_what_was_rebuilt_since(tmp_path: Path) -> None:
    first = committed(tmp_path, lambda f: (f / "file").write_text("1"))
    withdraw_manifest(tmp_path / "manifest.json", first.name)
    second = committed(tmp_path, lambda f: (f / "file").write_text("1"), "b")
    assert withdraw_manifest(tmp_path / "manifest.json", first.name) is None
    assert read_bytes(second / "file") == b"1"


def test_files_that_were_never_committed_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "data-mine").mkdir()
    save_file(STATE, tmp_path / "data-mine/file")
    assert load_tensors(tmp_path / "data-mine/file").keys() == STATE.keys()
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "data-mine/nothing")


@pytest.mark.parametrize(
    "foreign",
    [
        b'{"samples": 5}',
        b"[]",
        b"null",
        b'{"files": {}, "data": "data-v1", "schema": 3}',
        b"// a comment\n{}",
    ],
)
def test_the_manifest_of_another_program_says_nothing_and_stays(
    foreign: bytes, tmp_path: Path
) -> None:
    (tmp_path / "data-v1").mkdir()
    (tmp_path / "manifest.json").write_bytes(foreign)
    save_file(STATE, tmp_path / "data-v1/file")
    with withdraw_on_damage():
        assert load_tensors(tmp_path / "data-v1/file").keys() == STATE.keys()
    assert (tmp_path / "manifest.json").read_bytes() == foreign


@pytest.mark.parametrize(
    "damaged",
    [
        lambda raw: raw.replace(b'"stage"', b'"stagd"'),
        lambda raw: raw.replace(b"}", b"]"),
        lambda raw: b"",
        lambda raw: bytes(len(raw)),
        lambda raw: raw[:1],
        lambda raw: raw[:40],
        lambda raw: raw[9:],
        lambda raw: b"\xff" + raw[1:],
    ],
)
def test_a_damaged_manifest_is_withdrawn(damaged: Callable[[bytes], bytes], tmp_path: Path) -> None:
    folder = committed(tmp_path, lambda f: (f / "file").write_text("1"))
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(damaged(manifest.read_bytes()))
    with pytest.raises(ArtifactError, match="damaged manifest"), withdraw_on_damage():
        read_bytes(folder / "file")
    assert not manifest.exists()


@given(
    st.dictionaries(
        st.text(max_size=9),
        st.tuples(
            st.sampled_from(["float32", "bfloat16", "int64", "uint8", "bool", "float8_e4m3fn"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=5,
    ).filter(lambda table: "__metadata__" not in table)
)
def test_tensors_are_those_that_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("t") / "file"
    state = {n: torch.randn(s).to(getattr(torch, d)) for n, (d, s) in table.items()}
    save_file(state, path, metadata={"format": "pt"})
    found, right = load_tensors(path), load_file(path)
    assert SafetensorsReader(path).metadata == {"format": "pt"}
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).tolist() == (
            tensor.reshape(-1).view(torch.uint8).tolist()
        )


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "NO", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_malformed_header_is_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4) if header else b"")
    with pytest.raises(SafetensorError, match="not a safetensors file"):
        load_tensors(path)
