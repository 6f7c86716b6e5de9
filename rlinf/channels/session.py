"""What the host of a mailbox (:mod:`rlinf.channels.mailbox`) knows of its peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlinf.channels.numbered import Inbox, Outbox

LEFT, REPLACED = "left", "replaced"
"""Why a peer was lost that will not be back."""


class Joined(NamedTuple):
    """A peer is there, for the first time or again; ``incarnation`` is that of its process."""

    worker: str
    about: dict[str, Any]
    incarnation: str


class Report(NamedTuple):
    """An item of a peer."""

    worker: str
    content: Any


class Lost(NamedTuple):
    """A peer fell silent, left, or was replaced by another process of the same name."""

    worker: str
    reason: str


Event = Joined | Report | Lost


class Seen(NamedTuple):
    """What is known of a peer; ``age_s`` since it was last heard."""

    status: dict[str, Any]
    age_s: float
    about: dict[str, Any]
    alive: bool
    incarnation: str


@dataclass(eq=False)
class Session:
    """One incarnation of a peer, as the host knows it.

    ``done`` acknowledges the items that were handled.
    """

    id: bytes
    name: str
    seen_at: float
    inbox: Inbox
    about: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    alive: bool = False
    retired: bool = False
    outbox: Outbox = field(default_factory=Outbox)
    done: int = 0
