"""Files of a model folder lie in it, or in the cache it is part of, and are its owner's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlinf.errors import DataError
from rlinf.models.published_folder import check_links


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_files_and_links_inside_the_folder_are_fine(model: Path) -> None:
    (model / "copy.safetensors").symlink_to("model.safetensors")
    check_links(model)


def test_links_of_a_hugging_face_cache_are_fine(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x--y/blobs", tmp_path / "models--x--y/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "123").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    check_links(snapshot)
    (tmp_path / "named").symlink_to(snapshot)
    check_links(tmp_path / "named")


def test_a_link_out_of_the_folder_is_refused_with_what_to_do(tmp_path: Path, model: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"weights")
    (model / "more.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"more\.safetensors is a link that leads out.*cp -L"):
        check_links(model)


def test_a_link_to_nothing_is_refused(model: Path) -> None:
    (model / "more.safetensors").symlink_to("gone")
    with pytest.raises(DataError, match="which is not there"):
        check_links(model)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_link_to_another_users_file_is_refused(model: Path) -> None:
    (model / "theirs").write_bytes(b"weights")
    os.chown(model / "theirs", 12345, 12345)
    (model / "more.safetensors").symlink_to("theirs")
    with pytest.raises(DataError, match="belongs to another user"):
        check_links(model)
