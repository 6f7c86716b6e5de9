"""``rlinf doctor`` on a machine without Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands.cli import main


def doctor(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and output of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--folder", str(folder)])
    return ended.value.code, capsys.readouterr().out


def test_a_machine_without_slurm_is_fit_and_missing_extras_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    code, output = doctor(tmp_path / "runs", capsys)
    assert not code, output
    assert "this machine has no Slurm" in output
    assert output.count("not installed") <= 1
    assert not list((tmp_path / "runs").iterdir())


def test_a_folder_that_cannot_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "file").touch()
    code, output = doctor(tmp_path / "file" / "runs", capsys)
    assert code == 1, output
    assert "choose another run.root" in " ".join(output.split())
