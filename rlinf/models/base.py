"""The policy interface: one object between the trajectories and the network.

Algorithms and trainers see only step outputs ``[B, T]``; what a step is (a token, an action of a
robot) is known to the policy and to the environment that goes with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.capabilities import Component
from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.errors import ConfigError, DataError
from rlinf.models.images import ImageProcessor
from rlinf.safetensors_io import StreamedState
from rlinf.sharded_tensors import local_rows, local_shard

ModelSpec = dict[str, Any]
"""What an environment tells a policy to be created: alphabet, observations, actions."""

Batch = dict[str, Tensor]
"""Model inputs padded to ``[B, ...]``; always holds ``mask`` ``[B, T]`` (1: a step)."""


@dataclass
class StepOutputs:
    """What a policy says about the steps of a batch, each ``[B, T]`` float32.

    Where a step is several choices, log-probabilities and entropies may be theirs: ``[B, T, K]``
    for the tokens of an action, ``[B, T, C, D]`` for a chunk of ``C`` actions of ``D`` tokens or
    dimensions; the step column ``submask`` of a trajectory says which of them count.
    """

    logprobs: Tensor
    """Log-probability of the action taken."""
    entropy: Tensor | None = None
    """Entropy of the action distribution, nats."""
    values: Tensor | None = None
    """Value estimate of the state the action was taken in; or ``[B, T, C]`` of what is still to
    come at each action of a chunk (:data:`rlinf.models.action_encoding.ValueLevel`)."""


def concat_outputs(parts: Sequence[StepOutputs]) -> StepOutputs:
    """What was said of parts of a trajectory, ``[T]`` each, as that of the whole."""
    if len(parts) == 1:
        return parts[0]
    columns = (
        [getattr(part, name) for part in parts] for name in ("logprobs", "entropy", "values")
    )
    return StepOutputs(*(None if c[0] is None else torch.cat(c) for c in columns))  # type: ignore[arg-type]


class Policy(Component, ABC):
    """A trainable network with a folder format of its own."""

    Config: ClassVar[type[Section]] = Section
    parameter_groups: ClassVar[tuple[str, ...]] = ("policy",)
    """Names of the groups that its parameters are in: an update can be of some alone, and each
    can have a learning rate of its own (``optimizer.group_lr``)."""
    has_independent_steps: ClassVar[bool] = False
    """Whether what it says of a step follows from that step alone: a trajectory can be cut then, to
    be evaluated in parts."""
    module: nn.Module

    @classmethod
    def check(cls, config: Any, spec: ModelSpec) -> Any:
        """See that a policy can be made, without making it.

        Returns its :meth:`processor`, where that is there already, or None.

        Raises:
            DataError, ConfigError: as :meth:`create` would.
        """
        return None

    @classmethod
    def max_model_len(cls, config: Any) -> int | None:
        """Most tokens of a prompt and its response together; None: no limit."""
        return None

    @classmethod
    @abstractmethod
    def create(cls, config: Any, spec: ModelSpec, seed: int, folder: Path) -> None:
        """Write the initial policy into ``folder``: new weights, or a copy of a checkpoint.

        Raises:
            DataError: a checkpoint or tokenizer is missing or unusable.
            ConfigError: the policy does not fit the task.
        """

    @classmethod
    def processor(cls, folder: Path, config: Any) -> Any:
        """What turns the environment's observations into inputs (a tokenizer); None by default."""
        return None

    @classmethod
    def image_processor(cls, folder: Path) -> ImageProcessor | None:
        """How it takes images, of policies that offer :data:`rlinf.capabilities.VISION`."""
        return None

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, config: Any) -> Policy:
        """Read a policy folder."""

    @classmethod
    def meta_from_config(cls, config: Any) -> Policy | None:
        """A policy without memory, to look at its parts; None: its options do not tell them.

        Raises:
            DataError: a checkpoint's folder is not one.
        """
        return None

    supports_sharded_loading: ClassVar[bool] = False
    """Whether :meth:`outline` and :meth:`fill` work; without, each of several processes loads the
    whole before it is shared out."""

    @classmethod
    def meta_from_folder(cls, folder: Path, config: Any) -> Policy:
        """The policy of a folder for a trainer that shares it out over several processes.

        Its parameters may be without memory (on the ``meta`` device); the trainer gives them some,
        of each process its part, and calls :meth:`fill`.
        """
        raise NotImplementedError

    def load_weights(self, folder: Path | None = None) -> None:
        """Read the weights in a folder into the network; of a sharded one, this process's rows.

        Args:
            folder: None: the one that :meth:`outline` was given.

        Raises:
            DataError: they are not this network's; nothing has changed.
            ArtifactError: they are committed and damaged; the network holds anything.
        """
        raise NotImplementedError

    @abstractmethod
    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write a policy folder holding ``tensors`` (full, on CPU) as its weights."""

    def save_state(self, folder: Path, state: StreamedState) -> None:
        """The same of tensors that come one after the other; by default once all are there."""
        self.save(folder, state.collect())

    def prepare_demonstration(self, record: Record, seed: int = 0) -> Record:
        """A task's demonstration as what it learns from; by default as it is.

        The warm start makes the ``logprobs`` large that :meth:`evaluate` says of it; of policies
        whose actions have no density that can be had they are minus another loss. Steps of which
        not all choices count have ``submask`` (:mod:`rlinf.data.loss_mask`).

        Args:
            seed: of what is drawn for it, with its identity.
        """
        return record

    @abstractmethod
    def collate(self, records: Sequence[Record]) -> Batch:
        """Model inputs of trajectories: with ``mask`` and, of policies of tokens, ``actions``
        ``[B, T]``, padded on the right to the longest. A loss may evaluate other ``actions``."""

    @abstractmethod
    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """Step outputs under the current weights, with gradients where enabled."""

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """What :meth:`act` needs to draw the actions of one sample: float32 ``[steps, ...]``.

        Of policies that offer :data:`rlinf.capabilities.SINGLE_PASS_ACTIONS`, like :meth:`act`.
        """
        raise NotImplementedError

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Actions for observations, by one call and without gradients.

        Args:
            observations: columns ``[n, ...]``, as the environment gives them, on the network's
                device.
            noise: a step of :meth:`noise` for each row, ``[n, ...]``; None at temperature 0.
            temperature: 0 takes the most likely action.

        Returns:
            Columns ``[n, ...]``: ``action``, ``logprob`` (float32 ``[n]``, or ``[n, ...]`` of each
            choice: what :meth:`evaluate` says of it at this temperature) and whatever is to be part
            of the trajectory. A row follows from its observation and noise alone.
        """
        raise NotImplementedError

    @property
    def transition_dtype(self) -> np.dtype:
        """The type of the transitions that it learns from (:mod:`rlinf.data.transitions`).

        Of policies that offer :data:`rlinf.capabilities.ACTION_VALUES` or :data:`rlinf.capabilities.IMITATION_LOSS`.
        """
        raise NotImplementedError

    def to_policy_actions(self, actions: np.ndarray) -> np.ndarray:
        """Actions ``[..., A]`` of transitions, in the simulator's units, as losses take them; by
        default as they are.

        Of policies that offer :data:`rlinf.capabilities.ACTION_VALUES` or :data:`rlinf.capabilities.IMITATION_LOSS`.
        """
        return actions

    def imitation_loss(self, batch: Batch) -> Tensor:
        """A loss ``[B]`` of transitions, least where the policy does what was done in them.

        Of policies that offer :data:`rlinf.capabilities.IMITATION_LOSS`.

        Args:
            batch: ``observations`` ``[B, D]``, ``actions`` ``[B, A]``, and what is drawn for each:
                ``noise`` ``[B, A]``, standard normal, and ``uniform`` ``[B]`` in [0, 1).
        """
        raise NotImplementedError

    tracks_observations: ClassVar[bool] = False
    """Whether :meth:`observe` does anything."""

    def update_observation_stats(self, records: Sequence[Record]) -> None:
        """Look at a whole batch after the update (to follow observation statistics, say)."""

    def num_tokens(self, record: Record) -> int:
        """Positions a trajectory occupies in a batch: what a token budget counts."""
        return max(1, len(record))

    def shared_prefix(self, record: Record) -> tuple[bytes, int]:
        """What of a trajectory is computed once for all of a batch that have it: the same bytes
        for each of them, and how many of its positions that are."""
        return b"", 0

    supports_lora: bool = True
    """Whether low-rank adapters can be trained in place of its weights."""
    supports_packing: bool = False
    """Whether :meth:`use_packing` works."""

    @classmethod
    def check_packing(cls, config: Any) -> None:
        """See that :meth:`use_packing` would work, without making a policy.

        Raises:
            ConfigError: the policy cannot.
        """
        if not cls.supports_packing:
            raise ConfigError(f"trainer.packing: {cls.__name__} cannot; set it to false")

    def enable_packing(self, device: torch.device, dtype: torch.dtype) -> None:
        """Collate rows side by side from now on, without padding; outputs stay ``[B, T]``.

        Args:
            device: that of the network.
            dtype: that it computes in.

        Raises:
            ConfigError: the policy cannot.
        """
        raise ConfigError(f"trainer.packing: {type(self).__name__} cannot; set it to false")

    def parameter_group(self, parameter: str) -> str:
        """Which of :attr:`groups` a parameter is in, by its name in the module."""
        return self.parameter_groups[0]

    def blocks(self) -> list[nn.Module]:
        """Sub-modules that FSDP shards as units, inner first; may be empty."""
        return []

    def block_stacks(self) -> list[list[nn.Module]]:
        """The blocks of each network that runs, or is trained, without the others."""
        return [self.blocks()]

    @classmethod
    def engine_weights(cls, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Of the network's tensors those that an engine generates with, by the names that they have
        in its folder."""
        return tensors


@torch.no_grad()
def copy_weights(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write other weights, of any floating type and device, into a network; tied ones may lack.

    Of a network that is sharded this process's rows.

    Args:
        tensors: by name, each copied before the next is asked for.

    Raises:
        DataError: they are not this network's by name and shape; some of it may have changed.
    """
    own = module.state_dict(keep_vars=True)
    given = set[int]()
    for name, tensor in tensors:
        if name not in own or own[name].shape != tensor.shape:
            raise weight_mismatch(name, 1)
        begin, end = local_rows(own[name])
        local_shard(own[name]).copy_(tensor[begin:end] if tensor.dim() else tensor)
        given.add(id(own[name]))
    lacking = [name for name, tensor in own.items() if id(tensor) not in given]
    if lacking:
        raise weight_mismatch(lacking[0], len(lacking))


def weight_mismatch(name: str, count: int) -> DataError:
    """What is said of weights that are not a network's own."""
    others = f" and {count - 1} others are" if count > 1 else " is"
    return DataError(
        f"weights do not fit the loaded network: {name!r}{others} missing, unknown or of another "
        "shape; load the folder they belong to first"
    )
