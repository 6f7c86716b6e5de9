"""Megatron's process groups; a process can have those of one layout only."""

from __future__ import annotations

import logging
import warnings

import torch

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.errors import StageError

UNUSED_SEED = 1
"""Seed of generators that are never used: there is no dropout, and weights are loaded."""
_initialized: list[tuple[int, str]] = []


def initialize_process_groups(world: ProcessGroupInfo, device_type: str) -> None:
    """Connect the processes, and create the process groups of their layout unless they exist.

    Raises:
        StageError: this process has the groups of another layout.
    """
    if device_type == "cpu":
        from rlinf.trainers.megatron import cpu_import_hook

        cpu_import_hook.install_import_hook()
    world.init_process_group(device_type)
    requested = (world.size, str(world.layout))
    if _initialized:
        if _initialized != [requested]:
            raise StageError(
                f"trainer=megatron: this process has the groups of {_initialized[0]} but needs "
                f"those of {requested}; give all trainers of a pool one layout"
            )
        return
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Megatron warns that Apex and Transformer Engine are missing, which it does not need.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel  # noqa: F401
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: F401

    layout = world.layout
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=False,
    )
    with torch.random.fork_rng(devices=[]):  # without a GPU, Megatron seeds the global generator
        tensor_parallel.model_parallel_cuda_manual_seed(UNUSED_SEED)
    _initialized.append(requested)
