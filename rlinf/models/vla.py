"""OpenVLA policies: images and an instruction in, a chunk of actions as tokens out.

The network is OpenVLA (arXiv 2406.09246) with the parallel decoding of OpenVLA-OFT (arXiv
2502.19645). Image patch features become tokens before the prompt. After the prompt there is one
placeholder for each number of each action of the chunk (zeros in the paper, learned here).
Attention is bidirectional, and one pass gives the distribution of each placeholder over the action
tokens (:mod:`rlinf.models.action_encoding`). As in any language model, the logits of a placeholder
are at the position before it. With OpenVLA's two vision towers (``use_fused_vision_backbone``) the
layout is that of OpenVLA-OFT, and placeholders are zeros.

The policy folder (:mod:`rlinf.models.vla_folder`) has the Hugging Face format: ``config.json``,
safetensors weights, a tokenizer, and the action statistics that define the bins.
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
from rlinf.models.action_encoding import (
    STATISTICS_FILE,
    ActionBins,
    ActionBox,
    action_chunks,
    read_action_statistics,
    reset_mismatched_value_head,
)
from rlinf.models.base import Batch, ModelSpec, Policy, StepOutputs
from rlinf.models.character_tokenizer import (
    DEFAULT_ALPHABET,
    read_tokenizer,
    write_character_tokenizer,
)
from rlinf.models.checkpoint_tensors import stored_shapes
from rlinf.models.hf_folder import (
    WEIGHTS_FILE,
    check_weight_files,
    copy_non_weight_files,
    read_config_json,
    weight_files,
)
from rlinf.models.images import PREPROCESSOR_FILE
from rlinf.models.lerobot_folder import ACTION_FEATURE, compute_dataset_statistics
from rlinf.models.loading import read_weights
from rlinf.models.vla_base import FlatSteps, InstructionTokenizer, instructions_or_empty
from rlinf.models.vla_folder import (
    VLAConfig,
    check_vla_task,
    check_vla_tensors,
    missing_settings,
    new_meta_network,
    new_preprocessor_config,
    new_vla_config,
    read_folder_statistics,
    read_vla_config,
)
from rlinf.models.vla_network import VLANetwork
from rlinf.registry import OBSERVATIONS, SINGLE_PASS_ACTIONS, VALUE_ESTIMATES

CONFIG_FILE = "config.json"


class VLAPolicy(Policy):
    """A vision-language-action policy with action tokens, as OpenVLA and OpenVLA-OFT."""

    Config = VLAConfig
    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, VALUE_ESTIMATES})
    parameter_groups = ("policy", "value")
    has_independent_steps = True
    module: VLANetwork

    def __init__(
        self, module: VLANetwork, folder: Path, bins: ActionBins, prompt: str, tokenizer: Tokenizer
    ) -> None:
        self.module, self._folder, self.bins, self._prompt_template = module, folder, bins, prompt

        def tokenize(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(prompt.replace("{instruction}", text.lower())).ids
            return ids

        self._tokenize = InstructionTokenizer(tokenize, pad_left=True)

    @classmethod
    def check_spec(cls, config: VLAConfig, spec: ModelSpec) -> Any:
        images, action = spec.get("images") or {}, spec.get("action") or {}
        if not images:
            raise ConfigError("task.images: model.name=vla reads images; name a camera and a size")
        if action.get("kind") != "box":
            raise ConfigError(
                "model.name: vla needs vector actions, and this task has discrete actions; choose "
                "model.name=cnn"
            )
        if config.path is not None:
            source = config.path.expanduser()
            settings = read_vla_config(source, missing_settings(source, config, spec))
            read_folder_statistics(source, settings, config)
            check_weight_files(source)
            read_tokenizer(source)
            check_vla_task(settings, spec)
            network = new_meta_network(source, settings, config.value_level)
            check_vla_tensors(source, stored_shapes(source), network)
        else:
            name, statistics = cls._statistics(config, spec)
            if len(statistics["action"]["q01"]) != action["size"]:
                raise ConfigError(
                    f"model.norm_stats: of {len(statistics['action']['q01'])} numbers; an action "
                    f"of this task has {action['size']}"
                )
            check_vla_task(new_vla_config(config, spec, 256, name, statistics), spec)

    @classmethod
    def create(cls, config: VLAConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        cls.check_spec(config, spec)
        if config.path is not None:
            source = config.path.expanduser().resolve()
            copy_non_weight_files(source, folder)
            if missing := missing_settings(source, config, spec):
                values = {**read_config_json(source), **missing}
                (folder / CONFIG_FILE).write_text(json.dumps(values, indent=1))
            for path in weight_files(source):
                shutil.copyfile(path, folder / path.name)
            return
        vocabulary = write_character_tokenizer(DEFAULT_ALPHABET, folder)
        name, statistics = cls._statistics(config, spec)
        settings = new_vla_config(config, spec, len(vocabulary), name, statistics)
        (folder / STATISTICS_FILE).write_text(json.dumps({name: statistics}, indent=1))
        (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=1))
        if config.use_fused_vision_backbone:
            (folder / PREPROCESSOR_FILE).write_text(
                json.dumps(new_preprocessor_config(settings), indent=1)
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = VLANetwork(read_vla_config(folder), config.value_level)
        save_file(module.state_dict(), folder / WEIGHTS_FILE, {"format": "pt"})

    @staticmethod
    def _statistics(config: VLAConfig, spec: ModelSpec) -> tuple[str, dict[str, Any]]:
        """Return the data set name and the statistics that define the bins of a new network."""
        if config.norm_stats is not None and config.norm_stats.expanduser().is_dir():
            folder = config.norm_stats.expanduser()
            statistics = compute_dataset_statistics(folder)[ACTION_FEATURE]
            return config.unnorm_key or folder.resolve().name, {"action": statistics}
        if config.norm_stats is not None:
            return read_action_statistics(config.norm_stats, config.unnorm_key, "model.norm_stats")
        box = ActionBox.from_spec(spec["action"], None)
        q01, q99 = (box.center - box.half_range).tolist(), (box.center + box.half_range).tolist()
        return "actions", {"action": {"q01": q01, "q99": q99}}

    @classmethod
    def load(cls, folder: Path, config: VLAConfig) -> Self:
        """Load a policy folder.

        Raises:
            DataError: Files are missing, damaged, or inconsistent.
        """
        settings = read_vla_config(folder)
        statistics = read_folder_statistics(folder, settings, config)[1]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                module = VLANetwork(settings, config.value_level)
            tensors = read_weights(folder)
            check_vla_tensors(folder, {n: t.shape for n, t in tensors.items()}, module)
            if module.places is not None and "places" not in tensors:
                # The placeholders of OpenVLA-OFT are zeros.
                tensors["places"] = torch.zeros_like(module.places)
            initial = module.state_dict()
            tensors = reset_mismatched_value_head(tensors, initial, folder)
            module.load_state_dict({**initial, **tensors})
            bins = ActionBins.from_statistics(
                statistics["action"], module.first_action_token_id, module.n_action_bins
            )
            tokenizer = read_tokenizer(folder)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"model.path: {folder}: not a policy folder ({error!r})") from None
        return cls(module, folder, bins, str(settings["prompt"]), tokenizer)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        copy_non_weight_files(self._folder, folder)
        contiguous = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
        save_file(contiguous, folder / WEIGHTS_FILE, {"format": "pt"})

    def prepare_demonstration(self, trajectory: Trajectory, seed: int = 0) -> Trajectory:
        """Convert expert actions ``[T, D]`` to the chunk that starts at each step, as tokens.

        ``choice_mask`` masks actions after the end of the episode.
        """
        chunks, mask = action_chunks(trajectory.actions, self.module.action_shape[0])
        columns = {**trajectory.policy_columns, "tokens": self.bins.encode(chunks)}
        return replace(trajectory, actions=chunks, choice_mask=mask, policy_columns=columns)

    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Return the model inputs of trajectories.

        These are ``images.NAME`` uint8 ``[B, T, H, W, 3]``, ``prompt`` and ``prompt_mask``
        ``[B, T, L]``, ``state`` ``[B, T, proprio_dim]``, ``actions`` (token ids) ``[B, T, C, D]``
        and ``mask`` ``[B, T]``.
        """
        length = max(map(len, trajectories))
        rows = [instructions_or_empty(t.instruction, len(t)) for t in trajectories]
        prompt, prompt_mask = self._tokenize(pad_right(rows, length).numpy())
        batch = {
            "prompt": prompt,
            "prompt_mask": prompt_mask,
            "actions": pad_right([t.policy_columns["tokens"] for t in trajectories], length),
            "mask": pad_right([np.ones(len(t), np.float32) for t in trajectories], length),
        }
        for camera in self.module.cameras:
            images = [t.images[camera] for t in trajectories]
            batch[IMAGE_PREFIX + camera] = pad_right(images, length)
        if self.module.proprio_dim:
            batch["state"] = pad_right([t.require("observations") for t in trajectories], length)
        return batch

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """Return log-probabilities and entropies ``[B, T, C, D]`` per token."""
        flat = FlatSteps(batch)
        columns = flat.columns
        logits, values = self._forward(columns)
        logprobs = F.log_softmax(logits / (temperature or 1.0), -1)
        indices = columns["actions"] - self.module.first_action_token_id
        action_logprobs = logprobs.gather(-1, indices[..., None])[..., 0]
        entropies = -(logprobs.exp() * logprobs).sum(-1) if entropy else None
        return StepOutputs(
            flat.scatter(action_logprobs),
            None if entropies is None else flat.scatter(entropies),
            flat.scatter(values),
        )

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """Return a uniform number in [0, 1) per token: ``[steps, C, D]``."""
        return random.random(size=(steps, *self.module.action_shape), dtype=np.float32)

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """Return ``action`` float32, ``tokens`` int64 and ``logprob`` float32, each ``[n, C, D]``,
        and ``value`` float32 ``[n]``, or ``[n, C]`` per action."""
        state = observations["observation"]
        instructions = observations.get(INSTRUCTION_COLUMN)
        rows = instructions_or_empty(
            None if instructions is None else instructions.cpu().numpy(), len(state)
        )
        prompt, prompt_mask = (x[0].to(state.device) for x in self._tokenize(rows[None]))
        columns = {**observations, "prompt": prompt, "prompt_mask": prompt_mask, "state": state}
        logits, values = self._forward(columns)
        logprobs = F.log_softmax(logits / (temperature or 1.0), -1)
        if noise is None:
            indices = logprobs.argmax(-1)
        else:
            # Inverse transform sampling from the cumulative distribution.
            is_below = logprobs.exp().cumsum(-1) <= noise[..., None]
            indices = is_below.sum(-1).clamp(max=self.module.n_action_bins - 1)
        tokens = indices + self.module.first_action_token_id
        return {
            "action": self.bins.decode(tokens),
            "tokens": tokens,
            "logprob": logprobs.gather(-1, indices[..., None])[..., 0],
            "value": values,
        }

    def parameter_group(self, parameter: str) -> str:
        return "value" if parameter.startswith("value_head.") else "policy"

    def num_tokens(self, trajectory: Trajectory) -> int:
        # The template's length in characters approximates the prompt's length in tokens.
        return max(1, len(trajectory)) * (self.module.num_positions + len(self._prompt_template))

    def blocks(self) -> list[nn.Module]:
        return self.module.blocks

    def _forward(self, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits and values of the network for rows ``[n, ...]``."""
        images = {camera: columns[IMAGE_PREFIX + camera] for camera in self.module.cameras}
        state = columns["state"][:, : self.module.proprio_dim] if self.module.proprio_dim else None
        outputs: tuple[Tensor, Tensor] = self.module(
            columns["prompt"], columns["prompt_mask"], state, **images
        )
        return outputs
