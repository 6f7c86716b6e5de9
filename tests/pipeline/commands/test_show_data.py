"""``rlinf data`` shows columns, chat template and prompts, before a run and of a run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.commands.cli import app
from rlinf.envs import rendered_dataset
from rlinf.errors import ConfigError, DataError
from tests.pipeline.helpers import language_model, problem_file

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking %}think {% endif %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = language_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, ["data", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def words_of(model: Path, tmp_path: Path) -> list[str]:
    return [
        "experiment=jsonl_grpo",
        f"model.path={model}",
        f"task.test={problem_file(tmp_path / 'test.jsonl', 8, start=50)}",
        'task.prompt_template="{prompt}"',
    ]


def test_columns_template_and_prompts_are_shown(model: Path, tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": ["2", "two"], "extra_info": {"index": 7, "split": "a"}}
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps(row) + "\n" + json.dumps({**row, "question": "long " * 400}))
    words = words_of(model, tmp_path)
    text = shown(*words, f"task.train={train}", "--prompts", "1")
    assert f"task.train: {train}, 2 problems, 1 of them longer than task.max_prompt_length" in text
    for column in ("question", "answer", "extra_info.index", "extra_info.split"):
        assert column in text
    assert "model.chat_template_kwargs: none; arguments that it uses: enable_thinking" in text
    assert "<user> 1+1?\n<assistant> " in text
    assert re.search(rf"task\.train, prompt 1: {re.escape(str(train))}, line 1, \d+ tokens\n", text)
    assert "Tom has 51" not in text, "one prompt of each set was requested"
    kwargs = "model.chat_template_kwargs={enable_thinking: true}"
    assert "think <assistant> " in shown(*words, f"task.train={train}", kwargs)


def test_every_training_file_is_shown(model: Path, tmp_path: Path) -> None:
    first, second = (problem_file(tmp_path / f"{i}.jsonl", start=20 * i) for i in range(2))
    text = shown(
        *words_of(model, tmp_path),
        f"task.train_sets={{low: {{train: {first}}}, high: {{train: {second}}}}}",
    )
    assert "task.train_sets.low.train: " in text
    assert "Tom has 20 apples" in text


def test_the_first_prompts_of_a_large_file_are_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendered_dataset, "MEASURED_PROBLEMS", 4)
    train = problem_file(tmp_path / "train.jsonl", 6, start=50)
    text = shown(*words_of(model, tmp_path), f"task.train={train}", "--prompts", "6")
    assert "6 problems; the longest prompt of the first 4 has " in text
    assert "task.train, prompt 6: " in text
    assert "6 of 8 test problems are training problems too" in text


def test_a_file_is_read_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()
    plain = os.open

    def counted(path: Any, flags: int, *more: Any, **options: Any) -> int:
        opened.append(str(path))
        return plain(path, flags, *more, **options)

    train = problem_file(tmp_path / "train.jsonl", 6)
    monkeypatch.setattr(os, "open", counted)
    shown(*words_of(model, tmp_path), f"task.train={train}")
    assert opened.count(str(train)) == 1


def test_errors_name_line_and_key(model: Path, tmp_path: Path) -> None:
    train = problem_file(tmp_path / "train.jsonl", 16)
    train.write_text(train.read_text() + "\n" + json.dumps({"answer": "2"}))
    words = [*words_of(model, tmp_path), f"task.train={train}"]
    with pytest.raises(DataError, match=r"line 17: no field 'question'.*task\.prompt_field"):
        shown(*words)
    with pytest.raises(ConfigError, match="no set of problems to show"):
        shown("experiment=arithmetic_grpo")
