"""Vision-language-action policies that denoise chunks of actions by flow matching.

The network (:mod:`rlinf.models.action_expert`) encodes images, instruction and state once per
chunk, and computes the velocity of the actions at each denoising step
(:mod:`rlinf.models.denoising`). The policy folder has LeRobot's format
(:mod:`rlinf.models.lerobot_folder`). An additional file has the value head and the noise head,
which LeRobot's networks lack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from rlinf.data.batch import pad_right
from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.lerobot import ACTION_FEATURE
from rlinf.data.record import IMAGE_PREFIX
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import action_chunks, reset_mismatched_value_head
from rlinf.models.action_expert import FlowVLANetwork, PrefixCache
from rlinf.models.base import Batch, ModelSpec, Policy, StepOutputs
from rlinf.models.checkpoint_tensors import check_tensors
from rlinf.models.denoising import (
    CHAIN_COLUMN,
    RANDOM_STEP_COLUMN,
    DenoisingProcess,
    bounded_log_std,
    noise_fractions,
)
from rlinf.models.hf_folder import WEIGHTS_FILE, tensor_files
from rlinf.models.lerobot_folder import (
    FlowVLAConfig,
    action_normalizer,
    copy_processors,
    feature_size,
    map_cameras,
    state_normalizer,
)
from rlinf.models.vla_base import FlatSteps, InstructionTokenizer, instructions_or_empty
from rlinf.registry import OBSERVATIONS, SINGLE_PASS_ACTIONS, VALUE_ESTIMATES
from rlinf.safetensors_io import load_tensors
from rlinf.seeding import generator

HEADS_FILE = "heads.safetensors"
"""The file with the weights of :data:`ADDED_HEADS`."""
ADDED_HEADS = ("value_head.", "noise_head.")
"""Prefixes of modules that LeRobot's networks lack; they are initialized if a folder lacks them."""


class FlowVLAPolicy(Policy):
    """A flow-matching vision-language-action policy.

    The log-probability of an action component is summed over the denoising steps of the chain, or
    is that of the only random one (``likelihood``).
    Padding components (up to ``max_action_dim``) and actions that are not executed have none.
    """

    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, VALUE_ESTIMATES})
    parameter_groups = ("policy", "value")
    has_independent_steps = True
    trains_padding: ClassVar[bool] = True
    """Whether imitation also trains the padding components of actions."""
    module: FlowVLANetwork
    vlm_parameters: ClassVar[re.Pattern[str]]
    """Matches the beginning of the names of the vision-language model's parameters."""

    def __init__(
        self,
        module: FlowVLANetwork,
        folder: Path,
        config: FlowVLAConfig,
        settings: Mapping[str, Any],
        *,
        num_steps: int,
        num_denoised: int,
        image_tokens: int,
        tokenizer: InstructionTokenizer,
    ) -> None:
        """
        Args:
            module: The network.
            folder: The policy folder.
            config: The options.
            settings: The folder's ``config.json``.
            num_steps: Number of denoising steps ``N``.
            num_denoised: Number of actions that are denoised; the first of them are executed.
            image_tokens: Number of patches of an image, for token budgets.
            tokenizer: Tokenizer of prompts.
        """
        self.module, self._folder, self._noise_range = module, folder, config.noise_std_range
        self.action_shape = (
            int(settings["n_action_steps"]),
            feature_size(settings, ACTION_FEATURE),
        )
        """Number of executed actions per chunk, and dimension of an action."""
        # Adapters do not cover the noise head, and would train the vision-language model.
        self.supports_lora = config.noise_method != "learned" and not config.freeze_vlm
        if config.freeze_vlm:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not self.vlm_parameters.match(name))
        self._has_single_step = config.likelihood == "single_step"
        self.num_denoising_steps = num_steps
        """Number of denoising steps ``N``."""
        self._num_denoised, self._image_tokens = num_denoised, image_tokens
        self._denoising = DenoisingProcess(num_steps, config.noise_level, 2)
        self._cameras = list(map_cameras(settings, config.camera_map).values())
        self._image_columns = [IMAGE_PREFIX + camera for camera in self._cameras]
        self._max_state_dim = int(settings["max_state_dim"])
        self._max_action_dim = int(settings["max_action_dim"])
        self._state_normalizer = state_normalizer(folder, settings)
        self._action_normalizer = action_normalizer(folder, settings)
        self._tokenize = tokenizer

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        copy_processors(self._folder, folder)
        write_weights(folder, tensors)

    def prepare_demonstration(self, trajectory: Trajectory, seed: int = 0) -> Trajectory:
        """Convert expert actions ``[T, D]`` to the chunk that starts at each step.

        Adds the random numbers of the imitation loss: ``noise`` ``[T, C, max_action_dim]`` and
        ``uniform`` ``[T]``.
        """
        length = self._num_denoised
        chunks, mask = action_chunks(trajectory.actions, length)
        random = generator(seed, "imitation", *trajectory.identity.key)
        shape = (len(trajectory), length, self._max_action_dim)
        draws = {
            "noise": random.standard_normal(shape).astype(np.float32),
            "uniform": random.random(len(trajectory), np.float32),
        }
        columns = {**trajectory.policy_columns, **draws}
        return replace(trajectory, actions=chunks, choice_mask=mask, policy_columns=columns)

    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Return the model inputs of trajectories.

        These are ``images.NAME`` uint8 ``[B, T, H, W, 3]``, ``prompt`` and ``prompt_mask``
        ``[B, T, L]``, ``state`` ``[B, T, max_state_dim]`` and ``mask``. Sampled trajectories add
        ``chain`` ``[B, T, N + 1, C, A]``, or ``[B, T, 2, C, A]`` and ``random_step`` ``[B, T]``;
        demonstrations add ``actions``, ``noise`` ``[B, T, C, A]`` and ``uniform`` ``[B, T]``. ``A``
        is ``max_action_dim``.
        """
        length = max(map(len, trajectories))
        rows = [instructions_or_empty(t.instruction, len(t)) for t in trajectories]
        observations = pad_right([t.require("observations") for t in trajectories], length)
        state = self.scale_state(observations)
        prompt, prompt_mask = self.tokenize_prompts(pad_right(rows, length).numpy(), state)
        batch = {
            "prompt": prompt,
            "prompt_mask": prompt_mask,
            "state": state,
            "mask": pad_right([np.ones(len(t), np.float32) for t in trajectories], length),
        }
        for camera in self._cameras:
            images = [t.images[camera] for t in trajectories]
            batch[IMAGE_PREFIX + camera] = pad_right(images, length)
        is_sampled = CHAIN_COLUMN in trajectories[0].policy_columns
        for name in self._sampled_columns if is_sampled else ["noise", "uniform"]:
            batch[name] = pad_right([t.policy_columns[name] for t in trajectories], length)
        if CHAIN_COLUMN not in batch:
            actions = pad_right([t.actions for t in trajectories], length)
            actions = self._action_normalizer.normalize(actions - self._offset(observations))
            batch["actions"] = F.pad(actions, (0, self._max_action_dim - self.action_shape[1]))
        return batch

    def tokenize_prompts(self, instructions: np.ndarray, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids int64 ``[B, T, L]`` of prompts and their mask.

        Args:
            instructions: uint8 ``[B, T, N]`` (:mod:`rlinf.data.episodes`).
            state: Scaled state ``[B, T, max_state_dim]``.
        """
        return self._tokenize(instructions)

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """Return log-probabilities and entropies ``[B, T, C, D]``; for demonstrations, the negative
        imitation losses."""
        flat = FlatSteps(batch)
        columns = flat.columns
        if (chain := columns.get(CHAIN_COLUMN)) is None:
            losses, values = self._imitation_loss(columns)
            return StepOutputs(flat.scatter(-losses), None, flat.scatter(values))
        random_step = columns.get(RANDOM_STEP_COLUMN)
        tau = self._chain_fractions(chain, random_step)
        velocity, noise_outputs, values = self.module(*self._inputs(columns, chain[:, :-1], tau))
        logprobs, entropies = self._chain_logprobs(
            chain, velocity, noise_outputs, temperature, random_step
        )
        return StepOutputs(
            flat.scatter(logprobs),
            flat.scatter(entropies) if entropy else None,
            flat.scatter(values),
        )

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """Return standard normal noise ``[steps, N + 1, C, max_action_dim]``: the start of each
        chain and the noise of its steps. If one step is random, the noise of the others is 0."""
        chain_shape = (self.num_denoising_steps + 1, self._num_denoised, self._max_action_dim)
        noise = random.standard_normal(size=(steps, *chain_shape)).astype(np.float32)
        if self._has_single_step:
            index = random.integers(self.num_denoising_steps, size=steps)
            noise[:, 1:] *= np.eye(self.num_denoising_steps, dtype=np.float32)[index, :, None, None]
        return noise

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Return ``action`` and ``logprob`` ``[n, C, D]``, the columns of :meth:`collate` for the
        chain, and ``value`` ``[n]``, or ``[n, C]`` per action; numbers are float32."""
        observation = observations["observation"]
        instructions = observations.get(INSTRUCTION_COLUMN)
        rows = instructions_or_empty(
            None if instructions is None else instructions.cpu().numpy(), len(observation)
        )
        state = self.scale_state(observation)
        prompt, prompt_mask = (
            tokens[0].to(state.device) for tokens in self.tokenize_prompts(rows[None], state[None])
        )
        images = [observations[name] for name in self._image_columns]
        prefix = self.module.encode_prefix(prompt, prompt_mask, state, *images)
        random_step = self._random_step(noise, len(observation)) if self._has_single_step else None
        chain = self.sample_chains(prefix, noise, temperature, random_step)
        action, columns = self.to_actions(chain[:, -1], observation), {}
        if random_step is not None:
            random_step = columns[RANDOM_STEP_COLUMN] = random_step.to(chain.device)
            samples = torch.arange(len(chain), device=chain.device)[:, None]
            chain = chain[samples, torch.stack([random_step, random_step + 1], 1)]
        tau = self._chain_fractions(chain, random_step)
        velocity, noise_outputs = self.module.velocity(prefix, chain[:, :-1], tau)
        logprobs, _ = self._chain_logprobs(chain, velocity, noise_outputs, temperature, random_step)
        return {
            "action": action,
            CHAIN_COLUMN: chain,
            **columns,
            "logprob": logprobs,
            "value": self.module.value(prefix),
        }

    def sample_chains(
        self,
        prefix: PrefixCache,
        noise: Tensor | None,
        temperature: float,
        random_step: Tensor | None = None,
    ) -> Tensor:
        """Sample chains ``[n, N + 1, C, max_action_dim]``; ``noise`` as in :meth:`act`."""

        def velocity(points: Tensor, tau: Tensor) -> tuple[Tensor, Tensor | None]:
            result, noise_outputs = self.module.velocity(prefix, points, tau)
            return result, self._log_std(noise_outputs)

        shape = (len(prefix.mask), self._num_denoised, self._max_action_dim)
        first, step_noise = torch.zeros(shape, device=prefix.mask.device), None
        if noise is not None:
            first, step_noise = noise[:, 0], noise[:, 1:]
        return self._denoising.sample(velocity, first, step_noise, temperature, random_step)

    @property
    def _sampled_columns(self) -> list[str]:
        """Columns that :meth:`act` adds to trajectories and :meth:`evaluate` needs."""
        return [CHAIN_COLUMN, *([RANDOM_STEP_COLUMN] if self._has_single_step else [])]

    def _random_step(self, noise: Tensor | None, count: int) -> Tensor:
        """Return the index of the step whose noise is not 0, int64 ``[n]``; 0 without noise."""
        if noise is None:
            return torch.zeros(count, dtype=torch.int64)
        return noise[:, 1:].flatten(2).any(-1).int().argmax(1)

    def _chain_fractions(self, chain: Tensor, random_step: Tensor | None) -> Tensor:
        """Return the noise fractions of all points of chains except the last, ``[N]`` or, if one
        step is random, ``[n, 1]``."""
        fractions = noise_fractions(self.num_denoising_steps).to(chain.device)
        return fractions if random_step is None else fractions[random_step][:, None]

    def parameter_group(self, parameter: str) -> str:
        return "value" if parameter.startswith("value_head.") else "policy"

    def num_tokens(self, trajectory: Trajectory) -> int:
        num_passes = 1 if self._has_single_step else self.num_denoising_steps
        actions = num_passes * self._num_denoised
        return max(1, len(trajectory)) * (self._image_tokens * len(self._cameras) + actions)

    def _inputs(
        self, columns: Mapping[str, Tensor], points: Tensor, tau: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the network inputs of rows ``[n, ...]``."""
        images = (columns[name] for name in self._image_columns)
        return columns["prompt"], columns["prompt_mask"], columns["state"], points, tau, *images

    def _log_std(self, noise_outputs: Tensor | None) -> Tensor | None:
        """Return log standard deviations from outputs of the noise head; None: not learned."""
        return None if noise_outputs is None else bounded_log_std(noise_outputs, self._noise_range)

    def _chain_logprobs(
        self,
        chain: Tensor,
        velocity: Tensor,
        noise_outputs: Tensor | None,
        temperature: float,
        random_step: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies ``[n, C, D]`` of chains."""
        log_std, (length, size) = self._log_std(noise_outputs), self.action_shape
        result = self._denoising.logprobs_and_entropy(
            chain, velocity, log_std, temperature, random_step
        )
        return result[0][:, :length, :size], result[1][:, :length, :size]

    def _imitation_loss(self, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the conditional flow matching loss ``[n, C, D]`` and values ``[n]`` of rows.

        The loss is the squared error of the velocity (arXiv 2210.02747, eq. 14).
        As in LeRobot, noise fractions follow ``Beta(1.5, 1)``, so most are near 1 (noise). If
        padding dimensions are trained, their errors are distributed equally over the others.
        """
        tau = 0.001 + 0.999 * columns["uniform"][:, None] ** (1 / 1.5)
        weight, noise, actions = tau[..., None], columns["noise"], columns["actions"]
        points = weight * noise + (1 - weight) * actions
        velocity, _, values = self.module(*self._inputs(columns, points[:, None], tau))
        errors, size = (velocity[:, 0] - (noise - actions)).square(), self.action_shape[1]
        losses = errors[..., :size]
        if self.trains_padding:
            losses = losses + errors[..., size:].sum(-1, keepdim=True) / size
        return losses, values

    def to_actions(self, points: Tensor, observations: Tensor) -> Tensor:
        """Return the executed actions ``[n, C, D]`` in the simulator's units, float32.

        Args:
            points: The last points of chains, ``[n, C, max_action_dim]``.
            observations: State vectors at the start of the chunks, ``[n, D]``.
        """
        length, size = self.action_shape
        actions = self._action_normalizer.unnormalize(points[:, :length, :size])
        return actions + self._offset(observations)

    def _offset(self, observations: Tensor) -> Tensor | float:
        """Return what is added to unnormalized actions, ``[..., 1, D]``; by default 0."""
        return 0.0

    def scale_state(self, observations: Tensor) -> Tensor:
        """Return the normalized and padded state ``[..., max_state_dim]``."""
        size = len(self._state_normalizer.low)
        scaled = self._state_normalizer.normalize(observations[..., :size])
        return F.pad(scaled, (0, self._max_state_dim - size))


def check_spec_kinds(name: str, spec: ModelSpec) -> None:
    """Check that a task has images and vector actions.

    Raises:
        ConfigError: It has not.
    """
    if not spec.get("images"):
        raise ConfigError(f"task.images: model.name={name} reads images; name a camera and a size")
    if (spec.get("action") or {}).get("kind") != "box":
        raise ConfigError(
            f"model.name: {name} needs vector actions, and this task has discrete actions; "
            "choose model.name=cnn"
        )


def check_tokenizer_size(folder: Path, tokenizer: Tokenizer, size: int) -> None:
    """Check that a network has an embedding for each token.

    Args:
        folder: The policy folder.
        tokenizer: The tokenizer of prompts.
        size: Number of embeddings.

    Raises:
        DataError: It has fewer.
    """
    if tokenizer.get_vocab_size() > size:
        raise DataError(
            f"model.path: {folder}: the tokenizer has {tokenizer.get_vocab_size()} tokens and "
            f"the model {size}; they do not belong together"
        )


def read_weights(folder: Path, module: FlowVLANetwork) -> dict[str, Tensor]:
    """Read the tensors of a folder. Heads that it lacks keep their initial weights.

    Args:
        folder: The policy folder.
        module: The network, with initial weights of the heads.
    """
    initial, tensors = module.state_dict(), load_tensors(folder / WEIGHTS_FILE)
    if (folder / HEADS_FILE).is_file():
        tensors |= load_tensors(folder / HEADS_FILE)
    for name, tensor in initial.items():
        if name.startswith(ADDED_HEADS):
            tensors.setdefault(name, tensor)
    known = {n: t for n, t in tensors.items() if n in initial or not n.startswith(ADDED_HEADS)}
    return reset_mismatched_value_head(known, initial, folder)


def read_stored_tensors(source: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of all weight files of a folder, and those of added heads, if any."""
    tensors: dict[str, Tensor] = {}
    for path in tensor_files(source):
        tensors |= load_tensors(path)
    heads = load_tensors(source / HEADS_FILE) if (source / HEADS_FILE).is_file() else {}
    return tensors, heads


Network = TypeVar("Network", bound=FlowVLANetwork)


def load_network(
    folder: Path,
    create: Callable[[], Network],
    adapt: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    *,
    assign: bool = True,
) -> tuple[Network, dict[str, Tensor]]:
    """Create the network of a policy folder with the folder's weights, float32.

    Args:
        folder: The policy folder.
        create: Creates the network. Only its heads need weights if ``assign`` is true.
        adapt: Converts the folder's tensors by name to those of the network.
        assign: Whether the tensors replace the parameters; false for networks with tied weights.

    Returns:
        The network, and its tensors by name as the folder has them.

    Raises:
        DataError: Files are missing, damaged, or inconsistent.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = create()
        tensors = adapt(read_weights(folder, module))
        check_tensors(f"model.path: {folder}", {n: t.shape for n, t in tensors.items()}, module)
        floats = {name: tensor.float() for name, tensor in tensors.items()}
        module.load_state_dict(floats, assign=assign)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"model.path: {folder}: not a policy folder ({error!r})") from None
    return module, tensors


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the weights to :data:`WEIGHTS_FILE` and those of added heads to :data:`HEADS_FILE`."""
    contiguous = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    heads = {name: tensor for name, tensor in contiguous.items() if name.startswith(ADDED_HEADS)}
    rest = {name: tensor for name, tensor in contiguous.items() if name not in heads}
    save_file(rest, folder / WEIGHTS_FILE, {"format": "pt"})
    save_file(heads, folder / HEADS_FILE, {"format": "pt"})
