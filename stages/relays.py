"""Records that arrive at one rank of a pool and are passed on to others.

What another worker makes crosses to each node of a pool once, at another rank for each maker; these
pass it on as a tree (:mod:`pipeline.routes`). Who passes on and who gets it share a fate: a pool
that loses a rank is replaced as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from rlinf.data.record import Record
from stages.board import keep_newest
from stages.inbox import Outbox, Sender

log = logging.getLogger("rlinf")


class Relays:
    """Sends on, in a thread of its own: inboxes are emptied whatever others do with theirs."""

    KEEP = 64
    """Outputs of which it is remembered what came; older ones are on disk."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._thread = ThreadPoolExecutor(1, "relays")
        self._relays: dict[str, dict[str, _Relay]] = {}
        """By output and channel, and by who makes it."""

    def want(self, to: str, maker: str, ways: Mapping[str, str]) -> None:
        """Workers that get from here what a worker makes, what came before too; returns at once."""
        self._thread.submit(self._want, to, maker, dict(ways))

    def arrived(self, to: str, maker: str, record: Record) -> None:
        """A record, or the end of them, as it came from the inbox; returns at once."""
        self._thread.submit(self._arrived, to, maker, record)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _want(self, to: str, maker: str, ways: Mapping[str, str]) -> None:
        try:
            self._relay(to, maker).sender.admit(ways)
        except Exception:
            # They wait for the commit instead.
            log.warning("%s of %s was not passed on", to, maker, exc_info=True)

    def _arrived(self, to: str, maker: str, record: Record) -> None:
        try:
            self._relay(to, maker).put(record)
        except Exception:
            log.warning("a record of %s was not passed on", to, exc_info=True)

    def _relay(self, to: str, maker: str) -> _Relay:
        relays = self._relays.setdefault(to, {})
        keep_newest(self._relays, self.KEEP)
        if maker not in relays:
            relays[maker] = _Relay(to, self._outbox)
        return relays[maker]


class _Relay:
    """What one worker makes of one output."""

    def __init__(self, to: str, outbox: Outbox) -> None:
        self._came: dict[int, Record] = {}
        """By sample; the end is one of its own."""
        self.sender = Sender(to, outbox, 0, 1, lambda: list(self._came.values()))

    def put(self, record: Record) -> None:
        """Pass a record on, once: whoever makes it may have to send it again."""
        if record.identity.sample not in self._came:
            self._came[record.identity.sample] = record
            self.sender.put(record)
