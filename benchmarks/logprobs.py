"""Memory of log-probabilities and entropies of a large vocabulary, forward and backward.

In parts over the plain way; a process for each, which has the hidden states and the head before
the measuring begins. Peak of what the process holds above that (``VmHWM``, reset through
``clear_refs``).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.row import Row, median_row
from rlinf.models.logprobs import head_logprobs, token_logprobs

TOKENS, VOCABULARY, HIDDEN = 2048, 150_000, 128


def measure() -> list[Row]:
    """Bytes of one way over those of the other, once."""
    parts, plain = (
        int(
            subprocess.run(
                [sys.executable, "-m", "benchmarks.logprobs", way],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for way in ("parts", "plain")
    )
    return [median_row("logprob_memory_ratio", [parts / plain], "", 1 / 3, "lower")]


def peak(way: str) -> int:
    """Most KiB above the rest that one forward and backward pass takes."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN) * 0.02).requires_grad_()
    taken = torch.randint(VOCABULARY, (TOKENS,))
    # A first pass on a few rows: libraries load and allocate what they keep.
    head_logprobs(hidden[:2], weight[:64], taken[:2] % 64, 1.0).sum().backward()  # type: ignore[no-untyped-call]
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    rest = _status("VmRSS")
    if way == "parts":
        loss = head_logprobs(hidden, weight, taken, 1.0).sum()
    else:
        chosen, entropy = token_logprobs(hidden @ weight.T, taken, 1.0, True)
        assert entropy is not None
        loss = chosen.sum() + entropy.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return _status("VmHWM") - rest


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(name)


if __name__ == "__main__":
    print(peak(sys.argv[1]))
