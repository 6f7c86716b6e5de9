"""Log-probabilities and entropies of tokens, in chunks if all logits need too much memory.

With a vocabulary of 150,000, the logits of one position need 0.6 MB in float32, and autograd stores
several such tensors. In chunks, the logits of only some positions exist at a time, and the backward
pass computes them again from the hidden states.
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
"""Largest number of logits in memory at once; a batch with more logits is computed in chunks."""


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities ``[...]`` of the tokens ``targets`` ``[...]`` and entropies, nats.

    Args:
        logits: ``[..., V]``, of any floating type; computed in float32.
        targets: Token ids ``[...]``.
        temperature: Divides the logits; 0 counts as 1.
        entropy: Whether to compute entropies; otherwise they are None.
    """
    logprobs = F.log_softmax(_scaled(logits, temperature or 1.0), dim=-1)
    target_logprobs = logprobs.gather(-1, targets[..., None])[..., 0]
    return target_logprobs, -(logprobs.exp() * logprobs).sum(-1) if entropy else None


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
    """Return log-probabilities and entropies of the logits ``hidden @ weight.T + bias``, chunked.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, of the same type as ``hidden``.
        targets: Token ids ``[N]``.
        temperature: Divides the logits; 0 counts as 1.
        max_logits: Maximum number of logits of a chunk. A chunk has at least one position.
        bias: ``[V]``.
        softcap: ``c`` in ``c * tanh(logits / c)`` (Gemma 2, arXiv 2408.00118, section 2).
        entropy: Whether to compute the entropy.

    Returns:
        ``[N, 2]``, log-probability and entropy of each row, or ``[N, 1]`` without entropy; float32,
        or float64 for float64 inputs.
    """
    chunk_size = max(1, max_logits // weight.shape[0])
    outputs: Tensor = _HeadFunction.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature or 1.0, chunk_size, softcap, entropy
    )
    return outputs


def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    num_top: int,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return log-probabilities of tokens, and the most likely tokens, of a head's logits, chunked.

    Args:
        hidden, weight, targets, temperature, bias, softcap: as for :func:`head_logprobs`.
        num_top: number ``K`` of most likely tokens.

    Returns:
        ``[N, 1 + 2 K]`` float32: the log-probability of the target, the ids of the most likely
        tokens (exact, because they are below ``2 ** 24``), and their log-probabilities.
    """
    chunk_size = max(1, MAX_LOGITS // weight.shape[0])
    parts = [
        top_of_logits(
            _capped(_logits(hidden[start : start + chunk_size], weight, bias), softcap),
            targets[start : start + chunk_size],
            temperature,
            num_top,
        )
        for start in range(0, len(hidden), chunk_size)
    ]
    return torch.cat(parts)


def top_of_logits(logits: Tensor, targets: Tensor, temperature: float, num_top: int) -> Tensor:
    """Return what :func:`top_logprobs` returns, from logits ``[N, V]``."""
    logprobs = _logprobs(logits, temperature or 1.0)
    target_logprobs = logprobs.gather(-1, targets[:, None])
    top = logprobs.topk(num_top, dim=-1)
    return torch.cat([target_logprobs, top.indices, top.values], dim=-1).float()


class _HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        cap: float | None,
        entropy: bool,
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        out = torch.empty(len(hidden), 1 + entropy, dtype=dtype, device=hidden.device)
        for start in range(0, len(hidden), chunk_size):
            part = slice(start, start + chunk_size)
            logprobs = _logprobs(_capped(_logits(hidden[part], weight, bias), cap), temperature)
            out[part, 0] = logprobs.gather(-1, targets[part, None])[:, 0]
            if entropy:
                out[part, 1] = -(logprobs.exp() * logprobs).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, out)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.cap, ctx.entropy = cap, entropy
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """For logits z, p = softmax(z / T), target a and entropy H: d log p_a / dz_j =
        (1[j = a] - p_j) / T and dH / dz_j = -p_j (log p_j + H) / T. With a soft cap c,
        z = c tanh(x / c) and dz / dx = 1 - (z / c)^2."""
        (grad,) = grads
        hidden, weight, bias, targets, out = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        # Accumulated in float32 for all weight types, as in a single matrix product.
        grad_weight = torch.zeros_like(weight, dtype=out.dtype) if needs_grad[1] else None
        grad_bias = None
        if bias is not None and needs_grad[2]:
            grad_bias = torch.zeros_like(bias, dtype=out.dtype)
        for start in range(0, len(hidden), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            logits = _capped(_logits(hidden[part], weight, bias), ctx.cap)
            cap_slope = None
            if ctx.cap is not None:
                cap_slope = 1 - (logits.to(out.dtype) / ctx.cap).square()
            logprobs = _logprobs(logits, ctx.temperature)
            del logits
            grad_logprob = grad[part, :1]
            # In place: -p (g + h (log p + H)), plus g at the target token, for the gradients g of
            # the log-probability and h of the entropy.
            if ctx.entropy:
                probs = logprobs.exp()
                logprobs.add_(out[part, 1:]).mul_(grad[part, 1:]).add_(grad_logprob).mul_(probs)
                del probs
            else:
                logprobs.exp_().mul_(grad_logprob)
            grad_logits = logprobs.neg_().scatter_add_(1, targets[part, None], grad_logprob)
            grad_logits.div_(ctx.temperature)
            if cap_slope is not None:
                grad_logits.mul_(cap_slope)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                if grad_weight.dtype == hidden.dtype:
                    grad_weight.addmm_(grad_logits.T, hidden[part])
                else:
                    grad_weight += grad_logits.T @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *[None] * 5,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ weight.T
    return logits if bias is None else logits.add_(bias)


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    """Apply the soft cap in place and in the type of the logits, as networks do."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _logprobs(logits: Tensor, temperature: float) -> Tensor:
    return F.log_softmax(_scaled(logits, temperature), -1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


MASKED_LOGIT = -1e9
"""Logit of a masked token. It is finite, because minus infinity times probability 0 is NaN. For
float16 it is half of the lowest number, so sums with it are finite, too."""


def mask_tokens(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return logits ``[..., V]`` in which ``tokens`` have probability 0."""
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
"""Families whose logits are the outputs of the head, without scaling or capping."""

SOFTCAP_FAMILIES = {"gemma2", "gemma3_text"}
"""Families like :data:`PLAIN_HEAD_FAMILIES`, but with a soft cap after the output head if their
configuration has ``final_logit_softcapping``."""


def plain_head(module: Any) -> nn.Linear | None:
    """Return the output head if nothing but a known soft cap changes its logits, else None."""
    if (
        getattr(module.config, "model_type", None)
        not in PLAIN_HEAD_FAMILIES | SOFTCAP_FAMILIES | IMAGE_FAMILIES
    ):
        return None
    head = module.get_output_embeddings()
    return head if isinstance(head, nn.Linear) else None


def final_softcap(module: Any) -> float | None:
    """Return the final soft cap of the logits of a network, or None if it has none."""
    has_softcap = module.config.model_type in SOFTCAP_FAMILIES
    return getattr(module.config, "final_logit_softcapping", None) if has_softcap else None


@contextlib.contextmanager
def without_final_softcap(module: Any) -> Iterator[None]:
    """Disable the final soft cap of a network."""
    settings = module.config
    if final_softcap(module) is not None:
        # A copy, because networks of other threads share the configuration.
        module.config = copy.copy(settings)
        module.config.final_logit_softcapping = None
    try:
        yield
    finally:
        module.config = settings


@functools.cache
def warn_full_logits(family: str) -> None:
    """Warn, once per family, that its logits are not computed in chunks."""
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
    """Replace the computation of an output head.

    ``compute`` must run inside the network's forward pass, because only there are sharded weights
    gathered. Its arguments are hidden states, weight and bias of the head.
    """
    head.__dict__["forward"] = lambda hidden: compute(hidden, head.weight, head.bias)
    try:
        yield
    finally:
        del head.__dict__["forward"]
