"""End-to-end GRPO tokens per second, compared with TRL's GRPOTrainer.

Model, prompts, group size, response length and machine are the same. Both sides make one update per
batch, without a reference model and without recomputed log-probabilities. They alternate, each in a
new process with its best thread setting. The first two steps of a turn (imports, caches) do not
count.

In the case "tail" the untrained model has 41 tokens, one of which ends a response. Response lengths
are therefore geometric with a mean of about 41, and each side samples its own.
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

from benchmarks.row import BenchmarkRow, median_row

PROMPTS, GROUP = 16, 8
TOKENS = {"equal": 32, "tail": 256}
"""Tokens per response: exact in the case "equal", the maximum in the case "tail"."""
TURNS, UNCOUNTED = 3, 2
STEPS = {"equal": 10, "tail": 7}
ALPHABETS = {
    "equal": "".join(chr(code) for code in range(32, 127)) + "".join(map(chr, range(161, 324))),
    # 41 tokens with the special ones.
    "tail": "0123456789+=-*/abcdefghijklmnopqrstuvw",
}
RATES = {"equal": 3e-4, "tail": 1e-9}
"""Learning rates. In the case "tail" the lengths must not change."""
SETTINGS = ((1, "PASSIVE"), (2, "PASSIVE"), (2, "ACTIVE"))
"""Number of threads, and whether idle OpenMP threads sleep or spin."""


def measure() -> list[BenchmarkRow]:
    """Measure the ratio of medians per turn, and the tokens per second of both sides."""
    rates: dict[tuple[str, str], list[float]] = {}
    ratios: dict[str, list[float]] = {case: [] for case in TOKENS}
    with tempfile.TemporaryDirectory() as name:
        for case in TOKENS:
            make_model(Path(name) / case / "model", ALPHABETS[case])
        for turn in range(TURNS):
            for case, case_ratios in ratios.items():
                # The best thread setting of each side is searched again in each turn.
                best = {
                    side: max(
                        (
                            steps(side, case, Path(name) / case, turn, *threads)
                            for threads in SETTINGS
                        ),
                        key=statistics.median,
                    )
                    for side in ("ours", "trl")
                }
                case_ratios.append(statistics.median(best["ours"]) / statistics.median(best["trl"]))
                for side, values in best.items():
                    rates.setdefault((side, case), []).extend(values)
    return [
        median_row("grpo_vs_trl", ratios["equal"], "x", 1.6, "higher"),
        median_row("grpo_vs_trl_tail", ratios["tail"], "x", 4.0, "higher"),
        median_row("grpo_tokens_per_s", rates["ours", "equal"], "tokens/s", None, "higher"),
        median_row("trl_tokens_per_s", rates["trl", "equal"], "tokens/s", None, "higher"),
        median_row("grpo_tail_tokens_per_s", rates["ours", "tail"], "tokens/s", None, "higher"),
        median_row("trl_tail_tokens_per_s", rates["trl", "tail"], "tokens/s", None, "higher"),
    ]


def make_model(folder: Path, alphabet: str = ALPHABETS["equal"]) -> None:
    """Create a 4-layer Qwen2 model of hidden size 128, by default with about 256 tokens."""
    from rlinf.models.causal_lm import CausalLM
    from rlinf.models.causal_lm_config import CausalLMConfig

    folder.mkdir(parents=True)
    CausalLM.create(CausalLMConfig(hidden=128, layers=4), {"alphabet": alphabet}, 0, folder)


def steps(side: str, case: str, folder: Path, turn: int, threads: int, waiting: str) -> list[float]:
    """Return tokens per second of each counted step of one turn, measured in a new process."""
    out = folder / f"{side}-{turn}-{threads}-{waiting}.json"
    openmp = {"OMP_WAIT_POLICY": waiting}
    if waiting == "PASSIVE":
        openmp["GOMP_SPINCOUNT"] = "0"
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    process = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.grpo_vs_trl", side, case),
            *(str(folder), str(out), str(threads)),
        ],
        env={**environment, **openmp, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{side}: {process.stderr[-2000:]}")
    values: list[float] = json.loads(out.read_text())
    if os.environ.get("BENCH_VERBOSE"):
        print(side, case, threads, waiting, statistics.median(values[UNCOUNTED:]), flush=True)
    return values[UNCOUNTED:]


def run_ours(case: str, folder: Path, threads: int) -> list[float]:
    """Run the five stages in one process; outputs are committed to disk as usual."""
    from benchmarks.run_helpers import run_node
    from pipeline.commands.experiment import compose
    from pipeline.executors import InProcessExecutor
    from pipeline.graph import Graph
    from pipeline.resume import create_run
    from rlinf.artifacts import read_manifest
    from rlinf.config import RunConfig, validate

    with tempfile.TemporaryDirectory() as root:
        values = compose(
            [
                "experiment=arithmetic_grpo",
                "model=checkpoint",
                f"++model.path={folder / 'model'}",
                f"++run.root={root}",
                f"iterations={STEPS[case]}",
                "++sft.max_steps=0",
                f"++engine.ignore_eos={case == 'equal'}",
                f"++optimizer.lr={RATES[case]}",
                "reward=digits",
                f"++trainer.cpu_threads={threads}",
                f"++rollout.batch_size={PROMPTS}",
                f"++rollout.group_size={GROUP}",
                f"++rollout.horizon={TOKENS[case]}",
                "++evaluate.every=0",
            ]
        )
        run = create_run(validate(RunConfig, values), {})
        graph, executor, rates = Graph(run.config), InProcessExecutor(run), []
        for node in graph.nodes():
            if node.stage == "evaluate":
                continue
            if node.stage == "rollout":
                start = time.perf_counter()
            out = run_node(run, graph, executor, node)
            if node.stage == "rollout":
                manifest = read_manifest(out)
                assert manifest is not None
                tokens = manifest.metrics["steps"]
            if node.stage == "sync":
                rates.append(tokens / (time.perf_counter() - start))
    return rates


def run_trl(case: str, folder: Path, threads: int) -> list[float]:
    """Run TRL's trainer on the same prompts and model."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    prompts = [f"{i + 11}+{3 * i + 5}=" for i in range(PROMPTS)]
    seconds: list[float] = []
    tokens: list[int] = []
    min_length = {"min_new_tokens": TOKENS[case]} if case == "equal" else {}

    class TrlStepClock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [sum(c.isdigit() for c in text) / TOKENS[case] for text in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts * STEPS[case]}),
        callbacks=[TrlStepClock()],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS[case],
            generation_kwargs=min_length,
            beta=0.0,
            learning_rate=RATES[case],
            max_steps=STEPS[case],
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
    total_s = time.perf_counter() - start
    # If generation happens outside the step callbacks, count the whole loop.
    if sum(seconds) < 0.5 * total_s:
        seconds = [total_s / STEPS[case]] * STEPS[case]
    return [count / step_s for count, step_s in zip(tokens, seconds, strict=True)]


if __name__ == "__main__":
    side, case, folder, out, threads = sys.argv[1:]
    values = (run_ours if side == "ours" else run_trl)(case, Path(folder), int(threads))
    Path(out).write_text(json.dumps(values))
