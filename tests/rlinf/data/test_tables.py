"""Parquet files and saved data sets are read as rows, and refused by row."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rlinf.data import tables
from rlinf.data.cache_folder import cache_folder
from rlinf.envs.jsonl import JsonlConfig, JsonlEnvironment
from rlinf.errors import DataError
from tests.rlinf.envs.test_jsonl import Words

pyarrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")

VERL_ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{i}+{i}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        "extra_info": {"index": i, "split": "train"},
        "picture": b"\x00\xff",
        "day": date(2026, 1, 1),
    }
    for i in range(10)
]
VERL = {
    "prompt_field": "prompt",
    "answer_field": "reward_model.ground_truth",
    "info_fields": ("extra_info.index",),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    return path


def write_saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a folder as ``datasets`` does with ``save_to_disk``, in two files."""
    folder.mkdir()
    table = pyarrow.Table.from_pylist(rows)
    names = []
    for number, part in enumerate((table.slice(0, 4), table.slice(4))):
        names.append(f"data-{number:05d}-of-00002.arrow")
        with (
            pyarrow.OSFile(str(folder / names[-1]), "wb") as file,
            pyarrow.ipc.new_stream(file, part.schema) as stream,
        ):
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize("write", [write_parquet, write_saved])
def test_rows_in_verl_layout_are_problems(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", VERL_ROWS)
    problems = JsonlEnvironment.load_problems(JsonlConfig(test=path, **VERL), "test")
    assert [problem.answer for problem in problems] == [str(2 * i) for i in range(10)]
    assert problems[7].messages == ({"role": "user", "content": "7+7?"},)
    assert problems[7].info == {"extra_info.index": 7}
    assert problems[7].location == f"{path}, row 8"


def test_a_folder_of_parquet_files_has_their_rows_in_the_order_of_the_names(
    tmp_path: Path,
) -> None:
    for number, rows in ((1, VERL_ROWS[6:]), (0, VERL_ROWS[:6])):
        write_parquet(tmp_path / f"train-{number:05d}-of-00002.parquet", rows)
    problems = JsonlEnvironment.load_problems(JsonlConfig(test=tmp_path, **VERL), "test")
    assert [problem.answer for problem in problems] == [str(2 * i) for i in range(10)]


@pytest.mark.parametrize(
    "names", [("train-00000-of-00001", "test-00000-of-00001"), ("train", "test")]
)
def test_the_files_of_several_splits_are_not_joined(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        write_parquet(tmp_path / f"{name}.parquet", VERL_ROWS)
    with pytest.raises(DataError, match=r"holds the files of several splits: test, train; move"):
        JsonlEnvironment.load_problems(JsonlConfig(test=tmp_path, **VERL), "test")


def test_a_table_is_converted_once_and_only_the_user_may_have_written_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet", VERL_ROWS)
    first = tables.convert_table(path, "task.train")
    assert first.parent == cache_folder()
    assert first.stat().st_mode & 0o077 == 0
    row = json.loads(first.read_text().splitlines()[3])
    assert row["day"] == "2026-01-01"
    assert "picture" not in row, "bytes are left out"
    monkeypatch.setattr(tables, "_row_batches", lambda file: pytest.fail("converted again"))
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(path.read_bytes())
    assert tables.convert_table(copy, "task.train") == first, "the bytes count, not the name"
    first.chmod(0o666)
    with pytest.raises(pytest.fail.Exception, match="converted again"):
        tables.convert_table(path, "task.train")


def test_a_malformed_row_or_file_is_named(tmp_path: Path) -> None:
    rows = [dict(row) for row in VERL_ROWS]
    rows[6]["reward_model"] = {"style": "rule", "ground_truth": None}
    path = write_parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError, match=r"task.test: .*a.parquet, row 7: .*expected a text"):
        list(JsonlEnvironment.load_problems(JsonlConfig(test=path, **VERL), "test"))
    path.write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(DataError, match=r"task.test: .*a.parquet is damaged or no table"):
        JsonlEnvironment.load_problems(JsonlConfig(test=path, **VERL), "test")
    with pytest.raises(DataError, match=r"task.test: no file .*missing.parquet"):
        JsonlEnvironment.load_problems(JsonlConfig(test=tmp_path / "missing.parquet"), "test")


def test_the_folder_of_several_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").write_text("{}")
    config = JsonlConfig(train=tmp_path, test=tmp_path)
    with pytest.raises(DataError, match=r"holds the splits test, train; name .* such as .*/test"):
        JsonlEnvironment.load_problems(config, "train")


def test_a_missing_nested_field_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", VERL_ROWS)
    config = JsonlConfig(test=path, prompt_field="prompt", answer_field="reward_model.truth")
    message = (
        r"row 1: 'reward_model': no field 'truth'; valid: ground_truth, style .set task.answer"
    )
    with pytest.raises(DataError, match=message):
        list(JsonlEnvironment.load_problems(config, "test"))


def test_any_of_several_answers_is_right(tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    from collections import Counter

    import numpy as np

    from rlinf.data.record import RecordId
    from rlinf.data.trajectory import Trajectory

    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"question": "1/2 of 3?", "answer": ["3/2", "7"]}\n{"question": "2?", "answer": 2}'
    )
    environment = JsonlEnvironment(JsonlConfig(test=path), Words())
    problems = JsonlEnvironment.load_problems(environment.config, "test")
    texts = ["#### 1.5", "#### 7", "#### 3", "#### 2"]
    trajectories = [
        Trajectory(
            identity=RecordId(0, i),
            actions=np.zeros(1, np.int64),
            text=text,
            answer=problems[int(i == 3)].answer,
        )
        for i, text in enumerate(texts)
    ]
    assert environment.score(trajectories, Counter()) == [1.0, 1.0, 0.0, 1.0]
    environment.close()
    path.write_text('{"question": "1?", "answer": []}')
    with pytest.raises(DataError, match="'answer' is an empty list"):
        list(JsonlEnvironment.load_problems(environment.config, "test"))
