"""Tokens per second of ``rlinf evaluate`` over those of a rollout of the same prompts.

A randomly initialised model of seven million parameters; the evaluation has the prompts in two sets
with different lengths of responses. Both sides alternate.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.row import BenchmarkRow, median_row
from pipeline.commands.evaluate import run_evaluation
from pipeline.commands.experiment import compose_words, run_experiment
from pipeline.metrics import stage_manifest
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig

ROUNDS = 5
NUM_PROBLEMS, SAMPLES, TOKENS = 16, 8, 64
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


def measure() -> list[BenchmarkRow]:
    """Measure the row."""
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = root / "model"
        model.mkdir()
        config = CausalLMConfig(
            architecture="llama", hidden=256, layers=8, heads=4, kv_heads=2, intermediate=768
        )
        CausalLM.create(config, {"alphabet": ALPHABET}, 0, model)
        files = [root / f"set_{number}.jsonl" for number in (0, 1)]
        rows = [{"question": f"{i} plus {i} is", "answer": str(2 * i)} for i in range(NUM_PROBLEMS)]
        for file, part in zip(files, (rows[::2], rows[1::2]), strict=True):
            file.write_text("\n".join(map(json.dumps, part)))
        all_rows = root / "all.jsonl"
        all_rows.write_text("\n".join(map(json.dumps, rows)))
        for number in range(ROUNDS):
            rollout = rollout_rate(root, model, all_rows, number)
            ratios.append(evaluation_rate(root, model, files, number) / rollout)
    return [median_row("evaluate_vs_rollout", ratios, "ratio", 0.9, "higher")]


def rollout_rate(root: Path, model: Path, file: Path, number: int) -> float:
    """Return the tokens per second of a rollout."""
    words = [
        "experiment=jsonl_grpo",
        f"model.path={model}",
        f"task.train={file}",
        f"task.test={file}",
        "task.prompt_template='{prompt}'",
        "task.allow_train_test_overlap=true",
        f"run.root={root}",
        f"run.name=rollout-{number}",
        "iterations=1",
        f"rollout.batch_size={NUM_PROBLEMS}",
        f"rollout.group_size={SAMPLES}",
        f"rollout.horizon={TOKENS}",
        "evaluate.every=0",
        "evaluate.samples=1",
        "log.trackers=[]",
    ]
    run_experiment(compose_words(words))
    manifest = stage_manifest(root / f"rollout-{number}", "rollout", 0)
    assert manifest is not None
    seconds = sum(
        span["end"] - span["start"]
        for span in manifest.timing["spans"]
        if span["name"] == "generate"
    )
    return manifest.metrics["steps"] / seconds


def evaluation_rate(root: Path, model: Path, files: list[Path], number: int) -> float:
    """Return the tokens per second of an evaluation of two sets."""
    words = [f"run.root={root}", f"run.name=evaluation-{number}"]
    for file in files:
        words += [
            f"{file.stem}.samples_per_problem={SAMPLES}",
            f"{file.stem}.horizon={TOKENS}",
            f"{file.stem}.temperature=1.0",
        ]
    return run_evaluation(model, (), files, words)[1].tokens_per_s
