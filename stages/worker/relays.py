"""Records that arrive at one rank of a pool and are passed on to others.

What another worker makes crosses to each node of a pool once, at another rank for each maker; these
pass it on as a tree (:mod:`pipeline.pools.routes`). Who passes on and who gets it share a fate: a
pool that loses a rank is replaced as a whole. What is lost on the way they read from disk: the end
that a worker tells says how many records there are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlinf.data.record import Record
from rlinf.threads import Queue
from stages.worker.inbox import TRANSFER_FAULTS, Outbox, Sender


class Relays:
    """Sends on, in a thread of its own: inboxes are emptied whatever others do with theirs."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._thread = Queue("relays", TRANSFER_FAULTS)
        self._relays: dict[str, dict[str, _Relay]] = {}
        """By output and channel, and by the worker that makes it."""

    def want(self, to: str, maker: str, ways: Mapping[str, str]) -> None:
        """Workers that get from here what a worker makes, what came before too; returns at once."""
        self._thread.submit(f"{to} of {maker}", self._want, to, maker, dict(ways))

    def arrived(self, to: str, maker: str, record: Record) -> None:
        """A record, or the end of them, as it came from the inbox; returns at once."""
        self._thread.submit(f"a record of {to}", self._arrived, to, maker, record)

    def forget(self, folders: Collection[str]) -> None:
        """Forget outputs that are committed: they are read from disk from now on."""
        self._thread.submit("outputs", self._forget, folders)

    def close(self) -> None:
        """Pass on nothing more; what is just being sent ends with its connection."""
        self._thread.close(wait=False)

    def _want(self, to: str, maker: str, ways: Mapping[str, str]) -> None:
        self._relay(to, maker).sender.admit(ways)

    def _arrived(self, to: str, maker: str, record: Record) -> None:
        self._relay(to, maker).put(record)

    def _forget(self, folders: Collection[str]) -> None:
        for to in [to for to in self._relays if to.rpartition(":")[0] in folders]:
            del self._relays[to]

    def _relay(self, to: str, maker: str) -> _Relay:
        relays = self._relays.setdefault(to, {})
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
