"""OpenVLA policies: images and an instruction in, actions out.

:class:`OpenVLAPolicy` is OpenVLA (arXiv 2406.09246). Image patch features become tokens before the
prompt, and the language model generates one token for each component of an action
(:mod:`rlinf.models.action_encoding`). :class:`OpenVLAOFTPolicy` is OpenVLA-OFT (arXiv 2502.19645).
After the prompt there is one placeholder for each component of each action of a chunk (zeros in the
paper, learned in small networks). Attention is bidirectional, and one pass gives the distribution
of each placeholder over the action tokens. As in any language model, the logits of a token are at
the position before it. RL uses these distributions, as RLinf and SimpleVLA-RL do. A regression head
(``action_head=l1``) has no likelihood, so it allows only SFT and evaluation.

The policy folder (:mod:`rlinf.models.openvla_folder`) has the Hugging Face format: ``config.json``,
safetensors weights, a tokenizer, and the action statistics that define the bins.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf.data.batch import pad_right
from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.lerobot import ACTION_FEATURE
from rlinf.data.record import IMAGE_PREFIX
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.action_encoding import (
    BIN_EPS,
    STATISTICS_FILE,
    ActionBins,
    ActionBox,
    GripperConvention,
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
from rlinf.models.flow_vla import check_spec_kinds
from rlinf.models.hf_folder import (
    WEIGHTS_FILE,
    check_weight_files,
    copy_non_weight_files,
    read_config_json,
    weight_files,
)
from rlinf.models.image_resampling import ImageResampler
from rlinf.models.images import PREPROCESSOR_FILE
from rlinf.models.lerobot_folder import compute_dataset_statistics
from rlinf.models.loading import read_weights
from rlinf.models.openvla_folder import (
    PART_TENSORS,
    OpenVLAConfig,
    OpenVLAFolder,
    OpenVLAOFTConfig,
    check_openvla_task,
    check_openvla_tensors,
    missing_settings,
    new_meta_network,
    new_openvla_config,
    new_preprocessor_config,
    proprio_statistics,
    read_folder_statistics,
    read_openvla_config,
    tower_settings,
    value_level,
)
from rlinf.models.openvla_network import L1, OpenVLANetwork
from rlinf.models.vla_base import FlatSteps, InstructionTokenizer, instructions_or_empty
from rlinf.registry import OBSERVATIONS, SINGLE_PASS_ACTIONS, VALUE_ESTIMATES, RunComponents

CONFIG_FILE = "config.json"


class OpenVLAPolicy(Policy):
    """An OpenVLA policy, which generates the tokens of one action after the other."""

    Config: ClassVar[type[OpenVLAConfig]] = OpenVLAConfig
    folder_class = OpenVLAFolder
    requires = frozenset({OBSERVATIONS})
    provides = frozenset({SINGLE_PASS_ACTIONS, VALUE_ESTIMATES})
    parameter_groups = ("policy", "value")
    has_independent_steps = True
    name: ClassVar[str] = "openvla"
    """Name in ``model.name``."""
    module: OpenVLANetwork

    def __init__(
        self,
        module: OpenVLANetwork,
        folder: Path,
        bins: ActionBins,
        settings: Mapping[str, Any],
        tokenizer: Tokenizer,
        proprio: tuple[list[float], list[float]] | None,
    ) -> None:
        """
        Args:
            module: The network.
            folder: The policy folder.
            bins: The scaling of actions.
            settings: The folder's ``config.json``.
            tokenizer: Tokenizer of prompts.
            proprio: Quantiles of the state (:func:`proprio_statistics`).
        """
        self.module, self._folder, self.bins = module, folder, bins
        self._prompt_template = prompt = str(settings["prompt"])
        self._target_column = "tokens" if module.action_head is None else "targets"
        self._proprio = proprio
        self._resample = ImageResampler(
            tower_settings(settings)[0]["image_size"],
            center_crop=bool(settings.get("center_crop", False)),
        )

        def tokenize(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(prompt.replace("{instruction}", text.lower())).ids
            return ids

        self._tokenize = InstructionTokenizer(tokenize, pad_left=True)

    @classmethod
    def check_spec(cls, config: OpenVLAConfig, spec: ModelSpec) -> Any:
        check_spec_kinds(cls.name, spec)
        action = spec["action"]
        if config.path is not None:
            source = config.path.expanduser()
            missing = missing_settings(source, config, spec)
            settings = read_openvla_config(source, cls.name, missing)
            statistics = read_folder_statistics(source, settings, config)[1]
            # Published networks read a scaled state.
            proprio_statistics(statistics, settings, str(source), required="cameras" in missing)
            check_weight_files(source)
            read_tokenizer(source)
            check_openvla_task(settings, spec)
            network = new_meta_network(source, settings, value_level(config))
            new_parts = missing.keys() & PART_TENSORS.keys()
            check_openvla_tensors(source, stored_shapes(source), network, new_parts)
            _create_bins(str(source), statistics, settings.get("gripper"), network)
        else:
            name, statistics = cls._statistics(config, spec)
            if len(statistics["action"]["q01"]) != action["size"]:
                raise ConfigError(
                    f"model.norm_stats: of {len(statistics['action']['q01'])} numbers; an action "
                    f"of this task has {action['size']}"
                )
            check_openvla_task(new_openvla_config(config, spec, 256, name, statistics), spec)
            _create_bins(str(config.norm_stats), statistics, config.gripper)

    @classmethod
    def create(cls, config: OpenVLAConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
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
        settings = new_openvla_config(config, spec, len(vocabulary), name, statistics)
        (folder / STATISTICS_FILE).write_text(json.dumps({name: statistics}, indent=1))
        (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=1))
        if config.use_fused_vision_backbone:
            (folder / PREPROCESSOR_FILE).write_text(
                json.dumps(new_preprocessor_config(settings), indent=1)
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = OpenVLANetwork(read_openvla_config(folder, cls.name), value_level(config))
        save_file(module.state_dict(), folder / WEIGHTS_FILE, {"format": "pt"})

    @staticmethod
    def _statistics(config: OpenVLAConfig, spec: ModelSpec) -> tuple[str, dict[str, Any]]:
        """Return the data set name and the statistics that define the bins of a new network."""
        if config.norm_stats is not None and config.norm_stats.expanduser().is_dir():
            folder = config.norm_stats.expanduser()
            statistics = compute_dataset_statistics(folder)[ACTION_FEATURE]
            return config.unnorm_key or folder.resolve().name, {"action": statistics}
        if config.norm_stats is not None:
            return read_action_statistics(config.norm_stats, config.unnorm_key, "model.norm_stats")
        box = ActionBox.from_spec(spec["action"], None)
        q01, q99 = (box.center - box.half_range).tolist(), (box.center + box.half_range).tolist()
        action: dict[str, Any] = {"q01": q01, "q99": q99}
        if config.gripper == "openvla":
            action["mask"] = [True] * (len(q01) - 1) + [False]
        return "actions", {"action": action}

    @classmethod
    def load(cls, folder: Path, config: OpenVLAConfig) -> Self:
        """Load a policy folder.

        Raises:
            DataError: Files are missing, damaged, or inconsistent.
        """
        settings = read_openvla_config(folder, cls.name)
        statistics = read_folder_statistics(folder, settings, config)[1]
        proprio = proprio_statistics(statistics, settings, str(folder), required=False)
        try:
            module = new_meta_network(folder, settings, value_level(config))
            tensors = read_weights(folder)
            check_openvla_tensors(folder, {n: t.shape for n, t in tensors.items()}, module)
            _load_weights(module, tensors, folder, getattr(torch, config.dtype))
            bins = _create_bins(str(folder), statistics, settings.get("gripper"), module)
            tokenizer = read_tokenizer(folder)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"model.path: {folder}: not a policy folder ({error!r})") from None
        return cls(module, folder, bins, settings, tokenizer, proprio)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        copy_non_weight_files(self._folder, folder)
        contiguous = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
        save_file(contiguous, folder / WEIGHTS_FILE, {"format": "pt"})

    def prepare_demonstration(self, trajectory: Trajectory, seed: int = 0) -> Trajectory:
        """Convert expert actions ``[T, D]`` to the chunk that starts at each step.

        Chunks become ``tokens`` or, for a regression head, normalized ``targets``.

        ``choice_mask`` masks actions after the end of the episode.
        """
        chunks, mask = action_chunks(trajectory.actions, self.module.action_shape[0])
        if self.module.action_head is None:
            targets = self.bins.encode(chunks)
        else:
            targets = self.bins.normalize(chunks).astype(np.float32)
        columns = {**trajectory.policy_columns, self._target_column: targets}
        return replace(trajectory, actions=chunks, choice_mask=mask, policy_columns=columns)

    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Return the model inputs of trajectories.

        These are ``images.NAME`` uint8 ``[B, T, H, W, 3]``, ``prompt`` and ``prompt_mask``
        ``[B, T, L]``, ``state`` ``[B, T, proprio_dim]``, ``actions`` (token ids, or targets of a
        regression head) ``[B, T, C, D]`` and ``mask`` ``[B, T]``.
        """
        length = max(map(len, trajectories))
        rows = [instructions_or_empty(t.instruction, len(t)) for t in trajectories]
        prompt, prompt_mask = self._tokenize(pad_right(rows, length).numpy())
        targets = [t.policy_columns[self._target_column] for t in trajectories]
        batch = {
            "prompt": prompt,
            "prompt_mask": prompt_mask,
            "actions": pad_right(targets, length),
            "mask": pad_right([np.ones(len(t), np.float32) for t in trajectories], length),
        }
        for camera in self.module.cameras:
            images = [t.images[camera] for t in trajectories]
            batch[IMAGE_PREFIX + camera] = pad_right(images, length)
        if self.module.proprio_dim:
            batch["state"] = pad_right([t.require("observations") for t in trajectories], length)
        return batch

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """Return log-probabilities and entropies ``[B, T, C, D]`` per token; for a regression head,
        the negative L1 losses."""
        flat = FlatSteps(batch)
        columns, targets = flat.columns, flat.columns["actions"]
        tokens = targets if self.module.is_autoregressive else None
        outputs, values = self.module(*self._inputs(columns), tokens, **self._images(columns))
        entropies = None
        if self.module.action_head is not None:
            scores = -(outputs - targets).abs()
        else:
            logprobs = F.log_softmax(outputs / (temperature or 1.0), -1)
            indices = targets - self.module.first_action_token_id
            scores = logprobs.gather(-1, indices[..., None])[..., 0]
            entropies = -(logprobs.exp() * logprobs).sum(-1) if entropy else None
        return StepOutputs(
            flat.scatter(scores),
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
        and ``value`` float32 ``[n]``, or ``[n, C]`` per action.

        The actions of a regression head are deterministic; their ``logprob`` is 0, and there are no
        tokens.
        """
        state = observations["observation"]
        instructions = observations.get(INSTRUCTION_COLUMN)
        rows = instructions_or_empty(
            None if instructions is None else instructions.cpu().numpy(), len(state)
        )
        prompt, prompt_mask = (x[0].to(state.device) for x in self._tokenize(rows[None]))
        columns = {**observations, "prompt": prompt, "prompt_mask": prompt_mask, "state": state}
        inputs, images = self._inputs(columns), self._images(columns)
        if self.module.action_head is not None:
            actions, values = self.module(*inputs, None, **images)
            return {
                "action": self.bins.unnormalize(actions),
                "logprob": torch.zeros_like(actions),
                "value": values,
            }
        uniform = None if noise is None else noise.flatten(1)
        if self.module.is_autoregressive:

            def choose(logits: Tensor, component: int) -> Tensor:
                column = None if uniform is None else uniform[:, component]
                return _sample(logits, column, temperature)

            indices, logits, values = self.module.decode(*inputs, choose, **images)
        else:
            logits, values = self.module(*inputs, None, **images)
            indices = _sample(logits, noise, temperature)
        tokens = indices + self.module.first_action_token_id
        logprobs = F.log_softmax(logits / (temperature or 1.0), -1)
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

    def _inputs(self, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return prompt, its mask and the state of rows ``[n, ...]``, as the network reads them."""
        state = None
        if size := self.module.proprio_dim:
            state = columns["state"][:, :size]
            if self._proprio is not None:
                low, high = torch.tensor(self._proprio, device=state.device)
                state = (2 * (state - low) / (high - low + BIN_EPS) - 1).clamp(-1, 1)
        return columns["prompt"], columns["prompt_mask"], state

    def _images(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the images of rows ``[n, ...]`` by camera, as the network reads them."""
        return {c: self._resample(columns[IMAGE_PREFIX + c]) for c in self.module.cameras}


class OpenVLAOFTPolicy(OpenVLAPolicy):
    """An OpenVLA-OFT policy, which computes a chunk of actions in one pass."""

    Config: ClassVar[type[OpenVLAConfig]] = OpenVLAOFTConfig
    name = "openvla_oft"

    @classmethod
    def check(cls, options: OpenVLAOFTConfig, run: RunComponents) -> None:
        super().check(options, run)
        head = options.action_head
        if options.path is not None:
            head = read_config_json(options.path.expanduser()).get("action_head", head)
        if head == L1 and run.config.iterations:
            raise ConfigError(
                "model.action_head: l1 gives actions without a likelihood, which RL needs; train "
                "action_head=tokens, or set iterations=0 for SFT and evaluation alone"
            )


def _sample(logits: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
    """Return indices ``[...]`` of bins for logits ``[..., bins]``.

    Args:
        logits: The logits.
        noise: Uniform numbers ``[...]``; None: the most likely bins.
        temperature: The sampling temperature.
    """
    logprobs = F.log_softmax(logits / (temperature or 1.0), -1)
    if noise is None:
        return logprobs.argmax(-1)
    # Inverse transform sampling from the cumulative distribution.
    is_below = logprobs.exp().cumsum(-1) <= noise[..., None]
    return is_below.sum(-1).clamp(max=logits.shape[-1] - 1)


def _create_bins(
    source: str,
    statistics: Mapping[str, Any],
    gripper: GripperConvention | None,
    network: OpenVLANetwork | None = None,
) -> ActionBins:
    """Create the bins of a network.

    Args:
        source: Folder or file of the statistics, for error messages.
        statistics: Those of a data set.
        gripper: Meaning of the last action component; None: that of the simulator.
        network: The network; None: the token ids of the bins do not matter.

    Raises:
        DataError: The statistics do not fit the meaning of the gripper.
    """
    first, count = (
        (0, 2) if network is None else (network.first_action_token_id, network.n_action_bins)
    )
    try:
        return ActionBins.from_statistics(
            statistics["action"], first, count, gripper or "simulator"
        )
    except ValueError as error:
        raise DataError(
            f"model.gripper: {gripper} does not fit the action statistics of {source} ({error}); "
            "set model.gripper=simulator"
        ) from None


def _load_weights(
    module: OpenVLANetwork, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype
) -> None:
    """Load tensors into a network on the ``meta`` device, and initialize what they lack."""
    rotary = module.language_model.model.rotary_emb
    module.language_model.model.rotary_emb = type(rotary)(config=rotary.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, part in module.named_modules():
            shapes = {f"{name}.{key}": p.shape for key, p in part.named_parameters(recurse=False)}
            is_new = any(n not in tensors or tensors[n].shape != shapes[n] for n in shapes)
            if is_new and hasattr(part, "reset_parameters"):
                part.to_empty(device="cpu").reset_parameters()
    nn.init.zeros_(module.value_head.fc2.weight)
    nn.init.zeros_(module.value_head.fc2.bias)
    # Placeholders of OpenVLA-OFT are zeros, and tensors that are never run may be.
    initial = {
        name: torch.zeros(tensor.shape) if tensor.is_meta and name not in tensors else tensor
        for name, tensor in module.state_dict().items()
    }
    tensors = reset_mismatched_value_head(tensors, initial, folder)
    state = {name: tensor.to(dtype) for name, tensor in {**initial, **tensors}.items()}
    module.load_state_dict(state, assign=True)
