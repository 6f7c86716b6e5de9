"""The check of a GPU runs on a CPU at small sizes, and reports what fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf import package_paths


def run(*arguments: str, output: Path) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--output", str(output), *arguments]
    code = subprocess.run(command, cwd=package_paths.ROOT, capture_output=True, check=False)
    lines = output.read_text().splitlines() if output.exists() else []
    return code.returncode, [json.loads(line) for line in lines]


def test_checks_print_their_figures(tmp_path: Path) -> None:
    names = ("attention", "generation", "offload", "weight_sync")
    code, figures = run("--device", "cpu", "--tiny", *names, output=tmp_path / "figures.jsonl")
    assert code == 0, figures
    ended = {
        f["check"]: f["exit_code"] for f in figures if f["figure"] == "ended" and "exit_code" in f
    }
    assert ended == dict.fromkeys(names, 0)
    assert all(f["tokens_per_s"] > 0 for f in figures if f["figure"] == "engine")
    assert [f["passed"] for f in figures if f["figure"] == "node_copy"] == [True, True]
    assert figures[-1]["failed"] == []


def test_a_check_without_time_left_is_a_failure(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--tiny", "--limit", "1", "machine")
    code, figures = run(*words, output=tmp_path / "figures.jsonl")
    assert code == 1
    assert figures[-1]["failed"] == ["machine"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_checked(tmp_path: Path) -> None:
    assert run(output=tmp_path / "figures.jsonl") == (1, [])
