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

from rlinf.channels.base import ChannelClosed
from rlinf.data.record import Record
from rlinf.data.sampling import Sampling
from rlinf.engines.base import Hooks, Requests, check_token_request
from rlinf.engines.cache import KeyValueCache
from rlinf.engines.cohorts import Cohorts
from rlinf.engines.sampling import completes, sample
from rlinf.models.images import PIXELS, SIZES
from rlinf.seeding import uniforms

COMPACT_BELOW = 0.75
"""Rebuild the batch once this share of its rows, or less, is still unfinished; and let waiting rows
in once the rest of its places is free."""


Images = Mapping[str, np.ndarray]
"""Of a prompt: the columns of :mod:`rlinf.models.images`."""


class Network(Protocol):
    """The model that decodes, with what ends a sample of it."""

    version: int
    device: torch.device
    stops: Tensor
    """Tokens that end a sample, int64 ``[n]``."""

    def read(
        self, contexts: Sequence[np.ndarray], room: int, images: Sequence[Images | None] = ()
    ) -> tuple[Tensor, KeyValueCache | Cohorts, Tensor]: ...

    def shift(self, images: Sequence[Images | None]) -> Tensor: ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KeyValueCache | Cohorts,
    ) -> Tensor: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stop_ids(self, texts: Iterable[str]) -> set[int]: ...

    def refreshed(self, hooks: Hooks) -> bool: ...


@dataclass(eq=False)
class Asked:
    """A request, its settings and the noise ``[B, horizon]`` of its rows."""

    request: Record
    sampling: Sampling
    noise: np.ndarray

    def __post_init__(self) -> None:
        # Rows are drawn together whose settings differ in nothing but these.
        self.drawn_by = replace(self.sampling, horizon=1, stop=(), seed=None)


@dataclass(eq=False)
class Row:
    """One sample of a request."""

    asked: Asked
    index: int
    first: int = 0
    """Version of the weights that chose its first token."""

    @property
    def prompt(self) -> np.ndarray:
        """Its token ids."""
        steps = self.asked.request.steps
        return steps["prompt"][self.index, : steps["prompt_length"][self.index]]

    @property
    def images(self) -> Images | None:
        """Those of its prompt."""
        steps = self.asked.request.steps
        if SIZES not in steps:
            return None
        return {name: steps[name][self.index] for name in (PIXELS, SIZES)}

    @property
    def begun(self) -> int:
        """Tokens that another engine made."""
        lengths = self.asked.request.steps.get("begun_length")
        return 0 if lengths is None else int(lengths[self.index])


class Batch:
    """Rows that are decoded together; tensors have a row for each.

    ``made`` ``[B]`` counts the tokens of a row, ``position`` those of its prompt as well;
    ``tokens`` ``[B, T]`` and ``logprobs`` are what was made, ``versions`` by which weights;
    ``shift`` ``[B]`` is what images add to the rotary positions behind them;
    ``logits`` ``[B, V]`` say what comes next, ``attend`` which columns of the cache a row sees.
    """

    def __init__(self, rows: list[Row], network: Network) -> None:
        self.rows = rows
        self._groups: dict[Sampling, list[int]] | None = None
        width = max(row.asked.sampling.horizon for row in rows)
        shape, device = (len(rows), width), network.device
        noise = np.zeros(shape, dtype=np.float32)
        tokens = np.zeros(shape, dtype=np.int64)
        logprobs = np.zeros(shape, dtype=np.float32)
        versions = np.full(shape, network.version)
        for i, row in enumerate(rows):
            noise[i, : row.asked.sampling.horizon] = row.asked.noise[row.index]
            row.first = network.version
            if begun := row.begun:
                given, k = row.asked.request.steps, row.index
                tokens[i, :begun] = given["begun_tokens"][k, :begun]
                logprobs[i, :begun] = given["begun_logprobs"][k, :begun]
                versions[i, :begun] = given["begun_version"][k, :begun]
                row.first = int(versions[i, 0])
        self.noise = torch.from_numpy(noise).to(device)
        self.tokens = torch.from_numpy(tokens).to(device)
        self.logprobs = torch.from_numpy(logprobs).to(device)
        self.versions = torch.from_numpy(versions).to(device)
        self.made = torch.tensor([row.begun for row in rows], device=device)
        self.position = self.made + torch.tensor([len(row.prompt) for row in rows], device=device)
        self.limit = torch.tensor([row.asked.sampling.horizon for row in rows], device=device)
        self.running = torch.ones(len(rows), dtype=torch.bool, device=device)
        self.read(network)

    def read(self, network: Network) -> None:
        """Compute the cache from the tokens so far."""
        made, tokens = self.made.tolist(), self.tokens.cpu().numpy()
        contexts = [
            np.concatenate([row.prompt, line[:count]])
            for row, line, count in zip(self.rows, tokens, made, strict=True)
        ]
        images = [row.images for row in self.rows]
        self.logits, self.cache, self.attend = network.read(contexts, self.room, images)
        self.shift = network.shift(images)
        self.padded = len({len(context) for context in contexts}) > 1

    @property
    def room(self) -> int:
        """Most tokens that a row may still need."""
        return int((self.limit - self.made).max())

    @property
    def groups(self) -> dict[Sampling, list[int]]:
        """Its rows by how they are drawn."""
        if self._groups is None:
            self._groups = {}
            for i, row in enumerate(self.rows):
                self._groups.setdefault(row.asked.drawn_by, []).append(i)
        return self._groups

    def select(self, keep: Tensor) -> None:
        """Keep rows ``[n]``."""
        self.rows = [self.rows[i] for i in keep.tolist()]
        self._groups = None
        for name in (*COLUMNS, "logits", "attend"):
            setattr(self, name, getattr(self, name)[keep])
        self.cache.select(keep)

    def join(self, other: Batch) -> None:
        """Add the rows of another batch below."""
        skip = int(self.attend.any(0).int().argmax())
        own, new = self.cache.length, other.cache.length
        room = max(self.room, other.room)
        cache: Any = self.cache  # of the same kind as the other's: both are of one network
        cache.join(other.cache, skip, room)
        length = self.cache.length
        attend = self.attend.new_zeros(len(self) + len(other), length + room)
        attend[: len(self), length - own + skip : length] = self.attend[:, skip:own]
        attend[len(self) :, length - new : length] = other.attend[:, :new]
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        for name in COLUMNS:
            parts = [getattr(part, name) for part in (self, other)]
            if parts[0].dim() > 1:
                parts = [torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in parts]
            setattr(self, name, torch.cat(parts))
        self.logits = torch.cat([self.logits, other.logits])
        self.attend, self.rows, self._groups = attend, self.rows + other.rows, None
        self.padded = not bool(attend[:, :length].all())

    def replies(self, which: Tensor, stopped: Tensor, *names: str) -> Iterator[Record]:
        """What there is of some rows (bool ``[B]``), by request and first version.

        Args:
            names: ``version`` and ``unfinished``, where they are to be columns too.
        """
        parts: dict[tuple[Asked, int], list[int]] = {}
        for i in which.nonzero()[:, 0].tolist():
            parts.setdefault((self.rows[i].asked, self.rows[i].first), []).append(i)
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
            if "unfinished" in names:
                steps["unfinished"] = np.ones(len(numbers), dtype=bool)
            if "version" in names:
                steps["version"] = self.versions[rows, :horizon].cpu().numpy()
            yield Record(asked.request.identity, steps, info={"version": first})

    def __len__(self) -> int:
        return len(self.rows)


COLUMNS = (
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


class Decoding:
    """One call of :meth:`rlinf.engines.base.Engine.generate`."""

    def __init__(
        self,
        network: Network,
        requests: Requests,
        seed: int,
        stage: str,
        hooks: Hooks,
        max_rows: int,
    ) -> None:
        self._network, self._requests, self._hooks = network, requests, hooks
        self._seed, self._stage, self._most = seed, stage, max_rows
        self._waiting = deque[Row]()
        self._batch: Batch | None = None
        self._asked, self._open = 0, True
        self._further = () if hooks.newer is None else ("version",)

    @torch.inference_mode()
    def replies(self) -> Iterator[Record]:
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
            sampling = Sampling.of(request.info)
            seed = self._seed if sampling.seed is None else sampling.seed
            noise = uniforms(
                seed,
                request.identity.iteration,
                self._stage,
                samples,
                sampling.horizon,
                request.steps.get("turn"),
            )
            asked = Asked(request, sampling, noise)
            # In their order, but for those that begin together: there, rows of like lengths that
            # are as far as each other are neighbours. What waits for the first parts of a batch has
            # them first.
            begun = request.steps.get("begun_length", np.zeros_like(lengths))
            together = np.arange(len(lengths)) // self._most
            order = np.lexsort((-lengths, begun, together))
            self._waiting.extend(Row(asked, int(index)) for index in order)
            self._asked += len(order)

    def _admit(self) -> None:
        """Let waiting rows in, where a share of the places is free that is worth it."""
        batch, waiting = self._batch, len(self._waiting)
        count = min(waiting, self._most - (0 if batch is None else len(batch)))
        if not count or (
            batch is not None and count < min(waiting, (1 - COMPACT_BELOW) * self._most)
        ):
            return
        fresh = Batch([self._waiting.popleft() for _ in range(count)], self._network)
        if batch is None:
            self._batch = fresh
        else:
            batch.join(fresh)

    def _step(self, batch: Batch) -> Iterator[Record]:
        """One more token of every row; replies of those it ends."""
        network, hooks = self._network, self._hooks
        chosen = self._choose(batch)
        stopped = torch.isin(chosen, network.stops) | self._completed(batch)
        ended = (stopped | (batch.made == batch.limit)) & batch.running
        if bool(ended.any()):
            yield from batch.replies(ended, stopped, *self._further)
            batch.running &= ~ended
            left = int(batch.running.sum())
            if left == 0:
                self._batch = None
                return
            if left <= COMPACT_BELOW * len(batch):
                keep = batch.running.nonzero()[:, 0]
                batch.select(keep)
                chosen = chosen[keep]
        if hooks.gives_up is not None:
            left = len(self._waiting) + int(batch.running.sum())
            if hooks.gives_up(left, self._asked):
                none = torch.zeros_like(batch.running)
                yield from batch.replies(batch.running, none, "unfinished", *self._further)
                self._batch = None
                return
        if network.refreshed(hooks):
            batch.read(network)
            return
        cache = batch.cache
        batch.attend[:, cache.length] = True
        visible = batch.attend[:, None, None, : cache.length + 1] if batch.padded else None
        batch.logits = network.forward(
            chosen[:, None], (batch.position - 1 + batch.shift)[:, None], visible, cache
        )

    def _choose(self, batch: Batch) -> Tensor:
        """Draw the next token ``[B]`` of every row and note it; finished rows draw too."""
        # A finished row stays at its last place.
        place = torch.minimum(batch.made, batch.limit - 1)[:, None]
        noise = batch.noise.gather(1, place)[:, 0]
        if len(batch.groups) == 1:
            (settings,) = batch.groups
            chosen, taken = self._draw(settings, batch.logits, noise, batch.made)
        else:
            chosen, taken = torch.empty_like(batch.made), torch.empty_like(noise)
            for settings, numbers in batch.groups.items():
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
        self, settings: Sampling, logits: Tensor, noise: Tensor, made: Tensor
    ) -> tuple[Tensor, Tensor]:
        forbidden = None
        if settings.min_tokens:
            forbidden = torch.zeros_like(logits, dtype=torch.bool)
            forbidden[:, self._network.stops] = (made < settings.min_tokens)[:, None]
        return sample(logits, noise, settings, forbidden)

    def _completed(self, batch: Batch) -> Tensor:
        """Rows ``[B]`` whose last token completes a stop string."""
        found = torch.zeros_like(batch.running)
        numbers = [i for i, row in enumerate(batch.rows) if row.asked.sampling.stop]
        if numbers:
            tokens, made = batch.tokens[numbers].tolist(), batch.made[numbers].tolist()
            for i, line, count in zip(numbers, tokens, made, strict=True):
                sampling, network = batch.rows[i].asked.sampling, self._network
                if count >= sampling.min_tokens:
                    ids = network.stop_ids(sampling.stop)
                    found[i] = completes(line[:count], sampling.stop, network.decode, ids)
        return found
