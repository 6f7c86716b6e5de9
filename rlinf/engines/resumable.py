"""Resumable generation with an external engine (vLLM or SGLang): one request per segment.

A segment is the part of a sample that one request to the external engine adds. Usually it is the
full sample. A sample is continued by another segment if newer weights arrived, or if an earlier
request was aborted. So the weight version of each token is known without support by the external
engine, and keys and values of older weights are computed again. If a server dies, its segments are
requested again with the same seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from rlinf.channels.channel import ChannelClosed
from rlinf.data.record import Record
from rlinf.engines.base import RequestReceiver, RolloutHooks, check_token_request
from rlinf.engines.token_sampling import SamplingParams, completes_stop_string
from rlinf.errors import DataError
from rlinf.seeding import torch_seed


@dataclass(frozen=True)
class SegmentRequest:
    """A request for one segment."""

    context_tokens: list[int]
    """The prompt and all tokens generated so far."""
    max_tokens: int
    """Maximum number of new tokens; replaces ``sampling.horizon``."""
    min_tokens: int
    """Minimum number of new tokens before a stop; replaces ``sampling.min_tokens``."""
    seed: int
    sampling: SamplingParams
    """The sampling parameters of the original request."""


@dataclass(frozen=True)
class GeneratedSegment:
    """The tokens that one segment request generated."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""


class ResumableEngine(Protocol):
    """The part of an engine that resumable generation needs."""

    version: int
    stop_token_ids: frozenset[int]
    """Tokens that end a sample."""

    def load(self, folder: Path, version: int) -> None: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stop_ids(self, texts: Iterable[str]) -> set[int]:
        """Return the ids of the stop strings that are special tokens."""


class SegmentDecoder(Protocol):
    """Generates the segments of one :meth:`Engine.generate` call."""

    def __len__(self) -> int:
        """Return the number of running segments."""

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        """Start generating a segment."""

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        """Return the segments, or their errors, that finished since the last call. The call waits
        briefly and may return an empty list."""

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        """Abort all running segments and yield each with the tokens that it has so far."""

    def close(self) -> None:
        """Release all resources; no segment is running."""


@dataclass(eq=False)
class ParsedRequest:
    """A token request with its parsed sampling parameters and its seed."""

    request: Record
    sampling: SamplingParams
    seed: int


@dataclass(eq=False)
class ResumableSample:
    """One sample of a request with the tokens generated so far."""

    source: ParsedRequest
    index: int
    """Row of the sample in the request."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False
    """Whether a stop token or stop string has ended the sample."""
    server_losses: int = 0
    """Number of servers that died while they generated this sample."""

    def __post_init__(self) -> None:
        steps = self.source.request.steps
        if "begun_length" in steps:
            count = int(steps["begun_length"][self.index])
            self.tokens = steps["begun_tokens"][self.index, :count].tolist()
            self.logprobs = steps["begun_logprobs"][self.index, :count].tolist()
            self.versions = steps["begun_version"][self.index, :count].tolist()

    def next_request(self, stage: str) -> SegmentRequest:
        """Return the request for the next segment."""
        request, sampling, count = self.source.request, self.source.sampling, len(self.tokens)
        steps = request.steps
        prompt = steps["prompt"][self.index, : steps["prompt_length"][self.index]]
        turn = int(steps["turn"][self.index]) if "turn" in steps else 0
        seed_key = (request.identity.iteration, stage, int(steps["sample"][self.index]), turn)
        return SegmentRequest(
            context_tokens=[*prompt.tolist(), *self.tokens],
            max_tokens=sampling.horizon - count,
            min_tokens=max(0, sampling.min_tokens - count),
            # With the same seed, a later segment would reuse the first one's random numbers.
            seed=torch_seed(self.source.seed, *seed_key, *([count] if count else [])),
            sampling=sampling,
        )

    def append_segment(
        self, segment: GeneratedSegment, version: int, engine: ResumableEngine
    ) -> bool:
        """Append a segment to the sample. Returns whether the sample is complete.

        Raises:
            DataError: The context of the external engine is too small for the request.
        """
        sampling, old_count = self.source.sampling, len(self.tokens)
        self.tokens += segment.tokens
        self.logprobs += segment.logprobs
        self.stopped = segment.finish_reason == "stop"
        if sampling.stop:
            # The external engine does not see a stop string that begins in an earlier segment or
            # contains a special token.
            stop_ids = engine.stop_ids(sampling.stop)
            for count in range(max(old_count + 1, sampling.min_tokens), len(self.tokens) + 1):
                tokens = self.tokens[:count]
                if completes_stop_string(tokens, sampling.stop, engine.decode, stop_ids):
                    self.stopped = True
                    del self.tokens[count:], self.logprobs[count:]
                    break
        self.versions += [version] * (len(self.tokens) - old_count)
        # An aborted segment may end with a stop token, too.
        last_token = self.tokens[-1] if self.tokens else None
        ended = last_token in engine.stop_token_ids and len(self.tokens) > sampling.min_tokens
        self.stopped = self.stopped or ended
        if (
            segment.finish_reason == "length"
            and not self.stopped
            and len(self.tokens) < sampling.horizon
        ):
            raise DataError(
                f"the engine had room for {len(self.tokens)} tokens of a response of up to "
                f"{sampling.horizon}: its context or its KV cache is smaller than configured; see "
                "engine.max_model_len, engine.extra_args and the memory of the KV cache"
            )
        return self.stopped or len(self.tokens) >= sampling.horizon


class ResumableGeneration:
    """The state of one :meth:`rlinf.engines.base.Engine.generate` call."""

    def __init__(
        self,
        engine: ResumableEngine,
        decoder: SegmentDecoder,
        requests: RequestReceiver,
        seed: int,
        stage: str,
        hooks: RolloutHooks,
        max_concurrent: int,
    ) -> None:
        """
        Args:
            max_concurrent: Largest number of samples that run at the same time.
        """
        self._engine, self._decoder, self._requests, self._hooks = engine, decoder, requests, hooks
        self._seed, self._stage, self._max_concurrent = seed, stage, max_concurrent
        self._waiting = deque[ResumableSample]()
        self._num_requested, self._open = 0, True
        """Number of requested samples, and whether the request channel is open."""

    def iter_replies(self) -> Iterator[Record]:
        """Yield replies until the request channel is closed."""
        decoder = self._decoder
        try:
            while True:
                self._receive()
                while self._waiting and len(decoder) < self._max_concurrent:
                    sample = self._waiting.popleft()
                    decoder.submit(sample, sample.next_request(self._stage))
                if not len(decoder):
                    return
                complete = [
                    sample
                    for sample, segment in decoder.poll_finished()
                    if self._add(sample, segment)
                ]
                yield from self._build_replies(complete)
                if len(decoder):
                    yield from self._call_hooks()
        finally:
            deque(decoder.abort_all(), maxlen=0)
            decoder.close()

    def _receive(self) -> None:
        """Receive all waiting requests; block for one if nothing is running."""
        while self._open and (len(self._requests) or not (len(self._decoder) or self._waiting)):
            try:
                request = self._requests.get()
            except ChannelClosed:
                self._open = False
                return
            check_token_request(request)
            sampling = SamplingParams.from_info(request.info)
            seed = self._seed if sampling.seed is None else sampling.seed
            source = ParsedRequest(request, sampling, seed)
            self._waiting.extend(
                ResumableSample(source, i) for i in range(len(request.steps["sample"]))
            )
            self._num_requested += len(request.steps["sample"])

    def _call_hooks(self) -> Iterator[Record]:
        """Call the hooks; yield replies of samples that they abort or that end meanwhile."""
        hooks = self._hooks
        if hooks.should_abort is not None:
            num_waiting = len(self._waiting)
            if hooks.should_abort(num_waiting + len(self._decoder), self._num_requested):
                yield from self._build_replies(self._interrupt())
                # Interrupted samples are now at the front of the queue.
                num_aborted = len(self._waiting) - num_waiting
                aborted = [self._waiting.popleft() for _ in range(num_aborted)]
                yield from self._build_replies(aborted, unfinished=True)
        newer = hooks.newer_weights() if hooks.newer_weights is not None else None
        if newer is not None:
            yield from self._build_replies(self._interrupt())
            self._engine.load(*newer)

    def _add(self, sample: ResumableSample, segment: GeneratedSegment | Exception) -> bool:
        """Append a segment. Returns whether the sample is complete; if not, it is queued again."""
        if isinstance(segment, Exception):
            raise segment
        if sample.append_segment(segment, self._engine.version, self._engine):
            return True
        self._waiting.appendleft(sample)
        return False

    def _interrupt(self) -> list[ResumableSample]:
        """Abort all running segments; return complete samples and queue the others again."""
        return [
            sample for sample, segment in self._decoder.abort_all() if self._add(sample, segment)
        ]

    def _build_replies(
        self, samples: list[ResumableSample], *, unfinished: bool = False
    ) -> Iterator[Record]:
        """Yield replies with the tokens of samples, grouped by request and first version."""
        groups: dict[tuple[ParsedRequest, int], list[ResumableSample]] = {}
        for sample in samples:
            version = sample.versions[0] if sample.versions else self._engine.version
            groups.setdefault((sample.source, version), []).append(sample)
        for (source, version), group in groups.items():
            shape = (len(group), source.sampling.horizon)
            steps = {
                "sample": source.request.steps["sample"][[sample.index for sample in group]],
                "tokens": np.zeros(shape, np.int64),
                "logprobs": np.zeros(shape, np.float32),
                "length": np.array([len(sample.tokens) for sample in group]),
                "stopped": np.array([sample.stopped for sample in group]),
            }
            if unfinished:
                steps["unfinished"] = np.ones(len(group), dtype=bool)
            if self._hooks.newer_weights is not None:
                steps["version"] = np.full(shape, self._engine.version)
            for row, sample in enumerate(group):
                count = len(sample.tokens)
                steps["tokens"][row, :count] = sample.tokens
                steps["logprobs"][row, :count] = sample.logprobs
                if "version" in steps:
                    steps["version"][row, :count] = sample.versions
            yield Record(source.request.identity, steps, info={"version": version})
