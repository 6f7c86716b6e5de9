"""How much each step weighs in the loss of a minibatch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


def step_shares(
    mask: Tensor, aggregation: Aggregation, length: int | None = None
) -> tuple[Tensor, float]:
    """Weight ``[N, T]`` of each step and the divisor of the whole, which add up over parts.

    ``(weights * loss).sum() / max(1, divisor)`` is the aggregated loss of one part, and with the
    sums of both that of several; a part without any step that counts adds nothing to either.

    Args:
        mask: ``[N, T]`` 1 where a step counts.
        aggregation: ``token_mean`` averages over all steps (DAPO, arXiv 2503.14476),
            ``seq_mean_token_mean`` first within each sequence (GRPO, arXiv 2402.03300),
            ``seq_mean_token_sum`` sums within each sequence (Dr. GRPO, arXiv 2503.20783).
        length: that sum is divided by this constant; None: by nothing.
    """
    lengths = mask.sum(-1, keepdim=True)
    if aggregation == "token_mean":
        return mask, float(mask.sum())
    sequences = float((lengths > 0).sum())
    if aggregation == "seq_mean_token_mean":
        return mask / lengths.clamp(min=1), sequences
    return mask if length is None else mask / length, sequences
