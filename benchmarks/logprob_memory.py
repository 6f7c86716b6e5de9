"""Peak memory of log-probabilities and entropies of a large vocabulary, forward and backward.

The row is the peak of computing them in chunks, divided by that of computing all at once. Each is a
separate process. The peak includes interpreter, torch, hidden states and weights of the head.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.process_memory import measure_peaks
from benchmarks.row import BenchmarkRow, median_row
from rlinf.models.logprobs import head_logprobs, token_logprobs

TOKENS, VOCABULARY, HIDDEN, ROUNDS = 2048, 150_000, 896, 2


def measure() -> list[BenchmarkRow]:
    """Measure the ratio of peak memory."""
    return [
        median_row("logprob_memory_ratio", [ratio() for _ in range(ROUNDS)], "", 1 / 3, "lower")
    ]


def ratio() -> float:
    """Return one ratio. The processes run one after the other, because memory may be small."""
    command = [sys.executable, "-m", "benchmarks.logprob_memory"]
    peaks = [measure_peaks([[*command, way]])[0][1] for way in ("parts", "plain")]
    print(f"  parts {peaks[0] / 1e9:.2f} GB, plain {peaks[1] / 1e9:.2f} GB")
    return peaks[0] / peaks[1]


def run(way: str) -> None:
    """Run one forward and backward pass."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN).mul_(0.02)).requires_grad_()
    token_ids = torch.randint(VOCABULARY, (TOKENS,))
    # Warm up on a few rows, so that libraries load and allocate their buffers.
    head_logprobs(hidden[:2], weight[:64], token_ids[:2] % 64, 1.0).sum().backward()
    hidden.grad = weight.grad = None
    print("ready", flush=True)
    sys.stdin.readline()
    if way == "parts":
        loss = head_logprobs(hidden, weight, token_ids, 1.0).sum()
    else:
        logprobs, entropy = token_logprobs(hidden @ weight.T, token_ids, 1.0, True)
        assert entropy is not None
        loss = logprobs.sum() + entropy.sum()
    loss.backward()


if __name__ == "__main__":
    run(sys.argv[1])
