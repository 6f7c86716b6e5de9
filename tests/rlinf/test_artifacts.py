"""An output is there whole or not at all, and damage is seen."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.artifacts import (
    DERIVED_PREFIX,
    MANIFEST,
    SCHEMA_WITHOUT_CHECKSUM,
    FileEntry,
    Manifest,
    commit_output,
    content_digest,
    describe_files,
    is_pruned,
    prune_output,
    read_manifest,
    remove_uncommitted,
    verify_output,
    withdraw_manifest,
    write_atomic,
)
from rlinf.errors import ArtifactError, ConflictingOutputError
from rlinf.verified_io import read_bytes


def make(out: Path, attempt: str = "a", text: str = "content", key: str = "k") -> Manifest:
    data = out / f"data-{attempt}"
    data.mkdir(parents=True)
    (data / "file.bin").write_text(text)
    files = describe_files(data)
    return Manifest(
        stage="rollout",
        iteration=0,
        key=key,
        content=content_digest(files, {}),
        data=data.name,
        files=files,
        inputs={},
        metrics={},
        timing={"start": 0, "end": 1, "spans": []},
        host="h",
        job="",
    )


def test_nothing_is_there_before_the_commit(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    assert read_manifest(tmp_path) is None
    commit_output(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_the_first_of_two_attempts_wins_and_the_other_is_removed(tmp_path: Path) -> None:
    first, second = make(tmp_path, "a"), make(tmp_path, "b")
    commit_output(tmp_path, first)
    assert commit_output(tmp_path, second) == first
    assert not (tmp_path / second.data).exists()


def test_a_result_of_other_work_is_never_replaced(tmp_path: Path) -> None:
    old = commit_output(tmp_path, make(tmp_path, "a", key="old"))
    with pytest.raises(ConflictingOutputError, match="of another configuration or of other code"):
        commit_output(tmp_path, make(tmp_path, "b", key="new"))
    assert read_manifest(tmp_path) == old
    verify_output(tmp_path, old, checksums=True)


def test_a_damaged_winner_is_replaced(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b"\xff\x00")
    assert commit_output(tmp_path, make(tmp_path)) == read_manifest(tmp_path)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_seen(tmp_path: Path, damage: str) -> None:
    manifest = commit_output(tmp_path, make(tmp_path))
    path = tmp_path / manifest.data / "file.bin"
    if damage == "flip":
        path.write_text("cOntent")
    elif damage == "truncate":
        path.write_text("con")
    else:
        path.unlink()
    with pytest.raises(ArtifactError) as error:
        verify_output(tmp_path, manifest, checksums=True)
    assert error.value.manifest == tmp_path / MANIFEST
    withdraw_manifest(error.value.manifest)
    assert read_manifest(tmp_path) is None


def test_a_damaged_manifest_is_an_error_not_an_absence(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"stage": ')
    with pytest.raises(ArtifactError, match="damaged manifest"):
        read_manifest(tmp_path)


WRITTEN = Manifest(
    stage="train",
    iteration=3,
    key="k" * 32,
    content=content_digest({"a/b.bin": FileEntry(7, "0" * 32)}, {"loss": 0.5, "samples": 4}),
    data="data-a",
    files={"a/b.bin": FileEntry(7, "0" * 32)},
    inputs={"rewards": "r" * 32},
    metrics={"loss": 0.5, "samples": 4},
    timing={"start": 0.25, "end": 1.5, "spans": [{"name": "load", "start": 0.5, "end": 1.0}]},
    host="node7",
    job="12",
    extra={"ties": {"a": "b"}},
)


@given(st.integers(0, len(WRITTEN.to_json()) - 1), st.integers(1, 255))
def test_any_altered_byte_of_a_manifest_is_noticed(at: int, change: int) -> None:
    raw = bytearray(WRITTEN.to_json().encode())
    assert Manifest.parse(bytes(raw)) == WRITTEN
    raw[at] ^= change
    with pytest.raises(ValueError, match=r"."):
        Manifest.parse(bytes(raw))


@given(st.integers(0, len(WRITTEN.to_json()) - 1))
def test_a_truncated_manifest_is_noticed(length: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        Manifest.parse(WRITTEN.to_json().encode()[:length])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(sorted(asdict(WRITTEN))), JSON)
def test_a_field_of_another_shape_is_an_error_and_never_something_else(
    name: str, value: Any
) -> None:
    """As a program that went wrong might write it, without a checksum."""
    whole = {**asdict(WRITTEN), "schema": SCHEMA_WITHOUT_CHECKSUM, name: value}
    with contextlib.suppress(ValueError):
        assert asdict(Manifest.parse(json.dumps(whole).encode())) == whole


def test_a_manifest_without_its_checksum_is_read_only_as_an_old_one() -> None:
    raw = json.dumps({**asdict(WRITTEN), "schema": SCHEMA_WITHOUT_CHECKSUM}).encode()
    assert Manifest.parse(raw).key == WRITTEN.key
    with pytest.raises(ValueError, match="checksum is missing"):
        Manifest.parse(json.dumps(asdict(WRITTEN)).encode())


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"", b"[]", b"null", b"[" * 100_000, b"{}"])
def test_what_is_no_manifest_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(raw)
    with pytest.raises(ArtifactError, match=r"manifest\.json: damaged manifest \(") as error:
        read_manifest(tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_partial_work_is_swept_and_the_commit_kept(tmp_path: Path) -> None:
    manifest = commit_output(tmp_path, make(tmp_path))
    (tmp_path / "data-dead").mkdir()
    remove_uncommitted(tmp_path, {manifest.data})
    assert [p.name for p in tmp_path.glob("data-*")] == [manifest.data]


def test_pruning_keeps_the_manifest(tmp_path: Path) -> None:
    manifest = commit_output(tmp_path, make(tmp_path))
    prune_output(tmp_path)
    assert is_pruned(tmp_path)
    assert read_manifest(tmp_path) == manifest
    with pytest.raises(ArtifactError, match="retention policy"):
        verify_output(tmp_path, manifest, checksums=False)


def test_equal_content_has_an_equal_digest(tmp_path: Path) -> None:
    same = make(tmp_path / "x", "one").content == make(tmp_path / "y", "two").content
    assert same
    assert make(tmp_path / "z", text="other").content != make(tmp_path / "w").content


def test_an_atomic_write_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, "one")
    write_atomic(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_is_derived_from_an_output_is_no_part_of_its_content_and_may_be_lost(
    tmp_path: Path,
) -> None:
    plain = make(tmp_path / "plain", "p")
    data = tmp_path / "out" / "data-a"
    (data / DERIVED_PREFIX).mkdir(parents=True)
    (data / "file.bin").write_text("content")
    (data / DERIVED_PREFIX / "short.bin").write_text("short")
    files = describe_files(data)
    manifest = replace(plain, data=data.name, files=files)
    assert content_digest(files, {}) == plain.content
    commit_output(tmp_path / "out", manifest)
    path = data / DERIVED_PREFIX / "short.bin"
    assert read_bytes(path) == b"short"
    path.write_text("shorn")
    with pytest.raises(ArtifactError, match="checksum differs"):
        read_bytes(path)
    path.unlink()
    verify_output(tmp_path / "out", manifest, checksums=True)
    (data / "file.bin").unlink()
    with pytest.raises(ArtifactError, match="missing"):
        verify_output(tmp_path / "out", manifest, checksums=False)
