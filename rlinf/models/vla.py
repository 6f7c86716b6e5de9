"""A policy that reads an instruction, sees pictures and acts by tokens, a chunk of actions at once.

The network is that of OpenVLA (arXiv 2406.09246) with the decoding of OpenVLA-OFT (arXiv
2502.19645): features of pictures' patches become tokens of a language model, in front of the
prompt; behind it stand places, one for each number of each action of the chunk (empty ones in the
paper; here what they hold is learned); all see all, and one pass gives the probabilities of every
place, each over the tokens of actions alone (:mod:`rlinf.models.action_bins`). As a language
model's head predicts the next token, a place's are those at the one before it. With OpenVLA's two
vision towers (``fused``) all is laid out as there, and places are empty.

Its folder (:mod:`rlinf.models.vla_folder`) is one of Hugging Face's format: ``config.json``,
weights in safetensors, a tokenizer, and statistics of actions, which say what the bins are and
belong to the weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf.data.instructions import INSTRUCTION
from rlinf.data.padding import pad
from rlinf.data.record import Record
from rlinf.errors import ConfigError, DataError
from rlinf.fit import ACTS, OBSERVATIONS, VALUES
from rlinf.models.action_bins import STATISTICS, ActionBins, read_statistics
from rlinf.models.action_box import ActionBox
from rlinf.models.base import Batch, Policy, Spec, StepOutputs
from rlinf.models.chunks import chunks_of, with_values
from rlinf.models.cnn import PICTURE
from rlinf.models.fit import stored_shapes
from rlinf.models.headers import check_headers, read_settings
from rlinf.models.images import PREPROCESSOR
from rlinf.models.instructed import Prompts, Rows, instructions_of
from rlinf.models.loading import WEIGHTS, copy_companions, read_weights, weight_files
from rlinf.models.tokenizer import ALPHABET, read_tokenizer, write_character_tokenizer
from rlinf.models.vla_folder import (
    VLAConfig,
    asked,
    check_task,
    check_weights,
    new_preprocessor,
    new_settings,
    outline,
    statistics_in,
    vla_settings,
)
from rlinf.models.vla_network import VLANetwork

CONFIG = "config.json"


class VLAPolicy(Policy):
    """See the module."""

    Config = VLAConfig
    needs = frozenset({OBSERVATIONS})
    offers = frozenset({ACTS, VALUES})
    groups = ("policy", "value")
    stepwise = True
    module: VLANetwork

    def __init__(
        self, module: VLANetwork, folder: Path, bins: ActionBins, prompt: str, tokenizer: Tokenizer
    ) -> None:
        self.module, self._folder, self.bins, self._prompt = module, folder, bins, prompt

        def read(text: str) -> list[int]:
            said: list[int] = tokenizer.encode(prompt.replace("{instruction}", text.lower())).ids
            return said

        self._prompts = Prompts(read, left=True)

    @classmethod
    def check(cls, config: VLAConfig, spec: Spec) -> Any:
        images, action = spec.get("images") or {}, spec.get("action") or {}
        if not images:
            raise ConfigError("task.images: model.name=vla sees pictures; name a camera and a size")
        if action.get("kind") != "box":
            raise ConfigError(
                "model.name: vla acts by vectors of numbers, and this task's actions are choices; "
                "choose model.name=cnn"
            )
        if config.path is not None:
            source = config.path.expanduser()
            settings = vla_settings(source, asked(source, config, spec))
            statistics_in(source, settings, config)
            check_headers(source)
            read_tokenizer(source)
            check_task(settings, spec)
            network = outline(source, settings, config.value_level)
            check_weights(source, stored_shapes(source), network)
        else:
            name, found = cls._statistics(config, spec)
            if len(found["action"]["q01"]) != action["size"]:
                raise ConfigError(
                    f"model.statistics: of {len(found['action']['q01'])} numbers; an action of "
                    f"this task has {action['size']}"
                )
            check_task(new_settings(config, spec, 256, name, found), spec)

    @classmethod
    def create(cls, config: VLAConfig, spec: Spec, seed: int, folder: Path) -> None:
        cls.check(config, spec)
        if config.path is not None:
            source = config.path.expanduser().resolve()
            copy_companions(source, folder)
            if more := asked(source, config, spec):
                said = {**read_settings(source), **more}
                (folder / CONFIG).write_text(json.dumps(said, indent=1))
            for path in weight_files(source):
                shutil.copyfile(path, folder / path.name)
            return
        vocabulary = write_character_tokenizer(ALPHABET, folder)
        name, found = cls._statistics(config, spec)
        settings = new_settings(config, spec, len(vocabulary), name, found)
        (folder / STATISTICS).write_text(json.dumps({name: found}, indent=1))
        (folder / CONFIG).write_text(json.dumps(settings, indent=1))
        if config.fused:
            (folder / PREPROCESSOR).write_text(json.dumps(new_preprocessor(settings), indent=1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = VLANetwork(vla_settings(folder), config.value_level)
        save_file(module.state_dict(), folder / WEIGHTS, {"format": "pt"})

    @staticmethod
    def _statistics(config: VLAConfig, spec: Spec) -> tuple[str, dict[str, Any]]:
        """Those that the bins of a new network lie between, and of which data set."""
        if config.statistics is not None:
            return read_statistics(config.statistics, config.dataset, "model.statistics")
        box = ActionBox.of(spec["action"], None)
        q01, q99 = (box.center - box.half).tolist(), (box.center + box.half).tolist()
        return "actions", {"action": {"q01": q01, "q99": q99}}

    @classmethod
    def load(cls, folder: Path, config: VLAConfig) -> Self:
        """Read a policy folder.

        Raises:
            DataError: files are missing, damaged, or do not belong together.
        """
        settings = vla_settings(folder)
        found = statistics_in(folder, settings, config)[1]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                module = VLANetwork(settings, config.value_level)
            tensors = read_weights(folder)
            check_weights(folder, {n: t.shape for n, t in tensors.items()}, module)
            if module.places is not None and "places" not in tensors:
                # OpenVLA-OFT's places are empty.
                tensors["places"] = torch.zeros_like(module.places)
            own = module.state_dict()
            module.load_state_dict({**own, **with_values(tensors, own, folder)})
            bins = ActionBins.of(found["action"], module.first, module.bins)
            tokenizer = read_tokenizer(folder)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"model.path: {folder}: not a policy folder ({error!r})") from None
        return cls(module, folder, bins, str(settings["prompt"]), tokenizer)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        copy_companions(self._folder, folder)
        whole = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
        save_file(whole, folder / WEIGHTS, {"format": "pt"})

    def demonstrated(self, record: Record, seed: int = 0) -> Record:
        """Of each step of an expert's actions ``[T, D]`` the chunk that begins there, as tokens;
        places behind the end do not count."""
        chunks, counts = chunks_of(record.steps["actions"], self.module.chunk[0])
        steps = {"actions": chunks, "tokens": self.bins.tokens(chunks), "submask": counts}
        return Record(record.identity, {**record.steps, **steps}, record.context, record.info)

    def collate(self, records: Sequence[Record]) -> Batch:
        """``images.NAME`` uint8 ``[B, T, H, W, 3]``, ``prompt`` ``[B, T, L]`` and where it is,
        ``state`` ``[B, T, proprio]``, ``actions`` (token ids) ``[B, T, C, D]``, ``mask``."""
        length = max(map(len, records))
        rows = [instructions_of(r.steps.get(INSTRUCTION), len(r)) for r in records]
        prompt, there = self._prompts(pad(rows, length).numpy())
        batch = {
            "prompt": prompt,
            "there": there,
            "actions": pad([r.steps["tokens"] for r in records], length),
            "mask": pad([np.ones(len(r), np.float32) for r in records], length),
        }
        for name in (PICTURE + camera for camera in self.module.cameras):
            batch[name] = pad([r.steps[name] for r in records], length)
        if self.module.proprio:
            batch["state"] = pad([r.steps["observations"] for r in records], length)
        return batch

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        """Log-probabilities and entropies ``[B, T, C, D]``, of each token."""
        rows = Rows(batch)
        taken = rows.columns
        logits, values = self._said(taken)
        logprobs = F.log_softmax(logits / (temperature or 1.0), -1)
        chosen = logprobs.gather(-1, (taken["actions"] - self.module.first)[..., None])[..., 0]
        spread = -(logprobs.exp() * logprobs).sum(-1) if entropy else None

        return StepOutputs(
            rows.placed(chosen),
            None if spread is None else rows.placed(spread),
            rows.placed(values),
        )

    def noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        """A number in [0, 1) for every token: ``[steps, C, D]``."""
        return random.random(size=(steps, *self.module.chunk), dtype=np.float32)

    def act(
        self, observations: Mapping[str, Tensor], noise: Tensor | None, temperature: float
    ) -> dict[str, Tensor]:
        """``action`` float32 ``[n, C, D]``, ``tokens`` int64 and ``logprob`` float32 alike, and
        ``value`` float32 ``[n]``, or ``[n, C]`` of each action."""
        state = observations["observation"]
        told = observations.get(INSTRUCTION)
        rows = instructions_of(None if told is None else told.cpu().numpy(), len(state))
        prompt, there = (x[0].to(state.device) for x in self._prompts(rows[None]))
        seen = {**observations, "prompt": prompt, "there": there, "state": state}
        logits, values = self._said(seen)
        logprobs = F.log_softmax(logits / (temperature or 1.0), -1)
        if noise is None:
            choice = logprobs.argmax(-1)
        else:
            # The number falls into the share of one of the tokens, laid side by side.
            below = logprobs.exp().cumsum(-1) <= noise[..., None]
            choice = below.sum(-1).clamp(max=self.module.bins - 1)
        tokens = choice + self.module.first
        return {
            "action": self.bins.actions(tokens),
            "tokens": tokens,
            "logprob": logprobs.gather(-1, choice[..., None])[..., 0],
            "value": values,
        }

    def group(self, parameter: str) -> str:
        return "value" if parameter.startswith("value_head.") else "policy"

    def cost(self, record: Record) -> int:
        # Prompts are of about that length.
        return max(1, len(record)) * (self.module.positions + len(self._prompt))

    def blocks(self) -> list[nn.Module]:
        return self.module.blocks

    def _said(self, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What the network says of rows ``[n, ...]``."""
        pictures = {camera: columns[PICTURE + camera] for camera in self.module.cameras}
        state = columns["state"][:, : self.module.proprio] if self.module.proprio else None
        found: tuple[Tensor, Tensor] = self.module(
            columns["prompt"], columns["there"], state, **pictures
        )
        return found
