"""A run on a problem file with a checkpoint from a folder, graded as mathematics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import run_experiment
from rlinf.artifacts import read_manifest
from rlinf.channels.record_files import RecordFileReader
from tests.conftest import TINY
from tests.pipeline.helpers import language_model, problem_file

pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
Compose = Callable[..., dict[str, Any]]


def test_problems_from_a_file_with_a_local_checkpoint(compose: Compose, tmp_path: Path) -> None:
    model = language_model(tmp_path / "model")
    problems = problem_file(tmp_path / "problems.jsonl")
    held_out = problem_file(tmp_path / "held_out.jsonl", 8, start=12)
    small = [word for word in TINY if "model." not in word and "sft" not in word]
    values = compose(
        "iterations=1",
        f"task.train={problems}",
        f"task.test={held_out}",
        f"model.path={model}",
        *(word.removeprefix("++") for word in small if "iterations" not in word),
        "rollout.horizon=8",
        experiment="jsonl_grpo",
    )
    run_experiment(values)
    run = tmp_path / "tiny"
    folder = run / "it/0000/rollout"
    manifest = read_manifest(folder)
    assert manifest is not None
    records = list(RecordFileReader((folder / manifest.data).glob("*.h5")))
    assert len(records) == 16
    assert all("write the final answer after ####" in str(r.info["prompt_text"]) for r in records)
    assert len({r.info["prompt_text"] for r in records}) == 4, "an epoch repeats no problem"
    reward = read_manifest(run / "it/0000/reward")
    assert reward is not None
    assert 0 <= reward.metrics["score"] <= 1
    assert reward.metrics["parse_failures"] <= 16
    assert (reward.metrics["timeouts"], reward.metrics["grader_deaths"]) == (0, 0)


@pytest.mark.usefixtures("undrawn")
def test_files_with_weights_have_metrics_of_their_own(compose: Compose, tmp_path: Path) -> None:
    model = language_model(tmp_path / "model")
    first, second = (problem_file(tmp_path / f"{i}.jsonl", start=20 * i) for i in range(2))
    held_out = problem_file(tmp_path / "held_out.jsonl", 8, start=50)
    small = [word for word in TINY if "model." not in word and "sft" not in word]
    values = compose(
        f"task.train_sets={{low: {{train: {first}}}, high: {{train: {second}, weight: 3}}}}",
        f"task.test={held_out}",
        f"model.path={model}",
        *(word.removeprefix("++") for word in small),
        "rollout.batch_size=8",
        experiment="jsonl_grpo",
    )
    run_experiment(values)
    rows = [json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    names = {f"reward/{name}/{part}" for name in ("score", "mean") for part in ("low", "high")}
    assert all(names <= row.keys() for row in rows)
    folder = tmp_path / "tiny/it/0000/rollout"
    manifest = read_manifest(folder)
    assert manifest is not None
    records = list(RecordFileReader((folder / manifest.data).glob("*.h5")))
    assert {str(record.info["task"]) for record in records} == {"low", "high"}
    files = json.loads((tmp_path / "tiny/code.json").read_text())["files"]
    assert {f"file:task.train_sets.{name}.train" for name in ("low", "high")} <= files.keys()
