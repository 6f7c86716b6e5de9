"""Continuous batching: samples are decoded together, join and leave between two tokens.

Finished rows leave the batch, waiting ones take their places; one uniform number per token, drawn
before decoding, makes a sample independent of its neighbours. Newer weights may come between two
tokens: what was cached is then computed anew from the tokens so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.channels.channel import ChannelClosed
from rlinf.data.record import Record
from rlinf.data.sampling_params import SamplingParams
from rlinf.engines.base import RequestReceiver, RolloutHooks, check_token_request
from rlinf.engines.kv_cache import EqualLengthCache, KeyValueCache
from rlinf.engines.token_sampling import completes_stop_string, sample_tokens
from rlinf.models.images import PIXELS_COLUMN, SIZES_COLUMN
from rlinf.seeding import uniform_rows

COMPACTION_THRESHOLD = 0.75
"""Rebuild the batch once this share of its rows, or less, is still unfinished; and let waiting rows
in once the rest of its places is free."""


PromptImages = Mapping[str, np.ndarray]
"""Of a prompt: the columns of :mod:`rlinf.models.images`."""


class DecoderNetwork(Protocol):
    """The model that decodes, with what ends a sample of it."""

    version: int
    device: torch.device
    stop_token_ids: Tensor
    """Tokens that end a sample, int64 ``[n]``."""

    def prefill(
        self,
        contexts: Sequence[np.ndarray],
        free_columns: int,
        images: Sequence[PromptImages | None] = (),
    ) -> tuple[Tensor, KeyValueCache | EqualLengthCache, Tensor]: ...

    def rope_shift(self, images: Sequence[PromptImages | None]) -> Tensor: ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KeyValueCache | EqualLengthCache,
    ) -> Tensor: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stop_ids(self, texts: Iterable[str]) -> set[int]: ...

    def load_newer_weights(self, hooks: RolloutHooks) -> bool: ...


@dataclass(eq=False)
class BatchedRequest:
    """A request, its settings and the noise ``[B, horizon]`` of its rows."""

    request: Record
    sampling: SamplingParams
    noise: np.ndarray

    def __post_init__(self) -> None:
        # Rows are drawn together whose settings differ in nothing but these.
        self.sampling_group = replace(self.sampling, horizon=1, stop=(), seed=None)


@dataclass(eq=False)
class BatchRow:
    """One sample of a request."""

    source: BatchedRequest
    index: int
    first_version: int = 0
    """Version of the weights that chose its first token."""

    @property
    def prompt(self) -> np.ndarray:
        """Its token ids."""
        steps = self.source.request.steps
        return steps["prompt"][self.index, : steps["prompt_length"][self.index]]

    @property
    def images(self) -> PromptImages | None:
        """Those of its prompt."""
        steps = self.source.request.steps
        if SIZES_COLUMN not in steps:
            return None
        return {name: steps[name][self.index] for name in (PIXELS_COLUMN, SIZES_COLUMN)}

    @property
    def resumed_length(self) -> int:
        """Tokens that another engine made."""
        lengths = self.source.request.steps.get("begun_length")
        return 0 if lengths is None else int(lengths[self.index])


class DecodingBatch:
    """Rows that are decoded together; tensors have a row for each.

    ``made`` ``[B]`` counts the tokens of a row, ``position`` those of its prompt as well;
    ``tokens`` ``[B, T]`` and ``logprobs`` are what was made, ``versions`` by which weights;
    ``shift`` ``[B]`` is what images add to the rotary positions behind them;
    ``logits`` ``[B, V]`` say what comes next, ``attend`` which columns of the cache a row sees.
    """

    def __init__(self, rows: list[BatchRow], network: DecoderNetwork) -> None:
        self.rows = rows
        self._groups: dict[SamplingParams, list[int]] | None = None
        width = max(row.source.sampling.horizon for row in rows)
        shape, device = (len(rows), width), network.device
        noise = np.zeros(shape, dtype=np.float32)
        tokens = np.zeros(shape, dtype=np.int64)
        logprobs = np.zeros(shape, dtype=np.float32)
        versions = np.full(shape, network.version)
        for i, row in enumerate(rows):
            noise[i, : row.source.sampling.horizon] = row.source.noise[row.index]
            row.first_version = network.version
            if begun := row.resumed_length:
                given, k = row.source.request.steps, row.index
                tokens[i, :begun] = given["begun_tokens"][k, :begun]
                logprobs[i, :begun] = given["begun_logprobs"][k, :begun]
                versions[i, :begun] = given["begun_version"][k, :begun]
                row.first_version = int(versions[i, 0])
        self.noise = torch.from_numpy(noise).to(device)
        self.tokens = torch.from_numpy(tokens).to(device)
        self.logprobs = torch.from_numpy(logprobs).to(device)
        self.versions = torch.from_numpy(versions).to(device)
        self.made = torch.tensor([row.resumed_length for row in rows], device=device)
        self.position = self.made + torch.tensor([len(row.prompt) for row in rows], device=device)
        self.limit = torch.tensor([row.source.sampling.horizon for row in rows], device=device)
        self.running = torch.ones(len(rows), dtype=torch.bool, device=device)
        self.prefill(network)

    def prefill(self, network: DecoderNetwork) -> None:
        """Compute the cache from the tokens so far."""
        made, tokens = self.made.tolist(), self.tokens.cpu().numpy()
        contexts = [
            np.concatenate([row.prompt, line[:count]])
            for row, line, count in zip(self.rows, tokens, made, strict=True)
        ]
        images = [row.images for row in self.rows]
        self.logits, self.cache, self.attend = network.prefill(
            contexts, self.remaining_tokens, images
        )
        self.shift = network.rope_shift(images)
        self.has_padding = len({len(context) for context in contexts}) > 1

    @property
    def remaining_tokens(self) -> int:
        """Most tokens that a row may still need."""
        return int((self.limit - self.made).max())

    @property
    def sampling_groups(self) -> dict[SamplingParams, list[int]]:
        """Its rows by how they are drawn."""
        if self._groups is None:
            self._groups = {}
            for i, row in enumerate(self.rows):
                self._groups.setdefault(row.source.sampling_group, []).append(i)
        return self._groups

    def select(self, keep: Tensor) -> None:
        """Keep rows ``[n]``."""
        self.rows = [self.rows[i] for i in keep.tolist()]
        self._groups = None
        for name in (*ROW_TENSORS, "logits", "attend"):
            setattr(self, name, getattr(self, name)[keep])
        self.cache.select(keep)

    def append(self, other: DecodingBatch) -> None:
        """Add the rows of another batch below."""
        skip = int(self.attend.any(0).int().argmax())
        own, new = self.cache.length, other.cache.length
        room = max(self.remaining_tokens, other.remaining_tokens)
        cache: Any = self.cache  # of the same kind as the other's: both are of one network
        cache.join(other.cache, skip, room)
        length = self.cache.length
        attend = self.attend.new_zeros(len(self) + len(other), length + room)
        attend[: len(self), length - own + skip : length] = self.attend[:, skip:own]
        attend[len(self) :, length - new : length] = other.attend[:, :new]
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        for name in ROW_TENSORS:
            parts = [getattr(part, name) for part in (self, other)]
            if parts[0].dim() > 1:
                parts = [torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in parts]
            setattr(self, name, torch.cat(parts))
        self.logits = torch.cat([self.logits, other.logits])
        self.attend, self.rows, self._groups = attend, self.rows + other.rows, None
        self.has_padding = not bool(attend[:, :length].all())

    def build_replies(
        self, selected: Tensor, stopped: Tensor, *extra_columns: str
    ) -> Iterator[Record]:
        """What there is of some rows (bool ``[B]``), by request and first version.

        Args:
            names: ``version`` and ``unfinished``, where they are to be columns too.
        """
        parts: dict[tuple[BatchedRequest, int], list[int]] = {}
        for i in selected.nonzero()[:, 0].tolist():
            parts.setdefault((self.rows[i].source, self.rows[i].first_version), []).append(i)
        for (asked, first), numbers in parts.items():
            rows, horizon = torch.tensor(numbers, device=self.made.device), asked.sampling.horizon
            samples = asked.request.steps["sample"]
            steps = {
                "sample": samples[[self.rows[i].index for i in numbers]],
                "tokens": self.tokens[rows, :horizon].cpu().numpy(),
                "logprobs": self.logprobs[rows, :horizon].cpu().numpy(),
                "length": self.made[rows].cpu().numpy(),
                "stopped": stopped[rows].cpu().numpy(),
            }
            if "unfinished" in extra_columns:
                steps["unfinished"] = np.ones(len(numbers), dtype=bool)
            if "version" in extra_columns:
                steps["version"] = self.versions[rows, :horizon].cpu().numpy()
            yield Record(asked.request.identity, steps, info={"version": first})

    def __len__(self) -> int:
        return len(self.rows)


ROW_TENSORS = (
    "noise",
    "tokens",
    "logprobs",
    "versions",
    "made",
    "position",
    "limit",
    "running",
    "shift",
)
"""Tensors of a batch with a row for each sample, besides those that go with its cache."""


class ContinuousBatching:
    """One call of :meth:`rlinf.engines.base.Engine.generate`."""

    def __init__(
        self,
        network: DecoderNetwork,
        requests: RequestReceiver,
        seed: int,
        stage: str,
        hooks: RolloutHooks,
        max_num_seqs: int,
    ) -> None:
        self._network, self._requests, self._hooks = network, requests, hooks
        self._seed, self._stage, self._most = seed, stage, max_num_seqs
        self._waiting = deque[BatchRow]()
        self._batch: DecodingBatch | None = None
        self._asked, self._open = 0, True
        self._further = () if hooks.newer_weights is None else ("version",)

    @torch.inference_mode()
    def iter_replies(self) -> Iterator[Record]:
        """Until the channel of requests closes."""
        while True:
            self._take_in()
            self._admit()
            if self._batch is None:
                return
            yield from self._step(self._batch)

    def _take_in(self) -> None:
        """Take the requests that are there; wait for one where nothing else is to be done."""
        while self._open and (len(self._requests) or (self._batch is None and not self._waiting)):
            try:
                request = self._requests.get()
            except ChannelClosed:
                self._open = False
                return
            check_token_request(request)
            lengths, samples = request.steps["prompt_length"], request.steps["sample"]
            sampling = SamplingParams.from_info(request.info)
            seed = self._seed if sampling.seed is None else sampling.seed
            noise = uniform_rows(
                seed,
                request.identity.iteration,
                self._stage,
                samples,
                sampling.horizon,
                request.steps.get("turn"),
            )
            asked = BatchedRequest(request, sampling, noise)
            # In their order, but for those that begin together: there, rows of like lengths that
            # are as far as each other are neighbours. What waits for the first parts of a batch has
            # them first.
            begun = request.steps.get("begun_length", np.zeros_like(lengths))
            together = np.arange(len(lengths)) // self._most
            order = np.lexsort((-lengths, begun, together))
            self._waiting.extend(BatchRow(asked, int(index)) for index in order)
            self._asked += len(order)

    def _admit(self) -> None:
        """Let waiting rows in, where a share of the places is free that is worth it."""
        batch, waiting = self._batch, len(self._waiting)
        count = min(waiting, self._most - (0 if batch is None else len(batch)))
        if not count or (
            batch is not None and count < min(waiting, (1 - COMPACTION_THRESHOLD) * self._most)
        ):
            return
        fresh = DecodingBatch([self._waiting.popleft() for _ in range(count)], self._network)
        if batch is None:
            self._batch = fresh
        else:
            batch.append(fresh)

    def _step(self, batch: DecodingBatch) -> Iterator[Record]:
        """One more token of every row; replies of those it ends."""
        network, hooks = self._network, self._hooks
        chosen = self._choose(batch)
        stopped = torch.isin(chosen, network.stop_token_ids) | self._completed(batch)
        ended = (stopped | (batch.made == batch.limit)) & batch.running
        if bool(ended.any()):
            yield from batch.build_replies(ended, stopped, *self._further)
            batch.running &= ~ended
            left = int(batch.running.sum())
            if left == 0:
                self._batch = None
                return
            if left <= COMPACTION_THRESHOLD * len(batch):
                keep = batch.running.nonzero()[:, 0]
                batch.select(keep)
                chosen = chosen[keep]
        if hooks.should_abort is not None:
            left = len(self._waiting) + int(batch.running.sum())
            if hooks.should_abort(left, self._asked):
                none = torch.zeros_like(batch.running)
                yield from batch.build_replies(batch.running, none, "unfinished", *self._further)
                self._batch = None
                return
        if network.load_newer_weights(hooks):
            batch.prefill(network)
            return
        cache = batch.cache
        batch.attend[:, cache.length] = True
        visible = batch.attend[:, None, None, : cache.length + 1] if batch.has_padding else None
        batch.logits = network.forward(
            chosen[:, None], (batch.position - 1 + batch.shift)[:, None], visible, cache
        )

    def _choose(self, batch: DecodingBatch) -> Tensor:
        """Draw the next token ``[B]`` of every row and note it; finished rows draw too."""
        # A finished row stays at its last place.
        place = torch.minimum(batch.made, batch.limit - 1)[:, None]
        noise = batch.noise.gather(1, place)[:, 0]
        if len(batch.sampling_groups) == 1:
            (settings,) = batch.sampling_groups
            chosen, taken = self._draw(settings, batch.logits, noise, batch.made)
        else:
            chosen, taken = torch.empty_like(batch.made), torch.empty_like(noise)
            for settings, numbers in batch.sampling_groups.items():
                rows = torch.tensor(numbers, device=noise.device)
                chosen[rows], taken[rows] = self._draw(
                    settings, batch.logits[rows], noise[rows], batch.made[rows]
                )
        batch.tokens.scatter_(1, place, chosen[:, None])
        batch.logprobs.scatter_(1, place, taken[:, None])
        if self._further:
            batch.versions.scatter_(1, place, torch.full_like(place, self._network.version))
        batch.made += batch.running
        batch.position += batch.running
        return chosen

    def _draw(
        self, settings: SamplingParams, logits: Tensor, noise: Tensor, made: Tensor
    ) -> tuple[Tensor, Tensor]:
        forbidden = None
        if settings.min_tokens:
            forbidden = torch.zeros_like(logits, dtype=torch.bool)
            forbidden[:, self._network.stop_token_ids] = (made < settings.min_tokens)[:, None]
        return sample_tokens(logits, noise, settings, forbidden)

    def _completed(self, batch: DecodingBatch) -> Tensor:
        """Rows ``[B]`` whose last token completes a stop string."""
        found = torch.zeros_like(batch.running)
        numbers = [i for i, row in enumerate(batch.rows) if row.source.sampling.stop]
        if numbers:
            tokens, made = batch.tokens[numbers].tolist(), batch.made[numbers].tolist()
            for i, line, count in zip(numbers, tokens, made, strict=True):
                sampling, network = batch.rows[i].source.sampling, self._network
                if count >= sampling.min_tokens:
                    ids = network.stop_ids(sampling.stop)
                    found[i] = completes_stop_string(
                        line[:count], sampling.stop, network.decode, ids
                    )
        return found
