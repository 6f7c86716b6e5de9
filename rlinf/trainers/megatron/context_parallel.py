"""Sequences shared out over processes by position (context parallel).

They are cut as Megatron-Core's ``get_batch_on_this_cp_rank`` does it: into twice as many chunks as
there are processes, of which process r of n has chunks r and 2n - 1 - r. Under causal attention a
chunk has the more work the more stands before it, and two such chunks together always the same.

Each layer gathers the keys and values of all processes (as Llama 3 does, arXiv 2407.21783, section
3.3.2), where Megatron-Core takes the attention of Transformer Engine: it needs no more than torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def local_positions(length: int, processes: int, rank: int) -> Tensor:
    """Which positions a process has, ``[length / processes]``, in order.

    Args:
        length: a multiple of twice the processes.
    """
    chunks = torch.arange(length).view(2 * processes, -1)
    return torch.cat((chunks[rank], chunks[2 * processes - 1 - rank]))


def gather_order(length: int, processes: int) -> Tensor:
    """``[length]``: where each position stands, when the processes' own follow one another."""
    return torch.cat(
        [local_positions(length, processes, rank) for rank in range(processes)]
    ).argsort()


def gather_sequence(own: Tensor, group: Any) -> Tensor:
    """What all processes have, in order; collective.

    Args:
        own: ``[S / n, ...]``, of this process's positions.
        group: the n processes.

    Returns:
        ``[S, ...]``. Its gradients in all processes are added up.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    found = gather_from_sequence_parallel_region(own.contiguous(), group=group)
    return found.index_select(0, gather_order(len(found), group.size()).to(found.device))


def context_parallel_attention(query: Tensor, key: Tensor, value: Tensor, group: Any) -> Tensor:
    """Causal attention of this process's positions to those of all; collective.

    Args:
        query: ``[S / n, B, H, D]``; keys and values may have fewer heads.
        group: the n processes.

    Returns:
        ``[S / n, B, H, D]``.
    """
    keys, values = gather_sequence(torch.cat((key, value), -1), group).chunk(2, -1)
    rank, last, half = group.rank(), 2 * group.size() - 1, len(query) // 2
    found = []
    for chunk, queries in zip((rank, last - rank), torch.split(query, half), strict=True):
        stop = (chunk + 1) * half
        places = torch.arange(stop, device=query.device)
        # What stands behind the chunk is left out: it would be computed, and then masked.
        own, seen, there = (
            each.permute(1, 2, 0, 3) for each in (queries, keys[:stop], values[:stop])
        )
        out = F.scaled_dot_product_attention(
            own,
            seen,
            there,
            attn_mask=places <= places[-half:, None],
            enable_gqa=query.shape[2] != key.shape[2],
        )
        found.append(out.permute(2, 0, 1, 3))
    return torch.cat(found)
