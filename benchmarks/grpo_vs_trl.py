"""End-to-end GRPO tokens per second beside TRL's GRPOTrainer.

Same model, prompts, group size, response length and machine; one update per batch, no reference
model, no recomputed log-probs on either side. Both are measured in turns, each as a process of its
own with its best thread setting; a turn's first two steps (imports, caches) are not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.row import Row, median_row

PROMPTS, GROUP, TOKENS = 16, 8, 32
TURNS, STEPS, UNCOUNTED = 3, 10, 2
SETTINGS = ((1, "PASSIVE"), (2, "PASSIVE"), (2, "ACTIVE"))
"""Threads, and whether OpenMP's waiting ones sleep or spin."""


def measure() -> list[Row]:
    """The ratio of medians per turn, and both sides' tokens per second."""
    ours: list[float] = []
    theirs: list[float] = []
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for turn in range(TURNS):
            # Each side's best thread setting is looked for anew in each turn.
            mine, other = (
                min(
                    (steps(side, folder, turn, *setting) for setting in SETTINGS),
                    key=statistics.median,
                )
                for side in ("ours", "trl")
            )
            ratios.append(statistics.median(other) / statistics.median(mine))
            ours += mine
            theirs += other
    tokens = PROMPTS * GROUP * TOKENS
    return [
        median_row("grpo_vs_trl", ratios, "x", 2.0, "higher"),
        median_row("grpo_tokens_per_s", [tokens / s for s in ours], "tokens/s", None, "higher"),
        median_row("trl_tokens_per_s", [tokens / s for s in theirs], "tokens/s", None, "higher"),
    ]


def make_model(folder: Path) -> None:
    """A 4-layer Qwen2 model of hidden size 128 with a byte-sized vocabulary."""
    from rlinf.models.causal_lm import CausalLM, CausalLMConfig

    folder.mkdir(parents=True)
    alphabet = "".join(chr(code) for code in range(32, 127)) + "".join(map(chr, range(161, 324)))
    CausalLM.create(CausalLMConfig(hidden=128, layers=4), {"alphabet": alphabet}, 0, folder)


def steps(side: str, folder: Path, turn: int, threads: int, waiting: str) -> list[float]:
    """Seconds of each counted step of one turn, from a process of its own."""
    out = folder / f"{side}-{turn}-{threads}-{waiting}.json"
    waits = {"OMP_WAIT_POLICY": waiting}
    if waiting == "PASSIVE":
        waits["GOMP_SPINCOUNT"] = "0"
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.grpo_vs_trl", side, str(folder), str(out), str(threads)],
        env={**environment, **waits, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{side}: {done.stderr[-2000:]}")
    values: list[float] = json.loads(out.read_text())
    if os.environ.get("BENCH_VERBOSE"):
        print(side, threads, waiting, statistics.median(values[UNCOUNTED:]), flush=True)
    return values[UNCOUNTED:]


def run_ours(folder: Path, threads: int) -> list[float]:
    """The five stages in one process, committed to disk as always."""
    from pipeline.commands.experiment import compose
    from pipeline.driver import InProcess
    from pipeline.flow import Graph
    from pipeline.freeze import create_run
    from rlinf.config import RunConfig, validate
    from stages.layout import CONFIG
    from stages.runner import StageCall

    with tempfile.TemporaryDirectory() as root:
        values = compose(
            [
                "experiment=arithmetic_grpo",
                "model=checkpoint",
                f"++model.path={folder / 'model'}",
                f"++run.root={root}",
                f"iterations={STEPS}",
                "++warm_start.max_steps=0",
                "++engine.ignore_eos=true",
                "++algorithm.old_logprobs=rollout",
                "reward=digits",
                f"++trainer.threads={threads}",
                f"++rollout.batch={PROMPTS}",
                f"++rollout.group_size={GROUP}",
                f"++rollout.horizon={TOKENS}",
                "++evaluate.every=0",
            ]
        )
        run = create_run(validate(RunConfig, values), {})
        graph, executor, seconds = Graph(run.config), InProcess(run), []
        for node in graph.nodes():
            if node.stage == "evaluate":
                continue
            if node.stage == "rollout":
                start = time.perf_counter()
            inputs = {k: graph.folder(run.folder, v) for k, v in graph.inputs(node).items()}
            out = graph.folder(run.folder, node)
            executor.start(
                node, StageCall(node.stage, run.folder / CONFIG, out, node.iteration, inputs)
            )
            (outcome,) = executor.ended().values()
            if outcome.error:
                raise outcome.error
            if node.stage == "sync":
                seconds.append(time.perf_counter() - start)
    return seconds


def run_trl(folder: Path, threads: int) -> list[float]:
    """TRL's trainer on the same prompts and model."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    prompts = [f"{i + 11}+{3 * i + 5}=" for i in range(PROMPTS)]
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(c.isdigit() for c in text) / TOKENS for text in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts * STEPS}),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            generation_kwargs={"min_new_tokens": TOKENS},
            beta=0.0,
            learning_rate=3e-4,
            max_steps=STEPS,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    start = time.perf_counter()
    trainer.train()
    whole = time.perf_counter() - start
    # Generation may happen outside the step callbacks; then the whole loop is what counts.
    return [whole / STEPS] * STEPS if sum(seconds) < 0.5 * whole else seconds


if __name__ == "__main__":
    side, folder, out, threads = sys.argv[1:]
    values = (run_ours if side == "ours" else run_trl)(Path(folder), int(threads))
    Path(out).write_text(json.dumps(values))
