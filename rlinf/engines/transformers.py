"""Batched decoding on ``transformers`` models, written for small models and CPUs.

What makes it quick: a prompt is run once and its keys and values are shared by all samples of its
group; keys and values live in buffers allocated once; finished rows leave the batch; a token's
log-probability comes from the forward pass that sampled it; one uniform number per token, drawn
before decoding, makes a sample independent of its neighbours. Newer weights may come between two
tokens: what was cached is then computed anew from the tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.engines.attention import use_decode_attention
from rlinf.engines.base import Engine
from rlinf.errors import DataError
from rlinf.fit import LANGUAGE_MODEL
from rlinf.models.base import copy_weights
from rlinf.models.causal_lm import (
    CausalLMConfig,
    causal_mask,
    load_module,
    load_tokenizer,
    reload_weights,
)
from rlinf.models.device import DeviceName, local_device
from rlinf.residency import placed
from rlinf.seeding import uniforms

COMPACT_BELOW = 0.75
"""Rebuild the batch once this share of its rows, or less, is still unfinished."""


class TransformersConfig(Section):
    """Decoding on the model's own ``transformers`` classes."""

    max_rows: int = Field(default=256, gt=0)
    """Most samples decoded at once."""
    threads: int = Field(default=1, gt=0)
    """Torch threads while generating; more than one slows small models down."""
    device: DeviceName = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights it generates with, and of what is sent to it; null: that of the model. The
    trainer keeps its own, and inference evaluates that."""
    ignore_eos: bool = False
    """Decode to the horizon whatever is sampled (for benchmarks)."""


class TransformersEngine(Engine):
    """See the module."""

    Config = TransformersConfig
    needs = frozenset({LANGUAGE_MODEL})

    def __init__(self, config: TransformersConfig, policy: type, policy_config: Any) -> None:
        self._config = config
        self._policy_config: CausalLMConfig = policy_config
        if config.dtype is not None:
            self._policy_config = policy_config.model_copy(update={"dtype": config.dtype})
        self._device = local_device(config.device)
        self.version = -1

    def load(self, folder: Path, version: int) -> None:
        if self.version < 0 or not reload_weights(self._module, folder):
            module = load_module(folder, self._policy_config).eval()
            self._module: Any = placed(module, self._device)
            use_decode_attention(self._module)
        tokenizer = load_tokenizer(folder, self._policy_config.trust_remote_code)
        stop = getattr(self._module.generation_config, "eos_token_id", None)
        stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
        known = set() if self._config.ignore_eos else {*stops, tokenizer.eos_token_id}
        self._stops = torch.tensor(sorted(known), dtype=torch.int64, device=self._device)
        self.version = version

    def load_state(self, tensors: Mapping[str, Tensor], version: int) -> None:
        copy_weights(self._module, tensors)
        self.version = version

    def resident(self) -> dict[str, list[Tensor]]:
        if self.version < 0:
            return {}
        # Keys and values are cached only while a request is answered.
        return {"weights": [*self._module.state_dict().values()]}

    @torch.inference_mode()
    def generate(self, request: Record, seed: int, stage: str) -> Iterator[Record]:
        torch.set_num_threads(self._config.threads)
        lengths = request.steps["prompt_length"]
        if (lengths < 1).any():
            raise DataError("a prompt has no token: nothing stands before the first of its sample")
        begun = request.steps.get("begun_length", np.zeros_like(lengths))
        # Rows of one chunk are equally far; longest prompts first, so that they have like lengths.
        order = np.lexsort((-lengths, begun))
        levels = np.split(order, np.flatnonzero(np.diff(begun[order])) + 1)
        size, left = self._config.max_rows, len(order)
        for rows in [level[i : i + size] for level in levels for i in range(0, len(level), size)]:
            left -= len(rows)
            yield self._decode(request, rows, left, seed, stage)

    def _decode(
        self, request: Record, rows: np.ndarray, later: int, seed: int, stage: str
    ) -> Record:
        """Reply to some rows of a request that are equally far; ``later`` others still come."""
        horizon, temperature = (
            int(request.info["horizon"]),
            float(request.info["temperature"]),
        )
        given = {name: array[rows] for name, array in request.steps.items()}
        prompts, lengths, samples = given["prompt"], given["prompt_length"], given["sample"]
        begun = int(given["begun_length"][0]) if "begun_length" in given else 0
        noise = torch.from_numpy(
            uniforms(seed, request.identity.iteration, stage, samples, horizon)
        ).to(self._device)
        width = int(lengths.max())
        tokens = torch.zeros(len(rows), horizon, dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(len(rows), horizon, device=self._device)
        ends = torch.full((len(rows),), horizon, dtype=torch.int64, device=self._device)
        stopped = torch.zeros(len(rows), dtype=torch.bool, device=self._device)
        unfinished = torch.zeros(len(rows), dtype=torch.bool, device=self._device)
        versions = np.full((len(rows), horizon), self.version)

        alive = torch.arange(len(rows), device=self._device)
        if begun:
            tokens[:, :begun] = torch.from_numpy(given["begun_tokens"][:, :begun])
            logprobs[:, :begun] = torch.from_numpy(given["begun_logprobs"][:, :begun])
            versions[:, :begun] = given["begun_version"][:, :begun]
            logits, cache, attend = self._again(
                prompts, lengths, width, horizon, alive.cpu().numpy(), tokens[:, :begun]
            )
        else:
            logits, cache, attend = self._prefill(prompts, lengths, width, horizon)
        start = torch.from_numpy(lengths).to(self._device)
        padded = bool((lengths < width).any())
        running = torch.ones(len(rows), dtype=torch.bool, device=self._device)
        for step in range(begun, horizon):
            chosen, taken = sample(logits, noise[alive, step], temperature)
            tokens[alive, step] = chosen
            logprobs[alive, step] = taken
            ended = torch.isin(chosen, self._stops) & running
            if bool(ended.any()):
                finished = alive[ended]
                ends[finished], stopped[finished] = step + 1, True
                running &= ~ended
                left = int(running.sum())
                if left == 0:
                    break
                if left <= COMPACT_BELOW * len(alive):
                    keep = running.nonzero()[:, 0]
                    alive, chosen, running = alive[keep], chosen[keep], running[keep]
                    start, attend = start[keep], attend[keep]
                    cache.select(keep)
            if step + 1 == horizon:
                break
            if self.gives_up is not None and self.gives_up(
                later + int(running.sum()), len(request.steps["sample"])
            ):
                ends[alive[running]], unfinished[alive[running]] = step + 1, True
                break
            if self.refreshed():
                versions[:, step + 1 :] = self.version
                logits, cache, attend = self._again(
                    prompts, lengths, width, horizon, alive.cpu().numpy(), tokens[alive, : step + 1]
                )
                continue
            attend[:, width + step] = True
            visible = attend[:, None, None, : width + step + 1] if padded else None
            logits = self._forward(chosen[:, None], (start + step)[:, None], visible, cache)
        steps = {
            "sample": samples,
            "tokens": tokens.cpu().numpy(),
            "logprobs": logprobs.cpu().numpy(),
            "length": ends.cpu().numpy(),
            "stopped": stopped.cpu().numpy(),
            "unfinished": unfinished.cpu().numpy(),
        }
        if self.newer is not None:
            steps["version"] = versions
        return Record(request.identity, steps, info={"version": int(versions[0, 0])})

    def _again(
        self,
        prompts: np.ndarray,
        lengths: np.ndarray,
        width: int,
        horizon: int,
        alive: np.ndarray,
        made: Tensor,
    ) -> tuple[Tensor, KeyValueCache, Tensor]:
        """What :meth:`_prefill` gives for the rows ``alive`` with the tokens ``made`` so far."""
        done = made.shape[1]
        sofar = np.zeros((len(alive), width + done), dtype=np.int64)
        for row, old, tokens in zip(sofar, alive, made.cpu().numpy(), strict=True):
            row[: lengths[old]] = prompts[old, : lengths[old]]
            row[lengths[old] : lengths[old] + done] = tokens
        return self._prefill(sofar, lengths[alive] + done, width + done, horizon - done)

    def _prefill(
        self, prompts: np.ndarray, lengths: np.ndarray, width: int, horizon: int
    ) -> tuple[Tensor, KeyValueCache, Tensor]:
        """Run each distinct prompt once, left-padded, then give every row its copy."""
        # The length is part of a prompt: 0, which fills it up, is also an ordinary token.
        whole = np.column_stack([lengths, prompts[:, :width]])
        distinct, inverse = np.unique(whole, axis=0, return_inverse=True)
        sizes = distinct[:, 0]
        tokens = np.zeros((len(distinct), width), dtype=np.int64)
        for row, prompt, count in zip(tokens, distinct[:, 1:], sizes.tolist(), strict=True):
            row[width - count :] = prompt[:count]
        column = torch.arange(width, device=self._device)
        size = torch.from_numpy(sizes).to(self._device)
        seen = column >= (width - size)[:, None]
        positions = (column - (width - size)[:, None]).clamp(min=0)
        cache = KeyValueCache(width + horizon)
        logits = self._forward(
            torch.from_numpy(tokens).to(self._device),
            positions,
            causal_mask(seen),
            cache,
        )
        rows = torch.from_numpy(inverse.ravel()).to(self._device)
        cache.select(rows)
        attend = torch.zeros(len(rows), width + horizon, dtype=torch.bool, device=self._device)
        attend[:, :width] = seen[rows]
        return logits[rows], cache, attend

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KeyValueCache,
    ) -> Tensor:
        if mask is None:
            mask = torch.ones(1, 1, 1, cache.length + 1, dtype=torch.bool, device=self._device)
        output = self._module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.advance(tokens.shape[1])
        return output.logits[:, -1].float()


class KeyValueCache:
    """Keys and values of all layers in buffers ``[B, heads, capacity, head_dim]`` allocated once.

    Implements what attention layers of ``transformers`` call on a cache.
    """

    is_compileable = False

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._layers: list[tuple[Tensor, Tensor]] = []
        self.length = 0

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, heads, n, head_dim]`` to a layer; returns all of it so far."""
        if layer == len(self._layers):
            shape = (keys.shape[0], keys.shape[1], self._capacity, keys.shape[3])
            self._layers.append((keys.new_empty(shape), values.new_empty(shape)))
        stored_keys, stored_values = self._layers[layer]
        stop = self.length + keys.shape[2]
        stored_keys[:, :, self.length : stop] = keys
        stored_values[:, :, self.length : stop] = values
        return stored_keys[:, :, :stop], stored_values[:, :, :stop]

    def advance(self, count: int) -> None:
        """Count ``count`` positions as stored, once every layer has them."""
        self.length += count

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) rows."""
        self._layers = [
            (self._take(keys, rows), self._take(values, rows)) for keys, values in self._layers
        ]

    def _take(self, stored: Tensor, rows: Tensor) -> Tensor:
        out = stored.new_empty((len(rows), *stored.shape[1:]))
        out[:, :, : self.length] = stored[rows, :, : self.length]
        return out

    def get_seq_length(self, layer: int = 0) -> int:
        """Positions stored so far."""
        return self.length

    def __len__(self) -> int:
        return len(self._layers)


def sample(logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: ``[B, V]``.
        noise: ``[B]`` uniform in [0, 1).
        temperature: 0 takes the most likely token.

    Returns:
        Tokens ``[B]`` int64 and their log-probabilities ``[B]`` (at temperature 1 when greedy).
    """
    logprobs = F.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        chosen = logprobs.argmax(-1)
    else:
        cumulative = logprobs.exp().cumsum(-1)
        threshold = noise[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
        chosen = chosen.clamp(max=logits.shape[-1] - 1)
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]
