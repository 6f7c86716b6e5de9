"""The engine compared with ``transformers.generate`` on the same model, prompts and lengths.

The two sides alternate. Each is a process with one thread, because small models do not become
faster with more threads. Tokens are counted per second of CPU time, which depends little on other
load. In the case "tail" each sample has a fixed length of a long-tailed distribution. ``generate``
decodes the whole batch until the longest sample has ended, because it cannot do otherwise.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grpo_vs_trl import make_model
from benchmarks.row import BenchmarkRow, median_row

PROMPTS, GROUP, WIDTH = 16, 8, 16
LONGEST, MEAN = 256, 41
ROUNDS, TIMES = 5, 3
"""Turns of each side, and measured generations per turn, after one for warm-up."""


def measure() -> list[BenchmarkRow]:
    """Measure all rows."""
    equal, tailed, engine_rates, generate_rates = (list[float]() for _ in range(4))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for _ in range(ROUNDS):
            for case, ratios in (("equal", equal), ("tail", tailed)):
                rates = {side: run(side, case, folder) for side in ("engine", "generate")}
                ratios.append(rates["engine"] / rates["generate"])
                if case == "equal":
                    engine_rates.append(rates["engine"])
                    generate_rates.append(rates["generate"])
    return [
        median_row("engine_vs_generate", equal, "x", 1.6, "higher"),
        median_row("engine_vs_generate_tail", tailed, "x", 4.5, "higher"),
        median_row("engine_tokens_per_cpu_s", engine_rates, "tokens/s", None, "higher"),
        median_row("generate_tokens_per_cpu_s", generate_rates, "tokens/s", None, "higher"),
    ]


def lengths(case: str) -> np.ndarray:
    """Return the tokens of each sample: 64, or drawn from a geometric distribution with mean
    :data:`MEAN`, at most :data:`LONGEST`."""
    count = PROMPTS * GROUP
    if case == "equal":
        return np.full(count, 64)
    drawn = np.random.default_rng(0).geometric(1 / MEAN, count)
    return np.minimum(drawn, LONGEST)


def run(side: str, case: str, folder: Path) -> float:
    """Return tokens per second of CPU time, measured in a new process."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine_vs_generate", side, case, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{side}: {process.stderr[-2000:]}")
    return float(json.loads(process.stdout.splitlines()[-1]))


def prompts(vocabulary: int) -> np.ndarray:
    """Return random token ids ``[PROMPTS, WIDTH]``."""
    return np.random.default_rng(1).integers(2, vocabulary, (PROMPTS, WIDTH))


def timed(generate: Any, tokens: int) -> float:
    generate(0)
    rates = []
    for number in range(1, TIMES + 1):
        start = time.process_time()
        count = generate(number)
        if count != tokens:
            raise RuntimeError(f"made {count} tokens, not {tokens}")
        rates.append(count / (time.process_time() - start))
    return statistics.median(rates)


def engine_side(case: str, folder: Path) -> float:
    """Measure our engine through its public interface, as rollouts use it."""
    from rlinf.channels.channel import LocalChannel
    from rlinf.data.record import Record, RecordId
    from rlinf.engines.transformers import TransformersConfig, TransformersEngine
    from rlinf.models.causal_lm import CausalLM
    from rlinf.models.causal_lm_config import CausalLMConfig

    config = CausalLMConfig(path=folder / "model")
    engine = TransformersEngine(TransformersConfig(ignore_eos=True), CausalLM, config)
    engine.load(folder / "model", 0)
    target_lengths = lengths(case)
    input_ids = np.repeat(prompts(engine._module.config.vocab_size), GROUP, axis=0)

    def generate(number: int) -> int:
        requests = LocalChannel()
        for length in np.unique(target_lengths):
            rows = np.flatnonzero(target_lengths == length)
            steps = {
                "sample": rows,
                "prompt": input_ids[rows],
                "prompt_length": np.full(len(rows), WIDTH),
            }
            info: dict[str, Any] = {"horizon": int(length), "temperature": 1.0}
            requests.put(Record(RecordId(number, int(rows[0])), steps, info=info))
        requests.close()
        replies = engine.generate(requests, seed=0, stage="rollout")
        return sum(int(reply.steps["length"].sum()) for reply in replies)

    return timed(generate, int(target_lengths.sum()))


def generate_side(case: str, folder: Path) -> float:
    """Measure ``generate`` of transformers, with a stopping criterion per row."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    target_lengths = torch.from_numpy(lengths(case))
    tokens = torch.from_numpy(np.repeat(prompts(model.config.vocab_size), GROUP, axis=0))

    class StopAtLengths(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] - WIDTH >= target_lengths

    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=int(target_lengths.max()),
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )

    def generate(number: int) -> int:
        torch.manual_seed(number)
        with torch.inference_mode():
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=settings,
                stopping_criteria=[StopAtLengths()],
            )
        if output.shape[1] - WIDTH != int(target_lengths.max()):
            raise RuntimeError(f"ended after {output.shape[1] - WIDTH}")
        return int(target_lengths.sum())

    return timed(generate, int(target_lengths.sum()))


def main(side: str, case: str, folder: str) -> None:
    from rlinf import process_tuning

    process_tuning.tune_process()
    measured = {"engine": engine_side, "generate": generate_side}[side](case, Path(folder))
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
