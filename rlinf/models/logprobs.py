"""Log-probabilities and entropies of tokens, in parts where the whole would take too much memory.

A vocabulary of 150,000 makes 0.6 MB of each position in float32, and the plain way keeps several
such tensors until the backward pass. In parts, only so many positions' logits exist at a time; the
backward pass computes them again from the hidden states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WHOLE = 1 << 25
"""Most logits of a batch that are computed in the plain way, which is exact to the last bit of what
it was before there were parts; and those of one part."""


def token_logprobs(
    logits: Tensor, taken: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities ``[...]`` of the tokens ``taken`` ``[...]``, and entropies in nats.

    Args:
        logits: ``[..., V]``, of any floating type; computed with in float32.
        temperature: divides the logits; 0 counts as 1.
    """
    logprobs = F.log_softmax(_scaled(logits, temperature or 1.0), dim=-1)
    chosen = logprobs.gather(-1, taken[..., None])[..., 0]
    return chosen, -(logprobs.exp() * logprobs).sum(-1) if entropy else None


def head_logprobs(
    hidden: Tensor, weight: Tensor, taken: Tensor, temperature: float, part: int = WHOLE
) -> Tensor:
    """The same of ``hidden @ weight.T``, without its ever being whole: ``[N, 2]``.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, of the same type.
        taken: ``[N]``.
        part: logits that exist at a time, at least those of one position.

    Returns:
        Log-probability and entropy of each row, float32 (float64 of float64).
    """
    rows = max(1, part // weight.shape[0])
    outputs: Tensor = _Head.apply(  # type: ignore[no-untyped-call]
        hidden, weight, taken, temperature or 1.0, rows
    )
    return outputs


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, taken: Tensor, temperature: float, rows: int
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        out = torch.empty(len(hidden), 2, dtype=wide, device=hidden.device)
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            logprobs = F.log_softmax(_scaled(hidden[part] @ weight.T, temperature), dim=-1)
            out[part, 0] = logprobs.gather(-1, taken[part, None])[:, 0]
            out[part, 1] = -(logprobs.exp() * logprobs).sum(-1)
        ctx.save_for_backward(hidden, weight, taken, out)
        ctx.temperature, ctx.rows = temperature, rows
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With p = softmax(z / T): d log p_a / dz_j = (1[j = a] - p_j) / T, and of the entropy H
        dH / dz_j = -p_j (log p_j + H) / T."""
        (grad,) = grads
        hidden, weight, taken, out = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in float32 whatever the type of the weights, as one product would be.
        of_weight = torch.zeros_like(weight, dtype=out.dtype) if ctx.needs_input_grad[1] else None
        for at in range(0, len(hidden), ctx.rows):
            part = slice(at, at + ctx.rows)
            logprobs = F.log_softmax(_scaled(hidden[part] @ weight.T, ctx.temperature), dim=-1)
            chosen, spread = grad[part, :1], grad[part, 1:]
            probs = logprobs.exp()
            # Rewritten in place: -p (g + h (log p + H)), then g more where the token was taken.
            of_logits = logprobs.add_(out[part, 1:]).mul_(spread).add_(chosen).mul_(probs).neg_()
            del probs
            of_logits.scatter_add_(1, taken[part, None], chosen)
            of_logits = of_logits.div_(ctx.temperature).to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[part] = of_logits @ weight
            if of_weight is not None:
                if of_weight.dtype == hidden.dtype:
                    of_weight.addmm_(of_logits.T, hidden[part])
                else:
                    of_weight += of_logits.T @ hidden[part]
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
            None,
            None,
        )


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


HEAD_LAST = frozenset(
    {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mistral", "mixtral", "phi3", "olmo2"}
)
"""Families whose logits are what their output head gives: nothing scales or caps them."""


def plain_head(module: Any) -> nn.Linear | None:
    """The output head, where it is the last to work on the logits."""
    if getattr(module.config, "model_type", None) not in HEAD_LAST:
        return None
    head = module.get_output_embeddings()
    return head if isinstance(head, nn.Linear) and head.bias is None else None


@contextlib.contextmanager
def replaced(head: nn.Linear, compute: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Have a head give something else than logits.

    Inside the network's own forward pass, for there alone sharded weights are gathered.
    """
    head.__dict__["forward"] = lambda hidden: compute(hidden, head.weight)
    try:
        yield
    finally:
        del head.__dict__["forward"]
