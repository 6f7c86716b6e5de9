"""Log-probabilities and entropies of tokens, in parts where the whole would take too much memory.

A vocabulary of 150,000 makes 0.6 MB of each position in float32, and the plain way keeps several
such tensors until the backward pass. In parts, only so many positions' logits exist at a time; the
backward pass computes them again from the hidden states.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.models.checkpoint_tensors import IMAGE_FAMILIES

log = logging.getLogger("rlinf")
MAX_LOGITS = 1 << 25
"""Most logits of a batch that are computed in the plain way, which is exact to the last bit of what
it was before there were parts; and those of one part."""


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities ``[...]`` of the tokens ``taken`` ``[...]``, and entropies in nats.

    Args:
        logits: ``[..., V]``, of any floating type; computed with in float32.
        temperature: divides the logits; 0 counts as 1.
    """
    logprobs = F.log_softmax(_scaled(logits, temperature or 1.0), dim=-1)
    chosen = logprobs.gather(-1, targets[..., None])[..., 0]
    return chosen, -(logprobs.exp() * logprobs).sum(-1) if entropy else None


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    max_logits: int = MAX_LOGITS,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = True,
) -> Tensor:
    """The same of ``hidden @ weight.T + bias``, without its ever being whole: ``[N, 2]``.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, of the same type.
        taken: ``[N]``.
        part: logits that exist at a time, at least those of one position.
        bias: ``[V]``.
        cap: logits are ``cap * tanh(logits / cap)`` (Gemma 2, arXiv 2408.00118, section 2).
        entropy: false: without it, ``[N, 1]``.

    Returns:
        Log-probability and entropy of each row, float32 (float64 of float64).
    """
    rows = max(1, max_logits // weight.shape[0])
    outputs: Tensor = _Head.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature or 1.0, rows, softcap, entropy
    )
    return outputs


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        taken: Tensor,
        temperature: float,
        rows: int,
        cap: float | None,
        entropy: bool,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        out = torch.empty(len(hidden), 1 + entropy, dtype=wide, device=hidden.device)
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            logprobs = _logprobs(_capped(_logits(hidden[part], weight, bias), cap), temperature)
            out[part, 0] = logprobs.gather(-1, taken[part, None])[:, 0]
            if entropy:
                out[part, 1] = -(logprobs.exp() * logprobs).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, taken, out)
        ctx.temperature, ctx.rows, ctx.cap, ctx.entropy = temperature, rows, cap, entropy
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With p = softmax(z / T): d log p_a / dz_j = (1[j = a] - p_j) / T, and of the entropy H
        dH / dz_j = -p_j (log p_j + H) / T. Where z = c tanh(x / c): dz / dx = 1 - (z / c)^2."""
        (grad,) = grads
        hidden, weight, bias, taken, out = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        # Summed in float32 whatever the type of the weights, as one product would be.
        of_weight = torch.zeros_like(weight, dtype=out.dtype) if wanted[1] else None
        of_bias = None
        if bias is not None and wanted[2]:
            of_bias = torch.zeros_like(bias, dtype=out.dtype)
        for at in range(0, len(hidden), ctx.rows):
            part = slice(at, at + ctx.rows)
            logits = _capped(_logits(hidden[part], weight, bias), ctx.cap)
            slope = None
            if ctx.cap is not None:
                slope = 1 - (logits.to(out.dtype) / ctx.cap).square()
            logprobs = _logprobs(logits, ctx.temperature)
            del logits
            chosen = grad[part, :1]
            # In place: -p (g + h (log p + H)), then g more where the token was taken.
            if ctx.entropy:
                probs = logprobs.exp()
                logprobs.add_(out[part, 1:]).mul_(grad[part, 1:]).add_(chosen).mul_(probs)
                del probs
            else:
                logprobs.exp_().mul_(chosen)
            of_logits = logprobs.neg_().scatter_add_(1, taken[part, None], chosen)
            of_logits.div_(ctx.temperature)
            if slope is not None:
                of_logits.mul_(slope)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            of_logits = of_logits.to(hidden.dtype)
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
            None if of_bias is None else of_bias.to(weight.dtype),
            *[None] * 5,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ weight.T
    return logits if bias is None else logits.add_(bias)


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    """Written over, in the type that they have, as networks do."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _logprobs(logits: Tensor, temperature: float) -> Tensor:
    return F.log_softmax(_scaled(logits, temperature), -1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


MASKED_LOGIT = -1e9
"""Logit of a token that is never said; finite, for minus infinity times its probability is none.
Of float16 half of its lowest number, so that what is added to a bias of it is finite too."""


def mask_tokens(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits ``[..., V]`` with which some tokens are never said."""
    if not tokens:
        return logits
    value = max(MASKED_LOGIT, torch.finfo(logits.dtype).min / 2)
    return logits.index_fill(-1, torch.tensor(tokens, device=logits.device), value)


PLAIN_HEAD_FAMILIES = {
    *("apertus", "bloom", "codegen", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "gpt2"),
    *("gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "hunyuan_v1_dense", "lfm2", "llama"),
    *("ministral", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe"),
    *("opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss"),
    *("smollm3", "stablelm", "starcoder2"),
}
"""Families whose logits are what their output head gives: nothing scales or caps them."""

SOFTCAP_FAMILIES = {"gemma2", "gemma3_text"}
"""Families whose logits are capped after their output head, where their settings say at what
(``final_logit_softcapping``), and nothing else."""


def plain_head(module: Any) -> nn.Linear | None:
    """The output head, where it is known what works on the logits after it: at most a cap."""
    if (
        getattr(module.config, "model_type", None)
        not in PLAIN_HEAD_FAMILIES | SOFTCAP_FAMILIES | IMAGE_FAMILIES
    ):
        return None
    head = module.get_output_embeddings()
    return head if isinstance(head, nn.Linear) else None


def final_softcap(module: Any) -> float | None:
    """Return the final soft cap of the logits of a network, or None if it has none."""
    known = module.config.model_type in SOFTCAP_FAMILIES
    return getattr(module.config, "final_logit_softcapping", None) if known else None


@contextlib.contextmanager
def without_final_softcap(module: Any) -> Iterator[None]:
    """Have a network give what comes from its head as it is."""
    settings = module.config
    if final_softcap(module) is not None:
        # Its own alone: other threads compute with copies of the network that share the settings.
        module.config = copy.copy(settings)
        module.config.final_logit_softcapping = None
    try:
        yield
    finally:
        module.config = settings


@functools.cache
def warn_full_logits(family: str) -> None:
    """Log, once for each family, that its logits are not computed in parts."""
    log.warning(
        "models of type %s may change the logits after their output head: log-probabilities are "
        "computed from all logits at once, several float32 numbers for each position and token of "
        "the vocabulary; lower trainer.max_tokens_per_microbatch where memory runs out",
        family,
    )


@contextlib.contextmanager
def override_head(
    head: nn.Linear, compute: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> Iterator[None]:
    """Have a head give something else than logits.

    Inside the network's own forward pass, for there alone sharded weights are gathered.
    """
    head.__dict__["forward"] = lambda hidden: compute(hidden, head.weight, head.bias)
    try:
        yield
    finally:
        del head.__dict__["forward"]
