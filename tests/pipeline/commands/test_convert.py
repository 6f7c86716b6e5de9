"""``rlinf convert``, which selects the conversion by its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.commands.cli import app
from rlinf.errors import ConfigError, DataError
from tests.rlinf.models.test_openvla_conversion import native


def test_a_folder_of_openvla_is_converted(tmp_path: Path) -> None:
    native(tmp_path / "native")
    words = [str(tmp_path / "native"), str(tmp_path / "new")]
    tokenizer = ["--tokenizer", str(tmp_path / "native" / "own")]
    done = CliRunner().invoke(app, ["convert", *words, *tokenizer])
    assert done.exit_code == 0, done.output
    assert f"model folder: {tmp_path / 'new'}" in done.output
    assert json.loads((tmp_path / "new" / "config.json").read_text())["model_type"] == "openvla"
    again = CliRunner().invoke(app, ["convert", *words, *tokenizer])
    with pytest.raises(DataError, match="is there already"):
        raise again.exception or AssertionError


def test_another_source_needs_no_tokenizer(tmp_path: Path) -> None:
    words = ["convert", "model.gguf", str(tmp_path / "new"), "--tokenizer", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    with pytest.raises(ConfigError, match=r"--tokenizer .*model\.gguf has its own"):
        raise done.exception or AssertionError
