"""SmolVLA policies (arXiv 2506.01844): flow matching of action chunks from images and instruction.

A vision-language model computes keys and values of images, instruction and state once per chunk. An
action expert, a smaller network, computes the velocity of the actions at each denoising step
(:mod:`rlinf.models.denoising`). Actions attend only to earlier actions of their chunk. Actions that
are not executed are therefore not computed.

The policy folder has LeRobot's format (:mod:`rlinf.models.smolvla_folder`). An additional
file has the value head and the noise head, which LeRobot's network lacks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf.data.batch import pad_right
from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.record import IMAGE_PREFIX
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import ActionBox, action_chunks, reset_mismatched_value_head
from rlinf.models.base import Batch, ModelSpec, Policy, StepOutputs
from rlinf.models.character_tokenizer import (
    DEFAULT_ALPHABET,
    read_tokenizer,
    write_character_tokenizer,
)
from rlinf.models.checkpoint_tensors import check_tensors
from rlinf.models.denoising import CHAIN_COLUMN, DenoisingProcess, bounded_log_std, noise_fractions
from rlinf.models.hf_folder import WEIGHTS_FILE, check_weight_files, copy_non_weight_files
from rlinf.models.smolvla_folder import (
    ACTION_FEATURE,
    NORMALIZER_STEP,
    POSTPROCESSOR,
    PREPROCESSOR,
    STATE_FEATURE,
    UNNORMALIZER_STEP,
    VLM_FOLDER,
    FeatureNormalizer,
    SmolVLAConfig,
    check_smolvla_task,
    feature_size,
    locate_vlm,
    map_cameras,
    new_policy_config,
    new_vlm_config,
    read_feature_statistics,
    read_normalizer,
    read_policy_config,
    read_vlm_config,
    replace_statistics,
    write_processors,
)
from rlinf.models.smolvla_network import PrefixCache, SmolVLANetwork
from rlinf.models.vla_base import FlatSteps, InstructionTokenizer, instructions_or_empty
from rlinf.registry import OBSERVATIONS, SINGLE_PASS_ACTIONS, VALUE_ESTIMATES
from rlinf.safetensors_io import load_tensors
from rlinf.seeding import generator
from rlinf.verified_io import copy_file, read_text

HEADS_FILE = "heads.safetensors"
"""The file with the weights of :data:`ADDED_HEADS`."""
ADDED_HEADS = ("value_head.", "noise_head.")
"""Prefixes of modules that LeRobot's network lacks; they are initialized if a folder lacks them."""
LM_HEAD = "model.vlm_with_expert.vlm.lm_head.weight"
TOKEN_EMBEDDINGS = "model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight"
"""Tensor names of two weights that may be tied."""


class SmolVLAPolicy(Policy):
    """A SmolVLA policy.

    The log-probability of an action dimension is summed over the denoising steps of the chain.
    Padding dimensions (up to ``max_action_dim``) have no log-probability.
    """

    Config = SmolVLAConfig
    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, VALUE_ESTIMATES})
    parameter_groups = ("policy", "value")
    has_independent_steps = True
    module: SmolVLANetwork

    def __init__(
        self,
        module: SmolVLANetwork,
        folder: Path,
        config: SmolVLAConfig,
        settings: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> None:
        self.module, self._folder, self._noise_range = module, folder, config.noise_std_range
        self.action_shape = (
            int(settings["n_action_steps"]),
            feature_size(settings, ACTION_FEATURE),
        )
        """Number of executed actions per chunk, and dimension of an action."""
        # Adapters do not cover the noise head.
        self.supports_lora = config.noise_method != "learned"
        self.num_denoising_steps = int(settings["num_steps"])
        """Number of denoising steps ``N``."""
        self._denoising = DenoisingProcess(self.num_denoising_steps, config.noise_level, 2)
        self._cameras = list(map_cameras(settings, config.camera_map).values())
        self._image_columns = [IMAGE_PREFIX + camera for camera in self._cameras]
        self._max_state_dim = int(settings["max_state_dim"])
        self._max_action_dim = int(settings["max_action_dim"])
        self._state_normalizer = read_normalizer(
            folder,
            PREPROCESSOR,
            NORMALIZER_STEP,
            STATE_FEATURE,
            feature_size(settings, STATE_FEATURE),
        )
        self._action_normalizer = read_normalizer(
            folder, POSTPROCESSOR, UNNORMALIZER_STEP, ACTION_FEATURE, self.action_shape[1]
        )
        max_length = int(settings["tokenizer_max_length"])

        def tokenize(text: str) -> list[int]:
            text = text if text.endswith("\n") else text + "\n"
            return list(tokenizer.encode(text).ids)[:max_length]

        self._tokenize = InstructionTokenizer(tokenize, pad_left=False)

    @classmethod
    def check_spec(cls, config: SmolVLAConfig, spec: ModelSpec) -> Any:
        images, action = spec.get("images") or {}, spec.get("action") or {}
        if not images:
            raise ConfigError(
                "task.images: model.name=smolvla reads images; name a camera and a size"
            )
        if action.get("kind") != "box":
            raise ConfigError(
                "model.name: smolvla needs vector actions, and this task has discrete actions; "
                "choose model.name=cnn"
            )
        if config.path is None:
            settings = new_policy_config(config, spec)
            side = settings["resize_imgs_with_padding"][0]
            vlm_settings = new_vlm_config(config, side, vocabulary_size=2)
        else:
            source = config.path.expanduser()
            settings = read_policy_config(source)
            vlm_settings = read_vlm_config(*locate_vlm(source, settings, config.vlm_path))
            check_weight_files(source)
            if not (source / WEIGHTS_FILE).is_file():
                raise DataError(
                    f"model.path: {source} has no {WEIGHTS_FILE}; copy the folder again"
                )
        check_smolvla_task(settings, vlm_settings, config, spec)
        if config.norm_stats is not None:
            _read_statistics(config.norm_stats, settings)
        elif config.path is not None:
            read_normalizer(
                source,
                PREPROCESSOR,
                NORMALIZER_STEP,
                STATE_FEATURE,
                feature_size(settings, STATE_FEATURE),
            )
            read_normalizer(
                source,
                POSTPROCESSOR,
                UNNORMALIZER_STEP,
                ACTION_FEATURE,
                feature_size(settings, ACTION_FEATURE),
            )

    @classmethod
    def create(cls, config: SmolVLAConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        cls.check_spec(config, spec)
        if config.path is not None:
            return cls._copy(config, folder)
        settings = new_policy_config(config, spec)
        (folder / VLM_FOLDER).mkdir()
        vocabulary = write_character_tokenizer(DEFAULT_ALPHABET + "\n", folder / VLM_FOLDER)
        side = settings["resize_imgs_with_padding"][0]
        vlm_settings = new_vlm_config(config, side, len(vocabulary))
        (folder / VLM_FOLDER / "config.json").write_text(json.dumps(vlm_settings, indent=1))
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        sizes = {
            STATE_FEATURE: feature_size(settings, STATE_FEATURE),
            ACTION_FEATURE: feature_size(settings, ACTION_FEATURE),
        }
        statistics = {n: {"mean": [0.0] * size, "std": [1.0] * size} for n, size in sizes.items()}
        box = ActionBox.from_spec(spec["action"], None)
        statistics[ACTION_FEATURE] = {"mean": box.center.tolist(), "std": box.half_range.tolist()}
        if config.norm_stats is not None:
            statistics = _read_statistics(config.norm_stats, settings)
        write_processors(folder, settings, statistics)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _create_network(settings, vlm_settings, config)
        _write_weights(folder, module.state_dict())

    @classmethod
    def _copy(cls, config: SmolVLAConfig, folder: Path) -> None:
        assert config.path is not None
        source = config.path.expanduser().resolve()
        _copy_other_files(source, folder)
        for name in (WEIGHTS_FILE, HEADS_FILE):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        stored = json.loads(read_text(source / "config.json"))
        settings = read_policy_config(source)
        vlm_folder, _ = locate_vlm(source, settings, config.vlm_path)
        (folder / VLM_FOLDER).mkdir(exist_ok=True)
        copy_non_weight_files(vlm_folder.resolve(), folder / VLM_FOLDER)
        # Training updates token embeddings and output head separately, so they must not be tied.
        vlm_settings = json.loads(read_text(folder / VLM_FOLDER / "config.json")) | {
            "tie_word_embeddings": False
        }
        vlm_settings["text_config"] |= {"tie_word_embeddings": False}
        (folder / VLM_FOLDER / "config.json").write_text(json.dumps(vlm_settings, indent=1))
        changes = {"num_steps": config.denoising_steps, "n_action_steps": config.chunk_size}
        stored |= {name: value for name, value in changes.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(stored, indent=1))
        if config.norm_stats is not None:
            replace_statistics(folder, _read_statistics(config.norm_stats, settings))

    @classmethod
    def load(cls, folder: Path, config: SmolVLAConfig) -> Self:
        """Load a policy folder.

        Raises:
            DataError: Files are missing, damaged, or inconsistent.
        """
        settings = read_policy_config(folder)
        vlm_settings = read_vlm_config(*locate_vlm(folder, settings, None))
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                module = _create_network(settings, vlm_settings, config)
            tensors = load_tensors(folder / WEIGHTS_FILE)
            if (folder / HEADS_FILE).is_file():
                tensors |= load_tensors(folder / HEADS_FILE)
            for name, other in ((LM_HEAD, TOKEN_EMBEDDINGS), (TOKEN_EMBEDDINGS, LM_HEAD)):
                if other in tensors:  # only one of two tied weights is stored
                    tensors.setdefault(name, tensors[other])
            initial = module.state_dict()
            for name, tensor in initial.items():
                if name.startswith(ADDED_HEADS):
                    tensors.setdefault(name, tensor)
            tensors = {
                n: t for n, t in tensors.items() if n in initial or not n.startswith(ADDED_HEADS)
            }
            tensors = reset_mismatched_value_head(tensors, initial, folder)
            check_tensors(f"model.path: {folder}", {n: t.shape for n, t in tensors.items()}, module)
            module.load_state_dict(tensors)
            tokenizer = read_tokenizer(folder / VLM_FOLDER)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"model.path: {folder}: not a policy folder ({error!r})") from None
        vocabulary_size = len(initial[TOKEN_EMBEDDINGS])
        if tokenizer.get_vocab_size() > vocabulary_size:
            raise DataError(
                f"model.path: {folder}: the tokenizer has {tokenizer.get_vocab_size()} tokens and "
                f"the model {vocabulary_size}; they do not belong together"
            )
        return cls(module, folder, config, settings, tokenizer)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        _copy_other_files(self._folder, folder)
        (folder / VLM_FOLDER).mkdir(exist_ok=True)
        copy_non_weight_files(self._folder / VLM_FOLDER, folder / VLM_FOLDER)
        _write_weights(folder, tensors)

    def prepare_demonstration(self, trajectory: Trajectory, seed: int = 0) -> Trajectory:
        """Convert expert actions ``[T, D]`` to the chunk that starts at each step.

        Adds the random numbers of the imitation loss: ``noise`` ``[T, C, max_action_dim]`` and
        ``uniform`` ``[T]``.
        """
        length = self.action_shape[0]
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
        ``chain`` ``[B, T, N + 1, C, A]``; demonstrations add ``actions``, ``noise``
        ``[B, T, C, A]`` and ``uniform`` ``[B, T]``. ``A`` is ``max_action_dim``.
        """
        length = max(map(len, trajectories))
        rows = [instructions_or_empty(t.instruction, len(t)) for t in trajectories]
        prompt, prompt_mask = self._tokenize(pad_right(rows, length).numpy())
        batch = {
            "prompt": prompt,
            "prompt_mask": prompt_mask,
            "state": self._scale_state(
                pad_right([t.require("observations") for t in trajectories], length)
            ),
            "mask": pad_right([np.ones(len(t), np.float32) for t in trajectories], length),
        }
        for camera in self._cameras:
            images = [t.images[camera] for t in trajectories]
            batch[IMAGE_PREFIX + camera] = pad_right(images, length)
        is_sampled = CHAIN_COLUMN in trajectories[0].policy_columns
        for name in [CHAIN_COLUMN] if is_sampled else ["noise", "uniform"]:
            batch[name] = pad_right([t.policy_columns[name] for t in trajectories], length)
        if CHAIN_COLUMN not in batch:
            actions = pad_right([t.actions for t in trajectories], length)
            actions = self._action_normalizer.normalize(actions)
            batch["actions"] = F.pad(actions, (0, self._max_action_dim - self.action_shape[1]))
        return batch

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """Return log-probabilities and entropies ``[B, T, C, D]``; for demonstrations, the negative
        imitation losses."""
        flat = FlatSteps(batch)
        columns = flat.columns
        if (chain := columns.get(CHAIN_COLUMN)) is None:
            losses, values = self._imitation_loss(columns)
            return StepOutputs(flat.scatter(-losses), None, flat.scatter(values))
        tau = noise_fractions(self.num_denoising_steps).to(batch["mask"].device)
        velocity, noise_outputs, values = self.module(*self._inputs(columns, chain[:, :-1], tau))
        logprobs, entropies = self._chain_logprobs(chain, velocity, noise_outputs, temperature)
        return StepOutputs(
            flat.scatter(logprobs),
            flat.scatter(entropies) if entropy else None,
            flat.scatter(values),
        )

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """Return standard normal noise ``[steps, N + 1, C, max_action_dim]``: the start of each
        chain and the noise of its steps."""
        chain_shape = (self.num_denoising_steps + 1, self.action_shape[0], self._max_action_dim)
        return random.standard_normal(size=(steps, *chain_shape)).astype(np.float32)

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Return ``action`` and ``logprob`` ``[n, C, D]``, ``chain`` ``[n, N + 1, C,
        max_action_dim]`` and ``value`` ``[n]``, or ``[n, C]`` per action, all float32."""
        state = observations["observation"]
        instructions = observations.get(INSTRUCTION_COLUMN)
        rows = instructions_or_empty(
            None if instructions is None else instructions.cpu().numpy(), len(state)
        )
        prompt, prompt_mask = (x[0].to(state.device) for x in self._tokenize(rows[None]))
        images = [observations[name] for name in self._image_columns]
        prefix = self.module.encode_prefix(prompt, prompt_mask, self._scale_state(state), *images)
        chain = self.sample_chains(prefix, noise, temperature)
        tau = noise_fractions(self.num_denoising_steps).to(state.device)
        velocity, noise_outputs = self.module.velocity(prefix, chain[:, :-1], tau)
        return {
            "action": self._action_normalizer.unnormalize(chain[:, -1, :, : self.action_shape[1]]),
            CHAIN_COLUMN: chain,
            "logprob": self._chain_logprobs(chain, velocity, noise_outputs, temperature)[0],
            "value": self.module.value(prefix),
        }

    def sample_chains(
        self, prefix: PrefixCache, noise: Tensor | None, temperature: float
    ) -> Tensor:
        """Sample chains ``[n, N + 1, C, max_action_dim]``; ``noise`` as in :meth:`act`."""

        def velocity(points: Tensor, tau: Tensor) -> tuple[Tensor, Tensor | None]:
            result, noise_outputs = self.module.velocity(prefix, points, tau)
            return result, self._log_std(noise_outputs)

        shape = (len(prefix.last_hidden), self.action_shape[0], self._max_action_dim)
        first, step_noise = torch.zeros(shape, device=prefix.last_hidden.device), None
        if noise is not None:
            first, step_noise = noise[:, 0], noise[:, 1:]
        return self._denoising.sample(velocity, first, step_noise, temperature)

    def parameter_group(self, parameter: str) -> str:
        return "value" if parameter.startswith("value_head.") else "policy"

    def num_tokens(self, trajectory: Trajectory) -> int:
        vision: Any = self.module.model.vlm_with_expert.vlm.model.vision_model
        patches = (self.module.image_size[0] // vision.patch_size) ** 2 * len(self._image_columns)
        return max(1, len(trajectory)) * (patches + self.num_denoising_steps * self.action_shape[0])

    def blocks(self) -> list[nn.Module]:
        models: Any = self.module.model.vlm_with_expert
        vlm, expert = models.vlm.model, models.lm_expert
        return [*vlm.vision_model.encoder.layers, *vlm.text_model.layers, *expert["layers"]]

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
        self, chain: Tensor, velocity: Tensor, noise_outputs: Tensor | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies ``[n, C, D]`` of chains."""
        log_std = self._log_std(noise_outputs)
        result = self._denoising.logprobs_and_entropy(chain, velocity, log_std, temperature)
        return result[0][..., : self.action_shape[1]], result[1][..., : self.action_shape[1]]

    def _imitation_loss(self, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the conditional flow matching loss ``[n, C, D]`` and values ``[n]`` of rows.

        The loss is the squared error of the velocity (arXiv 2210.02747, eq. 14).
        As in LeRobot, noise fractions follow ``Beta(1.5, 1)``, so most are near 1 (noise). The
        errors of padding dimensions are distributed equally over the other dimensions.
        """
        tau = 0.001 + 0.999 * columns["uniform"][:, None] ** (1 / 1.5)
        weight, noise, actions = tau[..., None], columns["noise"], columns["actions"]
        points = weight * noise + (1 - weight) * actions
        velocity, _, values = self.module(*self._inputs(columns, points[:, None], tau))
        errors, size = (velocity[:, 0] - (noise - actions)).square(), self.action_shape[1]
        return errors[..., :size] + errors[..., size:].sum(-1, keepdim=True) / size, values

    def _scale_state(self, observations: Tensor) -> Tensor:
        """Return the normalized and padded state ``[..., max_state_dim]``."""
        size = len(self._state_normalizer.low)
        scaled = self._state_normalizer.normalize(observations[..., :size])
        return F.pad(scaled, (0, self._max_state_dim - size))


def _create_network(
    settings: Mapping[str, Any], vlm_settings: Mapping[str, Any], config: SmolVLAConfig
) -> SmolVLANetwork:
    learned = config.noise_method == "learned"
    return SmolVLANetwork(
        settings, vlm_settings, learned_noise=learned, value_level=config.value_level
    )


def _read_statistics(path: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Read the statistics of states and actions from a data set's ``meta/stats.json``.

    Raises:
        DataError: Some statistics are missing.
    """
    sizes = {
        STATE_FEATURE: feature_size(settings, STATE_FEATURE),
        ACTION_FEATURE: feature_size(settings, ACTION_FEATURE),
    }
    result = read_feature_statistics(path.expanduser(), sizes)
    for feature, kind in ((STATE_FEATURE, "STATE"), (ACTION_FEATURE, "ACTION")):
        mode = settings["normalization_mapping"].get(kind, "IDENTITY")
        source = f"model.norm_stats: {path}: {feature}"
        FeatureNormalizer.from_statistics(mode, result[feature], sizes[feature], source)
    return result


def _write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the weights to :data:`WEIGHTS_FILE` and those of added heads to :data:`HEADS_FILE`."""
    contiguous = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    heads = {name: tensor for name, tensor in contiguous.items() if name.startswith(ADDED_HEADS)}
    rest = {name: tensor for name, tensor in contiguous.items() if name not in heads}
    save_file(rest, folder / WEIGHTS_FILE, {"format": "pt"})
    save_file(heads, folder / HEADS_FILE, {"format": "pt"})


def _copy_other_files(source: Path, folder: Path) -> None:
    """Copy the configuration and the processors with their statistics."""
    copy_non_weight_files(source, folder)
    for path in sorted(source.glob("policy_*processor*.safetensors")):
        copy_file(path, folder / path.name)
