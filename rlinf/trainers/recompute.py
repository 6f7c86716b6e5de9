"""Activations that are computed again in the backward pass, block by block, instead of kept."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

from rlinf.errors import ConfigError
from rlinf.models.base import Policy


def recompute_blocks(policy: Policy) -> None:
    """Keep only the inputs of a policy's blocks for the backward pass.

    Raises:
        ConfigError: the policy names no blocks.
    """
    blocks = policy.blocks()
    if not blocks:
        raise ConfigError(
            f"trainer.activation_checkpointing: {type(policy).__name__} names no blocks whose "
            "activations could be computed again; set it to false"
        )
    for block in blocks:
        # Inside the block's own call, so that hooks of what shards it run once.
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
