"""Rows of a file that are read when they are used: as if all were read, in little memory."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data import array_cache, json_lines
from rlinf.data.json_lines import JsonLinesFile, count_overlap
from rlinf.errors import DataError, ResourceError


def item_of(where: str, item: dict[str, Any], flags: np.ndarray) -> dict[str, Any]:
    if "bad" in item:
        raise DataError(f"{where}: bad")
    return item


def rows_of(path: Path, **options: Any) -> JsonLinesFile[dict[str, Any]]:
    return JsonLinesFile(path, "task.train", item_of, **options)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers())),
    blank=st.lists(st.sampled_from(["", " ", "\t"]), max_size=3),
    end=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
    plain=st.booleans(),
)
def test_rows_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    blank: list[str],
    end: str,
    bom: bool,
    plain: bool,
) -> None:
    rows = [{"a": 1}, *(row for row in rows if "bad" not in row)]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=plain) for row in rows]
    text = end.join([*blank, *lines, *blank])
    path.write_bytes(text.encode("utf-8-sig" if bom else "utf-8", errors="surrogatepass"))
    if "\\ud" in json.dumps(rows) and not plain:
        return  # half of a surrogate pair is no text
    found = rows_of(path)
    assert list(found) == rows
    assert [found[-1], len(found)] == [rows[-1], len(rows)]
    assert list(found[1:][::2]) == rows[1:][::2]


def test_a_malformed_row_is_refused_by_its_line_before_any_is_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": row} for row in range(30)])
    lines = path.read_text().splitlines()
    lines[16] = '{"a": '
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"^task\.train: .*a\.jsonl, line 17: not JSON"):
        rows_of(path)
    lines[16] = '{"bad": 1}'
    path.write_text("\n\n".join(lines))
    with pytest.raises(DataError, match="line 33: bad"):
        rows_of(path)


def test_a_file_that_changes_while_it_is_used_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": row} for row in range(3)])
    found = rows_of(path)
    assert found[2] == {"a": 2}
    with path.open("a") as file:
        file.write('{"a": 3}\n')
    with pytest.raises(DataError, match="changed while it was in use"):
        found[2]


def test_a_file_whose_bytes_stay_may_get_another_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": row} for row in range(3)])
    found = rows_of(path)
    view = found[1:]
    os.utime(path, ns=(1, 1))
    assert [found[2], view[0]] == [{"a": 2}, {"a": 1}]
    path.write_bytes(path.read_bytes().replace(b"2", b"3"))
    os.utime(path, ns=(2, 2))
    for rows in (found, view):
        with pytest.raises(DataError, match="changed while it was in use"):
            rows[0]


def test_a_file_that_changes_while_it_is_build_index_is_refused(
    tmp_path: Path, cache: Path
) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": row} for row in range(3)])

    def add(item: dict[str, Any], flags: np.ndarray) -> None:
        if item == {"a": 2}:
            with path.open("a") as file:
                file.write('{"a": 3}\n')

    with pytest.raises(DataError, match="changed while it was in use"):
        rows_of(path, observe=add)
    assert not cache.exists() or not [*cache.iterdir()]


def test_a_file_without_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_ROW_BYTES", 100)
    path = write(tmp_path / "a.jsonl", [{"a": "x" * 20}, {"a": "x" * 100}])
    with pytest.raises(DataError, match="line 2: longer than"):
        rows_of(path)


def test_memory_that_has_no_room_is_named_by_the_key(tmp_path: Path) -> None:
    def parse(where: str, item: dict[str, Any], flags: np.ndarray) -> None:
        raise MemoryError

    path = write(tmp_path / "a.jsonl", [{"a": 1}])
    with pytest.raises(ResourceError, match=r"^task\.train: .*no memory left"):
        JsonLinesFile(path, "task.train", parse)


def test_rows_in_both_files_are_counted(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"a": row} for row in range(9)])
    test = write(tmp_path / "test.jsonl", [{"a": row} for row in (3, 12, 4, 4)])
    assert count_overlap([rows_of(train)], rows_of(test)) == (3, 4)
    assert count_overlap([rows_of(train)[:4]], rows_of(test)) == (1, 4)
    assert count_overlap([rows_of(train)[:4], rows_of(train)[4:]], rows_of(test)) == (3, 4)
    assert count_overlap([], rows_of(test)) == (0, 4)


DAMAGES: dict[str, Callable[[Path, dict[str, np.ndarray]], object]] = {
    "names": lambda path, arrays: save(path, {"other": arrays["lines"]}),
    "array": lambda path, arrays: path.write_bytes(npy(arrays["lines"])),
    "fewer": lambda path, arrays: save(path, {k: v[:1] for k, v in arrays.items()}),
    "uneven": lambda path, arrays: save(path, {**arrays, "sizes": arrays["sizes"][:3]}),
    "beyond": lambda path, arrays: save(path, {**arrays, "offsets": arrays["offsets"] + 99}),
    "no-rows": lambda path, arrays: save(path, {}),
    "pipe": lambda path, arrays: os.mkfifo(path, 0o600),
}
"""What may lie under the name of an index."""


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(path, **arrays)
    path.chmod(0o600)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, for files of any size, as another process would see it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(json_lines, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(array_cache, "_in_memory", {})
    monkeypatch.setattr(array_cache, "MAX_IN_MEMORY", 0)
    array_cache._warn.cache_clear()
    return tmp_path / "cache/rlinf/rows"


def test_the_index_of_a_large_file_is_made_once(tmp_path: Path, cache: Path) -> None:
    parsed = list[dict[str, Any]]()

    def parse(where: str, item: dict[str, Any], flags: np.ndarray) -> dict[str, Any]:
        parsed.append(item)
        return item

    rows = [{"a": row} for row in range(10)]
    path = write(tmp_path / "a.jsonl", rows[:9])
    JsonLinesFile(path, "task.train", parse)
    assert parsed == rows[:9]
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    parsed.clear()
    again = JsonLinesFile(path, "task.train", parse)
    assert not parsed
    assert list(again) == rows[:9]
    write(path, rows[1:])
    parsed.clear()
    JsonLinesFile(path, "task.train", parse)
    assert parsed == rows[1:], "other bytes"


@pytest.mark.parametrize("damage", ["rubbish", "cut", "folder", *DAMAGES])
def test_a_damaged_cache_is_made_again(tmp_path: Path, cache: Path, damage: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": row} for row in range(9)])
    first = list(rows_of(path))
    (kept,) = cache.iterdir()
    if damage == "rubbish":
        kept.write_bytes(b"PK rubbish")
    elif damage == "cut":
        kept.write_bytes(kept.read_bytes()[:-300])
    elif damage in DAMAGES:
        with np.load(kept) as archive:
            arrays = dict(archive)
        kept.unlink()
        DAMAGES[damage](kept, arrays)
    else:
        kept.unlink()
        kept.mkdir()
    assert list(rows_of(path)) == first


def test_the_index_of_another_file_is_not_believed(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": row} for row in range(9)])
    first = list(rows_of(path))
    (kept,) = cache.iterdir()
    rows_of(write(tmp_path / "b.jsonl", [{"a": 1}]))
    (other,) = set(cache.iterdir()) - {kept}
    other.rename(kept)
    assert list(rows_of(path)) == first


def test_what_others_can_write_is_not_believed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": row} for row in range(9)])
    cache.mkdir(parents=True, mode=0o755)
    cache.chmod(0o777)
    rows_of(path)
    (kept,) = cache.iterdir()
    assert cache.stat().st_mode & 0o077 == 0, "the folder was the user's own"
    kept.chmod(0o666)
    rows_of(path)
    assert kept.stat().st_mode & 0o077 == 0, "made again"
    monkeypatch.setattr(os, "getuid", lambda: kept.stat().st_uid + 1)
    before = kept.stat()
    assert rows_of(path)[8] == {"a": 8}
    assert "belongs to another user" in caplog.text
    assert kept.stat() == before


@pytest.mark.parametrize("case", ["file", "no-home", "full"])
def test_a_cache_that_cannot_be_used_is_said_once(
    case: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*values: Any, **more: Any) -> Any:
        raise RuntimeError("no home") if case == "no-home" else OSError(28, "No space left")

    if case == "file":
        (tmp_path / "cache").write_text("")
    elif case == "no-home":
        monkeypatch.setattr(Path, "expanduser", fail)
    else:
        monkeypatch.setattr(np, "savez", fail)
    for count in (3, 4):
        rows = [{"a": row} for row in range(count)]
        if case == "no-home":
            assert array_cache.cached_arrays("a", str(count), dict, use_file=True) == {}
        else:
            assert list(rows_of(write(tmp_path / "a.jsonl", rows))) == rows
    assert caplog.text.count("cannot be used") == 1
    assert not cache.is_dir() or not [*cache.iterdir()]


def test_files_that_are_too_old_or_too_large_together_are_removed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(name: str, age_s: float) -> Path:
        known = set(cache.iterdir()) if cache.exists() else set()
        array_cache.cached_arrays("a", name, lambda: {"a": np.zeros(1000)}, use_file=True)
        (made,) = set(cache.iterdir()) - known
        os.utime(made, (made.stat().st_atime, made.stat().st_mtime - age_s))
        return made

    old, used, left = keep("old", 40 * 86400), keep("used", 0), keep("left", 3600)
    assert set(cache.iterdir()) == {used, left}
    partial = cache / ".partial-of-a-process-that-was-killed"
    partial.write_text("")
    os.utime(partial, (0, 0))
    monkeypatch.setattr(array_cache, "MAX_CACHE_BYTES", 2 * used.stat().st_size)
    newest = keep("newest", 0)
    assert set(cache.iterdir()) == {used, newest}
    os.utime(used, (0, 0))
    array_cache.cached_arrays("a", "used", lambda: pytest.fail("it is there"), use_file=True)
    assert used.stat().st_mtime > 1e9, "a use counts"
    assert not old.exists()
