"""Causal language models of ``transformers``: any checkpoint folder, or a small one from config."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from rlinf.config import Section
from rlinf.data.padding import pad
from rlinf.data.record import Record
from rlinf.errors import ConfigError, DataError
from rlinf.fit import LANGUAGE_MODEL, PROMPTS
from rlinf.models.architectures import Architecture, check_sizes, settings_of
from rlinf.models.base import Batch, Policy, Spec, StepOutputs
from rlinf.models.chat_format import check_arguments
from rlinf.models.families import check_causal
from rlinf.models.fit import as_published, check_weights, renames
from rlinf.models.loading import check_rotary, fill, load_module, outline_module, outline_new
from rlinf.models.logprobs import (
    WHOLE,
    final_cap,
    head_logprobs,
    plain_head,
    replaced,
    say_whole,
    token_logprobs,
    uncapped,
    without,
)
from rlinf.models.packed import APART, Rows, check_apart, pack, unpack, use_packing
from rlinf.models.published_folder import (
    WEIGHTS,
    PublishedFolder,
    check_checkpoint,
    check_vocabulary,
    check_weight_files,
    copy_companions,
    read_settings,
    weight_files,
)
from rlinf.models.rotary import length_scaling
from rlinf.models.tokenizer import write_character_tokenizer
from rlinf.tensors import State, save_tensors

log = logging.getLogger("rlinf")
Said = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities, entropies and values."""


class CausalLMConfig(Section):
    """Where the model comes from: ``path`` to a checkpoint folder, or the sizes of a new one."""

    path: Path | None = None
    """Folder in the Hugging Face format; any ``AutoModelForCausalLM``."""
    trust_remote_code: bool = False
    """Run model code that the checkpoint brings along. Off: such a checkpoint is refused."""
    context: int | None = Field(default=None, gt=0)
    """Most tokens of a prompt and its response together; null: as many as the model was made for,
    and of a model whose rotary scaling depends on the length (LongRoPE, dynamic NTK) as many as its
    plain frequencies reach. Such frequencies are chosen by this length, for the whole run."""
    architecture: Architecture = "qwen2"
    hidden: int = Field(default=128, gt=0)
    layers: int = Field(default=4, gt=0)
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=2, gt=0)
    intermediate: int = Field(default=384, gt=0)
    max_positions: int = Field(default=512, gt=0)
    window: int | None = Field(default=None, gt=0)
    """How many tokens a token of a layer with a window sees; null: as the architecture has it."""
    experts: int | None = Field(default=None, gt=0)
    """Of each layer of a mixture of experts; null: 4."""
    experts_per_token: int = Field(default=2, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the checkpoint's chat template (``enable_thinking: false``), for rollout,
    fine-tuning and evaluation."""


class CausalLM(Policy):
    """A policy whose steps are the tokens of a response."""

    Config = CausalLMConfig
    needs = frozenset({PROMPTS})
    offers = frozenset({LANGUAGE_MODEL})
    by_rows = True

    def __init__(self, module: nn.Module, folder: Path) -> None:
        self.module = module
        self._folder = folder
        self._packing, self._shares = False, False
        self._unwritten: tuple[int, ...] = ()
        """Tokens that it never says."""
        self.packs = getattr(getattr(self.network, "config", None), "model_type", "") in APART

    @property
    def network(self) -> Any:
        """The language model itself."""
        return self.module

    @property
    def networks(self) -> list[Any]:
        """All models that read the tokens, one after the other."""
        return [self.network]

    @classmethod
    def check(cls, config: CausalLMConfig, spec: Spec) -> Any:
        if config.path is not None:
            published = PublishedFolder.of(config)
            check_checkpoint(published.folder, config.trust_remote_code)
            check_family(published)
            check_context(published, config)
            check_weight_files(published.folder)
            check_vocabulary(published)
            check_weights(published.folder)
            check_rotary(published.folder, config)
            return published.tokenizer
        if "alphabet" not in spec:
            raise ConfigError(
                "model.path: this task brings no alphabet to build a tokenizer from; "
                "give the folder of a checkpoint, or choose a task that fits model.name"
            )
        check_sizes(config)
        check_context(None, config)
        check_arguments(config.chat_template_kwargs, spec.get("chat_template"))
        return None

    @classmethod
    def positions(cls, config: CausalLMConfig) -> int | None:
        if config.path is None:
            return config.context or config.max_positions
        return PublishedFolder.of(config).run_length(config.context)

    @classmethod
    def create(cls, config: CausalLMConfig, spec: Spec, seed: int, folder: Path) -> None:
        cls.check(config, spec)
        if config.path is not None:
            source = config.path.expanduser().resolve()
            copy_companions(source, folder)
            for path in weight_files(source):
                shutil.copyfile(path, folder / path.name)
            return
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        vocabulary = write_character_tokenizer(
            spec["alphabet"], folder, spec.get("chat_template"), spec.get("special_tokens", ())
        )
        settings = settings_of(config, len(vocabulary))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, dtype=torch.float32
            )
        module.to(getattr(torch, config.dtype)).save_pretrained(folder)

    @classmethod
    def processor(cls, folder: Path, config: CausalLMConfig) -> Any:
        return PublishedFolder.of(config, folder).tokenizer

    @classmethod
    def load(cls, folder: Path, config: CausalLMConfig) -> CausalLM:
        return cls(cls.around(load_module(folder, config), config), folder)

    @classmethod
    def sketch(cls, config: CausalLMConfig) -> CausalLM | None:
        if config.path is None:
            return cls(cls.around(outline_new(config), config), Path())
        folder = config.path.expanduser()
        module = outline_module(folder, config)
        return None if module is None else cls(cls.around(module, config), folder)

    @classmethod
    def around(cls, network: Any, config: Any) -> nn.Module:
        """What is trained, of a language model."""
        module: nn.Module = network
        return module

    @classmethod
    def outline(cls, folder: Path, config: CausalLMConfig) -> CausalLM:
        module = outline_module(folder, config)
        if module is None:
            log.warning(
                "%s: only the model library knows how its files make the network's tensors; each "
                "process reads the whole model before it is shared out",
                folder,
            )
            return cls.load(folder, config)
        return cls(cls.around(module, config), folder)

    def fill(self, folder: Path | None = None) -> None:
        folder = folder or self._folder
        fill(self.network, folder, f"model.path: {folder}")

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.save_state(folder, State.of(tensors))

    def save_state(self, folder: Path, state: State) -> None:
        copy_companions(self._folder, folder)
        if renames(self.network):
            state = State.of(as_published(self.network, state.whole()))
        tied = getattr(self.network, "_tied_weights_keys", None) or {}
        if not getattr(self.network.config, "tie_word_embeddings", False):
            tied = {}
        names = [name for name in state.like if name not in tied]
        save_tensors(folder / WEIGHTS, state, names, {"format": "pt"})

    def collate(self, records: Sequence[Record]) -> Batch:
        prompts = [record.context["prompt"] for record in records]
        if not all(len(prompt) for prompt in prompts):
            raise DataError("a prompt has no token: nothing stands before the first of its sample")
        actions = [record.steps["actions"] for record in records]
        length = max(len(action) for action in actions)
        mask = pad([np.ones(len(action), np.float32) for action in actions], length)
        steps = {"actions": pad(actions, length), "mask": mask}
        if self._packing:
            keys = [self._told_by(record) for record in records]
            where = self._positions(records)
            packed = pack(prompts, actions, length, share=self._shares, keys=keys, where=where)
            return {**packed, **steps}
        tokens = [
            np.concatenate(pair, dtype=np.int64) for pair in zip(prompts, actions, strict=True)
        ]
        return {
            "tokens": pad(tokens, max(len(row) for row in tokens)),
            "starts": torch.tensor([len(prompt) for prompt in prompts]),
            **steps,
        }

    def _told_by(self, record: Record) -> bytes:
        """What tells its prompt from others."""
        key: bytes = record.context["prompt"].tobytes()
        return key

    def _positions(self, records: Sequence[Record]) -> list[np.ndarray] | None:
        """Where the tokens of each record stand, ``[..., P + T - 1]``; None: one after another."""
        return None

    def _seen(self, batch: Batch) -> dict[str, Any]:
        """What the network takes beside tokens."""
        return {}

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        mask = batch["mask"]
        if "places" in batch:
            inputs: dict[str, Any] = {
                "input_ids": batch["tokens"],
                "position_ids": batch["positions"],
                "logits_to_keep": batch["kept"],
            }
            inputs |= self._seen(batch)
            if (rows := Rows.of(batch)) is not None:
                inputs["rows"] = rows
            taken = batch["actions"].flatten()[batch["places"]][None]
            found = self._said(inputs, lambda features: features, taken, temperature, entropy)
            parts = [None if x is None else unpack(x[0], batch["places"], mask) for x in found]
        else:
            parts = list(self._padded(batch, temperature, entropy))
        logprobs, spread, values = parts
        assert logprobs is not None
        return StepOutputs(logprobs * mask, spread, None if values is None else values * mask)

    def _padded(self, batch: Batch, temperature: float, entropy: bool) -> Said:
        tokens, starts, length = batch["tokens"], batch["starts"], batch["mask"].shape[1]
        # Padding stands on the right, where causal attention keeps every real token from seeing
        # it: no mask is needed, and attention takes its quickest path.
        first = int(starts.min()) - 1
        kept = tokens.shape[1] - 1 - first
        # The token at position p is predicted at p - 1; rows start at their own columns.
        columns = starts[:, None] - 1 - first + torch.arange(length, device=tokens.device)
        columns = columns.clamp(max=kept - 1)
        aligned = int(starts.max()) - 1 == first

        def own(features: Tensor) -> Tensor:
            if aligned:
                return features
            return features.gather(1, columns[..., None].expand(-1, -1, features.shape[-1]))

        inputs = {"input_ids": tokens[:, :-1], "logits_to_keep": kept, **self._seen(batch)}
        return self._said(inputs, own, batch["actions"], temperature, entropy)

    def _said(
        self,
        inputs: Mapping[str, Any],
        own: Callable[[Tensor], Tensor],
        actions: Tensor,
        temperature: float,
        entropy: bool,
    ) -> Said:
        """Log-probabilities, entropies and values of tokens ``[B, T]``.

        Args:
            own: from features of what the network keeps to those that predict the tokens.
        """

        def parts(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if self._unwritten:
                none = weight.new_zeros(len(weight)) if bias is None else bias
                bias = without(none, self._unwritten)
            out = head_logprobs(
                own(hidden).flatten(0, 1),
                weight,
                actions.flatten(),
                temperature,
                WHOLE,
                bias=bias,
                cap=cap,
                entropy=entropy,
            )
            return out.view(*actions.shape, -1)

        head, settings = plain_head(self.network), getattr(self.network, "config", None)
        if settings is not None and hasattr(settings, "get_text_config"):
            settings = settings.get_text_config()
        large = actions.numel() * getattr(settings, "vocab_size", 0) > WHOLE
        if large and head is None:
            say_whole(getattr(settings, "model_type", ""))
        in_parts = large and head is not None
        cap = final_cap(self.network) if in_parts else None
        with contextlib.ExitStack() as stack:
            if head and in_parts:
                stack.enter_context(uncapped(self.network))
                stack.enter_context(replaced(head, parts))
            out, values = self._run(inputs)
        if not in_parts and isinstance(kept := inputs["logits_to_keep"], int):
            # Some families give logits of all positions, whatever they are asked to keep.
            out = out[:, -kept:]
            values = None if values is None else values[:, -kept:]
        values = None if values is None else own(values[..., None])[..., 0]
        if in_parts:
            return out[..., 0], out[..., 1] if entropy else None, values
        logits = without(own(out), self._unwritten)
        return *token_logprobs(logits, actions, temperature, entropy), values

    def _run(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Logits ``[B, K, V]`` and, of a critic, values ``[B, K]`` of what is kept."""
        return self.module(**inputs, use_cache=False).logits, None

    @classmethod
    def check_packing(cls, config: CausalLMConfig) -> None:
        family = config.architecture
        if config.path is not None:
            family = read_settings(config.path.expanduser())["model_type"]
        check_apart(family)

    def use_packing(self, device: torch.device, dtype: torch.dtype) -> None:
        for network in self.networks:
            self._shares = use_packing(network, device, dtype)
        self._packing = True

    def cost(self, record: Record) -> int:
        return len(record.context["prompt"]) + len(record)

    def shared(self, record: Record) -> tuple[bytes, int]:
        length = len(record.context["prompt"])
        return (self._told_by(record), length) if self._shares else (b"", 0)

    def blocks(self) -> list[nn.Module]:
        return [block for stack in self.stacks() for block in stack]

    def stacks(self) -> list[list[nn.Module]]:
        names = set(getattr(self.network, "_no_split_modules", None) or ())
        # One that is sharded has a class of its own, derived from that.
        return [
            [
                part
                for part in network.modules()
                if not names.isdisjoint(cls.__name__ for cls in type(part).__mro__)
            ]
            for network in self.networks
        ]


def causal_mask(attend: Tensor) -> Tensor:
    """Boolean mask ``[B, 1, L, L]``: each position sees itself and earlier attended ones."""
    length = attend.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=attend.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=attend.device)
    # A padded position must see something (itself), or its softmax is NaN and spreads.
    return ((attend[:, None, :] & causal) | itself)[:, None]


def check_family(published: PublishedFolder) -> None:
    """See that ``transformers`` knows a causal language model of this type.

    Raises:
        DataError: it does not.
    """
    from transformers import AutoModelForCausalLM

    if published.trust_remote_code and "auto_map" in published.settings:
        return
    if type(published.config) not in AutoModelForCausalLM._model_mapping:
        raise DataError(
            f"model.path: {published.folder} is a {published.config.model_type!r} model, which is "
            "no causal language model"
        )
    check_causal(published.config, f"model.path: {published.folder}")


def check_context(published: PublishedFolder | None, config: CausalLMConfig) -> None:
    """See that a model can read as many tokens as ``model.context`` says.

    Raises:
        ConfigError: it cannot, or its own code would choose rotary frequencies by other lengths.
    """
    longest: int | None = config.max_positions
    if published is not None:
        scaling, longest = length_scaling(published.settings), published.context_length
        if scaling is not None:
            longest = scaling.longest
            if "auto_map" in published.settings and config.trust_remote_code:
                raise ConfigError(
                    f"model.trust_remote_code: the own code of {published.folder} chooses rotary "
                    f"frequencies by the longest row of a call ({scaling.kind} in config.json), so "
                    "samples would depend on their neighbours; remove auto_map from its "
                    "config.json and set this to false, for families that transformers has"
                )
    if config.context is not None and longest is not None and config.context > longest:
        key = "model.max_positions" if published is None else f"{published.folder / 'config.json'}"
        raise ConfigError(
            f"model.context: {config.context} tokens do not fit into the {longest} positions of "
            f"the model ({key}); lower it"
        )
