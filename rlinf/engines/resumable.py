"""Samples that another project decodes: a request each, and another one for each way to go on.

A leg is what one request adds to a sample. It is the whole sample, unless newer weights come while
it is under way, or its engine gave it up before: then the next leg begins where the last one was
cut off. So each token's version is known whatever the decoder says of it, and what it had cached
under older weights is computed anew. A leg that a dying server took with it is asked again, with
the same seed.
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
from rlinf.data.sampling_params import SamplingParams
from rlinf.engines.base import RequestReceiver, RolloutHooks, check_token_request
from rlinf.engines.token_sampling import completes_stop_string
from rlinf.errors import DataError
from rlinf.seeding import torch_seed


@dataclass(frozen=True)
class SegmentRequest:
    """One leg, as it is asked for."""

    context_tokens: list[int]
    """What stands before it."""
    max_tokens: int
    min_tokens: int
    """Tokens; of stop tokens and strings, before so many."""
    seed: int
    sampling: SamplingParams
    """The settings of its request; ``most`` and ``least`` stand for horizon and min_tokens."""


@dataclass(frozen=True)
class GeneratedSegment:
    """What was made of it."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""


class ResumableEngine(Protocol):
    """What a call of generate asks of its engine."""

    version: int
    stop_token_ids: frozenset[int]
    """Tokens that end a sample."""

    def load(self, folder: Path, version: int) -> None: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stop_ids(self, texts: Iterable[str]) -> set[int]:
        """Of stop strings that are special tokens."""


class SegmentDecoder(Protocol):
    """Decodes the legs of one call of generate."""

    def __len__(self) -> int:
        """Legs under way."""

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        """Have a leg decoded."""

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        """Legs that came to an end since, or what is wrong with them; after a while none."""

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        """End all legs under way, each with what there is of it."""

    def close(self) -> None:
        """The call is over; nothing is under way."""


@dataclass(eq=False)
class SegmentedRequest:
    """A request and its settings."""

    request: Record
    sampling: SamplingParams
    seed: int


@dataclass(eq=False)
class ResumableSample:
    """One sample of a request, as far as it is."""

    source: SegmentedRequest
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False
    server_losses: int = 0
    """Servers that died with it."""

    def __post_init__(self) -> None:
        steps = self.source.request.steps
        if "begun_length" in steps:
            count = int(steps["begun_length"][self.index])
            self.tokens = steps["begun_tokens"][self.index, :count].tolist()
            self.logprobs = steps["begun_logprobs"][self.index, :count].tolist()
            self.versions = steps["begun_version"][self.index, :count].tolist()

    def next_request(self, stage: str) -> SegmentRequest:
        """For its next leg."""
        request, sampling, made = self.source.request, self.source.sampling, len(self.tokens)
        steps = request.steps
        prompt = steps["prompt"][self.index, : steps["prompt_length"][self.index]]
        turn = int(steps["turn"][self.index]) if "turn" in steps else 0
        address = (request.identity.iteration, stage, int(steps["sample"][self.index]), turn)
        return SegmentRequest(
            context_tokens=[*prompt.tolist(), *self.tokens],
            max_tokens=sampling.horizon - made,
            min_tokens=max(0, sampling.min_tokens - made),
            # Seeded as the first one, a later leg would draw by the same numbers again.
            seed=torch_seed(self.source.seed, *address, *([made] if made else [])),
            sampling=sampling,
        )

    def append_segment(
        self, segment: GeneratedSegment, version: int, host: ResumableEngine
    ) -> bool:
        """Take a leg; returns whether the sample is complete.

        Raises:
            DataError: the decoder had no room for all that was asked for.
        """
        sampling, before = self.source.sampling, len(self.tokens)
        self.tokens += segment.tokens
        self.logprobs += segment.logprobs
        self.stopped = segment.finish_reason == "stop"
        if sampling.stop:
            # A decoder knows nothing of a text that began in an earlier leg, or of one with a
            # special token in it.
            ids = host.stop_ids(sampling.stop)
            for count in range(max(before + 1, sampling.min_tokens), len(self.tokens) + 1):
                if completes_stop_string(self.tokens[:count], sampling.stop, host.decode, ids):
                    self.stopped = True
                    del self.tokens[count:], self.logprobs[count:]
                    break
        self.versions += [version] * (len(self.tokens) - before)
        # One that was cut off may have come to its end all the same.
        last = self.tokens[-1] if self.tokens else None
        ended = last in host.stop_token_ids and len(self.tokens) > sampling.min_tokens
        self.stopped = self.stopped or ended
        if (
            segment.finish_reason == "length"
            and not self.stopped
            and len(self.tokens) < sampling.horizon
        ):
            raise DataError(
                f"the engine had room for {len(self.tokens)} tokens of a response of up to "
                f"{sampling.horizon}: its context, or its cache, is smaller than it was told; see "
                "engine.max_model_len, engine.extra_args, and the memory that the cache may have"
            )
        return self.stopped or len(self.tokens) >= sampling.horizon


class ResumableGeneration:
    """One call of :meth:`rlinf.engines.base.Engine.generate`."""

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
            most: samples under way at once.
        """
        self._host, self._decoder, self._requests, self._hooks = engine, decoder, requests, hooks
        self._seed, self._stage, self._most = seed, stage, max_concurrent
        self._waiting = deque[ResumableSample]()
        self._asked, self._open = 0, True
        self._further = () if hooks.newer_weights is None else ("version",)

    def iter_replies(self) -> Iterator[Record]:
        """Until the channel of requests closes."""
        decoder = self._decoder
        try:
            while True:
                self._take_in()
                while self._waiting and len(decoder) < self._most:
                    sample = self._waiting.popleft()
                    decoder.submit(sample, sample.next_request(self._stage))
                if not len(decoder):
                    return
                done = [
                    sample for sample, leg in decoder.poll_finished() if self._took(sample, leg)
                ]
                yield from self._replied(done)
                if len(decoder):
                    yield from self._ask_hooks()
        finally:
            deque(decoder.abort_all(), maxlen=0)
            decoder.close()

    def _take_in(self) -> None:
        """Take the requests that are there; wait for one where nothing else is to be done."""
        while self._open and (len(self._requests) or not (len(self._decoder) or self._waiting)):
            try:
                request = self._requests.get()
            except ChannelClosed:
                self._open = False
                return
            check_token_request(request)
            sampling = SamplingParams.from_info(request.info)
            seed = self._seed if sampling.seed is None else sampling.seed
            asked = SegmentedRequest(request, sampling, seed)
            self._waiting.extend(
                ResumableSample(asked, i) for i in range(len(request.steps["sample"]))
            )
            self._asked += len(request.steps["sample"])

    def _ask_hooks(self) -> Iterator[Record]:
        hooks = self._hooks
        if hooks.should_abort is not None:
            waiting = len(self._waiting)
            if hooks.should_abort(waiting + len(self._decoder), self._asked):
                yield from self._replied(self._interrupt())
                under_way = [self._waiting.popleft() for _ in range(len(self._waiting) - waiting)]
                yield from self._replied(under_way, "unfinished")
        newer = hooks.newer_weights() if hooks.newer_weights is not None else None
        if newer is not None:
            yield from self._replied(self._interrupt())
            self._host.load(*newer)

    def _took(self, sample: ResumableSample, leg: GeneratedSegment | Exception) -> bool:
        """Take what came of a leg; returns whether its sample is complete, else it waits again."""
        if isinstance(leg, Exception):
            raise leg
        if sample.append_segment(leg, self._host.version, self._host):
            return True
        self._waiting.appendleft(sample)
        return False

    def _interrupt(self) -> list[ResumableSample]:
        """Cut off all legs; returns the samples that are complete."""
        return [sample for sample, leg in self._decoder.abort_all() if self._took(sample, leg)]

    def _replied(self, samples: list[ResumableSample], *names: str) -> Iterator[Record]:
        """What there is of some samples, by request and first version."""
        parts: dict[tuple[SegmentedRequest, int], list[ResumableSample]] = {}
        for sample in samples:
            first = sample.versions[0] if sample.versions else self._host.version
            parts.setdefault((sample.source, first), []).append(sample)
        for (asked, first), group in parts.items():
            shape = (len(group), asked.sampling.horizon)
            steps = {
                "sample": asked.request.steps["sample"][[sample.index for sample in group]],
                "tokens": np.zeros(shape, np.int64),
                "logprobs": np.zeros(shape, np.float32),
                "length": np.array([len(sample.tokens) for sample in group]),
                "stopped": np.array([sample.stopped for sample in group]),
            }
            if "unfinished" in names:
                steps["unfinished"] = np.ones(len(group), dtype=bool)
            if "version" in self._further:
                steps["version"] = np.full(shape, self._host.version)
            for row, sample in enumerate(group):
                count = len(sample.tokens)
                steps["tokens"][row, :count] = sample.tokens
                steps["logprobs"][row, :count] = sample.logprobs
                if "version" in steps:
                    steps["version"][row, :count] = sample.versions
            yield Record(asked.request.identity, steps, info={"version": first})
