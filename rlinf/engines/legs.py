"""Samples that a server decodes: a request each, and another one for each way to go on.

A leg is what one request adds to a sample. It is the whole sample, unless newer weights come while
it is under way, or its engine gave it up before: then the next leg begins where the last one was
cut off. So each token's version is known whatever the server says of it, and what a server had
cached under older weights is computed anew. A leg that a dying server took with it is asked again,
with the same seed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from rlinf.channels.base import ChannelClosed
from rlinf.data.record import Record
from rlinf.data.sampling import Sampling
from rlinf.engines.base import Hooks, Requests, check_token_request
from rlinf.engines.process import Gone, ServerError
from rlinf.engines.sampling import completes
from rlinf.seeding import torch_seed

LOOK_S = 0.005
"""How often newer requests, and hooks, are looked for while samples are under way."""
LOST = 3
"""Servers that may die, one after the other, with the same sample under way."""
ABORT_S = 0.05
"""How often what is under way is told to end: a request on its way in hears nothing of it."""


@dataclass(frozen=True)
class Ask:
    """One leg, as it is asked for."""

    tokens: list[int]
    """What stands before it."""
    most: int
    least: int
    """Tokens; of stop tokens and strings, before so many."""
    seed: int
    sampling: Sampling
    """The settings of its request; ``most`` and ``least`` stand for horizon and min_tokens."""


@dataclass(frozen=True)
class Leg:
    """What a server made."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    end: str
    """``stop``, ``length`` or ``abort``."""


class Server(Protocol):
    """What a call of generate asks of an engine."""

    version: int
    stops: frozenset[int]
    """Tokens that end a sample."""

    def leg(self, ask: Ask) -> Leg:
        """Decode; in any thread. Raises Gone where the server died, DataError where it refuses."""

    def abort(self) -> None:
        """End all legs under way; each is answered with what there is of it."""

    def revive(self) -> None:
        """Replace what died; raises ServerError where nothing is left and nothing comes up."""

    def tail(self) -> str:
        """The end of its log."""

    def load(self, folder: Path, version: int) -> None: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(eq=False)
class Asked:
    """A request and its settings."""

    request: Record
    sampling: Sampling
    seed: int


@dataclass(eq=False)
class Sample:
    """One sample of a request, as far as it is."""

    asked: Asked
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False
    lost: int = 0
    """Servers that died with it."""

    def __post_init__(self) -> None:
        steps = self.asked.request.steps
        if "begun_length" in steps:
            count = int(steps["begun_length"][self.index])
            self.tokens = steps["begun_tokens"][self.index, :count].tolist()
            self.logprobs = steps["begun_logprobs"][self.index, :count].tolist()
            self.versions = steps["begun_version"][self.index, :count].tolist()

    def ask(self, stage: str) -> Ask:
        """For its next leg."""
        request, sampling, made = self.asked.request, self.asked.sampling, len(self.tokens)
        steps = request.steps
        prompt = steps["prompt"][self.index, : steps["prompt_length"][self.index]]
        turn = int(steps["turn"][self.index]) if "turn" in steps else 0
        address = (request.identity.iteration, stage, int(steps["sample"][self.index]), turn)
        return Ask(
            tokens=[*prompt.tolist(), *self.tokens],
            most=sampling.horizon - made,
            least=max(0, sampling.min_tokens - made),
            # Seeded as the first one, a later leg would draw by the same numbers again.
            seed=torch_seed(self.asked.seed, *address, *([made] if made else [])),
            sampling=sampling,
        )

    def add(self, leg: Leg, version: int, server: Server) -> bool:
        """Take a leg; returns whether the sample is complete."""
        sampling, before = self.asked.sampling, len(self.tokens)
        self.tokens += leg.tokens
        self.logprobs += leg.logprobs
        self.stopped = leg.end == "stop"
        if sampling.stop:
            # A server knows nothing of a text that began in an earlier leg, or of one with a
            # special token in it.
            for count in range(max(before + 1, sampling.min_tokens), len(self.tokens) + 1):
                if completes(self.tokens[:count], sampling.stop, server.decode):
                    self.stopped = True
                    del self.tokens[count:], self.logprobs[count:]
                    break
        self.versions += [version] * (len(self.tokens) - before)
        # One that was cut off may have come to its end all the same.
        last = self.tokens[-1] if self.tokens else None
        ended = last in server.stops and len(self.tokens) > sampling.min_tokens
        self.stopped = self.stopped or ended
        return self.stopped or len(self.tokens) >= sampling.horizon or leg.end == "length"


class Legs:
    """One call of :meth:`rlinf.engines.base.Engine.generate`."""

    def __init__(
        self, server: Server, requests: Requests, seed: int, stage: str, hooks: Hooks, most: int
    ) -> None:
        """
        Args:
            most: samples under way at once.
        """
        self._server, self._requests, self._hooks = server, requests, hooks
        self._seed, self._stage, self._most = seed, stage, most
        self._waiting = deque[Sample]()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[tuple[Sample, Leg | Exception]] = queue.SimpleQueue()
        self._threads = 0
        self._running = 0
        self._asked, self._open = 0, True
        self._further = () if hooks.newer is None else ("version",)

    def replies(self) -> Iterator[Record]:
        """Until the channel of requests closes."""
        try:
            while True:
                self._take_in()
                self._start()
                if not self._running:
                    return
                yield from self._collect(LOOK_S)
                if self._running:
                    yield from self._ask_hooks()
        finally:
            deque(self._cut_off(), maxlen=0)
            for _ in range(self._threads):
                self._orders.put(None)

    def _take_in(self) -> None:
        """Take the requests that are there; wait for one where nothing else is to be done."""
        while self._open and (len(self._requests) or not (self._running or self._waiting)):
            try:
                request = self._requests.get()
            except ChannelClosed:
                self._open = False
                return
            check_token_request(request)
            sampling = Sampling.of(request.info)
            seed = self._seed if sampling.seed is None else sampling.seed
            asked = Asked(request, sampling, seed)
            self._waiting.extend(Sample(asked, i) for i in range(len(request.steps["sample"])))
            self._asked += len(request.steps["sample"])

    def _start(self) -> None:
        """Ask for the next legs of waiting samples, as far as there is room."""
        while self._waiting and self._running < self._most:
            sample = self._waiting.popleft()
            ask = sample.ask(self._stage)
            self._running += 1
            if self._threads < self._running:
                self._threads += 1
                name = f"leg-{self._threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
            self._orders.put(partial(self._decode, sample, ask))

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _decode(self, sample: Sample, ask: Ask) -> None:
        try:
            self._back.put((sample, self._server.leg(ask)))
        except Exception as error:  # raised where replies are asked for
            self._back.put((sample, error))

    def _collect(self, wait_s: float | None) -> Iterator[Record]:
        """Replies of the samples whose last leg came, waiting so long for the first."""
        done, lost = list[Sample](), False
        while self._running:
            try:
                sample, leg = self._back.get(timeout=wait_s)
            except queue.Empty:
                break
            wait_s = 0.0
            self._running -= 1
            lost = lost or isinstance(leg, Gone)
            if self._took(sample, leg):
                done.append(sample)
        yield from self._replied(done)
        if lost:
            # Others of what died come back by themselves; what is under way elsewhere goes on.
            self._server.revive()

    def _ask_hooks(self) -> Iterator[Record]:
        hooks = self._hooks
        if hooks.gives_up is not None:
            waiting = len(self._waiting)
            if hooks.gives_up(waiting + self._running, self._asked):
                yield from self._replied(self._interrupt())
                under_way = [self._waiting.popleft() for _ in range(len(self._waiting) - waiting)]
                yield from self._replied(under_way, "unfinished")
        newer = hooks.newer() if hooks.newer is not None else None
        if newer is not None:
            yield from self._replied(self._interrupt())
            self._server.load(*newer)

    def _took(self, sample: Sample, leg: Leg | Exception) -> bool:
        """Take what came of a leg; returns whether its sample is complete, else it waits again."""
        if isinstance(leg, Gone):
            sample.lost += 1
            if sample.lost == LOST:
                raise ServerError(
                    f"{LOST} servers died with the same sample under way ({leg}); the end of the "
                    f"last one's log:\n{self._server.tail()}"
                )
        elif isinstance(leg, Exception):
            raise leg
        elif sample.add(leg, self._server.version, self._server):
            return True
        self._waiting.appendleft(sample)
        return False

    def _interrupt(self) -> list[Sample]:
        """Cut off all legs; returns the samples that are complete."""
        return [sample for sample, leg in self._cut_off() if self._took(sample, leg)]

    def _cut_off(self) -> Iterator[tuple[Sample, Leg | Exception]]:
        while self._running:
            try:
                back = self._back.get(timeout=ABORT_S)
            except queue.Empty:
                with contextlib.suppress(Gone):
                    self._server.abort()
                continue
            self._running -= 1
            yield back

    def _replied(self, samples: list[Sample], *names: str) -> Iterator[Record]:
        """What there is of some samples, by request and first version."""
        parts: dict[tuple[Asked, int], list[Sample]] = {}
        for sample in samples:
            first = sample.versions[0] if sample.versions else self._server.version
            parts.setdefault((sample.asked, first), []).append(sample)
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
                steps["version"] = np.full(shape, self._server.version)
            for row, sample in enumerate(group):
                count = len(sample.tokens)
                steps["tokens"][row, :count] = sample.tokens
                steps["logprobs"][row, :count] = sample.logprobs
                if "version" in steps:
                    steps["version"][row, :count] = sample.versions
            yield Record(asked.request.identity, steps, info={"version": first})
