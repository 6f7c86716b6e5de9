"""Shared memory: only this user's is opened, and nothing is left behind."""

from __future__ import annotations

import os

import pytest

from rlinf.errors import InputError, StorageError
from rlinf.shared_memory import (
    SHM_FOLDER,
    attach_segment,
    create_segment,
    new_segment_name,
    remove_segment,
)


def test_too_little_shared_memory_is_said() -> None:
    before = set(SHM_FOLDER.iterdir())
    with pytest.raises(StorageError, match="no segment of"):
        create_segment(new_segment_name(), 1 << 45)
    assert set(SHM_FOLDER.glob("rlinf-*")) <= before


@pytest.mark.parametrize("name", ["../etc/passwd", "rlinf-x", "", "/dev/shm/x"])
def test_other_names_are_not_opened(name: str) -> None:
    with pytest.raises(InputError, match="no name of shared memory"):
        attach_segment(name)


def test_memory_that_others_may_read_is_refused() -> None:
    name = new_segment_name()
    create_segment(name, 4096)
    (SHM_FOLDER / name).chmod(0o644)
    try:
        with pytest.raises(InputError, match="other users can access"):
            attach_segment(name)
    finally:
        remove_segment(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_memory_of_another_user_is_refused() -> None:
    name = new_segment_name()
    create_segment(name, 4096)
    os.chown(SHM_FOLDER / name, 12345, 12345)
    try:
        with pytest.raises(InputError, match="other users can access"):
            attach_segment(name)
    finally:
        remove_segment(name)
