"""An output is there whole or not at all, and damage is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.artifacts import (
    MANIFEST,
    Manifest,
    attempt_folder,
    commit,
    content_digest,
    describe_files,
    is_pruned,
    prune,
    quarantine,
    read_manifest,
    sweep,
    verify,
    write_atomic,
)
from rlinf.errors import ArtifactError


def make(out: Path, attempt: str = "a", text: str = "content", key: str = "k") -> Manifest:
    with attempt_folder(out, attempt) as data:
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
    commit(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_the_first_of_two_attempts_wins_and_the_other_is_removed(tmp_path: Path) -> None:
    first, second = make(tmp_path, "a"), make(tmp_path, "b")
    commit(tmp_path, first)
    assert commit(tmp_path, second) == first
    assert not (tmp_path / second.data).exists()


def test_an_output_of_other_work_is_replaced(tmp_path: Path) -> None:
    commit(tmp_path, make(tmp_path, "a", key="old"))
    assert commit(tmp_path, make(tmp_path, "b", key="new")).key == "new"
    found = read_manifest(tmp_path)
    assert found is not None
    assert found.key == "new"


def test_a_failed_attempt_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), attempt_folder(tmp_path, "a") as data:
        (data / "x").write_text("partial")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_seen(tmp_path: Path, damage: str) -> None:
    manifest = commit(tmp_path, make(tmp_path))
    path = tmp_path / manifest.data / "file.bin"
    if damage == "flip":
        path.write_text("cOntent")
    elif damage == "truncate":
        path.write_text("con")
    else:
        path.unlink()
    with pytest.raises(ArtifactError) as error:
        verify(tmp_path, manifest, checksums=True)
    assert error.value.manifest == tmp_path / MANIFEST
    quarantine(error.value.manifest)
    assert read_manifest(tmp_path) is None


def test_a_damaged_manifest_is_an_error_not_an_absence(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"stage": ')
    with pytest.raises(ArtifactError, match="damaged manifest"):
        read_manifest(tmp_path)


def test_partial_work_is_swept_and_the_commit_kept(tmp_path: Path) -> None:
    manifest = commit(tmp_path, make(tmp_path))
    (tmp_path / "data-dead").mkdir()
    sweep(tmp_path, {manifest.data})
    assert [p.name for p in tmp_path.glob("data-*")] == [manifest.data]


def test_pruning_keeps_the_manifest(tmp_path: Path) -> None:
    manifest = commit(tmp_path, make(tmp_path))
    prune(tmp_path)
    assert is_pruned(tmp_path)
    assert read_manifest(tmp_path) == manifest
    with pytest.raises(ArtifactError, match="retention"):
        verify(tmp_path, manifest, checksums=False)


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
