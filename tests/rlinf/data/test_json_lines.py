"""Rows of a file that are read when they are used: as if all were read, in little memory."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data import json_lines
from rlinf.data.json_lines import JsonLinesFile, count_overlap
from rlinf.errors import DataError, ResourceError


def item_of(where: str, item: dict[str, Any]) -> dict[str, Any]:
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


def test_a_malformed_row_is_refused_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": row} for row in range(30)])
    lines = path.read_text().splitlines()
    lines[16] = '{"a": '
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"^task\.train: .*a\.jsonl, line 17: not JSON"):
        rows_of(path).check_rows()
    assert rows_of(path)[15] == {"a": 15}, "other rows can be read"
    lines[16] = '{"bad": 1}'
    path.write_text("\n\n".join(lines))
    with pytest.raises(DataError, match="line 33: bad"):
        rows_of(path).check_rows()
    with pytest.raises(DataError, match="line 33: bad"):
        rows_of(path)[16]


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


def test_a_file_that_changes_while_it_is_checked_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": row} for row in range(3)])

    def parse(where: str, item: dict[str, Any]) -> dict[str, Any]:
        if item == {"a": 2}:
            with path.open("a") as file:
                file.write('{"a": 3}\n')
        return item

    rows = JsonLinesFile(path, "task.train", parse)
    for _ in range(2):
        with pytest.raises(DataError, match="changed while it was in use"):
            rows.check_rows()


def test_all_rows_of_a_file_are_checked_once(tmp_path: Path) -> None:
    parsed = list[dict[str, Any]]()

    def parse(where: str, item: dict[str, Any]) -> dict[str, Any]:
        parsed.append(item)
        return item

    rows = [{"a": row} for row in range(9)]
    path = write(tmp_path / "a.jsonl", rows[:8])
    assert len(JsonLinesFile(path, "task.train", parse)) == 8
    assert parsed == [], "opening a file parses nothing"
    first = JsonLinesFile(path, "task.train", parse).digests
    again = JsonLinesFile(path, "task.train", parse)[3:].digests
    assert parsed == rows[:8]
    assert again.tolist() == first[3:].tolist()
    JsonLinesFile(path, "task.train", parse, settings="others").check_rows()
    write(path, rows)
    assert len(JsonLinesFile(path, "task.train", parse).digests) == 9
    assert len(parsed) == 8 + 8 + 9, "other settings, and then other bytes"


@pytest.mark.parametrize("block", [2, 7, 64, 1 << 20])
def test_lines_are_found_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", block)
    lines = ["", '{"a": "é"}', "  ", ' {"a": "日本"}', "\t", '{"a": 3}', ""]
    path = tmp_path / "a.jsonl"
    for start, end in itertools.product(["", "\ufeff"], ["", "\n", " \n"]):
        path.write_text(start + "\n".join(lines) + end)
        rows = rows_of(path)
        assert list(rows) == [{"a": "é"}, {"a": "日本"}, {"a": 3}]
        assert len(rows.digests) == 3
        path.unlink()
    path.write_text("\n".join([*lines, '{"bad": 1}']))
    with pytest.raises(DataError, match="line 8: bad"):
        rows_of(path)[3]
    path.write_bytes('{"a": "é"}'.encode() + b"\n\xc3")
    with pytest.raises(DataError, match=r"not UTF-8 text \(byte 12\)"):
        rows_of(path)


def test_a_file_without_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_ROW_BYTES", 100)
    path = write(tmp_path / "a.jsonl", [{"a": "x" * 20}, {"a": "x" * 100}])
    with pytest.raises(DataError, match="line 2: longer than"):
        rows_of(path)


def test_memory_that_has_no_room_is_named_by_the_key(tmp_path: Path) -> None:
    def parse(where: str, item: dict[str, Any]) -> None:
        raise MemoryError

    path = write(tmp_path / "a.jsonl", [{"a": 1}])
    with pytest.raises(ResourceError, match=r"^task\.train: .*no memory left"):
        JsonLinesFile(path, "task.train", parse).check_rows()


def test_rows_in_both_files_are_counted(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"a": row} for row in range(9)])
    test = write(tmp_path / "test.jsonl", [{"a": row} for row in (3, 12, 4, 4)])
    assert count_overlap([rows_of(train)], rows_of(test)) == (3, 4)
    assert count_overlap([rows_of(train)[:4]], rows_of(test)) == (1, 4)
    assert count_overlap([rows_of(train)[:4], rows_of(train)[4:]], rows_of(test)) == (3, 4)
    assert count_overlap([], rows_of(test)) == (0, 4)
