"""The trainer interface: forward passes, gradients, optimizer steps and checkpoints of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection, Section
from rlinf.data.load_balancing import StepSpan
from rlinf.data.record import Record
from rlinf.device_memory import MemorySize
from rlinf.errors import ConfigError
from rlinf.models.base import Batch, Policy, StepOutputs
from rlinf.safetensors_io import StreamedState

Loss = tuple[Tensor, dict[str, Tensor]]
"""A loss with gradients, and metrics: sums, which are added over micro-batches and processes. Of
those whose name ends in :data:`LARGEST` the largest is kept; they are 0 or more."""
MAX_SUFFIX = "_max"
LossFunction = Callable[[Policy, Batch, list[StepSpan]], Loss]
"""The loss of a micro-batch, from the policy, its inputs on the policy's device, and which steps of
the minibatch each row of them is."""

BatchLoss = Callable[[Policy, Batch], Loss]
"""The loss of inputs that are made already, on the policy's device."""


def is_max_metric(metric: str) -> bool:
    """Whether of a metric the largest part is kept, rather than the sum of all."""
    return metric.endswith(MAX_SUFFIX)


def merge_metrics(sums: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Add the metrics of a part of a minibatch to those of others."""
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
    """A loss that sees no more than what the policy says of the steps.

    Args:
        entropy: whether step outputs are to hold it.
    """
    return lambda policy, inputs, spans: loss(
        policy.evaluate(inputs, temperature, entropy=entropy), spans
    )


class Trainer(ABC):
    """Owns a policy's weights, spread over the processes of a world, and their optimizer.

    Every process of the world makes the same calls with the same records in the same order; calls
    may be collective unless they say otherwise. How a minibatch is cut over processes and
    micro-batches has no part in the mathematics.
    """

    Config: ClassVar[type[Section]] = Section
    parallel_dims: ClassVar[frozenset[str]] = frozenset()
    """Ways in which processes can share a copy of the model: fields of
    :class:`rlinf.channels.process_group.ParallelLayout`."""
    supports_accumulation: ClassVar[bool] = True
    """Whether parts of a batch can be given one by one, before the whole is there."""
    can_load_weights: ClassVar[bool] = True
    """Whether :meth:`load_weights` works; without, other weights need another trainer."""
    supports_batches: ClassVar[bool] = False
    """Whether :meth:`accumulate_batch` works."""
    policy: Policy
    device: torch.device

    @abstractmethod
    def __init__(
        self, policy: Policy, config: Any, optimizer: OptimizerSection, world: ProcessGroupInfo
    ) -> None:
        """Take a policy over, with a fresh optimizer.

        Args:
            policy: of several processes one by :meth:`Policy.outline`, which no process need ever
                hold whole.
        """

    @classmethod
    def required_packages(cls, config: Any) -> tuple[str, ...]:
        """Optional packages that it imports; extras of their names install them."""
        return ()

    @classmethod
    def check(
        cls,
        config: Any,
        policy: type[Policy],
        model: Any,
        optimizer: OptimizerSection,
        layout: ParallelLayout,
        processes: int,
        key: str,
    ) -> None:
        """See that it can train a model over so many processes, without making either.

        Args:
            model: the options of the policy.
            processes: as many as share the training, of all copies of the model.
            key: what errors call the layout.

        Raises:
            ConfigError: it cannot.
            DataError: a checkpoint's folder is not one.
        """
        return None

    @abstractmethod
    def set_max_tokens(self, max_tokens_per_microbatch: int) -> None:
        """Evaluate at most so many padded positions at once from now on."""

    @abstractmethod
    def forward(
        self, records: Sequence[Record], temperature: float
    ) -> list[tuple[int, StepOutputs]]:
        """Step outputs ``[T]`` of this process's share of the records, as (row, outputs) on CPU.

        A process that does not speak for its copy of the model may leave them out.
        """

    @abstractmethod
    def accumulate(
        self,
        records: Sequence[Record],
        loss: LossFunction,
        *,
        row_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Add the gradient of some samples to that of the coming :meth:`update`.

        What fails leaves nothing accumulated.

        Args:
            records: the same on every process.
            loss: its sums over micro-batches of all processes are the loss of these samples. May be
                called by several threads at once.
            together: rows that a loss needs in one micro-batch, whole, each row once; all others
                are by themselves where it is None.
        """

    def accumulate_batch(self, batch: Batch, loss: BatchLoss) -> None:
        """The same of inputs that are made already, which need neither cutting nor padding.

        For many small steps: nothing is done but the loss and its gradient.

        Args:
            batch: tensors of any shapes; those elsewhere come to the device.

        Raises:
            ConfigError: several processes train, or the trainer cannot.
        """
        raise ConfigError(
            f"trainer.name: {type(self).__name__} takes no batches of transitions; set trainer=fsdp"
        )

    @abstractmethod
    def discard_gradients(self) -> None:
        """Forget what was accumulated, and give its memory back."""

    @abstractmethod
    def update(
        self,
        *,
        lr: float | Mapping[str, float],
        scale: float = 1.0,
        groups: Collection[str] | None = None,
        check: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Change the weights by the accumulated gradient, and forget that.

        Args:
            lr: learning rate, of all parameters or by group of the policy's.
            only: groups to change; of the others neither weights nor moments change, and their
                gradient is forgotten too.
            scale: what gradient and metrics are multiplied by first, for losses that were summed
                before the weight of the whole batch was known.
            check: is given the metrics before any weight changes; what it raises ends the update.

        Returns:
            The metrics of the losses over micro-batches and processes, with ``loss`` and
            ``grad_norm`` (of what changes, before clipping).

        Raises:
            StageError: the loss or the gradient is not finite; no weight was changed.
            ValueError: nothing was accumulated.
        """

    def step(
        self,
        records: Sequence[Record],
        loss: LossFunction,
        *,
        lr: float | Mapping[str, float],
        groups: Collection[str] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on a minibatch: :meth:`accumulate`, then :meth:`update`."""
        self.accumulate(records, loss)
        return self.update(lr=lr, groups=groups)

    @abstractmethod
    def snapshot(self) -> dict[str, Tensor]:
        """What :meth:`save` writes, as it is now; on the CPU, this process's part of it."""

    @abstractmethod
    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write this process's part of weights and optimizer, whatever the others do.

        Args:
            state: an earlier :meth:`snapshot`, which may be written while training goes on. It is
                the trainer's again afterwards: a later snapshot takes its memory.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote, by any number of processes.

        Raises:
            DataError: not the state of such a trainer.
            ArtifactError: it is committed and damaged; the trainer holds anything.
        """

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole weights by name, one after the other; every process is given them all.

        The optimizer stays as it is: this is for log-probabilities, not for going on with training.
        """

    def load_policy_folder(self, folder: Path) -> None:
        """The same from a policy's folder, whose :attr:`Policy.by_rows` is true; each process reads
        what it needs."""
        self.policy.load_weights(folder)

    @abstractmethod
    def stream_weights(self, *, copy: bool = False) -> StreamedState:
        """All weights, whole, on CPU, one after the other: no process need hold them all.

        Args:
            copy: never the trainer's own tensors.
        """

    def full_state_dict(self, *, copy: bool = False) -> dict[str, Tensor]:
        """All weights of :meth:`stream` at once, tied ones as one tensor."""
        return self.stream_weights(copy=copy).collect()

    def group_sizes(self) -> Mapping[str, MemorySize]:
        """What it keeps on the device between calls; see :class:`rlinf.device_memory.Offloadable`.

        Groups ``weights``, ``gradients`` and ``optimizer``, where they can move. :meth:`forward`
        needs the first, :meth:`accumulate` the first two, all else everything.
        """
        return {}

    def offload(self, group: str, min_bytes: int) -> int:
        raise NotImplementedError

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Free its memory and end its threads and processes; again does no harm.

        A :meth:`save` of a snapshot that is under way goes on.
        """
