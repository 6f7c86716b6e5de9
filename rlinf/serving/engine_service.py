"""One engine for the requests of many clients.

The engine runs in a thread of its own. Requests join the running batch, as in a rollout. Texts are
scored between two :meth:`rlinf.engines.base.Engine.generate` calls, because an engine does one of
both at a time. Requests are served in the order in which they arrive.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinf.channels.channel import ChannelClosed, RecordSource
from rlinf.data.record import Record, RecordId
from rlinf.engines.base import Engine, RolloutHooks, TokenScores
from rlinf.engines.token_sampling import SamplingParams
from rlinf.errors import DataError, RlinfError

STAGE = "serve"
"""Stage name in the random numbers of completions."""
STOP_TIMEOUT_S = 30.0
"""Longest time that the thread of the engine needs to end, seconds."""


class ServiceStopped(RlinfError):
    """The service ended before the request was answered."""


@dataclass(frozen=True)
class Completion:
    """The tokens that the engine generated for one sample of a request."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities of the tokens; see :class:`rlinf.engines.token_sampling.SamplingParams`."""
    stopped: bool
    """Whether a stop token or stop string ended the sample, not the maximum length."""


@dataclass(eq=False)
class _CompletionRequest:
    """A request for completions, and those that are finished, by sample."""

    record: Record
    on_token: Callable[[int, int], None] | None
    future: Future[list[Completion]] = field(default_factory=Future)
    finished: dict[int, Completion] = field(default_factory=dict)


@dataclass(eq=False)
class _ScoreRequest:
    """A request for the scores of one text."""

    number: int
    tokens: np.ndarray
    temperature: float
    num_top: int
    future: Future[TokenScores] = field(default_factory=Future)


class EngineService(RecordSource):
    """An engine with loaded weights that any thread can ask."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        """Guards the attributes below, and signals their changes."""
        self._completions = deque[_CompletionRequest]()
        self._scores = deque[_ScoreRequest]()
        self._running: dict[int, _CompletionRequest] = {}
        """Requests that the engine has received, by their number."""
        self._is_closed = False
        self.error: BaseException | None = None
        """The error that ended the service; None: it runs, or was closed."""
        self.ended = threading.Event()
        """Set when the thread of the engine has ended."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def complete(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        count: int,
        on_token: Callable[[int, int], None] | None = None,
    ) -> Future[list[Completion]]:
        """Request completions of a prompt.

        Equal prompts, sampling parameters and seeds give equal completions, whatever else runs.

        Args:
            prompt: token ids, at least one.
            sampling: sampling parameters; without a seed, every request has another one.
            count: number of completions.
            on_token: called in the thread of the engine with the number of a completion (from 0)
                and each of its tokens, if the engine reports tokens while it decodes
                (:class:`rlinf.engines.base.RolloutHooks`).
        """
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        steps = {
            "sample": np.arange(count),
            "prompt": np.tile(np.asarray(prompt, np.int64), (count, 1)),
            "prompt_length": np.full(count, len(prompt)),
        }
        with self._changed:
            # Random numbers depend on the seed and on the sample, not on the number of the request.
            identity = RecordId(0, next(self._numbers))
            record = Record(identity, steps, info=sampling.to_info())
            request = _CompletionRequest(record, on_token)
            if self._accept(request.future):
                self._completions.append(request)
        return request.future

    def score(self, tokens: Sequence[int], temperature: float, num_top: int) -> Future[TokenScores]:
        """Request the log-probabilities of a text; see :meth:`Engine.score_tokens`.

        Args:
            tokens: token ids, at least one.
        """
        with self._changed:
            array = np.asarray(tokens, np.int64)
            request = _ScoreRequest(next(self._numbers), array, temperature, num_top)
            if self._accept(request.future):
                self._scores.append(request)
        return request.future

    def close(self) -> None:
        """End the running requests with :class:`ServiceStopped`, and the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(STOP_TIMEOUT_S)

    # The request channel of the engine (rlinf.engines.base.RequestReceiver).

    def get(self) -> Record:
        """Return the next request of the engine; raise ChannelClosed if it must end its call."""
        with self._changed:
            while not (self._completions or self._must_pause()):
                self._changed.wait()
            if self._must_pause():
                raise ChannelClosed("the engine does something else next")
            request = self._completions.popleft()
            self._running[request.record.identity.sample] = request
            return request.record

    def __len__(self) -> int:
        with self._changed:
            return 1 if self._must_pause() else len(self._completions)

    def _must_pause(self) -> bool:
        """Return whether the engine must end its call, because a text to score is next in turn."""
        if self._is_closed:
            return True
        if not self._scores:
            return False
        waiting = self._completions
        return not waiting or waiting[0].record.identity.sample > self._scores[0].number

    def _accept(self, future: Future[Any]) -> bool:
        """Return whether the service runs; if not, the future fails."""
        future.set_running_or_notify_cancel()  # a client that leaves cannot cancel it
        if self._is_closed:
            future.set_exception(self.error or ServiceStopped("the server is stopping"))
            return False
        self._changed.notify_all()
        return True

    def _run(self) -> None:
        """Serve requests until the service is closed or the engine fails."""
        hooks = RolloutHooks(
            should_abort=lambda remaining, requested: self._is_closed, on_token=self._report_token
        )
        try:
            while self._wait():
                self._score_next()
                try:
                    for reply in self._engine.generate(self, seed=0, stage=STAGE, hooks=hooks):
                        self._deliver(reply)
                except DataError as error:
                    # The engine rejected a request. Others, which wait, can still be served.
                    self._fail_running(error)
                    if self._engine.version < 0:
                        raise
        except BaseException as error:
            self.error = error
        finally:
            with self._changed:
                self._is_closed = True
                stopped = self.error or ServiceStopped("the server is stopping")
                waiting: list[Future[Any]] = [request.future for request in self._completions]
                waiting += [request.future for request in self._scores]
                self._completions.clear()
                self._scores.clear()
            self._fail_running(stopped)
            for future in waiting:
                future.set_exception(stopped)
            self.ended.set()

    def _wait(self) -> bool:
        """Wait for requests. Returns False if the service was closed."""
        with self._changed:
            while not (self._completions or self._scores or self._is_closed):
                self._changed.wait()
            return not self._is_closed

    def _score_next(self) -> None:
        """Score the texts that are next in turn; texts with equal settings are scored together."""
        with self._changed:
            if not self._must_pause() or self._is_closed:
                return
            first = self._scores[0]
            settings = (first.temperature, first.num_top)
            batch = [s for s in self._scores if (s.temperature, s.num_top) == settings]
            self._scores = deque(s for s in self._scores if s not in batch)
        try:
            scores = self._engine.score_tokens([s.tokens for s in batch], *settings)
        except DataError as error:
            for request in batch:
                request.future.set_exception(error)
            return
        except BaseException as error:
            for request in batch:
                request.future.set_exception(error)
            raise
        for request, result in zip(batch, scores, strict=True):
            request.future.set_result(result)

    def _report_token(self, identity: RecordId, sample: int, token: int) -> None:
        if (on_token := self._running[identity.sample].on_token) is not None:
            on_token(sample, token)

    def _deliver(self, reply: Record) -> None:
        """Store the completions of a reply, and answer its request if that has all of them."""
        request, steps = self._running[reply.identity.sample], reply.steps
        if "unfinished" in steps and steps["unfinished"].any():
            return  # the service was closed; _run ends the request
        for row, sample in enumerate(steps["sample"].tolist()):
            length = int(steps["length"][row])
            request.finished[sample] = Completion(
                steps["tokens"][row, :length].tolist(),
                steps["logprobs"][row, :length].tolist(),
                bool(steps["stopped"][row]),
            )
        if len(request.finished) == len(request.record.steps["sample"]):
            del self._running[reply.identity.sample]
            request.future.set_result([request.finished[k] for k in sorted(request.finished)])

    def _fail_running(self, error: BaseException) -> None:
        running, self._running = self._running, {}
        for request in running.values():
            request.future.set_exception(error)
