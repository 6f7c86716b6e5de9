"""The trainer interface: forward passes, gradients, optimizer steps and checkpoints of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection, Section
from rlinf.data.load_balancing import StepSpan
from rlinf.data.trajectory import Trajectory
from rlinf.device_memory import MemorySize
from rlinf.errors import ConfigError
from rlinf.models.base import Batch, ModelHolder, Policy, StepOutputs
from rlinf.safetensors_io import StreamedState

Loss = tuple[Tensor, dict[str, Tensor]]
"""A loss with gradients, and metrics. Metrics are summed over micro-batches and processes. If the
name ends in :data:`MAX_SUFFIX`, the maximum is taken instead; such metrics must not be negative."""
MAX_SUFFIX = "_max"
LossFunction = Callable[[Policy, Batch, list[StepSpan]], Loss]
"""Function that returns the loss of a micro-batch. Its arguments are the policy, the policy's
inputs on its device, and for each row of the inputs the span of a trajectory of the minibatch."""

BatchLoss = Callable[[Policy, Batch], Loss]
"""Function that returns the loss of a policy on prepared inputs, which are on its device."""


def is_max_metric(metric: str) -> bool:
    """Return whether parts of a metric are combined by their maximum instead of their sum."""
    return metric.endswith(MAX_SUFFIX)


def merge_metrics(sums: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Merge ``parts``, the metrics of a part of a minibatch, into ``sums``."""
    for name, part in parts.items():
        if is_max_metric(name) and name in sums:
            sums[name] = torch.maximum(sums[name], part)
        else:
            sums[name] = sums.get(name, 0.0) + part


def loss_from_steps(
    loss: Callable[[StepOutputs, list[StepSpan]], Loss],
    temperature: float = 1.0,
    *,
    entropy: bool = False,
) -> LossFunction:
    """Return a loss function that uses only the policy's step outputs.

    Args:
        entropy: whether step outputs must include the entropy.
    """
    return lambda policy, inputs, spans: loss(
        policy.evaluate(inputs, temperature, entropy=entropy), spans
    )


class Trainer(ModelHolder, ABC):
    """A policy's weights, sharded over the processes of a group, and their optimizer.

    Every process makes the same calls with the same trajectories in the same order; calls may be
    collective unless stated otherwise. The split of a minibatch over processes and micro-batches
    does not change the mathematics.
    """

    Config: ClassVar[type[Section]] = Section
    supports_accumulation: ClassVar[bool] = True
    """Whether gradients of the parts of a batch can be accumulated one by one."""
    can_load_weights: ClassVar[bool] = True
    """Whether :meth:`load_weights` works. If false, other weights need a new trainer."""
    rounds_frozen_weights: ClassVar[bool] = False
    """Whether the trainer keeps frozen weights beside adapters in the data type of its passes."""
    supports_batches: ClassVar[bool] = False
    """Whether :meth:`accumulate_batch` works."""
    policy: Policy

    @abstractmethod
    def __init__(
        self, policy: Policy, config: Any, optimizer: OptimizerSection, world: ProcessGroupInfo
    ) -> None:
        """Take ownership of a policy, and create its optimizer.

        Args:
            policy: with several processes, the result of :meth:`Policy.meta_from_folder` if the
                policy supports it, so that no process needs memory for the full model.
        """

    @classmethod
    def required_packages(cls, config: Any) -> tuple[str, ...]:
        """Return the optional packages that the trainer imports, which are also names of extras."""
        return ()

    @abstractmethod
    def forward(
        self, trajectories: Sequence[Trajectory], temperature: float
    ) -> list[tuple[int, StepOutputs]]:
        """Return step outputs ``[T]`` of this process's share of the trajectories, on the CPU, as
        pairs of a trajectory's index and its outputs.

        Of a model replica, the primary rank returns them; other ranks may return nothing.
        """

    @abstractmethod
    def accumulate(
        self,
        trajectories: Sequence[Trajectory],
        loss: LossFunction,
        *,
        row_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Add the gradient of some samples to the gradient for the next :meth:`update`.

        If this fails, all accumulated gradients are discarded.

        Args:
            trajectories: the same on every process.
            loss: its sum over the micro-batches of all processes is the loss of these samples.
                Several threads may call it at once.
            row_groups: groups of rows that the loss needs in one micro-batch, unsplit; every row is
                in one group. None: rows are independent.
        """

    def accumulate_batch(self, batch: Batch, loss: BatchLoss) -> None:
        """Add the gradient of prepared inputs, which need neither splitting nor padding.

        Use this for many small steps: it has no overhead besides the loss and its gradient.

        Args:
            batch: tensors of any shapes; they are moved to the device.

        Raises:
            ConfigError: several processes train, or the trainer does not support prepared inputs.
        """
        raise ConfigError(
            f"trainer.name: {type(self).__name__} takes no batches of transitions; set trainer=fsdp"
        )

    @abstractmethod
    def discard_gradients(self) -> None:
        """Discard the accumulated gradient and free its memory."""

    @abstractmethod
    def update(
        self,
        *,
        lr: float | Mapping[str, float],
        scale: float = 1.0,
        groups: Collection[str] | None = None,
        check: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Step the optimizer on the accumulated gradient, and discard the gradient.

        Args:
            lr: learning rate, of all parameters or by parameter group.
            groups: parameter groups to change. Weights and moments of other groups are unchanged,
                and their gradient is discarded too.
            scale: factor of gradient and metrics, if losses were summed before the total weight of
                the batch was known.
            check: receives the metrics before any weight changes; an exception that it raises
                cancels the update.

        Returns:
            The metrics of the losses over micro-batches and processes, with ``loss`` and
            ``grad_norm`` (of the changed groups, before clipping).

        Raises:
            StageError: the loss or the gradient is not finite; no weight was changed.
            ValueError: nothing was accumulated.
        """

    def step(
        self,
        trajectories: Sequence[Trajectory],
        loss: LossFunction,
        *,
        lr: float | Mapping[str, float],
        groups: Collection[str] | None = None,
    ) -> dict[str, float]:
        """Do one optimizer step on a minibatch: :meth:`accumulate`, then :meth:`update`."""
        self.accumulate(trajectories, loss)
        return self.update(lr=lr, groups=groups)

    @abstractmethod
    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy, on the CPU, of this process's part of what :meth:`save` writes."""

    @abstractmethod
    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write this process's part of weights and optimizer, independently of other processes.

        Args:
            state: an earlier :meth:`snapshot`, which may be written while training continues. A
                later snapshot reuses its memory, so the caller must not use it afterwards.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read the files of :meth:`save`, written by any number of processes.

        Raises:
            DataError: the files are not the state of a trainer of this policy.
            ArtifactError: committed files are damaged; the trainer's state is then undefined.
        """

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load full weights by name, one after the other. Every process receives all of them.

        Training must not continue with them, because the optimizer's state is unchanged. They are
        for log-probabilities.
        """

    def load_policy_folder(self, folder: Path) -> None:
        """Load weights from a policy's folder. If the policy supports it, each process reads only
        the rows that it needs; see :meth:`Policy.load_weights`."""
        self.policy.load_weights(folder)

    @abstractmethod
    def stream_weights(self, *, copy: bool = False) -> StreamedState:
        """Return all weights, unsharded and on the CPU, one after the other, so that no process
        needs memory for all of them.

        Args:
            copy: return copies of the trainer's own tensors.
        """

    def full_state_dict(self, *, copy: bool = False) -> dict[str, Tensor]:
        """Return the weights of :meth:`stream_weights` by name; tied weights share memory."""
        return self.stream_weights(copy=copy).collect()

    def group_sizes(self) -> Mapping[str, MemorySize]:
        """Return the sizes of tensor groups; see :class:`rlinf.device_memory.Offloadable`.

        The groups are ``weights``, ``gradients`` and ``optimizer``; none, if they cannot be moved.
        :meth:`forward` needs the first, :meth:`accumulate` the first two, other methods all.
        """
        return {}

    def offload(self, group: str, min_bytes: int) -> int:
        raise NotImplementedError

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Free the trainer's memory and end its threads and processes. It may be called again.

        A :meth:`save` of a snapshot that is in progress continues.
        """
