"""What a driver and its resident workers say to each other, and workers of weights.

Orders go to a worker, reports to the driver (:mod:`rlinf.channels.control`); what workers say to
each other travels with their records (:mod:`stages.worker.weights`). All are maps, and ``what``
says which it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rlinf.errors import DataError


class Message(BaseModel):
    """An order or a report. Folders are relative to the run's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def packed(self) -> dict[str, Any]:
        """As it travels."""
        return self.model_dump()


class StageOrder(Message):
    """A stage instance to compute."""

    node: str
    stage: str
    iteration: int
    position: tuple[int, int, int]
    """Its place in the order of turns (:mod:`stages.turns`)."""
    parts: int
    """In how many its batch is taken and made."""
    out: str
    attempt: str
    ranks: tuple[int, ...]
    """Those of the pool that compute it; the first one speaks for all."""
    layout: str = ""
    """How they share a model; see :meth:`rlinf.channels.world.ParallelLayout.parse`."""
    inputs: dict[str, tuple[str, bool]]
    """By name: the folder, and whether it comes by memory."""
    gathers: bool = False
    """Others generate; this worker gathers their trajectories."""
    queued: bool = False
    """It waits for its turn in the thread of the engine."""
    asks: tuple[str, ...] = ()
    """The workers that have its policy, where that is apart: each process asks one of them."""


class Run(Message):
    """Compute stages; all of them take their places before any begins."""

    what: Literal["run"] = "run"
    stages: tuple[StageOrder, ...]


class Send(Message):
    """Send what an output holds, made or still to be made, to other workers."""

    what: Literal["send"] = "send"
    out: str
    channel: str
    to: dict[str, str]
    """By worker: which way it gets it."""
    maker: str
    """The worker that makes it; another one passes it on."""


class Begun(Message):
    """Samples of a claim that another worker has begun."""

    claim: int
    channel: str
    """Where they come in."""
    samples: int
    attempt: str | None
    """By which their weights were made, while these were not committed."""


class Claim(Message):
    """Generate some starts of a rollout."""

    what: Literal["claim"] = "claim"
    claim: str
    name: str
    """For people."""
    iteration: int
    out: str
    weights: str
    attempt: str | None
    """By which the weights were made, while they are not committed."""
    to: str
    """The worker that gathers the trajectories."""
    starts: tuple[int, ...]
    begun: Begun | None = None


class Answer(Message):
    """Answer what the simulators of a stage observe, as long as they ask."""

    what: Literal["answer"] = "answer"
    node: str
    stage: str
    iteration: int
    position: tuple[int, int, int]
    """That of the stage."""
    out: str
    attempt: str
    """Of the stage; simulators that ask name it."""
    weights: tuple[str, bool]
    """As :attr:`StageOrder.inputs`."""
    askers: tuple[str, ...]
    """The workers with the simulators."""


class Over(Message):
    """An attempt at a stage whose policy is apart has ended, there or here: so has the rest."""

    what: Literal["over"] = "over"
    node: str
    attempt: str
    """The newest, by which the driver knows it."""
    reason: str


class HandOver(Message):
    """Have another worker go on with a claim once little of it is left."""

    what: Literal["hand_over"] = "hand_over"
    claim: str
    to: str


class Drop(Message):
    """The claims of until now are no longer wanted."""

    what: Literal["drop"] = "drop"


class Leave(Message):
    """End; what is being written may take so long."""

    what: Literal["leave"] = "leave"
    commits_s: float = 0.0


class StageEnded(Message):
    """A stage was committed (exit code 0), or failed."""

    what: Literal["stage_ended"] = "stage_ended"
    node: str
    code: int
    reason: str = ""


class Gathered(Message):
    """The starts of a rollout whose trajectories the gatherer has already."""

    what: Literal["gathered"] = "gathered"
    node: str
    starts: tuple[int, ...]


class HasWeights(Message):
    """Weights are in the worker's memory: claims need not wait for their commit."""

    what: Literal["has_weights"] = "has_weights"
    out: str
    attempt: str
    iteration: int


class Cut(Message):
    """Another worker no longer takes what is sent to it."""

    what: Literal["cut"] = "cut"
    worker: str


class ClaimEnded(Message):
    """A claim was done (exit code 0), or was not."""

    what: Literal["claim_ended"] = "claim_ended"
    claim: str
    host: str
    code: int = 0
    reason: str = ""
    spans: tuple[tuple[str, float, float], ...] = ()
    """Name, start and end; none where nothing was done."""
    rest: tuple[int, ...] = ()
    """Starts that are not finished."""
    to: str = ""
    """The worker that has their samples and goes on with them, if one has."""
    samples: int = 0
    """How many it has."""
    fell: bool = False
    """Whether it read weights from disk that were to come by memory."""


class InSegment(Message):
    """Weights lie in shared memory of this node."""

    what: Literal["in_segment"] = "in_segment"
    attempt: str
    segment: str


class Begins(Message):
    """The buckets of these weights follow; the data is their table."""

    what: Literal["begins"] = "begins"
    attempt: str


class Bucket(Message):
    """A part of the weights that were begun; the data is its bytes."""

    what: Literal["bucket"] = "bucket"
    attempt: str
    checksum: str


class Ends(Message):
    """That was the last bucket."""

    what: Literal["ends"] = "ends"
    attempt: str
    digest: str


class GroupForms(Message):
    """These workers form a process group, the first of which sends; they meet by its name."""

    what: Literal["group_forms"] = "group_forms"
    group: str
    members: str
    """Divided by commas."""
    backend: str


class GroupSends(Message):
    """Weights come by a group."""

    what: Literal["group_sends"] = "group_sends"
    group: str
    attempt: str


class GroupSent(Message):
    """They have arrived at all members."""

    what: Literal["group_sent"] = "group_sent"
    group: str
    digest: str


class GroupEnds(Message):
    """Nothing more comes by a group."""

    what: Literal["group_ends"] = "group_ends"
    group: str


class Opens(Message):
    """Simulators are about to begin, and ask for the policy's turn."""

    what: Literal["opens"] = "opens"


class Granted(Message):
    """The policy has its turn, and keeps it for a moment."""

    what: Literal["granted"] = "granted"
    number: int


class Ready(Message):
    """The simulators have their turn too."""

    what: Literal["ready"] = "ready"
    number: int


class Answers(Message):
    """Both keep their turns, until the simulators are through."""

    what: Literal["answers"] = "answers"
    weights: str
    """By which attempt these were made; empty: they are newer ones, which were committed."""
    fell: bool = False
    """Whether they were to come by memory, and were read from disk."""


class Void(Message):
    """The policy has given its turn up: ask anew."""

    what: Literal["void"] = "void"


class Closes(Message):
    """The simulators are through."""

    what: Literal["closes"] = "closes"


class Closed(Message):
    """What the policy did for them."""

    what: Literal["closed"] = "closed"
    spans: str
    """JSON: a list of name, start and end each."""
    host: str


class Failed(Message):
    """The policy's part has failed."""

    what: Literal["failed"] = "failed"
    code: int
    reason: str


OfGroup = GroupForms | GroupSends | GroupSent | GroupEnds
OfWeights = InSegment | Begins | Bucket | Ends | OfGroup
OfAsking = Opens | Granted | Ready | Answers | Void | Closes | Closed | Failed
Order = Run | Send | Answer | Over | Claim | HandOver | Drop | Leave
Said = StageEnded | Gathered | HasWeights | Cut | ClaimEnded

_ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="what")])
_OF_WEIGHTS: TypeAdapter[OfWeights] = TypeAdapter(Annotated[OfWeights, Field(discriminator="what")])
_OF_ASKING: TypeAdapter[OfAsking] = TypeAdapter(Annotated[OfAsking, Field(discriminator="what")])
_SAID: TypeAdapter[Said] = TypeAdapter(Annotated[Said, Field(discriminator="what")])


def read_order(content: Mapping[str, Any]) -> Order:
    """An order that arrived.

    Raises:
        DataError: it is none.
    """
    return _read(_ORDER, content)


def read_report(content: Mapping[str, Any]) -> Said:
    """A report that arrived.

    Raises:
        DataError: it is none.
    """
    return _read(_SAID, content)


def read_of_weights(content: Mapping[str, Any]) -> OfWeights:
    """What another worker says of weights.

    Raises:
        DataError: it is no such thing.
    """
    return _read(_OF_WEIGHTS, content)


def read_of_asking(content: Mapping[str, Any]) -> OfAsking:
    """What simulators and policy say beside what is observed and chosen.

    Raises:
        DataError: it is no such thing.
    """
    return _read(_OF_ASKING, content)


def _read(adapter: TypeAdapter[Any], content: Mapping[str, Any]) -> Any:
    try:
        return adapter.validate_python(dict(content))
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"no message of a driver or worker: {reason}") from None
