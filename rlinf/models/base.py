"""The policy interface: one object between the trajectories and the network.

Algorithms and trainers see only :class:`StepOutputs`: log-probability, entropy and value of each
step, ``[B, T]`` for ``B`` samples of at most ``T`` steps. Only the policy and its environment know
whether a step is a token or an action.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor, nn

from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import Section
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.registry import LANGUAGE_MODEL, Component, RunComponents
from rlinf.safetensors_io import StreamedState
from rlinf.sharded_tensors import local_rows, local_shard

if TYPE_CHECKING:
    from rlinf.models.images import ImageProcessor

ModelSpec = dict[str, Any]
"""Properties of an environment that a new policy needs.

Texts: ``alphabet`` and, for dialogues, ``chat_template`` and ``special_tokens``. Simulators:
``observation`` (length of the state vector), ``action`` (``kind``, ``size``, ``low``, ``high``,
``dtype``) and ``images`` (height and width of the images of each camera)."""

Batch = dict[str, Tensor]
"""Model inputs, padded to ``[B, ...]``. Always has ``mask`` ``[B, T]``: 1 for steps, else 0."""


@dataclass
class StepOutputs:
    """The outputs of a policy for the steps of a batch, each ``[B, T]`` float32.

    If a step has several parts, log-probabilities and entropies may have one value per part:
    ``[B, T, K]`` for the tokens of an action, ``[B, T, C, D]`` for a chunk of ``C`` actions of
    ``D`` tokens or dimensions. ``choice_mask`` of a trajectory is the mask of these parts.
    """

    logprobs: Tensor
    """Log-probability of the action taken."""
    entropy: Tensor | None = None
    """Entropy of the action distribution, nats."""
    values: Tensor | None = None
    """Value estimate of the state before the action; or one value per action of a chunk,
    ``[B, T, C]`` (:data:`rlinf.models.action_encoding.ValueLevel`)."""


def concat_outputs(pieces: Sequence[StepOutputs]) -> StepOutputs:
    """Concatenate the outputs ``[T]`` of consecutive pieces of a trajectory."""
    if len(pieces) == 1:
        return pieces[0]
    columns = (
        [getattr(piece, name) for piece in pieces] for name in ("logprobs", "entropy", "values")
    )
    return StepOutputs(*(None if c[0] is None else torch.cat(c) for c in columns))  # type: ignore[arg-type]


class Policy(Component, ABC):
    """A trainable network with its own folder format; it maps trajectories to step outputs."""

    Config: ClassVar[type[Section]] = Section
    parameter_groups: ClassVar[tuple[str, ...]] = ("policy",)
    """Names of the parameter groups. Updates can be limited to some groups, and each group can have
    its own learning rate (``optimizer.group_lr``)."""
    has_independent_steps: ClassVar[bool] = False
    """Whether the outputs of a step depend only on that step. Then pieces of a trajectory can be
    evaluated separately."""
    module: nn.Module

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        for key in ("group_lr", "group_clip_grad"):
            for name in getattr(run.config.optimizer, key):
                if name not in cls.parameter_groups:
                    raise ConfigError(
                        f"optimizer.{key}.{name}: {run.config.model.name} has no such parameter "
                        f"group; available: {', '.join(cls.parameter_groups)}"
                    )

    @classmethod
    def check_spec(cls, config: Any, spec: ModelSpec) -> Any:
        """Check that :meth:`create` would succeed, without creating the policy.

        Returns:
            The result of :meth:`processor` if it is available before :meth:`create`, else None.

        Raises:
            DataError, ConfigError: As :meth:`create`.
        """
        return None

    @classmethod
    def max_model_len(cls, config: Any) -> int | None:
        """Return the largest number of tokens of prompt and response together; None: no limit."""
        return None

    @classmethod
    @abstractmethod
    def create(cls, config: Any, spec: ModelSpec, seed: int, folder: Path) -> None:
        """Write the initial policy into ``folder``: new weights, or a copy of a checkpoint.

        Raises:
            DataError: A checkpoint or tokenizer is missing or unusable.
            ConfigError: The policy does not fit the task.
        """

    @classmethod
    def processor(cls, folder: Path, config: Any) -> Any:
        """Return the object that converts observations to inputs (a tokenizer); default None."""
        return None

    @classmethod
    def image_processor(cls, folder: Path) -> ImageProcessor | None:
        """Return the image processor of policies that provide :data:`rlinf.registry.VISION`."""
        return None

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, config: Any) -> Policy:
        """Load a policy folder."""

    @classmethod
    def meta_from_config(cls, config: Any) -> Policy | None:
        """Create the policy on the meta device for inspection; None if the options do not suffice.

        Raises:
            DataError: The folder is not a checkpoint.
        """
        return None

    supports_sharded_loading: ClassVar[bool] = False
    """Whether :meth:`meta_from_folder` and :meth:`load_weights` are implemented. Otherwise each
    rank loads the full model before it is sharded."""

    @classmethod
    def meta_from_folder(cls, folder: Path, config: Any) -> Policy:
        """Create the policy of a folder for a trainer that shards it.

        The parameters may be on the ``meta`` device. The trainer allocates the shard of each rank
        and calls :meth:`load_weights`.
        """
        raise NotImplementedError

    def load_weights(self, folder: Path | None = None) -> None:
        """Load the weights of a folder; for a sharded network, only the rows of this rank.

        Args:
            folder: The policy folder; None: the folder of :meth:`meta_from_folder`.

        Raises:
            DataError: The weights do not fit the network, which is unchanged.
            ArtifactError: The committed weights are damaged; the network's weights are undefined.
        """
        raise NotImplementedError

    @abstractmethod
    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write a policy folder with the weights ``tensors`` (not sharded, on the CPU)."""

    def save_state(self, folder: Path, state: StreamedState) -> None:
        """Write a policy folder with streamed weights. The default collects all of them first."""
        self.save(folder, state.collect())

    has_sft_loss: ClassVar[bool] = True
    """Whether :meth:`evaluate` computes a loss of demonstrations; see
    :meth:`prepare_demonstration`."""

    def prepare_demonstration(self, trajectory: Trajectory, seed: int = 0) -> Trajectory:
        """Convert a demonstration of the task to a training trajectory; default: no change.

        SFT maximizes the ``logprobs`` of :meth:`evaluate` for the result. A policy without a
        tractable density returns the negative of another loss as ``logprobs``. If some parts of a
        step are padding, the trajectory has ``choice_mask`` (:mod:`rlinf.data.trajectory`).

        Args:
            trajectory: The demonstration.
            seed: Seed of random numbers, together with the identity of the trajectory.
        """
        return trajectory

    @abstractmethod
    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Return the model inputs of trajectories, padded on the right to the longest one.

        They include ``mask`` and, for token policies, ``actions`` ``[B, T]``. A loss may replace
        ``actions`` by other tokens before it calls :meth:`evaluate`.
        """

    @abstractmethod
    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """Compute the step outputs of a batch, with gradients if they are enabled.

        Args:
            batch: Inputs from :meth:`collate`.
            temperature: Sampling temperature of the log-probabilities.
            entropy: Whether to compute the entropy.
        """

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """Draw the noise that :meth:`act` needs for one sample: float32 ``[steps, ...]``.

        Like :meth:`act`, only for policies with :data:`rlinf.registry.SINGLE_PASS_ACTIONS`.
        """
        raise NotImplementedError

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Compute actions for observations in one forward pass, without gradients.

        Args:
            observations: Columns ``[n, ...]`` from the environment, on the network's device.
            noise: One step of :meth:`draw_noise` per row, ``[n, ...]``; None at temperature 0.
            temperature: Sampling temperature; 0 selects the most likely action.

        Returns:
            Columns ``[n, ...]``: ``action``, ``logprob`` (float32 ``[n]``, or ``[n, ...]`` per
            part of a step, equal to :meth:`evaluate` at this temperature) and further columns of
            the trajectory. A row depends only on its observation and noise.
        """
        raise NotImplementedError

    @property
    def transition_dtype(self) -> np.dtype:
        """The structured dtype of the policy's transitions (:mod:`rlinf.data.transitions`).

        For policies that provide :data:`rlinf.registry.ACTION_VALUES` or
        :data:`rlinf.registry.IMITATION_LOSS`.
        """
        raise NotImplementedError

    def to_policy_actions(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions ``[..., A]`` from the simulator's units to the units of the losses.

        By default they are equal. For policies that provide :data:`rlinf.registry.ACTION_VALUES` or
        :data:`rlinf.registry.IMITATION_LOSS`.
        """
        return actions

    def imitation_loss(self, batch: Batch) -> Tensor:
        """Return the imitation loss ``[B]`` of transitions.

        For policies that provide :data:`rlinf.registry.IMITATION_LOSS`.

        Args:
            batch: ``observations`` ``[B, D]``, ``actions`` ``[B, A]``, and random numbers:
                ``noise`` ``[B, A]``, standard normal, and ``uniform`` ``[B]`` in [0, 1).
        """
        raise NotImplementedError

    tracks_observations: ClassVar[bool] = False
    """Whether :meth:`update_observation_stats` has an effect."""

    def update_observation_stats(self, trajectories: Sequence[Trajectory]) -> None:
        """Update running statistics with all trajectories of a batch, after the policy update."""

    def num_tokens(self, trajectory: Trajectory) -> int:
        """Return the number of sequence positions of a trajectory in a batch, for token budgets."""
        return max(1, len(trajectory))

    def shared_prefix(self, trajectory: Trajectory) -> tuple[bytes, int]:
        """Return key and length of the prefix that trajectories may share; default: no prefix.
        Prefixes with equal keys are computed once per batch."""
        return b"", 0

    supports_lora: bool = True
    """Whether low-rank adapters can be trained instead of the weights."""
    supports_packing: bool = False
    """Whether :meth:`enable_packing` is implemented."""

    @classmethod
    def check_packing(cls, config: Any) -> None:
        """Check that :meth:`enable_packing` would succeed, without creating the policy.

        Raises:
            ConfigError: The policy does not support packing.
        """
        if not cls.supports_packing:
            raise ConfigError(f"trainer.packing: {cls.__name__} cannot; set it to false")

    def enable_packing(self, device: torch.device, dtype: torch.dtype) -> None:
        """Pack rows without padding in later :meth:`collate` calls; outputs stay ``[B, T]``.

        Args:
            device: The device of the network.
            dtype: The type of its computation.

        Raises:
            ConfigError: The policy does not support packing.
        """
        raise ConfigError(f"trainer.packing: {type(self).__name__} cannot; set it to false")

    def parameter_group(self, parameter: str) -> str:
        """Return the group (of :attr:`parameter_groups`) of a parameter of the module."""
        return self.parameter_groups[0]

    def float32_modules(self) -> list[nn.Module]:
        """Return the modules that compute in float32 whatever the data type of the trainer's
        passes; their outputs have that type. For trainers with FSDP."""
        return []

    def blocks(self) -> list[nn.Module]:
        """Return the submodules that FSDP shards as units, inner first; may be empty."""
        return []

    def block_stacks(self) -> list[list[nn.Module]]:
        """Return the blocks of each network that runs or is trained independently."""
        return [self.blocks()]

    @classmethod
    def engine_weights(cls, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors that an engine needs, by their names in the policy folder."""
        return tensors


class ModelHolder(Component):
    """Base of engines and trainers: each process holds the model, or a shard of it."""

    parallel_dims: ClassVar[frozenset[str]] = frozenset()
    """Dimensions along which processes can share a model replica: fields of
    :class:`rlinf.channels.process_group.ParallelLayout`."""
    device: torch.device
    compute_dtype: str = "float32"
    """Data type in which the network computes, such as ``bfloat16``."""

    @classmethod
    def check_layout(
        cls, options: Any, run: RunComponents, layout: ParallelLayout, processes: int, key: str
    ) -> None:
        """Check that processes can hold the model in a layout, without loading it.

        An override must call ``super().check_layout(...)``.

        Args:
            options: validated options of this component.
            processes: number of processes of the stage, over all model replicas.
            key: the layout's configuration key, for error messages.

        Raises:
            ConfigError: the layout, or an option with this layout, is not supported.
            DataError: a checkpoint's folder is malformed.
        """
        for dim in layout.parallel_dims():
            if dim not in cls.parallel_dims:
                dims = ", ".join(sorted(cls.parallel_dims)) or "none"
                section = next(name for name, other in run.classes.items() if other is cls)
                raise ConfigError(
                    f"{key}.{dim}: {section} {getattr(run.config, section).name!r} does not "
                    f"support it; supported: {dims}"
                )


@torch.no_grad()
def copy_weights(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights of any floating type and device into a network. Of tied weights, one suffices.

    For a sharded network, this copies the rows of this rank.

    Args:
        tensors: Weights by name; each one is copied before the next is consumed.

    Raises:
        DataError: A name or shape does not fit; some weights may already be replaced.
    """
    state = module.state_dict(keep_vars=True)
    copied = set[int]()
    for name, tensor in tensors:
        if name not in state or state[name].shape != tensor.shape:
            raise weight_mismatch(name, 1)
        begin, end = local_rows(state[name])
        rows, target = tensor[begin:end] if tensor.dim() else tensor, local_shard(state[name])
        # A GPU converts types faster, and copies faster from the pinned memory of ``tensor``.
        target.copy_(rows.to(target.device, non_blocking=True))
        copied.add(id(state[name]))
    missing = [name for name, tensor in state.items() if id(tensor) not in copied]
    if missing:
        raise weight_mismatch(missing[0], len(missing))


def weight_mismatch(name: str, count: int) -> DataError:
    """Return the error for ``count`` weights, such as ``name``, that do not fit the network."""
    others = f" and {count - 1} others are" if count > 1 else " is"
    return DataError(
        f"weights do not fit the loaded network: {name!r}{others} missing, unknown or of another "
        "shape; load the folder they belong to first"
    )


def _device_name(name: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is None:
        raise ValueError("expected auto, cpu, cuda, or one GPU such as cuda:1")
    return name


DeviceName = Annotated[str, AfterValidator(_device_name)]
"""A device name in a configuration; see :func:`local_device`."""


def default_dtype(provides: Collection[str], path: Path | None, device: torch.device) -> str | None:
    """Return the data type in which a policy computes on a device if the configuration names none.

    Published language models have bfloat16 weights, and GPUs compute about ten times as fast in it
    as in float32. All CUDA devices get the same type, so that processes on different GPUs agree.

    Args:
        provides: capabilities of the policy's class.
        path: folder of the checkpoint; None: the policy is new.

    Returns:
        ``bfloat16`` for a language model from a checkpoint on a GPU; else None, the default of the
        component.
    """
    is_checkpoint = LANGUAGE_MODEL in provides and path is not None
    return "bfloat16" if is_checkpoint and device.type == "cuda" else None


NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""The device file of NVIDIA's driver."""


def _check_no_unused_gpus() -> None:
    """Check that Slurm gave this job no GPUs. Otherwise CPUs would compute while GPUs are idle.

    Raises:
        ConfigError: it did, and this node has NVIDIA's driver.
    """
    gpus = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if gpus and not is_hidden and NVIDIA_DRIVER.exists():
        raise ConfigError(
            f"device: auto: Slurm gave this job GPUs ({gpus}), but torch {torch.__version__} sees "
            "none; install a build of torch for CUDA that the driver supports (nvidia-smi shows "
            "its version), or set engine.device=cpu and trainer.device=cpu"
        )


def local_device(name: str) -> torch.device:
    """Return the device of this process for a configured device name, prepared for attention.

    Args:
        name: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` (the visible GPU with the index of
            the local rank), or one GPU such as ``cuda:1``.

    Raises:
        ConfigError: ``auto`` in a job with GPUs that torch does not see.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu":
            _check_no_unused_gpus()
    device = torch.device(name)
    if device.type == "cuda":
        from rlinf.models.attention import avoid_plans_for_shapes

        avoid_plans_for_shapes()
    if device.type != "cuda" or ":" in name:
        return device
    # Depending on the launcher, a rank sees all GPUs of the node or only its own.
    count = max(1, torch.cuda.device_count())
    return torch.device("cuda", ProcessGroupInfo.from_environment().local_rank % count)
