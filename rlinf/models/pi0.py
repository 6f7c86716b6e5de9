"""Policies pi-0 and pi-0.5: flow matching of action chunks from images, instruction and state.

All actions of a chunk attend to each other, so the whole chunk is denoised. The first
``n_action_steps`` actions are executed, and only they have a log-probability
(:mod:`rlinf.models.flow_vla`). Sources: arXiv 2410.24164, arXiv 2504.16054.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf.data.episodes import decode_instruction
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import (
    DEFAULT_ALPHABET,
    TOKENIZER_FILE,
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
from rlinf.models.hf_folder import check_weight_files
from rlinf.models.lerobot_folder import (
    action_normalizer,
    copy_processors,
    new_statistics,
    replace_statistics,
    state_normalizer,
)
from rlinf.models.pi0_folder import (
    EXPERT_HEAD,
    PREFIX,
    STATE_STEP,
    TOKEN_EMBEDDINGS,
    TOKENIZER_FOLDER,
    PiConfig,
    PiFolder,
    check_pi_task,
    copy_tokenizer,
    is_openpi,
    locate_tokenizer,
    network_names,
    network_sizes,
    new_pi_config,
    prompt_step,
    read_pi_config,
    read_prompt_step,
    read_source_config,
    read_source_statistics,
    replace_prompt_step,
    write_pi_processors,
)
from rlinf.models.pi0_network import PiNetwork
from rlinf.models.sentencepiece_model import SENTENCEPIECE_FILE, read_sentencepiece
from rlinf.models.vla_base import InstructionTokenizer

STATE_BINS = np.linspace(-1, 1, 257)[:-1]
"""Lower edges of the bins of a normalized state component in the prompt; numbers below the first
one have the bin -1."""


class Pi0Policy(FlowVLAPolicy):
    """A pi-0 policy, whose action expert reads the state as a vector."""

    Config = PiConfig
    folder_class = PiFolder
    vlm_parameters = re.compile(re.escape(PREFIX))
    kind: ClassVar[str] = "pi0"
    """The type in LeRobot's ``config.json``."""
    module: PiNetwork

    def __init__(
        self,
        module: PiNetwork,
        folder: Path,
        config: PiConfig,
        settings: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> None:
        max_length = int(settings["tokenizer_max_length"])
        sizes = network_sizes(settings)["vision"]
        super().__init__(
            module,
            folder,
            config,
            settings,
            num_steps=int(settings["num_inference_steps"]),
            num_denoised=int(settings["chunk_size"]),
            image_tokens=(sizes["image_size"] // sizes["patch_size"]) ** 2,
            tokenizer=InstructionTokenizer(
                lambda text: list(tokenizer.encode(text).ids)[:max_length], pad_left=False
            ),
        )
        step = read_prompt_step(folder)
        self._state_size: int | None = None
        """Number of state components in the prompt; None: the prompt has no state."""
        if step["registry_name"] == STATE_STEP:
            self._state_size = int((step.get("config") or {}).get("max_state_dim", 32))
        self._relative_dims = list(settings.get("relative_action_dims") or ())

    @classmethod
    def check_spec(cls, config: PiConfig, spec: ModelSpec) -> Any:
        check_spec_kinds(cls.kind, spec)
        if config.path is None:
            settings, source = new_pi_config(config, spec, cls.kind, vocabulary_size=2), None
        else:
            source = config.path.expanduser()
            settings = read_source_config(source, config, spec, cls.kind)
            if (tokenizer := locate_tokenizer(source, config)).name == SENTENCEPIECE_FILE:
                read_sentencepiece(tokenizer)
            check_weight_files(source)
            _check_shapes(source, settings)
        check_pi_task(settings, config, spec)
        prompt_step(settings, config, source)
        if read_source_statistics(settings, config, source) is None and source is not None:
            state_normalizer(source, settings)
            action_normalizer(source, settings)

    @classmethod
    def create(cls, config: PiConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        cls.check_spec(config, spec)
        if config.path is not None:
            return cls._copy(config, spec, folder)
        (folder / TOKENIZER_FOLDER).mkdir()
        vocabulary = write_character_tokenizer(DEFAULT_ALPHABET + "\n", folder / TOKENIZER_FOLDER)
        settings = new_pi_config(config, spec, cls.kind, len(vocabulary))
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        statistics = read_source_statistics(settings, config, None)
        step = prompt_step(settings, config, None)
        write_pi_processors(folder, settings, statistics or new_statistics(settings, spec), step)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _create_network(settings, config)
        write_weights(folder, module.state_dict())

    @classmethod
    def _copy(cls, config: PiConfig, spec: ModelSpec, folder: Path) -> None:
        assert config.path is not None
        source = config.path.expanduser().resolve()
        settings = read_source_config(source, config, spec, cls.kind)
        copy_tokenizer(locate_tokenizer(source, config), folder)
        statistics = read_source_statistics(settings, config, source)
        step = prompt_step(settings, config, source)
        if is_openpi(source):
            assert statistics is not None
            write_pi_processors(folder, settings, statistics, step)
        else:
            copy_processors(source, folder)
            replace_prompt_step(folder, step)
            if statistics is not None:
                replace_statistics(folder, statistics)
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        write_weights(folder, _source_tensors(source, settings))

    @classmethod
    def load(cls, folder: Path, config: PiConfig) -> Self:
        """Load a policy folder.

        Raises:
            DataError: Files are missing, damaged, or inconsistent.
        """
        settings = read_pi_config(folder, cls.kind)
        module, tensors = load_network(folder, lambda: _create_network(settings, config, "meta"))
        tokenizer = read_tokenizer(folder / TOKENIZER_FOLDER)
        check_tokenizer_size(folder, tokenizer, len(tensors[TOKEN_EMBEDDINGS]))
        return cls(module, folder, config, settings, tokenizer)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        super().save(folder, tensors)
        copy_tokenizer(self._folder / TOKENIZER_FOLDER / TOKENIZER_FILE, folder)

    def tokenize_prompts(self, instructions: np.ndarray, state: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = instructions.reshape(-1, instructions.shape[-1]), self._state_size
        texts = [decode_instruction(row).strip().replace("_", " ") for row in rows]
        texts = [text.replace("\n", " ") for text in texts]
        if size is None:
            prompts = [f"{text}\n" for text in texts]
        else:
            bins = np.digitize(state.reshape(len(texts), -1)[:, :size].cpu().numpy(), STATE_BINS)
            prompts = [
                f"Task: {text}, State: {' '.join(map(str, row))};\nAction: "
                for text, row in zip(texts, (bins - 1).tolist(), strict=True)
            ]
        encoded = [prompt.encode() for prompt in prompts]
        width = max(map(len, encoded))
        padded = np.stack([np.frombuffer(row.ljust(width, b"\0"), np.uint8) for row in encoded])
        return self._tokenize(padded.reshape(*instructions.shape[:-1], width))

    def _offset(self, observations: Tensor) -> Tensor:
        dims = self._relative_dims
        offset = observations.new_zeros(*observations.shape[:-1], 1, self.action_shape[1])
        offset[..., dims] = observations[..., None, dims]
        return offset

    def float32_modules(self) -> list[nn.Module]:
        # Patch and position embeddings, as in openpi: bfloat16 would round the pixels.
        vlm: Any = self.module.model.paligemma_with_expert.paligemma["model"]
        return [vlm.vision_tower["vision_model"].embeddings]

    def blocks(self) -> list[nn.Module]:
        models: Any = self.module.model.paligemma_with_expert
        vlm, expert = models.paligemma["model"], models.gemma_expert["model"]
        layers = vlm.vision_tower["vision_model"].encoder.layers
        return [*layers, *vlm.language_model["layers"], *expert["layers"]]


class Pi05Policy(Pi0Policy):
    """A pi-0.5 policy, whose prompt may contain the state."""

    kind = "pi05"


def _create_network(
    settings: Mapping[str, Any], config: PiConfig, device: str = "cpu"
) -> PiNetwork:
    return PiNetwork(
        settings,
        network_sizes(settings),
        learned_noise=config.noise_method == "learned",
        value_level=config.value_level,
        device=device,
    )


def _check_shapes(source: Path, settings: Mapping[str, Any]) -> None:
    """Check names and shapes of all tensors of a folder; only their headers are read.

    Raises:
        DataError: Tensors are missing, unexpected or of another shape.
    """
    module = _create_network(settings, PiConfig(), "meta").model
    stored = {n: s for n, s in stored_shapes(source).items() if not n.startswith(ADDED_HEADS)}
    shapes = {target: stored[name] for name, target in network_names(stored).items()}
    shapes.setdefault(EXPERT_HEAD, tuple(_expert_head(settings, "meta").shape))
    check_tensors(
        f"model.path: {source}", {n.removeprefix("model."): s for n, s in shapes.items()}, module
    )


def _expert_head(settings: Mapping[str, Any], device: str = "cpu") -> Tensor:
    """Return zeros for an expert head that a folder lacks."""
    sizes = network_sizes(settings)
    return torch.zeros(sizes["vocab_size"], sizes["expert"]["hidden_size"], device=device)


def _source_tensors(source: Path, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of a folder of LeRobot or openpi, by their names in the network."""
    stored, heads = read_stored_tensors(source)
    tensors = {target: stored[name] for name, target in network_names(stored).items()}
    return {EXPERT_HEAD: _expert_head(settings), **tensors, **heads}
