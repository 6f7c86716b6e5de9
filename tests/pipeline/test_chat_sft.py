"""Fine-tuning on conversations, from a file to weights: all weights, adapters, two processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.commands.experiment import run_experiment
from pipeline.report.charts import build_plots
from pipeline.report.data import read_report_data
from pipeline.run import Run
from rlinf.artifacts import Manifest, read_manifest
from tests.conftest import TINY
from tests.environments import need_environment

Compose = Callable[..., dict[str, Any]]
DATA = Path(__file__).parents[2] / "docs/examples/chat"
MODEL = [word.removeprefix("++") for word in TINY if "model." in word]
SMALL = [
    *MODEL,
    "model=small",
    "run.name=sft",
    f"task.train={DATA / 'train.jsonl'}",
    f"task.test={DATA / 'test.jsonl'}",
    "sft.max_steps=12",
    "sft.batch_size=16",
    "sft.lr=1e-2",
    "sft.lr_warmup_steps=2",
    "sft.eval_every=6",
    "sft.eval_samples=12",
    "rollout.horizon=8",
    "evaluate.samples=4",
]
ADAPTERS = "trainer.lora={rank: 4, alpha: 8}"


def tuned(compose: Compose, *words: str, **more: Any) -> tuple[Run, Manifest]:
    values = {**compose(*SMALL, *words, experiment="chat_sft"), **more}
    run_experiment(values)
    run = Run.open(Path(values["run"]["root"]) / "sft")
    manifest = read_manifest(run.folder / "sft")
    assert manifest is not None
    return run, manifest


def weights(run: Run, manifest: Manifest) -> Path:
    return run.folder / "sft" / manifest.data / "weights"


def reckoned(folder: Path, count: int) -> float:
    """The held-out loss by the library alone: its template, its masks, its network, row by row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, module = (
        cls.from_pretrained(folder) for cls in (AutoTokenizer, AutoModelForCausalLM)
    )
    total, tokens = 0.0, 0
    for line in (DATA / "test.jsonl").read_text().splitlines()[:count]:
        row = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            outputs = module(input_ids=ids).logits[0].log_softmax(-1)
        for place, own in enumerate(row["assistant_masks"]):
            if own:
                total -= float(outputs[place - 1, ids[0, place]])
                tokens += 1
    return total / tokens


@pytest.mark.parametrize("words", [(), (ADAPTERS,)], ids=["full", "lora"])
def test_held_out_loss_falls_and_is_that_of_the_saved_weights(
    words: tuple[str, ...], compose: Compose
) -> None:
    run, manifest = tuned(compose, *words)
    curve = manifest.extra["curve"]
    names = [row["eval_loss"] for row in curve if row["eval_loss"] is not None]
    assert [row["step"] for row in curve if row["eval_loss"]] == [6, 12]
    assert names[1] < names[0] < curve[0]["loss"]
    assert manifest.metrics["eval_loss"] == names[1]
    assert "score" not in manifest.metrics
    assert names[1] == pytest.approx(reckoned(weights(run, manifest), 12), abs=1e-5)
    (plot,) = [
        plot
        for group in build_plots(read_report_data(run.folder))["groups"]
        for plot in group["plots"]
        if plot["name"] == "sft-loss"
    ]
    assert [line["label"] for line in plot["series"]] == ["training", "held-out"]
    assert (run.folder / "report/report.html").exists()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("trainer", "layout", "words"),
    [
        ("fsdp", {}, ()),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for case in (
                ("deepspeed", {}, ()),
                ("deepspeed", {}, (ADAPTERS,)),
                ("megatron", {"tp": 2}, ()),
                ("megatron", {"tp": 2}, (ADAPTERS,)),
            )
        ),
    ],
)
def test_two_processes_end_as_one_does(
    trainer: str, layout: dict[str, int], words: tuple[str, ...], compose: Compose, tmp_path: Path
) -> None:
    there = [f"trainer={trainer}"]
    if trainer != "fsdp":
        need_environment(trainer)
        there.append(f"trainer.python={trainer}")
    steps = ["sft.max_steps=4", "sft.eval_every=4", "model.kv_heads=2", *words]
    run, alone = tuned(compose, *steps)
    run.folder.rename(tmp_path / "alone")
    plan = {"stages": {"sft": {"processes": 2, "layout": layout}}}
    run, both = tuned(compose, *steps, *there, "cluster=local", plan=plan)
    assert both.world == 2
    for one, other in zip(alone.extra["curve"], both.extra["curve"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)
    assert both.metrics["eval_loss"] == pytest.approx(alone.metrics["eval_loss"], abs=1e-4)
    result = reckoned(weights(run, both), 12)
    assert result == pytest.approx(both.metrics["eval_loss"], abs=1e-5)


def test_reinforcement_learning_goes_on_from_it(compose: Compose) -> None:
    words = [
        "sft.max_steps=2",
        "rollout.batch_size=2",
        "algorithm.filter_zero_variance_groups=false",
    ]
    tuned(compose, *words)
    values = compose(*SMALL, *words, "iterations=1", experiment="chat_sft")
    run_experiment(values)
    run = Path(values["run"]["root"]) / "sft"
    assert read_manifest(run / "it/0000/sync") is not None
