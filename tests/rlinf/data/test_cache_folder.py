"""The cache folder is private, and its files do not grow without end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlinf.data import cache_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/rlinf/rows"


def test_only_the_user_can_open_the_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert cache_folder.private_folder() == cache
    assert cache.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        cache_folder.private_folder()


def test_files_that_are_too_old_or_too_large_together_are_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache_folder.private_folder()

    def add(name: str, age_s: float) -> Path:
        path = folder / name
        path.write_bytes(bytes(1000))
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))
        cache_folder.remove_old_files(folder, path)
        return path

    old, left, used = add("old", 40 * 86400), add("left", 3600), add("used", 0)
    assert old not in folder.iterdir()
    partial = add(".partial-of-a-process-that-is-writing", 1800)
    monkeypatch.setattr(cache_folder, "MAX_CACHE_BYTES", 2000)
    newest = add("newest", 0)
    assert {*folder.iterdir()} == {used, newest, partial}
    assert left not in folder.iterdir()
    os.utime(partial, (0, 0))
    cache_folder.remove_old_files(folder, newest)
    assert {*folder.iterdir()} == {used, newest}
