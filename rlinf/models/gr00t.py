"""Policies GR00T N1.5 and N1.7: flow matching of action chunks from images, instruction and state.

All actions of a chunk attend to each other, so the whole chunk is denoised. The first
``n_action_steps`` actions are executed, and only they have a log-probability
(:mod:`rlinf.models.flow_vla`). The folder is described in :mod:`rlinf.models.gr00t_folder`. Source:
arXiv 2503.14734.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf.errors import DataError
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import (
    DEFAULT_ALPHABET,
    read_tokenizer,
    write_character_tokenizer,
)
from rlinf.models.checkpoint_tensors import check_tensors, stored_shapes
from rlinf.models.flow_vla import (
    ADDED_HEADS,
    FlowVLAPolicy,
    check_spec_kinds,
    check_tokenizer_size,
    load_network,
    read_stored_tensors,
    write_weights,
)
from rlinf.models.gr00t_folder import (
    GR00T_TYPE,
    IMAGE_TOKENS,
    Gr00tConfig,
    Gr00tFolder,
    check_gr00t_task,
    copy_gr00t_files,
    head_sizes,
    new_gr00t_config,
    new_vlm_config,
    prompt_ends,
    read_gr00t_vlm,
    read_source_config,
    version_of,
    write_gr00t_processors,
)
from rlinf.models.gr00t_network import Gr00tModel, Gr00tNetwork
from rlinf.models.hf_folder import check_weight_files
from rlinf.models.lerobot_folder import (
    VLM_FOLDER,
    action_normalizer,
    map_cameras,
    new_statistics,
    read_statistics,
    replace_statistics,
    state_normalizer,
)
from rlinf.models.loading import meta_parameters
from rlinf.models.vla_base import InstructionTokenizer

PREFIX = "model."
"""Prefix in the network of the names that published folders have."""
UNUSED_TENSORS = re.compile(r"\.lm_head\.|\.vision_model\.head\.")
"""Tensors of published folders that no policy uses: heads of the vision-language models."""
EMBEDDINGS = ".embed_tokens.weight"
"""End of the name of the token embeddings; their only copy may be a language model's head."""


class Gr00tPolicy(FlowVLAPolicy):
    """A policy of GR00T N1.5 or N1.7."""

    Config = Gr00tConfig
    folder_class = Gr00tFolder
    module: Gr00tNetwork
    trains_padding = False
    vlm_parameters = re.compile(r"model\.backbone\.")

    def __init__(
        self,
        module: Gr00tNetwork,
        folder: Path,
        config: Gr00tConfig,
        settings: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> None:
        sizes, image_tokens = head_sizes(settings), module.model.backbone.num_image_tokens
        cameras = len(map_cameras(settings, config.camera_map))
        begin, end = prompt_ends(version_of(settings), cameras, image_tokens)

        def tokenize(text: str) -> list[int]:
            if settings["lower_case"]:
                text = re.sub(r"[^\w\s]", "", text.lower())
            turn = settings["prompt"].replace("{instruction}", text)
            return list(tokenizer.encode(f"{begin}{turn}{end}").ids)

        super().__init__(
            module,
            folder,
            config,
            settings,
            num_steps=int(sizes["num_inference_timesteps"]),
            num_denoised=int(sizes["action_horizon"]),
            image_tokens=image_tokens,
            tokenizer=InstructionTokenizer(tokenize, pad_left=False),
        )
        self._clips = bool(settings["clip"])

    @classmethod
    def check_spec(cls, config: Gr00tConfig, spec: ModelSpec) -> Any:
        check_spec_kinds(GR00T_TYPE, spec)
        if config.path is None:
            settings = new_gr00t_config(config, spec)
            side, token = settings["image_resolution"][0], IMAGE_TOKENS[config.version]
            vlm_settings, statistics = new_vlm_config(config, side, {token: 0}), None
        else:
            source = config.path.expanduser()
            settings, statistics = read_source_config(source, config)
            _, vlm_settings = read_gr00t_vlm(source, settings, config.vlm_path)
            check_weight_files(source)
            _check_shapes(source, settings, vlm_settings)
        check_gr00t_task(settings, vlm_settings, config, spec)
        if config.norm_stats is not None:
            read_statistics(config.norm_stats, settings)
        elif config.path is not None and statistics is None:
            state_normalizer(source, settings)
            action_normalizer(source, settings)

    @classmethod
    def create(cls, config: Gr00tConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        cls.check_spec(config, spec)
        if config.path is not None:
            return cls._copy(config, folder)
        settings = new_gr00t_config(config, spec)
        side = settings["image_resolution"][0]
        (folder / VLM_FOLDER).mkdir()
        # The fixed parts of prompts are tokens, so that prompts are short.
        token = IMAGE_TOKENS[config.version]
        parts = prompt_ends(config.version, len(map_cameras(settings, config.camera_map)), 1)
        fixed = {part for text in parts for part in text.split(token) if part}
        vocabulary = write_character_tokenizer(
            DEFAULT_ALPHABET + "\n",
            folder / VLM_FOLDER,
            special_tokens=[token, *sorted(fixed)],
        )
        vlm_settings = new_vlm_config(config, side, vocabulary)
        (folder / VLM_FOLDER / "config.json").write_text(json.dumps(vlm_settings, indent=1))
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        statistics = new_statistics(settings, spec)
        if config.norm_stats is not None:
            statistics = read_statistics(config.norm_stats, settings)
        write_gr00t_processors(folder, settings, statistics)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _create_network(settings, vlm_settings, config, vocabulary[token])
        write_weights(folder, _to_published(module.state_dict()))

    @classmethod
    def _copy(cls, config: Gr00tConfig, folder: Path) -> None:
        assert config.path is not None
        source = config.path.expanduser().resolve()
        settings, statistics = read_source_config(source, config)
        vlm_folder, _ = read_gr00t_vlm(source, settings, config.vlm_path)
        copy_gr00t_files(source, vlm_folder.resolve(), folder)
        if statistics is not None:
            write_gr00t_processors(folder, settings, statistics)
        if config.norm_stats is not None:
            replace_statistics(folder, read_statistics(config.norm_stats, settings))
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        tensors, heads = read_stored_tensors(source)
        names = network_names(tensors)
        write_weights(folder, {target: tensors[n] for n, target in names.items()} | heads)

    @classmethod
    def load(cls, folder: Path, config: Gr00tConfig) -> Self:
        """Load a policy folder.

        Raises:
            DataError: Files are missing, damaged, or inconsistent.
        """
        settings, _ = read_source_config(folder, Gr00tConfig())
        vlm_folder, vlm_settings = read_gr00t_vlm(folder, settings, None)
        tokenizer = read_tokenizer(vlm_folder)
        image_token_id = _image_token_id(tokenizer, settings, vlm_folder)
        module, tensors = load_network(
            folder,
            lambda: _create_network(settings, vlm_settings, config, image_token_id, "meta"),
            _from_published,
        )
        embeddings = next(len(t) for n, t in tensors.items() if n.endswith(EMBEDDINGS))
        check_tokenizer_size(folder, tokenizer, embeddings)
        return cls(module, folder, config, settings, tokenizer)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        copy_gr00t_files(self._folder, self._folder / VLM_FOLDER, folder)
        write_weights(folder, _to_published(tensors))

    def scale_state(self, observations: Tensor) -> Tensor:
        scaled = super().scale_state(observations)
        return scaled.clamp(-1, 1) if self._clips else scaled

    def to_actions(self, points: Tensor, observations: Tensor) -> Tensor:
        return super().to_actions(points.clamp(-1, 1) if self._clips else points, observations)

    def blocks(self) -> list[nn.Module]:
        head: Any = self.module.model.action_head
        features: Any = head.vl_self_attention["transformer_blocks"]
        backbone = self.module.model.backbone.blocks()
        return [*backbone, *features, *head.model.transformer_blocks]


def network_names(stored: Iterable[str]) -> dict[str, str]:
    """Return the name in the network, without prefix, of each tensor of a published folder.

    Unused tensors are omitted. If the head of a language model is the only copy of the token
    embeddings, it gets their name.
    """
    names = {name: name for name in stored if not UNUSED_TENSORS.search(name)}
    if not any(name.endswith(EMBEDDINGS) for name in names):
        for name in stored:
            head = name.removesuffix(".lm_head.weight")
            if head != name:
                # Qwen3-VL has the head beside its model, which has two parts.
                inner = "model.language_model" if head == "backbone.model" else "model"
                names[name] = f"{head}.{inner}{EMBEDDINGS}"
    return names


def _to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n if n.startswith(ADDED_HEADS) else PREFIX + n: t for n, t in tensors.items()}


def _image_token_id(tokenizer: Tokenizer, settings: Mapping[str, Any], folder: Path) -> int:
    """Return the id of the token that represents a part of an image.

    Raises:
        DataError: The tokenizer has no such token.
    """
    token = IMAGE_TOKENS[version_of(settings)]
    token_id: int | None = tokenizer.token_to_id(token)
    if token_id is None:
        raise DataError(
            f"model.vlm_path: {folder}/tokenizer.json has no token {token}; save it with the added "
            "tokens (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        )
    return token_id


def _create_network(
    settings: Mapping[str, Any],
    vlm_settings: Mapping[str, Any],
    config: Gr00tConfig,
    image_token_id: int,
    device: str = "cpu",
) -> Gr00tNetwork:
    """Create a network, on ``meta`` without weights, except those of the heads."""
    sizes, learned = head_sizes(settings), config.noise_method == "learned"
    with meta_parameters() if device == "meta" else nullcontext():
        model = Gr00tModel(settings, vlm_settings, sizes)
    return Gr00tNetwork(
        model,
        settings,
        sizes,
        image_token_id=image_token_id,
        learned_noise=learned,
        value_level=config.value_level,
    )


def _check_shapes(
    source: Path, settings: Mapping[str, Any], vlm_settings: Mapping[str, Any]
) -> None:
    """Check names and shapes of all tensors of a folder; only their headers are read.

    Raises:
        DataError: Tensors are missing, unexpected or of another shape.
    """
    module = _create_network(settings, vlm_settings, Gr00tConfig(), 0, "meta").model
    stored = {n: s for n, s in stored_shapes(source).items() if not n.startswith(ADDED_HEADS)}
    shapes = {target: stored[name] for name, target in network_names(stored).items()}
    check_tensors(f"model.path: {source}", shapes, module)
