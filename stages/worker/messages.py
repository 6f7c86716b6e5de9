"""The messages between the driver and the pool workers, and between pool workers.

Orders go to a worker and reports to the driver (:mod:`rlinf.channels.control_link`). Messages
between workers travel as the ``info`` of records (:mod:`stages.worker.weight_transfer`,
:mod:`stages.worker.policy_client`). Each message is a mapping; its key ``type`` names its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rlinf.errors import DataError


class WorkerMessage(BaseModel):
    """An order or a report. Folders are relative to the run's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_dict(self) -> dict[str, Any]:
        """As it travels."""
        return self.model_dump()


class StageOrder(WorkerMessage):
    """A stage instance to compute."""

    node: str
    stage: str
    iteration: int
    position: tuple[int, int, int]
    """Its place in the order of turns (:mod:`stages.device_schedule`)."""
    num_chunks: int
    """In how many its batch is taken and made."""
    output: str
    attempt: str
    ranks: tuple[int, ...]
    """Those of the pool that compute it; the first one speaks for all."""
    layout: str = ""
    """How they share a model; see :meth:`rlinf.channels.process_group.ParallelLayout.parse`."""
    inputs: dict[str, tuple[str, bool]]
    """By name: the folder, and whether it comes by memory."""
    receives_trajectories: bool = False
    """Others generate; this worker gathers their trajectories."""
    in_engine_thread: bool = False
    """It waits for its turn in the thread of the engine."""
    policy_workers: tuple[str, ...] = ()
    """The workers that have its policy, where that is apart: each process asks one of them."""


class RunStages(WorkerMessage):
    """Compute stages; all of them take their places before any begins."""

    type: Literal["run_stages"] = "run_stages"
    stages: tuple[StageOrder, ...]


class SendOutput(WorkerMessage):
    """Send what an output holds, made or still to be made, to other workers."""

    type: Literal["send_output"] = "send_output"
    output: str
    channel: str
    transports: dict[str, str]
    """By worker: which way it gets it."""
    producer: str
    """The worker that makes it; another one passes it on."""


class PartialSamples(WorkerMessage):
    """Samples of a claim that another worker has begun."""

    work_item: int
    channel: str
    """Where they come in."""
    num_samples: int
    weights_attempt: str | None
    """By which their weights were made, while these were not committed."""


class GenerateStarts(WorkerMessage):
    """Generate some starts of a rollout."""

    type: Literal["generate_starts"] = "generate_starts"
    work_item: str
    label: str
    """For people."""
    iteration: int
    output: str
    weights: str
    weights_attempt: str | None
    """By which the weights were made, while they are not committed."""
    receiver: str
    """The worker that gathers the trajectories."""
    starts: tuple[int, ...]
    partial: PartialSamples | None = None


class ServePolicy(WorkerMessage):
    """Answer what the simulators of a stage observe, as long as they ask."""

    type: Literal["serve_policy"] = "serve_policy"
    node: str
    stage: str
    iteration: int
    position: tuple[int, int, int]
    """That of the stage."""
    output: str
    attempt: str
    """Of the stage; simulators that ask name it."""
    weights: tuple[str, bool]
    """As :attr:`StageOrder.inputs`."""
    clients: tuple[str, ...]
    """The workers with the simulators."""


class AttemptEnded(WorkerMessage):
    """An attempt at a stage whose policy is apart has ended, there or here: so has the rest."""

    type: Literal["attempt_ended"] = "attempt_ended"
    node: str
    attempt: str
    """The newest, by which the driver knows it."""
    reason: str


class ReassignWork(WorkerMessage):
    """Have another worker go on with a claim once little of it is left."""

    type: Literal["reassign_work"] = "reassign_work"
    work_item: str
    successor: str


class CancelWork(WorkerMessage):
    """The claims of until now are no longer wanted."""

    type: Literal["cancel_work"] = "cancel_work"


class ShutDown(WorkerMessage):
    """End; what is being written may take so long."""

    type: Literal["shut_down"] = "shut_down"
    commit_timeout_s: float = 0.0


class StageEnded(WorkerMessage):
    """A stage was committed (exit code 0), or failed."""

    type: Literal["stage_ended"] = "stage_ended"
    node: str
    exit_code: int
    reason: str = ""


class CollectedPrompts(WorkerMessage):
    """The starts of a rollout whose trajectories the gatherer has already."""

    type: Literal["collected_prompts"] = "collected_prompts"
    node: str
    starts: tuple[int, ...]


class WeightsAvailable(WorkerMessage):
    """Weights are in the worker's memory: claims need not wait for their commit."""

    type: Literal["weights_available"] = "weights_available"
    output: str
    attempt: str
    iteration: int


class ConnectionLost(WorkerMessage):
    """Another worker no longer takes what is sent to it."""

    type: Literal["connection_lost"] = "connection_lost"
    worker: str


class WorkItemEnded(WorkerMessage):
    """A claim was done (exit code 0), or was not."""

    type: Literal["work_item_ended"] = "work_item_ended"
    work_item: str
    host: str
    exit_code: int = 0
    reason: str = ""
    spans: tuple[tuple[str, float, float], ...] = ()
    """Name, start and end; none where nothing was done."""
    unfinished_starts: tuple[int, ...] = ()
    """Starts that are not finished."""
    successor: str = ""
    """The worker that has their samples and goes on with them, if one has."""
    num_partial_samples: int = 0
    """How many it has."""
    used_disk_fallback: bool = False
    """Whether it read weights from disk that were to come by memory."""


class WeightsInSharedMemory(WorkerMessage):
    """Weights lie in shared memory of this node."""

    type: Literal["weights_in_shared_memory"] = "weights_in_shared_memory"
    attempt: str
    segment: str


class WeightsStart(WorkerMessage):
    """The buckets of these weights follow; the data is their table."""

    type: Literal["weights_start"] = "weights_start"
    attempt: str


class WeightsBucket(WorkerMessage):
    """A part of the weights that were begun; the data is its bytes."""

    type: Literal["weights_bucket"] = "weights_bucket"
    attempt: str
    checksum: str


class WeightsEnd(WorkerMessage):
    """That was the last bucket."""

    type: Literal["weights_end"] = "weights_end"
    attempt: str
    digest: str


class GroupFormed(WorkerMessage):
    """These workers form a process group, the first of which sends; they meet by its name."""

    type: Literal["group_formed"] = "group_formed"
    group: str
    members: str
    """Divided by commas."""
    backend: str


class GroupSendStarted(WorkerMessage):
    """Weights come by a group."""

    type: Literal["group_send_started"] = "group_send_started"
    group: str
    attempt: str


class GroupSendDone(WorkerMessage):
    """They have arrived at all members."""

    type: Literal["group_send_done"] = "group_send_done"
    group: str
    digest: str


class GroupClosed(WorkerMessage):
    """Nothing more comes by a group."""

    type: Literal["group_closed"] = "group_closed"
    group: str


class RequestSlot(WorkerMessage):
    """Simulators are about to begin, and ask for the policy's turn."""

    type: Literal["request_slot"] = "request_slot"


class SlotOffered(WorkerMessage):
    """The policy has its turn, and keeps it for a moment."""

    type: Literal["slot_offered"] = "slot_offered"
    number: int


class SlotAccepted(WorkerMessage):
    """The simulators have their turn too."""

    type: Literal["slot_accepted"] = "slot_accepted"
    number: int


class SlotConfirmed(WorkerMessage):
    """Both keep their turns, until the simulators are through."""

    type: Literal["slot_confirmed"] = "slot_confirmed"
    weights_attempt: str
    """By which attempt these were made; empty: they are newer ones, which were committed."""
    used_disk_fallback: bool = False
    """Whether they were to come by memory, and were read from disk."""


class SlotExpired(WorkerMessage):
    """The policy has given its turn up: ask anew."""

    type: Literal["slot_expired"] = "slot_expired"


class ReleaseSlot(WorkerMessage):
    """The simulators are through."""

    type: Literal["release_slot"] = "release_slot"


class SlotReleased(WorkerMessage):
    """What the policy did for them."""

    type: Literal["slot_released"] = "slot_released"
    spans: str
    """JSON: a list of name, start and end each."""
    host: str


class PolicyFailure(WorkerMessage):
    """The policy's part has failed."""

    type: Literal["policy_failure"] = "policy_failure"
    exit_code: int
    reason: str


GroupMessage = GroupFormed | GroupSendStarted | GroupSendDone | GroupClosed
WeightMessage = WeightsInSharedMemory | WeightsStart | WeightsBucket | WeightsEnd | GroupMessage
PolicyMessage = (
    RequestSlot
    | SlotOffered
    | SlotAccepted
    | SlotConfirmed
    | SlotExpired
    | ReleaseSlot
    | SlotReleased
    | PolicyFailure
)
WorkerOrder = (
    RunStages
    | SendOutput
    | ServePolicy
    | AttemptEnded
    | GenerateStarts
    | ReassignWork
    | CancelWork
    | ShutDown
)
WorkerReport = StageEnded | CollectedPrompts | WeightsAvailable | ConnectionLost | WorkItemEnded

_ORDER: TypeAdapter[WorkerOrder] = TypeAdapter(Annotated[WorkerOrder, Field(discriminator="type")])
_OF_WEIGHTS: TypeAdapter[WeightMessage] = TypeAdapter(
    Annotated[WeightMessage, Field(discriminator="type")]
)
_OF_ASKING: TypeAdapter[PolicyMessage] = TypeAdapter(
    Annotated[PolicyMessage, Field(discriminator="type")]
)
_REPORT: TypeAdapter[WorkerReport] = TypeAdapter(
    Annotated[WorkerReport, Field(discriminator="type")]
)


def read_order(content: Mapping[str, Any]) -> WorkerOrder:
    """An order that arrived.

    Raises:
        DataError: it is none.
    """
    return _read(_ORDER, content)


def read_report(content: Mapping[str, Any]) -> WorkerReport:
    """A report that arrived.

    Raises:
        DataError: it is none.
    """
    return _read(_REPORT, content)


def read_weight_message(content: Mapping[str, Any]) -> WeightMessage:
    """What another worker says of weights.

    Raises:
        DataError: it is no such thing.
    """
    return _read(_OF_WEIGHTS, content)


def read_policy_message(content: Mapping[str, Any]) -> PolicyMessage:
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
