"""The disk space that a run will need, and the check that the filesystem has it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config import RunConfig
from rlinf.device_memory import GIB
from rlinf.errors import ConfigError
from stages.factory import policy_class
from stages.flow import flow_of

MOMENTS = {"adamw": 2, "sgd": 1}
"""Tensors of optimizer state per parameter."""


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes that a run keeps on disk at the same time. Trajectories and logs are not counted."""

    weights: int
    """Bytes of one version of the weights."""
    checkpoint: int
    """Bytes of one checkpoint of the trainer; 0 if only adapters are trained."""
    num_weights: int
    """Number of versions at once, including the one that is being written."""
    num_checkpoints: int
    """Number of checkpoints at once, including the one that is being written."""

    @property
    def total(self) -> int:
        return self.weights * self.num_weights + self.checkpoint * self.num_checkpoints


def estimate_disk_space(config: RunConfig) -> DiskEstimate | None:
    """Return the disk space that a run will need; None if the policy's size is not known yet."""
    policy_cls, options = policy_class(config)
    policy = policy_cls.meta_from_config(options)
    if policy is None:
        return None
    weights = sum(_num_bytes(tensor) for tensor in _unique(policy.module.parameters()))
    state = weights * (1 + MOMENTS[config.optimizer.name])
    checkpoint = 0 if (config.trainer.model_extra or {}).get("lora") else state
    if not config.iterations:
        return DiskEstimate(weights, checkpoint, 1, 0)
    flow, settings = flow_of(config), config.checkpoint
    # As in the retention policy: the newest outputs, those that stay for ever, and the next one.
    newest = max(2, settings.keep_last, *map(flow.num_retained_outputs, flow.stages))
    newest = min(newest + config.rollout.staleness + 1, config.iterations)
    forever = config.iterations // settings.keep_every if settings.keep_every else 0
    best = settings.keep_best if 0 < config.evaluate.every < config.iterations else 0
    initial = 1
    return DiskEstimate(weights, checkpoint, initial + newest + forever + best, newest + forever)


def check_disk_space(config: RunConfig) -> None:
    """Check that the filesystem of a new run has the space that the run will need.

    Raises:
        ConfigError: it has less.
    """
    folder = config.run.folder
    if folder.exists() or (estimate := estimate_disk_space(config)) is None:
        return
    free = free_bytes(folder)
    if estimate.total > free:
        raise ConfigError(
            f"run.root: the run will keep {estimate.num_weights} versions of the weights "
            f"({estimate.weights / GIB:.2g} GiB each) and {estimate.num_checkpoints} checkpoints "
            f"({estimate.checkpoint / GIB:.2g} GiB each) at once, {estimate.total / GIB:.3g} GiB "
            f"together, and {folder.parent} has {free / GIB:.3g} GiB free; choose another "
            "run.root, lower checkpoint.keep_last or keep_best, or raise checkpoint.keep_every"
        )


def free_bytes(folder: Path) -> int:
    """Return the bytes that the user can still write where ``folder`` will be."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _num_bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _unique(tensors: Iterable[Any]) -> Iterable[Any]:
    """Return each tensor once; weights may be tied."""
    return {id(tensor): tensor for tensor in tensors}.values()
