"""Softmax attention with grouped heads, by a fused kernel on each device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention of queries whose heads share keys and values in groups.

    Args:
        query: ``[B, H, r, D]``.
        key: ``[B, K, k, D]``; H is a multiple of K, and heads of one group are consecutive.
        value: ``[B, K, k, D]``.
        mask: bool, broadcast to ``[B, H, r, k]``, true where visible.
        scale: Factor of the scores; default ``D ** -0.5``.

    Returns:
        ``[B, H, r, D]``.
    """
    group_size = query.shape[1] // key.shape[1]
    if group_size > 1 and mask is not None and query.is_cuda:
        # With a mask, torch's fused kernels for GPUs need as many key heads as query heads.
        # Otherwise torch would compute all scores, in memory, without a warning.
        key, value = (states.repeat_interleave(group_size, dim=1) for states in (key, value))
        group_size = 1
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=group_size > 1,
    )


def avoid_plans_for_shapes() -> None:
    """Exclude cuDNN from attention on GPUs, for the whole process.

    cuDNN builds an execution plan for each new shape, which takes up to half a second
    (pytorch/pytorch#155958). Nearly every micro-batch and every batch of prompts has a new shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
