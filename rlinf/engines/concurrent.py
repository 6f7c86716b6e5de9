"""Legs that servers decode: each waits for its answer in a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from rlinf.engines.legs import Ask, Leg, Sample
from rlinf.engines.process import Gone, ServerError

LOOK_S = 0.005
"""How often newer requests, and hooks, are looked for while samples are under way."""
LOST = 3
"""Servers that may die, one after the other, with the same sample under way."""
ABORT_S = 0.05
"""How often what is under way is told to end: a request on its way in hears nothing of it."""


class Servers(Protocol):
    """What is asked of an engine with servers."""

    def leg(self, ask: Ask) -> Leg:
        """Decode; in any thread. Raises Gone where the server died, DataError where it refuses."""

    def abort(self) -> None:
        """End all legs under way; each is answered with what there is of it."""

    def revive(self) -> None:
        """Replace what died; raises ServerError where nothing is left and nothing comes up."""

    def tail(self) -> str:
        """The end of a log."""


class Concurrent:
    """See :class:`rlinf.engines.legs.Decoder`."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[tuple[Sample, Leg | Exception]] = queue.SimpleQueue()
        self._threads = self._running = 0
        self._died = False

    def __len__(self) -> int:
        return self._running

    def begin(self, sample: Sample, ask: Ask) -> None:
        if self._died:
            # Others of what died come back by themselves; what is under way elsewhere goes on.
            self._died = False
            self._servers.revive()
        self._running += 1
        if self._threads < self._running:
            self._threads += 1
            name = f"leg-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._orders.put(partial(self._decode, sample, ask))

    def ended(self) -> list[tuple[Sample, Leg | Exception]]:
        found, wait_s = list[tuple[Sample, Leg | Exception]](), LOOK_S
        while self._running:
            try:
                sample, leg = self._back.get(timeout=wait_s)
            except queue.Empty:
                break
            wait_s = 0.0
            found.append(self._came(sample, leg))
        return found

    def cut_off(self) -> Iterator[tuple[Sample, Leg | Exception]]:
        while self._running:
            try:
                sample, leg = self._back.get(timeout=ABORT_S)
            except queue.Empty:
                with contextlib.suppress(Gone):
                    self._servers.abort()
                continue
            yield self._came(sample, leg)

    def close(self) -> None:
        for _ in range(self._threads):
            self._orders.put(None)

    def _came(self, sample: Sample, leg: Leg | Exception) -> tuple[Sample, Leg | Exception]:
        """What a thread brought back; of what a dying server took with it there is nothing."""
        self._running -= 1
        if not isinstance(leg, Gone):
            return sample, leg
        self._died = True
        sample.lost += 1
        if sample.lost < LOST:
            return sample, Leg([], [], "abort")
        return sample, ServerError(
            f"{LOST} servers died with the same sample under way ({leg}); the end of the last "
            f"one's log:\n{self._servers.tail()}"
        )

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _decode(self, sample: Sample, ask: Ask) -> None:
        try:
            self._back.put((sample, self._servers.leg(ask)))
        except Exception as error:  # raised where replies are asked for
            self._back.put((sample, error))
