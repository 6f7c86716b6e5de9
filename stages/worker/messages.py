"""The messages between the driver and the pool workers.

The driver sends orders and workers send reports over the control link
(:mod:`rlinf.channels.control_link`). Each message is a mapping; its key ``type`` names its class.
Fields with the same meaning in all messages:

- ``node``: a stage of one iteration, such as ``rollout/3``;
- ``output``: an output folder, relative to the run folder;
- ``attempt``: name of the attempt that computes the output;
- ``work_item``: random name of a work item, which is some of the starts of a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rlinf.errors import DataError


class WorkerMessage(BaseModel):
    """The base class of all messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_dict(self) -> dict[str, Any]:
        """Return the message as the mapping that is sent."""
        return self.model_dump()


class StageOrder(WorkerMessage):
    """The stage of one iteration that a worker must compute."""

    node: str
    stage: str
    iteration: int
    position: tuple[int, int, int]
    """Its position in the device schedule (:mod:`stages.device_schedule`)."""
    num_chunks: int
    """The number of chunks in which its batch is read and written."""
    output: str
    attempt: str
    ranks: tuple[int, ...]
    """The ranks of the pool that compute the stage; the first is the primary rank."""
    layout: str = ""
    """How the ranks shard a model; see
    :meth:`rlinf.channels.process_group.ParallelLayout.parse`."""
    inputs: dict[str, tuple[str, bool]]
    """Output folder of each input and whether it is expected in memory, by name of the input."""
    receives_trajectories: bool = False
    """Whether this worker receives the trajectories, which rollout workers generate."""
    in_engine_thread: bool = False
    """Whether the stage runs in the thread of the rollout worker's engine."""
    policy_workers: tuple[str, ...] = ()
    """Workers with the policy, of which each rank uses one; empty: each rank has the policy."""


class RunStages(WorkerMessage):
    """Compute stages. All of them enter the device schedule before any of them begins."""

    type: Literal["run_stages"] = "run_stages"
    stages: tuple[StageOrder, ...]


class FetchOutput(WorkerMessage):
    """Fetch the records of an output from the workers that produce them."""

    type: Literal["fetch_output"] = "fetch_output"
    output: str
    channel: str
    producers: tuple[str, ...]
    transport: str
    """``socket``, or ``shared_memory`` for workers on the same machine."""
    work_item: str = ""
    """The work item of which the records are trajectories; empty: the records of a whole rank."""
    source_attempt: str | None = None
    """The attempt that produced the weights of the work item; None: they are committed."""


class FetchWeights(WorkerMessage):
    """Fetch the weights of an output from the worker that publishes them."""

    type: Literal["fetch_weights"] = "fetch_weights"
    output: str
    producer: str
    transport: str
    """``shared_memory``, or the backend of a process group: ``gloo`` or ``nccl``."""
    members: tuple[str, ...] = ()
    """The members of the group, the producer first."""


class PartialSamples(WorkerMessage):
    """Unfinished samples of a work item, in the worker that began the item."""

    worker: str
    item_number: int
    """The number of the work item in its rollout."""
    channel: str
    """The channel of the samples in that worker."""
    num_samples: int
    weights_attempt: str | None
    """The attempt that produced the weights of the samples; None: it was committed."""


class GenerateStarts(WorkerMessage):
    """Generate the trajectories of some starts of a rollout."""

    type: Literal["generate_starts"] = "generate_starts"
    work_item: str
    label: str
    """A readable name of the work item for logs and status."""
    iteration: int
    output: str
    weights: str
    """The output folder with the weights."""
    weights_attempt: str | None
    """The attempt that produced the weights; None: they are committed."""
    receiver: str
    """The worker that fetches the trajectories."""
    starts: tuple[int, ...]
    partial: PartialSamples | None = None
    """Unfinished samples to continue; None: all samples of the starts begin anew."""


class ServePolicy(WorkerMessage):
    """Serve the policy to the simulators of a stage until they have finished."""

    type: Literal["serve_policy"] = "serve_policy"
    stage: StageOrder
    """The order of the simulators; they name its attempt when they connect."""
    has_live_weights: bool
    """Whether the weights are expected in memory."""
    clients: tuple[str, ...]
    """The workers with the simulators."""


class AttemptEnded(WorkerMessage):
    """The attempt has ended in the worker with the simulators or in that with the policy; the other
    worker must stop too."""

    type: Literal["attempt_ended"] = "attempt_ended"
    node: str
    attempt: str
    """The attempt that has ended; the driver has ordered no newer one for this node."""
    reason: str


class ReassignWork(WorkerMessage):
    """End a work item once few of its samples are unfinished; another worker continues these."""

    type: Literal["reassign_work"] = "reassign_work"
    work_item: str


class CancelWork(WorkerMessage):
    """Cancel all work items that were ordered so far."""

    type: Literal["cancel_work"] = "cancel_work"


class ShutDown(WorkerMessage):
    """Shut down; running commits may take ``commit_timeout_s``."""

    type: Literal["shut_down"] = "shut_down"
    commit_timeout_s: float = 0.0


class CollectedStarts(WorkerMessage):
    """The starts of a rollout whose trajectories have all been received."""

    type: Literal["collected_starts"] = "collected_starts"
    node: str
    starts: tuple[int, ...]


class WeightsAvailable(WorkerMessage):
    """Weights are in the worker's memory; work items need not wait for their commit."""

    type: Literal["weights_available"] = "weights_available"
    output: str
    attempt: str
    iteration: int
    """The iteration of the stage that published the weights."""


class WorkItemEnded(WorkerMessage):
    """A stage was committed, or a work item completed (exit code 0); or it has failed."""

    type: Literal["work_item_ended"] = "work_item_ended"
    work_item: str
    """A whole stage is a work item with the name of its node."""
    exit_code: int = 0
    reason: str = ""
    host: str = ""
    spans: tuple[tuple[str, float, float], ...] = ()
    """Name, start and end (Unix time, s) of each span; empty if nothing was computed."""
    unfinished_starts: tuple[int, ...] = ()
    """The starts whose samples are not all finished."""
    num_partial_samples: int = 0
    """The number of unfinished samples that another worker can fetch and continue."""
    used_disk_fallback: bool = False
    """Whether weights expected in memory were read from disk."""


WorkerOrder = (
    RunStages
    | FetchOutput
    | FetchWeights
    | ServePolicy
    | AttemptEnded
    | GenerateStarts
    | ReassignWork
    | CancelWork
    | ShutDown
)
WorkerReport = CollectedStarts | WeightsAvailable | WorkItemEnded

_ORDER: TypeAdapter[WorkerOrder] = TypeAdapter(Annotated[WorkerOrder, Field(discriminator="type")])
_REPORT: TypeAdapter[WorkerReport] = TypeAdapter(
    Annotated[WorkerReport, Field(discriminator="type")]
)


def read_order(content: Mapping[str, Any]) -> WorkerOrder:
    """Validate an order from the driver.

    Raises:
        DataError: the content is not an order.
    """
    return _read(_ORDER, content)


def read_report(content: Mapping[str, Any]) -> WorkerReport:
    """Validate a report from a worker.

    Raises:
        DataError: the content is not a report.
    """
    return _read(_REPORT, content)


def _read(adapter: TypeAdapter[Any], content: Mapping[str, Any]) -> Any:
    try:
        return adapter.validate_python(dict(content))
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"no message of a driver or worker: {reason}") from None
