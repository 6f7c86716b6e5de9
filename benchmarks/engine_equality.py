"""Compare the greedy responses of every engine, and their log-probabilities with the trainer's.

The reference tokens are those of ``transformers.generate``. The reference log-probabilities are
those of the policy's forward pass over the whole response, as in training. All is in float32.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.result_cache import ResultCache, missing_environment, result_key
from rlinf import package_paths
from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.engines import engines
from rlinf.engines.server import ServerEngine
from rlinf.interpreters import resolve_interpreter
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig

TOLERANCE = 1e-5
MODEL = CausalLMConfig(hidden=128, layers=2, heads=2, kv_heads=1, intermediate=64)
"""The head dimension is 64, the only one that vLLM supports on every CPU."""
COUNT, LONGEST, HORIZON, SHARPER = 24, 24, 32, 4.0
"""Number of prompts, maximum tokens of a prompt and of a response, and a factor of the weight
matrices, so that rounding does not decide which token is the most likely."""
ENGINES = {
    "transformers": None,
    "vllm": None,
    "vllm_in_process": "vllm",
    "sglang": None,
    "sglang_in_process": "sglang",
}
"""The Python environment of each engine; None: this one."""
Answers = dict[int, tuple[np.ndarray, np.ndarray]]
"""Tokens and log-probabilities by prompt."""
HEAD = """
| engine | responses | tokens | other tokens | log-probabilities differ by |
|---|---|---|---|---|"""


@dataclass(frozen=True)
class EngineComparison:
    """Differences between the responses of an engine and the reference."""

    tokens: int
    """Number of tokens in all reference responses."""
    others: int
    """Number of tokens after the first difference of each response, missing ones included."""
    differ: float
    """Maximum difference of a token's log-probability from that of the policy."""

    @property
    def good(self) -> bool:
        """Return whether the responses are equal up to rounding."""
        return not self.others and self.differ <= TOLERANCE

    def line(self, name: str) -> str:
        """Return the row of the table, in Markdown."""
        return f"| `{name}` | {COUNT} | {self.tokens} | {self.others} | {self.differ:.1e} |" + (
            "" if self.good else " differs"
        )


def keys() -> dict[str, str]:
    """Return the key of each engine's cached result."""
    sizes = [COUNT, LONGEST, HORIZON, SHARPER]
    work = [
        inspect.getsource(part) for part in (policy, answers, reference_tokens, compare_answers)
    ]
    return {
        name: result_key(
            _engine_environment(name), engine=name, model=MODEL.model_dump(), sizes=sizes, work=work
        )
        for name in ENGINES
    }


def compare(cache: ResultCache, keys: dict[str, str], folder: Path) -> bool:
    """Compute missing results and print the table; returns whether all engines agree."""
    all_equal = True
    reference: tuple[CausalLM, list[list[int]]] | None = None
    print(HEAD, flush=True)
    for name, key in keys.items():
        if key not in cache:
            if (advice := missing_environment(_engine_environment(name))) is not None:
                print(f"| `{name}` | {advice} | | | |", flush=True)
                continue
            if reference is None:
                loaded = policy(folder / "served")
                reference = (loaded, reference_tokens(loaded))
            cache[key] = asdict(
                compare_answers(*reference, generate_answers(name, folder / "served"))
            )
        result = EngineComparison(**cache[key])
        print(result.line(name), flush=True)
        all_equal &= result.good
    print(f"\ngreedy, float32; tolerance {TOLERANCE:g} for log-probabilities, no other token")
    return all_equal


def _engine_environment(name: str) -> str | None:
    """Return the environment of an engine or of its server; None: this one."""
    cls = engines.get(name)
    return cls.Config().server_python if issubclass(cls, ServerEngine) else ENGINES[name]


def generate_answers(name: str, folder: Path) -> Answers:
    """Return the responses of an engine, which runs in the environment that it needs."""
    environment = ENGINES[name]
    if environment is None:
        return answers(engines.get(name), folder)
    out = folder.with_name(f"{name}.npz")
    words = ["-m", "benchmarks.engine_equality", name, str(folder), str(out)]
    subprocess.run(
        [resolve_interpreter(environment, "equality"), *words], cwd=package_paths.ROOT, check=True
    )
    with np.load(out) as file:
        return {i: (file[f"tokens{i}"], file[f"logprobs{i}"]) for i in range(COUNT)}


def prompts() -> list[np.ndarray]:
    """Return prompts of different lengths."""
    random = np.random.default_rng(0)
    return [random.integers(2, 14, random.integers(3, LONGEST)) for _ in range(COUNT)]


def policy(folder: Path) -> CausalLM:
    """Create a policy with clear preferences, and save it in the folder."""
    unscaled = folder.with_name("first")
    unscaled.mkdir()
    folder.mkdir()
    CausalLM.create(MODEL, {"alphabet": "0123456789+="}, 0, unscaled)
    scaled = CausalLM.load(unscaled, MODEL)
    with torch.no_grad():
        for parameter in scaled.module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARPER)
    scaled.save(folder, dict(scaled.module.state_dict()))
    return CausalLM.load(folder, MODEL)


def answers(cls: Any, folder: Path) -> Answers:
    """Return tokens and log-probabilities of an engine, by prompt."""
    prompt_tokens, result = prompts(), {}
    steps = {
        "sample": np.arange(COUNT),
        "prompt": np.array(
            [np.pad(prompt, (0, LONGEST - len(prompt))) for prompt in prompt_tokens]
        ),
        "prompt_length": np.array([len(prompt) for prompt in prompt_tokens]),
    }
    channel = LocalChannel()
    channel.put(Record(RecordId(0, 0), steps, info={"horizon": HORIZON, "temperature": 0.0}))
    channel.close()
    engine = cls(cls.Config.model_validate({"device": "cpu"}), CausalLM, MODEL)
    engine.log_folder = folder.parent
    try:
        engine.load(folder, 0)
        for reply in engine.generate(channel, seed=0, stage="rollout"):
            for i, number in enumerate(reply.steps["sample"].tolist()):
                length = int(reply.steps["length"][i])
                columns = (reply.steps[name][i, :length] for name in ("tokens", "logprobs"))
                result[number] = (next(columns), next(columns))
    finally:
        engine.close()
    return result


def reference_tokens(policy: CausalLM) -> list[list[int]]:
    """Return the tokens of ``transformers.generate``, one prompt at a time."""
    responses = []
    for prompt in prompts():
        input_ids = torch.from_numpy(prompt)[None]
        module: Any = policy.module
        sequence = module.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=HORIZON,
            pad_token_id=0,
        )
        responses.append(sequence[0, len(prompt) :].tolist())
    return responses


def compare_answers(
    policy: CausalLM, expected: list[list[int]], answers: dict[int, tuple[np.ndarray, np.ndarray]]
) -> EngineComparison:
    """Compare an engine's responses with the reference tokens, and its log-probabilities with the
    policy's."""
    tokens = num_different = 0
    differences = []
    for number, prompt in enumerate(prompts()):
        engine_tokens, logprobs = answers[number]
        answer = Trajectory(identity=RecordId(0, number), actions=engine_tokens, prompt=prompt)
        with torch.no_grad():
            expected_logprobs = policy.evaluate(policy.collate([answer]), 1.0).logprobs[0].numpy()
        differences.append(np.abs(expected_logprobs[: len(engine_tokens)] - logprobs).max())
        reference = expected[number]
        num_equal = next(
            (i for i, (a, b) in enumerate(zip(engine_tokens, reference, strict=False)) if a != b),
            min(len(engine_tokens), len(reference)),
        )
        tokens += len(reference)
        num_different += max(len(engine_tokens), len(reference)) - num_equal
    return EngineComparison(tokens, num_different, float(np.max(differences)))


def main() -> None:
    """Write the responses of an engine to a file (``NAME FOLDER OUT``), in its environment."""
    name, folder, out = sys.argv[1:]
    result = answers(engines.get(name), Path(folder))
    columns: dict[str, Any] = {f"tokens{i}": tokens for i, (tokens, _) in result.items()}
    columns |= {f"logprobs{i}": logprobs for i, (_, logprobs) in result.items()}
    np.savez(out, **columns)


if __name__ == "__main__":
    main()
