"""Weights on their way from the worker that made them to the boards of others.

A version is announced to the inboxes of the workers that want it. On the sender's node it then lies
in shared memory, elsewhere its buckets follow as records. Where the plan says so it comes by a
process group (:mod:`stages.worker.groups`).

A worker that gets buckets passes each on at once to the workers it was told of, so that many are
reached as a tree. One that finds a part damaged, or gets none, takes the committed folder instead:
only what arrived whole is served.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinf.data.record import Record
from rlinf.errors import RlinfError, TransferError
from rlinf.segments import SEGMENT, segment_name
from rlinf.threads import Queue
from rlinf.weights.buckets import Layout, checksum, digest
from rlinf.weights.shared import SharedReader, SharedWriter
from stages.board import Board, keep_newest
from stages.parts import WEIGHTS
from stages.worker.groups import BACKENDS, DATA, Groups, say
from stages.worker.inbox import SHARED_MEMORY, SOCKET, TRANSFER_FAULTS, Outbox
from stages.worker.messages import (
    Begins,
    Bucket,
    Ends,
    GroupSends,
    InSegment,
    read_of_weights,
)

KEEP = 2
"""Versions kept in memory; an older one is on disk."""
TOLD = 64
"""Versions that were announced; some of them never come whole."""
log = logging.getLogger("rlinf")


class _Version(NamedTuple):
    out: str
    attempt: str
    number: int
    tensors: Mapping[str, Tensor]


@dataclass
class _Memory:
    """Shared memory and what was last written to it."""

    name: str
    layout: Layout
    writer: SharedWriter
    number: int = -1
    holds: tuple[str, str] = ("", "")


class Publisher:
    """Sends the weights made here, in a thread of its own, to the workers that want them.

    Args:
        dtype: what float32 tensors are sent as; None: as they are.
    """

    def __init__(self, outbox: Outbox, dtype: torch.dtype | None = None) -> None:
        self._outbox, self._dtype = outbox, dtype
        self.groups = Groups(outbox, dtype)
        self._lock = threading.Lock()
        self._thread = Queue("weights", TRANSFER_FAULTS)
        self._wanted: dict[str, dict[str, str]] = {}
        self._made: dict[str, _Version] = {}
        self._memory: _Memory | None = None

    def want(self, out: str, ways: Mapping[str, str]) -> None:
        """Workers that want the weights of an output, made or still to be made, and how."""
        with self._lock:
            self._wanted[out] = self._wanted.get(out, {}) | dict(ways)
            if out in self._made:
                self._thread.submit(f"weights of {out}", self._send, out, dict(ways))

    def publish(self, out: str, attempt: str, number: int, objects: Mapping[str, Any]) -> None:
        """Send the weights among what an output holds; they do not change. Returns at once."""
        if WEIGHTS not in objects:
            return
        with self._lock:
            self._made[out] = _Version(out, attempt, number, objects[WEIGHTS])
            while len(self._made) > KEEP:
                gone = next(iter(self._made))
                del self._made[gone]
                self._wanted.pop(gone, None)
            if wanted := self._wanted.get(out):
                self._thread.submit(f"weights of {out}", self._send, out, dict(wanted))

    def forget(self, outs: Collection[str]) -> None:
        """Forget subscribers of outputs that are committed: those without them read the disk."""
        with self._lock:
            for out in outs:
                self._wanted.pop(out, None)

    def apart(self, out: str) -> list[str]:
        """The subscribers of an output by socket, which this one no longer serves.

        They get it bucket by bucket from where it is passed on; :meth:`publish` serves the others,
        and those that come later.
        """
        with self._lock:
            wanted = self._wanted.get(out, {})
            far = [worker for worker, way in wanted.items() if way == SOCKET]
            for worker in far:
                del wanted[worker]
        return far

    def forward(self, out: str, workers: Sequence[str], record: Record) -> None:
        """Send on a record about an output's weights. Returns at once."""
        if workers:
            self._thread.submit(f"weights of {out}", self._forward, out, workers, record)

    def close(self) -> None:
        self._thread.close()
        self.groups.close()
        if self._memory is not None:
            self._memory.writer.close()

    def _forward(self, out: str, workers: Sequence[str], record: Record) -> None:
        self._outbox.writer(f"{out}:{WEIGHTS}", workers, 0, 1).put(record)

    def _send(self, out: str, ways: Mapping[str, str]) -> None:
        # What waits to be sent is kept no longer than versions are: one that is late is on disk.
        if (made := self._made.get(out)) is None:
            return
        by = {way: [w for w in ways if ways[w] == way] for way in set(ways.values())}
        far = by.get(SOCKET, [])
        if (near := by.get(SHARED_MEMORY)) and not self._share(made, near):
            far += near
        for backend in BACKENDS:
            if (members := by.get(backend)) and not self.groups.send(*made, members, backend):
                far += members
        if far:
            self._stream(made, far)

    def _share(self, made: _Version, workers: list[str]) -> bool:
        layout, held = Layout.of(made.tensors, dtype=self._dtype), self._memory
        try:
            if held is None or held.holds != (made.out, made.attempt):
                if held is None or held.layout != layout or held.number >= made.number:
                    held = self._renew(layout)
                held.writer.publish(made.number, made.tensors)
                held.holds, held.number = (made.out, made.attempt), made.number
        except TransferError as error:
            log.warning("%s", error)
            return False
        message = InSegment(attempt=made.attempt, segment=held.name)
        say(self._outbox, made.out, workers, made.number, message)
        return True

    def _renew(self, layout: Layout) -> _Memory:
        if self._memory is not None:
            self._memory.writer.close()
            self._memory = None
        name = segment_name()
        self._memory = _Memory(name, layout, SharedWriter(name, layout))
        return self._memory

    def _stream(self, made: _Version, workers: list[str]) -> None:
        layout = Layout.of(made.tensors, dtype=self._dtype)
        text = layout.to_json().encode()
        to = (self._outbox, made.out, workers, made.number)
        say(*to, Begins(attempt=made.attempt), np.frombuffer(text, np.uint8))
        sums: list[int] = []
        for bucket in range(layout.buckets):
            span = layout.span(bucket)
            part = torch.zeros(span.stop - span.start, dtype=torch.uint8)
            layout.pack(bucket, made.tensors, part)
            sums.append(int(checksum(part)))
            message = Bucket(attempt=made.attempt, checksum=f"{sums[-1]:x}")
            say(*to, message, part.numpy(), bucket)
        say(*to, Ends(attempt=made.attempt, digest=digest(made.number, text, sums)))


@dataclass
class _Coming:
    attempt: str
    number: int
    text: bytes
    layout: Layout
    flat: Tensor
    sums: dict[int, int] = field(default_factory=dict)

    def place(self, bucket: int) -> Tensor:
        """Where it belongs; empty: there is no such bucket."""
        there = 0 <= bucket < self.layout.buckets
        return self.flat[self.layout.span(bucket)] if there else self.flat[:0]


def _data(record: Record) -> np.ndarray:
    """The bytes that a record about weights brings, uint8.

    Raises:
        TransferError: it brings none.
    """
    data = record.context.get(DATA)
    if data is None or data.dtype != np.uint8:
        raise TransferError("a message that is to bring weights brings none")
    return data


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """Torch says by a ``RuntimeError`` that there is no memory for a tensor."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"no room for weights ({error})") from None


class Arrivals:
    """Puts the weights that arrive whole on the board; called by the inbox alone.

    Args:
        publisher: sends on what arrives, to those whom it was told of.
        behind: versions that come before the one in use is done with.
        tell: told of what is on the board: output, attempt, version.
    """

    def __init__(
        self,
        board: Board,
        publisher: Publisher,
        behind: int = 0,
        tell: Callable[[str, str, int], None] = lambda *_: None,
    ) -> None:
        self._board, self._publisher, self._keep = board, publisher, KEEP + behind
        self._tell = tell
        self._others: dict[str, list[str]] = {}
        """By output: the workers that get each bucket as it comes."""
        self._coming: dict[str, _Coming] = {}
        self._here: dict[int, tuple[str, str]] = {}
        """By version: its output and attempt."""
        self._reader: tuple[str, SharedReader] | None = None
        self._announced: dict[int, tuple[str, str]] = {}
        """By version: the output and attempt that were announced last."""
        self._lock = threading.RLock()
        """Groups bring weights in threads of their own."""

    def take(self, out: str, record: Record) -> None:
        """A record about an output's weights; damage and want of room are logged and forget it."""
        try:
            with self._lock:
                self._take(out, record)
        except (RlinfError, OSError) as error:
            self._coming.pop(out, None)
            log.warning("weights of %s: %s; waiting for its commit", out, error)

    def _take(self, out: str, record: Record) -> None:
        message, number = read_of_weights(record.info), record.identity.iteration
        if self._reader is not None and self._reader[1].ended:
            # Whatever way the next weights come: two states take much of a node.
            self._reader = None
        if isinstance(message, InSegment | Begins | GroupSends):
            self._announced[number] = (out, message.attempt)
            keep_newest(self._announced, TOLD)
        match message:
            case InSegment():
                tensors = self._from_memory(message.segment, number)
                self._ready(out, number, message.attempt, tensors)
            case Begins():
                self._begin(out, number, message.attempt, record)
            case Bucket() | Ends():
                coming = self._coming.get(out)
                # It may be of an attempt that was given up.
                if coming and (coming.attempt, coming.number) == (message.attempt, number):
                    self._go_on(out, coming, message, record)
            case _:
                self._publisher.groups.take(out, number, message, self._ready)

    def _begin(self, out: str, number: int, attempt: str, record: Record) -> None:
        text = _data(record).tobytes()
        layout = Layout.from_json(text)
        with _room():
            flat = torch.empty(layout.nbytes, dtype=torch.uint8)
        self._coming[out] = _Coming(attempt, number, text, layout, flat)
        self._others[out] = [*self._others.get(out, ()), *self._publisher.apart(out)]
        keep_newest(self._others, TOLD)
        self._publisher.forward(out, self._others[out], record)

    def _go_on(self, out: str, coming: _Coming, message: Bucket | Ends, record: Record) -> None:
        number, others = coming.number, self._others.get(out, ())
        if isinstance(message, Bucket):
            bucket = record.identity.sample
            part, here = torch.from_numpy(_data(record).copy()), coming.place(bucket)
            coming.sums[bucket] = int(checksum(part))
            if f"{coming.sums[bucket]:x}" != message.checksum or part.shape != here.shape:
                raise TransferError(f"bucket {bucket} of version {number} arrived damaged")
            here.copy_(part)
            # What waits to be sent on takes no memory of its own.
            record = replace(record, context={DATA: here.numpy()})
            self._publisher.forward(out, others, record)
            return
        sums = [sum for _, sum in sorted(coming.sums.items())]
        if digest(number, coming.text, sums) != message.digest:
            raise TransferError(f"version {number} is not what was sent")
        del self._coming[out]
        self._publisher.forward(out, others, record)
        self._ready(out, number, coming.attempt, coming.layout.views(coming.flat))

    def _from_memory(self, name: str, number: int) -> dict[str, Tensor]:
        if not SEGMENT.fullmatch(name):
            raise TransferError(f"no name of shared memory: {name!r}")
        if self._reader is None or self._reader[0] != name:
            self._reader = None  # first: there may be no room for both
            self._reader = (name, SharedReader(name))
        view = self._reader[1].newest(after=number - 1)
        if view is None:
            raise TransferError(f"version {number} is no longer in shared memory")
        with view:
            if view.version != number:
                raise TransferError(f"version {number} was replaced by {view.version}")
            # Copied: the engine may be busy for longer than the sender can spare the memory.
            with _room():
                copies = {id(tensor): tensor.clone() for tensor in view.tensors.values()}
            return {name: copies[id(tensor)] for name, tensor in view.tensors.items()}

    def _ready(self, out: str, number: int, attempt: str, tensors: dict[str, Tensor]) -> None:
        with self._lock:
            self._arrived(out, number, attempt, tensors)

    def _arrived(self, out: str, number: int, attempt: str, tensors: dict[str, Tensor]) -> None:
        for old in [old for old, coming in self._coming.items() if coming.number <= number]:
            del self._coming[old]  # the rest of it does not come any more
        late = len(self._here) >= self._keep and number < min(self._here)
        # What was announced before it can take longer on its way.
        other = self._announced.get(number) != (out, attempt)
        if late or other or self._here.get(number) == (out, attempt):
            return
        self._here[number] = (out, attempt)
        while len(self._here) > self._keep:
            gone, _ = self._here.pop(min(self._here))
            if gone in self._board:
                self._board.output(gone).objects.pop(WEIGHTS, None)
        output = self._board.output(out)
        output.bring(attempt, WEIGHTS, tensors)
        log.info("weights of %s arrived", out)
        self._tell(out, attempt, number)
        self._publisher.publish(out, attempt, number, output.objects)
