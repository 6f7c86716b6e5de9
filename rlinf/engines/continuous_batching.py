"""Continuous batching for the transformers engine: rows join and leave between two tokens.

Finished rows leave the batch and waiting rows replace them, if the KV cache that they may need fits
into the memory. Long contexts are computed in chunks, and each running row gets one token between
two chunks. Each token uses one uniform random number that is drawn before decoding, so a sample
does not depend on the other rows. If newer weights arrive between two tokens, the KV cache is
computed again from the tokens so far.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.channels.channel import ChannelClosed
from rlinf.data.record import Record, RecordId
from rlinf.engines.base import RequestReceiver, RolloutHooks, check_token_request
from rlinf.engines.cache_limit import CacheLimit
from rlinf.engines.kv_cache import EqualLengthCache, KeyValueCache
from rlinf.engines.token_sampling import SamplingParams, completes_stop_string, sample_tokens
from rlinf.errors import DataError
from rlinf.models.images import PIXELS_COLUMN, SIZES_COLUMN
from rlinf.progress import PROGRESS
from rlinf.seeding import uniform_rows

COMPACTION_THRESHOLD = 0.75
"""Finished rows are removed when at most this share of the batch's rows is still running. Waiting
rows are admitted when all of them fit, or when they would be at least the share
``1 - COMPACTION_THRESHOLD`` of the batch."""

PromptImages = Mapping[str, np.ndarray]
"""The images of one prompt: columns of :mod:`rlinf.models.images`."""
Cache = KeyValueCache | EqualLengthCache
Prefill = Generator[None, None, tuple[Tensor, Cache, Tensor]]
"""A computation of contexts, which yields between two chunks."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits of the batch of one generation."""

    max_num_seqs: int
    """Largest number of rows that are decoded at the same time."""
    max_num_batched_tokens: int
    """Largest number of context tokens that are computed together, padding included."""
    cache: CacheLimit


def chunk_columns(rows: int, max_num_batched_tokens: int) -> int:
    """Return the number of columns of a chunk of ``rows`` contexts."""
    return max(1, max_num_batched_tokens // rows)


class DecoderNetwork(Protocol):
    """The model and its tokenizer; :class:`rlinf.engines.transformers.TransformersEngine`."""

    version: int
    device: torch.device
    stop_token_ids: Tensor
    """Ids of the tokens that end a sample, int64 ``[n]``."""

    def prefill(
        self,
        contexts: Sequence[np.ndarray],
        free_columns: int,
        images: Sequence[PromptImages | None] = (),
    ) -> Prefill:
        """Return the next logits ``[B, V]``, a KV cache with ``free_columns`` columns for further
        tokens, and a mask of the columns that each row attends to."""

    def rope_shift(self, images: Sequence[PromptImages | None]) -> Tensor: ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache,
    ) -> Tensor: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stop_ids(self, texts: Iterable[str]) -> set[int]: ...

    def load_newer_weights(self, hooks: RolloutHooks) -> bool: ...


@dataclass(eq=False)
class BatchedRequest:
    """A token request with its sampling parameters and noise ``[B, horizon]``."""

    request: Record
    sampling: SamplingParams
    noise: np.ndarray

    def __post_init__(self) -> None:
        # Rows are sampled together if their parameters differ only in these fields.
        self.sampling_key = replace(self.sampling, horizon=1, stop=(), seed=None)


@dataclass(eq=False)
class BatchRow:
    """One sample of a request."""

    source: BatchedRequest
    index: int
    """Row of the sample in the request."""
    first_version: int = 0
    """Weight version of the sample's first token."""

    @property
    def prompt(self) -> np.ndarray:
        """The token ids of the prompt, ``[P]``."""
        steps = self.source.request.steps
        return steps["prompt"][self.index, : steps["prompt_length"][self.index]]

    @property
    def images(self) -> PromptImages | None:
        """The images of the prompt; None if it has none."""
        steps = self.source.request.steps
        if SIZES_COLUMN not in steps:
            return None
        return {name: steps[name][self.index] for name in (PIXELS_COLUMN, SIZES_COLUMN)}

    @property
    def resumed_length(self) -> int:
        """Number of response tokens that an earlier request has already generated."""
        lengths = self.source.request.steps.get("begun_length")
        return 0 if lengths is None else int(lengths[self.index])

    @property
    def context_length(self) -> int:
        """Number of tokens that are known when the row is admitted."""
        return len(self.prompt) + self.resumed_length

    @property
    def max_length(self) -> int:
        """Largest number of tokens of prompt and response together."""
        return len(self.prompt) + self.source.sampling.horizon


class DecodingBatch:
    """The rows that are decoded together, with their tensors.

    ``num_generated`` ``[B]`` counts the generated tokens of each row, at most ``limit`` ``[B]``;
    ``position`` ``[B]`` also counts the prompt. ``tokens``, ``logprobs`` and ``versions``
    ``[B, T]`` are the generated tokens, their log-probabilities and weight versions; ``noise``
    ``[B, T]`` has the random numbers. ``rope_shift`` ``[B]`` is added to the rotary positions after
    images. ``logits`` ``[B, V]`` predict the next token. ``attend`` ``[B, columns]`` marks the
    columns of the KV cache that each row attends to; ``running`` ``[B]`` the unfinished rows.
    :meth:`prefill` computes what depends on the weights. What the host needs to know, it knows
    without waiting for the device: ``num_running`` and ``first_columns``.
    """

    logits: Tensor
    cache: Any
    """The KV cache of the network. All batches of a network have the same type of cache."""
    attend: Tensor
    first_columns: list[int]
    """First column of each row in the KV cache; earlier columns are padding."""

    def __init__(self, rows: list[BatchRow], network: DecoderNetwork) -> None:
        self.rows = rows
        self._rows_by_sampling: dict[SamplingParams, Tensor] | None = None
        width = max(row.source.sampling.horizon for row in rows)
        shape, device = (len(rows), width), network.device
        noise = np.zeros(shape, dtype=np.float32)
        tokens = np.zeros(shape, dtype=np.int64)
        logprobs = np.zeros(shape, dtype=np.float32)
        versions = np.full(shape, network.version)
        for i, row in enumerate(rows):
            noise[i, : row.source.sampling.horizon] = row.source.noise[row.index]
            row.first_version = network.version
            if count := row.resumed_length:
                steps, k = row.source.request.steps, row.index
                tokens[i, :count] = steps["begun_tokens"][k, :count]
                logprobs[i, :count] = steps["begun_logprobs"][k, :count]
                versions[i, :count] = steps["begun_version"][k, :count]
                row.first_version = int(versions[i, 0])
        self.noise = torch.from_numpy(noise).to(device)
        self.tokens = torch.from_numpy(tokens).to(device)
        self.logprobs = torch.from_numpy(logprobs).to(device)
        self.versions = torch.from_numpy(versions).to(device)
        self.num_generated = torch.tensor([row.resumed_length for row in rows], device=device)
        lengths = torch.tensor([len(row.prompt) for row in rows], device=device)
        self.position = self.num_generated + lengths
        self.limit = torch.tensor([row.source.sampling.horizon for row in rows], device=device)
        self.running = torch.ones(len(rows), dtype=torch.bool, device=device)
        self.num_running = len(rows)
        self.rope_shift = network.rope_shift([row.images for row in rows])

    def prefill(self, network: DecoderNetwork) -> Iterator[None]:
        """Compute the KV cache and the logits from the tokens so far; yield between two chunks."""
        counts, tokens = self.num_generated.tolist(), self.tokens.cpu().numpy()
        contexts = [
            np.concatenate([row.prompt, generated[:count]])
            for row, generated, count in zip(self.rows, tokens, counts, strict=True)
        ]
        lengths = [len(context) for context in contexts]
        self.first_columns = [max(lengths) - length for length in lengths]
        self.cache = None  # free the memory of older keys and values first
        self.logits, self.cache, self.attend = yield from network.prefill(
            contexts,
            max(row.max_length - length for row, length in zip(self.rows, lengths, strict=True)),
            [row.images for row in self.rows],
        )

    @property
    def has_padding(self) -> bool:
        """Whether some rows do not attend to all stored columns."""
        return any(self.first_columns)

    @property
    def num_columns(self) -> int:
        """Number of columns from the first that a row attends to."""
        length: int = self.cache.length
        return length - min(self.first_columns)

    @property
    def remaining_tokens(self) -> int:
        """Largest number of tokens that a row may still generate, between two decoding steps."""
        pairs = zip(self.rows, self.first_columns, strict=True)
        return max(row.max_length + first for row, first in pairs) - int(self.cache.length)

    @property
    def rows_by_sampling(self) -> dict[SamplingParams, Tensor]:
        """Row indices by sampling parameters, on the device."""
        if self._rows_by_sampling is None:
            indices: dict[SamplingParams, list[int]] = {}
            for i, row in enumerate(self.rows):
                indices.setdefault(row.source.sampling_key, []).append(i)
            device = self.tokens.device
            self._rows_by_sampling = {
                key: torch.tensor(rows, device=device) for key, rows in indices.items()
            }
        return self._rows_by_sampling

    def select(self, rows: Tensor) -> None:
        """Keep only the rows with these indices, ``[n]``."""
        indices = rows.tolist()
        self.rows = [self.rows[i] for i in indices]
        self.first_columns = [self.first_columns[i] for i in indices]
        self._rows_by_sampling = None
        for name in (*ROW_TENSOR_NAMES, "logits", "attend"):
            setattr(self, name, getattr(self, name)[rows])
        self.cache.select(rows)

    def append(self, other: DecodingBatch) -> None:
        """Append the rows of another batch."""
        skip = min(self.first_columns)
        old_length, other_length = self.cache.length, other.cache.length
        free_columns = max(self.remaining_tokens, other.remaining_tokens)
        self.cache.join(other.cache, skip, free_columns)
        length = self.cache.length
        attend = self.attend.new_zeros(len(self) + len(other), length + free_columns)
        attend[: len(self), length - old_length + skip : length] = self.attend[:, skip:old_length]
        attend[len(self) :, length - other_length : length] = other.attend[:, :other_length]
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        for name in ROW_TENSOR_NAMES:
            tensors = [getattr(batch, name) for batch in (self, other)]
            if tensors[0].dim() > 1:
                tensors = [torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors]
            setattr(self, name, torch.cat(tensors))
        self.logits = torch.cat([self.logits, other.logits])
        self.first_columns = [first + length - old_length for first in self.first_columns]
        self.first_columns += [first + length - other_length for first in other.first_columns]
        self.attend, self.rows, self._rows_by_sampling = attend, self.rows + other.rows, None
        self.num_running += other.num_running

    def build_replies(
        self, selected: Tensor, stopped: Tensor, *extra_columns: str
    ) -> Iterator[Record]:
        """Yield replies with the tokens of rows, grouped by request and first version.

        Args:
            selected: bool ``[B]``, the rows to return.
            stopped: bool ``[B]``, whether a stop token or stop string ended the row.
            extra_columns: Optional columns to add: ``version``, ``unfinished``.
        """
        groups: dict[tuple[BatchedRequest, int], list[int]] = {}
        for i in selected.nonzero()[:, 0].tolist():
            groups.setdefault((self.rows[i].source, self.rows[i].first_version), []).append(i)
        for (source, version), row_indices in groups.items():
            rows = torch.tensor(row_indices, device=self.num_generated.device)
            horizon, samples = source.sampling.horizon, source.request.steps["sample"]
            steps = {
                "sample": samples[[self.rows[i].index for i in row_indices]],
                "tokens": self.tokens[rows, :horizon].cpu().numpy(),
                "logprobs": self.logprobs[rows, :horizon].cpu().numpy(),
                "length": self.num_generated[rows].cpu().numpy(),
                "stopped": stopped[rows].cpu().numpy(),
            }
            if "unfinished" in extra_columns:
                steps["unfinished"] = np.ones(len(row_indices), dtype=bool)
            if "version" in extra_columns:
                steps["version"] = self.versions[rows, :horizon].cpu().numpy()
            yield Record(source.request.identity, steps, info={"version": version})

    def __len__(self) -> int:
        return len(self.rows)


ROW_TENSOR_NAMES = (
    "noise",
    "tokens",
    "logprobs",
    "versions",
    "num_generated",
    "position",
    "limit",
    "running",
    "rope_shift",
)
"""Attributes of :class:`DecodingBatch`: tensors ``[B, ...]`` that are joined row by row."""


class ContinuousBatching:
    """The state of one :meth:`rlinf.engines.base.Engine.generate` call."""

    def __init__(
        self,
        network: DecoderNetwork,
        requests: RequestReceiver,
        seed: int,
        stage: str,
        hooks: RolloutHooks,
        limits: BatchLimits,
    ) -> None:
        self._network, self._requests, self._hooks = network, requests, hooks
        self._seed, self._stage, self._limits = seed, stage, limits
        self._waiting = deque[BatchRow]()
        self._batch: DecodingBatch | None = None
        self._joining: tuple[DecodingBatch, Iterator[None]] | None = None
        """Admitted rows whose contexts are being computed, and the computation."""
        self._num_requested, self._open = 0, True
        """Number of requested samples, and whether the request channel is open."""
        self._extra_columns = () if hooks.newer_weights is None else ("version",)

    @torch.inference_mode()
    def iter_replies(self) -> Iterator[Record]:
        """Yield replies until the request channel is closed."""
        while True:
            self._receive()
            self._admit()
            if self._batch is None:
                return
            yield from self._step(self._batch)

    def _receive(self) -> None:
        """Receive all waiting requests; block for one if nothing is running."""
        while self._open and (len(self._requests) or not self._has_rows):
            try:
                request = self._requests.get()
            except ChannelClosed:
                self._open = False
                return
            check_token_request(request)
            lengths, samples = request.steps["prompt_length"], request.steps["sample"]
            sampling = SamplingParams.from_info(request.info)
            self._check_fits(request, sampling.horizon)
            seed = self._seed if sampling.seed is None else sampling.seed
            noise = uniform_rows(
                seed,
                request.identity.iteration,
                self._stage,
                samples,
                sampling.horizon,
                request.steps.get("turn"),
            )
            source = BatchedRequest(request, sampling, noise)
            # Batches keep the order of the samples, so consumers get the first samples first.
            # Within a batch, rows of similar length and progress are neighbours.
            resumed = request.steps.get("begun_length", np.zeros_like(lengths))
            batch_index = np.arange(len(lengths)) // self._limits.max_num_seqs
            row_order = np.lexsort((-lengths, resumed, batch_index))
            self._waiting.extend(BatchRow(source, int(index)) for index in row_order)
            self._num_requested += len(row_order)

    @property
    def _has_rows(self) -> bool:
        """Whether there are waiting, joining or running rows."""
        return bool(self._waiting) or bool(self._joining) or self._batch is not None

    @property
    def _num_joining(self) -> int:
        return 0 if self._joining is None else len(self._joining[0])

    def _drop_joining(self) -> None:
        """Let joining rows wait again, because their keys and values are those of old weights."""
        if self._joining is not None:
            self._waiting.extendleft(reversed(self._joining[0].rows))
            self._joining = None

    def _check_fits(self, request: Record, horizon: int) -> None:
        """Check that each row of a request fits into the KV cache.

        Raises:
            DataError: A row does not fit, even alone.
        """
        lengths, limit = request.steps["prompt_length"], self._limits.cache
        for row in np.flatnonzero(lengths + horizon > limit.tokens):
            raise DataError(
                f"sample {request.steps['sample'][row]}: a prompt of {lengths[row]} tokens and a "
                f"response of up to {horizon} do not fit into the KV cache of {limit}; raise "
                "engine.kv_cache_gib or give the stage more memory, or shorten rollout.horizon or "
                "the prompts"
            )

    def _admit(self) -> None:
        """Admit waiting rows and compute a chunk of their contexts; if nothing runs, all of them.

        When their contexts are complete, they join the batch.
        """
        if self._joining is None:
            count = self._num_admissible()
            if not count:
                return
            admitted = DecodingBatch([self._waiting.popleft() for _ in range(count)], self._network)
            self._joining = admitted, admitted.prefill(self._network)
        joining, chunks = self._joining
        for _ in chunks:
            PROGRESS.mark()
            if self._batch is not None:
                return
        self._joining = None
        if self._batch is None:
            self._batch = joining
        else:
            self._batch.append(joining)

    def _num_admissible(self) -> int:
        """Return how many waiting rows to admit: as many as fit, if enough of the batch is free."""
        num_batch = 0 if self._batch is None else len(self._batch)
        count = min(len(self._waiting), self._limits.max_num_seqs - num_batch)
        if count and self._is_enough(count):
            count = self._num_fitting(count)
        return count if self._is_enough(count) else 0

    def _is_enough(self, count: int) -> bool:
        """Whether it is worthwhile to let ``count`` rows join the batch."""
        total = count + (0 if self._batch is None else len(self._batch))
        return count >= min(len(self._waiting), (1 - COMPACTION_THRESHOLD) * total)

    def _num_fitting(self, count: int) -> int:
        """Return how many of the first ``count`` waiting rows fit into the KV cache.

        The joined cache has as many columns as the longest context and the longest rest need.
        """
        rows = columns = rest = context = 0
        if self._batch is not None:
            rows, columns = len(self._batch), self._batch.num_columns
            rest = self._batch.remaining_tokens
        for added, row in enumerate(itertools.islice(self._waiting, count), start=1):
            context = max(context, row.context_length)
            rest = max(rest, row.max_length - row.context_length)
            # Until the rows join, the batch generates a token after each chunk but the last.
            chunk = chunk_columns(added, self._limits.max_num_batched_tokens)
            num_columns = max(columns + (context - 1) // chunk, context) + rest
            if (rows + added) * num_columns > self._limits.cache.tokens:
                return added - 1
        return count

    def _step(self, batch: DecodingBatch) -> Iterator[Record]:
        """Generate one token for each row and yield the replies of rows that finish."""
        network, hooks = self._network, self._hooks
        PROGRESS.mark()
        chosen = self._sample_next(batch)
        if hooks.on_token is not None:
            self._report_tokens(batch, chosen, hooks.on_token)
        stopped = torch.isin(chosen, network.stop_token_ids) | self._completes_stop_string(batch)
        ended = (stopped | (batch.num_generated == batch.limit)) & batch.running
        if bool(ended.any()):
            yield from batch.build_replies(ended, stopped, *self._extra_columns)
            batch.running &= ~ended
            batch.num_running = int(batch.running.sum())
            if batch.num_running == 0:
                self._batch = None
                return
            if batch.num_running <= COMPACTION_THRESHOLD * len(batch):
                running_rows = batch.running.nonzero()[:, 0]
                batch.select(running_rows)
                chosen = chosen[running_rows]
        if hooks.should_abort is not None:
            remaining = len(self._waiting) + self._num_joining + batch.num_running
            if hooks.should_abort(remaining, self._num_requested):
                none_stopped = torch.zeros_like(batch.running)
                yield from batch.build_replies(
                    batch.running, none_stopped, "unfinished", *self._extra_columns
                )
                self._batch = None
                return
        if network.load_newer_weights(hooks):
            self._drop_joining()
            for _ in batch.prefill(network):
                PROGRESS.mark()
            return
        cache = batch.cache
        batch.attend[:, cache.length] = True
        visible = batch.attend[:, None, None, : cache.length + 1] if batch.has_padding else None
        batch.logits = network.forward(
            chosen[:, None], (batch.position - 1 + batch.rope_shift)[:, None], visible, cache
        )

    def _report_tokens(
        self, batch: DecodingBatch, chosen: Tensor, on_token: Callable[[RecordId, int, int], None]
    ) -> None:
        running = batch.running.tolist()
        for row, token, is_running in zip(batch.rows, chosen.tolist(), running, strict=True):
            if is_running:
                request = row.source.request
                on_token(request.identity, int(request.steps["sample"][row.index]), token)

    def _sample_next(self, batch: DecodingBatch) -> Tensor:
        """Sample and store the next token ``[B]`` of every row, including finished rows."""
        # Finished rows overwrite their last position.
        position = torch.minimum(batch.num_generated, batch.limit - 1)[:, None]
        noise = batch.noise.gather(1, position)[:, 0]
        if len(batch.rows_by_sampling) == 1:
            (sampling,) = batch.rows_by_sampling
            chosen, logprobs = self._draw(sampling, batch.logits, noise, batch.num_generated)
        else:
            chosen, logprobs = torch.empty_like(batch.num_generated), torch.empty_like(noise)
            for sampling, rows in batch.rows_by_sampling.items():
                chosen[rows], logprobs[rows] = self._draw(
                    sampling, batch.logits[rows], noise[rows], batch.num_generated[rows]
                )
        batch.tokens.scatter_(1, position, chosen[:, None])
        batch.logprobs.scatter_(1, position, logprobs[:, None])
        if self._extra_columns:
            batch.versions.scatter_(1, position, torch.full_like(position, self._network.version))
        batch.num_generated += batch.running
        batch.position += batch.running
        return chosen

    def _draw(
        self, sampling: SamplingParams, logits: Tensor, noise: Tensor, num_generated: Tensor
    ) -> tuple[Tensor, Tensor]:
        forbidden = None
        if sampling.min_tokens:
            forbidden = torch.zeros_like(logits, dtype=torch.bool)
            forbidden[:, self._network.stop_token_ids] = (num_generated < sampling.min_tokens)[
                :, None
            ]
        return sample_tokens(logits, noise, sampling, forbidden)

    def _completes_stop_string(self, batch: DecodingBatch) -> Tensor:
        """Return, bool ``[B]``, whether the last token of each row completes a stop string."""
        completed = torch.zeros_like(batch.running)
        row_indices = [i for i, row in enumerate(batch.rows) if row.source.sampling.stop]
        if row_indices:
            tokens = batch.tokens[row_indices].tolist()
            counts = batch.num_generated[row_indices].tolist()
            for i, generated, count in zip(row_indices, tokens, counts, strict=True):
                sampling, network = batch.rows[i].source.sampling, self._network
                if count >= sampling.min_tokens:
                    ids = network.stop_ids(sampling.stop)
                    completed[i] = completes_stop_string(
                        generated[:count], sampling.stop, network.decode, ids
                    )
        return completed
