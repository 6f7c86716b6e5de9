"""Compare the greedy responses of every engine, and their log-probabilities with the trainer's.

The right tokens are those of ``transformers.generate``, and the right log-probabilities those of
the policy's forward pass over the whole response, as it is trained, all in float32.
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
"""Heads of 64: the only ones that vLLM takes on every CPU."""
COUNT, LONGEST, HORIZON, SHARPER = 24, 24, 32, 4.0
"""Prompts, most tokens of one and of a response, and what matrices are multiplied by, so that the
best token is not the best by rounding alone."""
ENGINES = {
    "transformers": None,
    "vllm": None,
    "vllm_in_process": "vllm",
    "sglang": None,
    "sglang_in_process": "sglang",
}
"""By name the environment that an engine runs in; None: this one."""
Answers = dict[int, tuple[np.ndarray, np.ndarray]]
"""Tokens and log-probabilities by prompt."""
HEAD = """
| engine | responses | tokens | other tokens | log-probabilities differ by |
|---|---|---|---|---|"""


@dataclass(frozen=True)
class EngineComparison:
    """An engine's responses beside the right ones."""

    tokens: int
    """Tokens of all responses."""
    others: int
    """Tokens from which on a response differs from the right one, or that it lacks."""
    differ: float
    """Most that a log-probability of a token differs from that of the policy."""

    @property
    def good(self) -> bool:
        """Return whether the responses are equal up to rounding."""
        return not self.others and self.differ <= TOLERANCE

    def line(self, name: str) -> str:
        """A row of the table, in Markdown."""
        return f"| `{name}` | {COUNT} | {self.tokens} | {self.others} | {self.differ:.1e} |" + (
            "" if self.good else " differs"
        )


def keys() -> dict[str, str]:
    """Return the key of each engine's cached result."""
    sizes = [COUNT, LONGEST, HORIZON, SHARPER]
    work = [inspect.getsource(part) for part in (policy, answers, right, beside)]
    return {
        name: result_key(
            _other(name), engine=name, model=MODEL.model_dump(), sizes=sizes, work=work
        )
        for name in ENGINES
    }


def compare(kept: ResultCache, keys: dict[str, str], place: Path) -> bool:
    """Ask what is missing of the table and print it; whether all of it is the same."""
    good = True
    expected: tuple[CausalLM, list[list[int]]] | None = None
    print(HEAD, flush=True)
    for name, key in keys.items():
        if key not in kept:
            if (lacks := missing_environment(_other(name))) is not None:
                print(f"| `{name}` | {lacks} | | | |", flush=True)
                continue
            if expected is None:
                loaded = policy(place / "served")
                expected = (loaded, right(loaded))
            kept[key] = asdict(beside(*expected, generate_answers(name, place / "served")))
        result = EngineComparison(**kept[key])
        print(result.line(name), flush=True)
        good &= result.good
    print(f"\ngreedy, float32; tolerance {TOLERANCE:g} for log-probabilities, no other token")
    return good


def _other(name: str) -> str | None:
    """The environment of an engine or of its server; None: this one."""
    cls = engines.get(name)
    return cls.Config().server_python if issubclass(cls, ServerEngine) else ENGINES[name]


def generate_answers(name: str, folder: Path) -> Answers:
    """Return an engine's answers; it runs in the environment that it needs."""
    own = ENGINES[name]
    if own is None:
        return answers(engines.get(name), folder)
    out = folder.with_name(f"{name}.npz")
    words = ["-m", "benchmarks.engine_equality", name, str(folder), str(out)]
    subprocess.run(
        [resolve_interpreter(own, "equality"), *words], cwd=package_paths.ROOT, check=True
    )
    with np.load(out) as file:
        return {i: (file[f"tokens{i}"], file[f"logprobs{i}"]) for i in range(COUNT)}


def prompts() -> list[np.ndarray]:
    """Return prompts of different lengths."""
    random = np.random.default_rng(0)
    return [random.integers(2, 14, random.integers(3, LONGEST)) for _ in range(COUNT)]


def policy(folder: Path) -> CausalLM:
    """A new one whose preferences are clear, which the folder has then."""
    first = folder.with_name("first")
    first.mkdir()
    folder.mkdir()
    CausalLM.create(MODEL, {"alphabet": "0123456789+="}, 0, first)
    loaded = CausalLM.load(first, MODEL)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARPER)
    loaded.save(folder, dict(loaded.module.state_dict()))
    return CausalLM.load(folder, MODEL)


def answers(cls: Any, folder: Path) -> Answers:
    """Tokens and log-probabilities of an engine, by prompt."""
    given, found = prompts(), {}
    steps = {
        "sample": np.arange(COUNT),
        "prompt": np.array([np.pad(prompt, (0, LONGEST - len(prompt))) for prompt in given]),
        "prompt_length": np.array([len(prompt) for prompt in given]),
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
                found[number] = (next(columns), next(columns))
    finally:
        engine.close()
    return found


def right(policy: CausalLM) -> list[list[int]]:
    """The tokens that ``transformers.generate`` gives, one prompt after the other."""
    found = []
    for prompt in prompts():
        input_ids = torch.from_numpy(prompt)[None]
        module: Any = policy.module
        whole = module.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=HORIZON,
            pad_token_id=0,
        )
        found.append(whole[0, len(prompt) :].tolist())
    return found


def beside(
    policy: CausalLM, expected: list[list[int]], answers: dict[int, tuple[np.ndarray, np.ndarray]]
) -> EngineComparison:
    """Compare an engine's responses with the right tokens, and its log-probabilities with the
    policy's."""
    tokens = others = 0
    gaps = []
    for number, prompt in enumerate(prompts()):
        ours, logprobs = answers[number]
        answer = Trajectory(identity=RecordId(0, number), actions=ours, prompt=prompt)
        with torch.no_grad():
            expected_logprobs = policy.evaluate(policy.collate([answer]), 1.0).logprobs[0].numpy()
        gaps.append(np.abs(expected_logprobs[: len(ours)] - logprobs).max())
        wanted = expected[number]
        same = next(
            (i for i, (a, b) in enumerate(zip(ours, wanted, strict=False)) if a != b),
            min(len(ours), len(wanted)),
        )
        tokens += len(wanted)
        others += max(len(ours), len(wanted)) - same
    return EngineComparison(tokens, others, float(np.max(gaps)))


def main() -> None:
    """Write what an engine answers: ``NAME FOLDER OUT``, in an environment that has it."""
    name, folder, out = sys.argv[1:]
    found = answers(engines.get(name), Path(folder))
    columns: dict[str, Any] = {f"tokens{i}": tokens for i, (tokens, _) in found.items()}
    columns |= {f"logprobs{i}": logprobs for i, (_, logprobs) in found.items()}
    np.savez(out, **columns)


if __name__ == "__main__":
    main()
